"""The example configurations are valid, and differ in nothing but what their names say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schema.config import load_config

from .conftest import QUICKSTART

FILES = sorted(QUICKSTART.glob("*.toml"))


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of the leaves."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def difference(first: str, second: str) -> set[str]:
    a, b = (flat(load_config(QUICKSTART / name).to_dict()) for name in (first, second))
    return {key for key in a | b if a.get(key) != b.get(key)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_valid(path: Path, project: Path):
    config = load_config(path)
    assert config.train.seed == 42
    data = config.train.train_policy.dataset.options
    rows = config.samples_per_step if not config.is_grpo else config.groups_per_step
    assert config.train.max_num_steps is not None
    assert data["n"] >= rows * config.train.max_num_steps, "the data lasts for all steps"


def test_there_are_five():
    names = ["grpo.toml", "grpo_plain.toml", "grpo_vllm.toml", "sft.toml", "sft_plain.toml"]
    assert [path.name for path in FILES] == names


def test_vllm_is_the_same_job_with_another_engine(project: Path):
    changed = difference("grpo.toml", "grpo_vllm.toml") - {"train.timestamp"}
    assert changed
    assert all(key.startswith("rollout.") for key in changed), changed
    assert not any("sampling" in key or "n_generation" in key for key in changed), changed


def test_the_plain_files_ask_in_one_way_and_for_fewer_steps(project: Path):
    data = "train.train_policy.dataset.options"
    allowed = {"train.timestamp", "train.max_num_steps", f"{data}.phrasings", f"{data}.n"}
    assert difference("sft.toml", "sft_plain.toml") <= allowed
    more = {"policy.model_name_or_path", "validation.dataset.options.phrasings"}
    assert difference("grpo.toml", "grpo_plain.toml") <= allowed | more


def test_validation_asks_what_training_never_shows(project: Path):
    for path in FILES:
        config = load_config(path)
        if config.is_grpo:
            assert config.validation.dataset.name == "synthetic:addition"
            assert config.validation.temperature == 1.0
            assert config.validation.top_k == -1, "the whole distribution is sampled, not its top"
            train, held = config.train.train_policy.dataset.options, config.validation.dataset.options
            assert train.get("held_out") == held.get("held_out"), "the same pairs are held out"
            assert train["phrasings"] == held["phrasings"]
