"""Probes of the rollout replica: engine arguments, sampling, leases, rewards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import numpy as np

from rollout_worker.engines import create_engine
from rollout_worker.engines.base import EngineConfigError, EngineFailed, Generation
from rollout_worker.engines.transformers.settings import settings_of
from rollout_worker.engines.vllm import adapter
from rollout_worker.engines.vllm.adapter import Boot
from rollout_worker.engines.vllm.arguments import engine_arguments, sampling_arguments
from rollout_worker.groups.leasing import Leasing, training_settings, validation_settings
from rollout_worker.groups.local_rows import LocalRows
from rollout_worker.groups.pipeline import GenerationPipeline
from rollout_worker.groups.pushing import Pusher
from rollout_worker.groups.tokens import TextKeeper
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.rewards.pool import RewardResult, Task
from rollout_worker.weights.follower import WeightFollower
from rollout_worker.worker import reward_pool
from schema.config import Config
from schema.wire.messages import LeasedGroup
from schema.wire.sample import decode_sample
from tests.liveness.probe import UNSET, Made, Place, With, changed, grpo, under, vllm, watch
from tests.rollout_worker.test_bookkeeping import lease
from tests.rollout_worker.tiny import tokenizer

KNOWN = {"swap_space", "enable_prefix_caching"}
"""Engine arguments without a key of their own; `test_vllm` asks the installed vLLM."""


# ---- text -----------------------------------------------------------------------------------------------------


def kept_groups(config: Config, place: Place) -> list[str]:
    """Which of the first groups are kept as text by the replica."""
    keeper = TextKeeper(config, tokenizer(), {"train": config.grpo.reward_weights})
    nothing = Generation("", 0, *(np.zeros(0, kind) for kind in (np.int32, np.float32, np.int32, np.int32)), "stop")
    groups = [lease(group_id=f"e0-p{position}") for position in range(8)]
    return [group.group_id for group in groups if keeper.text(group, nothing, "", failed=False)]


class Aborts:
    """An engine that never finishes anything."""

    def abort(self, request_ids: Collection[str]) -> None:
        assert request_ids


def given_up(config: Config, place: Place) -> list[str]:
    """How samples ended that were not generated for a while."""
    held = LeaseTable()
    leasing, pusher = _leasing(config, held), Pusher(None, held, 1 << 20)  # type: ignore[arg-type]
    pipeline = GenerationPipeline(config, Aborts(), tokenizer(), held, leasing, None, pusher)  # type: ignore[arg-type]
    group = held.add(_lease("train"))
    assert group is not None
    held.ask("r", group, [0], time.monotonic())

    async def watched() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await pipeline.end_overdue()

    asyncio.run(watched())
    return [decode_sample(entry.frame).header.ending for entry in pusher._queue]


watch(given_up, grpo, {"rollout.sample_timeout": (UNSET, 0.01)})
watch(kept_groups, grpo, {"logging.sample_groups": (1, 0)})

# ---- engines --------------------------------------------------------------------------------------------------


def vllm_arguments(config: Config, place: Place) -> dict[str, Any]:
    """What vLLM is started with."""
    return engine_arguments(config, known=KNOWN, on_cpu=False)


ENGINE_ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "policy.model_name_or_path": (Made(lambda place: str(place.model)), Made(lambda p: str(p.other_model))),
    "policy.model_max_length": (128, 96),
    "policy.tokenizer_name_or_path": (UNSET, Made(lambda place: str(place.other_model))),
    "policy.trust_remote_code": (False, True),
    "policy.override_config": ({}, {"rms_norm_eps": 1e-3}),
    "rollout.enforce_eager": (True, False),
    "rollout.gpu_memory_utilization": (0.8, 0.5),
    "rollout.enable_chunked_prefill": (False, True),
    "rollout.max_num_seqs": (8, 16),
    "rollout.max_num_batched_tokens": (512, 1024),
    "rollout.max_model_len": (128, 64),
    "rollout.block_size": (16, 32),
    "rollout.dtype": ("auto", "float16"),
    "rollout.load_format": ("auto", "dummy"),
    "rollout.engine_kwargs": ({}, {"enable_prefix_caching": False}),
    "rollout.seed": (1, 2),
    "rollout.parallelism.tp_size": (1, 2),
    "rollout.parallelism.dp_shard_size": (1, 2),
    "rollout.parallelism.pp_size": (1, 2),
    "rollout.vllm_use_flashinfer": (False, True),
    "train.transfer_dtype": ("float32", "bfloat16"),
    "train.seed": (1, 2),
}
watch(vllm_arguments, vllm, ENGINE_ARGUMENTS | {"placement.share": ("memory", "time")})
in_bfloat16 = {
    "rollout.dtype": "bfloat16",
    "rollout.parallelism.tp_size": 2,
    "policy.model_name_or_path": "owner/name",
}
widened = {"rollout.parallelism.ep_size": (1, 2), "train.train_policy.routing_replay": ("none", "ids")}
watch(vllm_arguments, changed(vllm, in_bfloat16), widened | {"rollout.quantization": ("none", "fp8")})


def vllm_environment(config: Config, place: Place) -> str | None:
    """What vLLM's processes are told of the kernels that sample, as they are started."""
    seen = []
    with contextlib.suppress(EngineFailed), patch.object(adapter, "engine_config", lambda *_: _note(seen)):
        Boot(config, tokenizer()).run()
    return seen[0]


