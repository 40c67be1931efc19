"""What a checkpoint holds of the controller's ledger, for a controller that has lost its own."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from policy_worker.checkpoints.find import Resumption, newest_in
from policy_worker.checkpoints.layout import LEDGER, Found, checkpoints_of
from policy_worker.checkpoints.verify import faults
from policy_worker.errors import CheckpointError, DamagedCheckpointError
from schema.wire.messages import LedgerSnapshot

log = logging.getLogger(__name__)


def snapshot_of(found: Found) -> LedgerSnapshot | None:
    """The ledger of a checkpoint; None if it holds none.

    Raises:
        DamagedCheckpointError: the file is not what a controller has written.
    """
    if LEDGER not in found.manifest.files:
        return None
    wrong, path = faults(found.path, found.manifest.files, [LEDGER]), found.path / LEDGER
    if wrong:
        raise DamagedCheckpointError(wrong[0])
    try:
        return LedgerSnapshot.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error


def newest_snapshot(run_dir: Path, resumption: Resumption | None) -> LedgerSnapshot | None:
    """The ledger of the newest checkpoint of this run, else of the one that it began from."""
    try:
        found = newest_in(checkpoints_of(run_dir)) or (resumption.found if resumption else None)
        return None if found is None else snapshot_of(found)
    except CheckpointError as error:
        log.error("the newest checkpoint does not tell of the ledger: %s", error)
        return None
