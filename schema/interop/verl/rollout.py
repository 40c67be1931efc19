"""verl's `actor_rollout_ref.rollout`: the engine, sampling in training and validation, agents."""

from __future__ import annotations

from schema.interop.engine.rules import (
    BadValue,
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    always,
    as_flag,
    as_integer,
    as_number,
    as_text,
    choice,
    computed,
    flag,
    implicit,
    integer,
    mapped,
    number,
    shown,
    text,
    unless,
)
from schema.interop.verl.budget import Budget
from schema.interop.verl.facts import (
    POLICY,
    ROLLOUT,
    async_mode,
    greedy_validation,
    group_size,
    is_hf,
    lacking,
    not_vllm,
    on_cpu,
    prompt_length,
    recipe,
    response_length,
    rollout_gpus,
    rollout_replicas,
    switched,
)
from schema.interop.verl.mesh import DTYPES
from schema.interop.verl.serving import agent_rules, engine_kwargs_rules
from schema.interop.verl.shared import profiler_rules

_SAMPLING = "rollout.sampling_config"
_REPLICAS = "rollout.parallelism.n_init_replicas"


def rollout_rules() -> tuple[Rule, ...]:
    """All rows of the rollout."""
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
    name = as_text(leaf.value)
    if name in ("vllm", "hf"):
        return mapped(("rollout.backend", "transformers" if name == "hf" else name))
    if name in ("sglang", "trtllm", "sglang_async"):
        context.warn(
            f"{name} becomes vllm: this build has no {name} engine. Samples come from the same distribution, "
            "speed and memory differ, and options of its own are not carried over"
        )
        return mapped(
            ("rollout.backend", "vllm"), note=f"there is no {name} engine in this build: vllm takes its place"
        )
    if name == "???":
        return mapped(("rollout.backend", "vllm"), note="verl leaves it open")
    raise BadValue(f"expected vllm, sglang or hf, got {shown(name)}")


@computed(
    "rollout.load_format",
    words="`dummy*` → `dummy`; `auto`, `hf`, `dtensor`, `megatron`, `safetensors` → `auto`",
)
def _load_format(context: ConversionContext, leaf: KeyPath) -> Result:
    name = as_text(leaf.value)
    if name.startswith("dummy"):
        return mapped(("rollout.load_format", "dummy"), note="random weights until the first version arrives")
    if name in ("auto", "hf", "dtensor", "megatron", "safetensors"):
        return mapped(("rollout.load_format", "auto"))
    raise BadValue(f"expected auto, hf, dtensor, megatron or dummy_*, got {shown(name)}")


