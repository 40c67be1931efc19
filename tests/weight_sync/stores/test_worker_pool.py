"""WorkerPool: what a work returns or raises reaches who waits for it, and no lane is lost."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from weight_sync.errors import StoreError
from weight_sync.stores.worker_pool import WorkerPool


@pytest.fixture
def pool() -> WorkerPool:
    return WorkerPool(2, threading.Event())


class Ending(Future[str]):
    """Ends at the moment at which the first wait for it is over."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self._error = error

    def result(self, timeout: float | None = None) -> str:
        if self.done():
            return super().result(timeout)
        if self._error is None:
            self.set_result("found")
        else:
            self.set_exception(self._error)
        raise TimeoutError


def test_a_work_that_ends_when_the_wait_does_has_its_own_end(pool: WorkerPool) -> None:
    assert pool.wait(Ending(None)) == "found"
    for error in (TimeoutError("the work's own"), ValueError("the work's own")):
        with pytest.raises(type(error), match="the work's own"):
            pool.wait(Ending(error))


def test_without_threads_a_work_fails_and_no_lane_is_lost(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(StoreError, match="can't start new thread"):
                pool.run(lambda: "found")
        with pytest.raises(StoreError, match="can't start new thread"):
            pool.each(str, range(3))
    assert pool.each(str, range(3)) == ["0", "1", "2"]
