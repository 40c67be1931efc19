"""`actor_infer` of ROLL: sampling and the inference engine; `validation` samples by the same keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from convert.engine import to, values
from convert.engine.keys import words
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed
from convert.engine.values import BadValue
from convert.roll.actor_train import model_name
from convert.roll.converters import LORA_KEYS, count, lost, named_devices, reason, repeats, under, wins
from convert.roll.data import paths
from convert.roll.facts import (
    ENGINES,
    devices,
    engine_size,
    engines,
    group_size,
    has_validation,
    is_agentic,
    overlaps,
    response_length,
    strategy,
)

ROLE = "actor_infer"
_SETTINGS = f"{ROLE}.strategy_args.strategy_config"
_SAMPLING = "rollout.sampling_config"
_MESH = "rollout.parallelism"


# --- sampling -----------------------------------------------------------------------------------------------


@computed(
    "rollout.max_response_length",
    words="agents: one turn; else ROLL takes sequence - prompt instead",
    null="null: response_length",
)
def _new_tokens(context: ConversionContext, leaf: KeyPath) -> Result:
    longest = values.integer(leaf.value)
    whole = response_length(context)
    if is_agentic(context) or whole is None:
        return mapped(("rollout.max_response_length", longest))
    if whole == longest:
        return implicit("the same as response_length")
    return implicit(f"ROLL takes the {whole} tokens of response_length instead")


def _top_k(ours: str) -> Converter:
    """Top-k where -1, 0 and null are off."""

    def read(value: Any) -> int:
        k = -1 if value is None else values.integer(value)
        return k if k > 0 else -1

    return to.converted(ours, read, "0 → -1: off", null="")


_REPEATED_GROUP = repeats(
    group_size, "the same as num_return_sequences_in_group", wins("the size of a group")
)


def _beams(role: str) -> Converter:
    return to.unless((1, None), "no beam search, as here", lost(f"{role}.generating_args.num_beams"))


_GENERATING_ARGS: tuple[Rule, ...] = (
    Rule("max_new_tokens", _new_tokens),
    Rule("max_length", to.always("max_new_tokens bounds the answer")),
    Rule("temperature", to.number(f"{_SAMPLING}.temperature"), default=0.95),
    Rule("top_p", to.number(f"{_SAMPLING}.top_p"), default=0.7),
    Rule("top_k", _top_k(f"{_SAMPLING}.top_k"), default=50),
    Rule("repetition_penalty", to.number(f"{_SAMPLING}.repetition_penalty")),
    Rule("do_sample", to.flag(f"{_SAMPLING}.do_sample")),
    Rule(
        "stop_strings",
        to.converted(f"{_SAMPLING}.stop", values.texts, "strings that end an answer", "null: none"),
    ),
    Rule("include_stop_str_in_output", to.flag("rollout.include_stop_str_in_output")),
    Rule("num_beams", _beams(ROLE)),
    Rule(
        "length_penalty",
        to.unless((1, 1.0, None), "no beam search", lost(f"{ROLE}.generating_args.length_penalty")),
    ),
    Rule("num_return_sequences", _REPEATED_GROUP),
)


# --- engine -------------------------------------------------------------------------------------------------


def _shared(context: ConversionContext) -> list[tuple[str, Any]]:
    return [("placement.share", "time")] if overlaps(context) else []


@computed(
    "placement.rollout",
    f"{_MESH}.n_init_replicas",
    f"{_MESH}.tp_size",
    f"{_MESH}.pp_size",
    "placement.share",
    words="cut into engines of tp · pp · dp devices; devices that actor_train has too are shared in turns",
)
def _devices(context: ConversionContext, leaf: KeyPath) -> Result:
    if named_devices(context, leaf) is None:
        return implicit("null: no devices are named")
    groups = engines(context)
    if groups is None:
        return implicit("null: no devices are named")
    (tp, pp, _), size = engine_size(context), len(groups[0])
    placed: Any = [group[0] for group in groups] if size == 1 else groups
    targets = [
        ("placement.rollout", placed),
        (f"{_MESH}.n_init_replicas", len(groups)),
        (f"{_MESH}.tp_size", tp),
        (f"{_MESH}.pp_size", pp),
        *_shared(context),
    ]
    both = overlaps(context)
    note = f"{count(len(groups), 'engine')} of {count(size, 'device')}"
    if both:
        whole = devices(context, "actor_train") or []
        part = "all" if len(both) == len(whole) else f"{len(both)}"
        note += f"; {part} of actor_train's devices too: in turns"
    return mapped(*targets, note=note)


def _engine_dimension(index: int, ours: str, said: str = "") -> Converter:
    @computed(f"{_MESH}.{ours}", words=said)
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        return mapped((f"{_MESH}.{ours}", engine_size(context)[index]))

    return convert


@computed("rollout.backend", words="`hf_infer` → `transformers`, `sglang` → `vllm`")
def _engine(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value == "sglang":
        context.warn(
            "this build has no SGLang engine: the rollouts run in vLLM, which samples the same distribution"
        )
        return mapped(("rollout.backend", "vllm"), note="vLLM takes the place of SGLang")
    name = values.one_of(leaf.value, ENGINES)
    return mapped(("rollout.backend", "transformers" if name == "hf_infer" else name))


_DTYPE = to.unless(
    (None, "auto"),
    "the type of the published weights",
    to.choice("rollout.dtype", values.DTYPES, "`bf16` → `bfloat16`, …"),
)
_WEIGHTS = {"dummy": "dummy", "auto": "auto", "safetensors": "auto"}


@computed("rollout.engine_kwargs", words="any further engine argument, passed through")
def _engine_argument(context: ConversionContext, leaf: KeyPath) -> Result:
    if strategy(context, ROLE) == "sglang":
        return no_counterpart(reason(leaf.key))
    if strategy(context, ROLE) != "vllm":
        raise BadValue(f"not an argument of {strategy(context, ROLE)} that this converter knows")
    if leaf.value is None or leaf.value == {}:
        return implicit("null: the engine's default")
    return mapped((f"rollout.engine_kwargs.{leaf.rest}", leaf.value))


_RECORDED = to.always("follows from train.train_policy.routing_replay")
_NO_GRAPHS = to.flag("rollout.enforce_eager", "CUDA graphs or not", null="")


def _only(name: str, converter: Converter) -> Converter:
    """A key of one engine; for another it is unknown."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if strategy(context, ROLE) != name:
            raise BadValue(f"an argument of {name}, and the strategy is {strategy(context, ROLE)}")
        return converter.run(context, leaf)

    return replace(converter, run=run)


