"""Each rule between sections: what it refuses, what it allows next to it, and the remedy that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schema.config import Config, check_config, check_rules, check_warnings
from schema.config.backends import BACKENDS
from schema.config.rules.engine import engine_can_quantise, engine_has_gpus, routing_can_be_replayed
from tests.schema.config_samples import GRPO, SFT, changed, only, problems, refused
from tests.schema.remedies import Case, check_case, config_of

P = "train.train_policy"


def test_the_samples_are_sound() -> None:
    assert check_config(GRPO).is_grpo
    assert not check_config(SFT).is_grpo


def test_a_bare_configuration_names_what_it_needs() -> None:
    assert {problem.key for problem in refused(check_config, {})} == {f"{P}.dataset.name"}


def test_the_temperature_has_one_value() -> None:
    one = {"train__train_policy__temperature": 0.7}
    other = {"rollout__sampling_config__temperature": 0.8}
    assert Config.model_validate(changed(GRPO, **one)).sampling_temperature == 0.7
    assert Config.model_validate(changed(GRPO, **other)).sampling_temperature == 0.8
    assert problems(**one) == problems(**other) == []
    assert problems(**one, rollout__sampling_config__temperature=0.7) == []
    problem = only(**one, **other)
    assert problem.key == "rollout.sampling_config.temperature"
    assert "train.train_policy.temperature = 0.7" in problem.message
    assert only(**one, rollout__sampling_config__temperature=1.0).key == problem.key


@pytest.mark.parametrize(
    ("key", "value", "neutral"),
    [
        ("do_sample", False, True),
        ("temperature", 0.0, 0.1),
        ("extra", {"logit_bias": {"5": -100.0}}, {}),
        ("extra", {"bad_words": ["x"]}, {"skip_special_tokens": False}),
    ],
)
def test_training_samples_what_the_trainer_can_compute(key: str, value: Any, neutral: Any) -> None:
    name = f"rollout__sampling_config__{key}"
    problem = only(rollout__backend="vllm", **{name: value})
    assert problem.key.startswith(f"rollout.sampling_config.{key}")
    assert problems(rollout__backend="vllm", **{name: neutral}) == []


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 4096, "top_p": 0.7, "min_p": 0.1},
        {"repetition_penalty": 1.1, "presence_penalty": 0.1, "min_tokens": 3},
    ],
)
@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_training_rollouts_may_be_filtered_and_penalised(backend: str, sampling: dict[str, Any]) -> None:
    assert problems(rollout__backend=backend, rollout__sampling_config=sampling) == []


@pytest.mark.parametrize(
    ("sampling", "key"), [({"top_p": 0.9}, "top_p"), ({"min_p": 0.1}, "min_p"), ({"top_k": 5000}, "top_k")]
)
def test_kept_sets_are_bounded(sampling: dict[str, float], key: str, tmp_path: Path) -> None:
    problem = only(rollout__sampling_config=sampling)
    assert problem.key == f"rollout.sampling_config.{key}"
    assert "a vocabulary that is not known here" in problem.message
    assert 'sampling_correction = "raw"' in problem.hint
    assert problems(rollout__sampling_config=sampling | {"sampling_correction": "raw"}) == []
    assert problems(rollout__sampling_config=sampling | {"top_k": 50}) == []
    for vocabulary in (4096, 4097):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": vocabulary}))
        config = changed(GRPO, policy__model_name_or_path=str(tmp_path), rollout__sampling_config=sampling)
        found = [one.message for one in check_rules(Config.model_validate(config)) if one.key == problem.key]
        assert len(found) == (vocabulary > 4096)
        assert all("a vocabulary of 4097" in message for message in found)


def test_raw_log_probs_of_vllm_have_no_temperature() -> None:
    raw = {"top_k": 50, "sampling_correction": "raw"}
    cold = {"train__train_policy__temperature": 0.7}
    problem = only(rollout__backend="vllm", rollout__sampling_config=raw, **cold)
    assert problem.key == "rollout.sampling_config.sampling_correction"
    assert problems(rollout__backend="transformers", rollout__sampling_config=raw, **cold) == []
    config = Config.model_validate(changed(GRPO, rollout__sampling_config=raw))
    assert problem.key in {warning.key for warning in check_warnings(config)}


def test_the_remedy_for_greedy_training_names_the_written_key() -> None:
    assert only(train__train_policy__temperature=0.0).key == f"{P}.temperature"


@pytest.mark.parametrize(
    ("name", "hint"), [("stop", "write it as rollout.sampling_config.stop"), ("n", "leave it out")]
)
def test_extra_is_no_detour(name: str, hint: str) -> None:
    problem = only(rollout__backend="vllm", rollout__sampling_config__extra={name: 2})
    assert (problem.key, problem.hint) == (f"rollout.sampling_config.extra.{name}", hint)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tensor_parallel_size", 2, "write it as rollout.parallelism.tp_size"),
        ("data_parallel_size", 2, "write it as rollout.parallelism.dp_shard_size"),
        ("pipeline_parallel_size", 2, "write it as rollout.parallelism.pp_size"),
        ("enable_expert_parallel", True, "write it as rollout.parallelism.ep_size"),
        ("enable_lora", True, 'is set by policy.lora where weight_sync.lora = "adapter"'),
        ("max_lora_rank", 8, "is set by policy.lora"),
        ("speculative_config", {"method": "ngram"}, "this build cannot do speculative decoding yet"),
        ("spec_model", "org/draft", "this build cannot do speculative decoding yet"),
        ("quantization_config", {"a": 1}, "this build cannot do quantisation layer by layer yet"),
        ("data_parallel_rank", 1, "this build cannot do data parallelism over several machines yet"),
        ("decode_context_parallel_size", 2, "this build cannot do context parallelism of a rollout replica yet"),
        ("enable_eplb", True, "this build cannot do experts that move between ranks yet"),
        ("hf_overrides", {"a": 1}, "write it as policy.override_config"),
        ("nnodes", 2, "this build cannot do a rollout replica on several machines yet"),
        ("attention_backend", "FLASHINFER", "write rollout.vllm_use_flashinfer = true"),
        ("logits_processors", ["a:b"], "changes the distribution sampled from"),
        ("watermark", "key", "changes the distribution sampled from"),
        ("logprobs_mode", "raw_logprobs", "is set by the rollout worker"),
    ],
)
def test_engine_kwargs_are_not_a_detour(name: str, value: Any, says: str) -> None:
    problem = only(rollout__backend="vllm", rollout__engine_kwargs={name: value})
    assert problem.key == f"rollout.engine_kwargs.{name}"
    assert says in f"{problem.message}; {problem.hint}"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"enable_prefix_caching": False},
        {"attention_backend": "FLASH_ATTN"},
        {"enable_lora": False, "speculative_config": None, "decode_context_parallel_size": 1},
    ],
)
def test_engine_kwargs_that_ask_for_nothing_of_the_kind_pass(kwargs: dict[str, Any]) -> None:
    assert problems(rollout__backend="vllm", rollout__engine_kwargs=kwargs) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallelism__tp_size", 2),
        ("parallelism__pp_size", 2),
        ("parallelism__dp_shard_size", 2),
        ("enforce_eager", False),
        ("gpu_memory_utilization", 0.5),
        ("enable_chunked_prefill", True),
        ("max_num_batched_tokens", 4096),
        ("block_size", 16),
        ("engine_kwargs", {"enable_prefix_caching": False}),
        ("sampling_config__extra", {"skip_special_tokens": False}),
    ],
)
def test_the_transformers_engine_refuses_what_it_lacks(key: str, value: Any) -> None:
    problem = only(**{f"rollout__{key}": value})
    assert problem.key.startswith("rollout." + key.replace("__", "."))
    assert problems(rollout__backend="vllm", **{f"rollout__{key}": value}) == []


Q, VLLM = "rollout.quantization", {"rollout.backend": "vllm"}
HALF = VLLM | {"rollout.dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({Q: "fp8"}, ("the transformers engine does not quantise",)),
        ({Q: "gptq"} | HALF, ("calibrated", "full precision")),
        ({Q: "int3"} | HALF, ("vLLM does not quantise published weights so",)),
        ({Q: "fp8", "rollout.dtype": "float32"} | VLLM, ("compute in 16 bits", "float32")),
        ({Q: "fp8", "policy.lora.r": 4, "weight_sync.lora": "adapter"} | HALF, ('weight_sync.lora = "adapter"',)),
    ],
)
def test_what_an_engine_quantises(values: dict[str, Any], words: tuple[str, ...]) -> None:
    check_case(Case(engine_can_quantise, values, Q, words), GRPO)


def test_each_quantisation_of_an_engine_passes() -> None:
    for name in BACKENDS["vllm"].quantisations:
        assert [*engine_can_quantise(config_of(GRPO, {Q: name} | HALF))] == []


REPLAY, GPUS = f"{P}.routing_replay", {"placement.gpus_per_node": 0}
IDS = {REPLAY: "ids"}


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({REPLAY: "weights"} | VLLM, REPLAY, ("vLLM returns the ids", "without their weights")),
        (IDS | VLLM | {"rollout.parallelism.pp_size": 2}, "rollout.parallelism.pp_size", ("one stage", '"ids"')),
        (IDS | {"train.compile": True}, "train.compile", (f'{REPLAY} = "ids"',)),
    ],
)
def test_what_cannot_be_replayed(values: dict[str, Any], key: str, words: tuple[str, ...]) -> None:
    check_case(Case(routing_can_be_replayed, values, key, words), GRPO)


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"placement.share": "time"}, "placement.share", ('"time"', "cuMem", "vLLM")),
        (IDS, REPLAY, ('"ids": vLLM returns the chosen experts on GPUs alone',)),
    ],
)
def test_what_an_engine_does_on_gpus_alone(values: dict[str, Any], key: str, words: tuple[str, ...]) -> None:
    check_case(Case(engine_has_gpus, values | VLLM | GPUS, key, words), GRPO)
    for other in (VLLM, VLLM | {"placement.gpus_per_node": 2}, GPUS):
        assert [*engine_has_gpus(config_of(GRPO, values | other))] == []


@pytest.mark.parametrize("values", [IDS, IDS | VLLM, {REPLAY: "weights"}, {"train.compile": True} | VLLM])
def test_what_can_be_replayed(values: dict[str, Any]) -> None:
    assert [*routing_can_be_replayed(config_of(GRPO, values))] == []


def test_the_default_size_of_an_engine_is_refused_by_name() -> None:
    data = changed(GRPO)
    del data["rollout"]["parallelism"]
    (problem,) = check_rules(Config.model_validate(data))
    assert problem.key == "rollout.parallelism.tp_size"
    assert "default of 2" in problem.message
    assert problem.hint == "write rollout.parallelism.tp_size = 1"


LONG = {"validation.max_response_length": 5000, "validation.dataset.name": "synthetic:addition"}
BUFFER, PIECE = f"{P}.overlong_reward.buffer_length", f"{P}.max_token_len_per_mini_batch"
PENALTY = {f"{P}.overlong_reward.enable_overlong_penalty": True}
WAIT, LONGEST_WAIT = "launcher.restart_backoff", "launcher.restart_backoff_max"
ROOM, RESPONSE = "rollout.max_model_len", "rollout.max_response_length"
NEIGHBOURS = [
    (GRPO, {"rollout.max_concurrent_samples": 8}, {"rollout.max_concurrent_samples": 16}),
    (GRPO, {BUFFER: 4096} | PENALTY, {BUFFER: 2048} | PENALTY),
    (GRPO, {BUFFER: 4096} | PENALTY, {BUFFER: 4096}),
    (GRPO, {BUFFER: 1024, RESPONSE: 5119} | PENALTY, {BUFFER: 1025, RESPONSE: 5119} | PENALTY),
    (GRPO, {PIECE: 4095}, {PIECE: 4096}),
    (SFT, {PIECE: 4095}, {PIECE: 4096, "train.train_batch_per_replica": 7}),
    (GRPO, {LONGEST_WAIT: 60.0, WAIT: 61.0}, {LONGEST_WAIT: 60.0, WAIT: 60.0}),
]
"""Values that make one fault, the blamed key first, and values next to them that make none."""


@pytest.mark.parametrize(
    ("base", "faulty", "sound"), NEIGHBOURS, ids=[next(iter(faulty)) for _, faulty, _ in NEIGHBOURS]
)
def test_a_fault_is_the_only_one_and_has_a_sound_neighbour(
    base: dict[str, Any], faulty: dict[str, Any], sound: dict[str, Any]
) -> None:
    (problem,) = check_rules(config_of(base, faulty))
    assert problem.key == next(iter(faulty))
    assert check_rules(config_of(base, sound)) == []


ROOMS = [
    (RESPONSE, {RESPONSE: 4096}, {RESPONSE: 4095}),
    (RESPONSE, {RESPONSE: 2048, ROOM: 2048}, {RESPONSE: 2048, ROOM: 2049}),
    ("validation.max_response_length", LONG | {"validation.enable": True}, LONG | {"validation.enable": False}),
]
"""Answers as long as a sequence, and shorter ones."""


@pytest.mark.parametrize(("key", "whole", "shorter"), ROOMS, ids=range(len(ROOMS)))
def test_an_answer_as_long_as_a_sequence_is_a_warning(
    key: str, whole: dict[str, Any], shorter: dict[str, Any]
) -> None:
    found = {warning.key for warning in check_warnings(config_of(GRPO, whole))}
    assert found - {warning.key for warning in check_warnings(config_of(GRPO, shorter))} == {key}
    assert check_rules(config_of(GRPO, whole)) == []


def test_warnings() -> None:
    config = Config.model_validate(changed(GRPO, train__master_dtype="bfloat16"))
    assert [problem.key for problem in check_warnings(config)] == [
        "train.master_dtype",
        "train.ckpt.enable_checkpoint",
    ]
    sound = changed(GRPO, train__ckpt__enable_checkpoint=True, train__ckpt__save_mode="sync")
    assert check_warnings(check_config(sound)) == []


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("redis__url", "localhost:6379", "does not have the form"),
        ("redis__key_prefix", "a:b", "does not have the form"),
        ("controller__port", 65536, "at most 65535"),
        ("controller__oversample", 0.9, "at least 1.0"),
        ("train__train_policy__epsilon_low", 1.0, "less than 1.0"),
        ("train__train_policy__lower_bound_ratio", 1.0, "more than 1.0"),
        ("train__train_policy__allowed_outdated_steps", -1, "at least 0"),
        ("rollout__parallelism__n_init_replicas", 0, "at least 1"),
        ("rollout__sampling_config__top_p", 0.0, "more than 0.0"),
        ("rollout__engine_kwargs", {"a": [{"b": float("nan")}]}, "NaN and infinity"),
    ],
)
def test_bounds_of_single_keys(key: str, value: Any, fault: str) -> None:
    (problem,) = refused(check_config, changed(GRPO, **{key: value}))
    assert problem.key == key.replace("__", ".")
    assert fault in problem.message


def test_redis_addresses() -> None:
    for url in ("redis://host:6379/0", "rediss://host", "unix:///run/redis.sock", ""):
        assert check_config(changed(GRPO, redis__url=url)).redis.url == url
