"""Shell taken apart without a shell.

commands         the trace of a script: what bash prints of each command before it runs it (`set -x`)
script_of_text   the script itself, where it cannot be run: assignments, arrays, and the lines that start jobs
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from convert.launches.words import Launch, Script, launch_of

BEGIN, END = "\x1e", "\x1f"
"""Around process and line in front of each command: bytes that bash prints in no value."""
KNOWN_PS4 = r"PS4=$'\x1e''$BASHPID:${LINENO}'$'\x1f'"
MARKER = re.compile("\x01([^\x01\x02]*)\x02")
"""Stands for a value that is not known: the command that would print it (\\3 is a blank), or `$NAME`."""
_RECORD = re.compile(rf"(\d+):(\d+){END}(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"(?:(?:export|declare|typeset|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_CONDITIONS = ("[", "[[", "test", "case", "let")
_ESCAPES = {"a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


@dataclass(frozen=True)
class Command:
    """One command. line: of the script. text: as bash prints it, with all values."""

    line: int
    text: str

    @property
    def words(self) -> list[str]:
        """Its words without the quotes of the trace."""
        return unquoted(self.text)

    @property
    def assigned(self) -> tuple[str, str] | None:
        """The variable that it sets, and its value; None: it is another command."""
        match = _ASSIGNED.fullmatch(self.text)
        return None if match is None else (match[1], "".join(unquoted(match[2])))

    @property
    def is_condition(self) -> bool:
        """Whether it decides which commands follow."""
        return self.text.startswith("((") or (self.words[:1] != [] and self.words[0] in _CONDITIONS)

    def decided_by(self, held: Mapping[str, str]) -> str:
        """The values on which the condition depends. held: of variables, since bash prints `case` as written."""
        if self.words[0] != "case":
            return " ".join(self.words)
        named = [held.get(name, "") for name in re.findall(r"\$\{?(\w+)", self.text)]
        return " ".join([*named, *(f"\x01{command}\x02" for command in re.findall(r"\$\(([^()]*)\)", self.text))])

    def compared_with(self) -> list[str] | None:
        """Values with one of which the condition has another outcome than with any other; None: that is not known."""
        words = self.words
        operators = {"=", "==", "!="} & {*words}
        numeric = {"-eq", "-ne", "-lt", "-le", "-gt", "-ge"} & {*words}
        if words[0] not in ("[", "[[", "test") or {"=~", "<", ">"} & {*words}:
            return None
        values = [""]
        if operators:
            values += [word for word in words[1:] if word not in ("]", "]]") and MARKER.search(word) is None]
        if numeric:
            values += ["0", "1", "1000000", *(word for word in words if word.isdigit())]
        if words[0] == "[[" and operators and any(letter in word for word in words[2:] for letter in "*?["):
            return None
        return list(dict.fromkeys(value for value in values if value not in operators))


def commands(trace: str, ours: frozenset[str]) -> Iterator[Command]:
    """The commands of a script. ours: texts of the recorder's own."""
    for record in trace.split(BEGIN):
        match = _RECORD.fullmatch(record.removesuffix("\n"))
        if match is not None and match[3] not in ours and not match[3].startswith((r"printf '\1%s\2'", "local IFS=")):
            yield Command(int(match[2]), match[3])


def unquoted(text: str) -> list[str]:
    """The words of a command of a trace: quotes '…' and $'…', backslashes, blanks between words."""
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(text):
        letter = text[at]
        if letter in " \t\n":
            words += [] if word is None else [word]
            word, at = None, at + 1
            continue
        word = word or ""
        if letter == "'":
            end = text.find("'", at + 1)
            end = len(text) if end < 0 else end
            word, at = word + text[at + 1 : end], end + 1
        elif text.startswith("$'", at):
            part, at = _ansi(text, at + 2)
            word += part
        elif letter == "\\" and at + 1 < len(text):
            word, at = word + text[at + 1], at + 2
        else:
            word, at = word + letter, at + 1
    return words + ([] if word is None else [word])


