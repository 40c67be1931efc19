"""The controller raises one kind of error for what it refuses.

    ApiError             a call that is refused: a code for programs, a text for people
    StoreError           Redis (`controller.store.errors`)
    ├ StoreUnavailable       away or too slow: the call may be repeated
    ├ UnsuitableServer       too old, or not durable where that is required
    ├ Held                   another controller is in charge of the job
    ├ Fenced                 another controller took the job over
    └ HistoryLost            it came back without the last writes
    StartError           config, data or environment do not allow a start (`controller.server`)
    DataError            a dataset that cannot be prepared (`controller.data.errors`)

`controller.services.errors` maps all of them to HTTP.
"""

from __future__ import annotations

from schema.wire.messages import ErrorCode


class ApiError(Exception):
    """Refuse a call. retry_after: whole seconds after which the answer may differ; 0: never by itself."""

    def __init__(self, code: ErrorCode, detail: str, *, retry_after: int = 0) -> None:
        super().__init__(detail)
        self.code, self.detail, self.retry_after = code, detail, retry_after
