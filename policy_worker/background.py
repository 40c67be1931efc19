"""One piece of background work at a time, on every rank: started together, looked at each step, awaited.

A daemon thread: a process that has to end does not wait for it. Its error is kept until `wait`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait

from schema.util.threads import in_daemon


class Background:
    """The last piece of work that was started. name: of its thread."""

    def __init__(self, name: str = "checkpoint") -> None:
        self._name = name
        self._work: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether work was started that has not been awaited yet."""
        return self._work is not None

    @property
    def running(self) -> bool:
        """Whether work is under way at this moment."""
        return self._work is not None and not self._work.done()

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, as far as is known now."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the work before must have been awaited."""
        assert self._work is None, "two at once"
        self._work = in_daemon(work, self._name)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the work; False when `seconds` were not enough. Raises what it has raised."""
        work = self._work
        if work is None:
            return True
        if not wait([work], seconds).done:
            return False
        self._work = None
        work.result()
        return True