def _ansi(text: str, at: int) -> tuple[str, int]:
    """The text of $'…' from behind its quote, and where it has ended."""
    part = ""
    while at < len(text) and text[at] != "'":
        if text[at] != "\\":
            part, at = part + text[at], at + 1
        elif (
            match := re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4}))").match(text, at)
        ) is not None:
            code = int(match[1], 8) if match[1] else int(match[2] or match[3], 16)
            part, at = part + chr(code), match.end()
        else:
            follows = text[at + 1 : at + 2]
            part, at = part + _ESCAPES.get(follows, follows), at + 2
    return part, at + 1


# ---- a script as a text ----

_ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)\+?=\((.*)\)\s*", re.DOTALL)
_USE = re.compile(r"\$\{(\w+)(?:\[@\]|\[\*\])?(:?-([^{}]*))?\}|\$(\w+)|\$\([^()]*\)|`[^`]*`|\$@|\$\*")


def script_of_text(path: Path, text: str, answers: Mapping[str, str], home: str) -> Script:
    """The jobs of a script, as far as its text says. answers: values of variables."""
    variables: dict[str, str] = {"HOME": home, **answers}
    arrays: dict[str, list[str]] = {}
    of_arrays: dict[str, str] = {}
    launches: list[Launch] = []
    asked: list[dict[str, str]] = []
    for number, line in _lines(text):
        if (array := _ARRAY.fullmatch(line)) is not None:
            words, unknown = _words(array[2], variables, arrays)
            arrays.setdefault(array[1], []).extend(words)
            of_arrays |= unknown
            continue
        if (assigned := _ASSIGNMENT.fullmatch(line)) is not None and " -m " not in line:
            words, unknown = _words(assigned[2], variables, arrays)
            if not unknown and assigned[1] not in answers:
                variables[assigned[1]] = " ".join(words)
            continue
        words, unknown = _words(line, variables, arrays)
        end = next(
            (i for i, word in enumerate(words) if word in ("|", "&", "&&", ";", ">", "2>&1", ">>")), len(words)
        )
        launch = launch_of(words[:end], str(path), number, path.absolute().parent)
        if launch is not None:
            launches.append(launch)
            asked.append(unknown | of_arrays)
    return Script(tuple(launches), tuple(asked))


def _lines(text: str) -> list[tuple[int, str]]:
    """Whole commands with the number of their first line: continued lines and brackets of arrays are joined."""
    lines: list[tuple[int, str]] = []
    number, whole = 0, ""
    for i, line in enumerate(text.splitlines(), 1):
        if not whole and line.lstrip().startswith("#"):
            continue
        number = number if whole else i
        whole += line.removesuffix("\\") + (" " if line.endswith("\\") else "\n")
        is_open = re.match(r"\s*\w+\+?=\(", whole) is not None and not re.search(r"\)\s*$", line)
        if not line.endswith("\\") and not is_open:
            lines.append((number, whole.strip("\n")))
            whole = ""
    return [*lines, (number, whole)] if whole else lines


def _words(
    text: str, variables: Mapping[str, str], arrays: Mapping[str, list[str]]
) -> tuple[list[str], dict[str, str]]:
    """The words of a command with known variables put in; and what is not known, by name."""
    unknown: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if name is None:
            if match[0] in ("$@", "$*"):
                return ""
            unknown[match[0].strip("$()`")] = f"the output of `{match[0].strip('$()`')}`"
            return match[0]
        if name in variables:
            return variables[name]
        if name in arrays:
            return shlex.join(arrays[name])
        if match[2] is not None:
            return match[3] or ""
        unknown[name] = f"argument {name} of the script" if name.isdigit() else "a variable that is not known"
        return match[0]

    uses = [match[0] for match in _USE.finditer(text)]
    for _ in uses[:1]:
        text = re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", text)
    try:
        return shlex.split(_USE.sub(value, text), comments=True), unknown
    except ValueError:
        return [], {}