def _note(seen: list[str | None]) -> None:
    seen.append(os.environ.get("VLLM_USE_FLASHINFER_SAMPLER"))
    raise EngineFailed("it is enough to know")


filtered = {"rollout.sampling_config.top_p": 0.9, "rollout.sampling_config.sampling_correction": "raw"}
watch(vllm_environment, changed(vllm, filtered), {"rollout.sampling_config.use_flashinfer": (False, True)})
watch(
    vllm_arguments,
    changed(vllm, {"policy.model_name_or_path": "owner/name"}),
    {"policy.model_revision": ("main", "v2")},
)


def embedded_settings(config: Config, place: Place) -> dict[str, Any]:
    """What the engine without vLLM is started with."""
    return {name: str(value) for name, value in asdict(settings_of(config)).items()}


SHARED = ("policy.model_max_length", "policy.trust_remote_code", "policy.override_config", "train.transfer_dtype")
OF_BOTH = (*SHARED, *(f"rollout.{name}" for name in ("max_num_seqs", "max_model_len", "dtype", "load_format")))
watch(embedded_settings, grpo, {key: ENGINE_ARGUMENTS[key] for key in OF_BOTH})
watch(embedded_settings, grpo, {"rollout.max_concurrent_samples": (64, 32)})


def engine_and_capacity(config: Config, place: Place) -> tuple[str, int]:
    """Which engine is made, and how many samples it holds; on a machine without vLLM its refusal."""
    try:
        engine = create_engine(config, tokenizer(), frozenset({256}))
    except EngineConfigError as refusal:
        return str(refusal), 0
    return type(engine).__name__, engine.capacity


watch(engine_and_capacity, vllm, {"rollout.backend": ("vllm", "transformers")})
watch(engine_and_capacity, grpo, {"rollout.max_concurrent_samples": (64, 32)})

# ---- sampling -------------------------------------------------------------------------------------------------


def _sampling(settings: Any, config: Config) -> dict[str, Any]:
    return sampling_arguments(
        settings, seed=1, eos_token_ids={256}, prompt_tokens=4, max_model_len=config.engine_max_len, vocabulary=320
    )


def training_sampling(config: Config, place: Place) -> dict[str, Any]:
    """What vLLM is asked for in training."""
    return _sampling(training_settings(config), config)


def validation_sampling(config: Config, place: Place) -> dict[str, Any]:
    """What vLLM is asked for in validation."""
    return _sampling(validation_settings(config), config)


def sampling_of_a_set(config: Config, place: Place) -> dict[str, Any]:
    """What vLLM is asked for in one of several validation sets."""
    return _sampling(validation_settings(config, label="a"), config)


