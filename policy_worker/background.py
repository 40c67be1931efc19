"""One piece of background work at a time, on every rank: started together, looked at each step, awaited.

A daemon thread: a process that has to end does not wait for it. Its error is kept until somebody asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """The last piece of work that was started. name: of its thread."""

    def __init__(self, name: str = "checkpoint") -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether work was started that nobody has awaited yet."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether work is under way at this moment."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, as far as is known now."""
        return self._error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the work before must have been awaited."""
        assert self._thread is None, "two at once"

        def run() -> None:
            try:
                work()
            except BaseException as error:  # handed to whoever awaits
                self._error = error

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the work; False when `seconds` were not enough. Raises what it has raised."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True
