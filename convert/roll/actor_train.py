"""`actor_train` of ROLL: model, optimizer, data and strategy of the policy that learns."""

from __future__ import annotations

from typing import Any

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed, needs
from convert.engine.values import BadValue, shown
from convert.roll.converters import (
    POLICY,
    count,
    dtype,
    is_one_of,
    lost,
    model_dtype,
    named_devices,
    reason,
    recomputation,
    reshard,
    under,
)
from convert.roll.data import DATA_ARGS
from convert.roll.facts import SIZES, TRAINING_STRATEGIES, config_key, mesh, strategy
from convert.roll.training import TRAINING_ARGS
from schema.config.overrides import is_dropout

ROLE = "actor_train"
_SETTINGS = f"{ROLE}.strategy_args.strategy_config"
_MESH = "policy.parallelism"


# --- mesh and batches ---------------------------------------------------------------------------------------


@computed(
    f"{_MESH}.tp_size",
    f"{_MESH}.dp_shard_size",
    f"{_MESH}.dp_replicate_size",
    "placement.policy",
    words="the devices of the one policy replica; what the other sizes leave is sharded",
)
def _devices(context: ConversionContext, leaf: KeyPath) -> Result:
    found = named_devices(context, leaf)
    if found is None:
        return implicit("null: no devices are named")
    targets: list[tuple[str, Any]] = [("placement.policy", found)]
    targets += [(f"{_MESH}.{name}", size) for name, size in mesh(context).sizes().items()]
    return mapped(*targets, note=count(len(found), "device"))


def _dimension(name: str) -> Converter:
    """One size of the mesh, checked against the others."""
    ours = f"{_MESH}.{name}_size"

    @computed(ours, words="", null="null: 1")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        return mapped((ours, getattr(mesh(context), name)))

    return convert


@computed(
    f"{_MESH}.dp_shard_size",
    f"{_MESH}.dp_replicate_size",
    words="≤ 1 or ≥ world: all ranks shard; else shards of this size, replicated",
)
def _fsdp_size(context: ConversionContext, leaf: KeyPath) -> Result:
    shape = mesh(context)
    note = "pure FSDP2"
    if shape.dp_replicate != 1:
        note = f"HSDP: {shape.world} / {values.integer(leaf.value)} replicas"
    return mapped(
        (f"{_MESH}.dp_shard_size", shape.dp_shard),
        (f"{_MESH}.dp_replicate_size", shape.dp_replicate),
        note=note,
    )


# --- model --------------------------------------------------------------------------------------------------


@computed(
    "policy.model_name_or_path",
    words="only where all roles name one; else pretrain is taken",
    null="null: pretrain",
)
def model_name(context: ConversionContext, leaf: KeyPath) -> Result:
    """The model of a role: ROLL overwrites all three by pretrain unless each of them names one."""
    roles = ("actor_train", "actor_infer", "reference")
    if any(context.get(f"{role}.model_args.model_name_or_path", None) is None for role in roles):
        pretrain = context.get("pretrain", None)
        if pretrain is not None:
            same = pretrain == leaf.value
            return implicit("the same as pretrain" if same else f"ROLL takes pretrain = {pretrain} instead")
    return mapped(("policy.model_name_or_path", values.path(leaf.value)))


@computed(
    "policy.model_gradient_checkpointing",
    words="the reverse: true → false",
    null="null: activations are recomputed, as by default",
)
def _no_checkpointing(context: ConversionContext, leaf: KeyPath) -> Result:
    keys = (config_key(ROLE, name) for name in ("recompute_granularity", "moe_layer_recompute"))
    if strategy(context, ROLE).startswith("megatron") and any(context.get(key, None) for key in keys):
        return implicit("recompute_granularity and moe_layer_recompute decide for Megatron")
    return mapped(("policy.model_gradient_checkpointing", not values.flag(leaf.value)))


@computed("train.fa_version", words="`fa2` → 2, `fa3` → 3; the others: the model's own choice")
def _attention(context: ConversionContext, leaf: KeyPath) -> Result:
    versions = {"fa2": 2, "flash_attention_2": 2, "fa3": 3, "flash_attention_3": 3}
    if is_one_of(leaf.value, versions):
        return mapped(("train.fa_version", versions[leaf.value]))
    if leaf.value in (None, "sdpa", "auto", "eager", "disabled"):
        return implicit("the model's own attention; exact in every case")
    raise BadValue(f"expected sdpa, auto, fa2 or fa3, got {shown(leaf.value)}")


def _parts(value: Any) -> list[str]:
    """Names of a list, or of a text with commas between them."""
    return [part.strip() for text in values.texts(value) for part in text.split(",")]


