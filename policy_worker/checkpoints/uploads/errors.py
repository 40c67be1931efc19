"""How uploads fail.

UploadError           one upload failed for good; the run goes on
UploadStoppedError    the process leaves; the upload goes on at its next start
UploadFailedError     the final upload failed: the trainer ends with it (exit code 1, so it is tried again)
"""

from __future__ import annotations

from policy_worker.errors import PolicyError


class UploadError(Exception):
    """An upload failed for good: says what, why and what to do. Nothing was deleted."""


class UploadStoppedError(Exception):
    """The process leaves; the upload goes on at its next start."""


class UploadFailedError(PolicyError):
    """The final upload failed, or did not end in time. Nothing was deleted."""
