"""A supervised job over much data, which begins with the first rows and waits for the others, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from controller.client import Client
from controller.client import calls as api
from controller.data.parts import EARLY, LONG
from tests.e2e.program import Program

pytestmark = pytest.mark.e2e

JOB = """
[policy]
model_name_or_path = "{model}"
model_max_length = 128
model_gradient_checkpointing = false

[policy.parallelism]
tp_size = 1

[train]
output_dir = "{out}"
timestamp = "run"
max_num_steps = {steps}
train_batch_per_replica = {batch}
param_dtype = "float32"
compile = false
optm_lr = 1e-3

[train.ckpt]
enable_checkpoint = true
save_freq = 10
save_mode = "sync"

[train.train_policy]
type = "sft"
conversation_column_name = "turns"
mini_batch = {batch}

[train.train_policy.dataset]
name = "{data}"

[launcher]
cpu_threads = 1
restart_backoff = 0.2
"""
BATCH = 256
STEPS = EARLY // BATCH + 30


def write_job(folder: Path, model: Path, data: Path) -> Path:
    folder.mkdir()
    path = folder / "job.toml"
    path.write_text(JOB.format(model=model, out=folder, data=data, steps=STEPS, batch=BATCH))
    return path


def losses(summary: dict[str, Any]) -> list[float]:
    return [step["metrics"]["loss"] for step in summary["steps"]]


def test_a_job_begins_with_the_first_rows_and_trains_as_one_that_has_all(tmp_path: Path, model: Path) -> None:
    data = tmp_path / "rows.jsonl"
    pairs = [(f"{i}+1", str(i + 1)) for i in range(LONG)]
    turns = [[{"role": "user", "content": ask}, {"role": "assistant", "content": answer}] for ask, answer in pairs]
    data.write_text("\n".join(json.dumps({"turns": pair}) for pair in turns))
    with Program(write_job(tmp_path / "early", model, data)) as program:
        train = program.run_dir / "data" / "train.safetensors"

        def waits(client: Client) -> bool:
            return f"step {EARLY // BATCH} waits for rows that are being prepared" in client.send(api.job()).sentence

        os.kill(program.pid_of("controller.data.prepare"), signal.SIGSTOP)  # it is found when a controller is there
        assert "the first rows are prepared, and the job begins while the others are" in program.output()
        program.until("a step that has no rows", waits)
        begun = train.stat().st_ino
        program.kill("controller")
        program.kill("controller.data.prepare")
        program.kill("policy_worker")
        program.until_step(STEPS - 3)
        program.kill("policy_worker")  # which has known the early rows alone when it saved
        summary = program.finish()
        assert train.stat().st_ino != begun
        assert f"data: train: {LONG:,} rows of {data}, {LONG:,} kept" in program.output()
    assert summary["status"]["step"] == STEPS
    assert summary["data"]["unfinished"] is False
    with Program(write_job(tmp_path / "late", model, data)) as late:
        expected = losses(late.finish())
    assert losses(summary) == expected
