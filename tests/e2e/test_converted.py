"""A file of another system becomes a job: convert, validate, launch, each as a user does it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from schema.wire.prompts import PromptFile
from tests.e2e.program import COMMAND, LONG, ROOT, check_ledger
from tests.support.own_code import bring_own_code, code_kept_in

pytestmark = pytest.mark.e2e
EXAMPLES = ROOT / "tests" / "convert" / "examples"

ROLL = """
exp_name: sums
seed: 5
output_dir: ./outputs
max_steps: 3
save_steps: -1
eval_steps: -1
rollout_batch_size: 4
num_return_sequences_in_group: 4
prompt_length: 48
response_length: 16
ppo_epochs: 1
adv_estimator: grpo
async_generation_ratio: 1
pretrain: models/tiny
actor_train:
  model_args: {dtype: fp32, disable_gradient_checkpointing: true}
  training_args:
    learning_rate: 1.0e-3
    weight_decay: 0
    per_device_train_batch_size: 4
    gradient_accumulation_steps: 4
    warmup_steps: 1
  data_args: {template: native, file_name: data/rows.jsonl, prompt: prompt}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 1}}
  device_mapping: list(range(0,1))
actor_infer:
  model_args: {dtype: fp32}
  generating_args: {max_new_tokens: "${response_length}", temperature: 0.99, top_p: 1.0, top_k: -1}
  strategy_args: {strategy_name: hf_infer}
  device_mapping: list(range(1,2))
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    tag_included: [sums]
"""

SFT = """
data:
  train_batch_size: 8
  micro_batch_size_per_gpu: 4
  train_files: data/pairs.parquet
  val_files: data/pairs.parquet
  prompt_key: question
  response_key: answer
  max_length: 96
  truncation: error
model:
  partial_pretrain: models/tiny
  fsdp_config: {model_dtype: fp32}
  enable_gradient_checkpointing: false
optim: {lr: 1e-3, weight_decay: 0.01, warmup_steps_ratio: 0.1, clip_grad: 1.0, lr_scheduler: cosine}
trainer:
  default_local_dir: outputs
  project_name: sums
  experiment_name: sft
  total_epochs: 2
  test_freq: 6
  logger: [console]
  n_gpus_per_node: 1
"""

COSMOS = """
redis = "12800"
[train]
output_dir = "./outputs"
epoch = 1
max_num_steps = 3
optm_lr = 1e-3
optm_warmup_steps = 1
compile = false
param_dtype = "float32"
train_batch_per_replica = 16
[train.train_policy]
type = "grpo"
dataset.name = "data/rows.jsonl"
prompt_column_name = "prompt"
response_column_name = "answer"
reward_function = "boxed_math"
allowed_outdated_steps = 2
[policy]
model_name_or_path = "models/tiny"
model_max_length = 128
[policy.parallelism]
tp_size = 1
[rollout]
backend = "vllm"
n_generation = 4
max_response_length = 16
[rollout.parallelism]
tp_size = 1
"""

REWARD = """
import cosmos_test_scale

def seen(completion, row):
    assert row["full_prompt"].count(row["prompt"][0]["content"]) == 1, row
    assert len(row["raw_prompt_ids"]) == len(row["prompt"][0]["content"])
    assert row["extra_info"]["index"] >= 0
    return cosmos_test_scale.FACTOR * len(completion)
"""

EVALUATION = """
data:
  path: data/answers.parquet
  prompt_key: prompt
  response_key: responses
  data_source_key: data_source
  reward_model_key: reward_model
