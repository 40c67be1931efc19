"""ROLL: every key of its configuration guide has an outcome, and the complete examples convert to sound files."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from convert import convert, convert_text
from convert.engine.model import Conversion, Outcome
from convert.engine.registry import reader
from convert.engine.write import to_report, to_toml
from schema.config import ConfigError, check_config
from schema.config.keys import leaf_keys, section_keys
from schema.config.rules.engine import ENGINE_ARGUMENTS
from tests.convert.files import ABSENT, HERE, ROLL, ROOT, roll_with, under, value_of
from tests.schema.config_samples import refused

_TRAIN, _INFER = "actor_train", "actor_infer"
_MEGATRON = f"{_TRAIN}.strategy_args.strategy_config"
_ENGINE = f"{_INFER}.strategy_args.strategy_config"

_TRAINED = (
    "model_args.dtype model_args.disable_gradient_checkpointing training_args.learning_rate "
    "training_args.weight_decay training_args.per_device_train_batch_size "
    "training_args.gradient_accumulation_steps training_args.warmup_steps strategy_args.strategy_name "
    "device_mapping infer_batch_size"
)
PAGE_KEYS = (
    *("rollout_batch_size", "prompt_length", "response_length", "num_return_sequences_in_group"),
    *under(_TRAIN, _TRAINED),
    *under("critic", _TRAINED),
    f"{_TRAIN}.model_args.ulysses_size",
    *under(f"{_TRAIN}.data_args", "template file_name prompt messages"),
    *under(
        _MEGATRON,
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size "
        "virtual_pipeline_model_parallel_size sequence_parallel recompute_granularity moe_layer_recompute "
        "moe_token_dispatcher_type moe_grouped_gemm moe_shared_expert_overlap overlap_grad_reduce fsdp_size "
        "param_dtype reduce_dtype reshard_after_forward offload_policy",
    ),
    *under(
        _INFER,
        "model_args.dtype generating_args.max_new_tokens generating_args.temperature strategy_args.strategy_name "
        "num_gpus_per_worker infer_batch_size device_mapping",
    ),
    *under(_ENGINE, "gpu_memory_utilization block_size max_model_len load_format mem_fraction_static"),
    *under(
        "reference",
        "model_args.dtype strategy_args.strategy_name strategy_args.strategy_config.tensor_model_parallel_size "
        "device_mapping infer_batch_size",
    ),
)
PAGE_STRATEGIES = {
    f"{_TRAIN}.strategy_args.strategy_name": {"megatron_train", "fsdp2_train"},
    f"{_INFER}.strategy_args.strategy_name": {"vllm", "sglang", "hf_infer"},
    "reference.strategy_args.strategy_name": {"megatron_infer"},
}


@pytest.fixture(scope="module")
def examples() -> dict[str, Conversion]:
    return {path.name: convert(path) for path in ROLL}


def test_every_key_of_the_page_has_an_outcome(examples: dict[str, Conversion]) -> None:
    assert len(PAGE_KEYS) == len(set(PAGE_KEYS)) == 63
    for key in PAGE_KEYS:
        outcomes = [entry.outcome for found in examples.values() for entry in found.entries if entry.source == key]
        assert outcomes, f"{key} stands in no example"
        assert Outcome.UNKNOWN not in outcomes, key
        assert Outcome.NONE not in outcomes or key.endswith("data_args.template"), key


def test_every_strategy_of_the_page_is_read(examples: dict[str, Conversion]) -> None:
    for key, names in PAGE_STRATEGIES.items():
        found = {entry.value for example in examples.values() for entry in example.entries if entry.source == key}
        assert names <= found, key


def test_every_page_key_acts_somewhere(examples: dict[str, Conversion]) -> None:
    """Of the page's keys only these never write one of ours: what they say is always so here, or said elsewhere."""
    silent = {
        key
        for key in PAGE_KEYS
        if not any(
            entry.targets or entry.faithful
            for found in examples.values()
            for entry in found.entries
            if entry.source == key
        )
    }
    assert silent == {
        f"{_TRAIN}.strategy_args.strategy_name",
        "critic.strategy_args.strategy_name",
        f"{_INFER}.infer_batch_size",
        "reference.strategy_args.strategy_name",
        "reference.model_args.dtype",
    }


def test_what_validate_refuses_is_not_built_or_not_there(examples: dict[str, Conversion]) -> None:
    """Converted files fail for parts this build lacks, files that are not there, and sampling it cannot train on."""
    allowed = re.compile(
        r"cannot do .* yet|does not exist|no dataset is named|changes the distribution sampled from"
        r"|cannot be read: No such file|is in neither placement|of the source decides what is trained"
    )
    for name, found in examples.items():
        for problem in refused(check_config, found.config):
            assert allowed.search(problem.message), (name, problem.render())


