"""What decides what is trained and has no counterpart stands in `[unsupported]`, and its name is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from convert import convert_text
from convert.engine.model import Conversion, Outcome
from convert.engine.registry import readers
from convert.engine.unsupported import EITHER_WAY
from convert.engine.write import to_report, to_toml
from schema.config import ConfigError, check_config
from schema.config.loading.load import load_config
from schema.config.loading.tomlwrite import dumps
from schema.config.reference.export import json_schema
from tests.convert.files import ABSENT, nest, roll_with, value_of, yaml_text
from tests.schema.config_samples import GRPO, refused

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
_POLICY = "train.train_policy"
_CORRECTION = "algorithm.rollout_correction"
_MEGATRON = f"{_ACTOR}.megatron.override_transformer_config"
_LOOP = "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop"

VERL: dict[str, Any] = {"algorithm.adv_estimator": "grpo", f"{_MODEL}.path": "org/model"}
VERL_SFT: dict[str, Any] = {"optim.lr": 1e-5, "data.train_files": "x.parquet", "model.path": "org/model"}
COSMOS: dict[str, Any] = {f"{_POLICY}.type": "grpo", "policy.model_name_or_path": "org/model"}


def convert(system: str, keys: Mapping[str, Any]) -> Conversion:
    """A small file of a system with these keys."""
    if system == "roll":
        return roll_with(dict(keys))
    if system == "cosmos-rl":
        return convert_text(dumps(nest({**COSMOS, **keys})), "x.toml")
    base = {"verl sft": VERL_SFT, "roll sft": {}}.get(system, VERL)
    return convert_text(yaml_text(nest({**base, **keys})), "x.yaml")


def problems(config: Mapping[str, Any]) -> dict[str, str]:
    """The faults of a configuration: key -> message."""
    try:
        check_config(config)
    except ConfigError as error:
        return {problem.key: f"{problem.message} {problem.hint}" for problem in error.problems}
    return {}


def quoted(key: str) -> str:
    """The key of a problem about a source's key."""
    return f'unsupported."{key}"' if set(key) & set(".<>") else f"unsupported.{key}"


