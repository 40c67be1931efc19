"""Writing one checkpoint: what each rank does with what it has copied, and how rank 0 makes it whole.

    every rank   state and random states ─▶ files, forced to disk, read again and compared
    all          did everybody succeed?
    rank 0       export from the files ─▶ ledger ─▶ manifest ─▶ rename ─▶ `latest`

It runs in the main thread (`sync`) or in the background (`async`); either way it touches neither the model nor
the accelerator, and talks to the other ranks through a group of its own.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from policy_worker.checkpoints import directory
from policy_worker.checkpoints.layout import (
    EXPORT,
    LEDGER,
    FileFacts,
    FoundCheckpoint,
    Manifest,
    faults,
    hash_of_file,
    rng_file,
    state_file,
    state_files,
    write_manifest,
)
from policy_worker.checkpoints.state import BASE, MODEL, RngStates, weights_from, write_rng
from policy_worker.checkpoints.storage import StateFiles, TensorPiece, write_pieces
from policy_worker.errors import CheckpointSaveError
from policy_worker.parallel.rank_group import RankGroup
from schema.config.chat_template import FILE as TEMPLATE
from schema.util.atomic_file import sync

log = logging.getLogger(__name__)

Exporter = Callable[[Callable[[str, Tensor], Tensor], Path], None]
"""Writes the model for transformers: (tensor by name, directory)."""


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is to be written.

    pieces: by kind; the model's also where only its export is kept, those of a frozen base only for an export.
    manifest: without its files. ledger, exporter: rank 0's alone. template: the job's own chat template, if it has
    one."""

    unfinished: Path
    lock: IO[bytes]
    pieces: Mapping[str, list[TensorPiece]]
    states: RngStates
    manifest: Manifest
    ledger: str | None
    template: str | None
    exporter: Exporter | None


def write(draft: Draft, group: RankGroup) -> FoundCheckpoint | None:
    """Write it, whole or not at all; on rank 0 the complete checkpoint. A collective.

    Raises `CheckpointSaveError`: on every rank, if one of them could not write; nothing complete was touched."""
    try:
        return _write(draft, group)
    finally:
        draft.lock.close()


def _write(draft: Draft, group: RankGroup) -> FoundCheckpoint | None:
    began = time.monotonic()
    files, fault = _attempt(lambda: _write_own(draft, group.rank))
    together = group.gather([files, fault])
    failed = [f"rank {rank}: {of_rank[1]}" for rank, of_rank in enumerate(together) if of_rank[1] is not None]
    complete: FoundCheckpoint | None = None
    if not failed and group.leads:
        complete, fault = _attempt(lambda: _complete(draft, [of_rank[0] for of_rank in together]))
        failed = [] if fault is None else [fault]
    failed = group.gather(failed)[0] or failed
    if failed:
        if group.leads:  # ours and surely unfinished: a full disk gets its space back
            shutil.rmtree(draft.unfinished, ignore_errors=True)
        raise CheckpointSaveError(
            f"checkpoint of step {draft.manifest.step} could not be written to {draft.unfinished.parent}: "
            f"{'; '.join(failed)}. Nothing was deleted, older checkpoints are whole; make room or mend the "
            f"directory, then resume"
        )
    if complete is not None:
        log.info("saved checkpoint %s in %.1f s", complete.path, time.monotonic() - began)
    return complete


def _attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of some writing, or what went wrong, in words."""
    try:
        return work(), None
    except OSError as error:
        return None, f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except Exception as error:
        log.exception("writing a checkpoint failed")
        return None, f"{type(error).__name__}: {error}"


def _write_own(draft: Draft, rank: int) -> dict[str, Any]:
    """This rank's files, read again after they were forced to disk."""
    written: dict[str, FileFacts] = {}
    for kind, pieces in draft.pieces.items():
        name = state_file(kind, rank)
        try:
            written[name] = write_pieces(draft.unfinished / name, pieces)
        except OSError as error:  # a full disk does not say which file it was
            raise OSError(error.errno, error.strerror, str(draft.unfinished / name)) from error
    if "extra" in draft.manifest.contents:
        write_rng(draft.unfinished, rank, draft.states)
        sync(draft.unfinished / rng_file(rank))
        written[rng_file(rank)] = hash_of_file(draft.unfinished / rng_file(rank))
    wrong = faults(draft.unfinished, written)
    if wrong:
        raise OSError(f"what was read again is not what was written: {'; '.join(wrong)}")
    return {name: facts.model_dump() for name, facts in written.items()}


def _complete(draft: Draft, of_ranks: list[dict[str, Any]]) -> FoundCheckpoint:
    """Rank 0's part, once all ranks have written theirs."""
    unfinished = draft.unfinished
    files = {name: FileFacts(**facts) for written in of_ranks for name, facts in written.items()}
    if draft.exporter is not None:
        models, bases = state_files(unfinished, MODEL), state_files(unfinished, BASE)
        with StateFiles([*models, *bases]) as saved:
            draft.exporter(weights_from(saved), unfinished / EXPORT)
        for path in bases if MODEL in draft.manifest.contents else [*models, *bases]:
            path.unlink()
            del files[path.name]
        exported = (path for path in (unfinished / EXPORT).rglob("*") if path.is_file())
        files |= {str(path.relative_to(unfinished)): hash_of_file(path) for path in exported}
    for name, text in ((LEDGER, draft.ledger), (TEMPLATE, draft.template)):
        if text is not None:
            (unfinished / name).write_bytes(text.encode())
            files[name] = hash_of_file(unfinished / name)
    manifest = draft.manifest.model_copy(update={"files": files, "written_at": time.time()})
    _check_all_there(unfinished, files)
    write_manifest(unfinished, manifest)
    target = directory.place(unfinished, manifest.step)
    directory.point_at(target)
    return FoundCheckpoint(target, manifest)


def _check_all_there(unfinished: Path, files: dict[str, FileFacts]) -> None:
    """Another rank's file may lie on a disk that this one does not see: then no checkpoint is made."""
    for name, facts in files.items():
        size = os.stat(unfinished / name).st_size
        if size != facts.bytes:
            raise OSError(f"{unfinished / name} has {size} bytes here, its rank wrote {facts.bytes}")
