"""verl's `actor_rollout_ref.rollout`: the engine and its arguments, sampling in training and validation, agents."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed, needs, rules_below
from convert.engine.values import BadValue, shown
from convert.verl.data import longest_response
from convert.verl.facts import (
    POLICY,
    ROLLOUT,
    async_mode,
    greedy_validation,
    group_size,
    is_hf,
    lacking,
    not_vllm,
    on_cpu,
    path_and_name,
    prompt_length,
    recipe,
    recorded_routing,
    rollout_gpus,
    rollout_replicas,
    switched,
    without_counterpart,
)
from convert.verl.shared import Budget, profiler_rules
from convert.verl.unsupported import MULTI_TURN_OPTIONS, VERL

_SAMPLING = "rollout.sampling_config"
_REPLICAS = "rollout.parallelism.n_init_replicas"
_CAPTURE_SIZES = "rollout.engine_kwargs.cudagraph_capture_sizes"


def rollout_rules() -> tuple[Rule, ...]:
    """All rules of the rollout."""
    budget = Budget(
        per_gpu=f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        ours=(f"{POLICY}.old_log_prob.mini_batch", f"{POLICY}.old_log_prob.max_token_len_per_mini_batch"),
        whole=f"{ROLLOUT}.log_prob_micro_batch_size",
        switch=f"{ROLLOUT}.log_prob_use_dynamic_bsz",
        tokens=f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    )
    return (
        *_engine(),
        *_sampling(),
        *_sizes(),
        *budget.rules(),
        *_validation(),
        *engine_kwargs_rules(),
        *agent_rules(),
        *_small(),
        *profiler_rules(ROLLOUT),
    )


# --- the engine ---------------------------------------------------------------------------------------------


@computed("rollout.backend", words="`hf` → `transformers`; `sglang` and `trtllm` → `vllm`, loudly")
def _name(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name in ("vllm", "hf"):
        return mapped(("rollout.backend", "transformers" if name == "hf" else name))
    if name in ("sglang", "trtllm", "sglang_async"):
        context.warn(
            f"{name} becomes vllm: this build has no {name} engine. Samples come from the same distribution, "
            "speed and memory differ, and options of its own are not carried over"
        )
        note = f"this build has no {name} engine: vllm takes its place"
        return mapped(("rollout.backend", "vllm"), note=note)
    if name == "???":
        return mapped(("rollout.backend", "vllm"), note="verl leaves it open")
    raise BadValue(f"expected vllm, sglang or hf, got {shown(name)}")


@computed(
    "rollout.load_format",
    words="`dummy*` → `dummy`; `auto`, `hf`, `dtensor`, `megatron`, `safetensors` → `auto`",
)
def _load_format(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if name.startswith("dummy"):
        return mapped(("rollout.load_format", "dummy"), note="random weights until the first version arrives")
    if name in ("auto", "hf", "dtensor", "megatron", "safetensors"):
        return mapped(("rollout.load_format", "auto"))
    raise BadValue(f"expected auto, hf, dtensor, megatron or dummy_*, got {shown(name)}")


@computed(
    "rollout.max_num_seqs",
    "rollout.max_concurrent_samples",
    words="as it is; samples in flight follow it",
    null="null: the engine's default",
)
def _max_num_seqs(context: ConversionContext, leaf: KeyPath) -> Result:
    count = values.integer(leaf.value)
    flight = max(count, group_size(context))
    return mapped(("rollout.max_num_seqs", count), ("rollout.max_concurrent_samples", flight))


@computed("placement.share", words="hybrid engine: `time` (or `memory` where the cache stays), else `none`")
def _hybrid(context: ConversionContext, leaf: KeyPath) -> Result:
    hybrid = context.flag("actor_rollout_ref.hybrid_engine", True)
    mode = async_mode(context)
    if mode == "separate_async":
        return mapped(("placement.share", "none"), note="trainer_mode = separate_async")
    if mode in ("fully_async", "one_step_off"):
        return mapped(("placement.share", "none"), note=f"{mode}: rollouts have GPUs of their own")
    if not hybrid:
        return mapped(("placement.share", "none"), note="trainer and engine have GPUs of their own")
    if on_cpu(context):
        return implicit("without GPUs all processes share the cores")
    if context.flag(f"{ROLLOUT}.free_cache_engine", True):
        return mapped(("placement.share", "time"), note="trainer and engine have the same GPUs, in turns")
    return mapped(("placement.share", "memory"), note="trainer and engine are both resident on the same GPUs")


def _engine() -> tuple[Rule, ...]:
    kwargs = "rollout.engine_kwargs"
    dtype = to.choice("rollout.dtype", {**values.DTYPES, "auto": "auto"})
    seed = to.unless([42], "42: the seed of the job unless another is written", to.integer("rollout.seed"))
    table = {
        "gpu_memory_utilization": to.number("rollout.gpu_memory_utilization"),
        "enforce_eager": to.flag("rollout.enforce_eager"),
        "load_format": _load_format,
        "max_num_batched_tokens": to.integer("rollout.max_num_batched_tokens"),
        "max_num_seqs": _max_num_seqs,
        "max_model_len": to.integer("rollout.max_model_len"),
        "enable_chunked_prefill": to.flag("rollout.enable_chunked_prefill"),
        "enable_prefix_caching": to.unless(
            [True], "true: vLLM's default", to.flag(f"{kwargs}.enable_prefix_caching")
        ),
        "scheduling_policy": to.unless(
            ["fcfs"], "fcfs: vLLM's default", to.text(f"{kwargs}.scheduling_policy")
        ),
        "cudagraph_capture_sizes": _capture_sizes,
        "quantization": to.text("rollout.quantization"),
        "quantization_config_file": lacking(),
    }
    defaults = {
        "gpu_memory_utilization": 0.5,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 1024,
        "enable_chunked_prefill": True,
    }
    return (
        Rule("actor_rollout_ref.hybrid_engine", _hybrid, default=True),
        Rule(f"{ROLLOUT}.free_cache_engine", _hybrid),
        Rule(f"{ROLLOUT}.name", _name, default="vllm"),
        Rule(f"{ROLLOUT}.mode", to.always("generation is always asynchronous")),
        Rule(f"{ROLLOUT}.dtype", dtype, default="bfloat16"),
        *rules_below(ROLLOUT, table, not_vllm, defaults),
        Rule(f"{ROLLOUT}.seed", seed),
        Rule(f"{ROLLOUT}.full_determinism", to.unless([False], "false: off", to.flag("train.deterministic"))),
    )


@computed(_CAPTURE_SIZES, words="as it is", null="null: the engine's default")
def _capture_sizes(context: ConversionContext, leaf: KeyPath) -> Result:
    if not isinstance(leaf.value, list):
        raise BadValue(f"expected a list of sizes, got {shown(leaf.value)}")
    return mapped((_CAPTURE_SIZES, [values.integer(size) for size in leaf.value]))


# --- sampling -----------------------------------------------------------------------------------------------


@computed(words="repeats data.max_prompt_length")
def _prompt(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None and values.integer(leaf.value) != prompt_length(context):
        context.warn(
            f"`{leaf.key}` = {shown(leaf.value)} differs from data.max_prompt_length; the latter counts"
        )
    return implicit("repeats data.max_prompt_length")


def _sampling() -> tuple[Rule, ...]:
    return (
        Rule(f"{ROLLOUT}.n", to.integer("rollout.n_generation"), default=1),
        Rule(f"{ROLLOUT}.temperature", to.number(f"{_SAMPLING}.temperature"), default=1.0),
        Rule(f"{ROLLOUT}.top_k", to.integer(f"{_SAMPLING}.top_k"), default=-1),
        Rule(f"{ROLLOUT}.top_p", to.number(f"{_SAMPLING}.top_p"), default=1.0),
        Rule(f"{ROLLOUT}.min_p", to.number(f"{_SAMPLING}.min_p")),
        Rule(f"{ROLLOUT}.repetition_penalty", to.number(f"{_SAMPLING}.repetition_penalty")),
        Rule(f"{ROLLOUT}.do_sample", to.flag(f"{_SAMPLING}.do_sample"), default=True),
        Rule(f"{ROLLOUT}.ignore_eos", to.flag(f"{_SAMPLING}.ignore_eos"), default=False),
        Rule(
            f"{ROLLOUT}.response_length",
            computed(
                "rollout.max_response_length",
                "policy.model_max_length",
                words="model_max_length is prompt + answer",
            )(longest_response),
        ),
        Rule(f"{ROLLOUT}.prompt_length", _prompt),
        Rule(
            f"{ROLLOUT}.calculate_log_probs", to.always("the engine's log-probs always come with the samples")
        ),
        Rule(f"{ROLLOUT}.logprobs_mode", lacking("processed_logprobs")),
        Rule(f"{ROLLOUT}.over_sample_rate", _oversample),
    )


@computed("controller.oversample", words="plus 1")
def _oversample(context: ConversionContext, leaf: KeyPath) -> Result:
    rate = values.number(0 if leaf.value is None else leaf.value)
    return mapped(("controller.oversample", 1.0 + rate)) if rate > 0 else implicit("0: no more than needed")


# --- sizes --------------------------------------------------------------------------------------------------


def replicas(context: ConversionContext) -> tuple[str, int]:
    """Our key of the number of engines, and its value."""
    return _REPLICAS, rollout_replicas(context)


def _size(ours: str) -> Converter:
    key = f"rollout.parallelism.{ours}"

    @computed(key, _REPLICAS, words="engines are GPUs / (tp × dp × pp)")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        size = 1 if leaf.value is None else values.integer(leaf.value)
        if is_hf(context):
            return mapped((key, 1), replicas(context), note="HF rollouts run on one GPU each")
        return mapped((key, max(size, 1)), replicas(context))

    return convert


def _sizes() -> tuple[Rule, ...]:
    recipes = _own_gpus("GPUs of the asynchronous recipes' rollouts")
    table = {
        "tensor_model_parallel_size": _size("tp_size"),
        "data_parallel_size": to.unless([1], "1: none", _size("dp_shard_size")),
        "pipeline_model_parallel_size": to.unless([1], "1: none", _size("pp_size")),
        "expert_parallel_size": to.unless([1], "1: none", to.integer("rollout.parallelism.ep_size")),
    }
    return (
        *rules_below(ROLLOUT, table, defaults={"tensor_model_parallel_size": 2}),
        *rules_below("rollout", {"nnodes n_gpus_per_node": recipes}),
        Rule(f"{ROLLOUT}.nnodes", _own_gpus("0: the trainer's GPUs")),
        Rule(f"{ROLLOUT}.n_gpus_per_node", _own_gpus("with rollout.nnodes > 0 only")),
    )


def _own_gpus(words: str) -> Converter:
    @computed(_REPLICAS, words=words)
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        if rollout_gpus(context) == (0, 0):
            return implicit("rollouts have the trainer's GPUs")
        if recipe(context) and leaf.key.startswith(ROLLOUT):
            return implicit("the table rollout counts")
        values.integer(leaf.value)
        return mapped(replicas(context))

    return convert


# --- validation ---------------------------------------------------------------------------------------------


@computed("validation.temperature", words="false: temperature 0, greedy")
def _val_do_sample(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None and values.flag(leaf.value):
        return implicit("true: validation samples by the other keys of val_kwargs")
    return mapped(("validation.temperature", 0.0), note="greedy")


def _validation() -> tuple[Rule, ...]:
    sampled = {
        "temperature": to.number("validation.temperature"),
        "top_k": to.integer("validation.top_k"),
        "top_p": to.number("validation.top_p"),
    }
    defaults = {"temperature": 0.0, "top_k": -1, "top_p": 1.0}
    prefix, penalty = f"{ROLLOUT}.val_kwargs", to.number("validation.repetition_penalty")
    return (
        Rule(f"{prefix}.do_sample", _val_do_sample, default=False),
        *rules_below(prefix, sampled, greedy_validation, defaults),
        Rule(f"{prefix}.n", to.integer("validation.n_generation"), default=1),
        Rule(f"{prefix}.repetition_penalty", penalty, when=greedy_validation),
    )


def _small() -> tuple[Rule, ...]:
    table = {
        "disable_log_stats": to.always("the engine's statistics are metrics"),
        "router_config_path mtp qat trace.backend": lacking(),
        "use_fire_sampling skip_rollout": lacking(False),
        "enable_rollout_routing_replay": recorded_routing,
        "skip_dump_dir": to.always("no effect while skip_rollout = false"),
        "layered_summon update_weights_bucket_megabytes": to.always("weights travel tensor by tensor"),
        "multi_stage_wake_up": to.always("changes memory at the switch between roles only"),
        "skip_tokenizer_init": to.always("engines work on token ids"),
        "moe_load_balance_metrics_interval": lacking(0),
        "micro_batch_size": to.always("HF rollouts take as many samples as are in flight"),
        "checkpoint_engine.*": to.always("weights travel through weight_sync"),
        "layer_name_map.*": to.always("weights have the names of the hub's checkpoint"),
        "trace.*": to.always("no effect without trace.backend"),
        **{f"{name}.*": switched(f"{ROLLOUT}.{name}.enable") for name in ("prometheus", "mtp", "qat")},
        "disaggregation.*": switched(f"{ROLLOUT}.disaggregation.enabled"),
    }
    return rules_below(ROLLOUT, table)


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
        if not values.flag(leaf.value):
            return implicit("false: the cache is on by default")
        return mapped(("rollout.engine_kwargs.mm_processor_cache_gb", 0), note="vLLM calls it so now")
    reason = VERL.reason(f"{ROLLOUT}.engine_kwargs.vllm.{name}")
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
    return without_counterpart(leaf.key)


def engine_kwargs_rules() -> tuple[Rule, ...]:
    """All rules of `engine_kwargs`."""
    prefix = f"{ROLLOUT}.engine_kwargs"
    return (
        Rule(f"{prefix}.vllm.*", _vllm),
        Rule(f"{prefix}.sglang.*", _sglang),
        Rule(f"{prefix}.trtllm.*", _sglang),
        Rule(f"{prefix}.*", _vllm),
    )


# --- agents and several turns -------------------------------------------------------------------------------


_single_turn = needs(f"{ROLLOUT}.multi_turn.enable", "no effect while multi_turn.enable = false")


def agent_rules() -> tuple[Rule, ...]:
    """All rules of `agent` and `multi_turn`."""
    agent, turns = f"{ROLLOUT}.agent", f"{ROLLOUT}.multi_turn"
    server = path_and_name(f"{agent}.custom_async_server", "rollout.custom_server")
    multi = "rollout.multi_turn_config"

    @computed(f"{multi}.enable_tools", words="a file of tools turns them on; in a single turn: see the list")
    def tools(context: ConversionContext, leaf: KeyPath) -> Result:
        if not leaf.value:
            return implicit("null: no tools")
        if context.flag(f"{turns}.enable"):
            return mapped((f"{multi}.enable_tools", True))
        return without_counterpart(leaf.key)

    loops = {
        "custom_async_server.path custom_async_server.name": server,
        "num_workers": to.always("requests need no worker processes of their own"),
        "default_agent_loop": lacking("single_turn_agent"),
        "agent_loop_config_path agent_loop_manager_class": lacking(),
    }
    table = {
        "max_assistant_turns": to.integer(f"{multi}.max_assistant_turns"),
        "use_inference_chat_template": to.always("answers are always continued token by token"),
        "tokenization_sanity_check_mode": to.always(
            "token ids travel as they are, nothing is tokenised twice"
        ),
        " ".join(MULTI_TURN_OPTIONS): lacking(),
    }
    return (
        *rules_below(agent, loops),
        Rule(f"{ROLLOUT}.chat_scheduler", lacking()),
        Rule(f"{ROLLOUT}.limit_images", to.always("concerns images")),
        Rule(f"{turns}.enable", to.unless([False], "false: single turns", to.flag(f"{multi}.enable"))),
        *rules_below(turns, {"tool_config_path function_tool_path": tools}),
        *rules_below(turns, table, _single_turn, also={"max_assistant_turns": ("max_turns",)}),
    )
