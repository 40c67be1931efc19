"""The simple converters: `to.flag("train.compile")` writes a value to that key of ours, as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.engine import values
from convert.engine.model import Result, Target, implicit, mapped
from convert.engine.rules import ConversionContext, Converter, KeyPath, computed
from convert.engine.values import BadValue, shown

_DEFAULT = "null: the default"


def converted(ours: str, read: Callable[[Any], Any], words: str = "", null: str = _DEFAULT) -> Converter:
    """The value that `read` makes of theirs. null: why a null needs nothing here; "": `read` judges it too."""
    return computed(ours, words=words, null=null)(lambda context, leaf: mapped((ours, read(leaf.value))))


def _as_it_is(read: Callable[[Any], Any]) -> Callable[..., Converter]:
    def make(ours: str, words: str = "", null: str = _DEFAULT) -> Converter:
        return converted(ours, read, words, null)

    return make


number, integer, flag, text = map(_as_it_is, (values.number, values.integer, values.flag, values.text))
"""Converters of a value that goes to a key of ours as it is; see `converted`."""


def path(ours: str) -> Converter:
    """A path or a name on the hub; `~` is written out, and the note says so."""

    @computed(ours, words="`~` is written out", null=_DEFAULT)
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        value = values.path(leaf.value)
        note = "`~` is written out, which only a shell would expand" if value != leaf.value else ""
        return mapped((ours, value), note=note)

    return convert


def choice(ours: str, table: Mapping[Any, Any], words: str = "", null: str = "") -> Converter:
    """One of a closed set of names, in our spelling."""
    changes = ", ".join(f"`{theirs}` → `{our}`" for theirs, our in table.items() if theirs != our and our is not None)
    return converted(ours, lambda value: table[values.one_of(value, table)], words or changes, null)


def clip_sides(value: Any, low: str = "", high: str = "") -> Result:
    """The sides of a clip of a ratio, max(ρ, 1 − value) and min(ρ, 1 + value), to these keys of ours.

    A ratio is positive: from 1 on the lower side bounds nothing, which is −1 here. Raises BadValue below 0.
    """
    bound = values.number(value)
    if bound < 0:
        raise BadValue(f"expected at least 0, got {shown(value)}")
    is_open = bool(low) and bound >= 1
    note = f"the lower side, 1 − {bound:g}, bounds no ratio: it is open" if is_open else ""
    sides = ((low, -1.0 if is_open else bound), (high, bound))
    return mapped(*((key, side) for key, side in sides if key), note=note)


def switch(*targets: Target, words: str = "", off: str = "false: off") -> Converter:
    """True writes these; for false and null nothing needs to be written."""

    @computed(*(key for key, _ in targets), words=words, null=off)
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        return mapped(*targets) if values.flag(leaf.value) else implicit(off)

    return convert


def always(reason: str) -> Converter:
    """Whatever the value is, it needs nothing here."""
    return Converter(lambda context, leaf: implicit(reason), (), reason)


def unless(neutral: Sequence[Any], reason: str, converter: Converter) -> Converter:
    """`implicit` for values that ask for nothing, else `how`."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        same = any(leaf.value == value and type(leaf.value) is type(value) for value in neutral)
        return implicit(reason) if same else converter.run(context, leaf)

    return replace(converter, run=run, words=converter.words or reason)


def only(condition: Callable[[ConversionContext], Any], otherwise: str, converter: Converter) -> Converter:
    """The converter where a condition holds; `implicit` elsewhere."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        return converter.run(context, leaf) if condition(context) else implicit(otherwise)

    return replace(converter, run=run)


def given(condition: Callable[[ConversionContext], bool], otherwise: str, converter: Converter) -> Converter:
    """The converter where a condition holds; `implicit` elsewhere, and for null, which asks for nothing."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        has_effect = leaf.value is not None and condition(context)
        return converter.run(context, leaf) if has_effect else implicit(otherwise)

    return replace(converter, run=run)
