"""The same replicas and trainer as in `generator`, speaking the rival's JSON."""

from __future__ import annotations

import asyncio
import json
from time import perf_counter
from typing import Any

from benchmarks.controller.load.bodies import json_group
from benchmarks.controller.load.generator import Bundles, Plan, Run, _post, main, measured
from benchmarks.controller.load.wire import Connection, checked, head


async def play_naive(plan: Plan, pid: int) -> dict[str, Any]:
    """Run a plan against the naive service."""
    run = Run(plan, Bundles(plan.n_samples, plan.tokens))
    samples = json_group(plan.n_samples, plan.tokens, 0)
    connections = [await Connection.open(plan.url) for _ in range(plan.replicas + 1)]
    work = [asyncio.create_task(_replica(run, connection, samples)) for connection in connections[1:]]
    work.append(asyncio.create_task(_trainer(run, connections[0])))
    return await measured(run, pid, work)


async def _replica(run: Run, connection: Connection, samples: bytes) -> None:
    clock = perf_counter
    lease = json.dumps({"replica": "r", "version": 0}).encode()
    while True:
        began = clock()
        (group,) = json.loads(checked(await connection.request(_post("/leases", "", lease))))["groups"]
        run.latencies.add("lease", clock() - began)
        began = clock()
        front = b'{"group":"%s","samples":' % group["group"].encode()
        size = len(front) + len(samples) + 1
        checked(await connection.request(head("POST", "/groups", "", size), front, samples, b"}"))
        run.latencies.add("push", clock() - began)
        run.pushed += 1
        run.bytes_in += size


async def _trainer(run: Run, connection: Connection) -> None:
    clock, step = perf_counter, 0
    while True:
        began = clock()
        batch = checked(await connection.request(head("GET", f"/steps/{step}/batch", "", 0)))
        run.latencies.add("batch", clock() - began)
        began = clock()
        body = json.dumps({"step": step, "metrics": {"loss": 0.5}}).encode()
        checked(await connection.request(_post(f"/steps/{step}/commit", "", body)))
        run.latencies.add("commit", clock() - began)
        step += 1
        run.trained += batch.count(b'"group":')
        run.bytes_out += len(batch)


if __name__ == "__main__":
    main(play_naive)
