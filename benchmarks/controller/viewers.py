"""What ten open dashboards cost the controller, of the CPU time of a small job.

    python -m benchmarks.controller.viewers [--viewers 10] [--seconds 30] [--rate 2]

The real controller on a real Valkey; a trainer and a replica of the tests train `rate` steps a second. Viewers follow
the stream of events and ask for the front page every two seconds, as the page does. Measured in turn in the same
job, without viewers and with them: CPU seconds of the controller a second. The last line of stdout is one JSON object
with each round, the difference of the medians, and what the viewer who saw least has seen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import httpx
import psutil

from benchmarks.controller.load.servers import TOKENS, controller, make_run, running, valkey
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
        clients = [
            stack.enter_context(Client(self.service.url, TOKENS[role])) for role in ("policy", "rollout")
        ]
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
    parser = argparse.ArgumentParser(description="CPU of the controller with open dashboards, and without.")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each part of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.0, help="steps a second")
    options = parser.parse_args()
    alone, watched, seen = [], [], []
    with ExitStack() as stack:
        bench = Bench(stack, options.rate)
        bench.train(WARM_UP)
        for _ in range(options.rounds):
            alone.append(bench.train(options.seconds))
            cores, viewers = bench.watched(options.seconds, options.viewers)
            watched.append(cores)
            seen += [(viewer.events, viewer.refreshed) for viewer in viewers]
    found = {
        "cores_alone": [round(cores, 4) for cores in alone],
        "cores_watched": [round(cores, 4) for cores in watched],
        "viewers_cores": round(median(watched) - median(alone), 4),
        "ratio": round(median(watched) / median(alone), 3),
        "least_events_of_a_viewer": min(events for events, _ in seen),
        "least_pages_of_a_viewer": min(refreshed for _, refreshed in seen),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