@computed("rollout.parallelism.ep_size", words="true → over the ranks of one engine")
def _experts(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("experts are split like every other layer")
    tp, _, dp = engine_size(context)
    return mapped((f"{_MESH}.ep_size", tp * dp))


def _without_engine(context: ConversionContext) -> str:
    return "hf_infer has no such option" if strategy(context, ROLE) == "hf_infer" else ""


_ENGINE_RULES: tuple[Rule, ...] = (
    Rule("tensor_parallel_size", _engine_dimension(0, "tp_size"), also=("tp_size",)),
    Rule("pipeline_parallel_size", _engine_dimension(1, "pp_size")),
    Rule("data_parallel_size", _only("vllm", to.integer(f"{_MESH}.dp_shard_size"))),
    Rule("gpu_memory_utilization", to.number("rollout.gpu_memory_utilization")),
    Rule(
        "mem_fraction_static",
        _only("sglang", to.number("rollout.gpu_memory_utilization")),
        words="the engine's share of the GPU",
    ),
    Rule("block_size", to.integer("rollout.block_size")),
    Rule("max_model_len", to.integer("rollout.max_model_len")),
    Rule("context_length", _only("sglang", to.integer("rollout.max_model_len"))),
    Rule("load_format", to.choice("rollout.load_format", _WEIGHTS)),
    Rule("max_num_seqs", to.integer("rollout.max_num_seqs")),
    Rule("max_running_requests", _only("sglang", to.integer("rollout.max_num_seqs"))),
    Rule("max_num_batched_tokens", to.integer("rollout.max_num_batched_tokens")),
    Rule("chunked_prefill_size", _only("sglang", to.integer("rollout.max_num_batched_tokens"))),
    Rule("enforce_eager", _NO_GRAPHS),
    Rule("disable_cuda_graph", _only("sglang", _NO_GRAPHS)),
    Rule(
        "enable_chunked_prefill",
        to.flag("rollout.enable_chunked_prefill"),
        default=True,
        when=_without_engine,
    ),
    Rule("dtype", _DTYPE),
    Rule("quantization", to.text("rollout.quantization", "as it is", "not quantised")),
    Rule("sleep_level", to.always("an engine that shares its GPU sleeps by placement.share")),
    Rule("enable_expert_parallel", _only("vllm", _experts)),
    Rule("enable_return_routed_experts", _RECORDED),
    Rule("seed", to.integer("rollout.seed")),
    Rule("trust_remote_code", to.flag("policy.trust_remote_code")),
    Rule("tokenizer", to.path("policy.tokenizer_name_or_path")),
    Rule("revision", to.text("policy.model_revision")),
    Rule("model", to.always("the engine serves the policy's model")),
    Rule("*", _engine_argument),
)

_MODEL_ARGS: tuple[Rule, ...] = (
    Rule("model_name_or_path", model_name),
    Rule("dtype", _DTYPE),
    Rule("disable_gradient_checkpointing", to.always("inference keeps no activations")),
    Rule("attn_implementation", to.always("the engine chooses its attention"), also=("flash_attn",)),
    Rule("model_type", to.always("a language model")),
    Rule("device_map", to.always("the engine places the model")),
    Rule("ulysses_size", to.always("applies to training only")),
    *(Rule(key, to.always("adapters are those of actor_train")) for key in LORA_KEYS),
    Rule("freeze_module_prefix", to.always("inference trains nothing")),
)

_TEMPLATE = repeats(
    lambda context: context.get("actor_train.data_args.template", None),
    "the same as actor_train's",
    wins("actor_train's template"),
)

ACTOR_INFER_RULES: tuple[Rule, ...] = (
    *under(f"{ROLE}.model_args", _MODEL_ARGS),
    *under(f"{ROLE}.generating_args", _GENERATING_ARGS),
    Rule(f"{ROLE}.data_args.template", _TEMPLATE),
    Rule(f"{ROLE}.strategy_args.strategy_name", _engine, default="vllm"),
    *under(_SETTINGS, _ENGINE_RULES),
    Rule(f"{ROLE}.num_gpus_per_worker", _engine_dimension(0, "tp_size", "devices of one engine: tp · pp")),
    Rule(f"{ROLE}.device_mapping", _devices),
    Rule(f"{ROLE}.infer_batch_size", to.always("requests go to the engine one by one and are batched there")),
    Rule(f"{ROLE}.router_replay.mode", _RECORDED),
    Rule(f"{ROLE}.world_size", to.always("follows from device_mapping")),
    Rule(f"{ROLE}.worker_cls", to.unless((None,), "ROLL's own", lost(f"{ROLE}.worker_cls"))),
    Rule(f"{ROLE}.model_update_frequency", to.integer("train.sync_weight_interval")),
)


# --- validation ---------------------------------------------------------------------------------------------


def _no_validation(context: ConversionContext) -> str:
    return "" if has_validation(context) else "no data to validate on is named, or eval_steps is 0"


@computed("validation.max_response_length", words="where val_sequence_length is silent")
def _validation_tokens(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.integer("val_sequence_length") is not None:
        return implicit("val_sequence_length - val_prompt_length is taken")
    return implicit("ROLL takes the length of training instead")


def _not_sampled(context: ConversionContext) -> str:
    greedy = "val_greedy is taken instead" if context.flag("val_greedy") else ""
    return _no_validation(context) or greedy


_VALIDATION_ARGS: tuple[Rule, ...] = (
    Rule("max_new_tokens", _validation_tokens, when=_no_validation),
    Rule("max_length", to.always("max_new_tokens bounds the answer")),
    Rule("temperature", to.number("validation.temperature"), default=0.95, when=_not_sampled),
    Rule("top_p", to.number("validation.top_p"), default=0.7, when=_no_validation),
    Rule("top_k", _top_k("validation.top_k"), default=50, when=_not_sampled),
    Rule("repetition_penalty", to.number("validation.repetition_penalty"), when=_no_validation),
    Rule("num_return_sequences", to.integer("validation.n_generation"), when=_no_validation),
    Rule("num_beams", _beams("validation")),
    Rule("do_sample", to.always("temperature decides")),
)
VALIDATION_FILE = Rule(
    "validation.data_args.file_name",
    to.converted("validation.dataset.files", paths, "read one after the other", "null: none"),
)
VALIDATION_RULES: tuple[Rule, ...] = (
    VALIDATION_FILE,
    Rule("validation.data_args.template", _TEMPLATE),
    *(
        Rule(f"validation.data_args.{key}", to.always("rows are read by actor_train's columns"))
        for key in words("prompt messages response tag dataset_dir dataset_type preprocessing_num_workers")
    ),
    *under("validation.generating_args", _VALIDATION_ARGS),
)