def test_the_plain_example_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = convert("examples/roll_grpo.yaml")
    assert not found.of(Outcome.UNKNOWN)
    assert not found.of(Outcome.FALLBACK)
    assert not found.warnings
    check_config(found.config)
    assert value_of(found, "train.train_policy.reward_function") == "boxed_math"


def test_rows_write_keys_of_the_schema() -> None:
    known = {*leaf_keys(), *section_keys()}
    for rule in reader("roll").rules("rlvr"):
        for key in rule.converter.ours:
            assert key in known, (rule.key, key)


def test_rows_are_unique() -> None:
    spellings = [name for rule in reader("roll").rules("rlvr") for name in rule.spellings]
    assert [name for name, count in Counter(spellings).items() if count > 1] == []


def test_defaults_of_roll_are_written_where_ours_differ() -> None:
    found = convert_text("rollout_batch_size: 64\nactor_train: {device_mapping: '[0]'}\n")
    expected = {
        "rollout.n_generation": 1,
        "rollout.sampling_config.temperature": 0.95,
        "rollout.sampling_config.top_p": 0.7,
        "rollout.sampling_config.top_k": 50,
        "train.optm_lr": 5e-5,
        "train.optm_weight_decay": 0.0,
        "train.optm_warmup_steps": 0,
        "train.optm_decay_type": "linear",
        "train.train_policy.advantage_estimator": "gae",
        "train.train_policy.loss_type": "seq-mean-token-mean",
        "train.train_policy.allowed_outdated_steps": 0,
        "train.epsilon": 1e-8,
        "train.compile": False,
        "train.output_dir": "./output",
        "train.ckpt.save_freq": 50,
        "policy.parallelism.tp_size": 1,
        "rollout.parallelism.tp_size": 1,
        "train.train_policy.dataset.max_prompt_length": 1024,
    }
    assert {key: value_of(found, key) for key in expected} == expected


@pytest.mark.parametrize("role", [_TRAIN, "critic"])
def test_null_leaves_resharding_at_its_default(role: str) -> None:
    settings = "{strategy_name: fsdp2_train, strategy_config: {reshard_after_forward: null}}"
    found = convert_text(f"rollout_batch_size: 8\nadv_estimator: gae\n{role}: {{strategy_args: {settings}}}\n")
    entry = found.entry(f"{role}.strategy_args.strategy_config.reshard_after_forward")
    assert entry.outcome is Outcome.IMPLICIT


def test_a_missing_model_is_said() -> None:
    assert any("no model is named" in text for text in roll_with({"pretrain": ABSENT}).warnings)


def test_secrets_are_not_repeated() -> None:
    found = convert(HERE / "roll_megatron.yaml")
    assert found.entry("tracker_kwargs.api_key").value == "***"
    assert "not-a-real-key" not in to_toml(found) + to_report(found)


def test_no_engine_argument_takes_a_detour() -> None:
    """`validate` refuses an argument in engine_kwargs that has a key of ours: each needs a row."""
    spellings = {name for rule in reader("roll").rules("rlvr") for name in rule.spellings}
    assert {f"{_ENGINE}.{name}" for name in ENGINE_ARGUMENTS} <= spellings


def test_interpolation_reaches_defaults_and_the_environment() -> None:
    text = (
        "rollout_batch_size: 8\npretrain: ${oc.env:MODEL,org/base}\n"
        "actor_infer: {generating_args: {num_return_sequences: '${num_return_sequences_in_group}'}}\n"
    )
    assert value_of(convert_text(text), "policy.model_name_or_path") == "org/base"
    assert value_of(convert_text(text, env={"MODEL": "org/own"}), "policy.model_name_or_path") == "org/own"
    with pytest.raises(ConfigError, match="deepspeed_zero3"):
        convert_text("actor_train: {strategy_args: {strategy_config: '${deepspeed_zero3}'}}\n")


@pytest.mark.parametrize(("trajectories", "expected"), [(64, 64), (60, 64), (3, 8)])
def test_trajectories_of_a_step_become_whole_groups(trajectories: int, expected: int) -> None:
    found = roll_with({"rollout_batch_size": trajectories, "train_env_manager.group_size": 8})
    assert value_of(found, "train.train_batch_per_replica") == expected
    rounded = [warning for warning in found.warnings if f"is {expected} instead of {trajectories}" in warning]
    assert bool(rounded) == (trajectories != expected)
