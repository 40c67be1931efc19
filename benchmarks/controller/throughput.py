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

Progress goes to stderr; the last line of stdout is one JSON object: groups_per_s, lease_p99_ms, restart_s, rss_mb,
json_groups_per_s, and everything that was measured.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.controller.load.generator import Plan
from benchmarks.controller.load.servers import Service, controller, generate, make_run, naive, running, valkey
from benchmarks.harness import ROOT

N_SAMPLES, TOKENS, ROWS = 8, 512, 20_000
LEAST_GROUPS_PER_STEP = 128
"""A step takes as many groups as there are replicas, but so many at least."""
NAIVE_GROUPS_PER_STEP = 16
OPEN_REPLICAS = 256
BIG_TOKENS = 57_000
"""Tokens of a sample of 4 MB / 8: 9 bytes each."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    """One run of everything. Each measurement has a job, a Valkey and processes of its own."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self._directory = options, directory
        self._runs = 0

    def run_dir(self, replicas: int, *, groups_per_step: int = 0, bound: int = 16, **more: Any) -> Path:
        """`bound`: steps; as many groups as replicas can hold, and versions that lag, must fit into it."""
        self._runs += 1
        groups_per_step = groups_per_step or max(LEAST_GROUPS_PER_STEP, replicas)
        return make_run(
            self._directory / f"run-{self._runs}",
            groups_per_step=groups_per_step,
            n_samples=N_SAMPLES,
            bound=bound,
            rows=ROWS,
            **more,
        )

    def plan(self, service: Service, replicas: int, **changes: Any) -> Plan:
        values = {
            "url": service.url,
            "replicas": replicas,
            "n_samples": N_SAMPLES,
            "tokens": TOKENS,
            "warm_up": self.options.warm_up,
            "seconds": self.options.seconds,
            **changes,
        }
        return Plan(**values)

    def closed(self, replicas: int, **changes: Any) -> dict[str, Any]:
        """As much as possible."""
        with valkey() as redis_url, running(controller(self.run_dir(replicas), redis_url)) as service:
            result = generate(self.plan(service, replicas, **changes), service)
        _report(f"{replicas} replicas", result)
        return result

    def json(self, replicas: int) -> dict[str, Any]:
        """The naive JSON variant."""
        with valkey() as redis_url, running(naive(redis_url, NAIVE_GROUPS_PER_STEP)) as service:
            result = generate(self.plan(service, replicas), service, is_naive=True)
        _report(f"{replicas} replicas, naive JSON", result)
        return result

    def open(self, rate: float) -> dict[str, Any]:
        """Half of what was possible, at fixed times."""
        result = self.closed(OPEN_REPLICAS, rate=rate)
        return {**result, "rate": round(rate, 1)}

    def bulk(self, *, shared: bool) -> dict[str, Any]:
        """Groups of 4 MB, through the controller or past it."""
        share = str(self._directory / "shared") if shared else ""
        more = {"payload_store": share, "payload_bytes": 0} if shared else {}
        run_dir = self.run_dir(16, groups_per_step=8, **more)
        with valkey() as redis_url, running(controller(run_dir, redis_url)) as service:
            result = generate(self.plan(service, 16, tokens=BIG_TOKENS, share=share), service)
        _report(f"groups of 4 MB, {'past' if shared else 'through'} the controller", result)
        return result

    def restart(self, groups: int, *, train: bool) -> dict[str, Any]:
        """Seconds until a killed controller with so many groups serves again."""
        per_step = LEAST_GROUPS_PER_STEP
        bound = 16 if train else groups // per_step + 1
        run_dir = self.run_dir(16, groups_per_step=per_step, bound=bound)
        with valkey() as redis_url:
            began = time.perf_counter()
            request = {"run_dir": str(run_dir), "redis_url": redis_url, "groups": groups, "train": train}
            subprocess.run(
                [sys.executable, "-m", "benchmarks.controller.load.seed"],
                input=json.dumps(request).encode(),
                cwd=ROOT,
                check=True,
            )
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

    def call(path: str, token: str, **body: Any) -> Any:
        headers = {"authorization": f"Bearer {token}-token-of-the-load", "content-type": "application/json"}
        request = Request(service.url + path, json.dumps(body).encode(), headers)
        with urlopen(request, timeout=60) as reply:
            return json.load(reply)

    policy = call("/v1/replicas", "policy", request_id=secrets.token_hex(8), role="policy", name="p")
    mine = {
        "replica_id": policy["replica_id"],
        "incarnation": policy["incarnation"],
        "policy_epoch": policy["policy_epoch"],
        "request_id": secrets.token_hex(8),
    }
    files = {"uri": "v", "manifest_hash": "m", "content_hash": "c", "n_bytes": 1}
    published = call("/v1/publications", "policy", version=policy["committed_steps"], **mine, **files)[
        "publication"
    ]
    rollout = call("/v1/replicas", "rollout", request_id=secrets.token_hex(8), role="rollout", name="r")
    reply = call(
        "/v1/leases",
        "rollout",
        request_id=secrets.token_hex(8),
        replica_id=rollout["replica_id"],
        incarnation=rollout["incarnation"],
        version=published["version"],
        publication_id=published["id"],
        max_groups=1,
    )
    assert reply["status"] == "granted", reply


