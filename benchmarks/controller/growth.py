"""What a committed step leaves behind for good: in Redis by table, and in the memory of the controller.

    python -m benchmarks.controller.growth [--steps 100000] [--groups 4] [--samples 4] [--mode grpo]

The real controller's job and services in this process, on a real Valkey: groups are leased, pushed and assembled,
steps committed with the metrics of a real step, versions published and fetched, checkpoints registered every hundred
steps. Only HTTP is left out, which keeps nothing, and the append-only file, which each commit would wait for.

Reported is growth: the difference between half of the steps and all of them, divided by their number. So what is
bounded (publications, groups outstanding, caches) does not count.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tempfile
import time
from pathlib import Path

import psutil
from redis import Redis

from benchmarks.controller.load.servers import TOKENS, make_run, valkey
from benchmarks.harness import options, report, say
from controller.server import ServerSettings, open_job
from controller.services.controller import Controller
from controller.services.samples import Push
from controller.store.redis_state import Table
from schema.config import Config
from schema.wire import messages as m
from schema.wire.frame import bundle_ranges, pack_bundle
from tests.controller.drivers import make_frame, make_header, request_id

CHECKPOINT_STEPS = 100
STEP_METRICS = [
    "loss", "entropy", "clip_fraction", "behaviour_kl", "ratio_max", "grad_norm", "samples", "tokens",
    "response_tokens_mean", "advantage_abs_mean", "staleness_mean", "staleness_max", "reward_mean",
    "reward/correct", "reward/format", "wait_seconds", "train_seconds", "idle_fraction",
    "publish_gather_seconds", "publish_encode_seconds", "publish_write_seconds", "publish_announce_seconds",
    "publish_bytes", "publish_ratio", "publish_density", "publish_seconds", "step_seconds",
]  # fmt: skip
"""The metrics of a step of GRPO with two rewards that publishes deltas."""


class Run:
    """A trainer and a rollout replica that call the services as the routes do."""

    def __init__(self, controller: Controller, groups: int, samples: int) -> None:
        self.controller, self.groups, self.samples = controller, groups, samples
        self.random = random.Random(0)

    async def start(self) -> None:
        register = self.controller.replicas.register
        self.trainer = await register(
            m.RegisterRequest(request_id=request_id(), role="policy", name="policy-0", resume_step=0)
        )
        self.mine = {
            "replica_id": self.trainer.replica_id,
            "incarnation": self.trainer.incarnation,
            "policy_epoch": self.trainer.policy_epoch,
        }
        await self.publish(0)
        if not self.controller.job.config.is_grpo:
            return
        self.rollout = await register(m.RegisterRequest(request_id=request_id(), role="rollout", name="rollout-0"))
        self.update = self.rollout.publication

    async def publish(self, version: int) -> None:
        text = json.dumps(
            {
                **self.mine, "request_id": request_id(), "version": version, "uri": f"v{version:08}",
                "manifest_hash": f"{version:064x}", "content_hash": f"{-version % 2**256:064x}",
                "n_bytes": 10**9 + version, "full_bytes": 10**10, "changed": 10**8 + version,
                "elements": 10**10, "kind": "full",
                "metrics": {stage: self.random.random() for stage in ("gather", "encode", "write")},
            }
        )  # fmt: skip
        await self.controller.publications.publish(m.PublishRequest.model_validate_json(text))

    async def generate(self) -> None:
        """Lease and push what can be had; else fetch newer weights."""
        assert self.update is not None
        mine = self.rollout.replica_id
        lease = m.LeaseRequest(
            request_id=request_id(), replica_id=mine, incarnation=self.rollout.incarnation,
            version=self.update.version, publication_id=self.update.id, max_groups=self.groups,
        )  # fmt: skip
        reply = await self.controller.leases.lease(lease)
        if not reply.groups:
            newer = await self.controller.publications.latest(self.update.id, 0.0, mine, self.rollout.incarnation)
            self.update = newer or self.update
            return
        items = [
            m.PushItem(group_id=group.group_id, lease_id=group.lease_id, index=index)
            for group in reply.groups
            for index in range(self.samples)
        ]
        frames = [make_frame(make_header(index, self.update.version)) for index in range(self.samples)]
        body = pack_bundle(frames * len(reply.groups), {})
        view = memoryview(body)
        placed = zip(items, bundle_ranges(body)[0], strict=True)
        pushes = [Push(item, view[start:end], start) for item, (start, end) in placed]
        await self.controller.samples.push(mine, body, pushes)

    async def step(self, step: int) -> None:
        training = self.controller.steps
        if self.controller.job.config.is_grpo:
            while await training.batch(step, self.trainer.policy_epoch, [], 0.0) is None:
                await self.generate()
        metrics = {name: self.random.random() * 10 ** self.random.randint(-3, 3) for name in STEP_METRICS}
        text = json.dumps({**self.mine, "request_id": request_id(), "metrics": metrics})
        reply = await training.commit(step, m.CommitRequest.model_validate_json(text))
        if reply.publish:
            await self.publish(step + 1)
        if (step + 1) % CHECKPOINT_STEPS == 0:
            request = {**self.mine, "request_id": request_id(), "step": step + 1, "path": f"step_{step + 1}"}
            await training.checkpoint(m.CheckpointRequest.model_validate(request))


def held(redis: Redis, prefix: str) -> dict[str, float]:
    """Bytes held now: by table and in all in Redis, and resident in this process."""
    gc.collect()
    tables = {str(table): redis.memory_usage(f"{prefix}{table}", samples=0) or 0 for table in Table}
    return {
        **tables,
        "redis": redis.info("memory")["used_memory_dataset"],
        "controller": psutil.Process().memory_info().rss,
    }


async def measure(run_dir: Path, url: str, steps: int, groups: int, samples: int) -> dict[str, float]:
    environ = {f"COSMOS_TOKEN_{role.upper()}": token for role, token in TOKENS.items()}
    settings = ServerSettings.read(run_dir, None, 0, {**environ, "COSMOS_REDIS_URL": url})
    redis = Redis.from_url(url)
    redis.config_set("appendonly", "no")
    job = await open_job(settings)
    try:
        run = Run(Controller.of(job), groups, samples)
        await run.start()
        began, half = time.monotonic(), steps // 2
        before: dict[str, float] = {}
        for step in range(half * 2):
            if step == half:
                before = held(redis, job.store.namespace)
            if step % 5000 == 0:
                say(f"step {step}: {time.monotonic() - began:.0f} s")
            await run.step(step)
        after = held(redis, job.store.namespace)
    finally:
        await job.store.close()
    grown = {f"{name}_bytes_per_step": round((after[name] - before[name]) / half, 1) for name in after}
    total = {f"{name}_mb": round(after[name] / 1e6, 1) for name in ("redis", "controller")}
    return {"steps": half * 2, **grown, **total, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    given = options(
        __doc__, steps=100_000, groups=(4, "groups of a step"), samples=(4, "samples of a group"),
        mode=("grpo", "or sft"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-growth-") as directory, valkey() as url:
        run_dir = make_run(
            Path(directory) / "run", groups_per_step=given.groups, n_samples=given.samples, bound=16,
            rows=max(1000, given.steps * given.groups * given.samples // 900),
        )  # fmt: skip
        if given.mode == "sft":
            path = run_dir / "config.json"
            data = json.loads(path.read_text())
            data["train"]["train_policy"] = {"type": "sft"}
            path.write_text(Config.model_validate(data).model_dump_json())
        result = asyncio.run(measure(run_dir, url, given.steps, given.groups, given.samples))
    report(given, {"mode": given.mode, "groups": given.groups, **result}, {given.mode: result})


if __name__ == "__main__":
    main()