@computed(
    "rollout.max_num_seqs", "rollout.max_concurrent_samples", words="as it is; samples in flight follow it"
)
def _max_num_seqs(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None:
        return implicit("null: the engine's default")
    count = as_integer(leaf.value)
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
    dtypes = {**DTYPES, "auto": "auto"}
    return (
        Rule("actor_rollout_ref.hybrid_engine", _hybrid, default=True),
        Rule(f"{ROLLOUT}.free_cache_engine", _hybrid),
        Rule(f"{ROLLOUT}.name", _name, default="vllm"),
        Rule(f"{ROLLOUT}.mode", always("generation is always asynchronous")),
        Rule(f"{ROLLOUT}.dtype", choice("rollout.dtype", dtypes), default="bfloat16"),
        Rule(
            f"{ROLLOUT}.gpu_memory_utilization",
            number("rollout.gpu_memory_utilization"),
            default=0.5,
            when=not_vllm,
        ),
        Rule(f"{ROLLOUT}.enforce_eager", flag("rollout.enforce_eager"), when=not_vllm),
        Rule(f"{ROLLOUT}.load_format", _load_format, when=not_vllm),
        Rule(
            f"{ROLLOUT}.max_num_batched_tokens",
            integer("rollout.max_num_batched_tokens"),
            default=8192,
            when=not_vllm,
        ),
        Rule(f"{ROLLOUT}.max_num_seqs", _max_num_seqs, default=1024, when=not_vllm),
        Rule(f"{ROLLOUT}.max_model_len", integer("rollout.max_model_len"), when=not_vllm),
        Rule(
            f"{ROLLOUT}.enable_chunked_prefill",
            flag("rollout.enable_chunked_prefill"),
            default=True,
            when=not_vllm,
        ),
        Rule(
            f"{ROLLOUT}.enable_prefix_caching",
            unless([True], "true: vLLM's default", flag("rollout.engine_kwargs.enable_prefix_caching")),
            when=not_vllm,
        ),
        Rule(
            f"{ROLLOUT}.scheduling_policy",
            unless(["fcfs"], "fcfs: vLLM's default", text("rollout.engine_kwargs.scheduling_policy")),
            when=not_vllm,
        ),
        Rule(
            f"{ROLLOUT}.cudagraph_capture_sizes",
            Converter(_capture_sizes, ("rollout.engine_kwargs.cudagraph_capture_sizes",), "as it is"),
            when=not_vllm,
        ),
        Rule(f"{ROLLOUT}.quantization", text("rollout.quantization"), when=not_vllm),
        Rule(f"{ROLLOUT}.quantization_config_file", lacking(), when=not_vllm),
        Rule(
            f"{ROLLOUT}.seed",
            unless([42], "42: the seed of the job unless another is written", integer("rollout.seed")),
        ),
        Rule(f"{ROLLOUT}.full_determinism", unless([False], "false: off", flag("train.deterministic"))),
    )


def _capture_sizes(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None:
        return implicit("null: the engine's default")
    if not isinstance(leaf.value, list):
        raise BadValue(f"expected a list of sizes, got {shown(leaf.value)}")
    return mapped(
        ("rollout.engine_kwargs.cudagraph_capture_sizes", [as_integer(size) for size in leaf.value])
    )


# --- sampling -----------------------------------------------------------------------------------------------


def _response(context: ConversionContext, leaf: KeyPath) -> Result:
    written = as_integer(leaf.value)
    longest = response_length(context)
    note = "" if longest == written else f"rollout.response_length = {longest} is what verl generates up to"
    total = prompt_length(context) + longest
    return mapped(("rollout.max_response_length", longest), ("policy.model_max_length", total), note=note)


RESPONSE = Converter(
    _response,
    ("rollout.max_response_length", "policy.model_max_length"),
    "model_max_length is prompt + answer",
)


@computed(words="repeats data.max_prompt_length")
def _prompt(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None and as_integer(leaf.value) != prompt_length(context):
        context.warn(
            f"`{leaf.key}` = {shown(leaf.value)} differs from data.max_prompt_length; the latter counts"
        )
    return implicit("repeats data.max_prompt_length")


def _sampling() -> tuple[Rule, ...]:
    return (
        Rule(f"{ROLLOUT}.n", integer("rollout.n_generation"), default=1),
        Rule(f"{ROLLOUT}.temperature", number(f"{_SAMPLING}.temperature"), default=1.0),
        Rule(f"{ROLLOUT}.top_k", integer(f"{_SAMPLING}.top_k"), default=-1),
        Rule(f"{ROLLOUT}.top_p", number(f"{_SAMPLING}.top_p"), default=1.0),
        Rule(f"{ROLLOUT}.min_p", number(f"{_SAMPLING}.min_p")),
        Rule(f"{ROLLOUT}.repetition_penalty", number(f"{_SAMPLING}.repetition_penalty")),
        Rule(f"{ROLLOUT}.do_sample", flag(f"{_SAMPLING}.do_sample"), default=True),
        Rule(f"{ROLLOUT}.ignore_eos", flag(f"{_SAMPLING}.ignore_eos"), default=False),
        Rule(f"{ROLLOUT}.response_length", RESPONSE),
        Rule(f"{ROLLOUT}.prompt_length", _prompt),
        Rule(f"{ROLLOUT}.calculate_log_probs", always("the engine's log-probs always come with the samples")),
        Rule(f"{ROLLOUT}.logprobs_mode", lacking("processed_logprobs")),
        Rule(f"{ROLLOUT}.over_sample_rate", Converter(_oversample, ("controller.oversample",), "plus 1")),
    )


def _oversample(context: ConversionContext, leaf: KeyPath) -> Result:
    rate = as_number(0 if leaf.value is None else leaf.value)
    return mapped(("controller.oversample", 1.0 + rate)) if rate > 0 else implicit("0: no more than needed")


# --- sizes --------------------------------------------------------------------------------------------------


def replicas(context: ConversionContext) -> tuple[str, int]:
    """Our key of the number of engines, and its value."""
    return _REPLICAS, rollout_replicas(context)


def _size(ours: str) -> Converter:
    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        size = 1 if leaf.value is None else as_integer(leaf.value)
        if is_hf(context):
            return mapped(
                (f"rollout.parallelism.{ours}", 1), replicas(context), note="HF rollouts run on one GPU each"
            )
        return mapped((f"rollout.parallelism.{ours}", max(size, 1)), replicas(context))

    return Converter(run, (f"rollout.parallelism.{ours}", _REPLICAS), "engines are GPUs / (tp × dp × pp)")


def _sizes() -> tuple[Rule, ...]:
    return (
        Rule(f"{ROLLOUT}.tensor_model_parallel_size", _size("tp_size"), default=2),
        Rule(f"{ROLLOUT}.data_parallel_size", unless([1], "1: none", _size("dp_shard_size"))),
        Rule(f"{ROLLOUT}.pipeline_model_parallel_size", unless([1], "1: none", _size("pp_size"))),
        Rule(
            f"{ROLLOUT}.expert_parallel_size", unless([1], "1: none", integer("rollout.parallelism.ep_size"))
        ),
        *(
            Rule(
                f"rollout.{name}",
                Converter(_own_gpus, (_REPLICAS,), "GPUs of the asynchronous recipes' rollouts"),
            )
            for name in ("nnodes", "n_gpus_per_node")
        ),
        Rule(f"{ROLLOUT}.nnodes", Converter(_own_gpus, (_REPLICAS,), "0: the trainer's GPUs")),
        Rule(
            f"{ROLLOUT}.n_gpus_per_node", Converter(_own_gpus, (_REPLICAS,), "with rollout.nnodes > 0 only")
        ),
    )


def _own_gpus(context: ConversionContext, leaf: KeyPath) -> Result:
    if rollout_gpus(context) == (0, 0):
        return implicit("rollouts have the trainer's GPUs")
    if recipe(context) and leaf.key.startswith(ROLLOUT):
        return implicit("the table rollout counts")
    as_integer(leaf.value)
    return mapped(replicas(context))


# --- validation ---------------------------------------------------------------------------------------------


@computed("validation.temperature", words="false: temperature 0, greedy")
def _val_do_sample(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is not None and as_flag(leaf.value):
        return implicit("true: validation samples by the keys beside this one")
    return mapped(("validation.temperature", 0.0), note="greedy")


def _validation() -> tuple[Rule, ...]:
    prefix = f"{ROLLOUT}.val_kwargs"
    return (
        Rule(f"{prefix}.do_sample", _val_do_sample, default=False),
        Rule(f"{prefix}.temperature", number("validation.temperature"), default=0.0, when=greedy_validation),
        Rule(f"{prefix}.top_k", integer("validation.top_k"), default=-1, when=greedy_validation),
        Rule(f"{prefix}.top_p", number("validation.top_p"), default=1.0, when=greedy_validation),
        Rule(f"{prefix}.n", integer("validation.n_generation"), default=1),
        Rule(f"{prefix}.repetition_penalty", number("validation.repetition_penalty"), when=greedy_validation),
    )


def _small() -> tuple[Rule, ...]:
    return (
        Rule(f"{ROLLOUT}.disable_log_stats", always("the engine's statistics are metrics")),
        Rule(f"{ROLLOUT}.router_config_path", lacking()),
        Rule(f"{ROLLOUT}.use_fire_sampling", lacking(False)),
        Rule(f"{ROLLOUT}.skip_rollout", lacking(False)),
        Rule(f"{ROLLOUT}.skip_dump_dir", always("no effect while skip_rollout = false")),
        Rule(f"{ROLLOUT}.layered_summon", always("weights travel tensor by tensor")),
        Rule(f"{ROLLOUT}.multi_stage_wake_up", always("changes memory at the switch between roles only")),
        Rule(f"{ROLLOUT}.skip_tokenizer_init", always("engines work on token ids")),
        Rule(f"{ROLLOUT}.moe_load_balance_metrics_interval", lacking(0)),
        Rule(f"{ROLLOUT}.enable_rollout_routing_replay", lacking(False)),
        Rule(f"{ROLLOUT}.update_weights_bucket_megabytes", always("weights travel tensor by tensor")),
        Rule(f"{ROLLOUT}.micro_batch_size", always("HF rollouts take as many samples as are in flight")),
        Rule(f"{ROLLOUT}.checkpoint_engine.*", always("weights travel through weight_sync")),
        Rule(f"{ROLLOUT}.layer_name_map.*", always("weights have the names of the hub's checkpoint")),
        Rule(f"{ROLLOUT}.trace.backend", lacking()),
        Rule(f"{ROLLOUT}.trace.*", always("no effect without trace.backend")),
        switched(f"{ROLLOUT}.prometheus", f"{ROLLOUT}.prometheus.enable"),
        switched(f"{ROLLOUT}.mtp", f"{ROLLOUT}.mtp.enable"),
        Rule(f"{ROLLOUT}.mtp", lacking()),
        switched(f"{ROLLOUT}.qat", f"{ROLLOUT}.qat.enable"),
        Rule(f"{ROLLOUT}.qat", lacking()),
        switched(f"{ROLLOUT}.disaggregation", f"{ROLLOUT}.disaggregation.enabled"),
    )