SAMPLING = "rollout.sampling_config"
STOPS = {"rollout.include_stop_str_in_output": (False, True), f"{SAMPLING}.stop": ([], ["\n"])}
lengths = {"train.train_policy.temperature": (0.9, 0.7), "rollout.max_response_length": (16, 24)}
watch(training_sampling, vllm, STOPS | lengths)
watch(
    training_sampling,
    vllm,
    under(
        SAMPLING,
        temperature=(0.9, 0.7),
        ignore_eos=(False, True),
        stop_token_ids=([], [10]),
        extra=({}, {"skip_reading_prefix_cache": True}),
        top_p=(1.0, 0.9),
        top_k=(-1, 20),
        min_p=(0.0, 0.1),
        repetition_penalty=(1.0, 1.1),
        presence_penalty=(0.0, 0.5),
        frequency_penalty=(0.0, 0.5),
        min_tokens=(0, 3),
    ),
)
filtering = changed(vllm, {f"{SAMPLING}.top_k": 20, "train.train_policy.temperature": 1.0})
watch(training_sampling, filtering, under(SAMPLING, sampling_correction=("exact", "raw")))
watch(training_sampling, vllm, {f"{SAMPLING}.do_sample": (True, False)}, refused=True)
VALIDATION = {"validation.enable": True, "validation.dataset.name": "synthetic:addition"}
validating = changed(vllm, VALIDATION | under("validation", temperature=0.5))
SETS = {"validation.enable": True, "validation.dataset": {"part": [{"name": "synthetic:addition", "source": "a"}]}}
drawn = {"temperature": (UNSET, 0.7), "top_p": (UNSET, 0.8), "top_k": (UNSET, 30), "repetition_penalty": (UNSET, 1.2)}
sets = changed(vllm, SETS | under("validation", temperature=0.5, top_k=-1))
watch(sampling_of_a_set, sets, under("validation.dataset.part", **drawn, max_response_length=(UNSET, 7)))
drawn = under("validation", temperature=(0.5, 0.9), top_p=(0.9, 0.5), top_k=(5, 10), repetition_penalty=(1.0, 1.2))
watch(validation_sampling, validating, drawn | under("validation", max_response_length=(16, 24)) | STOPS)

# ---- leases and samples -----------------------------------------------------------------------------------------


def _leasing(config: Config, held: LeaseTable) -> Leasing:
    engine = create_engine(config, tokenizer(), frozenset({256}))
    weights = WeightFollower(config.weight_sync, None, engine, None, held, Metrics())  # type: ignore[arg-type]
    return Leasing(config, None, engine, held, weights, None, None, Metrics(), LocalRows({}))  # type: ignore[arg-type]


def _lease(kind: str, part: str = "") -> LeasedGroup:
    fields: dict[str, Any] = {
        "group_id": "g", "lease_id": "l", "kind": kind, "part": part, "epoch": 0, "position": 0, "attempt": 1,
        "prompt_token_ids": [5, 6, 7], "row": {}, "seeds": [1, 2, 3, 4], "deadline": 3,
    }  # fmt: skip
    return LeasedGroup.model_validate(fields)


def engine_requests(config: Config, place: Place) -> list[int]:
    """How many samples each engine request of a leased group asks for."""
    held = LeaseTable()
    leasing = _leasing(config, held)
    group = held.add(_lease("train"))
    assert group is not None
    return [len(request.seeds) for request in leasing._requests(group)]


def groups_wanted(config: Config, place: Place) -> list[int]:
    """Groups asked for, by how many samples the replica holds already (as far as the loop counts them)."""
    held = LeaseTable()
    leasing = _leasing(config, held)
    engine = leasing._engine
    wanted = []
    for running in (0, 40, 52, 60):
        engine._expected = {str(number): 1 for number in range(running)}  # type: ignore[attr-defined]
        wanted.append(leasing._wanted())
    return wanted


watch(engine_requests, grpo, {"rollout.n_generation_to_batch": (False, True)})
watch(
    groups_wanted,
    changed(grpo, {"rollout.max_concurrent_samples": 64}),
    {"rollout.batch_size": (1, 4), "rollout.n_generation": (4, 8), "rollout.max_concurrent_samples": (64, 96)},
)


def _pushed(config: Config, kind: str, part: str = "") -> dict[str, Any]:
    """What is sent of a sample of 12 tokens whose functions all answer 0.5."""
    held = LeaseTable()
    leasing, pusher = _leasing(config, held), Pusher(None, held, 1 << 20)  # type: ignore[arg-type]
    generating = GenerationPipeline(config, None, tokenizer(), held, leasing, None, pusher)  # type: ignore[arg-type]
    group = held.add(_lease(kind, part))
    assert group is not None
    tokens = np.arange(40, 52, dtype=np.int32)
    sample = Generation(
        request_id="r", index=0, token_ids=tokens, logprobs=np.full(12, -0.5, np.float32),
        version_starts=np.array([0], np.int32), version_values=np.array([0], np.int32),
        finish_reason="length", stop_reason=None,
    )  # fmt: skip
    scored: Future[RewardResult] = Future()
    scored.set_result(RewardResult(dict.fromkeys(generating._names[group.lease.purpose], 0.5)))
    generating._push(group, 0, sample, "text", scored, began=0.0)  # type: ignore[arg-type]
    found = decode_sample(pusher._queue[0].frame)
    return {**found.header.model_dump(exclude={"seconds"}), "text": found.text}


