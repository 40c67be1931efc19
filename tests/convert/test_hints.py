"""Names of verl, ROLL and cosmos-rl, asked for or written in a file of ours, lead to our keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.api.routes import config
from convert import hints
from convert.engine.registry import readers
from convert.hints import names_here
from schema.config import ConfigError, check_config
from schema.config.keys import leaf_keys
from schema.config.loading import other_systems
from schema.config.loading.other_systems import Nobody
from schema.config.reference.lookup import look_up
from tests.convert.files import nest
from tests.launcher.cli import cosmos
from tests.schema.config_samples import GRPO, refused

PIECE, BATCH = "train.train_policy.batch_size_per_optimize", "train.train_batch_per_replica"
ASKED = {
    "actor_rollout_ref.rollout.n": ("rollout.n_generation", "verl"),
    "ppo_mini_batch_size": (PIECE, "verl"),
    "rollout_batch_size": (BATCH, "ROLL"),
    "num_return_sequences_in_group": ("rollout.n_generation", "ROLL"),
    "async_training.staleness_threshold": ("train.train_policy.allowed_outdated_steps", "verl"),
    "enable_validation": ("validation.enable", "cosmos-rl"),
    "adv_estimator": ("train.train_policy.advantage_estimator", "ROLL"),
    "algorithm.adv_estimator": ("train.train_policy.advantage_estimator", "verl"),
    "actor_rollout_ref.rollout.engine_kwargs.vllm.swap": ("rollout.engine_kwargs", "verl"),
}


@pytest.mark.parametrize(("question", "answer"), ASKED.items(), ids=ASKED)
def test_explain_answers_for_a_name_of_another_system(question: str, answer: tuple[str, str]) -> None:
    ours, system = answer
    found = look_up(question)
    assert ours in [info.key for info in found.keys]
    assert f"{system}'s " in found.note
    assert f" {ours}" in found.note


def test_explain_has_the_reason_where_there_is_no_counterpart() -> None:
    with pytest.raises(ConfigError, match=r"verl's `ray_init\.\*` has no counterpart here"):
        look_up("ray_init.num_cpus")
    with pytest.raises(ConfigError, match="a table of verl's files"):
        look_up("actor_rollout_ref")
    with pytest.raises(ConfigError, match="a table of verl's and cosmos-rl's files"):
        look_up("distillation")


def test_our_own_names_are_ours() -> None:
    assert look_up("n_generation").note == ""
    assert not any(theirs.key == key for key in leaf_keys() for theirs in names_here(key))


def test_every_key_of_a_reader_is_known() -> None:
    """Each row's full name is found, or it is ours by name."""
    ours = {*leaf_keys(), *(f"{key}.*" for key in leaf_keys())}
    for reader in readers():
        for kind in reader.kinds:
            for rule in reader.rules(kind):
                if rule.key not in ours:
                    assert names_here(rule.key.replace(".*", ".x")), rule.key


WRITTEN: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "verl, the whole name": (
        {"actor_rollout_ref.rollout.n": 4},
        "actor_rollout_ref",
        ["verl", "convert", "actor_rollout_ref.rollout.n is rollout.n_generation"],
    ),
    "verl, the last part": ({"train.ppo_mini_batch_size": 4}, "train.ppo_mini_batch_size", [PIECE, "verl"]),
    "ROLL": ({"train.rollout_batch_size": 8}, "train.rollout_batch_size", [BATCH, "ROLL"]),
    "ROLL, at the top": ({"rollout_batch_size": 8}, "rollout_batch_size", [BATCH, "ROLL"]),
    "cosmos-rl, older": (
        {"train.enable_validation": True},
        "train.enable_validation",
        ["validation.enable", "cosmos-rl"],
    ),
    "in the same section first": ({"train.lr": 1.0}, "train.lr", ["did you mean `train.optm_lr`"]),
    "without counterpart": ({"ray_init.num_cpus": 8}, "ray_init", ["verl"]),
    "a slip in a name of ours": ({"train.optm_lrr": 1.0}, "train.optm_lrr", ["did you mean `optm_lr`?"]),
}


@pytest.mark.parametrize(("keys", "key", "words"), WRITTEN.values(), ids=WRITTEN)
def test_a_file_with_a_name_of_another_system_is_told_ours(keys: dict[str, Any], key: str, words: list[str]) -> None:
    data = nest(keys)
    for section, table in GRPO.items():
        data[section] = {**data[section], **table} if section in data else table
    (problem,) = refused(check_config, data)
    assert problem.key == key
    assert all(word in problem.hint for word in words), problem.hint


def test_the_command_line_and_the_controllers_route_install_the_names(tmp_path: Path) -> None:
    """Without them an unknown key is compared with our own names alone; both give the same hint."""
    data = nest({"train.ppo_mini_batch_size": 4})
    (tmp_path / "job.toml").write_text("train.ppo_mini_batch_size = 4\n")

    def forgotten() -> list[str]:
        other_systems.install(Nobody())
        return [problem.hint for problem in refused(check_config, data) if "verl" in problem.hint]

    try:
        assert not forgotten()
        answer = json.loads(cosmos("validate", tmp_path / "job.toml", "--json").stdout)
        written = {problem["key"]: problem["hint"] for problem in answer["problems"]}
        assert "verl calls it `actor_rollout_ref.actor.ppo_mini_batch_size`" in written["train.ppo_mini_batch_size"]
        assert not forgotten()
        config.router(object())  # type: ignore[arg-type]  # which keeps it for its routes
        verdict = config._verdict(json.dumps(data).encode())
        assert {problem.key: problem.hint for problem in verdict.problems} == written
    finally:
        hints.install()