LOST = [
    ("verl", {f"{_ACTOR}.policy_loss.loss_mode": "sapo"}),
    ("verl", {f"{_ACTOR}.policy_loss.loss_mode": "mine"}),
    ("verl", {"algorithm.adv_estimator": "optimal_token_baseline"}),
    ("verl", {"algorithm.adv_estimator": ["grpo"]}),
    ("verl", {f"{_ACTOR}.loss_agg_mode": "median"}),
    ("verl", {f"{_ACTOR}.clip_ratio": "wide"}),
    ("verl", {"algorithm.use_pf_ppo": True}),
    ("verl", {f"{_CORRECTION}.rollout_rs": "seq_mean_k2"}),
    ("verl", {f"{_CORRECTION}.bypass_mode": True, f"{_CORRECTION}.loss_type": "reinforce"}),
    ("verl", {f"{_CORRECTION}.use_policy_gradient": True}),
    ("verl", {f"{_MEGATRON}.moe_aux_loss_coeff": 0.01}),
    ("verl", {f"{_MEGATRON}.attention_dropout": 0.1}),
    ("verl", {f"{_ACTOR}.megatron.override_mcore_model_config.moe_expert_capacity_factor": 1.5}),
    ("verl sft", {"engine.strategy": "megatron", "engine.override_transformer_config.moe_z_loss_coeff": 0.1}),
    ("verl", {f"{_CORRECTION}.rollout_token_veto_threshold": 1e-4}),
    ("verl", {"distillation.enabled": True}),
    ("verl", {"reward_model.reward_manager": "mine"}),
    ("verl", {f"{_ROLLOUT}.agent.default_agent_loop": "tool_agent"}),
    ("verl", {f"{_MODEL}.lora_adapter_path": "adapter"}),
    ("verl", {f"{_ACTOR}.freeze_vision_tower": True}),
    ("verl", {f"{_ACTOR}.optim.optimizer": "Lion"}),
    ("verl", {"data.video_key": "clips"}),
    ("verl", {"data.tool_config_path": "tools.yaml"}),
    ("verl", {"data.function_tool_path": "tools.py"}),
    ("verl", {f"{_ROLLOUT}.multi_turn.tool_config_path": "tools.yaml"}),
    ("verl", {f"{_ROLLOUT}.n": 1, "algorithm.adv_estimator": "gpg"}),
    ("verl", {f"{_ROLLOUT}.n": 1, "algorithm.adv_estimator": "grpo_passk"}),
    ("verl", {f"{_ROLLOUT}.n": 1, "algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "rloo"}),
    ("verl", {f"{_ACTOR}.clip_ratio_low": -0.1}),
    ("verl", {f"{_ACTOR}.policy_loss.loss_mode": "geo_mean", f"{_ACTOR}.clip_ratio_low": 1.0}),
    ("verl", {f"{_ACTOR}.strategy": "veomni", f"{_ACTOR}.veomni.load_checkpoint_path": "before"}),
    ("verl", {f"{_ACTOR}.strategy": "veomni", f"{_ACTOR}.veomni.router_replay.mode": "R2"}),
    ("verl sft", {"engine.strategy": "veomni", "engine.load_checkpoint_path": "before"}),
    ("verl", {f"{_MODEL}.custom_chat_template": "{{ messages }}"}),
    ("verl", {"data.apply_chat_template_kwargs.thinking": True}),
    ("verl sft", {"model.custom_chat_template": "{{ messages }}"}),
    ("verl sft", {"data.apply_chat_template_kwargs.enable_thinking": True}),
    ("verl sft", {"data.enable_thinking_default": True}),
    ("verl sft", {"data.enable_thinking_default": False}),
    ("verl sft", {"data.apply_chat_template_kwargs.enable_thinking": False}),
    ("verl", {"data.apply_chat_template_kwargs.thinking": False}),
    ("roll sft", {"sft_train.data_args.template": "native_nonthinking"}),
    ("roll sft", {"sft_train.infer_batch_size": 1, "global_template": "qwen3_nothink"}),
    ("roll", {"rl_loss_coef": 0}),
    ("roll", {"train_infer_correction.is_weight.enabled": True, "train_infer_correction.is_weight.detach": False}),
    ("roll", {"adv_estimator": "gigpo"}),
    ("roll", {"adv_estimator": "reinforce", "norm_mean_type": "running"}),
    ("roll", {"adv_estimator": "gae", "reward_norm": "batch"}),
    ("roll", {"add_token_level_kl": True, "reward_clip": 5}),
    ("roll", {"adv_estimator": "step_reinforce"}),
    ("roll", {"adv_estimator": "agentic_reinforce"}),
    ("roll", {"advantage_clip": "wide"}),
    ("roll", {"reward_scale": 0.5}),
    ("roll", {"use_reward_scaling": True}),
    ("roll", {"whiten_rewards": True}),
    ("roll", {"add_len_reward": True}),
    ("roll", {"max_len_mask": "some"}),
    ("roll", {"difficulty_mask": 2}),
    ("roll", {"difficulty_mask": True, "difficulty_low_threshold": "low"}),
    ("roll", {"mask_type": "all"}),
    ("roll", {"difficulty_loss_weight": True}),
    ("roll", {"use_topr_loss": True}),
    ("roll", {"rl_loss_coef": 0.5}),
    ("roll", {"gamma": "low"}),
    ("roll", {"loss_agg_mode": "sum"}),
    ("roll", {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k9"}),
    ("roll", {"dataset_filter.min_difficulty": 0.2}),
    ("roll", {"rewards.math_rule.response_filter_config.type": "mean_filter"}),
    ("roll", {"rewards.math_rule.response_length_penalty_coef": 0.1}),
    ("roll", {"rewards.judge.worker_cls": "mine.Judge"}),
    ("roll", {"actor_train.pg_variant": "topr"}),
    ("roll", {"actor_train.worker_cls": "mine.TOPRWorker"}),
    ("roll", {"actor_train.model_args.model_type": "diffusion_module"}),
    ("roll", {"pipeline_cls": "roll.pipeline.dpo.dpo_pipeline.DPOPipeline"}),
    ("roll", {"pipeline_cls": "roll.pipeline.distill.distill_pipeline.DistillPipeline"}),
    ("roll", {"is_pure_opd": True}),
    ("roll", {"actor_train.data_args.template": "chatml"}),
    ("roll", {"actor_train.data_args.template": "deepseek"}),
    ("roll", {"actor_train.data_args.template": "native", "global_template": "longcot_V3"}),
    ("roll", {"tag_to_template.math": "chatml"}),
    ("roll", {"actor_train.data_args.image_max_pixels": 1048576}),
    ("roll", {"actor_train.strategy_args.strategy_config.moe_aux_loss_coeff": 0.01}),
    ("roll", {"actor_train.strategy_args.strategy_config.additional_configs.moe_z_loss_coeff": 0.01}),
    ("roll", {"actor_train.strategy_args.strategy_config.additional_configs.hidden_dropout": 0.1}),
    ("cosmos-rl", {"distillation.enable": True}),
    ("cosmos-rl", {f"{_POLICY}.trainer_type": "dpo"}),
    ("cosmos-rl", {f"{_POLICY}.advantage_high": 2.0}),
    ("cosmos-rl", {f"{_POLICY}.use_remote_reward": True}),
    ("cosmos-rl", {f"{_POLICY}.bypass_reward": True}),
    ("cosmos-rl", {"train.ema_enable": True, "train.ema_update_step_interval": 8}),
    ("cosmos-rl", {"policy.freeze_pattern": ["^visual"]}),
    ("cosmos-rl", {"policy.lora.lora_path": "adapter"}),
]


@pytest.mark.parametrize(("system", "keys"), LOST, ids=[f"{system}:{list(keys)[-1]}" for system, keys in LOST])
def test_a_lost_method_is_refused_by_its_name(system: str, keys: dict[str, Any]) -> None:
    key, value = list(keys.items())[-1]
    found = convert(system, keys)
    assert found.unsupported == {key: value}
    assert found.entry(key).outcome is Outcome.UNSUPPORTED
    assert found.entry(key).note
    text = to_toml(found)
    assert tomllib.loads(text) == found.config
    assert next(line for line in text.splitlines() if line.startswith("[")) == "[unsupported]"
    report = to_report(found).splitlines()
    assert report[3].startswith("unsupported:")
    assert key in report[4]
    message = problems(found.config)[quoted(key)]
    assert all(words in message for words in (f"`{key}`", "has no counterpart", "remove the line"))


NOTHING = [
    ("verl", {f"{_ACTOR}.policy_loss.loss_mode": "vanilla", f"{_ACTOR}.policy_loss.clip_cov_ratio": 0.1}),
    ("verl", {"algorithm.adv_estimator": "rloo", "algorithm.use_pf_ppo": False}),
    ("verl", {"data.tool_config_path": None, "data.image_key": "images", "data.video_key": "videos"}),
    ("verl", {f"{_ACTOR}.kl_loss_type": "k3+", f"{_ACTOR}.use_kl_loss": False}),
    ("verl", {"distillation.enabled": False, "distillation.loss": "kl", "trainer.val_only": False}),
    ("verl", {f"{_CORRECTION}.loss_type": "ppo_clip", f"{_CORRECTION}.rollout_rs": None}),
    ("verl", {f"{_CORRECTION}.bypass_mode": False, f"{_CORRECTION}.loss_type": "reinforce"}),
    ("verl", {f"{_MEGATRON}.moe_permute_fusion": True, f"{_MEGATRON}.moe_router_load_balancing_type": "none"}),
    ("verl", {f"{_ROLLOUT}.agent.default_agent_loop": "single_turn_agent", "data.train_max_samples": -1}),
    ("verl", {"reward_model.reward_manager": "dapo", f"{_ROLLOUT}.quantization_config_file": "x"}),
    ("verl", {"ray_init.num_cpus": 4, "trainer.default_hdfs_dir": "hdfs://x", "trainer.wandb_mode": 1}),
    ("verl sft", {"data.truncation": "error", "data.enable_thinking_default": "none", "data.tools_key": "tools"}),
    ("verl sft", {"data.apply_chat_template_kwargs.enable_thinking": None, "model.custom_chat_template": None}),
    ("roll", {"adv_estimator": "grpo", "whiten_advantages": False, "gamma": 1, "advantage_clip": None}),
    ("roll", {"adv_estimator": "reinforce", "reward_norm": "group", "whiten_advantages": False}),
    ("roll", {"reward_clip": None, "max_len_mask": False, "difficulty_mask": False, "mask_type": "loss"}),
    ("roll", {"error_max_len_clip": True, "error_max_len_threshold": 10**9, "difficulty_low_threshold": "x"}),
    ("roll", {"difficulty_low_threshold": 0.1, "rl_loss_coef": 1.0, "use_topr_neg_loss_coef": 0.0}),
    ("roll", {"dataset_filter.source": None, "dataset_filter.num_samples": 0}),
    ("roll", {"user_defined_rollout_loop_cls": _LOOP, "batch_adjust_mode": "copy", "ratio_type": "token"}),
    ("roll", {"pipeline_cls": "roll.pipeline.rlvr.rlvr_pipeline.RLVRPipeline", "use_opd": False}),
    ("roll", {"rewards.math_rule.response_filter_config.type": "no_filter", "rpc_timeout": 60}),
    ("cosmos-rl", {"distillation.enable": False, "distillation.top_k": 4, "train.ema_enable": False}),
    ("cosmos-rl", {f"{_POLICY}.trainer_type": "grpo", f"{_POLICY}.advantage_low": -5.0}),
    ("cosmos-rl", {f"{_POLICY}.use_remote_reward": False, "logging.level": "INFO"}),
]


@pytest.mark.parametrize(
    ("system", "keys"), NOTHING, ids=[f"{system}:{next(iter(keys))}" for system, keys in NOTHING]
)
def test_values_that_ask_for_nothing_and_plumbing_are_not_entries(system: str, keys: dict[str, Any]) -> None:
    found = convert(system, keys)
    assert not found.unsupported
    assert "unsupported" not in found.config
    assert "[unsupported]" not in to_toml(found)
    assert not any(line.startswith("unsupported") for line in to_report(found).splitlines())


@pytest.mark.parametrize(
    ("keys", "pipeline"),
    [
        ({"chosen_key": "chosen", "beta": 0.1, "ipo": False}, "dpo"),
        ({"train_batch_size": 64, "actor_train.device_mapping": "[0]"}, "dpo"),
        ({"student": {"device_mapping": "[0]"}, "teacher": {"infer_batch_size": 1}}, "distillation"),
        ({"student_train": {"infer_batch_size": 4}, "rollout_batch_size": 32}, "distillation"),
        ({"student_train": {"infer_batch_size": 4}, "adv_estimator": "gae"}, "distillation"),
        ({"custom_envs": {"Sokoban": {"env_type": "sokoban"}}, "adv_estimator": "grpo"}, "agentic"),
    ],
)
def test_other_pipelines_of_roll_are_known_by_their_keys(keys: dict[str, Any], pipeline: str) -> None:
    data = nest({"pretrain": "org/model", "actor_train.infer_batch_size": 1, **keys})
    found = convert_text(yaml_text(data), "x.yaml")
    assert (found.kind, found.unsupported) == (pipeline, {"pipeline": pipeline})
    assert f"  pipeline = {pipeline}: " in to_report(found)
    assert "unsupported.pipeline" in problems(found.config)
    assert tomllib.loads(to_toml(found)) == found.config
    assert "critic" not in found.config
    assert not any("critic" in warning for warning in found.warnings)


def test_a_default_of_the_source_is_written_where_ours_differs() -> None:
    found = roll_with({"adv_estimator": ABSENT, "whiten_advantages": ABSENT})
    assert found.config["train"]["train_policy"]["whiten_advantages"] is False
    assert "whiten_advantages" in to_report(found)
    assert not roll_with({"adv_estimator": ABSENT, "whiten_advantages": True}).unsupported


@pytest.mark.parametrize(
    ("value", "written"),
    [(".nan", "nan"), ("[1, null]", "[1, null]"), ("2026-01-01", "2026-01-01"), ("[2, a]", [2, "a"])],
)
def test_a_value_that_toml_cannot_hold_is_written_as_text(value: str, written: object) -> None:
    found = convert_text(f"rollout_batch_size: 8\nadv_estimator: grpo\nreward_clip: {value}\n", "x.yaml")
    assert found.unsupported == {"reward_clip": written}
    assert tomllib.loads(to_toml(found)) == found.config


def test_the_table_is_refused_however_it_is_written(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text(dumps(GRPO | {"unsupported": {}}))
    for overrides in ([], ["unsupported={}"], ["unsupported=0"], ["unsupported.x=1", "unsupported.y=2"]):
        found = refused(load_config, file, overrides)
        keys = {problem.key for problem in found if problem.key.startswith("unsupported")}
        assert keys == ({"unsupported.x", "unsupported.y"} if len(overrides) == 2 else {"unsupported"})
    assert problems({"unsupported": {"a": {"b": 1}, "c": [None, {}]}}).keys() >= {"unsupported.a.b", "unsupported.c"}


def test_a_second_conversion_changes_nothing() -> None:
    accumulation = "actor_train.training_args.gradient_accumulation_steps"
    once = roll_with({"adv_estimator": "gigpo", "reward_normalization.method": "mean_std", accumulation: 4})
    assert once.unsupported
    assert value_of(once, f"{_POLICY}.batch_size_per_optimize") == 64
    again = convert_text(to_toml(once), "run.toml")
    assert again.system == "cosmos-rl"
    assert again.config == once.config == tomllib.loads(to_toml(again))
    assert "nothing to convert" in again.warnings[0]


def test_editors_mark_it() -> None:
    validator = Draft202012Validator(json_schema())
    (error,) = validator.iter_errors({"unsupported": {"adv_estimator": "gigpo"}})
    assert list(error.path) == ["unsupported"]
    assert "convert" in error.schema["description"]


def test_neutral_values_of_the_method_ask_for_nothing() -> None:
    for listed in (reader.unsupported for reader in readers()):
        for key, neutral in listed.method.items():
            off = (None,) if EITHER_WAY in neutral else (None, False)
            assert not any(listed.decides_method(key, value) for value in (*off, *neutral)), key
            assert listed.decides_method(key, "something else"), key


@pytest.mark.parametrize("loss_scale_factor", [None, 2048])
def test_the_sum_over_the_longest_answer_says_how_it_is_divided(loss_scale_factor: int | None) -> None:
    keys = {f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 1024}
    found = convert("verl", {**keys, f"{_ACTOR}.loss_scale_factor": loss_scale_factor})
    policy = found.config["train"]["train_policy"]
    assert policy["loss_type"] == "seq-mean-token-mean"
    assert policy["unbiased_loss_max_tokens"] == (loss_scale_factor or 1024)
    assert any("the number of sequences of a micro-batch" in text for text in found.warnings)
    assert not found.unsupported
