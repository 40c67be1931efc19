"""Configurations and small values for the launcher's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schema.config import Config
from schema.wire.messages import JobStatus, Phase, ValidationRecord

BASE: dict[str, Any] = {
    "train": {"compile": False, "train_policy": {"dataset": {"name": "synthetic:addition"}}},
    "policy": {"parallelism": {"tp_size": 1}},
    "rollout": {"backend": "transformers", "parallelism": {"tp_size": 1}},
}


def config(**sections: dict[str, Any]) -> Config:
    """A configuration as the placement sees it: only types are checked, so any mesh can be asked for."""
    data = json.loads(json.dumps(BASE))
    for name, values in sections.items():
        _merge(data.setdefault(name, {}), values)
    return Config.model_validate(data)


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def write_job(directory: Path, extra: str = "") -> Path:
    """A sound TOML file with a model directory and a dataset next to it; paths in it are absolute."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (directory / "data.jsonl").write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n')
    path = directory / "run.toml"
    path.write_text(
        f"""
[train]
output_dir = "{directory}/out"
compile = false
train_batch_per_replica = 16
[train.train_policy]
type = "grpo"
prompt_column_name = "prompt"
response_column_name = "answer"
reward_function = "boxed_math"
[train.train_policy.dataset]
name = "{directory}/data.jsonl"
[policy]
model_name_or_path = "{model}"
[policy.parallelism]
tp_size = 1
[rollout]
backend = "transformers"
n_generation = 8
[rollout.parallelism]
tp_size = 1
{extra}
"""
    )
    return path


def job_status(**changes: Any) -> JobStatus:
    """A status in the middle of a GRPO run."""
    values: dict[str, Any] = {
        "job_id": "job-1", "name": "addition", "mode": "grpo", "phase": Phase.TRAINING, "step": 12,
        "total_steps": 60, "timeline": 0, "version": 12, "publication": 13, "started_at": 0.0,
        "first_step_at": 5.0, "updated_at": 20.0, "samples_per_s": 351.24, "tokens_per_s": 9120.6,
        "eta_s": 42.0, "reward": 0.5126, "validation": None, "staleness_mean": 1.25, "staleness_max": 3,
        "queue_ready": 7, "outstanding": 20, "replicas": {"policy": 1, "rollout": 2},
        "idle": {"policy": 0.031, "rollout": 0.084}, "metrics": {"loss": 0.25}, "last_error": None,
    }  # fmt: skip
    return JobStatus.model_validate({**values, **changes})


def held_out_loss(version: int, loss: float) -> ValidationRecord:
    return ValidationRecord(version=version, at=1.0, samples=20, loss=loss, accuracy=0.5, response_tokens_mean=30.0)


def validation(version: int, score: float) -> ValidationRecord:
    return ValidationRecord(
        version=version, at=1.0, samples=200, score_mean=score, rewards_mean={}, response_tokens_mean=30.0
    )