def _report(name: str, result: dict[str, Any]) -> None:
    times = ", ".join(
        f"{kind} {times['p50_ms']:.1f}/{times['p99_ms']:.1f}" for kind, times in result["latency"].items()
    )
    say(
        f"  {name}: {result['groups_per_s']:.0f} groups/s ({result['groups_per_cpu_s']:.0f} per CPU second), "
        f"{result['mb_in_per_s']:.0f} MB/s in, {result['mb_out_per_s']:.0f} MB/s out, "
        f"controller {result['cpu_percent']:.0f} % CPU {result['rss_mb']:.0f} MB, generator "
        f"{result['generator_cpu_percent']:.0f} %; p50/p99 ms: {times}"
    )


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    bench = Bench(options, directory)
    counts = [int(part) for part in options.replicas.split(",")]
    by_count: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    rival = []
    for turn in range(options.rounds):
        say(f"closed loop, round {turn + 1} of {options.rounds}")
        for count in counts:
            by_count[count].append(bench.closed(count))
        rival.append(bench.json(min(counts, key=lambda count: abs(count - 64))))
    speeds = {count: median(result["groups_per_s"] for result in by_count[count]) for count in counts}
    best = max(speeds, key=lambda count: speeds[count])
    largest = speeds.get(OPEN_REPLICAS) or max(speeds.values())
    say(f"open loop: {OPEN_REPLICAS} replicas at half of {largest:.0f} groups/s")
    opened = [bench.open(largest / 2) for _ in range(options.rounds)]
    found: dict[str, Any] = {
        "groups_per_s": speeds[best],
        "lease_p99_ms": median(result["latency"]["lease"]["p99_ms"] for result in opened),
        "restart_s": None,
        "rss_mb": max(result["rss_mb"] for results in by_count.values() for result in results),
        "json_groups_per_s": median(result["groups_per_s"] for result in rival),
        "samples_per_s": speeds[best] * N_SAMPLES,
        "groups_per_cpu_s": median(result["groups_per_cpu_s"] for result in by_count[best]),
        "by_replicas": {count: results[-1] for count, results in by_count.items()},
        "open_loop": opened[-1],
        "json": rival[-1],
    }
    if options.bulk:
        say("bulk")
        found["bulk"] = bench.bulk(shared=False)
        found["bulk_shared"] = bench.bulk(shared=True)
    if options.restart_groups:
        say("restart")
        found["restart"] = bench.restart(options.restart_groups, train=True)
        found["restart_queued"] = bench.restart(options.restart_groups, train=False)
        found["restart_s"] = found["restart"]["first_lease_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="1,16,64,256,1000", help="numbers of rollout replicas")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds before each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the closed and the open loop")
    parser.add_argument(
        "--restart-groups", type=int, default=100_000, help="groups in the ledger; 0: leave it out"
    )
    parser.add_argument("--no-bulk", dest="bulk", action="store_false", help="leave groups of 4 MB out")
    parser.add_argument("--quick", action="store_true", help="one short round, 10,000 groups for the restart")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # no process is left behind
    if options.quick:
        options.rounds, options.seconds = 1, min(options.seconds, 4.0)
        options.restart_groups = min(options.restart_groups, 10_000)
    with tempfile.TemporaryDirectory(prefix="bench-controller-") as directory:
        found = measure(options, Path(directory))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
