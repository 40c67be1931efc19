"""The declarative part of a reader: one `Rule` per key of the other system, and the engine that applies them.

    Rule(key, converter, default) ──for each leaf of the file──▶ Entry
                                  ──where the file is silent───▶ Addition, if their default differs from ours

A `Converter` says which of our keys a value goes to and how it changes; simple ones are made by the functions
below, computed ones by the decorator `computed`. Tables are data: the engine, the defaults, the suggestions for
unknown keys and the tables of `docs/migrate.md` all come from them.

A value that cannot be understood makes its entry `unknown` with the reason; it never stops the conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from convert.engine import values
from convert.engine.keys import dotted, split_key
from convert.engine.model import Addition, Result, implicit, mapped
from convert.engine.source import Source
from convert.engine.unsupported import ClosedList

_T = TypeVar("_T")


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""No value at all, where None would be the value null."""


HYDRA_KEYS = ("_recursive_", "_convert_", "_partial_", "_args_")
"""Keys that tell Hydra how to make an object of a table, next to `_target_`, its class."""

WARMUP_NOTE = "step t of W has (t + 1)/W of the rate here, t/W there"
"""The deviation of our warm-up from all others': no batch is trained at a rate of 0."""


@dataclass(frozen=True)
class KeyPath:
    """One leaf key as a `Converter` sees it.

    rest: what a wildcard rule matched, dotted. line: from 1. ours: the keys that the row of the table lets it write.
    """

    key: str
    value: Any
    rest: str = ""
    line: int | None = None
    ours: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    def to(self, *written: Any, note: str = "") -> Result:
        """These values, written to the first of our keys of the row."""
        return mapped(*zip(self.ours, written, strict=False), note=note)


Run: TypeAlias = "Callable[[ConversionContext, KeyPath], Result]"
When: TypeAlias = "Callable[[ConversionContext], str]"
"""Why a key has no effect in a file; "" if it has one."""


@dataclass(frozen=True)
class Converter:
    """The way of a value to ours. ours: keys that it may write. words: how the value changes, for the docs."""

    run: Run
    ours: tuple[str, ...] = ()
    words: str = ""


@dataclass(frozen=True)
class Rule:
    """One key of the other system.

    key: dotted; `a.b.*` stands for everything below a.b. default: their value where the file is silent (ABSENT:
    nothing is written then). follows: the key whose value counts then instead. also: other spellings, older or
    newer. wins: those of them that count before the key itself where they are written. when: such a key is
    `implicit`, and its default is not written. words: overrides converter.words in the docs.
    """

    key: str
    converter: Converter
    default: Any = ABSENT
    also: tuple[str, ...] = ()
    when: When | None = None
    words: str = ""
    wins: tuple[str, ...] = ()
    follows: str = ""

    @property
    def spellings(self) -> tuple[str, ...]:
        """The key and its other spellings, in the order in which they count."""
        return (*self.wins, self.key, *(name for name in self.also if name not in self.wins))


def needs(switch: str, otherwise: str) -> When:
    """A `when`: the key has no effect, for this reason, unless that switch of the file is true."""
    return lambda context: "" if context.flag(switch) else otherwise