@computed("policy.trainable_map", words="each prefix → false", null="null: everything is trained")
def _freeze(context: ConversionContext, leaf: KeyPath) -> Result:
    prefixes = list(filter(None, _parts(leaf.value)))
    context.warn(
        f"freeze_module_prefix = {shown(leaf.value)} freezes every parameter whose name begins so; "
        "policy.trainable_map takes exact names of the transformers model: see that these are such names"
    )
    return mapped(("policy.trainable_map", dict.fromkeys(prefixes, False)))


@computed(
    "policy.lora.target_modules",
    words="comma-separated names become a list, `all` → `all-linear`",
    null="null: no adapters",
)
def _lora_target(context: ConversionContext, leaf: KeyPath) -> Result:
    names = list(filter(None, _parts(leaf.value)))
    if names in (["all"], ["all-linear"]):
        return mapped(("policy.lora.target_modules", "all-linear"))
    return mapped(("policy.lora.target_modules", names))


def _without_lora(context: ConversionContext) -> str:
    named = context.get(f"{ROLE}.model_args.lora_target", None)
    return "" if named else "no adapters: lora_target is not set"


@computed("policy.lora.lora_alpha", words="null: twice the rank")
def _lora_alpha(context: ConversionContext, leaf: KeyPath) -> Result:
    rank = context.integer(f"{ROLE}.model_args.lora_rank", 8) or 8
    alpha = values.number(leaf.value) if leaf.value is not None else 2 * rank
    return mapped(("policy.lora.lora_alpha", alpha))


@computed("policy.override_config", words="keys of the model's own configuration")
def _override(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, {}):
        return implicit("no override")
    if not leaf.rest:
        raise BadValue(f"expected a table, got {shown(leaf.value)}")
    if is_dropout(leaf.rest):
        return implicit("dropout is off in training: log-probs would be of another model")
    return mapped((f"policy.override_config.{leaf.rest}", leaf.value))


_MODEL_ARGS: tuple[Rule, ...] = (
    Rule("model_name_or_path", model_name),
    Rule("dtype", model_dtype(ROLE, "train"), default="bf16"),
    Rule("disable_gradient_checkpointing", _no_checkpointing),
    Rule(
        "gradient_checkpointing_use_reentrant",
        to.always("recomputation is never reentrant, which changes nothing"),
    ),
    Rule("ulysses_size", _dimension("cp")),
    Rule("attn_implementation", _attention, also=("flash_attn",)),
    Rule(
        "model_type",
        to.unless((None, "causal_lm", "trl"), "a language model", lost(f"{ROLE}.model_args.model_type")),
    ),
    Rule("device_map", to.always("the mesh places the model")),
    Rule("num_labels", to.always("concerns classification heads")),
    Rule("freeze_module_prefix", _freeze),
    Rule("lora_target", _lora_target),
    Rule("lora_rank", to.integer("policy.lora.r"), default=8, when=_without_lora),
    Rule("lora_alpha", _lora_alpha, default=None, when=_without_lora),
    Rule("lora_dropout", to.number("policy.lora.lora_dropout"), when=_without_lora),
    Rule(
        "additional_target",
        to.converted(
            "policy.lora.modules_to_save", _parts, "comma-separated names become a list", "null: none"
        ),
        when=_without_lora,
    ),
    Rule(
        "autocast_adapter_dtype",
        to.unless((True,), "adapters are float32", lost(f"{ROLE}.model_args.autocast_adapter_dtype")),
    ),
    Rule("model_config_kwargs.*", _override),
    Rule("adapter_name_or_path", lost(f"{ROLE}.model_args.adapter_name_or_path")),
    Rule("moe_aux_loss_coef", lost(f"{ROLE}.model_args.moe_aux_loss_coef")),
    Rule("vision_dp", lost(f"{ROLE}.model_args.vision_dp")),
)


# --- strategy -----------------------------------------------------------------------------------------------


@computed(f"{_MESH}.sequence_parallel", words="false without tensor parallelism, as in Megatron")
def _sequence_parallel(context: ConversionContext, leaf: KeyPath) -> Result:
    key, asked = f"{_MESH}.sequence_parallel", leaf.value is not None and values.flag(leaf.value)
    if asked and mesh(context).tp == 1:
        return mapped((key, False), note="Megatron ignores it: tensor_model_parallel_size = 1 has one rank")
    return mapped((key, asked))


@computed(words="all training strategies become FSDP2")
def _strategy(context: ConversionContext, leaf: KeyPath) -> Result:
    values.one_of(leaf.value, TRAINING_STRATEGIES)
    return implicit(
        "training is sharded by FSDP2 with the sizes of the strategy_config; the numbers are the same"
    )


