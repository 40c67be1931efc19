"""verl's `actor_rollout_ref.rollout`: the engine and its arguments, sampling in training and validation, agents."""

from __future__ import annotations

from convert.engine import values
from convert.engine.keys import words
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, KeyPath, needs
from convert.engine.values import BadValue, shown
from convert.verl.facts import (
    ROLLOUT,
    async_mode,
    group_size,
    is_hf,
    on_cpu,
    prompt_length,
    recipe,
    rollout_gpus,
    rollout_replicas,
    without_counterpart,
)
from convert.verl.unsupported import VERL

_ENGINE_DTYPES = {**values.DTYPES, "auto": "auto"}


# --- the engine ---------------------------------------------------------------------------------------------


def _name(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name in ("vllm", "hf"):
        return leaf.to("transformers" if name == "hf" else name)
    if name in ("sglang", "trtllm", "sglang_async"):
        context.warn(
            f"{name} becomes vllm: this build has no {name} engine. Samples come from the same distribution, "
            "speed and memory differ, and options of its own are not carried over"
        )
        return leaf.to("vllm", note=f"this build has no {name} engine: vllm takes its place")
    if name == "???":
        return leaf.to("vllm", note="verl leaves it open")
    raise BadValue(f"expected vllm, sglang or hf, got {shown(name)}")


def _load_format(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name.startswith("dummy"):
        return leaf.to("dummy", note="random weights until the first version arrives")
    if name in ("auto", "hf", "dtensor", "megatron", "safetensors"):
        return leaf.to("auto")
    raise BadValue(f"expected auto, hf, dtensor, megatron or dummy_*, got {shown(name)}")


def _max_num_seqs(context: ConversionContext, leaf: KeyPath) -> Result:
    count = values.integer(leaf.value)
    return leaf.to(count, max(count, group_size(context)))


def _hybrid(context: ConversionContext, leaf: KeyPath) -> Result:
    hybrid = context.flag("actor_rollout_ref.hybrid_engine", True)
    mode = async_mode(context)
    if mode == "separate_async":
        return leaf.to("none", note="trainer_mode = separate_async")
    if mode in ("fully_async", "one_step_off"):
        return leaf.to("none", note=f"{mode}: rollouts have GPUs of their own")
    if not hybrid:
        return leaf.to("none", note="trainer and engine have GPUs of their own")
    if on_cpu(context):
        return implicit("without GPUs all processes share the cores")
    if context.flag(f"{ROLLOUT}.free_cache_engine", True):
        return leaf.to("time", note="trainer and engine have the same GPUs, in turns")
    return leaf.to("memory", note="trainer and engine are both resident on the same GPUs")


def _capture_sizes(context: ConversionContext, leaf: KeyPath) -> Result:
    if not isinstance(leaf.value, list):
        raise BadValue(f"expected a list of sizes, got {shown(leaf.value)}")
    return leaf.to([values.integer(size) for size in leaf.value])


# --- sampling -----------------------------------------------------------------------------------------------


def _prompt_again(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None and values.integer(leaf.value) != prompt_length(context):
        context.warn(f"`{leaf.key}` = {shown(leaf.value)} differs from data.max_prompt_length; the latter counts")
    return implicit("repeats data.max_prompt_length")


def _oversample(context: ConversionContext, leaf: KeyPath) -> Result:
    rate = values.number(0 if leaf.value is None else leaf.value)
    return leaf.to(1.0 + rate) if rate > 0 else implicit("0: no more than needed")


# --- sizes --------------------------------------------------------------------------------------------------


def _engine_size_of(context: ConversionContext, leaf: KeyPath) -> Result:
    size = 1 if leaf.value is None else values.integer(leaf.value)
    if is_hf(context):
        return leaf.to(1, rollout_replicas(context), note="HF rollouts run on one GPU each")
    return leaf.to(max(size, 1), rollout_replicas(context))


def _own_gpus(context: ConversionContext, leaf: KeyPath) -> Result:
    if rollout_gpus(context) == (0, 0):
        return implicit("rollouts have the trainer's GPUs")
    if recipe(context) and leaf.key.startswith(ROLLOUT):
        return implicit("the table rollout counts")
    values.integer(leaf.value)
    return leaf.to(rollout_replicas(context))


# --- validation ---------------------------------------------------------------------------------------------


def _val_do_sample(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None and values.flag(leaf.value):
        return implicit("true: validation samples by the other keys of val_kwargs")
    return leaf.to(0.0, note="greedy")


_OWN_KEYS = {
    name: f"rollout.{name}"
    for name in words(
        "gpu_memory_utilization enforce_eager enable_chunked_prefill max_num_seqs max_num_batched_tokens "
        "max_model_len block_size dtype quantization seed"
    )
} | {
    "tensor_parallel_size": "rollout.parallelism.tp_size",
    "data_parallel_size": "rollout.parallelism.dp_shard_size",
    "pipeline_parallel_size": "rollout.parallelism.pp_size",
}


# --- engine_kwargs ------------------------------------------------------------------------------------------


def _vllm(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == {}:
        return implicit("null: the engine's default")
    if is_hf(context):
        return implicit("HF rollouts have no such option")
    name = leaf.rest or leaf.key.rpartition(".")[2]
    if name in _OWN_KEYS:
        return mapped((_OWN_KEYS[name], leaf.value), note="has a key of its own")
    if name == "disable_mm_preprocessor_cache":
        if not values.flag(leaf.value):
            return implicit("false: the cache is on by default")
        return mapped(("rollout.engine_kwargs.mm_processor_cache_gb", 0), note="vLLM calls it so now")
    reason = VERL.reason(f"{ROLLOUT}.engine_kwargs.vllm.{name}")
    if reason is not None:
        return no_counterpart(reason)
    return mapped((f"rollout.engine_kwargs.{name}", leaf.value))


def _sglang(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == {}:
        return implicit("null: the engine's default")
    if context.text(f"{ROLLOUT}.name", "vllm") != "sglang":
        return implicit("no effect: rollouts are not made by SGLang")
    if leaf.rest == "attention_backend" and leaf.value == "flashinfer":
        return leaf.to(True)
    return without_counterpart(leaf.key)


single_turn = needs(f"{ROLLOUT}.multi_turn.enable", "no effect while multi_turn.enable = false")


def _turns_tools(context: ConversionContext, leaf: KeyPath) -> Result:
    if not leaf.value:
        return implicit("null: no tools")
    if context.flag(f"{ROLLOUT}.multi_turn.enable"):
        return leaf.to(True)
    return without_counterpart(leaf.key)
