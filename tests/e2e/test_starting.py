"""A newcomer's first commands, run for real: `init` and what it writes, with keys from all layers."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.program import COMMAND, LONG

pytestmark = pytest.mark.e2e


def cosmos(directory: Path, *arguments: str, **env: str) -> str:
    run = subprocess.run(
        [COMMAND, *arguments],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


GENERATE = """
[validation]
enable = true
generate = true
freq = 1000
reward_function = "boxed_math"
reference_column_name = "answer"

[logging]
samples_dir = "answers"

[[validation.dataset.part]]
source = "many"
name = "synthetic:addition"
options = { n = 8, digits = 2, demonstrations = true }
n_generation = 2
temperature = 1.0
top_k = -1

[[validation.dataset.part]]
source = "one"
name = "synthetic:addition"
options = { n = 8, digits = 3, demonstrations = true }
reward_function = "format"

[rollout]
backend = "transformers"
dtype = "float32"
max_response_length = 16

[rollout.parallelism]
tp_size = 1
"""


def only_run(directory: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run of a name: its configuration and its summary."""
    run = directory / "outputs" / "addition" / name
    return json.loads((run / "config.json").read_text()), json.loads((run / "summary.json").read_text())


def test_a_recipe_runs_with_keys_of_all_layers(tmp_path: Path) -> None:
    cosmos(tmp_path, "init", "addition-sft")
    (tmp_path / "short.toml").write_text("[train]\nmax_num_steps = 90\nepoch = 7\n" + GENERATE)
    layers = ["--config", "run.toml", "--config", "short.toml", "--set", "train.timestamp=sft"]
    cosmos(tmp_path, *layers, COSMOS_TRAIN__MAX_NUM_STEPS="30", COSMOS_TRAIN__TIMESTAMP="from-env")
    config, summary = only_run(tmp_path, "sft")
    assert (config["train"]["max_num_steps"], config["train"]["epoch"]) == (30, 7)
    assert summary["status"]["step"] == 30, "the processes go by the written configuration"
    last = summary["validations"][-1]
    assert (last["version"], last["scores"]["samples"]) == (30, 24), "answers of rollout replicas are scored as well"
    assert last["loss"] > 0
    assert {name: of["n"] for name, of in last["sources"].items()} == {"many": 2, "one": 1}
    (answers,) = (tmp_path / "answers").glob("*/validation/step-00000030.jsonl")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    rewarded = Counter((row["part"], *row["rewards"]) for row in rows)
    assert rewarded == {("many", "boxed_math"): 16, ("one", "format"): 8}
    losses = [step["metrics"]["loss"] for step in summary["steps"]]
    assert losses[-1] < losses[0] / 2


@pytest.mark.soak
def test_the_second_addition_recipe_continues_from_the_first(tmp_path: Path) -> None:
    cosmos(tmp_path, "init", "addition-sft")
    cosmos(tmp_path, "--config", "run.toml", "--set", "train.timestamp=sft", "--set", "train.max_num_steps=2")
    cosmos(tmp_path, "init", "addition-grpo", "-o", "grpo.toml")
    cosmos(tmp_path, "--config", "grpo.toml", "--set", "train.timestamp=grpo", "--set", "train.max_num_steps=2")
    config, summary = only_run(tmp_path, "grpo")
    assert config["policy"]["model_name_or_path"] == str(tmp_path / "outputs" / "addition" / "sft" / "final")
    assert summary["status"]["step"] == 2
    assert (tmp_path / "outputs" / "addition" / "grpo" / "final" / "model.safetensors").exists()
