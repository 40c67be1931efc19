"""The declarative part of a reader: one `Rule` per key of the other system, and the engine that applies them.

    Rule(key, converter, default) ──for each leaf of the file──▶ Entry
                                  ──where the file is silent───▶ Addition, if their default differs from ours

A `Converter` says which of our keys a value goes to and how it changes; simple ones are made by the functions
below, computed ones by the decorator `computed`. Tables are data: the engine, the defaults, the suggestions for
unknown keys and the tables of `docs/migrate.md` all come from them.

A value that cannot be understood makes its entry `unknown` with the reason; it never stops the conversion.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from schema.interop.engine.keys import dotted
from schema.interop.engine.model import Addition, Outcome, Target
from schema.interop.engine.source import Source

_T = TypeVar("_T")


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""No value at all, where None would be the value null."""


WARMUP_NOTE = "step t of W has (t + 1)/W of the rate here, t/W there"
"""The deviation of our warm-up from all others': no batch is trained at a rate of 0."""


class BadValue(ValueError):
    """A value of the input that cannot be understood; the message says what was expected."""


@dataclass(frozen=True)
class KeyPath:
    """One leaf key as a `Converter` sees it. rest: what a wildcard row matched, dotted. line: from 1."""

    key: str
    value: Any
    rest: str = ""
    line: int | None = None


@dataclass(frozen=True)
class Result:
    """What a `Converter` decides; see `Entry`."""

    outcome: Outcome
    targets: tuple[Target, ...] = ()
    note: str = ""


def mapped(*targets: Target, note: str = "") -> Result:
    """The value goes to these keys of ours."""
    return Result(Outcome.MAPPED, targets, note)


def implicit(note: str) -> Result:
    """Nothing needs to be written; the note says why."""
    return Result(Outcome.IMPLICIT, (), note)


def no_counterpart(reason: str) -> Result:
    """There is no counterpart. Only with a reason from `schema.interop.engine.unsupported`."""
    return Result(Outcome.NONE, (), reason)


def unsupported(reason: str) -> Result:
    """There is no counterpart, and what is trained depends on it: the key goes into `[unsupported]`."""
    return Result(Outcome.UNSUPPORTED, (), reason)


def unknown(note: str) -> Result:
    """Not recognised."""
    return Result(Outcome.UNKNOWN, (), note)


@dataclass(frozen=True)
class Converter:
    """What happens to a value. ours: keys that it may write. words: how the value changes, for the docs."""

    run: Callable[[ConversionContext, KeyPath], Result]
    ours: tuple[str, ...] = ()
    words: str = ""


