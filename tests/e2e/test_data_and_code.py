"""A whole job on a user's own terms: rows as verl writes them, scores by source, a model that brings its code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.program import Program, check_ledger, write_config
from tests.support.own_code import bring_own_code, code_kept_in

pytestmark = pytest.mark.e2e

REWARD = """
import cosmos_test_scale

def seen(completion, row):
    assert row["full_prompt"].count(row["prompt"][0]["content"]) == 1, row
    assert len(row["raw_prompt_ids"]) == len(row["prompt"][0]["content"])
    assert row["extra_info"]["index"] >= 0
    return cosmos_test_scale.FACTOR * len(completion)
"""


def rows(source: str, first: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
        }
        for i in range(first, first + 8)
    ]


def test_files_sources_forms_and_code_of_the_user(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, source, first in (("a", "openai/gsm8k", 0), ("b", "math_dapo", 20)):
        text = "".join(json.dumps(row) + "\n" for row in rows(source, first))
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "cosmos_test_scale.py").write_text("FACTOR = 0.01\n")
    own = bring_own_code(Path(shutil.copytree(model, tmp_path / "own")))
    words = tmp_path / "words"
    AutoTokenizer.from_pretrained(model).save_pretrained(words)
    for file in own.glob("tokenizer*"):
        file.unlink()
    settings = {
        "policy.model_name_or_path": str(own),
        "policy.tokenizer_name_or_path": "words",
        "policy.trust_remote_code": True,
        "policy.external_modules": ["cosmos_test_scale"],
        "train.max_num_steps": 4,
        "train.train_policy.dataset.name": "",
        "train.train_policy.dataset.files": ["a.jsonl", "b.jsonl"],
        "train.train_policy.dataset.max_prompt_length": 100,
        "train.train_policy.response_column_name": "reward_model.ground_truth",
        "reward.prompt_forms": ["raw_prompt_ids", "full_prompt"],
    }
    arguments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    arguments += ['train.train_policy.reward_function={ by_source = 1.0, "rewards.py:seen" = 1.0 }']
    config = write_config(tmp_path, model, steps=4, validation=False)
    text = config.read_text().replace("options = { n = 200, digits = 2, phrasings = 1 }\n", "", 1)
    config.write_text(text)
    with Program(config, tuple(part for one in arguments for part in ("--set", one))) as program:
        summary = program.finish()
    check_ledger(summary, 2, trained=16)
    metrics = summary["steps"][0]["metrics"]
    assert {"reward/by_source", "reward/seen"} <= metrics.keys()
    assert metrics["reward/seen"] > 0
    with code_kept_in(tmp_path / "modules"):
        final = AutoModelForCausalLM.from_pretrained(program.run_dir / "final", trust_remote_code=True)
    assert type(final).__name__ == "OwnForCausalLM"
    found, named = (AutoTokenizer.from_pretrained(place) for place in (program.run_dir / "final", words))
    assert found("1 + 1?")["input_ids"] == named("1 + 1?")["input_ids"]
