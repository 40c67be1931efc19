"""A `Conversion` as text: a TOML file that explains itself, a report for the terminal, JSON for machines.

Invariant: `tomllib.loads(to_toml(conversion)) == conversion.config`. Everything else is comments: next to each
value where it comes from, at the end what was not written and why. Every leaf of the input is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.engine.engine import yaml_value
from convert.engine.keys import Path, split_key
from convert.engine.model import CONVERTED, Addition, Conversion, Entry, Outcome
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import format_key
from schema.config.sections.unsupported import TABLE
from schema.util.text import CONTROL

WIDTH = 110

_SHORT = (Outcome.ACCEPTED, Outcome.UNKNOWN, Outcome.NONE)

_HEADINGS = {
    Outcome.FALLBACK: "Not built yet and without influence on the numbers: the nearest value stands above, "
    "the faithful one here.",
    Outcome.IMPLICIT: "Needs no key here.",
    Outcome.NONE: "Has no counterpart here, and is not part of the method.",
    Outcome.UNKNOWN: "Not understood, and not in a table that decides what is trained: look at these.",
}


_UNSUPPORTED = (
    "The source asks for these, they decide what is trained, and nothing here does the same; or they are not "
    "understood, in a table where any key may decide that. The file is refused while they are there: remove a line "
    "to train without it, by another method than the source's."
)
_ACCEPTED = "Not understood, and accepted by name when this was converted: nothing stands for these here."


def to_toml(conversion: Conversion) -> str:
    """The configuration as TOML with comments."""
    notes = _notes(conversion)
    lines = [f"{CONVERTED}{_clean(conversion.name)}: {conversion.system}, {conversion.kind}."]
    lines += [line for warning in conversion.warnings for line in _comment(f"Look at this: {warning}")]
    lines += _listed(conversion.of(Outcome.ACCEPTED), _ACCEPTED)
    lines += _table((), conversion.config, notes)
    lines += _left_over(conversion)
    return "\n".join(lines) + "\n"


def to_json(conversion: Conversion) -> dict[str, Any]:
    """Everything about a conversion as JSON-compatible values."""
    return {
        "system": conversion.system,
        "kind": conversion.kind,
        "source": conversion.name,
        "config": conversion.config,
        "warnings": list(conversion.warnings),
        "counts": {outcome.value: len(conversion.of(outcome)) for outcome in Outcome},
        "entries": [
            {
                "key": entry.source,
                "value": _json_value(entry.value),
                "line": entry.line,
                "outcome": entry.outcome.value,
                "targets": [{"key": key, "value": value} for key, value in entry.targets],
                "faithful": [{"key": key, "value": value} for key, value in entry.faithful],
                "note": entry.note,
                "understood": entry.understood,
            }
            for entry in conversion.entries
        ],
        "additions": [
            {"key": item.key, "value": item.value, "note": item.note, "faithful": item.faithful}
            for item in conversion.additions
        ],
    }


def to_report(conversion: Conversion, full: bool = True) -> str:
    """A plain-text report: counts, warnings, then every key with its line and reason.

    full: false lists only what is lost, not understood or without counterpart.
    """
    counts = ", ".join(
        f"{len(conversion.of(outcome))} {outcome.value}" for outcome in Outcome if conversion.of(outcome)
    )
    lines = [
        f"{_clean(conversion.name)}: {conversion.system}, {conversion.kind}",
        f"{len(conversion.leaves)} keys: {counts or 'none'}; {len(conversion.additions)} added",
    ]
    unsupported = _unsupported(conversion)
    warnings = [f"! {_clean(warning)}" for warning in conversion.warnings]
    lines += [*unsupported, "", *warnings] if unsupported and warnings else [*unsupported, *warnings]
    for outcome in (*_SHORT, Outcome.FALLBACK, Outcome.IMPLICIT, Outcome.MAPPED):
        entries = conversion.of(outcome)
        if entries and (full or outcome in _SHORT):
            lines += ["", f"{outcome.value}:"]
            lines += [f"  {_entry_line(entry, conversion.name)}" for entry in entries]
    added = [addition for addition in conversion.additions if not _is_unsupported(addition)]
    if added and full:
        lines += ["", "added:"]
        lines += [f"  {_addition_line(addition)}" for addition in added]
    return "\n".join(lines)


def _unsupported(conversion: Conversion) -> list[str]:
    """Report what decides the method and has no counterpart, be it written in the file or the source's default."""
    entries = conversion.of(Outcome.UNSUPPORTED)
    without_counterpart, strangers = (
        [f"  {_entry_line(entry, conversion.name)}" for entry in entries if entry.understood is understood]
        for understood in (True, False)
    )
    for addition in filter(_is_unsupported, conversion.additions):
        without_counterpart.append(
            _clean(f"  {split_key(addition.key)[1]} = {yaml_value(addition.value)}: {addition.note}")
        )
    lines: list[str] = []
    if without_counterpart:
        heading = "these decide what is trained, and the result is refused until each is removed from it"
        lines += ["", f"unsupported: {heading}", *without_counterpart]
    if strangers:
        heading = (
            "not understood, in tables where any key may decide what is trained; the result is refused until each is "
            "removed from it, or accepted by name (--allow-unknown KEY)"
        )
        lines += ["", f"unsupported: {heading}", *strangers]
    return lines


