"""The process that feeds trackers: `python -m launcher.trackers RUN_DIR NAME…`.

It follows the run's event file until its standard input ends: the job is over, or its launcher has gone. SIGTERM
and SIGINT count as that end. Then
trackers get what is left and `CLOSE_SECONDS` to store it. Messages for people go to standard output, a line
each, which the launcher shows as events; what libraries say goes to standard error, the file trackers.log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from launcher.trackers.follow import Sent, TrackerFollower
from launcher.trackers.sinks import SINKS, Run, Sink
from launcher.trackers.tables import AnswerTables
from schema.util.atomic_file import write_text
from schema.util.text import one_line
from schema.wire import event_file

POLL = 1.0
RETRY = 30.0
"""Seconds after which a tracker that failed is tried again."""
CLOSE_SECONDS = 60.0
MOST_WORDS = 300


class Feeder(threading.Thread):
    """Feeds one tracker."""

    def __init__(self, name: str, directory: Path, over: threading.Event, say: TextIO) -> None:
        super().__init__(name=name, daemon=True)
        self._tracker, self._directory, self._over, self._say = name, directory, over, say
        self._state = directory / "trackers" / f"{name}.json"
        self._failing = False
        self._tail = event_file.Tail(event_file.path_of(directory))
        self._config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        logging = self._config["logging"]
        answers = (logging.get(f"log_{kind}_samples", 0) for kind in ("training", "validation"))
        self._follower = TrackerFollower(self._known(), self._open, self._save, AnswerTables(directory, *answers))

    def run(self) -> None:
        """Until the job is over, and what is left is sent."""
        while not (over := self._over.is_set()):
            wait = RETRY if not self._fed() else POLL
            self._over.wait(wait)
        assert over
        self._fed(last=True)

    def _fed(self, *, last: bool = False) -> bool:
        try:
            while not self._follower.read(self._tail.read()):
                self._tail = event_file.Tail(event_file.path_of(self._directory))
            self._follower.close() if last else self._follower.send()
        except Exception as error:
            self._report(error)
            return False
        if self._failing:
            self._tell("works again")
        self._failing = False
        return True

    def _report(self, error: Exception) -> None:
        if not self._failing:
            fault = one_line(f"{type(error).__name__}: {error}")[:MOST_WORDS]
            self._tell(f"does not take metrics: {fault}; training goes on, and it is tried again")
        self._failing = True

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._say.write(f"tracker {self._tracker} {text}\n")
            self._say.flush()

    def _known(self) -> Sent:
        try:
            sent = Sent(**json.loads(self._state.read_text()))
        except (OSError, ValueError, TypeError):
            return Sent()
        return sent if SINKS[self._tracker].resumes else Sent(sent.segment)

    def _save(self, sent: Sent) -> None:
        self._state.parent.mkdir(exist_ok=True)
        write_text(self._state, json.dumps(asdict(sent)) + "\n")

    def _open(self, sent: Sent) -> Sink:
        logging = self._config["logging"]
        return SINKS[self._tracker](
            Run(
                directory=self._directory,
                project=logging["project_name"],
                name=logging["experiment_name"] or self._directory.name,
                run_id=(self._directory / "job_id").read_text().strip(),
                segment=sent.segment,
                fresh=sent.step < 0 and sent.version < 0,
                config=self._config,
            )
        )


def main(arguments: Sequence[str]) -> int:
    """Feed all trackers until standard input ends."""
    directory, names = Path(arguments[0]), arguments[1:]
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no event
    over = threading.Event()
    feeders = [Feeder(name, directory, over, say) for name in names]
    for feeder in feeders:
        feeder.start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        while os.read(0, 1024):
            pass
    over.set()
    give_up = time.monotonic() + CLOSE_SECONDS
    for feeder in feeders:
        feeder.join(max(0.0, give_up - time.monotonic()))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # a library's thread that hangs ends here
