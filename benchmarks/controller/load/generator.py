"""The process that plays N rollout replicas and one policy replica: `python -m benchmarks.controller.load.generator`.

Reads one JSON object (`Plan`) from stdin and writes one JSON object to stdout. Each replica is a coroutine with
connections of its own for leases and pushes, for heartbeats, and for the long-poll of publications, as the real
worker has. A replica "generates" in no time: closed loop, it pushes at once and leases again; open loop (`rate`),
it begins a group at set times, and its latencies count from those times, however late it was.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import secrets
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import uvloop

from benchmarks.controller.load.bodies import Bundles, json_group
from benchmarks.controller.load.wire import Connection, checked, head
from schema.wire import payload_file
from schema.wire.batch import decode_batch
from schema.wire.frame import CONTENT_TYPE
from schema.wire.sample import decode_sample

GRANT = re.compile(rb'"group_id":"([^"]+)","lease_id":"([^"]+)"')
STATUS = re.compile(rb'"status":"(\w+)"')
GROUP = re.compile(rb"e\d+-p\d+")
ROLLOUT, POLICY = "rollout-token-of-the-load", "policy-token-of-the-load"
BEAT_SECONDS, POLL_SECONDS = 2.0, 20.0


@dataclass
class Plan:
    """What to do. `rate`: groups per second of all replicas together, or None for as many as possible."""

    url: str
    replicas: int
    n_samples: int
    tokens: int
    warm_up: float
    seconds: float
    rate: float | None = None
    name: str = "bench"
    is_naive: bool = False
    share: str = ""
    """The shared payload directory, when payloads do not pass through the controller."""


class Latencies:
    """Seconds of each call inside the measured window."""

    def __init__(self) -> None:
        self.counting = False
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, seconds: float) -> None:
        if self.counting:
            self._seconds[kind].append(seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        """For each kind: count, p50 and p99 in milliseconds. There is always an entry for leases."""
        kinds = sorted({*self._seconds, "lease"})
        found = {kind: self._seconds[kind] or [math.inf] for kind in kinds}
        return {
            kind: {"n": len(values), "p50_ms": _quantile(values, 0.5), "p99_ms": _quantile(values, 0.99)}
            for kind, values in found.items()
        }


def _quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)))], 2)


@dataclass
class Run:
    """State of one run that all coroutines share."""

    plan: Plan
    bundles: Bundles
    latencies: Latencies = field(default_factory=Latencies)
    pushed: int = 0
    trained: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    beats: int = 0
    refused: int = 0
    statuses: dict[str, int] = field(default_factory=dict)


class Replica:
    """One rollout replica."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.version, self.publication = 0, 0
        self.leases: set[str] = set()

    async def start(self) -> None:
        url = self.run.plan.url
        self.work, self.beat, self.poll = [await Connection.open(url) for _ in range(3)]
        body = _json(request_id=_id(), role="rollout", name=f"{self.run.plan.name}-{self.number}")
        reply = json.loads(await _posted(self.work, "/v1/replicas", ROLLOUT, body))
        self.id, self.incarnation = reply["replica_id"], reply["incarnation"]
        share = self.run.plan.share
        self.root = payload_file.directory(share, reply["job_id"]) if share else None
        self._take(reply["publication"])
        self._push_head = head("POST", "/v1/samples", ROLLOUT, None, CONTENT_TYPE)

    def _take(self, publication: dict[str, Any]) -> None:
        self.version, self.publication = publication["version"], publication["id"]

    async def watch(self) -> None:
        """Follow the newest weights."""
        while True:
            path = f"/v1/publications/latest?newer_than={self.publication}&wait_s={POLL_SECONDS}"
            body = checked(await self.poll.request(head("GET", path, ROLLOUT, 0)))
            if body:
                self._take(json.loads(body))

    async def heartbeat(self) -> None:
        path = f"/v1/replicas/{self.id}/heartbeat"
        await asyncio.sleep(BEAT_SECONDS * (self.number % 97) / 97)
        while True:
            body = _json(incarnation=self.incarnation, leases=list(self.leases), version=self.version)
            began = perf_counter()
            await _posted(self.beat, path, ROLLOUT, body)
            self.run.latencies.add("heartbeat", perf_counter() - began)
            self.run.beats += 1
            await asyncio.sleep(BEAT_SECONDS)

    async def loop(self) -> None:
        """Lease, push, again."""
        clock, plan = perf_counter, self.run.plan
        interval = plan.replicas / plan.rate if plan.rate else 0.0
        due = clock() + interval * self.number / plan.replicas
        while True:
            if interval:
                await asyncio.sleep(max(0.0, due - clock()))
            began = due if interval else clock()
            due += interval
            grants = await self._lease(began, 0.0 if interval else POLL_SECONDS)
            for group_id, lease_id in grants:
                await self._push(group_id, lease_id)

    async def _lease(self, began: float, wait_s: float) -> list[tuple[bytes, bytes]]:
        run, clock = self.run, perf_counter
        version = self.version
        body = _json(
            request_id=_id(),
            replica_id=self.id,
            incarnation=self.incarnation,
            version=version,
            publication_id=self.publication,
            max_groups=1,
            wait_s=wait_s,
        )
        reply = await _posted(self.work, "/v1/leases", ROLLOUT, body)
        if run.latencies.counting:
            status = STATUS.search(reply).group(1).decode()  # type: ignore[union-attr]
            run.statuses[status] = run.statuses.get(status, 0) + 1
        grants = GRANT.findall(reply)
        if grants:
            run.latencies.add("lease", clock() - began)
            self.leases.update(lease.decode() for _, lease in grants)
        elif self.version == version:  # asked to update before the long-poll has returned
            await asyncio.sleep(0.01)
        return grants

    async def _push(self, group_id: bytes, lease_id: bytes) -> None:
        run, clock = self.run, perf_counter
        names = group_id.decode(), lease_id.decode()
        if self.root is None:
            front, tail = run.bundles.bundle(self.id, *names, self.version)
        else:
            began = clock()
            front, tail = await asyncio.to_thread(run.bundles.stubs, self.root, self.id, *names, self.version)
            run.latencies.add("write", clock() - began)
        length = b"content-length: %d\r\n\r\n" % (len(front) + len(tail))
        began = clock()
        reply = checked(await self.work.request(self._push_head, length, front, tail))
        run.latencies.add("push", clock() - began)
        self.leases.discard(lease_id.decode())
        run.pushed += 1
        run.bytes_in += run.bundles.group_bytes
        run.refused += reply.count(b'"accepted":false')


