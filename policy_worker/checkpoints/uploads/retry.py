"""How uploads fail, and for how long they are tried again (`weight_sync.stores.patience` with the errors of uploads).

UploadError           one upload failed for good; the run goes on
UploadStoppedError    the process leaves; the upload goes on at its next start
UploadFailedError     the final upload failed: the trainer ends with it (exit code 1, so it is tried again)
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from policy_worker.errors import PolicyError
from weight_sync.stores import patience
from weight_sync.stores.patience import USUAL, Delays

__all__ = ["USUAL", "Delays", "Patience", "UploadError", "UploadFailedError", "UploadStoppedError"]


class UploadError(Exception):
    """An upload failed for good: says what, why and what to do. Nothing was deleted."""


class UploadStoppedError(Exception):
    """The process leaves; the upload goes on at its next start."""


class UploadFailedError(PolicyError):
    """The final upload failed, or did not end in time. Nothing was deleted."""


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