def pushed_sample(config: Config, place: Place) -> dict[str, Any]:
    """A training sample as it reaches the controller."""
    return _pushed(config, "train")


def pushed_validation(config: Config, place: Place) -> dict[str, Any]:
    """A validation sample as it reaches the controller."""
    return _pushed(config, "validation")


def pushed_of_a_set(config: Config, place: Place) -> dict[str, Any]:
    """A sample of one of several validation sets as it reaches the controller."""
    return _pushed(config, "validation", "a")


OVERLONG = "train.train_policy.overlong_reward"
watch(
    pushed_sample,
    grpo,
    {
        "train.train_policy.rollout_as_token_ids": (False, True),
        "train.train_policy.reward_function": ("boxed_math", {"boxed_math": 0.7, "format": 0.2}),
        f"{OVERLONG}.enable_overlong_penalty": (False, With(True, {f"{OVERLONG}.buffer_length": 8})),
    },
)
watch(
    pushed_sample,
    changed(grpo, {f"{OVERLONG}.enable_overlong_penalty": True, f"{OVERLONG}.buffer_length": 8}),
    {f"{OVERLONG}.buffer_length": (8, 6), f"{OVERLONG}.penalty_factor": (1.0, 0.5)},
)
rewards = {"reward_function": ({}, {"format": 0.3})}
watch(pushed_validation, changed(grpo, VALIDATION), under("validation", **rewards))
watch(pushed_of_a_set, changed(grpo, SETS), under("validation.dataset.part", **rewards))

# ---- rewards ----------------------------------------------------------------------------------------------------

FUNCTIONS = """
import os, time

def paid(completion, row, bonus=0.0):
    return bonus

def slow(completion, row):
    time.sleep(0.4)
    return 1.0

seen = []

def moody(completion, row):
    seen.append(completion)
    return 1.0 / (len(seen) - 1)

def told(completion, row):
    return float("PYTEST_CURRENT_TEST" in os.environ)

def process(completion, row):
    time.sleep(0.02)
    return float(os.getpid())
"""


def _reward(name: str) -> dict[str, Any]:
    return {"train.train_policy.reward_function": Made(lambda place: f"{place.file('own.py', FUNCTIONS)}:{name}")}


def _scored(config: Config, samples: int) -> list[RewardResult]:
    async def score() -> list[RewardResult]:
        pool = reward_pool(config)
        await pool.start()
        try:
            names = tuple(config.grpo.reward_weights)
            return list(await asyncio.gather(*(pool.submit(Task("a", {}, names)) for _ in range(samples))))
        finally:
            await pool.close()

    return asyncio.run(score())


def reward_of_a_sample(config: Config, place: Place) -> tuple[list[float], bool]:
    """The reward of one sample, or whether there is an error instead."""
    (result,) = _scored(config, 1)
    return sorted(result.rewards.values()), result.error is None


def reward_processes(config: Config, place: Place) -> int:
    """How many processes score forty samples."""
    return len({value for result in _scored(config, 40) for value in result.rewards.values()})


watch(reward_of_a_sample, changed(grpo, _reward("paid")), {"custom": ({"bonus": 0.25}, {"bonus": 0.75})})
watch(reward_of_a_sample, changed(grpo, _reward("slow")), {"reward.timeout": (30.0, 0.1)})
watch(reward_of_a_sample, changed(grpo, {**_reward("moody"), "reward.num_workers": 1}), {"reward.retries": (0, 1)})
watch(
    reward_of_a_sample,
    changed(grpo, _reward("told")),
    {"reward.environment": ([], ["PYTEST_CURRENT_TEST"])},  # a variable that is there, and is not passed unasked
)
watch(reward_processes, changed(grpo, _reward("process")), {"reward.num_workers": (1, 2)})
