"""Rules of conversion as rows of a text file, a line for each key; what decides something is a function in Python.

    == critic                                   begins a part of the file, by its name
    [critic] when no_critic                     the keys that follow stand below this one, under this condition
    ppo_epochs = 1      integer(critic.mu_iterations)                 key = default, and its converter
    shuffle/shuffled    flag($ours.mini_batch_shuffle)                another spelling; $ours is a name's text
    lr start.{lr min}   lr(critic.optm_lr) when warm | divided by 2   three keys; a condition; words for the docs
    loss = @actor.loss  choice(critic.loss_type, LOSSES)              the default is the value of another key
    @ checkpoint                                                      the rows of another part, below this table
    @ budget(critic)                                                  the rules that a function returns
    $loss = policy_loss                         before the first part: a text that `$loss` stands for

Two blanks or more stand before the converter. A line that begins with two blanks continues the one before it, one
that begins with four begins the converter. A value is written as in Python, a key of ours without quotes. A
converter is called by its name, which is looked up, with or without a `_` before it, in what `rules` is given, in
the names of the table and in `convert.engine.to`. A function that makes a `Converter` gets the arguments. A
function of `(context, leaf)` gets a key and its value, and its arguments in the row are the keys of ours that it
may write (`leaf.ours`, `leaf.to`); with `null="…"` it never gets a null. A row of a closed list has only keys and
the reason. Whatever is wrong with a row is a TableError that names file and line.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

from convert.engine import to, values
from convert.engine.rules import ABSENT, Converter, Rule, computed

_ROW = re.compile(
    r"(?P<keys>.+?)(?: = (?P<default>.+?))?(?: {2,}(?P<converter>[^|].*?))?(?: when (?P<when>\w+))?"
    r"(?:(?:^| +)\| (?P<words>.*))?"
)


class TableError(Exception):
    """A row of a table that cannot be understood; the message has file and line."""


@dataclass(frozen=True)
class Row:
    """One line of a table. keys: dotted and whole, each with its other spellings; the rest as it is written."""

    place: str
    keys: tuple[tuple[str, ...], ...]
    default: str | None
    converter: str | None
    when: str | None
    words: str


class Names:
    """The meaning of the names of a part: that of the first of the sources, objects or mappings, that has one.

    constants: the texts that the file names, which come first where a row is completed. used: gets every name that
    a row has.
    """

    def __init__(self, constants: Mapping[str, str], used: set[str], *sources: Any) -> None:
        self.constants, self.used, self.sources = constants, used, sources

    def find(self, *spellings: str) -> Any:
        """The value of a name in one of its spellings; raises LookupError where no source has it."""
        self.used.add(spellings[0])
        for source in self.sources:
            for name in spellings:
                if isinstance(source, Mapping) and name in source:
                    return source[name]
                if not isinstance(source, Mapping) and hasattr(source, name):
                    return getattr(source, name)
        raise LookupError(f"`{spellings[0]}` is not known")

    def __getitem__(self, name: str) -> str:
        self.used.add(name)
        value = self.constants[name] if name in self.constants else self.find(name, f"_{name}")
        return " ".join(value) if isinstance(value, tuple) else str(value)


class Table:
    """One file of rows. names: what its parts share, next to the converters of `convert.engine.to`."""

    def __init__(self, path: Path, *names: Any) -> None:
        self.parts: dict[str, list[tuple[str, str]]] = {"": []}
        lines = self.parts[""]
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            if line.startswith("== "):
                lines = self.parts.setdefault(line[3:].strip(), [])
            elif line.startswith("  ") and lines:
                place, before = lines[-1]
                lines[-1] = (place, before + ("  " if line.startswith("    ") else " ") + line.strip())
            elif line.strip() and not line.startswith("#"):
                lines.append((f"{path.parent.name}/{path.name}:{number}", line.rstrip()))
        constants = (text.partition(" = ") for _, text in self.parts.pop(""))
        self.constants = {name.removeprefix("$"): text for name, _, text in constants}
        self.shared = (*names, vars(to), vars(values))
        self.used: set[str] = set()

    def _known(self, names: Iterable[Any]) -> Names:
        return Names(self.constants, self.used, *names, *self.shared)

    def rules(self, part: str, *names: Any) -> tuple[Rule, ...]:
        """The rules of a part, in the order of its rows. Raises TableError."""
        known = self._known(names)
        return tuple(rule for row in self._rows(part, known) for rule in self._rules(row, known))

    def reasons(self, part: str, *names: Any) -> dict[str, str]:
        """The words of each key of a part. Raises TableError."""
        return {keys[0]: row.words for row in self._rows(part, self._known(names)) for keys in row.keys}

    def neutral(self, part: str, *names: Any) -> dict[str, tuple[Any, ...]]:
        """The values behind the `=` of each key of a part, () without. Raises TableError."""
        known = self._known(names)
        return {
            keys[0]: () if row.default is None else self._at(row, f"({row.default},)", known)
            for row in self._rows(part, known)
            for keys in row.keys
        }

    def _rows(self, part: str, names: Names, prefix: str = "", when: str | None = None) -> Iterator[Row]:
        """The rows of a part and of those that it includes, below a prefix."""
        inside, condition = prefix, when
        self.used.add(part)
        for place, line in self.parts[part]:
            try:
                text = Template(line).substitute(names)  # type: ignore[arg-type]
            except (LookupError, ValueError) as error:
                raise TableError(f"{place}: {error}") from None
            header = re.fullmatch(r"\[(\S*)\](?: when (\w+))?", text)
            if header:
                inside, condition = ".".join(filter(None, (prefix, header[1]))), header[2] or when
            elif text.startswith("@ ") and text[2:] in self.parts:
                yield from self._rows(text[2:], names, inside, condition)
            elif text.startswith("@ "):
                yield Row(place, (), None, text[2:], None, "")
            else:
                yield _row(place, text, inside, condition)

    def _rules(self, row: Row, names: Names) -> tuple[Rule, ...]:
        if row.converter is None:
            raise TableError(f"{row.place}: a row needs a converter, after two blanks")
        converter = self._at(row, row.converter, names)
        if not row.keys:
            assert isinstance(converter, tuple), f"{row.place}: {row.converter} returns no rules"
            return converter
        if _is_run(converter):
            converter = computed(words=row.words)(converter)
        if not isinstance(converter, Converter):
            raise TableError(f"{row.place}: expected a converter, got {row.converter}")
        converter = replace(converter, words=row.words) if row.words else converter
        default = row.default or ""
        follows = default[1:] if default.startswith("@") else ""
        value = self._at(row, default, names) if default and not follows else ABSENT
        when = self._at(row, row.when, names) if row.when else None
        return tuple(Rule(key, converter, value, tuple(also), when, follows=follows) for key, *also in row.keys)

    def _at(self, row: Row, text: str, names: Names) -> Any:
        """The value of a text of a row."""
        try:
            return self._value(ast.parse(text.strip(), mode="eval").body, names)
        except (SyntaxError, LookupError, ValueError, TypeError) as error:
            raise TableError(f"{row.place}: {getattr(error, 'msg', error)}, in `{text.strip()}`") from error

    def _value(self, node: ast.expr, names: Names) -> Any:
        match node:
            case ast.Name(id=name):
                return names.find(name, f"_{name}")
            case ast.Attribute():
                return ast.unparse(node)
            case ast.List(elts=items):
                return [self._value(item, names) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self._value(item, names) for item in items)
            case ast.Call(func=called, args=args, keywords=keywords):
                function = self._value(called, names)
                arguments = [self._value(argument, names) for argument in args]
                named = {str(keyword.arg): self._value(keyword.value, names) for keyword in keywords}
                if _is_run(function):
                    return computed(*arguments, words="", **named)(function)
                return function(*arguments, **named)
            case _:
                return ast.literal_eval(node)


def _row(place: str, text: str, prefix: str, when: str | None) -> Row:
    match = _ROW.fullmatch(text)
    if match is None:
        raise TableError(f"{place}: expected `key = default  converter | words`, got `{text}`")
    start = f"{prefix}." if prefix else ""
    spelled = tuple(tuple(f"{start}{name}" for name in key.split("/")) for key in _expanded(match["keys"]))
    return Row(place, spelled, match["default"], match["converter"], match["when"] or when, match["words"] or "")


def _expanded(keys: str) -> Iterator[str]:
    """The keys with blanks between them; `a.{b c}` is `a.b a.c`."""
    for word in re.findall(r"(?:[^\s{]|\{[^}]*\})+", keys):
        parts = re.split(r"\{([^}]*)\}", word)  # every second one stood in braces
        yield from map("".join, product(*(part.split() if n % 2 else [part] for n, part in enumerate(parts))))


def _is_run(function: Callable[..., Any]) -> bool:
    """Whether it is a function of a reader that converts one value."""
    return inspect.isroutine(function) and list(inspect.signature(function).parameters) == ["context", "leaf"]
