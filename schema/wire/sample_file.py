"""`RUN/samples/*.jsonl`: what the model wrote, one `SampleRecord` a line.

    samples/step-00000041.jsonl         trained in step 41, or failed or dropped while it was under way
    samples/validation-00000040.jsonl   of the validation of version 40
    samples/rewinds.jsonl               each time that training went back

Lines are only ever appended; of the same sample the last one counts, and half a line is passed over. What a rewind
undid stays on disk, but only failures are still shown. The files that were written to longest ago go
when all of them together are larger than allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar
from zlib import crc32

from pydantic import ValidationError

from schema.wire.messages.base import GroupKind, Message
from schema.wire.messages.samples import MOST_TEXT, SampleRecord

Order = Literal["best", "worst", "errors"]
REWINDS = "rewinds.jsonl"
_NAME = re.compile(r"(step|validation)-(\d{8,15})\.jsonl", re.ASCII)
_KINDS: dict[str, GroupKind] = {"step": "train", "validation": "validation"}
_Line = TypeVar("_Line", bound=Message)


class Rewind(Message):
    """Training went back to `step` committed steps: a line of `rewinds.jsonl`."""

    timeline: int
    """The timeline that began with it."""
    step: int

    def undid(self, record: SampleRecord) -> bool:
        """Whether a sample is of a past that does not count any more. Version `step` itself still does."""
        first = self.step if record.kind == "train" else self.step + 1
        return record.timeline < self.timeline and record.step >= first


def folder_of(run_dir: Path) -> Path:
    return run_dir / "samples"


def path_of(folder: Path, kind: GroupKind, step: int) -> Path:
    """step: for a validation, its version."""
    name = "step" if kind == "train" else "validation"
    return folder / f"{name}-{step:08d}.jsonl"


def is_chosen(group_id: str, groups_per_step: int, kept_per_step: int) -> bool:
    """Whether the samples of a group are kept as text: those of `kept_per_step` groups of each step, evenly spread.

    Of several sources, whose positions count by themselves, as many are chosen on average, by a hash.
    Rollout replicas, trainers and the controller come to the same answer, each by itself.
    """
    position, several, _ = group_id.rpartition("p")[2].partition("-")
    if not position.isdecimal():
        return False
    if several:
        return crc32(group_id.encode()) % groups_per_step < kept_per_step
    at = int(position) * kept_per_step
    return (at + kept_per_step) // groups_per_step > at // groups_per_step


def files(folder: Path) -> list[tuple[GroupKind, int]]:
    """The files that are there, by step or version."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("*.jsonl"))
    return sorted(((_KINDS[match[1]], int(match[2])) for match in matches if match), key=lambda file: file[1])


