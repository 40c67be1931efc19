"""Recorded batches: those of a run's newest steps, one file each, from which a replay trains again.

    <run>/batches/step-00000012.safetensors     `encode_batch` with the whole frames of all samples

Next to the table a file says what a replay has to know of the run (`Facts`). A step that is trained again, after a
rewind, replaces its file and removes those of later steps, which led elsewhere; so what is there led to the newest.
Before a file is written the oldest ones make room: there are never more than asked for, even on a full disk.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schema.util.atomic_file import replacing
from schema.util.text import PLAIN
from schema.wire.batch import StepTable, decode_batch, encode_batch
from schema.wire.frame import FrameError, read_metadata
from schema.wire.invalid import describe

FACTS = "run"
"""Where a file's metadata has its `Facts`."""
_NAME = re.compile(r"step-(\d{8,15})\.safetensors", re.ASCII)


class NotRecordedError(ValueError):
    """Steps that are asked for and not there: says which ones are."""


class Facts(BaseModel):
    """The statements of a file about the run that trained its batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job_id: str = Field(max_length=256, pattern=PLAIN)
    total_steps: int = Field(ge=0, lt=2**53, description="Steps that the job had then: the length of its schedule.")
    ranks: int = Field(ge=1, le=65536, description="Ranks that trained it.")
    settings: str = Field(
        max_length=64, pattern=PLAIN, description="`schema.config.trained.settings_digest` of its configuration."
    )
    began_from: str = Field(
        max_length=4096, description="Checkpoint that the trainer had started from; empty: the configured model."
    )


def folder_of(run_dir: Path) -> Path:
    return run_dir / "batches"


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def recorded(folder: Path) -> list[int]:
    """The steps that are there, in order; what has other names is passed over."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match is not None)


def choose(steps: Sequence[int], first: int | None, count: int | None) -> list[int]:
    """The steps to train again, without a gap. steps: what is there. first, count: None is all that follows.

    Raises:
        NotRecordedError: there is none, or one of them is missing.
    """
    if not steps:
        raise NotRecordedError("no batch is recorded")
    start = steps[0] if first is None else first
    end = max(steps[-1], start) + 1 if count is None else start + count
    missing = next((step for step in range(start, end) if step not in steps), None)
    if missing is not None:
        raise NotRecordedError(f"step {missing} is not recorded, there are {_spans(steps)}")
    return list(range(start, end))


def _spans(steps: Sequence[int]) -> str:
    """`4 to 7 and 9`."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][-1] + 1 == step:
            spans[-1] = [spans[-1][0], step]
        else:
            spans.append([step])
    return " and ".join(" to ".join(map(str, span)) for span in spans)


def write(folder: Path, table: StepTable, frames: Sequence[bytes | memoryview], facts: Facts, *, keep: int) -> None:
    """Keep a batch, and of those before it the newest: `keep` files altogether.

    Raises:
        OSError: it could not be written, or others not be removed.
        FrameError: it is too large for one file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".step-*"):  # left by a writer that was killed
        path.unlink(missing_ok=True)
    before = [step for step in recorded(folder) if step < table.step]
    kept = before[max(len(before) - keep + 1, 0) :]
    for step in {*recorded(folder)} - {*kept, table.step}:
        path_of(folder, step).unlink(missing_ok=True)
    data = encode_batch(table, frames, **{FACTS: facts.model_dump_json()})
    with replacing(path_of(folder, table.step)) as neighbour:
        neighbour.write_bytes(data)


def read(path: Path) -> tuple[StepTable, list[memoryview], Facts]:
    """Read a batch as it was written. Raises `FrameError` naming the file, `OSError`."""
    data = path.read_bytes()
    try:
        table, frames = decode_batch(data)
        return table, frames, _facts(data)
    except FrameError as error:
        raise _damaged(path, error) from None


def read_facts(path: Path) -> Facts:
    """Read the head of a file alone: its samples are all there, but they are not looked at."""
    with path.open("rb") as file:
        try:
            if not file.seek(0, 2):  # nothing cannot be mapped
                raise FrameError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
                return _facts(data)
        except FrameError as error:
            raise _damaged(path, error) from None


def _facts(data: bytes | memoryview) -> Facts:
    text = read_metadata(data).get(FACTS)
    if text is None:
        raise FrameError("it does not say of which run it is")
    try:
        return Facts.model_validate_json(text)
    except ValidationError as error:
        raise FrameError(f"what it says of its run is invalid: {describe(error.errors(include_url=False))}") from None


def _damaged(path: Path, error: FrameError) -> FrameError:
    return FrameError(f"{path} is not a recorded batch, or it is damaged: {error}")