custom_reward_function: {path: null, name: compute_score}
"""


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Path:
    """A directory with a tiny model and every kind of data file."""
    shutil.copytree(model, tmp_path / "models" / "tiny")
    sums = [(a, a % 7 + 3) for a in range(10, 58)]
    data = tmp_path / "data"
    (data / "gsm8k").mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"prompt": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in sums]
    (data / "rows.jsonl").write_text(
        "".join(json.dumps({**row, "ground_truth": row["answer"], "tag": "sums"}) + "\n" for row in rows)
    )
    pairs = [{"question": row["prompt"], "answer": row["answer"]} for row in rows]
    pq.write_table(pa.Table.from_pylist(pairs), data / "pairs.parquet")
    theirs = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(rows)
    ]
    dapo = [{**row, "data_source": "math_dapo"} for row in theirs[:8]]
    (data / "dapo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dapo))
    pq.write_table(pa.Table.from_pylist(theirs), data / "gsm8k" / "train.parquet")
    pq.write_table(pa.Table.from_pylist(theirs[:8]), data / "gsm8k" / "test.parquet")
    answers = [{**row, "responses": [f"#### {row['reward_model']['ground_truth']}", "no idea"]} for row in theirs]
    pq.write_table(pa.Table.from_pylist(answers), data / "answers.parquet")
    return tmp_path


def command(place: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(COMMAND), *arguments], cwd=place, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def convert_and_launch(place: Path, name: str, text: str, *overrides: str) -> Path:
    """The run directory of the finished job."""
    (place / name).write_text(text)
    command(place, "convert", name, "-o", "run.toml")
    options = [part for override in overrides for part in ("--set", override)]
    command(place, "validate", "run.toml", *options)
    command(place, "--config", "run.toml", *options)
    (run,) = (path.parent for path in place.glob("outputs/**/config.json") if path.parent.name != "final")
    return run


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    assert found["outcome"] == "finished"
    return found


def test_verl_grpo_on_a_users_own_terms(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two sources and formats, scores by source and by a function of the user's, which imports a module of
    the user's and reads two forms of the prompt; a model that brings its code, with another folder's tokenizer."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(place / "modules"))
    monkeypatch.setenv("PYTHONPATH", str(place))
    (place / "rewards.py").write_text(REWARD)
    (place / "cosmos_test_scale.py").write_text("FACTOR = 0.01\n")
    own, words = bring_own_code(place / "models" / "tiny"), place / "words"
    words.mkdir()
    for file in own.glob("*token*"):
        file.rename(words / file.name)
    for file in own.glob("*.jinja"):
        file.rename(words / file.name)
    settings = {
        "policy.tokenizer_name_or_path": "words",
        "policy.trust_remote_code": True,
        "policy.external_modules": ["cosmos_test_scale"],
        "train.train_policy.dataset.files": ["data/gsm8k/train.parquet", "data/dapo.jsonl"],
        "reward.prompt_forms": ["raw_prompt_ids", "full_prompt"],
    }
    run = convert_and_launch(
        place,
        "verl.yaml",
        (EXAMPLES / "verl_grpo.yaml").read_text(),
        *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        'train.train_policy.reward_function={ by_source = 1.0, "rewards.py:seen" = 1.0 }',
    )
    found = summary(run)
    check_ledger(found, 0, trained=16)
    assert len(PromptFile(run / "data" / "train.safetensors")) == 48 + 8, "the rows of both files"
    assert [step["metrics"]["samples"] for step in found["steps"]] == [32] * 4
    assert found["steps"][-1]["metrics"]["staleness_max"] == 0, "verl's colocated loop is on-policy"
    assert found["validations"][0]["version"] == 0
    metrics = found["steps"][0]["metrics"]
    assert {"reward/by_source", "reward/seen"} <= metrics.keys()
    assert metrics["reward/seen"] > 0
    with code_kept_in(place / "modules"):
        final = AutoModelForCausalLM.from_pretrained(run / "final", trust_remote_code=True)
    assert type(final).__name__ == "OwnForCausalLM"
    exported, named = (AutoTokenizer.from_pretrained(folder) for folder in (run / "final", words))
    assert exported("1 + 1?")["input_ids"] == named("1 + 1?")["input_ids"]


@pytest.mark.soak
def test_verl_sft(place: Path) -> None:
    """verl's default is one GPU and more; without one the file needs to be told."""
    found = summary(convert_and_launch(place, "sft.yaml", SFT, "placement.gpus_per_node=0"))
    assert len(found["steps"]) == 12, "48 pairs, twice, 8 at a time"
    losses = [step["metrics"]["loss"] for step in found["steps"]]
    assert losses[-1] < losses[0]
    held_out = {record["version"]: record["loss"] for record in found["validations"]}
    assert list(held_out) == [6, 12], "verl does not validate before"
    assert held_out[12] < held_out[6]


def test_verl_evaluation(place: Path) -> None:
    run = convert_and_launch(place, "evaluation.yaml", EVALUATION)
    found = json.loads((run / "evaluation.json").read_text())
    assert (found["prompts"], found["score"], found["best"]) == (48, 0.5, 1.0)


@pytest.mark.soak
def test_roll_rlvr(place: Path) -> None:
    """On a machine without GPUs the devices of the file are left out, which is all there is to change."""
    found = summary(
        convert_and_launch(
            place, "roll.yaml", ROLL, "placement.policy=[]", "placement.rollout=[]", "placement.gpus_per_node=0"
        )
    )
    assert [step["metrics"]["samples"] for step in found["steps"]] == [16] * 3
    assert max(step["metrics"]["staleness_max"] for step in found["steps"]) <= 1


@pytest.mark.soak
def test_cosmos_rl(place: Path) -> None:
    found = summary(
        convert_and_launch(place, "cosmos.toml", COSMOS, "rollout.backend=transformers", "rollout.dtype=float32")
    )
    assert [step["metrics"]["samples"] for step in found["steps"]] == [16] * 3