class Writer:
    """The one that appends to the files of a folder, which then take at most `max_bytes`.

    No file takes more than a quarter of that. Failures are added to one until it takes an eighth of the quarter:
    there can be any number of them while a step is under way, and readers read files whole.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._most = max_bytes // 4
        self._sizes: dict[Path, int] | None = None
        """Bytes of each file, the one first that was written to longest ago; None: to be looked up."""
        self._total = 0

    def append(self, records: Sequence[SampleRecord], rewinds: Sequence[Rewind] = ()) -> int:
        """Add records to their files, and remove the oldest files beyond the limit. Raises OSError.

        rewinds: hide what they undid, if there is anything. Returns how many records their files had no room for.
        """
        if not records and not (rewinds and self._folder.is_dir()):
            return 0
        self._folder.mkdir(exist_ok=True)
        if rewinds:
            text = "".join(f"{rewind.model_dump_json()}\n" for rewind in rewinds)
            _append(self._folder / REWINDS, text.encode())
        sizes = self._look() if self._sizes is None else self._sizes
        self._sizes = None  # looked up anew if this fails half-way
        left_out = 0
        by_file: dict[Path, bytearray] = {}
        for record in records:
            path = path_of(self._folder, record.kind, record.step)
            line = record.model_dump_json(exclude_defaults=True).encode() + b"\n"
            added = by_file.get(path, b"")
            most = self._most if record.error is None else self._most // 8
            if sizes.get(path, 0) + len(added) + len(line) <= most:
                by_file.setdefault(path, bytearray()).extend(line)
            else:
                left_out += 1
        for path, lines in by_file.items():
            size = sizes.pop(path, 0)
            sizes[path] = _append(path, bytes(lines))
            self._total += sizes[path] - size
        while self._total > self._max_bytes and sizes:
            oldest = next(iter(sizes))
            oldest.unlink(missing_ok=True)
            self._total -= sizes.pop(oldest)
        self._sizes = sizes
        return left_out

    def _look(self) -> dict[Path, int]:
        paths = (path_of(self._folder, *file) for file in files(self._folder))
        entries = sorted(((path, path.stat()) for path in paths), key=lambda entry: entry[1].st_mtime_ns)
        sizes = {path: state.st_size for path, state in entries}
        self._total = sum(sizes.values())
        return sizes


def _append(path: Path, lines: bytes) -> int:
    """Returns the size of the file."""
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        file.write(b"\n" + lines if end and file.read(1) != b"\n" else lines)
        return file.tell()


def _read(path: Path, rewinds: Sequence[Rewind]) -> list[SampleRecord]:
    """The samples of one file that were not undone, each once, by group and index. Raises OSError."""
    records = {(record.group, record.attempt, record.index): record for record in _lines(path, SampleRecord)}
    ordered = sorted(records.items(), key=lambda item: (place_of(item[0][0]), item[0]))
    return [record for _, record in ordered if not any(rewind.undid(record) for rewind in rewinds)]


def place_of(group_id: str) -> list[tuple[int, str]]:
    """The key by which groups are sorted: p10 comes after p9."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d+)", group_id)]


def _lines(path: Path, kind: type[_Line]) -> Iterator[_Line]:
    """Read the records of a file; nothing where there is no file. Raises OSError."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with suppress(ValidationError):
                yield kind.model_validate_json(line)


def find(
    folder: Path,
    *,
    kind: GroupKind | None = None,
    step: int | None = None,
    order: Order | None = None,
    limit: int = 20,
    newest: int | None = None,
    committed: int | None = None,
) -> list[SampleRecord]:
    """Samples of a step (None: of the newest that has any; by `order`, of all of them), at most `limit`.

    order: best or worst by score (those without one come last), or those alone that failed, the newest first; None:
    by group and index. newest: look at no more than so many files. committed: steps of the job, where they are known:
    what lies beyond was undone, and need not be read. Failures are found even if they were undone. Raises OSError.
    """
    chosen = [file for file in files(folder) if kind in (None, file[0]) and step in (None, file[1])]
    if order == "errors":
        rewinds = []
    else:
        rewinds = list(_lines(folder / REWINDS, Rewind))
        chosen = [file for file in chosen if committed is None or file[1] <= committed]
    chosen = chosen[-newest:] if newest else chosen
    if order is None:
        for file in reversed(chosen):
            if records := _read(path_of(folder, *file), rewinds):
                return records[:limit]
        return []
    best: list[SampleRecord] = []
    for file in reversed(chosen):
        best = ordered([*best, *_read(path_of(folder, *file), rewinds)], order)[:limit]
        if order == "errors" and len(best) >= limit:
            break
    return best


def ordered(records: Iterable[SampleRecord], order: Order) -> list[SampleRecord]:
    """See `find`; the newer of two that are alike comes first."""
    if order == "errors":
        return sorted((record for record in records if record.error), key=lambda record: -record.at)
    scored = [record for record in records if record.score is not None]
    sign = -1 if order == "best" else 1
    return sorted(scored, key=lambda record: (sign * (record.score or 0.0), -record.at))


def cut(text: str) -> str:
    """A text that may be too long for a record, or no Unicode: its beginning and its end, with question marks."""
    text = text.encode(errors="replace").decode()
    if len(text) <= MOST_TEXT:
        return text
    omitted = len(text) - MOST_TEXT
    return f"{text[: MOST_TEXT // 2]}\n… {omitted} characters …\n{text[len(text) - MOST_TEXT // 2 :]}"
