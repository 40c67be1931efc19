"""The simple converters: `to.flag("train.compile")` writes a value to that key of ours, as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schema.interop.engine import values
from schema.interop.engine.model import Result, implicit, mapped
from schema.interop.engine.rules import ConversionContext, Converter, KeyPath
from schema.interop.engine.values import BadValue, shown


def _converted(ours: str, read: Callable[[Any], Any], words: str, null: str) -> Converter:
    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit(null)
        return mapped((ours, read(leaf.value)))

    return Converter(run, (ours,), words)


def number(ours: str, words: str = "") -> Converter:
    """The number as it is."""
    return _converted(ours, values.number, words, "null: the default")


def integer(ours: str, words: str = "") -> Converter:
    """The whole number as it is."""
    return _converted(ours, values.integer, words, "null: the default")


def flag(ours: str, words: str = "") -> Converter:
    """True or false as it is."""
    return _converted(ours, values.flag, words, "null: the default")


def text(ours: str, words: str = "") -> Converter:
    """The text as it is."""
    return _converted(ours, values.text, words, "null: the default")


def texts(ours: str, words: str = "a single value becomes a list of one") -> Converter:
    """A list of texts."""
    return _converted(ours, values.texts, words, "null: none")


def path(ours: str, words: str = "") -> Converter:
    """A path or a name on the hub; `~` is written out, and the note says so."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: the default")
        value = values.path(leaf.value)
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