class Policy:
    """The policy replica: takes every batch whole and commits it at once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step = 0

    async def start(self) -> None:
        url = self.run.plan.url
        self.work, self.beat = await Connection.open(url), await Connection.open(url)
        name = f"{self.run.plan.name}-policy"
        request = _json(request_id=_id(), role="policy", name=name, resume_step=None)
        reply = json.loads(await _posted(self.work, "/v1/replicas", POLICY, request))
        self.id, self.incarnation = reply["replica_id"], reply["incarnation"]
        self.epoch, self.step = reply["policy_epoch"], reply["committed_steps"]
        share = self.run.plan.share
        self.root = payload_file.directory(share, reply["job_id"]) if share else None
        await self._publish(self.step)

    def _mine(self, **more: object) -> bytes:
        return _json(
            request_id=_id(), replica_id=self.id, incarnation=self.incarnation, policy_epoch=self.epoch, **more
        )

    async def _publish(self, version: int) -> None:
        body = self._mine(version=version, uri=f"v{version}", manifest_hash="m", content_hash="c", n_bytes=1)
        await _posted(self.work, "/v1/publications", POLICY, body)

    async def heartbeat(self) -> None:
        while True:
            body = _json(incarnation=self.incarnation)
            await _posted(self.beat, f"/v1/replicas/{self.id}/heartbeat", POLICY, body)
            await asyncio.sleep(BEAT_SECONDS)

    async def loop(self) -> None:
        run, clock = self.run, perf_counter
        seen = False
        while True:
            path = f"/v1/steps/{self.step}/batch?policy_epoch={self.epoch}&samples=all&wait_s={POLL_SECONDS}"
            began = clock()
            batch = checked(await self.work.request(head("GET", path, POLICY, 0)))
            if not batch:
                continue
            run.latencies.add("batch", clock() - began)
            if run.plan.share:
                began = clock()
                await asyncio.to_thread(self._read_files, batch)
                run.latencies.add("read", clock() - began)
            groups = len(GROUP.findall(batch, 8, 8 + int.from_bytes(batch[:8], "little")))
            if not seen:
                seen = True
                self._check(batch)
            began = clock()
            body = self._mine(metrics={"loss": 0.5, "grad_norm": 1.0})
            path = f"/v1/steps/{self.step}/commit"
            reply = json.loads(await _posted(self.work, path, POLICY, body))
            run.latencies.add("commit", clock() - began)
            self.step += 1
            run.trained += groups
            run.bytes_out += groups * run.bundles.group_bytes
            if reply["finished"]:
                raise RuntimeError("the data ran out: prepare more rows")
            if reply["publish"]:
                began = clock()
                await self._publish(self.step)
                run.latencies.add("publish", clock() - began)

    def _check(self, batch: bytes) -> None:
        """Once: what came is what was pushed."""
        table, frames = decode_batch(batch)
        assert table.n_samples == len(frames) > 0
        frame = payload_file.resolve(self.root, frames[0])
        assert decode_sample(frame).header.total_tokens == self.run.plan.tokens

    def _read_files(self, batch: bytes) -> None:
        """As the trainer does: every file is read and its hash checked."""
        for frame in decode_batch(batch)[1]:
            payload_file.resolve(self.root, frame)


def _json(**fields: object) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _id() -> str:
    return secrets.token_hex(8)


async def _posted(connection: Connection, path: str, token: str, body: bytes) -> bytes:
    """The body of the answer. Raises `BadAnswerError`."""
    return checked(await connection.request(head("POST", path, token, len(body)) + body))


def _counters(run: Run, pid: int) -> dict[str, float]:
    import psutil

    times = psutil.Process(pid).cpu_times()
    own = psutil.Process().cpu_times()
    return {
        "at": perf_counter(),
        "cpu": times.user + times.system,
        "own_cpu": own.user + own.system,
        "pushed": run.pushed,
        "trained": run.trained,
        "bytes_in": run.bytes_in,
        "bytes_out": run.bytes_out,
        "beats": run.beats,
    }


async def play(plan: Plan, pid: int) -> dict[str, Any]:
    """Run a plan against the service of process `pid`."""
    run = Run(plan, Bundles(plan.n_samples, plan.tokens))
    policy = Policy(run)
    await policy.start()
    replicas = [Replica(run, number) for number in range(plan.replicas)]
    for replica in replicas:
        await replica.start()
    actors: list[Policy | Replica] = [policy, *replicas]
    work = [asyncio.create_task(actor.loop()) for actor in actors]
    work += [asyncio.create_task(actor.heartbeat()) for actor in actors]
    work += [asyncio.create_task(replica.watch()) for replica in replicas]
    return await measured(run, pid, work)


async def play_naive(plan: Plan, pid: int) -> dict[str, Any]:
    """Run a plan against the naive service: the same replicas and trainer, speaking the rival's JSON."""
    run = Run(plan, Bundles(plan.n_samples, plan.tokens))
    samples = json_group(plan.n_samples, plan.tokens, 0)
    connections = [await Connection.open(plan.url) for _ in range(plan.replicas + 1)]
    work = [asyncio.create_task(_naive_replica(run, connection, samples)) for connection in connections[1:]]
    work.append(asyncio.create_task(_naive_trainer(run, connections[0])))
    return await measured(run, pid, work)


