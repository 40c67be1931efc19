"""The errors name what can go wrong between the controller and Redis.

StoreError
├── StoreUnavailable   for now: callers answer 503 and the store keeps reconnecting
├── Fenced             for good: another controller took over this job
├── HistoryLost        for good: Redis came back with an older state than was acknowledged
├── Held               at start: another controller is in charge, and waiting was not asked for
└── UnsuitableServer   at start: the server is too old, or not durable where that is required
"""

from __future__ import annotations


class StateStoreError(Exception):
    """Base of all errors of the store."""


class StoreUnavailable(StateStoreError):
    """Redis does not take writes at the moment; `retry_after` seconds is a good time to come back."""

    def __init__(self, detail: str, retry_after: float = 1.0) -> None:
        super().__init__(detail)
        self.retry_after = retry_after


class Fenced(StateStoreError):
    """Another controller took over this job: nothing that this process decides counts any more."""


class HistoryLost(StateStoreError):
    """Redis restarted from an older state: this process must be restarted to rebuild from it."""


class Held(StateStoreError):
    """Another controller is in charge of this job."""


class UnsuitableServer(StateStoreError):
    """The server cannot hold the state of a job."""
