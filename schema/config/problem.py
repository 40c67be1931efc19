"""Faults of a configuration: one `Problem` per fault, a `ConfigError` for all of them together."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from schema.config.secrets import masked
from schema.util.text import CONTROL

KeyPath = tuple[str | int, ...]

MOST_SHOWN = 100
"""Problems of one configuration: more are the same mistake over and over, or the wrong file. They are counted."""
MOST_TEXT = 2000
"""Characters of a text in a problem: a value can be as long as the file."""
MOST_ITEMS = 100
"""Items of a value in a problem."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def quote(text: str) -> str:
    """A TOML string. JSON's escapes are TOML's; what a terminal would obey is escaped too."""
    return CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", json.dumps(text, ensure_ascii=False))


def format_key(path: KeyPath) -> str:
    """A key as the user would write it: `train.optm_betas[1]`, `custom."my key"`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if _BARE_KEY.fullmatch(part) else quote(part)
            text += f".{name}" if text else name
    return text


def shortened(value: Any) -> Any:
    """A value as far as it helps whoever has to find it: long texts and lists are cut."""
    if isinstance(value, str) and len(value) > MOST_TEXT:
        return f"{value[: MOST_TEXT - 300]} … {value[-300:]}"
    if isinstance(value, list):
        return [shortened(item) for item in value[:MOST_ITEMS]]
    if isinstance(value, dict):
        return {shortened(key): shortened(item) for key, item in islice(value.items(), MOST_ITEMS)}
    return value


@dataclass(frozen=True)
class Problem:
    """One fault.

    key: dotted key, "" when the fault is of the file as a whole. message: what is wrong. value: what was
    found. hint: what to do. related: other dotted keys that take part in the fault.
    file, line, column (from 1): where the key stands, or else the table that should hold it.

    What is shown to people holds no credentials: in addresses, and below keys that sound secret, they are masked.
    Texts and values that are too long are cut.
    """

    key: str
    message: str
    value: Any = None
    hint: str = ""
    file: str | None = None
    line: int | None = None
    column: int | None = None
    related: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        own = {
            "key": self.key,
            "message": masked(self.message),
            "value": masked(self.value, self.key.rpartition(".")[2]),
            "hint": masked(self.hint),
            "file": masked(self.file),
        }
        for name, value in own.items():
            object.__setattr__(self, name, shortened(value))

    @property
    def where(self) -> str:
        """`file:line:column`, as much of it as is known."""
        parts = [str(part) for part in (self.file, self.line, self.column) if part is not None]
        return ":".join(parts)

    def at(self, file: str | None, line: int | None = None, column: int | None = None) -> Problem:
        """The same fault with its place."""
        return replace(self, file=file, line=line, column=column)

    def render(self) -> str:
        """`file:line:column: key: message`, and the remedy indented below."""
        head = ": ".join(part for part in (self.where, self.key, self.message) if part)
        return f"{head}\n    {self.hint}" if self.hint else head


@dataclass(frozen=True)
class Absent(Problem):
    """A file or directory that is not on this machine; where the job runs it may be."""


class ConfigError(ValueError):
    """The configuration cannot be used; `problems` holds what is wrong with it, in file order.

    They are MOST_SHOWN at most; `more` is how many others there are.
    """

    def __init__(self, problems: Sequence[Problem], unlisted: int = 0) -> None:
        if not problems:
            raise ValueError("a ConfigError needs at least one problem")
        self.problems = tuple(problems[:MOST_SHOWN])
        self.more = unlisted + len(problems) - len(self.problems)
        super().__init__(self.render())

    @property
    def count(self) -> int:
        """Problems altogether."""
        return len(self.problems) + self.more

    def render(self) -> str:
        """Plain text, one block per problem."""
        blocks = [problem.render() for problem in self.problems]
        return "\n".join([*blocks, f"and {self.more:,} more"] if self.more else blocks)
