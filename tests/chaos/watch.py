"""Looks at a running job as a user does, through its REST API, in a thread: a hanging controller holds nobody up."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from controller.client import Client, ControllerError
from controller.client import calls as api
from schema.wire.messages import JobStatus
from tests.support.waiting import PATIENCE

EVERY = 0.1


class Watch:
    """What was last heard of a job. `commits` are the moments (time.monotonic) at which a step was seen committed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.status: JobStatus | None = None
        self.commits: list[tuple[float, int]] = []
        self.rewinds = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            try:
                self._look()
            except (ControllerError, OSError, ValueError, KeyError):
                continue  # not there yet, or just killed

    def _look(self) -> None:
        url = json.loads((self._run_dir / "controller.json").read_text())["url"]
        token = (self._run_dir / ".tokens" / "user").read_text().strip()
        with Client(url, token) as client:
            while not self._stop.wait(EVERY):
                self._note(client.send(api.job()))

    def _note(self, status: JobStatus) -> None:
        before, now = self.status, time.monotonic()
        if before is not None:
            self.rewinds += status.timeline > before.timeline
            if status.step > before.step:
                self.commits.append((now, status.step))
        self.status = status

    def commit_after(self, moment: float) -> float | None:
        """When the first step after a moment was seen committed."""
        return next((at for at, _ in self.commits if at > moment), None)
