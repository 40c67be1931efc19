"""Print `cosmos-launch explain`: plain lines, wrapped for a terminal."""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Iterator

from schema.config.loading.tomlwrite import toml_value
from schema.config.reference.lookup import MUST, UNSET, FoundKeys, KeyInfo, SectionInfo

LABEL = 12
WIDEST, NARROWEST = 110, 60


def lines(answer: FoundKeys) -> list[str]:
    """The answer for people."""
    width = max(NARROWEST, min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST))
    if answer.section is not None:
        return list(_section(answer.section, width))
    note = [*answer.note.splitlines(), ""] if answer.note else []
    if answer.is_list:
        return note + list(_list(answer.keys, width))
    blocks = [list(_key(info, width)) for info in answer.keys]
    return note + [line for number, block in enumerate(blocks) for line in ([""] if number else []) + block]


def shown_default(info: KeyInfo) -> str:
    """A default as one would write it."""
    if info.default in (UNSET, MUST):
        return str(info.default)
    return toml_value(info.default)


def _key(info: KeyInfo, width: int) -> Iterator[str]:
    yield f"{info.key}   ({info.when})" if info.when else info.key
    yield from textwrap.wrap(info.description, width, initial_indent="  ", subsequent_indent="  ")
    yield ""
    yield from _labelled("type", ", ".join([info.type, *info.bounds]), width)
    yield from _labelled("default", shown_default(info), width)
    if info.deviation:
        yield from _labelled("deviation", info.deviation, width)
    if info.acts:
        yield from _labelled("seen in", f"{info.effect} ({info.kind})", width)
    yield from _labelled("this build", info.limits or "does it", width)
    for number, line in enumerate(info.example.split("\n")):
        yield f"  {'example' if number == 0 else '':<{LABEL}}{line}"
    if info.variable:
        yield f"  {'':<{LABEL}}--set {shlex.quote(info.override)}"
        name, _, value = info.variable.partition("=")
        yield f"  {'':<{LABEL}}{name}={shlex.quote(value)}"


def _labelled(label: str, text: str, width: int) -> list[str]:
    indent = " " * (LABEL + 2)
    return textwrap.wrap(
        text,
        width,
        initial_indent=f"  {label:<{LABEL}}",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _section(section: SectionInfo, width: int) -> Iterator[str]:
    yield f"[{section.key}]" if section.key else "The sections of a configuration:"
    if section.key:
        note = " Absent unless it is written." if section.optional else ""
        for line in (section.description + note).split("\n"):
            yield from textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="  ")
    if section.keys:
        yield ""
        yield from _list(section.keys, width, cut=f"{section.key}." if section.key else "")
    if section.sections:
        yield ""
        names = [f"[{key}]" for key, _ in section.sections]
        size = max(len(name) for name in names) + 2
        for name, (_, description) in zip(names, section.sections, strict=True):
            yield from _row(name, size, description, width)
    yield ""
    inner = next((info.key for info in section.keys), "train.optm_lr")
    yield f"more: cosmos-launch explain {inner if section.key else 'train'}"


def _list(infos: tuple[KeyInfo, ...], width: int, cut: str = "") -> Iterator[str]:
    """One row per key: name, default, the first sentence."""
    rows = [(info.key.removeprefix(cut), shown_default(info), info) for info in infos]
    name_size = min(max(len(name) for name, _, _ in rows) + 2, 60)
    value_size = min(max(len(value) for _, value, _ in rows) + 2, 24)
    for name, value, info in rows:
        so_far = f"(only {' or '.join(info.taken)} so far) " if info.taken else ""
        when = f"({info.when}) " if info.when else ""
        first, dot, _ = info.description.partition(". ")
        text = f"{value:<{value_size}}{so_far}{when}{first + '.' * bool(dot)}"
        yield from _row(name, name_size, text, width, further=value_size)


def _row(name: str, size: int, text: str, width: int, further: int = 0) -> list[str]:
    head = f"  {name:<{size}}"
    indent = " " * (2 + size + further)
    wrapped = textwrap.wrap(head + text, max(width, len(indent) + 30), subsequent_indent=indent, drop_whitespace=True)
    return wrapped or [head]
