"""What people see of a job in which 15 % of the rewards fail: while it runs, when its launcher was killed, and at its
end. Every screen names the failures, samples are readable, trackers and events have the numbers of `/v1/steps`.
"""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.client import Client
from controller.client import calls as api
from schema.wire import event_file, sample_file
from schema.wire.messages import EventKind, JobStatus
from tests.e2e.held import hold
from tests.e2e.program import Program, command, write_config
from tests.launcher.trackers.test_process import in_tensorboard, in_wandb
from tests.support.metric_names import undocumented_families

REWARD = """
import zlib

def flaky(completion, row):
    if zlib.crc32(completion.encode()) % 100 < 15:
        raise ValueError("the judge is not well")
    return len(completion) / 10
"""
STEPS = 14


def flaky_job(folder: Path, model: Path) -> Path:
    """Write the configuration of a job of which every reward may fail, and which is held at step 8."""
    (folder / "rewards.py").write_text(REWARD)
    config = hold(write_config(folder, model, steps=STEPS), step=8, rows=80)
    config.write_text(config.read_text().replace("boxed_math = 1.0", f'"{folder}/rewards.py:flaky" = 1.0'))
    return config


def paused_at(client: Client, step: int, timeline: int = 0) -> JobStatus | None:
    """Pause the job at such a step of such a timeline, or later."""
    status = client.send(api.job())
    return client.send(api.operate("pause")) if (status.timeline, status.step) >= (timeline, step) else None


def operate(program: Program, action: str) -> None:
    with program.client() as client:
        client.send(api.operate(action))


def alive(program: Program) -> JobStatus:
    """Display, status, API and metrics name the failures, and say what the job is at."""
    status = JobStatus.model_validate(json.loads(command("status", program.run_dir, "--json").stdout)["status"])
    assert status.rewards is not None
    (kind,) = status.rewards.failed
    assert kind == "ValueError in reward function flaky"
    assert 0.02 < status.rewards.failed[kind] / (status.rewards.failed[kind] + status.rewards.scored) < 0.5
    assert status.sentence.startswith("the job is paused")
    assert "rewards_failed=" in program.output()
    said = command("status", program.run_dir, "--why").stdout
    for words in ("why: ", "rollout-0", kind):
        assert words in said
    url = json.loads((program.run_dir / "controller.json").read_text())["url"]
    token = (program.run_dir / ".tokens" / "user").read_text().strip()
    with httpx.Client(
        base_url=url,
        headers={"authorization": f"Bearer {token}"},
        trust_env=False,
        verify=ssl.create_default_context(cafile=os.environ["COSMOS_TLS_CA"]),
    ) as http:
        scraped = http.get("/metrics").text
        assert f'kind="{kind}"' in scraped
        assert undocumented_families(scraped) == set()
        errors = http.get("/v1/samples", params={"order": "errors", "limit": 3}).json()
        assert "the judge is not well" in errors[0]["error"]
        events = http.get("/v1/events", params={"follow": False, "kind": ["reward", "rewind"]}).text
        assert events.count("event: reward\n") == events.count("event: rewind\n") == 1
    return status


def dead(program: Program) -> None:
    """Of the directory alone: how it died, what it was at, what it wrote and what failed."""
    status = command("status", program.run_dir, "--why")
    assert status.returncode == 1
    for words in ("was killed", "training goes back to the checkpoint after", "policy-0.2 is live"):
        assert words in status.stdout
    worst = json.loads(command("samples", program.run_dir, "--worst", "-n", "1", "--json").stdout)[0]
    best = json.loads(command("samples", program.run_dir, "--best", "-n", "1", "--json").stdout)[0]
    assert worst["score"] < best["score"]
    assert best["advantage"] > 0
    failed = command("samples", program.run_dir, "--errors", "-n", "1").stdout
    assert "no score" in failed
    assert "rewards.py" in failed


def curves(run_dir: Path, summary: dict[str, Any]) -> None:
    """Event file and trackers have what the controller says, number by number; samples have both log-probs."""
    steps = {step["step"]: step["metrics"] for step in summary["steps"]}
    assert list(steps) == list(range(STEPS))
    events = list(event_file.read(event_file.path_of(run_dir)))
    assert {record.step: record.metrics for record in event_file.course(events).steps} == steps
    assert sum(event.kind is EventKind.CONTROLLER for event in events) == 2
    shown = in_tensorboard(run_dir)
    for name in ("reward_mean", "loss", "reward/flaky"):
        wanted = {step: metrics[name] for step, metrics in steps.items()}
        assert shown[name] == pytest.approx(wanted, rel=1e-6)
    rows = {row["step"]: row["reward_mean"] for _, row in in_wandb(run_dir) if "reward_mean" in row}
    assert rows
    assert all(rows[step] == pytest.approx(steps[step]["reward_mean"]) for step in rows)
    for step in (0, STEPS - 1):
        records = sample_file.find(sample_file.folder_of(run_dir), kind="train", step=step, limit=99)
        trained = [record for record in records if record.trainer_logprobs]
        assert trained
        for record in trained:
            assert len(record.trainer_logprobs) == len(record.logprobs) == record.response_tokens
        # Of the very weights that wrote them, trainer and engine say the same.
        fresh = [record for record in trained if record.oldest_version == step]
        for record in fresh:
            assert record.trainer_logprobs == pytest.approx(record.logprobs, abs=2e-3)
    assert fresh or [record for record in trained if record.oldest_version < STEPS - 1]
