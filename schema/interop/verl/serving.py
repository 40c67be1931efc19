"""verl's `rollout.engine_kwargs`, `rollout.agent` and `rollout.multi_turn`."""

from __future__ import annotations

from schema.interop.engine.rules import (
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    always,
    as_flag,
    computed,
    flag,
    implicit,
    integer,
    mapped,
    no_counterpart,
    unless,
)
from schema.interop.engine.unsupported import reason_for
from schema.interop.verl.facts import ROLLOUT, is_hf, lacking, without_counterpart

_OWN_KEYS = {
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "max_model_len": "rollout.max_model_len",
    "block_size": "rollout.block_size",
    "dtype": "rollout.dtype",
    "quantization": "rollout.quantization",
    "seed": "rollout.seed",
    "tensor_parallel_size": "rollout.parallelism.tp_size",
    "data_parallel_size": "rollout.parallelism.dp_shard_size",
    "pipeline_parallel_size": "rollout.parallelism.pp_size",
}


# --- engine_kwargs ------------------------------------------------------------------------------------------


@computed(
    "rollout.engine_kwargs",
    words="each name as it is; a name that has a key of its own goes there; null: left out",
)
def _vllm(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == {}:
        return implicit("null: the engine's default")
    if is_hf(context):
        return implicit("HF rollouts have no such option")
    name = leaf.rest or leaf.key.rpartition(".")[2]
    if name in _OWN_KEYS:
        return mapped((_OWN_KEYS[name], leaf.value), note="has a key of its own")
    if name == "disable_mm_preprocessor_cache":
        if not as_flag(leaf.value):
            return implicit("false: the cache is on by default")
        return mapped(("rollout.engine_kwargs.mm_processor_cache_gb", 0), note="vLLM calls it so now")
    reason = reason_for(context.system, f"{ROLLOUT}.engine_kwargs.vllm.{name}")
    if reason is not None:
        return no_counterpart(reason)
    return mapped((f"rollout.engine_kwargs.{name}", leaf.value))


@computed(
    "rollout.vllm_use_flashinfer", words="`flashinfer` → true; other arguments of SGLang have no counterpart"
)
def _sglang(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == {}:
        return implicit("null: the engine's default")
    if context.text(f"{ROLLOUT}.name", "vllm") != "sglang":
        return implicit("no effect: rollouts are not made by SGLang")
    if leaf.rest == "attention_backend" and leaf.value == "flashinfer":
        return mapped(("rollout.vllm_use_flashinfer", True))
    return without_counterpart(context.system, leaf.key)


def engine_kwargs_rules() -> tuple[Rule, ...]:
    """All rows of `engine_kwargs`."""
    prefix = f"{ROLLOUT}.engine_kwargs"
    return (
        Rule(f"{prefix}.vllm.*", _vllm),
        Rule(f"{prefix}.sglang.*", _sglang),
        Rule(f"{prefix}.trtllm.*", _sglang),
        Rule(f"{prefix}.*", _vllm),
    )


# --- agents and several turns -------------------------------------------------------------------------------


def _server(context: ConversionContext, leaf: KeyPath) -> Result:
    prefix = f"{ROLLOUT}.agent.custom_async_server"
    file, name = context.get(f"{prefix}.path", None), context.get(f"{prefix}.name", None)
    if not isinstance(file, str) or not isinstance(name, str):
        return implicit("null: none") if leaf.value is None else implicit("no effect without the other one")
    return mapped(("rollout.custom_server", f"{file}:{name}"), note="path:name")


def _single_turn(context: ConversionContext) -> str:
    on = context.flag(f"{ROLLOUT}.multi_turn.enable")
    return "" if on else "no effect while multi_turn.enable = false"


def agent_rules() -> tuple[Rule, ...]:
    """All rows of `agent` and `multi_turn`."""
    agent, turns = f"{ROLLOUT}.agent", f"{ROLLOUT}.multi_turn"
    server = Converter(_server, ("rollout.custom_server",), "`path:name`")
    multi = "rollout.multi_turn_config"
    tools = Converter(
        lambda context, leaf: (
            mapped((f"{multi}.enable_tools", True)) if leaf.value else implicit("null: no tools")
        ),
        (f"{multi}.enable_tools",),
        "a file of tools turns them on",
    )
    return (
        Rule(f"{agent}.custom_async_server.path", server),
        Rule(f"{agent}.custom_async_server.name", server),
        Rule(f"{agent}.num_workers", always("requests need no worker processes of their own")),
        Rule(f"{agent}.default_agent_loop", lacking("single_turn_agent")),
        Rule(f"{agent}.agent_loop_config_path", lacking()),
        Rule(f"{agent}.*", lacking()),
        Rule(f"{turns}.enable", unless([False], "false: single turns", flag(f"{multi}.enable"))),
        Rule(
            f"{turns}.max_assistant_turns",
            integer(f"{multi}.max_assistant_turns"),
            also=(f"{turns}.max_turns",),
            when=_single_turn,
        ),
        Rule(f"{turns}.tool_config_path", tools, when=_single_turn),
        Rule(f"{turns}.function_tool_path", tools, when=_single_turn),
        Rule(
            f"{turns}.use_inference_chat_template",
            always("answers are always continued token by token"),
            when=_single_turn,
        ),
        Rule(
            f"{turns}.tokenization_sanity_check_mode",
            always("token ids travel as they are, nothing is tokenised twice"),
            when=_single_turn,
        ),
        Rule(f"{turns}.*", lacking(), when=_single_turn),
    )