def _is_unsupported(addition: Addition) -> bool:
    return split_key(addition.key)[0] == TABLE


# --- TOML ---------------------------------------------------------------------------------------------------


def _table(path: Path, table: Mapping[str, Any], notes: Mapping[Path, list[str]]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) or not value}
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping) and value}
    lines: list[str] = []
    if path == (TABLE,):
        lines += ["", *_comment(_UNSUPPORTED), f"[{TABLE}]"]
    elif path and plain:
        lines += ["", f"[{format_key(path)}]"]
    for key, value in plain.items():
        lines += _line(f"{format_key((key,))} = {toml_value(value)}", notes.get((*path, key), []))
    for key, value in tables.items():
        lines += _table((*path, key), value, notes)
    return lines


def _line(written: str, notes: list[str]) -> list[str]:
    """A key with its comment on the same line where that fits, else above it."""
    line = f"{written}  # {'; '.join(notes)}"
    if not notes:
        return [written]
    if len(line) <= WIDTH:
        return [line]
    return [*(line for note in notes for line in _comment(note)), written]


def _notes(conversion: Conversion) -> dict[Path, list[str]]:
    """The comment of each of our keys."""
    notes: dict[Path, list[str]] = {}
    for entry in conversion.entries:
        faithful = dict(entry.faithful)
        for key, value in entry.targets:
            if value is None:
                continue
            text = _note_of(entry)
            if key in faithful and faithful[key] != value:
                text = f"faithful: {format_key((split_key(key)[-1],))} = {_shown(faithful[key])}; {text}"
            notes.setdefault(split_key(key), []).append(_clean(text))
    for addition in conversion.additions:
        if addition.value is not None:
            notes.setdefault(split_key(addition.key), []).append(_clean(_why(addition)))
    return notes


def _note_of(entry: Entry) -> str:
    if entry.outcome is Outcome.UNSUPPORTED:
        return entry.note
    return _with_note(f"{entry.source} = {yaml_value(entry.value)}", entry)


def _with_note(line: str, entry: Entry) -> str:
    """A key and its note, which need not say the value once more."""
    note = entry.note.removeprefix(f"{yaml_value(entry.value)}: ")
    return f"{line}: {note}" if note else line


def _why(addition: Addition) -> str:
    if addition.faithful is None:
        return addition.note
    return f"faithful: {format_key((split_key(addition.key)[-1],))} = {_shown(addition.faithful)}; {addition.note}"


def _listed(entries: Sequence[Entry], heading: str) -> list[str]:
    """Entries for which nothing is written, as comments below a heading."""
    if not entries:
        return []
    return ["", f"# {heading}", *(line for entry in entries for line in _comment(_entry_line(entry, ""), "  "))]


def _left_over(conversion: Conversion) -> list[str]:
    lines: list[str] = []
    for outcome, heading in _HEADINGS.items():
        entries = [
            entry
            for entry in conversion.of(outcome)
            if outcome is not Outcome.FALLBACK or all(value is None for _, value in entry.targets)
        ]
        lines += _listed(entries, heading)
    silent = [entry for entry in conversion.of(Outcome.MAPPED) if all(v is None for _, v in entry.targets)]
    if silent:
        lines += ["", "# Maps to a key that stays unset."]
        lines += [line for entry in silent for line in _comment(_entry_line(entry, ""), "  ")]
    return lines


def _comment(text: str, indent: str = "") -> list[str]:
    """A text as comment lines, wrapped at WIDTH without breaking words."""
    lines, current = [], ""
    for word in _clean(text).split(" "):
        longer = f"{current} {word}" if current else word
        if current and len(longer) + len(indent) + 2 > WIDTH:
            lines.append(current)
            current, indent = word, indent or ""
        else:
            current = longer
    return [f"# {indent}{'  ' if index and indent else ''}{line}" for index, line in enumerate([*lines, current])]


# --- lines --------------------------------------------------------------------------------------------------


def _entry_line(entry: Entry, name: str) -> str:
    where = f"{_clean(name)}:{entry.line}: " if name and entry.line is not None else ""
    line = f"{where}{entry.source} = {yaml_value(entry.value)}"
    if entry.faithful:
        line += f" would be {_assignments(entry.faithful)}"
    elif entry.targets and entry.outcome is not Outcome.UNSUPPORTED:
        line += f" -> {_assignments(entry.targets)}"
    return _clean(_with_note(line, entry))


def _addition_line(addition: Addition) -> str:
    return _clean(f"{addition.key} = {_shown(addition.value)}: {_why(addition)}")


def _assignments(targets: tuple[tuple[str, Any], ...]) -> str:
    return ", ".join(f"{key} unset" if value is None else f"{key} = {_shown(value)}" for key, value in targets)


def _shown(value: Any) -> str:
    return "unset" if value is None else toml_value(value)


def _clean(text: str) -> str:
    """One line without control characters: what a TOML comment and a terminal can carry."""
    text = re.sub(rf"({CONTROL.pattern}|[\ud800-\udfff])+", " ", text)
    return text if len(text) <= 2000 else text[:2000] + " …"


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _json_value(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)  # TOML's dates