@dataclass(frozen=True)
class Rule:
    """One key of the other system.

    key: dotted; `a.b.*` stands for everything below a.b. how: what happens to its value. default: their
    value where the file is silent (ABSENT: nothing is written then). also: other spellings of the same key,
    older or newer. wins: those of them that count before the key itself where they are written. when: returns
    the reason why the key has no effect in this file, "" if it has one; such a key is `implicit` and its
    default is not written. words: overrides how.words in the docs.
    """

    key: str
    converter: Converter
    default: Any = ABSENT
    also: tuple[str, ...] = ()
    when: Callable[[ConversionContext], str] | None = None
    words: str = ""
    wins: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The key and its other spellings, in the order in which they count."""
        return (*self.wins, self.key, *(name for name in self.also if name not in self.wins))


class ConversionContext:
    """The values of one file, as the functions of a reader ask for them.

    Every question names a key of the other system by its row's main spelling; where the file is silent (or,
    with `or_null`, says null) the row's default answers.
    """

    def __init__(self, system: str, title: str, kind: str, source: Source, rules: Sequence[Rule]) -> None:
        self.system, self.title, self.kind, self.source, self.rules = system, title, kind, source, rules
        self.by_key = {spelling: rule for rule in rules for spelling in rule.spellings}
        self.values: dict[str, Any] = {}
        self.additions: list[Addition] = []
        self.warnings: list[str] = []
        self.strangers = 0  # keys that no row knows

    def has(self, key: str) -> bool:
        """Whether the file has this leaf, in any spelling; null counts."""
        return self._written(key) is not ABSENT

    def get(self, key: str, default: Any = ABSENT) -> Any:
        """The value in the file, else `default`, else the row's default, else None."""
        value = self._written(key)
        if value is not ABSENT:
            return value
        if default is not ABSENT:
            return default
        rule = self.by_key.get(key)
        return None if rule is None or rule.default is ABSENT else rule.default

    def below(self, prefix: str) -> dict[str, Any]:
        """The leaves of the file below a table: rest of the key -> value."""
        start = prefix + "."
        return {key[len(start) :]: value for key, value in self.values.items() if key.startswith(start)}

    def integer(self, key: str, default: int | None = None) -> int | None:
        """The value as a whole number; the row's default or `default` where it is none."""
        return self._typed(key, as_integer, default)

    def number(self, key: str, default: float | None = None) -> float | None:
        """The value as a number; the row's default or `default` where it is none."""
        return self._typed(key, as_number, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """The value as true or false; the row's default or `default` where it is neither."""
        return bool(self._typed(key, as_flag, default))

    def text(self, key: str, default: str = "") -> str:
        """The value as text; the row's default or `default` where it is null or no text."""
        value = self._typed(key, as_text, default)
        return default if value is None else value

    def add(self, key: str, value: Any, note: str) -> None:
        """Write one of our keys that follows from how the other system works, not from a key of the file."""
        self.additions.append(Addition(key, value, note))

    def warn(self, text: str) -> None:
        """Tell the reader something that no single entry says; once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def _written(self, key: str) -> Any:
        rule = self.by_key.get(key)
        spellings = (key,) if rule is None else rule.spellings
        found = [self.values[name] for name in spellings if name in self.values]
        return next((value for value in found if value is not None), found[0] if found else ABSENT)

    def _typed(self, key: str, read: Callable[[Any], _T], default: _T | None) -> _T | None:
        rule = self.by_key.get(key)
        own = default if rule is None or rule.default is ABSENT else rule.default
        value = self._written(key)
        if value is ABSENT or value is None:
            value = own
        if value is None:
            return None
        try:
            return read(value)
        except BadValue:
            return None if own is None else read(own)


# --- values -------------------------------------------------------------------------------------------------


def as_integer(value: Any) -> int:
    """A whole number; 8.0 and "8" are 8. Raises BadValue."""
    if isinstance(value, str):
        value = _number_in(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise BadValue(f"expected a whole number, got {shown(value)}")
    return value


def as_number(value: Any) -> float:
    """A finite number; integers stay integers, "1e-6" is one. Raises BadValue."""
    if isinstance(value, str):
        value = _number_in(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadValue(f"expected a number, got {shown(value)}")
    if not abs(value) <= 1e300:  # NaN is not either
        raise BadValue(f"expected a finite number, got {shown(value)}")
    return value


def _number_in(text: str) -> Any:
    try:
        return int(text) if len(text) < 20 else float(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text


def as_flag(value: Any) -> bool:
    """True or false, also as text of either case. Raises BadValue."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise BadValue(f"expected true or false, got {shown(value)}")
    return value


def as_text(value: Any) -> str:
    """Text; a number is taken as it is written. Raises BadValue."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValue(f"expected text, got {shown(value)}")
    return str(value)


def as_texts(value: Any) -> list[str]:
    """A list of texts; one text is a list of one. Raises BadValue."""
    if isinstance(value, list):
        return [as_text(item) for item in value]
    return [as_text(value)]


def as_path(value: Any) -> str:
    """A path or a name on the hub; a leading `~`, which our loader refuses, is written out."""
    text = as_text(value)
    return os.path.expanduser(text) if text.startswith("~") else text


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value) if not isinstance(value, dict) else "a table"
    return text if len(text) <= 60 else text[:57] + "..."


# --- hows ---------------------------------------------------------------------------------------------------


def computed(*ours: str, words: str) -> Callable[[Callable[[ConversionContext, KeyPath], Result]], Converter]:
    """Make a `Converter` of a function; `words` say for the docs how the value changes."""
    return lambda function: Converter(function, ours, words)


def _converted(ours: str, read: Callable[[Any], Any], words: str, null: str) -> Converter:
    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit(null)
        return mapped((ours, read(leaf.value)))

    return Converter(run, (ours,), words)


def number(ours: str, words: str = "") -> Converter:
    """The number as it is."""
    return _converted(ours, as_number, words, "null: the default")


def integer(ours: str, words: str = "") -> Converter:
    """The whole number as it is."""
    return _converted(ours, as_integer, words, "null: the default")


def flag(ours: str, words: str = "") -> Converter:
    """True or false as it is."""
    return _converted(ours, as_flag, words, "null: the default")


def text(ours: str, words: str = "") -> Converter:
    """The text as it is."""
    return _converted(ours, as_text, words, "null: the default")


def texts(ours: str, words: str = "a single value becomes a list of one") -> Converter:
    """A list of texts."""
    return _converted(ours, as_texts, words, "null: none")


def path(ours: str, words: str = "") -> Converter:
    """A path or a name on the hub; `~` is written out, and the note says so."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: the default")
        value = as_path(leaf.value)
        note = "`~` is written out, which only a shell would expand" if value != leaf.value else ""
        return mapped((ours, value), note=note)

    return Converter(run, (ours,), words or "`~` is written out")


