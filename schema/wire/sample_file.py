"""`RUN/samples/*.jsonl`: what the model wrote, one `SampleRecord` a line.

    samples/step-00000041.jsonl         trained in step 41, or failed or dropped while it was under way
    samples/validation-00000040.jsonl   of the validation of version 40

Lines are only ever appended; of the same sample the last one counts, and half a line is passed over. Where a step was
trained again after a rewind, the records of the newest timeline count. The oldest files go when all of them together
are larger than allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from schema.wire.messages.base import GroupKind
from schema.wire.messages.samples import MOST_TEXT, SampleRecord

Order = Literal["best", "worst", "errors"]
_NAME = re.compile(r"(step|validation)-(\d{8,15})\.jsonl", re.ASCII)
_KINDS: dict[str, GroupKind] = {"step": "train", "validation": "validation"}


def folder_of(run_dir: Path) -> Path:
    return run_dir / "samples"


def path_of(folder: Path, kind: GroupKind, step: int) -> Path:
    """step: for a validation, its version."""
    name = "step" if kind == "train" else "validation"
    return folder / f"{name}-{step:08d}.jsonl"


def is_chosen(group_id: str, groups_per_step: int, wanted: int) -> bool:
    """Whether the samples of a group are kept as text: those of `wanted` groups of each step, evenly spread.

    Rollout replicas, trainers and the controller come to the same answer, each by itself.
    """
    position = group_id.rpartition("p")[2]
    if not position.isdecimal():
        return False
    at = int(position) * wanted
    return (at + wanted) // groups_per_step > at // groups_per_step


def files(folder: Path) -> list[tuple[GroupKind, int]]:
    """What is there, by step or version."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("*.jsonl"))
    return sorted(((_KINDS[match[1]], int(match[2])) for match in found if match), key=lambda file: file[1])


def append(folder: Path, records: Iterable[SampleRecord], max_bytes: int) -> None:
    """Add records to their files, and remove the oldest files beyond `max_bytes`. Raises OSError."""
    by_file: dict[Path, bytes] = {}
    for record in records:
        path = path_of(folder, record.kind, record.step)
        by_file[path] = (
            by_file.get(path, b"") + record.model_dump_json(exclude_defaults=True).encode() + b"\n"
        )
    folder.mkdir(exist_ok=True)
    for path, lines in by_file.items():
        with path.open("ab+") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            file.write(b"\n" + lines if end and file.read(1) != b"\n" else lines)
    _make_room(folder, max_bytes, keep=set(by_file))


def _make_room(folder: Path, max_bytes: int, keep: set[Path]) -> None:
    known = [path_of(folder, *file) for file in files(folder)]
    sizes = {path: path.stat().st_size for path in known}
    total = sum(sizes.values())
    for path, size in sizes.items():
        if total <= max_bytes:
            return
        if path not in keep:
            path.unlink(missing_ok=True)
            total -= size


def read(path: Path) -> list[SampleRecord]:
    """The samples of one file, each once, by group and index; nothing where there is no file. Raises OSError."""
    found: dict[tuple[str, int, int], SampleRecord] = {}
    try:
        with path.open("rb") as file:
            for line in file:
                record = _parse(line)
                if record is not None:
                    found[record.group, record.attempt, record.index] = record
    except FileNotFoundError:
        return []
    newest = max((record.timeline for record in found.values()), default=0)
    return [record for _, record in sorted(found.items()) if record.timeline == newest]


def _parse(line: bytes) -> SampleRecord | None:
    try:
        return SampleRecord.model_validate_json(line)
    except ValidationError:
        return None


def find(
    folder: Path,
    *,
    kind: GroupKind | None = None,
    step: int | None = None,
    order: Order | None = None,
    limit: int = 20,
    newest: int | None = None,
) -> list[SampleRecord]:
    """Samples of a step (None: of the newest that has any; by `order`, of all of them), at most `limit`.

    order: best or worst by score (those without one come last), or those alone that failed, the newest first; None:
    by group and index. newest: look at no more than so many files. Raises OSError.
    """
    chosen = [file for file in files(folder) if kind in (None, file[0]) and step in (None, file[1])]
    chosen = chosen[-newest:] if newest else chosen
    if order is None:
        for file in reversed(chosen):
            if records := read(path_of(folder, *file)):
                return records[:limit]
        return []
    best: list[SampleRecord] = []
    for file in reversed(chosen):
        best = ordered([*best, *read(path_of(folder, *file))], order)[:limit]
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
    left = len(text) - MOST_TEXT
    return f"{text[: MOST_TEXT // 2]}\n… {left} characters …\n{text[len(text) - MOST_TEXT // 2 :]}"