class ConversionContext:
    """The values of one file, as the functions of a reader ask for them.

    Every question names a key of the other system by its row's main spelling; where the file is silent (or,
    with `or_null`, says null) the rule's default answers.
    """

    def __init__(self, reader: Reader, kind: str, source: Source, rules: Sequence[Rule]) -> None:
        self.title, self.unsupported = reader.title, reader.unsupported
        self.kind, self.source, self.rules = kind, source, rules
        self.by_key = {spelling: rule for rule in rules for spelling in rule.spellings}
        self.values: dict[str, Any] = {}
        self.additions: list[Addition] = []
        self.warnings: list[str] = []
        self.strangers = 0  # keys that no rule knows
        self.helpers: frozenset[str] = frozenset()  # keys at the top that others of the file refer to

    def has(self, key: str) -> bool:
        """Whether the file has this leaf, in any spelling; null counts."""
        return self._written(key) is not ABSENT

    def get(self, key: str, default: Any = ABSENT) -> Any:
        """The value in the file, else `default`, else the rule's default, else None."""
        value = self._written(key)
        if value is not ABSENT:
            return value
        if default is not ABSENT:
            return default
        rule = self.by_key.get(key)
        rule_default = ABSENT if rule is None else self.default_of(rule)
        return None if rule_default is ABSENT else rule_default

    def default_of(self, rule: Rule) -> Any:
        """The value of a key where the file is silent; ABSENT where there is none."""
        return self.get(rule.follows) if rule.follows else rule.default

    def below(self, prefix: str) -> dict[str, Any]:
        """The leaves of the file below a table: rest of the key -> value."""
        start = prefix + "."
        return {key[len(start) :]: value for key, value in self.values.items() if key.startswith(start)}

    def integer(self, key: str, default: int | None = None) -> int | None:
        """The value as a whole number; the rule's default or `default` where it is none."""
        return self._typed(key, values.integer, default)

    def number(self, key: str, default: float | None = None) -> float | None:
        """The value as a number; the rule's default or `default` where it is none."""
        return self._typed(key, values.number, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """The value as true or false; the rule's default or `default` where it is neither."""
        return bool(self._typed(key, values.flag, default))

    def text(self, key: str, default: str = "") -> str:
        """The value as text; the rule's default or `default` where it is null or no text."""
        value = self._typed(key, values.text, default)
        return default if value is None else value

    def add(self, key: str, value: Any, note: str) -> None:
        """Write one of our keys that follows from how the other system works, not from a key of the file."""
        self.additions.append(Addition(key, value, note))

    def rule_of(self, key: str) -> tuple[Rule | None, str]:
        """The rule of a key and what its wildcard stands for; the longest wildcard wins."""
        if key in self.by_key:
            return self.by_key[key], ""
        parts = split_key(key)
        for end in range(len(parts) - 1, 0, -1):
            rule = self.by_key.get(f"{dotted(parts[:end])}.*")
            if rule is not None:
                return rule, dotted(parts[end:])
        return None, ""

    def warn(self, text: str) -> None:
        """Tell the reader something that no single entry says; once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def _written(self, key: str) -> Any:
        rule = self.by_key.get(key)
        spellings = (key,) if rule is None else rule.spellings
        written = [self.values[name] for name in spellings if name in self.values]
        return next((value for value in written if value is not None), written[0] if written else ABSENT)

    def _typed(self, key: str, read: Callable[[Any], _T], default: _T | None) -> _T | None:
        rule = self.by_key.get(key)
        own = ABSENT if rule is None else self.default_of(rule)
        own = default if own is ABSENT else own
        value = self._written(key)
        if value is ABSENT or value is None:
            value = own
        if value is None:
            return None
        try:
            return read(value)
        except values.BadValue:
            return None if own is None else read(own)


def computed(*ours: str, words: str, null: str = "") -> Callable[[Run], Converter]:
    """Make a `Converter` of a function; `words` say for the docs how the value changes.

    null: why a null needs nothing here; the function then never sees one.
    """

    def make(function: Run) -> Converter:
        def run(context: ConversionContext, leaf: KeyPath) -> Result:
            return implicit(null) if null and leaf.value is None else function(context, replace(leaf, ours=ours))

        return Converter(run, ours, words)

    return make


@dataclass(frozen=True)
class Reader:
    """A system whose files can be read.

    system: its name on the command line. title: its name in sentences. kinds: kind -> what the file is.
    unsupported: what of it has no counterpart.
    detect: the kind of a source, or None where it is not of this system. signs: keys that `detect` looks for,
    for the error message. own: those of them that no other system has: one of them decides between systems.
    rules: the table of one kind. finish: what follows from the system as such, after
    all rules; it calls `ConversionContext.add` and `warn`. artefacts: keys that do not belong to the system but
    stand in published pages, with what is meant (key -> real key or reason). own_code: what becomes of an unknown key
    that code of the user's may read; None: nothing does.
    """

    system: str
    title: str
    kinds: Mapping[str, str]
    unsupported: ClosedList
    detect: Callable[[Source], str | None]
    signs: tuple[str, ...]
    rules: Callable[[str], Sequence[Rule]]
    finish: Callable[[ConversionContext], None] = lambda context: None
    artefacts: Callable[[str, Any], Result | None] = lambda key, value: None
    own_code: Callable[[ConversionContext, KeyPath], Result | None] = lambda *_: None
    interpolates: bool = True
    prose: tuple[str, ...] = field(default_factory=tuple)
    own: tuple[str, ...] = ()


def defaults_of(rules: Sequence[Rule]) -> dict[str, Any]:
    """Their defaults by key, for references to keys that the file leaves out."""
    return {spelling: rule.default for rule in rules if rule.default is not ABSENT for spelling in rule.spellings}