async def _naive_replica(run: Run, connection: Connection, samples: bytes) -> None:
    clock = perf_counter
    lease = json.dumps({"replica": "r", "version": 0}).encode()
    while True:
        began = clock()
        (group,) = json.loads(await _posted(connection, "/leases", "", lease))["groups"]
        run.latencies.add("lease", clock() - began)
        began = clock()
        front = b'{"group":"%s","samples":' % group["group"].encode()
        size = len(front) + len(samples) + 1
        checked(await connection.request(head("POST", "/groups", "", size), front, samples, b"}"))
        run.latencies.add("push", clock() - began)
        run.pushed += 1
        run.bytes_in += size


async def _naive_trainer(run: Run, connection: Connection) -> None:
    clock, step = perf_counter, 0
    while True:
        began = clock()
        batch = checked(await connection.request(head("GET", f"/steps/{step}/batch", "", 0)))
        run.latencies.add("batch", clock() - began)
        began = clock()
        body = json.dumps({"step": step, "metrics": {"loss": 0.5}}).encode()
        await _posted(connection, f"/steps/{step}/commit", "", body)
        run.latencies.add("commit", clock() - began)
        step += 1
        run.trained += batch.count(b'"group":')
        run.bytes_out += len(batch)


async def measured(run: Run, pid: int, work: list[asyncio.Task[None]]) -> dict[str, Any]:
    """The figures of the window while `work` goes on; then it is ended. Raises what any of it raised before."""
    timer = asyncio.create_task(_window(run, pid))
    done, _ = await asyncio.wait((timer, *work), return_when=asyncio.FIRST_COMPLETED)
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    for task in done:
        task.result()
    return await timer


async def _window(run: Run, pid: int) -> dict[str, Any]:
    await asyncio.sleep(run.plan.warm_up)
    before, run.latencies.counting = _counters(run, pid), True
    await asyncio.sleep(run.plan.seconds)
    after, run.latencies.counting = _counters(run, pid), False
    change = {name: after[name] - before[name] for name in after}
    seconds = change["at"]
    return {
        "groups_per_s": round(change["trained"] / seconds, 1),
        "pushed_per_s": round(change["pushed"] / seconds, 1),
        "samples_per_s": round(change["trained"] * run.plan.n_samples / seconds, 1),
        "mb_in_per_s": round(change["bytes_in"] / seconds / 1e6, 1),
        "mb_out_per_s": round(change["bytes_out"] / seconds / 1e6, 1),
        "cpu_percent": round(100 * change["cpu"] / seconds, 1),
        "groups_per_cpu_s": round(change["trained"] / max(change["cpu"], 1e-9), 1),
        "generator_cpu_percent": round(100 * change["own_cpu"] / seconds, 1),
        "beats_per_s": round(change["beats"] / seconds, 1),
        "refused": run.refused,
        "lease_answers": run.statuses,
        "latency": run.latencies.summary(),
    }


def main() -> None:
    """Play the plan that standard input holds, and write what was measured."""
    logging.basicConfig(level="WARNING")
    request = json.load(sys.stdin)
    pid, plan = request.pop("pid"), Plan(**request)
    json.dump(uvloop.run((play_naive if plan.is_naive else play)(plan, pid)), sys.stdout)


if __name__ == "__main__":
    main()