def choice(ours: str, table: Mapping[Any, Any], words: str = "", note: str = "") -> Converter:
    """One of a closed set of names, in our spelling."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        value = leaf.value
        if isinstance(value, list | dict) or value not in table:
            known = ", ".join(str(name) for name in table)
            raise BadValue(f"expected one of {known}, got {shown(value)}")
        return mapped((ours, table[value]), note=note)

    changes = ", ".join(
        f"`{theirs}` → `{our}`" for theirs, our in table.items() if theirs != our and our is not None
    )
    return Converter(run, (ours,), words or changes)


def always(reason: str) -> Converter:
    """Whatever the value is, it needs nothing here."""
    return Converter(lambda context, leaf: implicit(reason), (), reason)


def unless(neutral: Sequence[Any], reason: str, converter: Converter) -> Converter:
    """`implicit` for values that ask for nothing, else `how`."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        same = any(leaf.value == value and type(leaf.value) is type(value) for value in neutral)
        return implicit(reason) if same else converter.run(context, leaf)

    return Converter(run, converter.ours, converter.words or reason)


@dataclass(frozen=True)
class Reader:
    """A system whose files can be read.

    system: its name on the command line. title: its name in sentences. kinds: kind -> what the file is.
    detect: the kind of a source, or None where it is not of this system. signs: keys that `detect` looks for,
    for the error message. rules: the table of one kind. finish: what follows from the system as such, after
    all rules; it calls `ConversionContext.add` and `warn`. artefacts: keys that do not belong to the system but
    stand in published pages, with what is meant (key -> real key or reason).
    """

    system: str
    title: str
    kinds: Mapping[str, str]
    detect: Callable[[Source], str | None]
    signs: tuple[str, ...]
    rules: Callable[[str], Sequence[Rule]]
    finish: Callable[[ConversionContext], None] = lambda context: None
    artefacts: Callable[[str, Any], Result | None] = lambda key, value: None
    interpolates: bool = True
    prose: tuple[str, ...] = field(default_factory=tuple)


def defaults_of(rules: Sequence[Rule]) -> dict[str, Any]:
    """Their defaults by key, for references to keys that the file leaves out."""
    return {
        spelling: rule.default for rule in rules if rule.default is not ABSENT for spelling in rule.spellings
    }


def leaf_key(path: tuple[str, ...]) -> str:
    """The dotted key of a leaf."""
    return dotted(path)
