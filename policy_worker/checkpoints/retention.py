"""Which checkpoints stay: the newest, the best validated one, those that are being uploaded, then the newest others.

`max_keep` counts all that stay, but neither the newest nor the best nor one under upload is ever deleted for it.
After a checkpoint is complete the best one is noted, expired ones go, and the one that was resumed from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from policy_worker.checkpoints import directory
from policy_worker.checkpoints.find import complete_in, is_ancestor
from policy_worker.checkpoints.layout import BEST, FoundCheckpoint
from policy_worker.checkpoints.uploads import Uploader
from schema.config.sections.train import CheckpointConfig
from schema.util.atomic_file import write_text

log = logging.getLogger(__name__)

Scored = tuple[FoundCheckpoint, float]
"""A checkpoint and the mean validation score of its weights."""


def scored(complete: Sequence[FoundCheckpoint], newest: FoundCheckpoint, scores: Mapping[int, float]) -> list[Scored]:
    """The checkpoints that were validated. scores: by weight version, of the way that led to the newest one."""
    way = [checkpoint for checkpoint in complete if is_ancestor(checkpoint.manifest, newest.manifest)]
    return [(checkpoint, scores[checkpoint.step]) for checkpoint in way if checkpoint.step in scores]


def best(candidates: Sequence[Scored]) -> Scored | None:
    """The one with the highest score; the newer of equals."""
    return max(candidates, key=lambda rated: (rated[1], *rated[0].age), default=None)


def expired(
    complete: Sequence[FoundCheckpoint],
    newest: FoundCheckpoint,
    preferred: FoundCheckpoint | None,
    held: Collection[FoundCheckpoint],
    max_keep: int,
) -> list[FoundCheckpoint]:
    """List what to delete.

    complete: all complete checkpoints. newest: the one that `latest` names. preferred: the best validated one. held:
    those being read right now. max_keep: how many stay; -1: all."""
    if max_keep < 0:
        return []
    protected = [each for each in complete if each in (newest, preferred) or each in held]
    others = [each for each in complete if each not in protected]
    others.sort(key=lambda checkpoint: order(checkpoint, newest), reverse=True)
    return others[max(max_keep - len(protected), 0) :]


def order(checkpoint: FoundCheckpoint, newest: FoundCheckpoint) -> tuple[bool, int, int]:
    """Sort what led to the newest before what is of timelines that were left; then by age."""
    return is_ancestor(checkpoint.manifest, newest.manifest), *checkpoint.age


class Housekeeper:
    """Rank 0's. Nothing here ends a run: what cannot be deleted is said, and stays."""

    def __init__(self, root: Path, settings: CheckpointConfig, uploader: Uploader) -> None:
        self._root, self._settings = root, settings
        self.uploader = uploader
        """It holds what it has not uploaded yet."""
        self._resumed_from: Path | None = None

    def resumed_from(self, path: Path) -> None:
        if self._settings.delete_after_load:
            self._resumed_from = path

    def tidy(self, newest: FoundCheckpoint, scores: Mapping[int, float]) -> None:
        """newest: the checkpoint that has just become complete. scores: see `keep.scored`."""
        try:
            self._tidy(newest, scores)
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self._root, error)

    def _tidy(self, newest: FoundCheckpoint, scores: Mapping[int, float]) -> None:
        complete = complete_in(self._root)[0]
        preferred = self._preferred(complete, newest, scores)
        held = [checkpoint for checkpoint in complete if self.uploader.holds(checkpoint.path)]
        for checkpoint in expired(complete, newest, preferred, held, self._settings.max_keep):
            directory.remove(checkpoint.path)
            log.info("deleted checkpoint %s: max_keep = %d", checkpoint.path, self._settings.max_keep)
        path = self._resumed_from
        if path is not None and path != newest.path and not self.uploader.holds(path):
            self._resumed_from = None
            if path.exists() and (preferred is None or path != preferred.path):
                directory.remove(path)
                log.info("deleted checkpoint %s: delete_after_load = true", path)

    def _preferred(
        self, complete: list[FoundCheckpoint], newest: FoundCheckpoint, scores: Mapping[int, float]
    ) -> FoundCheckpoint | None:
        """The best validated one, by what the controller knows and, where that has begun anew, by the note."""
        noted = self._noted(complete)
        known = scored(complete, newest, scores)
        if noted is not None and noted[0] not in [checkpoint for checkpoint, _ in known]:
            known.append(noted)
        preferred = best(known)
        if preferred is None:
            return None
        if preferred != noted:
            checkpoint, score = preferred
            body = {"name": checkpoint.path.name, "timeline": checkpoint.manifest.timeline, "score": score}
            write_text(self._root / BEST, json.dumps(body), durable=True)
        return preferred[0]

    def _noted(self, complete: list[FoundCheckpoint]) -> Scored | None:
        """Return what the note says, if it speaks of a checkpoint that is there: not of one that took its name."""
        try:
            body = json.loads((self._root / BEST).read_text())
            name, timeline, score = body["name"], body["timeline"], float(body["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        for checkpoint in complete:
            if (checkpoint.path.name, checkpoint.manifest.timeline) == (name, timeline):
                return checkpoint, score
        return None
