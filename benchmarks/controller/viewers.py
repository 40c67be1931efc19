"""What ten open dashboards cost the controller, of the CPU time of a small job.

    python -m benchmarks.controller.viewers [--viewers 10] [--seconds 30] [--rate 2]

The real controller on a real Valkey; a trainer and a replica of the tests train `rate` steps a second. Viewers follow
the stream of events and ask for the front page every two seconds, as the page does. Measured in turn in the same
job, without viewers and with them: CPU seconds of the controller a second. The report has
each round, the difference of the medians, and what the viewer who saw least has seen.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import httpx
import psutil

from benchmarks.controller.load.servers import TOKENS, controller, make_run, running, valkey
from benchmarks.harness import in_turns, options, report
from controller.client import Client
from tests.controller.drivers import begin, train_step

REFRESH = 2.0
"""Seconds between front pages, as in static/front.js."""
WARM_UP = 3.0


class Viewer(threading.Thread):
    """One open front page."""

    def __init__(self, url: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._stopping = stop
        self.events = self.refreshed = 0
        headers = {"authorization": f"Bearer {TOKENS['user']}"}
        self._http = httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30.0)

    def run(self) -> None:
        after = self._http.get("/v1/overview").json()["event"]
        self._http.get("/v1/curves", params={"metric": ["reward_mean", "samples_per_s"]})
        shown = time.monotonic()
        with self._http.stream("GET", "/v1/events", params={"after": after}) as events:
            for line in events.iter_lines():
                if self._stopping.is_set():
                    return
                self.events += line.startswith("id:")
                if line and time.monotonic() - shown >= REFRESH:
                    shown = time.monotonic()
                    self._http.get("/v1/overview").raise_for_status()
                    self.refreshed += 1


class Bench:
    """One job that trains `rate` steps a second, with viewers or without."""

    def __init__(self, stack: ExitStack, rate: float) -> None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = make_run(directory / "run", groups_per_step=4, n_samples=4, bound=16, rows=2000)
        self.service = stack.enter_context(running(controller(run, stack.enter_context(valkey()))))
        clients = [stack.enter_context(Client(self.service.url, TOKENS[role])) for role in ("policy", "rollout")]
        self._trainer, self._rollout = begin(clients[0], clients[1])
        self._process, self._rate, self._step = psutil.Process(self.service.process.pid), rate, 0

    def train(self, seconds: float) -> float:
        """Train so long; gives the cores that the controller used."""
        began, used = time.monotonic(), sum(self._process.cpu_times()[:2])
        for n in range(1, round(seconds * self._rate) + 1):
            train_step(self._trainer, self._rollout, self._step)
            self._step += 1
            time.sleep(max(0.0, began + n / self._rate - time.monotonic()))
        return float(sum(self._process.cpu_times()[:2]) - used) / (time.monotonic() - began)

    def watched(self, seconds: float, n_viewers: int) -> tuple[float, list[Viewer]]:
        """The same with viewers, who are there from before until after it."""
        stop = threading.Event()
        viewers = [Viewer(self.service.url, stop) for _ in range(n_viewers)]
        for viewer in viewers:
            viewer.start()
        self.train(WARM_UP)
        cores = self.train(seconds)
        stop.set()
        self.train(WARM_UP)
        for viewer in viewers:
            viewer.join(30.0)
        return cores, viewers


def main() -> None:
    given = options(
        __doc__, rounds=3, viewers=10, seconds=(15.0, "of each part of a round"), rate=(2.0, "steps a second")
    )
    seen: list[Viewer] = []

    def watched() -> float:
        cores, viewers = bench.watched(given.seconds, given.viewers)
        seen.extend(viewers)
        return cores

    with ExitStack() as stack:
        bench = Bench(stack, given.rate)
        bench.train(WARM_UP)
        ways = {"no viewer": lambda: bench.train(given.seconds), f"{given.viewers} viewers": watched}
        turns = in_turns(ways, given.rounds, warm_up=0)
    rows = {
        name: {f"round {n}": cores for n, cores in enumerate(taken, 1)} | {"median": median(taken)}
        for name, taken in turns.items()
    }
    alone, with_viewers = (row["median"] for row in rows.values())
    found = {
        "viewers_cores": with_viewers - alone,
        "ratio": with_viewers / alone,
        "least_events_of_a_viewer": min(viewer.events for viewer in seen),
        "least_pages_of_a_viewer": min(viewer.refreshed for viewer in seen),
    }
    report(given, {**found, "cores": rows}, rows)


if __name__ == "__main__":
    main()
