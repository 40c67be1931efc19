"""From configuration to vLLM's arguments: pure functions, no vLLM imported, every key visible in the result.

`engine_arguments` gives the keyword arguments of `AsyncEngineArgs`, `sampling_arguments` those of
`SamplingParams`. What the user passes through (`rollout.engine_kwargs`, `rollout.sampling_config.extra`) is
checked against the names that the installed vLLM knows; the caller hands those in as `known`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rollout_worker.engines.base import EngineConfigError, SamplingSettings
from schema.config import Config
from schema.config.rules.engine import why_not_passed
from schema.config.sections.policy import LoraConfig

TRANSFER_BACKEND = "cosmos_store"
"""The name under which our weight-transfer engine is registered with vLLM."""
WORKER_EXTENSION = "rollout_worker.engines.vllm.transfer.WorkerExtension"
WHOLE = -1
"""The number of log-probs that asks for those of the whole vocabulary."""
LATENT_ON_CPU: dict[str, Any] = {
    # The kernel for AMX packs what it computes with, in 16 bits.
    "attention_config": {"backend": "CPU_MLA"},
    # vLLM's rotary kernel for CPUs (0.32) rotates a part of each head wrongly.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}
"""Arguments for models with latent attention, without an accelerator."""
IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

SLOT_ID = 1
"""vLLM's number of the adapter that is published alone."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM has kernels for."""
MOST_HELD_BACK = 128
"""Tokens that vLLM's second model runner can hold back until `min_tokens`; more would end its process."""
COLDEST = 0.01
"""Below this temperature vLLM samples at this temperature instead."""

_OWN: dict[str, Any] = {
    # The model's generation_config.json would add its own sampling defaults and stop tokens.
    "generation_config": "vllm",
    "weight_transfer_config": {"backend": TRANSFER_BACKEND},
    "worker_extension_cls": WORKER_EXTENSION,
    "disable_log_stats": True,
}

_SAMPLING_KEYS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "seed", "ignore_eos", "stop", "stop_token_ids", "min_tokens",
        "include_stop_str_in_output",
    }
)  # fmt: skip
_SAMPLING_OWN = frozenset(
    {
        "n", "max_tokens", "logprobs", "flat_logprobs", "detokenize", "output_kind", "prompt_logprobs",
        "routed_experts_prompt_start", "skip_clone", "skip_special_tokens", "stream_interval",
    }
)  # fmt: skip


