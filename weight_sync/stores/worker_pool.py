"""A few requests at once, in threads that need not be waited for.

The threads are daemons, and a wait for a result watches `stop`: a request that hangs in the
network keeps no process from leaving.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, TimeoutError
from typing import TypeVar

from schema.util.threads import in_daemon
from weight_sync.errors import StoppedError, StoreError

T = TypeVar("T")
A = TypeVar("A")
LOOK_S = 0.1
"""Seconds between two looks at `stop`."""


class WorkerPool:
    """At most `n` works at once, of all threads that use it. Works must not wait for pool themselves."""

    def __init__(self, n: int, stop: threading.Event) -> None:
        self._free, self._stop = threading.Semaphore(n), stop

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Begin a work, as soon as a lane is free; without a thread for it, it fails with a `StoreError`.

        Raises `StoppedError` when the process leaves."""
        while not self._free.acquire(timeout=LOOK_S):
            self._check()
        try:
            future = in_daemon(work, "store-worker")
        except RuntimeError as error:
            future = Future()
            future.set_exception(StoreError(f"no thread can be started for a request to the store: {error}"))
        future.add_done_callback(lambda _: self._free.release())
        return future

    def wait(self, future: Future[T]) -> T:
        """Return what a work returned. Raises what it raised, or `StoppedError` when the process leaves."""
        while True:
            try:
                return future.result(LOOK_S)
            except TimeoutError:
                if future.done():  # the work's own, or it has ended at this moment
                    return future.result()
                self._check()

    def run(self, work: Callable[[], T]) -> T:
        """Begin a work and wait for it."""
        return self.wait(self.submit(work))

    def each(self, work: Callable[[A], T], items: Iterable[A]) -> list[T]:
        """Return what `work` returns for each item, in order; the first error ends it once those begun have ended."""
        futures: list[Future[T]] = []
        for item in items:
            if any(future.done() and future.exception() for future in futures):
                break
            futures.append(self.submit(lambda item=item: work(item)))  # type: ignore[misc]
        return self.gather(futures)

    def gather(self, futures: Iterable[Future[T]]) -> list[T]:
        """All results, in order. Raises the first error once all have ended, or `StoppedError`."""
        results: list[T] = []
        first: Exception | None = None
        for future in futures:
            try:
                results.append(self.wait(future))
            except StoppedError:
                raise
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
        return results

    def _check(self) -> None:
        if self._stop.is_set():
            raise StoppedError("the process leaves")
