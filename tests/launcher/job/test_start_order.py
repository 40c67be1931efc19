"""A trainer that shares the memory of GPUs with an engine starts after it: the engine measures what is free."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from controller.client import ControllerLost
from launcher.display.screen import open_screen
from launcher.job.job import Job
from launcher.job.plan import JobPlan
from launcher.plan import redis_server
from launcher.plan.addresses import Site
from launcher.plan.machine import Machine
from launcher.plan.placement import PlacedReplica, place
from launcher.plan.rundir import RunDir, RunTokens
from schema.config import Config
from schema.wire.messages import ReplicaInfo
from tests.launcher.samples import config
from tests.support.waiting import until

VLLM = {"backend": "vllm", "gpu_memory_utilization": 0.5}


def info(name: str, **changes: Any) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "replica_id": f"{name}.1", "role": "rollout", "name": name, "incarnation": 1, "state": "live", "version": -1,
        "leases": 0, "last_seen_s": 0.0, "host": "h", "pid": 1, "engine": "", "status": "", "gauges": {},
    }  # fmt: skip
    return ReplicaInfo(**fields | changes)


class Start:
    """Lists the processes of a job instead of starting them; its controller gives the answers of the test."""

    def __init__(self, root: Path, settings: Config, gpus: int) -> None:
        run = RunDir(root)
        run.make()
        self.workers = place(settings, Machine(cores=8, gpus=tuple(map(str, range(gpus)))))
        plan = JobPlan(
            config=settings, run=run, tokens=RunTokens.fresh(), site=Site("127.0.0.1", 1, "http://127.0.0.1:1"),
            redis=redis_server.embedded(run.redis), workers=self.workers, reuse_data=True, continued=False,
            env=dict(os.environ),
        )  # fmt: skip
        self.job = Job(plan, open_screen())
        self.answer: list[ReplicaInfo] | ControllerLost = ControllerLost("not yet")
        self.asked = 0
        self.started: list[str] = []
        self.job.supervisor.launch = self.launch  # type: ignore[method-assign,assignment]
        self.job.link.ask = self.ask  # type: ignore[method-assign]

    def launch(self, replica: PlacedReplica, **_: Any) -> None:
        self.started.append(replica.name)
        done: Any = type("Kept", (), {"done": asyncio.Event()})()
        self.job.supervisor.replicas[replica.name] = done

    async def ask(self, call: Any, patience: float = 0.0) -> Any:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def looked(self) -> None:
        before = self.asked
        await asyncio.to_thread(until, lambda: self.asked >= before + 2, "two looks")


def started_with(root: Path, settings: Config, gpus: int) -> list[str]:
    async def begin() -> list[str]:
        start = Start(root, settings, gpus)
        start.job._launch_workers()
        return start.started

    return asyncio.run(begin())


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ({"rollout": VLLM, "placement": {"share": "memory"}}, 0),
        ({"rollout": VLLM}, 2),
        ({"rollout": {"backend": "transformers"}, "placement": {"share": "memory"}}, 1),
        ({"rollout": VLLM, "placement": {"share": "time"}}, 1),
    ],
    ids=["without GPUs", "GPUs of their own", "an engine that reserves nothing", "in turns"],
)
def test_otherwise_all_start_at_once(tmp_path: Path, settings: dict[str, Any], gpus: int) -> None:
    assert sorted(started_with(tmp_path, config(**settings), gpus)) == ["policy-0", "rollout-0"]


def test_a_trainer_waits_for_the_engines_on_its_gpus(tmp_path: Path) -> None:
    settings = config(
        rollout={**VLLM, "parallelism": {"n_init_replicas": 2, "tp_size": 1}},
        policy={"parallelism": {"dp_shard_size": 2}},
        placement={"share": "memory"},
    )

    async def check() -> None:
        start = Start(tmp_path, settings, 2)
        start.job._launch_workers()
        start.job.link.started.set()
        assert start.started == ["rollout-0", "rollout-1"]
        await start.looked()  # the controller does not answer yet
        booted = {"gauges": {"running": 0.0}}
        for start.answer in (
            [info("rollout-0", **booted), info("rollout-1")],
            [info("rollout-0", **booted), info("rollout-1", **booted, state="lost")],
        ):
            await start.looked()
            assert start.started == ["rollout-0", "rollout-1"]
        start.answer = [info("rollout-0", **booted), info("rollout-1", **booted)]
        await asyncio.to_thread(until, lambda: "policy-0" in start.started, "the trainer")

    asyncio.run(check())


@pytest.mark.parametrize("ends", [False, True])
def test_an_engine_that_is_gone_for_good_is_not_waited_for(tmp_path: Path, *, ends: bool) -> None:
    """And nothing is started once the job ends."""
    settings = config(rollout=VLLM, placement={"share": "memory"})

    async def check() -> None:
        start = Start(tmp_path, settings, 1)
        start.job._launch_workers()
        start.job.link.started.set()
        await start.looked()
        start.job.scaling.over = ends
        start.job.supervisor.replicas["rollout-0"].done.set()
        await asyncio.to_thread(until, lambda: not start.job._errands, "the end of the wait")
        assert ("policy-0" in start.started) == (not ends)

    asyncio.run(check())


def test_a_trainer_keeps_to_what_the_engine_leaves(tmp_path: Path) -> None:
    """Only where there is an engine that takes its part."""

    def parts(gpus: int, **settings: Any) -> set[str | None]:
        workers = place(config(**settings), Machine(cores=8, gpus=tuple(map(str, range(gpus)))))
        policies = [spec for worker in workers for spec in worker.processes if worker.name.startswith("policy")]
        return {spec.env.get("COSMOS_GPU_PART") for spec in policies}

    shared = {"placement": {"share": "memory"}}
    assert parts(1, rollout=VLLM | {"gpu_memory_utilization": 0.6}, **shared) == {"0.4"}
    assert parts(1, rollout={"backend": "transformers"}, **shared) == {None}
    assert parts(2, rollout=VLLM) == {None}
