"""The report of the preparation on a run's data: `data/report.json`, to be read before anything is trained on it.

The preparation writes it, also where an error ends it; `lines` says the same in words, at the start of a job, in its
summary and in `cosmos-launch validate --data`. `has_all_rows` looks whether the prepared rows are there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schema.util.atomic_file import write_text

NAMED, LISTED = 5, 20
"""Most rows that are named for one reason, and most bad rows whose errors are kept."""
LONGEST_SAMPLE = 8000
"""Characters of a rendered prompt."""
UNFINISHED = "unfinished"
"""In the metadata of a prepared file with nothing but early rows (`schema.wire.prompts`)."""
_LARGEST_HEADER = 100_000_000
"""Bytes of a safetensors header; the library refuses more, too."""


class _Report(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Rows(_Report):
    """Rows of one kind. first: the names of the first of them, or what is wrong with each."""

    count: int = 0
    first: list[str] = []

    def add(self, text: str, most: int = NAMED) -> None:
        self.count += 1
        if len(self.first) < most:
            self.first.append(text)

    def merge(self, other: Rows, most: int = NAMED) -> None:
        """Count the rows of another, which come behind these."""
        self.count += other.count
        self.first += other.first[: max(0, most - len(self.first))]


class Lengths(_Report):
    """Tokens of the rows as they were read. limit: the most that a row may have. reason: where that comes from."""

    p50: int
    p99: int
    longest: int
    limit: int
    reason: str


class FileReport(_Report):
    """Rows of one prepared file. read: those that belong to it; left_out, cut: by reason.

    own_system: rows that keep a system message of their own. encoded_apart: kept rows whose tokens differ from those
    of their text as a whole. incomplete: kept rows of which the chat template leaves out content or tool calls of the
    assistant, or the thoughts of the last turn. without_stop: kept rows whose last learnt token is none at which
    generation stops. noted: other rows that are special, by how. samples: three rows as the model reads them. files:
    all files or splits that are read; unread: what looks like data and is not, by reason; how: what was chosen where
    the configuration leaves it open. remarks: what became of columns, which files hold no row.
    """

    source: str
    what: str = "row"
    files: list[str] = []
    unread: dict[str, list[str]] = {}
    how: str = ""
    remarks: list[str] = []
    read: int = 0
    kept: int = 0
    left_out: dict[str, Rows] = {}
    cut: dict[str, Rows] = {}
    bad: Rows = Field(default_factory=Rows)
    empty_references: Rows = Field(default_factory=Rows)
    own_system: Rows = Field(default_factory=Rows)
    encoded_apart: Rows = Field(default_factory=Rows)
    incomplete: Rows = Field(default_factory=Rows)
    without_stop: Rows = Field(default_factory=Rows)
    noted: dict[str, Rows] = {}
    lengths: Lengths | None = None
    samples: list[str] = []

    def merge(self, chunk: FileReport) -> None:
        """Count the rows of a chunk, which come behind these."""
        self.read += chunk.read
        for name in ("empty_references", "own_system", "encoded_apart", "incomplete", "without_stop"):
            getattr(self, name).merge(getattr(chunk, name))
        self.bad.merge(chunk.bad, LISTED)
        for total, added in ((self.left_out, chunk.left_out), (self.cut, chunk.cut), (self.noted, chunk.noted)):
            for reason, rows in added.items():
                total.setdefault(reason, Rows()).merge(rows)
        self.remarks += [text for text in chunk.remarks if text not in self.remarks]


class DataReport(_Report):
    """All files of a run by name. error: what ended the preparation; empty: nothing did.

    cached: the record of an earlier preparation that the rows are copies of; empty: they were prepared for this run.
    unfinished: whether these are the rows that a job has begun with, and the others are not prepared.
    """

    format: Literal[1] = 1
    files: dict[str, FileReport] = {}
    warnings: list[str] = []
    cached: str = ""
    unfinished: bool = False
    error: str = ""

    @property
    def bad(self) -> Rows:
        """The bad rows of all files: their number, and what is wrong with the first."""
        files = [file.bad for file in self.files.values()]
        listed = [text for rows in files for text in rows.first]
        return Rows(count=sum(rows.count for rows in files), first=listed[:LISTED])

    def write(self, run_dir: Path) -> None:
        """Write the report of a run. Raises OSError."""
        path = path_of(run_dir)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.model_dump_json(indent=2) + "\n")


def path_of(run_dir: Path) -> Path:
    return run_dir / "data" / "report.json"


def read(run_dir: Path) -> DataReport | None:
    """The report of a run; None: there is none that this version can read."""
    try:
        return parse(json.loads(path_of(run_dir).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def parse(data: Any) -> DataReport | None:
    """A report from JSON; None: this version cannot read it."""
    try:
        return DataReport.model_validate(data)
    except ValidationError:
        return None


def of_run(run_dir: Path) -> list[str]:
    """The report of a run in words; empty where there is none."""
    return lines(report) if (report := read(run_dir)) else []


def brief(report: DataReport) -> str:
    """How many rows there are of each file, and how long they are."""
    parts = []
    for name, file in report.files.items():
        lengths = file.lengths
        longest = f", the longest {file.what} {lengths.longest:,} of {lengths.limit:,} tokens" if lengths else ""
        parts.append(f"{name}: {_counts(file)}{longest}")
    return "; ".join([*parts, *([_UNFINISHED] if report.unfinished else [])])


_UNFINISHED = "the job began with these rows for training, and no others were prepared by its end"


def lines(report: DataReport, *, samples: bool = False) -> list[str]:
    """The report in words: a line for each file, then which rows are special and why, then rendered prompts."""
    texts = [f"rows of an earlier preparation are used: {report.cached}"] if report.cached else []
    texts += [_UNFINISHED] if report.unfinished else []
    for name, file in report.files.items():
        texts.append(f"{name}: {_headline(file)}")
        texts += [f"{name}: {text}" for text in _files(file)]
        texts += [f"{name}: {text}" for text in _reasons(file)]
        if samples:
            texts += [f"{name}, as the model reads it:\n{text}" for text in file.samples]
    return texts + report.warnings


def _counts(file: FileReport) -> str:
    parts = [f"{file.read:,} rows of {file.source}", f"{file.kept:,} kept"]
    for rows, words in ((file.left_out, "left out"), (file.cut, "cut")):
        if rows:
            parts.append(f"{sum(part.count for part in rows.values()):,} {words}")
    parts += [f"{file.bad.count:,} bad"] if file.bad.count else []
    parts += [f"{file.empty_references.count:,} without a reference"] if file.empty_references.count else []
    return ", ".join(parts)


def _headline(file: FileReport) -> str:
    text, lengths = _counts(file), file.lengths
    if lengths is None:
        return text
    spread = f"{lengths.p50:,} (p50), {lengths.p99:,} (p99), {lengths.longest:,} (longest)"
    return f"{text}; tokens of a {file.what}: {spread}, at most {lengths.limit:,} ({lengths.reason})"


def _reasons(file: FileReport) -> Iterator[str]:
    for reason, rows in file.left_out.items():
        yield f"{rows.count:,} left out, {reason}: {_named(file, rows)}"
    for reason, rows in file.cut.items():
        yield f"{rows.count:,} {reason}: {_named(file, rows)}"
    if file.empty_references.count:
        rows = file.empty_references
        yield f"{rows.count:,} with an empty reference answer, of which rewards get nothing: {_named(file, rows)}"
    if file.own_system.count:
        rows = file.own_system
        yield f"{rows.count:,} keep their own system message instead of system_prompt: {_named(file, rows)}"
    if file.encoded_apart.count:
        rows, why = file.encoded_apart, "answers are encoded behind their prompt, as generation sees them"
        yield f"{rows.count:,} have other tokens than their text as a whole, since {why}: {_named(file, rows)}"
    if file.incomplete.count:
        rows, parts = file.incomplete, "content, tool calls or last thoughts of the assistant"
        yield f"{rows.count:,} lack {parts}, which the chat template leaves out: {_named(file, rows)}"
    if file.without_stop.count:
        rows = file.without_stop
        yield f"{rows.count:,} end with a learnt token that no stop token or string stops: {_named(file, rows)}"
    for how, rows in file.noted.items():
        yield f"{rows.count:,} {how}: {_named(file, rows)}"
    yield from file.remarks


def _files(file: FileReport) -> Iterator[str]:
    """Name what is read and what is not, where that is more than the one file that the headline names."""
    if file.how:
        yield file.how
    if len(file.files) > 1 or file.how or file.unread:
        yield f"read: {_listed(file.files)}"
    for reason, paths in file.unread.items():
        yield f"not read, {reason}: {_listed(paths)}"


def _listed(paths: list[str]) -> str:
    suffix = f" and {len(paths) - LISTED:,} more" if len(paths) > LISTED else ""
    return ", ".join(paths[:LISTED]) + suffix


def _named(file: FileReport, rows: Rows) -> str:
    """The rows' names, without the source, which the headline has."""
    names = [text.removeprefix(f"{file.source}, ") for text in rows.first]
    return ", ".join(names) + (", …" if rows.count > len(names) else "")


def has_all_rows(path: Path) -> bool:
    """Whether a prepared file is there with all of its rows. Of a damaged one, who reads it says what is wrong."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, _LARGEST_HEADER)))
        return UNFINISHED not in header["__metadata__"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return True


def set_aside(path: Path) -> Path | None:
    """Rename the file of an earlier preparation of the run: however this one ends, it is not of this configuration.

    One that is unfinished stays, for the controller of a job that goes on. None: there is none.
    """
    aside = path.with_name("earlier.train")
    if has_all_rows(path):
        path.replace(aside)
    return aside if aside.exists() else None
