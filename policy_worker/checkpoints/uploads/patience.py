"""How long uploads are tried again: `weight_sync.stores.patience` with the errors of uploads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from policy_worker.checkpoints.uploads.errors import UploadError, UploadStoppedError
from weight_sync.stores import patience
from weight_sync.stores.patience import USUAL, Delays

__all__ = ["USUAL", "Delays", "Patience"]


class Patience(patience.Patience):
    """Tries again, for all uploads to one target. Raises `UploadError` and `UploadStoppedError`."""

    def __init__(
        self,
        passing: Callable[[Exception], bool],
        explain: Callable[[Exception], str],
        stop: threading.Event,
        delays: Delays = USUAL,
    ) -> None:
        super().__init__(passing, explain, stop, delays, UploadError, UploadStoppedError)
