"""Runs one job with the real controller, the real Valkey and a scripted policy replica, as cosmos-launch would.

python -m tests.launcher.drive_job RUN_DIR SCRIPT [STEPS]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from launcher.display.screen import open_screen
from launcher.display.summary import RunResult
from launcher.job import redis_pulse
from launcher.job.job import Job
from launcher.job.plan import JobPlan
from launcher.plan import redis_server
from launcher.plan.addresses import Site, free_port
from launcher.plan.placement import PlacedReplica, ProcessSpec
from launcher.plan.rundir import RunDir, RunTokens
from launcher.restarts import Role
from schema.config import Config
from schema.wire.prompts import write_prompts
from tests.launcher.samples import config
from tests.support.waiting import PATIENCE


def job_config(steps: int, shutdown_timeout: float) -> Config:
    return config(
        train={
            "max_num_steps": steps,
            "train_batch_per_replica": 1,
            "epoch": 10_000,
            "train_policy": {"type": "sft"},
        },
        launcher={"max_restarts": 2, "restart_backoff": 0.05, "shutdown_timeout": shutdown_timeout},
        controller={"start_timeout": PATIENCE},
    )


def main() -> int:
    path, script = Path(sys.argv[1]), sys.argv[2]
    grace = json.loads(script).get("shutdown_timeout", PATIENCE)
    redis_pulse.LOOK_EVERY = json.loads(script).get("look_every", redis_pulse.LOOK_EVERY)
    settings = job_config(int(sys.argv[3]) if len(sys.argv) > 3 else 10, grace)
    run = RunDir(path)
    continued = run.config_json.exists()
    run.make()
    run.lock()
    run.wait_until_left(PATIENCE)
    run.write_config(settings)
    write_prompts(
        path / "data" / "train.safetensors", [[1, 2]] * 4, [{"key": str(i)} for i in range(4)], [[0, 1]] * 4
    )
    tokens, port = RunTokens.fresh(), free_port("127.0.0.1")
    run.write_tokens(tokens)
    argv = (sys.executable, "-m", "tests.launcher.scripted_policy", script)
    spec = ProcessSpec("policy-0", Role.POLICY, argv, {"COSMOS_REPLICA_NAME": "policy-0"})
    plan = JobPlan(
        config=settings,
        run=run,
        tokens=tokens,
        site=Site("127.0.0.1", port, f"http://127.0.0.1:{port}"),
        redis=redis_server.embedded(run.redis),
        workers=[PlacedReplica("policy-0", Role.POLICY, (spec,))],
        reuse_data=True,
        continued=continued,
        env=dict(os.environ),
    )
    screen = open_screen()

    async def drive() -> RunResult:
        return await Job(plan, screen, json.loads(script).get("early", ())).run()

    result = asyncio.run(drive())
    screen.table(result.summary())
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
