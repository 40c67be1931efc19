"""One word of Hydra's command line as an `Override`.

    key=value       sets a key that is there, or chooses the file of a group
    +key=value      adds a key that is not there; `++key=value` sets it in either case
    ~key, ~key=1    removes it

A value is a quoted text, a number, `true`, `null`, a list `[a,b]`, a table `{a:1,b:2}`, or any other text of letters
and `/ - \\ + . $ % * @ ? | :`; a backslash escapes what else is meant literally. `${…}` stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_WORD = 64 * 1024
"""Characters of one word: the longest of a real script has some hundred."""
MAX_DEPTH = 32
"""Lists and tables in one another."""


class BadWord(ValueError):
    """A word that Hydra would refuse, or that starts several jobs; the text says why and what to write."""


class Act(StrEnum):
    """Effect of a word on its key."""

    SET = ""
    ADD = "+"
    FORCE = "++"
    REMOVE = "~"


@dataclass(frozen=True)
class Override:
    """One word. key: dotted, or a group with slashes. package: what follows its `@`. value: None where none is given.

    has_value: whether there is one; only a word that removes can lack it.
    """

    word: str
    act: Act
    key: str
    package: str | None
    value: Any
    has_value: bool = True

    @property
    def group_key(self) -> str:
        """The key with its package, as a list of defaults names the group."""
        return self.key if self.package is None else f"{self.key}@{self.package}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a dotted key."""
        return tuple(self.key.split("."))


_ID = r"[A-Za-z_][A-Za-z0-9_-]*"
_PART = r"(?:[A-Za-z_$][A-Za-z0-9_$-]*|0|[1-9](?:_?[0-9])*)"
_PACKAGE = rf"(?:{_PART}(?:\.{_PART})+|[A-Za-z_$][A-Za-z0-9_$-]*|)"
_WORD = re.compile(
    rf"(?P<act>~|\+\+?|)(?P<key>{_ID}(?:/{_ID})+|{_PACKAGE})(?:@(?P<package>{_PACKAGE}))?(?P<rest>=.*)?", re.DOTALL
)

_INTEGER = r"(?:0|[1-9](?:_?[0-9])*)"
_POINT = rf"(?:{_INTEGER}?\.[0-9](?:_?[0-9])*|{_INTEGER}\.)"
_NUMBER = re.compile(
    rf"(?P<float>[+-]?(?:(?:{_POINT}|{_INTEGER})[eE][+-]?[0-9](?:_?[0-9])*|{_POINT}|[iI][nN][fF]|[nN][aA][nN]))"
    rf"|(?P<int>[+-]?{_INTEGER})"
)
_TOKEN = re.compile(
    rf"(?P<interpolation>\$\{{[^}}]+\}})|(?P<escape>(?:\\[\\()\[\]{{}}:=, \t])+)|(?P<blank>[ \t]+)"
    rf"|(?P<number>{_NUMBER.pattern})|(?P<id>{_ID})|(?P<other>[/\-\\+.$%*@?|:])"
)
_FUNCTION = re.compile(rf"({_ID})[ \t]*\(")
_WORDS = {"true": True, "false": False, "null": None}


def parse_word(word: str) -> Override:
    """One word. Raises `BadWord`."""
    if len(word) > MAX_WORD:
        raise BadWord(f"a word of {len(word):,} characters: not an override")
    match = _WORD.fullmatch(word)
    if match is None or (match["rest"] is None and match["act"] != Act.REMOVE):
        raise BadWord("not of the form key=value, +key=value, ++key=value or ~key")
    act, rest = Act(match["act"]), match["rest"]
    value = None if rest is None else _Value(rest[1:]).whole()
    return Override(word, act, match["key"], match["package"], value, rest is not None)


class _Value:
    """Reads one value from left to right. at: the position of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._skip()

    def whole(self) -> Any:
        """The value that the whole text is; the empty text where nothing stands there."""
        if not self.text.strip(" \t"):
            return ""
        value = self._element(0)
        if self._next(","):
            jobs = 1 + self.text.count(",")
            raise BadWord(
                f"the commas start up to {jobs} jobs: choose one value, or write a list in brackets, a text in quotes"
            )
        if self.at < len(self.text):
            raise self._unexpected()
        return value

    def _element(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise BadWord(f"lists and tables more than {MAX_DEPTH} deep")
        if self._next("["):
            return self._several("]", lambda: self._element(depth + 1))
        if self._next("{"):
            return dict(self._several("}", lambda: self._pair(depth + 1)))
        if (match := _FUNCTION.match(self.text, self.at)) is not None:
            raise BadWord(f"`{match[1]}(…)` is a function of Hydra, which is not read: write its value")
        if self.text[self.at : self.at + 1] in ("'", '"'):
            return self._quoted()
        return self._primitive(":")

    def _several(self, end: str, item: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        self._skip()
        if not self._next(end):
            items.append(item())
            while self._next(","):
                items.append(item())
            if not self._next(end):
                raise self._unexpected()
        return items

    def _pair(self, depth: int) -> tuple[Any, Any]:
        key = self._primitive("")
        if not self._next(":"):
            raise self._unexpected()
        return key, self._element(depth)

    def _quoted(self) -> str:
        """A quoted text: backslashes count in pairs before a quote, and as they stand anywhere else."""
        quote, start, position = self.text[self.at], self.at, self.at + 1
        while position < len(self.text) and self.text[position] != quote:
            position += 2 if self.text[position] == "\\" else 1
        if position >= len(self.text):
            raise BadWord(f"a quote that is not closed: {self.text[start : start + 40]}")
        inner = self.text[start + 1 : position]
        self.at = position + 1
        self._skip()
        halved = re.sub(rf"(\\+){quote}", lambda match: match[1][: (len(match[1]) - 1) // 2] + quote, inner)
        return re.sub(r"\\+$", lambda match: match[0][: len(match[0]) // 2], halved)

    def _primitive(self, also: str) -> Any:
        """Text up to what separates values; alone, a number, a boolean or null is one. also: `:` where it is text."""
        tokens: list[tuple[str, str]] = []
        while (match := _TOKEN.match(self.text, self.at)) is not None:
            kind = str(match.lastgroup)
            kind = "number" if kind in ("int", "float") else kind
            if (match[0] == ":" or kind == "interpolation") and not also:
                break
            tokens.append((kind, match[0]))
            self.at = match.end()
        while tokens and tokens[-1][0] == "blank":
            tokens.pop()
        if not tokens:
            raise self._unexpected()
        if len(tokens) == 1:
            kind, text = tokens[0]
            if kind == "number":
                return _number(text)
            if kind == "id" and text.lower() in _WORDS:
                return _WORDS[text.lower()]
        return "".join(re.sub(r"\\(.)", r"\1", text) if kind == "escape" else text for kind, text in tokens)

    def _next(self, letter: str) -> bool:
        """Whether this letter is next; if so, it and the blanks after it are passed."""
        if not self.text.startswith(letter, self.at):
            return False
        self.at += 1
        self._skip()
        return True

    def _skip(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t") and self.at < len(self.text):
            self.at += 1

    def _unexpected(self) -> BadWord:
        if self.at >= len(self.text):
            return BadWord(f"`{self.text[:40]}` ends too early: a bracket is not closed, or a value is missing")
        return BadWord(
            f"`{self.text[self.at]}` cannot stand here unquoted: write key='…', in quotes for the shell too"
        )


def _number(text: str) -> int | float:
    plain = text.replace("_", "")
    match = _NUMBER.fullmatch(text)
    assert match is not None
    return int(plain) if match["int"] is not None else float(plain)