def engine_arguments(
    config: Config, *, known: Collection[str], on_cpu: bool, tokenizer: Path | None = None
) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs` for this job.

    Args:
        config: the job's configuration.
        known: names of all arguments of the installed vLLM.
        on_cpu: whether vLLM will run without an accelerator.
        tokenizer: a directory that has the rollout worker's; None: vLLM finds the policy's by its name, as where
            `rollout.engine_kwargs` names a mode of its own.

    Raises:
        EngineConfigError: a passed-through argument is unknown or not free, or a combination cannot work.
    """
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model": config.policy.model_name_or_path,
        "trust_remote_code": config.policy.trust_remote_code,
        "dtype": config.engine_dtype,
        "seed": config.engine_seed,
        "load_format": rollout.load_format,
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_model_len": config.engine_max_len,
        "tensor_parallel_size": rollout.parallelism.tp_size,
        "pipeline_parallel_size": rollout.parallelism.pp_size,
        "data_parallel_size": max(1, rollout.parallelism.dp_shard_size),
        "enable_expert_parallel": rollout.parallelism.ep_size > 1,
    }
    name = config.policy.tokenizer_name_or_path
    optional = {
        "revision": config.policy.model_revision,
        "tokenizer": name,
        # vLLM would ask the tokenizer's repository for the model's revision.
        "tokenizer_revision": "main" if name and config.policy.model_revision else None,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "block_size": rollout.block_size,
        "quantization": None
        if rollout.quantization == "none"
        else rollout.engine.quantisations.get(rollout.quantization, rollout.quantization),
        "hf_overrides": config.policy.override_config or None,
        "attention_config": {"backend": "FLASHINFER"} if rollout.vllm_use_flashinfer else None,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    if adapter := published_adapter(config):
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _max_rank(adapter)}
    if config.shares_time:
        arguments["enable_sleep_mode"] = True
    if config.replays_routing:
        arguments["enable_return_routed_experts"] = True
    if on_cpu:
        arguments |= _cpu_arguments(config)
    arguments |= _passed_through(rollout.engine_kwargs, known)
    if tokenizer is not None and "tokenizer_mode" not in arguments:
        arguments |= {"tokenizer": str(tokenizer), "tokenizer_mode": "hf", "tokenizer_revision": None}
    return arguments | _logprobs_arguments(config) | _OWN


def published_adapter(config: Config) -> LoraConfig | None:
    """The adapter that is published alone, if one is."""
    alone = config.weight_sync.lora == "adapter" and not config.is_evaluation
    return config.policy.lora if alone else None


def adapter_settings(adapter: LoraConfig) -> str:
    """Fields of peft's configuration that vLLM reads, as JSON."""
    return json.dumps(
        {
            "r": adapter.r,
            "lora_alpha": adapter.lora_alpha,
            "target_modules": adapter.target_modules or [],
            "use_rslora": adapter.use_rslora,
            "rank_pattern": adapter.r_pattern or {},
            "alpha_pattern": adapter.alpha_pattern or {},
        }
    )


def _max_rank(adapter: LoraConfig) -> int:
    wanted = max([adapter.r, *(adapter.r_pattern or {}).values()])
    fits = [rank for rank in RANKS if rank >= wanted]
    if not fits:
        raise EngineConfigError(
            f'policy.lora.r = {wanted} is more than vLLM takes, {RANKS[-1]}: write weight_sync.lora = "merged"'
        )
    return fits[0]


def has_raw_logprobs(config: Config) -> bool:
    """Whether the engine's log-probs are those of softmax(logits), of each of its requests."""
    sampling = config.rollout.sampling_config
    return sampling.reshapes and sampling.sampling_correction == "raw"


def check_logprobs(name: str, settings: SamplingSettings, *, raw: bool) -> None:
    """Raises `ValueError` where a request asks for other log-probs than the engine's. raw: of softmax(logits)."""
    is_raw = settings.correction == "raw" or not settings.reshapes
    at_one = settings.greedy or settings.temperature == 1.0
    gets = (is_raw and at_one) if raw else (settings.correction != "raw" or not settings.reshapes)
    if gets or settings.correction == "unread":
        return
    has = "of the softmax of the logits at temperature 1" if raw else "of the distribution sampled from"
    raise ValueError(
        f'request {name} asks for log-probs with correction = "{settings.correction}" at temperature '
        f"{settings.temperature}, and this engine has those {has} alone"
    )


def check_routing(config: Config, second_runner: bool | None) -> None:
    """Raises `EngineConfigError` where chosen experts are wanted of a model runner that does not return them.

    second_runner: what VLLM_USE_V2_MODEL_RUNNER says; None: it is not set.
    """
    if config.replays_routing and second_runner is False:
        raise EngineConfigError(
            f'train.train_policy.routing_replay = "{config.grpo.routing_replay}" needs model runner V2 of vLLM, and '
            "VLLM_USE_V2_MODEL_RUNNER=0 turns it off: take that out of the environment, or write "
            'train.train_policy.routing_replay = "none"'
        )


def check_held_back(tokens: int, min_tokens: int, runner: str) -> None:
    """Raises `ValueError` where more tokens would be held back until `min_tokens` than this model runner can.

    tokens: how many may end a sample.
    """
    if runner == "V2" and min_tokens > 0 and tokens > MOST_HELD_BACK:
        raise ValueError(
            f"min_tokens = {min_tokens} holds back {tokens} stop tokens, those that end a text included, and vLLM's "
            f"model runner V2 holds back {MOST_HELD_BACK} at most: name fewer in "
            "rollout.sampling_config.stop_token_ids, write rollout.sampling_config.min_tokens = 0, or start with "
            "VLLM_USE_V2_MODEL_RUNNER=0 in the environment"
        )


def _logprobs_arguments(config: Config) -> dict[str, Any]:
    sampling = config.rollout.sampling_config
    if has_raw_logprobs(config):
        return {"logprobs_mode": "raw_logprobs"}
    # The distribution that was sampled from; vLLM's default ignores temperature and filters.
    arguments: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
    if sampling.filters:
        arguments["max_logprobs"] = asked_of(sampling.top_k)
    return arguments


def asked_of(top_k: int) -> int:
    """How many log-probs show the kept set of a token: ids that tie with the k-th are kept, too.

    In bfloat16 about one in 20 does, of k.
    """
    return top_k + top_k // 4 + 16 if top_k > 0 else WHOLE


def _cpu_arguments(config: Config) -> dict[str, Any]:
    rollout = config.rollout
    if rollout.enable_chunked_prefill:
        # vLLM takes back the draw of an unfinished chunk, which torch's CPU generators cannot do.
        raise EngineConfigError(
            "rollout.enable_chunked_prefill = true cannot be combined with seeded samples on a CPU: "
            "write rollout.enable_chunked_prefill = false"
        )
    if rollout.parallelism.tp_size * rollout.parallelism.pp_size > 1:
        return {}
    # One process less, with its import of torch and its messages per step; threads are set by OMP_NUM_THREADS.
    return {"distributed_executor_backend": IN_PROCESS_EXECUTOR}


def _passed_through(extra: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    for name in extra:
        key = f"rollout.engine_kwargs.{name}"
        if refusal := why_not_passed(name, extra[name]):
            raise EngineConfigError(f"{key} {': '.join(refusal)}")
        if name not in known:
            raise EngineConfigError(f"{key}: vLLM has no such engine argument{_suggestion(name, known)}")
    return {name: value for name, value in extra.items() if value is not None}


def check_sampling(config: Config, *, known: Collection[str]) -> None:
    """Refuse, before anything is started, sampling settings that vLLM cannot follow.

    Args:
        config: the job's configuration.
        known: names of all sampling fields of the installed vLLM.

    Raises:
        EngineConfigError: a field of `rollout.sampling_config.extra` that vLLM does not know or that is not
            free, or a temperature that it would replace by another.
    """
    _check_extra(config.rollout.sampling_config.extra, known)
    if config.rollout.sampling_config.do_sample:
        _check_temperature("rollout.sampling_config.temperature", config.sampling_temperature)
    for keys in config.validation.sets.values() if config.validation.enable else ():
        _check_temperature("validation.temperature", keys.temperature)


def _check_temperature(key: str, value: float) -> None:
    if 0.0 < value < COLDEST:
        raise EngineConfigError(
            f"{key} = {value} is below vLLM's smallest, {COLDEST}: write 0.0 for the likeliest token, or "
            f"{COLDEST} or more"
        )


def _check_extra(extra: Mapping[str, Any], known: Collection[str]) -> None:
    for name in extra:
        key = f"rollout.sampling_config.extra.{name}"
        if name in _SAMPLING_OWN:
            raise EngineConfigError(f"{key} is set by the rollout worker: leave it out")
        if name in _SAMPLING_KEYS:
            raise EngineConfigError(f"{key} has a key of its own: write it as rollout.sampling_config.{name}")
        if name not in known or name.startswith("_"):
            free = set(known) - _SAMPLING_OWN
            raise EngineConfigError(f"{key}: vLLM has no such sampling field{_suggestion(name, free)}")


def sampling_arguments(
    settings: SamplingSettings,
    *,
    seed: int,
    eos_token_ids: Collection[int],
    prompt_tokens: int,
    max_model_len: int,
    vocabulary: int,
) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams` for one sample, `settings.extra` included (checked before).

    End-of-text tokens are ordinary stop tokens here, so that what ends a sample is what the worker says and
    not what vLLM finds in the model's files.
    """
    max_tokens = min(settings.max_tokens, max_model_len - prompt_tokens)
    logprobs = min(asked_of(settings.top_k), vocabulary) if settings.wants_kept_sets else 0
    arguments: dict[str, Any] = {
        "n": 1,
        "seed": seed,
        "temperature": 0.0 if settings.greedy else settings.temperature,
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": settings.presence_penalty,
        "frequency_penalty": settings.frequency_penalty,
        "max_tokens": max_tokens,
        "min_tokens": min(settings.min_tokens, max_tokens),
        "ignore_eos": True,
        "stop_token_ids": sorted(settings.ends(eos_token_ids)),
        "stop": list(settings.stop),
        "include_stop_str_in_output": settings.include_stop_str_in_output,
        # Text is made only where a stop string must be found in it: it costs more than the sampling.
        "detokenize": bool(settings.stop),
        "logprobs": logprobs,
        "flat_logprobs": True,
    }
    if not settings.greedy:
        arguments |= {"top_p": settings.top_p, "top_k": settings.top_k, "min_p": settings.min_p}
    return arguments | dict(settings.extra)


def _suggestion(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
