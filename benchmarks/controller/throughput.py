"""The controller under load: simulated rollout replicas and one policy replica against the real service.

    python -m benchmarks.controller.throughput [--replicas 1,16,64,256,1000] [--seconds 8] [--quick]

A real Valkey (append-only file on, everysec) and the real `python -m controller` are started; a load generator in a
process of its own goes through the real HTTP API: lease → push (groups of 8 samples of 512 tokens with log-probs,
a bundle for each group) → batch (with all payloads) → commit → publish, heartbeats and long-polls included.
Beside it, in the same run, the same flow as JSON against a naive FastAPI service on the same Valkey.

    closed loop   every replica leases again as soon as it has pushed: the largest throughput
    open loop     256 replicas begin groups at fixed times, half as many as the closed loop managed: latencies
    restart       100,000 groups in the ledger, kill -9, time to /readyz and to the first lease
    bulk          groups of 4 MB, through the controller and past it (`controller.payload_store`)

The last line has groups_per_s, lease_p99_ms, restart_s, rss_mb, json_groups_per_s, and everything that was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.controller.load.generator import Plan
from benchmarks.controller.load.servers import TOKENS as TOKENS_OF
from benchmarks.controller.load.servers import Service, controller, generate, make_run, naive, running, valkey
from benchmarks.harness import ROOT, in_turns, options, report, say
from controller.client import Client
from tests.controller.drivers import Rollout, Trainer

N_SAMPLES, TOKENS, ROWS = 8, 512, 20_000
LEAST_GROUPS_PER_STEP = 128
"""A step takes as many groups as there are replicas, but so many at least."""
NAIVE_GROUPS_PER_STEP = 16
OPEN_REPLICAS = 256
BIG_TOKENS = 57_000
"""Tokens of a sample of 4 MB / 8: 9 bytes each."""


class Bench:
    """One run of everything. Each measurement has a job, a Valkey and processes of its own."""

    def __init__(self, given: argparse.Namespace, directory: Path) -> None:
        self.given, self._directory = given, directory
        self._runs = 0

    def run_dir(self, replicas: int, *, groups_per_step: int = 0, bound: int = 16, **more: Any) -> Path:
        """`bound`: steps; as many groups as replicas can hold, and versions that lag, must fit into it."""
        self._runs += 1
        per_step = groups_per_step or max(LEAST_GROUPS_PER_STEP, replicas)
        place = self._directory / f"run-{self._runs}"
        return make_run(place, groups_per_step=per_step, n_samples=N_SAMPLES, bound=bound, rows=ROWS, **more)

    def _play(self, start: Callable[[str], Service], replicas: int, **changes: Any) -> dict[str, Any]:
        """The load of so many replicas against a service of its own. start: from the address of its Redis."""
        with valkey() as redis_url, running(start(redis_url)) as service:
            values = {"url": service.url, "replicas": replicas, "n_samples": N_SAMPLES, "tokens": TOKENS}
            times = {"warm_up": self.given.warm_up, "seconds": self.given.seconds}
            return generate(Plan(**{**values, **times, **changes}), service)

    def closed(self, replicas: int, **changes: Any) -> dict[str, Any]:
        """Play a closed loop: each replica asks again as soon as it is answered."""
        return self._play(partial(controller, self.run_dir(replicas)), replicas, **changes)

    def json(self, replicas: int) -> dict[str, Any]:
        """The naive JSON variant."""
        return self._play(partial(naive, groups_per_step=NAIVE_GROUPS_PER_STEP), replicas, is_naive=True)

    def open(self, rate: float) -> dict[str, Any]:
        """Half of what was possible, at fixed times."""
        return {**self.closed(OPEN_REPLICAS, rate=rate), "rate": round(rate, 1)}

    def bulk(self, *, shared: bool) -> dict[str, Any]:
        """Groups of 4 MB, through the controller or past it."""
        share = str(self._directory / "shared") if shared else ""
        more = {"payload_store": share, "payload_bytes": 0} if shared else {}
        run_dir = self.run_dir(16, groups_per_step=8, **more)
        return self._play(partial(controller, run_dir), 16, tokens=BIG_TOKENS, share=share)

    def restart(self, groups: int, *, train: bool) -> dict[str, Any]:
        """Seconds until a killed controller with so many groups serves again."""
        per_step = LEAST_GROUPS_PER_STEP
        bound = 16 if train else groups // per_step + 1
        run_dir = self.run_dir(16, groups_per_step=per_step, bound=bound)
        with valkey() as redis_url:
            began = time.perf_counter()
            request = {"run_dir": str(run_dir), "redis_url": redis_url, "groups": groups, "train": train}
            command = [sys.executable, "-m", "benchmarks.controller.load.seed"]
            subprocess.run(command, input=json.dumps(request).encode(), cwd=ROOT, check=True)
            say(f"  {groups} groups written in {time.perf_counter() - began:.1f} s")
            service = controller(run_dir, redis_url)
            with running(service):
                _first_lease(service)
            times = []
            for _ in range(3):
                began = time.perf_counter()
                with running(service):
                    ready = time.perf_counter() - began
                    _first_lease(service)
                    times.append((ready, time.perf_counter() - began))
                    memory = service.memory_mb()
        result = {
            "ready_s": round(median(ready for ready, _ in times), 2),
            "first_lease_s": round(median(lease for _, lease in times), 2),
            "rss_mb": round(memory, 1),
        }
        say(f"  restart with {groups} {'trained' if train else 'queued'} groups: {result}")
        return result


def _first_lease(service: Service) -> None:
    """Register, publish if nothing is, and lease one group."""
    with Client(service.url, TOKENS_OF["policy"]) as policy, Client(service.url, TOKENS_OF["rollout"]) as rollout:
        trainer, replica = Trainer(policy), Rollout(rollout)
        trainer.publish(trainer.register(resume_step=None).committed_steps)
        replica.register()
        assert replica.lease().groups


def measure(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    bench, rival_at = Bench(given, directory), min(given.replicas, key=lambda count: abs(count - 64))
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        str(count): partial(bench.closed, count) for count in given.replicas
    }
    turns = in_turns({**ways, "json": partial(bench.json, rival_at)}, given.rounds, warm_up=0)
    speeds = {name: median(result["groups_per_s"] for result in taken) for name, taken in turns.items()}
    rival = speeds.pop("json")
    best = max(speeds, key=lambda name: speeds[name])
    largest = speeds.get(str(OPEN_REPLICAS)) or speeds[best]
    say(f"open loop: {OPEN_REPLICAS} replicas at half of {largest:.0f} groups/s")
    opened = in_turns({"open loop": partial(bench.open, largest / 2)}, given.rounds, warm_up=0)["open loop"]
    found: dict[str, Any] = {
        "groups_per_s": speeds[best],
        "lease_p99_ms": median(result["latency"]["lease"]["p99_ms"] for result in opened),
        "restart_s": None,
        "rss_mb": max(result["rss_mb"] for name in speeds for result in turns[name]),
        "json_groups_per_s": rival,
        "samples_per_s": speeds[best] * N_SAMPLES,
        "groups_per_cpu_s": median(result["groups_per_cpu_s"] for result in turns[best]),
        "by_replicas": {name: turns[name][-1] for name in speeds},
        "open_loop": opened[-1],
        "json": turns["json"][-1],
    }
    if not given.no_bulk:
        found["bulk"] = bench.bulk(shared=False)
        found["bulk_shared"] = bench.bulk(shared=True)
    if given.restart_groups:
        found["restart"] = bench.restart(given.restart_groups, train=True)
        found["restart_queued"] = bench.restart(given.restart_groups, train=False)
        found["restart_s"] = found["restart"]["first_lease_s"]
    return found


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The last round of each measurement, with p50 / p99 of its calls."""
    kinds = {f"{name} replicas": result for name, result in found["by_replicas"].items()}
    kinds |= {name: found[name] for name in ("open_loop", "json", "bulk", "bulk_shared") if name in found}
    columns = (
        "pushed_per_s",
        "groups_per_s",
        "cpu_percent",
        "groups_per_cpu_s",
        "rss_mb",
        "mb_in_per_s",
        "mb_out_per_s",
    )
    return {
        name: {column: result[column] for column in columns}
        | {f"{kind} ms": f"{ms['p50_ms']:.3g} / {ms['p99_ms']:.3g}" for kind, ms in result["latency"].items()}
        for name, result in kinds.items()
    }


def main() -> None:
    given = options(
        __doc__, rounds=3, replicas=([1, 16, 64, 256, 1000], "numbers of rollout replicas"),
        seconds=(8.0, "of each measurement"), warm_up=(2.0, "seconds before each measurement"),
        restart_groups=(100_000, "groups in the ledger; 0: leave it out"),
        no_bulk=(False, "leave groups of 4 MB out"), quick=(False, "one short round, 10,000 groups for the restart"),
    )  # fmt: skip
    if given.quick:
        given.rounds, given.seconds = 1, min(given.seconds, 4.0)
        given.restart_groups = min(given.restart_groups, 10_000)
    with tempfile.TemporaryDirectory(prefix="bench-controller-") as directory:
        found = measure(given, Path(directory))
    report(given, found, rows_of(found))


if __name__ == "__main__":
    main()