@computed("train.ckpt.save_contents", words="true → only the model")
def _model_only(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("model, optimizer and the rest are saved")
    return mapped(("train.ckpt.save_contents", ["model"]))


_STRATEGY_RULES: tuple[Rule, ...] = (
    *(Rule(key, _dimension(name)) for key, name in SIZES.items()),
    Rule("sequence_parallel", _sequence_parallel),
    *(Rule(name, how) for name, how in recomputation(ROLE, "policy", "train").items()),
    Rule(
        "moe_token_dispatcher_type",
        to.choice("policy.moe_token_dispatcher", {"allgather": "allgather", "alltoall": "alltoall"}),
    ),
    Rule("moe_grouped_gemm", to.flag("policy.moe_grouped_gemm"), also=("moe_use_grouped_mm",)),
    Rule("ep_size", _dimension("ep")),
    Rule("efsdp_size", to.always("experts are sharded over the ranks that ep_size leaves")),
    Rule("moe_shared_expert_overlap", to.flag("policy.moe_shared_expert_overlap")),
    Rule("overlap_grad_reduce", to.flag("train.overlap_grad_reduce")),
    Rule("use_distributed_optimizer", to.always("the optimizer is always sharded with its parameters")),
    Rule("optimizer_cpu_offload", to.flag("train.optimizer_offload")),
    Rule("save_only_model", _model_only),
    Rule("fsdp_size", _fsdp_size),
    Rule("param_dtype", dtype("train.param_dtype")),
    Rule("reduce_dtype", dtype("train.fsdp_reduce_dtype")),
    Rule("reshard_after_forward", reshard("train")),
    Rule("offload_policy", to.flag("train.fsdp_offload")),
)


@computed(f"{POLICY}.routing_replay", words="`R3` → `ids`; `R2`: see the list", null="null: off")
def _router_replay(context: ConversionContext, leaf: KeyPath) -> Result:
    mode = values.one_of(leaf.value, ("disable", "R2", "R3"))
    if mode == "disable":
        return implicit("the trainer chooses experts by itself")
    if mode == "R2":
        return no_counterpart(reason(leaf.key))
    return mapped((f"{POLICY}.routing_replay", "ids"))


_CAP = to.integer(f"{POLICY}.max_token_len_per_mini_batch", "as it is", "no cap")
_OLD_CAP = to.integer(f"{POLICY}.old_log_prob.max_token_len_per_mini_batch", "as it is", "no cap")
_unpacked = needs(f"{ROLE}.use_sequence_packing", "packing is off")
_SINGLE_RULES: tuple[Rule, ...] = (
    Rule("device_mapping", _devices),
    Rule("world_size", to.always("follows from device_mapping")),
    Rule(
        "num_gpus_per_worker",
        to.unless((1, None), "one rank for each GPU", to.always("applies to inference only")),
    ),
    Rule("infer_batch_size", to.integer(f"{POLICY}.old_log_prob.mini_batch")),
    Rule("model_update_frequency", to.integer("train.sync_weight_interval")),
    Rule("use_dynamic_batching_in_train", to.always("max_tokens_per_microbatch_in_train says how large")),
    Rule(
        "max_tokens_per_microbatch_in_train",
        to.unless((0,), "no cap", _CAP),
        when=needs(f"{ROLE}.use_dynamic_batching_in_train", "dynamic batching is off"),
    ),
    Rule("use_dynamic_batching_in_infer", to.always("max_tokens_per_microbatch_in_infer says how large")),
    Rule(
        "max_tokens_per_microbatch_in_infer",
        to.unless((0,), "no cap", _OLD_CAP),
        when=needs(f"{ROLE}.use_dynamic_batching_in_infer", "dynamic batching is off"),
    ),
    Rule("router_replay.mode", _router_replay),
    Rule("use_sequence_packing", to.flag("train.sequence_packing")),
    Rule("sequence_packing_args.max_packed_sequence_length_train", _CAP, when=_unpacked),
    Rule("sequence_packing_args.max_packed_sequence_length_forward", _OLD_CAP, when=_unpacked),
    Rule("logits_in_fp32", to.always("log-probs are computed in float32")),
    Rule("apply_loss_scale", to.always("the loss is normalised over the whole step, however it is cut")),
    Rule("worker_cls", to.unless((None,), "ROLL's own", lost(f"{ROLE}.worker_cls"))),
    Rule("offload_nccl", lost(f"{ROLE}.offload_nccl")),
)


ACTOR_TRAIN_RULES: tuple[Rule, ...] = (
    *under(f"{ROLE}.model_args", _MODEL_ARGS),
    *under(f"{ROLE}.training_args", TRAINING_ARGS),
    *under(f"{ROLE}.data_args", DATA_ARGS),
    Rule(f"{ROLE}.strategy_args.strategy_name", _strategy),
    *under(_SETTINGS, _STRATEGY_RULES),
    *under(ROLE, _SINGLE_RULES),
)
