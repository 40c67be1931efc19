"""Every key of the configuration that vLLM knows reaches its arguments: flip it and see. No vLLM is imported."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_worker.engines.base import EngineConfigError, SamplingSettings
from rollout_worker.engines.vllm import arguments
from rollout_worker.engines.vllm.arguments import (
    IN_PROCESS_EXECUTOR,
    check_held_back,
    check_routing,
    check_sampling,
    engine_arguments,
    sampling_arguments,
)
from schema.config import Config

KNOWN = {"model", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype", "swap_space"}
KNOWN |= {"enable_prefix_caching", "tensor_parallel_size", "logprobs_mode"}


def config(**sections: Any) -> Config:
    rollout = {"parallelism": {"tp_size": 1}, **sections.pop("rollout", {})}
    policy = {"model_name_or_path": "/models/m", **sections.pop("policy", {})}
    return Config.model_validate({"rollout": rollout, "policy": policy, **sections})


def engine(on_cpu: bool = False, **sections: Any) -> dict[str, Any]:
    return engine_arguments(config(**sections), known=KNOWN, on_cpu=on_cpu)


ABSENT = object()
ENGINE_KEYS: dict[str, tuple[dict[str, Any], str, Any, Any]] = {
    # name of the case: (sections, engine argument, value without them, value with them)
    "model": ({"policy": {"model_name_or_path": "/n"}}, "model", "/models/m", "/n"),
    "revision": ({"policy": {"model_revision": "abc"}}, "revision", ABSENT, "abc"),
    "tokenizer": ({"policy": {"tokenizer_name_or_path": "/t"}}, "tokenizer", ABSENT, "/t"),
    "tokenizer_revision": (
        {"policy": {"tokenizer_name_or_path": "/t", "model_revision": "abc"}}, "tokenizer_revision", ABSENT, "main",
    ),
    "trust_remote_code": ({"policy": {"trust_remote_code": True}}, "trust_remote_code", False, True),
    "override": (
        {"policy": {"override_config": {"rms_norm_eps": 0.1}}}, "hf_overrides", ABSENT, {"rms_norm_eps": 0.1},
    ),
    "adapters": ({"policy": {"lora": {}}, "weight_sync": {"lora": "adapter"}}, "enable_lora", ABSENT, True),
    "rank": (
        {"policy": {"lora": {"r_pattern": {"q_proj": 9}}}, "weight_sync": {"lora": "adapter"}},
        *("max_lora_rank", ABSENT, 16),
    ),
    "merged adapters": ({"policy": {"lora": {"r": 9}}}, "max_lora_rank", ABSENT, ABSENT),
    "dtype": ({"rollout": {"dtype": "float16"}}, "dtype", "bfloat16", "float16"),
    "dtype auto": ({"train": {"param_dtype": "float32"}}, "dtype", "bfloat16", "float32"),
    "transfer_dtype": ({"train": {"transfer_dtype": "float32"}}, "dtype", "bfloat16", "float32"),
    "seed": ({"rollout": {"seed": 7}}, "seed", 42, 7),
    "seed of the job": ({"train": {"seed": 9}}, "seed", 42, 9),
    "load_format": ({"rollout": {"load_format": "dummy"}}, "load_format", "auto", "dummy"),
    "quantization": ({"rollout": {"quantization": "fp8"}}, "quantization", ABSENT, "fp8_per_tensor"),
    "enforce_eager": ({"rollout": {"enforce_eager": False}}, "enforce_eager", True, False),
    "chunked": ({"rollout": {"enable_chunked_prefill": True}}, "enable_chunked_prefill", False, True),
    "memory": ({"rollout": {"gpu_memory_utilization": 0.5}}, "gpu_memory_utilization", 0.8, 0.5),
    "max_model_len": ({"rollout": {"max_model_len": 99}}, "max_model_len", 4096, 99),
    "model_max_length": ({"policy": {"model_max_length": 77}}, "max_model_len", 4096, 77),
    "max_num_seqs": ({"rollout": {"max_num_seqs": 5}}, "max_num_seqs", ABSENT, 5),
    "batched": ({"rollout": {"max_num_batched_tokens": 6}}, "max_num_batched_tokens", ABSENT, 6),
    "block_size": ({"rollout": {"block_size": 32}}, "block_size", ABSENT, 32),
    "tp": ({"rollout": {"parallelism": {"tp_size": 4}}}, "tensor_parallel_size", 1, 4),
    "pp": ({"rollout": {"parallelism": {"tp_size": 1, "pp_size": 2}}}, "pipeline_parallel_size", 1, 2),
    "dp": ({"rollout": {"parallelism": {"dp_shard_size": 2}}}, "data_parallel_size", 1, 2),
    "ep": ({"rollout": {"parallelism": {"tp_size": 2, "ep_size": 2}}}, "enable_expert_parallel", False, True),
    "experts": (
        {"train": {"train_policy": {"type": "grpo", "routing_replay": "ids"}}},
        *("enable_return_routed_experts", ABSENT, True),
    ),
    "flashinfer": (
        {"rollout": {"vllm_use_flashinfer": True}}, "attention_config", ABSENT, {"backend": "FLASHINFER"},
    ),
    "kwargs": ({"rollout": {"engine_kwargs": {"swap_space": 2}}}, "swap_space", ABSENT, 2),
    "kwargs null": ({"rollout": {"engine_kwargs": {"swap_space": None}}}, "swap_space", ABSENT, ABSENT),
}  # fmt: skip


@pytest.mark.parametrize("case", ENGINE_KEYS)
def test_engine_keys(case: str) -> None:
    sections, name, before, after = ENGINE_KEYS[case]
    assert engine().get(name, ABSENT) == before
    assert engine(**sections).get(name, ABSENT) == after


@pytest.mark.parametrize(("mode", "read"), [(None, "/scratch/words"), ("mistral", "/t")])
def test_vllm_reads_the_workers_tokenizer_unless_a_mode_is_named(mode: str | None, read: str) -> None:
    policy = {"tokenizer_name_or_path": "/t", "model_revision": "abc"}
    wanted = config(policy=policy, rollout={"engine_kwargs": {"tokenizer_mode": mode}})
    known = {*KNOWN, "tokenizer_mode"}
    found = engine_arguments(wanted, known=known, on_cpu=False, tokenizer=Path("/scratch/words"))
    assert (found["tokenizer"], found["tokenizer_mode"]) == (read, mode or "hf")
    assert found["tokenizer_revision"] == ("main" if mode else None)


def test_what_the_worker_needs_is_always_set() -> None:
    found = engine()
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["generation_config"] == "vllm"
    assert found["weight_transfer_config"] == {"backend": arguments.TRANSFER_BACKEND}
    assert found["worker_extension_cls"] == arguments.WORKER_EXTENSION


def test_which_log_probs_vllm_gives() -> None:
    def given(**sampling: Any) -> tuple[Any, Any]:
        found = engine(rollout={"sampling_config": sampling})
        return found["logprobs_mode"], found.get("max_logprobs", ABSENT)

    assert given() == ("processed_logprobs", ABSENT)
    assert given(min_tokens=3) == ("processed_logprobs", ABSENT)
    assert given(top_k=40) == ("processed_logprobs", 66)
    assert given(top_p=0.9) == ("processed_logprobs", -1)
    assert given(top_p=0.9, sampling_correction="raw") == ("raw_logprobs", ABSENT)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_seq", r"engine_kwargs\.max_num_seq: .*did you mean max_num_seqs\?"),
        ("zzz", r"engine_kwargs\.zzz: vLLM has no such engine argument$"),
        ("tensor_parallel_size", r"write it as rollout\.parallelism\.tp_size"),
        ("tokenizer", r"write it as policy\.tokenizer_name_or_path"),
        ("trust_remote_code", r"write it as policy\.trust_remote_code"),
        ("logprobs_mode", "is set by the rollout worker"),
        ("enable_return_routed_experts", r"write it as train\.train_policy\.routing_replay"),
        ("max_logprobs", "is set by the rollout worker"),
    ],
)
def test_engine_arguments_that_cannot_be_passed_through(name: str, message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        engine(rollout={"engine_kwargs": {name: 1}})


def test_chosen_experts_need_the_second_model_runner() -> None:
    plain, replaying = ({"train_policy": {"type": "grpo", "routing_replay": how}} for how in ("none", "ids"))
    check_routing(Config.model_validate({"train": plain}), second_runner=False)
    for allowed in (None, True):
        check_routing(Config.model_validate({"train": replaying}), second_runner=allowed)
    with pytest.raises(EngineConfigError, match=r"routing_replay = \"ids\" needs model runner V2 .*MODEL_RUNNER=0"):
        check_routing(Config.model_validate({"train": replaying}), second_runner=False)


@pytest.mark.parametrize(
    ("tokens", "min_tokens", "runner", "refused"),
    [(129, 1, "V2", True), (128, 1, "V2", False), (129, 0, "V2", False), (129, 1, "V1", False)],
)
def test_how_many_tokens_each_model_runner_holds_back(
    tokens: int, min_tokens: int, runner: str, *, refused: bool
) -> None:
    with pytest.raises(ValueError, match="holds back 129 stop tokens") if refused else nullcontext():
        check_held_back(tokens, min_tokens, runner)


def test_on_a_cpu() -> None:
    assert "distributed_executor_backend" not in engine()
    assert engine(on_cpu=True)["distributed_executor_backend"] == IN_PROCESS_EXECUTOR
    several = engine(on_cpu=True, rollout={"parallelism": {"tp_size": 2}})
    assert "distributed_executor_backend" not in several
    with pytest.raises(EngineConfigError, match=r"enable_chunked_prefill = false"):
        engine(on_cpu=True, rollout={"enable_chunked_prefill": True})


# ---- sampling -----------------------------------------------------------------------------------------------

PLAIN = SamplingSettings(max_tokens=10)


def sampling(settings: SamplingSettings = PLAIN, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "seed": 5, "eos_token_ids": {9}, "prompt_tokens": 3, "max_model_len": 100, "vocabulary": 60,
    }  # fmt: skip
    return sampling_arguments(settings, **{**fields, **changes})


SAMPLING_KEYS: dict[str, tuple[dict[str, Any], str, Any, Any]] = {
    "max_tokens": ({"max_tokens": 11}, "max_tokens", 10, 11),
    "temperature": ({"temperature": 0.5}, "temperature", 1.0, 0.5),
    "greedy": ({"temperature": 0.0}, "temperature", 1.0, 0.0),
    "do_sample": ({"do_sample": False}, "temperature", 1.0, 0.0),
    "top_p": ({"top_p": 0.5}, "top_p", 1.0, 0.5),
    "top_k": ({"top_k": 5}, "top_k", 0, 5),
    "min_p": ({"min_p": 0.1}, "min_p", 0.0, 0.1),
    "repetition_penalty": ({"repetition_penalty": 1.5}, "repetition_penalty", 1.0, 1.5),
    "presence_penalty": ({"presence_penalty": 0.5}, "presence_penalty", 0.0, 0.5),
    "frequency_penalty": ({"frequency_penalty": 0.5}, "frequency_penalty", 0.0, 0.5),
    "min_tokens": ({"min_tokens": 4}, "min_tokens", 0, 4),
    "ignore_eos": ({"ignore_eos": True}, "stop_token_ids", [9], []),
    "stop_token_ids": ({"stop_token_ids": (3, 2)}, "stop_token_ids", [9], [2, 3, 9]),
    "stop_tokens": ({"stop_tokens": {5: "<|user|>"}}, "stop_token_ids", [9], [5, 9]),
    "stop": ({"stop": ("x",)}, "stop", [], ["x"]),
    "stop needs text": ({"stop": ("x",)}, "detokenize", False, True),
    "include_stop": ({"include_stop_str_in_output": True}, "include_stop_str_in_output", False, True),
    "kept sets of top_k": ({"correction": "exact", "top_k": 5}, "logprobs", 0, 22),
    "kept sets of nearly all": ({"correction": "exact", "top_k": 50}, "logprobs", 0, 60),
    "kept sets of top_p": ({"correction": "exact", "top_p": 0.5}, "logprobs", 0, -1),
    "kept sets not asked for": ({"top_p": 0.5}, "logprobs", 0, 0),
    "kept sets of greedy": ({"correction": "exact", "top_p": 0.5, "temperature": 0.0}, "logprobs", 0, 0),
    "experts are of the engine": ({"routing": "ids"}, "routed_experts_prompt_start", ABSENT, ABSENT),
    "extra": ({"extra": {"logit_bias": {1: 2.0}}}, "logit_bias", ABSENT, {1: 2.0}),
}


@pytest.mark.parametrize("case", SAMPLING_KEYS)
def test_sampling_keys(case: str) -> None:
    changes, name, before, after = SAMPLING_KEYS[case]
    assert sampling().get(name, ABSENT) == before
    assert sampling(replace(PLAIN, **changes)).get(name, ABSENT) == after


def test_every_setting_has_a_case() -> None:
    covered = {name for changes, *_ in SAMPLING_KEYS.values() for name in changes}
    assert covered == set(SamplingSettings.__dataclass_fields__)


def test_seeds_and_logprobs() -> None:
    assert sampling(seed=6)["seed"] == 6
    assert sampling()["logprobs"] == 0
    assert sampling()["n"] == 1


def test_the_longest_sequence_bounds_the_answer() -> None:
    found = sampling(replace(PLAIN, max_tokens=50, min_tokens=40), prompt_tokens=90)
    assert (found["max_tokens"], found["min_tokens"]) == (10, 10)


FIELDS = {"logit_bias", "bad_words", "allowed_token_ids", "n", "temperature", "_eos_token_id", "logprobs"}


def test_a_temperature_that_vllm_would_change() -> None:
    cold: dict[str, Any] = {"sampling_config": {"temperature": 0.001}}
    with pytest.raises(EngineConfigError, match=r"sampling_config\.temperature = 0\.001 is below"):
        check_sampling(config(rollout=cold), known=FIELDS)
    greedy = {"sampling_config": {"temperature": 0.001, "do_sample": False}}
    check_sampling(config(rollout=greedy), known=FIELDS)
    for enable in (True, False):
        asked = config(validation={"enable": enable, "temperature": 0.005})
        if enable:
            with pytest.raises(EngineConfigError, match=r"validation\.temperature = 0\.005 is below"):
                check_sampling(asked, known=FIELDS)
        else:
            check_sampling(asked, known=FIELDS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("logit_bia", r"extra\.logit_bia: .*did you mean logit_bias\?"),
        ("zzz", r"extra\.zzz: vLLM has no such sampling field$"),
        ("_eos_token_id", "no such sampling field"),
        ("temperature", r"write it as rollout\.sampling_config\.temperature"),
        ("logprobs", "is set by the rollout worker"),
    ],
)
def test_sampling_fields_that_cannot_be_passed_through(name: str, message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        check_sampling(config(rollout={"sampling_config": {"extra": {name: 1}}}), known=FIELDS)
    allowed = {"extra": {"logit_bias": {"1": 1.0}}}
    check_sampling(config(rollout={"sampling_config": allowed}), known=FIELDS)
