"""After a checkpoint is complete: the best one is noted, superfluous ones go, and the one that was resumed from."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from policy_worker.checkpoints import directory
from policy_worker.checkpoints.find import complete_in
from policy_worker.checkpoints.keep import Scored, best, scored, superfluous
from policy_worker.checkpoints.layout import BEST, Found
from policy_worker.checkpoints.uploads import Uploader
from schema.config.sections.train import CheckpointConfig
from schema.util.atomic_file import write_text

log = logging.getLogger(__name__)


class Housekeeper:
    """Rank 0's. Nothing here ends a run: what cannot be deleted is said, and stays."""

    def __init__(self, root: Path, settings: CheckpointConfig, uploader: Uploader | None) -> None:
        self._root, self._settings, self._uploader = root, settings, uploader
        self._resumed_from: Path | None = None

    def resumed_from(self, path: Path) -> None:
        if self._settings.delete_after_load:
            self._resumed_from = path

    def tidy(self, newest: Found, scores: Mapping[int, float]) -> None:
        """newest: the checkpoint that has just become complete. scores: see `keep.scored`."""
        try:
            self._tidy(newest, scores)
        except OSError as error:
            log.warning("old checkpoints in %s could not be deleted: %s", self._root, error)

    def _tidy(self, newest: Found, scores: Mapping[int, float]) -> None:
        complete = complete_in(self._root)[0]
        favourite = self._favourite(complete, newest, scores)
        held = [one for one in complete if self._is_held(one.path)]
        for one in superfluous(complete, newest, favourite, held, self._settings.max_keep):
            directory.remove(one.path)
            log.info("deleted checkpoint %s: max_keep = %d", one.path, self._settings.max_keep)
        path = self._resumed_from
        if path is not None and path != newest.path and not self._is_held(path):
            self._resumed_from = None
            if path.exists() and (favourite is None or path != favourite.path):
                directory.remove(path)
                log.info("deleted checkpoint %s: delete_after_load = true", path)

    def _is_held(self, path: Path) -> bool:
        return self._uploader is not None and self._uploader.holds(path)

    def _favourite(self, complete: list[Found], newest: Found, scores: Mapping[int, float]) -> Found | None:
        """The best validated one, by what the controller knows and, where that has begun anew, by the note."""
        noted = self._noted(complete)
        known = scored(complete, newest, scores)
        if noted is not None and noted[0] not in [found for found, _ in known]:
            known.append(noted)
        favourite = best(known)
        if favourite is None:
            return None
        if favourite != noted:
            found, score = favourite
            body = {"name": found.path.name, "timeline": found.manifest.timeline, "score": score}
            write_text(self._root / BEST, json.dumps(body), durable=True)
        return favourite[0]

    def _noted(self, complete: list[Found]) -> Scored | None:
        """What the note says, if it speaks of a checkpoint that is there: not of one that took its name."""
        try:
            body = json.loads((self._root / BEST).read_text())
            name, timeline, score = body["name"], body["timeline"], float(body["score"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        same = (one for one in complete if (one.path.name, one.manifest.timeline) == (name, timeline))
        return next(((found, score) for found in same), None)
