"""Keys that cannot act in a job: refused where they are another job's, a warning where a switch is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schema.config import check_config, check_rules, check_warnings
from schema.config.keys import leaf_keys, section_keys
from schema.config.rules.idle import OF_ANOTHER_JOB, SWITCHED_OFF, keys_are_switched_on, keys_belong_to_this_job
from tests.schema.config_samples import GRPO, SFT
from tests.schema.remedies import config_of

POLICY, PROFILE = "train.train_policy", "profiler.sub_profiler_config"
VALUES: dict[str, Any] = {
    "rollout.n_generation": 8,
    "rollout.sampling_config.top_k": 5,
    "rollout.parallelism.cp_size": 2,
    "validation.n_generation": 5,
    "validation.temperature": 0.5,
    "reward.timeout": 1.0,
    "reward.environment": ["HOME_PAGE"],
    "critic.mu_iterations": 2,
    "teacher": [{"name": "one", "model": "Qwen/Qwen3-0.6B"}],
    "weight_sync.keep": 2,
    "train.sync_weight_interval": 2,
    "kubernetes.rollout_selector": {"spot": "true"},
    "kubernetes.rollout_tolerations": ["spot:NoSchedule"],
    "kubernetes.topology_key": "topology.kubernetes.io/zone",
    "controller.lease_timeout": 60.0,
    "controller.oversample": 2.0,
    "controller.on_stale": "drop",
    "controller.straggler_timeout": 60.0,
    "controller.max_attempts": 2,
    "train.local_dataset": False,
    "profiler.record_batches": 4,
    "logging.samples_dir": "answers",
    "logging.log_validation_samples": 4,
    "logging.log_training_samples": 4,
}
ONLY_SUPERVISED = {"validation.generate": True, "validation.reference_column_name": "answer"}
VALIDATED, SAMPLED = {"validation.enable": True}, {"validation.enable": True, "validation.temperature": 0.5}
PENALTY = {f"{POLICY}.overlong_reward.enable_overlong_penalty": True}
PROFILED = {"profiler.enable_profiler": True, f"{PROFILE}.do_profile": True}
CRITIC = {"critic.enable": True, f"{POLICY}.advantage_estimator": "gae"}
TRACKED = {"logging.logger": ["console", "tensorboard"]}
SAVED, ONCE = {"train.ckpt.enable_checkpoint": True}, {"launcher.max_restarts": 0}
SWITCHED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "kubernetes.scaler": ("command", {}, {"autoscale.enable": True}),
    "kubernetes.storage_class": ("files", {"kubernetes.claim": "disk"}, {}),
    "kubernetes.storage_size": ("1Ti", {"kubernetes.claim": "disk"}, {}),
    "kubernetes.redis_image": ("redis:8.2", {"redis.url": "redis://named:6379"}, {}),
    "validation.freq": (5, {}, VALIDATED),
    "validation.dataset.name": ("synthetic:addition", {}, VALIDATED),
    "logging.log_validation_samples": (4, TRACKED, TRACKED | VALIDATED),
    f"{POLICY}.overlong_reward.buffer_length": (8, {}, PENALTY),
    f"{POLICY}.overlong_reward.penalty_factor": (0.5, {}, PENALTY),
    "critic.mu_iterations": (2, {}, CRITIC),
    "critic.mini_batch": (4, CRITIC | {"critic.max_token_len_per_mini_batch": 8192}, CRITIC),
    "critic.optm_warmup_start_factor": (0.5, CRITIC | {"critic.optm_warmup_steps": 0}, CRITIC),
    "train.ckpt.save_freq": (7, {}, SAVED),
    "train.ckpt.save_freq_in_epoch": (1, {}, SAVED),
    "train.ckpt.load_contents": (["model", "extra"], {}, {"train.resume": True}),
    f"{POLICY}.mini_batch": (4, {f"{POLICY}.max_token_len_per_mini_batch": 8192}, {}),
    "train.optm_warmup_start_factor": (0.5, {"train.optm_warmup_steps": 0}, {}),
    f"{POLICY}.outdated_rollout_fetch_batch_size": (2, {f"{POLICY}.on_policy": True}, {}),
    "rollout.sampling_config.sampling_correction": ("raw", {}, {"rollout.sampling_config.top_k": 50}),
    "validation.top_p": (0.5, VALIDATED, SAMPLED),
    "validation.top_k": (5, VALIDATED, SAMPLED),
    "launcher.restart_backoff": (2.0, ONCE, {}),
    "launcher.restart_backoff_max": (90.0, ONCE, {}),
    "weight_sync.anchor_interval": (5, {"weight_sync.encoding": "full"}, {}),
    "weight_sync.collective_timeout": (5.0, {}, {"weight_sync.transport": "collective"}),
    "logging.log_training_samples": (4, {}, TRACKED),
    f"{PROFILE}.with_stack": (True, {}, {"profiler.enable_profiler": True}),
    f"{PROFILE}.wait_steps": (5, {"profiler.enable_profiler": True}, PROFILED),
}
"""A value of each key, other keys with which it has no effect, and those with which it has one."""


@pytest.mark.parametrize("key", VALUES)
def test_keys_of_reinforcement_are_refused_in_supervised_training(key: str) -> None:
    written = config_of(SFT, {key: VALUES[key]})
    (problem,) = keys_belong_to_this_job(written)
    assert problem.key == key
    assert "has no effect here: supervised training" in problem.message
    assert problem in check_rules(written)
    assert keys_belong_to_this_job(config_of(GRPO, {key: VALUES[key]})) == []


def test_a_section_of_another_job_is_one_problem() -> None:
    (problem,) = keys_belong_to_this_job(config_of(SFT, {"rollout.n_generation": 8, "rollout.seed": 3}))
    assert problem.key == "rollout"
    assert problem.message.startswith("n_generation, seed have no effect here: ")
    assert problem.related == ("rollout.n_generation", "rollout.seed")


def test_supervised_training_knows_the_template_and_where_answers_stop() -> None:
    sampling = {"rollout.sampling_config.stop": ["\n"], "rollout.sampling_config.stop_token_ids": [1]}
    template = {"rollout.multi_turn_config.custom_chat_template_path": "chat.jinja"}
    assert keys_belong_to_this_job(config_of(SFT, sampling | template)) == []


@pytest.mark.parametrize("key", ["validation.generate", "validation.reference_column_name"])
def test_reinforcement_generates_anyway(key: str) -> None:
    (problem,) = keys_belong_to_this_job(config_of(GRPO, {key: ONLY_SUPERVISED[key]}))
    assert problem.key == key
    assert keys_belong_to_this_job(config_of(SFT, VALIDATED | ONLY_SUPERVISED)) == []


def test_supervised_training_that_generates_has_keys_of_rollouts() -> None:
    given = {key: VALUES[key] for key in ("validation.temperature", "reward.timeout", "weight_sync.keep")}
    assert keys_belong_to_this_job(config_of(SFT, VALIDATED | ONLY_SUPERVISED | given)) == []
    drawn = {"rollout.n_generation": 8, "rollout.sampling_config.temperature": 0.5}
    problems = keys_belong_to_this_job(config_of(SFT, VALIDATED | ONLY_SUPERVISED | drawn))
    assert [problem.key for problem in problems] == [*drawn]


def test_supervised_training_has_validation_data_of_its_own() -> None:
    held_out = {"validation.dataset.name": "synthetic:addition", "validation.dataset.options": {"n": 8}}
    assert keys_belong_to_this_job(config_of(SFT, VALIDATED | held_out)) == []


@pytest.mark.parametrize("key", SWITCHED)
def test_what_is_switched_off_is_a_warning(key: str) -> None:
    value, off, on = SWITCHED[key]
    written = config_of(GRPO, {**off, key: value})
    (warning,) = keys_are_switched_on(written)
    assert warning.key == key
    assert "has no effect here: " in warning.message
    assert warning.hint
    assert warning in check_warnings(written)
    assert keys_are_switched_on(config_of(GRPO, {**on, key: value})) == []


def test_custom_keys_have_no_reader_in_supervised_training() -> None:
    (warning,) = keys_are_switched_on(config_of(SFT, {"custom": {"mine": 1}}))
    assert warning.key == "custom"
    assert keys_are_switched_on(config_of(GRPO, {"custom": {"mine": 1}})) == []


def test_rows_name_keys_and_each_has_a_case() -> None:
    keys = {*leaf_keys(), *section_keys()}
    assert {row.key for row in (*OF_ANOTHER_JOB, *SWITCHED_OFF)} <= keys
    for rows, cases in (
        (OF_ANOTHER_JOB, VALUES | ONLY_SUPERVISED | {"rollout.sampling_config.temperature": 0.5}),
        (SWITCHED_OFF, {**SWITCHED, "custom": None}),
    ):
        for row in rows:
            assert any(key == row.key or key.startswith(f"{row.key}.") for key in cases), row.key


def test_keys_of_training_beside_an_evaluation(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt": "1 + 1", "responses": ["2"], "data_source": "gsm8k"}\n')
    data: dict[str, Any] = {"evaluation": {"dataset": {"name": str(file)}}, "reward": {"timeout": 5.0}}
    data["train"] = {"output_dir": str(tmp_path), "timestamp": "a"}
    assert check_warnings(check_config(data)) == []
    data["train"]["optm_lr"] = 0.5
    data["rollout"] = {"n_generation": 2, "seed": 3}
    warnings = check_warnings(check_config(data))
    assert [warning.key for warning in warnings] == ["train.optm_lr", "rollout"]
    assert warnings[1].message.startswith("n_generation, seed have no effect here: an evaluation")


@pytest.mark.parametrize("base", [GRPO, SFT], ids=["grpo", "sft"])
def test_a_resolved_configuration_is_judged_as_its_source(base: dict[str, Any]) -> None:
    """In what is read back every key is written; none of them is idle for that."""
    source = check_config(base)
    again = check_config(source.to_dict())
    assert keys_belong_to_this_job(again) == []
    assert [warning.key for warning in check_warnings(again)] == [warning.key for warning in check_warnings(source)]
