"""Meshes and lengths against the model that is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schema.config import Config, check_rules, check_warnings
from schema.config.rules.model import (
    critic_reads_the_policy,
    engine_loads_what_is_published,
    logprobs_are_right,
    model_agrees,
    model_warnings,
    other_models_agree,
    overrides_can_act,
    sequences_can_be_cut,
)
from tests.schema.config.test_model_facts import QWEN
from tests.schema.config_samples import GRPO, SFT
from tests.schema.remedies import Case, check_case, config_of, written

M, R = "policy.parallelism", "rollout.parallelism"
VLLM = {"rollout.backend": "vllm"}
REPLAY = "train.train_policy.routing_replay"
BYTES = "controller.max_request_bytes"
CRITIC = {"critic.enable": True, "train.train_policy.advantage_estimator": "gae"}
MOE = QWEN | {"num_experts": 12}
SENT = MOE | {"num_experts_per_tok": 4}
GEMMA = QWEN | {"model_type": "gemma3_text"}
SMALL = QWEN | {"max_position_embeddings": 1024}
LEARNED = {"model_type": "gpt2", "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}

FAULTS: list[tuple[Any, ...]] = [
    (QWEN, {f"{M}.tp_size": 32}, "32 does not divide the 16 attention heads"),
    (QWEN, {f"{M}.tp_size": 16}, "16 does not divide the 8 key/value heads"),
    (MOE, {f"{M}.tp_size": 8}, "8 does not divide the 12 experts"),
    (QWEN | {"layer_types": ["conv", "full_attention"]}, {f"{M}.tp_size": 2} | VLLM, "carry state along the row"),
    (QWEN, {f"{M}.pp_size": 29}, "29 are 29 stages for the 28 layers"),
    (
        QWEN,
        {f"{M}.pp_size": 8, f"{M}.virtual_pp_size": 4},
        f"8 * {M}.virtual_pp_size = 4 are 32 stages for the 28 layers",
    ),
    (GEMMA, {"rollout.dtype": "float16"} | VLLM, "refused by vLLM", "gemma3_text"),
    (GEMMA, {"train.param_dtype": "float16"} | VLLM, "refused by vLLM", "gemma3_text"),
    (MOE, {f"{M}.ep_size": 8}, "8 does not divide the 12 experts"),
    (QWEN, {f"{M}.ep_size": 2}, "2 is for experts", "has none"),
    (QWEN, {f"{R}.tp_size": 12} | VLLM, "12 does not divide the 16 attention heads"),
    (
        QWEN | {"num_key_value_heads": 6, "num_attention_heads": 24},
        {f"{R}.tp_size": 4} | VLLM,
        "4 neither divides the 6 key/value heads",
        "nor is a multiple",
    ),
    (
        QWEN | {"layer_types": ["conv", "full_attention"]},
        {"rollout.backend": "transformers"},
        "decodes attention layers only",
    ),
    (QWEN, {f"{R}.pp_size": 30} | VLLM, "30 are more stages than the 28 layers"),
    (MOE, {f"{R}.ep_size": 8, f"{R}.tp_size": 8} | VLLM, "12 experts"),
    (QWEN, {"policy.moe_grouped_gemm": True}, "is none"),
    (QWEN, {"policy.moe_shared_expert_overlap": True, f"{M}.tp_size": 2, f"{M}.sequence_parallel": True}, "is none"),
    (QWEN, {"policy.freeze_moe_router": True}, "is none"),
    (QWEN, {"critic.freeze_moe_router": True} | CRITIC, "is none"),
    (QWEN, {"train.recompute_moe_layers": True}, "is none"),
    (QWEN, {REPLAY: "ids"}, '"ids" is for mixtures', "is none"),
    (SENT, {BYTES: 400_000, REPLAY: "ids"}, "495616 bytes", "4096 tokens", "112 bytes for each"),
    (SENT, {BYTES: 2_000_000, REPLAY: "weights"}, "2330624 bytes", "560 bytes", "28 mixtures"),
    (SENT | {"num_experts": 384}, {BYTES: 500_000, REPLAY: "ids"}, "954368 bytes"),
    (
        SMALL,
        {"policy.model_max_length": 4096} | VLLM,
        "4096 tokens",
        "1024 positions (max_position_embeddings)",
        "vLLM refuses",
    ),
    (
        SMALL,
        {"rollout.max_model_len": 2000, "policy.model_max_length": 1000, "rollout.max_response_length": 500} | VLLM,
        "2000 tokens",
        "1024 positions",
    ),
    (
        LEARNED,
        {"policy.model_max_length": 4096},
        "4096 tokens",
        "1024 positions (n_positions)",
        "learned positions end",
    ),
]
"""A model, the keys that do not fit it, the one to blame before the others, and words of the message."""


UPDATED = [
    (QWEN | {"quantization_config": {"quant_method": "awq"}}, "a quantised model (awq)"),
    ({"text_config": QWEN, "quantization_config": {"quant_method": "gptq"}}, "a quantised model (gptq)"),
]


@pytest.mark.parametrize(("architecture", "words"), UPDATED)
def test_vllm_loads_no_quantised_checkpoint(tmp_path: Path, architecture: dict[str, Any], words: str) -> None:
    values = named(tmp_path, architecture, VLLM)
    (problem,) = engine_loads_what_is_published(config_of(GRPO, values))
    assert problem.key == "policy.model_name_or_path"
    assert words in problem.message
    for model, backend in ((architecture, {}), (MOE | {"kv_lora_rank": 512}, VLLM)):
        assert engine_loads_what_is_published(config_of(GRPO, named(tmp_path, model, backend))) == []


def named(directory: Path, architecture: dict[str, Any] | str, values: dict[str, Any]) -> dict[str, Any]:
    text = architecture if isinstance(architecture, str) else json.dumps(architecture)
    (directory / "config.json").write_text(text)
    return {"policy.model_name_or_path": str(directory), **values}


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: next(iter(row[1])))
def test_faults(tmp_path: Path, row: tuple[Any, ...]) -> None:
    architecture, values, *words = row
    key = next(iter(values))
    case = Case(model_agrees, named(tmp_path, architecture, values), key, (*words, str(tmp_path)))
    problem = check_case(case, GRPO)
    assert "policy.model_name_or_path" in problem.message
    asked = [found.key for found in check_rules(config_of(GRPO, case.values))]
    assert key in asked


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        (QWEN, {f"{M}.tp_size": 8, f"{M}.pp_size": 4}),
        (QWEN, VLLM | {f"{R}.tp_size": 16, f"{R}.pp_size": 3}),  # two ranks hold each key/value head
        (MOE, {f"{M}.ep_size": 4, "policy.moe_grouped_gemm": True, "policy.freeze_moe_router": True}),
        (MOE, VLLM | {f"{R}.tp_size": 4, f"{R}.ep_size": 4}),
        (SMALL, {}),  # the transformers engine goes on beyond trained rotary positions
        (SMALL | {"rope_scaling": {"type": "linear", "factor": 4.0}}, VLLM),
        (SMALL, VLLM | {"rollout.max_model_len": 1024}),
        (SENT, {REPLAY: "weights", BYTES: 2_400_000}),
        (SENT, {REPLAY: "weights", BYTES: 2_000_000, "controller.payload_store": "/shared"}),
        (SENT, {BYTES: 1024}),
        (MOE, {REPLAY: "ids", BYTES: 1024}),  # how many are chosen is not known
        ({}, VLLM | {f"{M}.tp_size": 3, f"{M}.pp_size": 7, f"{M}.ep_size": 5, f"{R}.tp_size": 3}),
    ],
)
def test_what_fits(tmp_path: Path, architecture: dict[str, Any], values: dict[str, Any]) -> None:
    config = config_of(GRPO, named(tmp_path, architecture, values))
    assert list(model_agrees(config)) == []


@pytest.mark.parametrize("base", [GRPO, SFT], ids=["grpo", "sft"])
def test_longer_than_trained_is_a_warning(tmp_path: Path, base: dict[str, Any]) -> None:
    problem = check_case(Case(model_warnings, named(tmp_path, SMALL, {}), "policy.model_max_length", ("1024",)), base)
    config = config_of(base, named(tmp_path, SMALL, {}))
    assert problem.message in [warning.message for warning in check_warnings(config)]
    assert list(model_agrees(config)) == []


def test_stages_of_unequal_length_are_a_warning(tmp_path: Path) -> None:
    values = named(tmp_path, QWEN, {f"{M}.pp_size": 3})
    check_case(Case(model_warnings, values, f"{M}.pp_size", ("28 layers", "3 unequal stages")), GRPO)


def test_the_critics_mesh_is_of_the_same_model(tmp_path: Path) -> None:
    critic = {"critic.enable": True, "train.train_policy.advantage_estimator": "gae", "critic.parallelism.tp_size": 3}
    key = "critic.parallelism.tp_size"
    case = Case(other_models_agree, named(tmp_path, QWEN, critic), key, ("3 does not divide",))
    check_case(case, GRPO)
    other = written(GRPO, case.values | {"critic.model_name_or_path": "owner/other"})
    assert list(other_models_agree(Config.model_validate(other))) == []


def test_a_critic_reads_the_policys_tokens(tmp_path: Path) -> None:
    for name, tokens in (("policy", 7), ("critic", 8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": tokens}))
    values = {
        "critic.enable": True,
        "train.train_policy.advantage_estimator": "gae",
        "policy.model_name_or_path": str(tmp_path / "policy"),
    }
    key = "critic.model_name_or_path"
    other = values | {key: str(tmp_path / "critic")}
    check_case(Case(critic_reads_the_policy, other, key, ("critic has 8 tokens", "policy has 7")), GRPO)
    absent = values | {key: str(tmp_path / "absent")}
    check_case(Case(critic_reads_the_policy, absent, key, ("absent does not exist",)), GRPO)
    (tmp_path / "critic" / "config.json").write_text("{")
    check_case(Case(logprobs_are_right, other, key, ("is not JSON",)), GRPO)
    (tmp_path / "critic" / "config.json").write_text("{}")
    for name, token in (("policy", "a"), ("critic", "b")):
        text = json.dumps({"model": {"vocab": {token: 0}}, "added_tokens": []})
        (tmp_path / name / "tokenizer.json").write_text(text)
    check_case(Case(critic_reads_the_policy, other, key, ("token 0 is 'a' here and 'b' there",)), GRPO)
    by_tokenizer = values | {"critic.tokenizer_name_or_path": str(tmp_path / "critic")}
    case = Case(critic_reads_the_policy, by_tokenizer, "critic.tokenizer_name_or_path", ("token 0 is 'a' here",))
    check_case(case, GRPO)
    assert list(critic_reads_the_policy(config_of(GRPO, values))) == []


CUT = f"{M}.cp_size"
UNCUT: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (QWEN, {CUT: 3}, ("3 does not divide the 16 attention heads",)),
    (QWEN, {CUT: 8, f"{M}.tp_size": 4}, ("8 * policy.parallelism.tp_size = 4 does not divide the 16",)),
    (QWEN | {"layer_types": ["conv", "full_attention"]}, {CUT: 2}, ("carry state", "convolution")),
]


@pytest.mark.parametrize("base", [GRPO, SFT], ids=["grpo", "sft"])
@pytest.mark.parametrize(("architecture", "values", "words"), UNCUT, ids=["heads", "tensors", "state"])
def test_sequences_that_cannot_be_cut(
    tmp_path: Path, base: dict[str, Any], architecture: dict[str, Any], values: dict[str, Any], words: tuple[str, ...]
) -> None:
    values = named(tmp_path, architecture, values)
    check_case(Case(sequences_can_be_cut, values, CUT, (*words, str(tmp_path))), base)
    sound = named(tmp_path, QWEN, {CUT: 16})  # more ranks than heads of keys and values
    assert list(sequences_can_be_cut(config_of(base, sound))) == []


def test_sequences_are_cut_for_every_model(tmp_path: Path) -> None:
    others = {
        "reference.model_name_or_path": {"train.train_policy.kl_beta": 0.1},
        "critic.model_name_or_path": CRITIC,
    }
    for key, further in others.items():
        values = named(tmp_path, QWEN | {"num_attention_heads": 6}, {key: str(tmp_path), CUT: 4} | further)
        values["policy.model_name_or_path"] = "owner/model"
        check_case(Case(sequences_can_be_cut, values, CUT, ("6 attention heads", key)), GRPO)
    taught = written(GRPO, {CUT: 4}) | {"teacher": [{"name": "t", "model": str(tmp_path)}]}
    (problem,) = sequences_can_be_cut(Config.model_validate(taught))
    assert f"teacher[0].model = {tmp_path}" in problem.message


def test_every_model_is_cut_into_stages(tmp_path: Path) -> None:
    values = named(tmp_path, QWEN, {"critic.model_name_or_path": str(tmp_path), f"{M}.pp_size": 29} | CRITIC)
    values["policy.model_name_or_path"] = "owner/model"
    words = ("29 stages for the 28 layers of critic.model_name_or_path",)
    check_case(Case(other_models_agree, values, f"{M}.pp_size", words), GRPO)


def test_a_broken_model_is_a_problem(tmp_path: Path) -> None:
    (problem,) = model_agrees(config_of(GRPO, named(tmp_path, "{", {})))
    assert problem.key == "policy.model_name_or_path"
    assert "config.json is not JSON" in problem.message


PACKED = {"train.sequence_packing": True}
HYBRID = QWEN | {"model_type": "qwen3_next"}


@pytest.mark.parametrize("base", [GRPO, SFT], ids=["grpo", "sft"])
def test_packed_sequences_are_kept_apart(tmp_path: Path, base: dict[str, Any]) -> None:
    words = (str(tmp_path), "(qwen3_next)", "carry state")
    case = Case(logprobs_are_right, named(tmp_path, HYBRID, PACKED), "train.sequence_packing", words)
    assert "write train.sequence_packing = false" in str(check_case(case, base).hint)
    asked = [found.key for found in check_rules(config_of(base, case.values))]
    assert "train.sequence_packing" in asked
    assert list(logprobs_are_right(config_of(base, named(tmp_path, HYBRID, {})))) == []
    assert list(logprobs_are_right(config_of(base, named(tmp_path, QWEN, PACKED)))) == []


def test_a_reference_model_is_packed_too(tmp_path: Path) -> None:
    mixed = PACKED | {"reference.model_name_or_path": str(tmp_path / "other"), "train.train_policy.kl_beta": 0.1}
    (tmp_path / "other").mkdir()
    named(tmp_path / "other", HYBRID, {})
    values = named(tmp_path, QWEN, mixed)
    case = Case(logprobs_are_right, values, "train.sequence_packing", (f"reference.model_name_or_path = {tmp_path}",))
    check_case(case, GRPO)
    named(tmp_path / "other", "{", {})
    (problem,) = logprobs_are_right(config_of(GRPO, values))
    assert problem.key == "reference.model_name_or_path"


def test_logits_of_several_layers_are_refused(tmp_path: Path) -> None:
    """Nothing at boot: a head that is one linear layer, shifted, scaled or capped, is applied."""
    values = named(tmp_path, QWEN | {"model_type": "roberta"}, {})
    case = Case(logprobs_are_right, values, "policy.model_name_or_path", ("(roberta)", "several layers"))
    check_case(case, GRPO)
    for kind in ("gemma2", "granite", "cohere", "phi"):
        values = named(tmp_path, QWEN | {"model_type": kind}, {})
        assert list(logprobs_are_right(config_of(GRPO, values))) == []


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"policy.override_config": {"attention_dropout": 0.1}}, "attention_dropout", "dropout is off in training"),
        ({"policy.override_config": {"resid_pdrop": 1}}, "resid_pdrop", "dropout is off in training"),
        ({"policy.override_config": {"dtype": "float32"}}, "dtype", "is not for override_config"),
    ],
)
def test_overrides_that_cannot_act(values: dict[str, Any], key: str, words: str) -> None:
    (problem,) = overrides_can_act(config_of(GRPO, values))
    assert problem.key == f"policy.override_config.{key}"
    assert words in problem.message
    assert problem.hint
    harmless = {"policy.override_config": {"attention_dropout": 0.0, "rms_norm_eps": 1e-5}}
    assert list(overrides_can_act(config_of(GRPO, harmless))) == []
    critic = {"critic.enable": True, "critic.override_config": values["policy.override_config"]}
    (problem,) = overrides_can_act(config_of(GRPO, critic))
    assert problem.key == f"critic.override_config.{key}"
