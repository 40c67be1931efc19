"""`actor_train` of ROLL: model, optimizer, data and strategy of the policy that learns."""

from __future__ import annotations

from typing import Any

from schema.interop.engine.rows import (
    BadValue,
    How,
    Leaf,
    Reading,
    Result,
    Row,
    always,
    as_flag,
    as_integer,
    as_number,
    as_path,
    as_texts,
    choice,
    computed,
    flag,
    implicit,
    integer,
    mapped,
    number,
    shown,
    unless,
)
from schema.interop.roll.converters import (
    POLICY,
    asks,
    count,
    dtype,
    is_one_of,
    lost,
    named_devices,
    stored_dtype,
    under,
)
from schema.interop.roll.data import DATA_ARGS
from schema.interop.roll.facts import TRAINING_STRATEGIES, config_key, mesh, strategy
from schema.interop.roll.training import TRAINING_ARGS

ROLE = "actor_train"
_SETTINGS = f"{ROLE}.strategy_args.strategy_config"
_MESH = "policy.parallelism"
_OFF = (None, False)


# --- mesh and batches ---------------------------------------------------------------------------------------


@computed(
    f"{_MESH}.tp_size",
    f"{_MESH}.dp_shard_size",
    f"{_MESH}.dp_replicate_size",
    "placement.policy",
    words="the devices of the one policy replica; what the other sizes leave is sharded",
)
def _devices(reading: Reading, leaf: Leaf) -> Result:
    found = named_devices(reading, leaf)
    if found is None:
        return implicit("null: no devices are named")
    targets: list[tuple[str, Any]] = [("placement.policy", found)]
    targets += [(f"{_MESH}.{name}", size) for name, size in mesh(reading).sizes().items()]
    return mapped(*targets, note=count(len(found), "device"))


def _dimension(name: str, ours: str) -> How:
    """One size of the mesh, checked against the others."""

    def run(reading: Reading, leaf: Leaf) -> Result:
        if leaf.value is None:
            return implicit("null: 1")
        return mapped((f"{_MESH}.{ours}", getattr(mesh(reading), name)))

    return How(run, (f"{_MESH}.{ours}",), "")


@computed(
    f"{_MESH}.dp_shard_size",
    f"{_MESH}.dp_replicate_size",
    words="≤ 1 or ≥ world: all ranks shard; else shards of this size, replicated",
)
def _fsdp_size(reading: Reading, leaf: Leaf) -> Result:
    shape = mesh(reading)
    note = (
        "pure FSDP2"
        if shape.dp_replicate == 1
        else f"HSDP: {shape.world} / {as_integer(leaf.value)} replicas"
    )
    return mapped(
        (f"{_MESH}.dp_shard_size", shape.dp_shard),
        (f"{_MESH}.dp_replicate_size", shape.dp_replicate),
        note=note,
    )


# --- model --------------------------------------------------------------------------------------------------


@computed("policy.model_name_or_path", words="only where all roles name one; else pretrain is taken")
def model_name(reading: Reading, leaf: Leaf) -> Result:
    """The model of a role: ROLL overwrites all three by pretrain unless each of them names one."""
    if leaf.value is None:
        return implicit("null: pretrain")
    roles = ("actor_train", "actor_infer", "reference")
    if any(reading.get(f"{role}.model_args.model_name_or_path", None) is None for role in roles):
        pretrain = reading.get("pretrain", None)
        if pretrain is not None:
            same = (
                "the same as pretrain"
                if pretrain == leaf.value
                else f"ROLL takes pretrain = {pretrain} instead"
            )
            return implicit(same)
    return mapped(("policy.model_name_or_path", as_path(leaf.value)))


@computed("policy.model_gradient_checkpointing", words="the reverse: true → false")
def _no_checkpointing(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value is None:
        return implicit("null: activations are recomputed, as by default")
    if strategy(reading, ROLE).startswith("megatron") and reading.get(
        config_key(ROLE, "recompute_granularity"), None
    ):
        return implicit("recompute_granularity decides for Megatron")
    return mapped(("policy.model_gradient_checkpointing", not as_flag(leaf.value)))


@computed("train.fa_version", words="`fa2` → 2, `fa3` → 3; the others: the model's own choice")
def _attention(reading: Reading, leaf: Leaf) -> Result:
    versions = {"fa2": 2, "flash_attention_2": 2, "fa3": 3, "flash_attention_3": 3}
    if is_one_of(leaf.value, versions):
        return mapped(("train.fa_version", versions[leaf.value]))
    if leaf.value in (None, "sdpa", "auto", "eager", "disabled"):
        return implicit("the model's own attention; exact in every case")
    raise BadValue(f"expected sdpa, auto, fa2 or fa3, got {shown(leaf.value)}")


@computed("policy.trainable_map", words="each prefix → false")
def _freeze(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value is None:
        return implicit("null: everything is trained")
    prefixes = [part.strip() for text in as_texts(leaf.value) for part in text.split(",") if part.strip()]
    reading.warn(
        f"freeze_module_prefix = {shown(leaf.value)} freezes every parameter whose name begins so; "
        "policy.trainable_map takes the exact names of the hub's checkpoint: see that these are such names"
    )
    return mapped(("policy.trainable_map", dict.fromkeys(prefixes, False)))


@computed("policy.lora.target_modules", words="comma-separated names become a list, `all` → `all-linear`")
def _lora_target(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value is None:
        return implicit("null: no adapters")
    names = [part.strip() for text in as_texts(leaf.value) for part in text.split(",") if part.strip()]
    if names in (["all"], ["all-linear"]):
        return mapped(("policy.lora.target_modules", "all-linear"))
    return mapped(("policy.lora.target_modules", names))


def _without_lora(reading: Reading) -> str:
    named = reading.get(f"{ROLE}.model_args.lora_target", None)
    return "" if named else "no adapters: lora_target is not set"


@computed("policy.lora.lora_alpha", words="null: twice the rank")
def _lora_alpha(reading: Reading, leaf: Leaf) -> Result:
    rank = reading.integer(f"{ROLE}.model_args.lora_rank", 8) or 8
    alpha = as_number(leaf.value) if leaf.value is not None else 2 * rank
    return mapped(("policy.lora.lora_alpha", alpha))


@computed("policy.lora.modules_to_save", words="comma-separated names become a list")
def _lora_more(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value is None:
        return implicit("null: none")
    return mapped(
        (
            "policy.lora.modules_to_save",
            [part.strip() for text in as_texts(leaf.value) for part in text.split(",")],
        )
    )


@computed("policy.override_config", words="keys of the model's own configuration")
def _override(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value in (None, {}):
        return implicit("no override")
    if not leaf.rest:
        raise BadValue(f"expected a table, got {shown(leaf.value)}")
    return mapped((f"policy.override_config.{leaf.rest}", leaf.value))


@computed(
    "train.param_dtype", "train.master_dtype", words="with a param_dtype of the strategy: the master weights"
)
def _model_dtype(reading: Reading, leaf: Leaf) -> Result:
    plain = dtype("train.param_dtype").run(reading, leaf)
    computing = reading.get(config_key(ROLE, "param_dtype"), None)
    if not plain.targets or computing is None:
        return plain
    return stored_dtype("train", plain.targets[0][1], computing)


_MODEL_ARGS: tuple[Row, ...] = (
    Row("model_name_or_path", model_name),
    Row("dtype", _model_dtype, default="bf16"),
    Row("disable_gradient_checkpointing", _no_checkpointing),
    Row(
        "gradient_checkpointing_use_reentrant",
        always("recomputation is never reentrant, which changes nothing"),
    ),
    Row("ulysses_size", _dimension("cp", "cp_size")),
    Row("attn_implementation", _attention, also=("flash_attn",)),
    Row(
        "model_type",
        unless((None, "causal_lm", "trl"), "a language model", lost(f"{ROLE}.model_args.model_type")),
    ),
    Row("device_map", always("the mesh places the model")),
    Row("num_labels", always("concerns classification heads")),
    Row("freeze_module_prefix", _freeze),
    Row("lora_target", _lora_target),
    Row("lora_rank", integer("policy.lora.r"), default=8, when=_without_lora),
    Row("lora_alpha", _lora_alpha, default=None, when=_without_lora),
    Row("lora_dropout", number("policy.lora.lora_dropout"), when=_without_lora),
    Row("additional_target", _lora_more, when=_without_lora),
    Row(
        "autocast_adapter_dtype",
        unless((True,), "adapters are float32", lost(f"{ROLE}.model_args.autocast_adapter_dtype")),
    ),
    Row("model_config_kwargs.*", _override),
    Row("adapter_name_or_path", lost(f"{ROLE}.model_args.adapter_name_or_path")),
    Row("moe_aux_loss_coef", lost(f"{ROLE}.model_args.moe_aux_loss_coef")),
    Row("vision_dp", lost(f"{ROLE}.model_args.vision_dp")),
)


# --- strategy -----------------------------------------------------------------------------------------------


@computed(words="all training strategies become FSDP2")
def _strategy(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value in TRAINING_STRATEGIES:
        return implicit(
            "training is sharded by FSDP2 with the sizes of the strategy_config; the numbers are the same"
        )
    raise BadValue(f"expected one of {', '.join(TRAINING_STRATEGIES)}, got {shown(leaf.value)}")


@computed(
    "policy.model_gradient_checkpointing", "train.recompute_granularity", words="null: nothing is recomputed"
)
def _recompute(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value is None:
        return mapped(("policy.model_gradient_checkpointing", False))
    if leaf.value not in ("full", "selective"):
        raise BadValue(f"expected full or selective, got {shown(leaf.value)}")
    return mapped(("policy.model_gradient_checkpointing", True), ("train.recompute_granularity", leaf.value))


@computed("train.fsdp_reshard_after_forward", words="true → `always`, false → `never`")
def _reshard(reading: Reading, leaf: Leaf) -> Result:
    if leaf.value is None:
        return implicit("null: the default")
    return mapped(("train.fsdp_reshard_after_forward", "always" if as_flag(leaf.value) else "never"))


@computed("train.ckpt.save_contents", words="true → only the model")
def _model_only(reading: Reading, leaf: Leaf) -> Result:
    if not as_flag(leaf.value):
        return implicit("model, optimizer and the rest are saved")
    return mapped(("train.ckpt.save_contents", ["model"]))


_STRATEGY_ROWS: tuple[Row, ...] = (
    Row("tensor_model_parallel_size", _dimension("tp", "tp_size")),
    Row("pipeline_model_parallel_size", _dimension("pp", "pp_size")),
    Row("context_parallel_size", _dimension("cp", "cp_size")),
    Row("expert_model_parallel_size", _dimension("ep", "ep_size")),
    Row("virtual_pipeline_model_parallel_size", _dimension("virtual_pp", "virtual_pp_size")),
    Row("sequence_parallel", flag(f"{_MESH}.sequence_parallel")),
    Row("recompute_granularity", _recompute),
    Row("moe_layer_recompute", flag("train.recompute_moe_layers")),
    Row(
        "moe_token_dispatcher_type",
        choice("policy.moe_token_dispatcher", {"allgather": "allgather", "alltoall": "alltoall"}),
    ),
    Row("moe_grouped_gemm", flag("policy.moe_grouped_gemm")),
    Row("moe_shared_expert_overlap", flag("policy.moe_shared_expert_overlap")),
    Row("overlap_grad_reduce", flag("train.overlap_grad_reduce")),
    Row("use_distributed_optimizer", always("the optimizer is always sharded with its parameters")),
    Row("optimizer_cpu_offload", flag("train.optimizer_offload")),
    Row("save_only_model", _model_only),
    Row("fsdp_size", _fsdp_size),
    Row("param_dtype", dtype("train.param_dtype")),
    Row("reduce_dtype", dtype("train.fsdp_reduce_dtype")),
    Row("reshard_after_forward", _reshard),
    Row("offload_policy", flag("train.fsdp_offload")),
)

_SINGLE_ROWS: tuple[Row, ...] = (
    Row("device_mapping", _devices),
    Row("world_size", always("follows from device_mapping")),
    Row(
        "num_gpus_per_worker", unless((1, None), "one rank for each GPU", always("applies to inference only"))
    ),
    Row("infer_batch_size", integer(f"{POLICY}.old_log_prob.mini_batch")),
    Row("model_update_frequency", integer("train.sync_weight_interval")),
    Row("use_dynamic_batching_in_train", always("max_tokens_per_microbatch_in_train says how large")),
    Row(
        "max_tokens_per_microbatch_in_train",
        asks((0, None), "no cap", integer(f"{POLICY}.max_token_len_per_mini_batch")),
        when=lambda reading: (
            "" if reading.flag(f"{ROLE}.use_dynamic_batching_in_train") else "dynamic batching is off"
        ),
    ),
    Row("use_dynamic_batching_in_infer", always("max_tokens_per_microbatch_in_infer says how large")),
    Row(
        "max_tokens_per_microbatch_in_infer",
        asks((0, None), "no cap", integer(f"{POLICY}.old_log_prob.max_token_len_per_mini_batch")),
        when=lambda reading: (
            "" if reading.flag(f"{ROLE}.use_dynamic_batching_in_infer") else "dynamic batching is off"
        ),
    ),
    Row("use_sequence_packing", flag("train.sequence_packing")),
    Row(
        "sequence_packing_args.max_packed_sequence_length_train",
        asks((None,), "no cap", integer(f"{POLICY}.max_token_len_per_mini_batch")),
        when=lambda reading: "" if reading.flag(f"{ROLE}.use_sequence_packing") else "packing is off",
    ),
    Row(
        "sequence_packing_args.max_packed_sequence_length_forward",
        asks((None,), "no cap", integer(f"{POLICY}.old_log_prob.max_token_len_per_mini_batch")),
        when=lambda reading: "" if reading.flag(f"{ROLE}.use_sequence_packing") else "packing is off",
    ),
    Row("logits_in_fp32", always("log-probs are computed in float32")),
    Row("apply_loss_scale", always("the loss is normalised over the whole step, however it is cut")),
    Row("worker_cls", unless((None,), "ROLL's own", lost(f"{ROLE}.worker_cls"))),
    Row("offload_nccl", lost(f"{ROLE}.offload_nccl")),
)


ACTOR_TRAIN_ROWS: tuple[Row, ...] = (
    *under(f"{ROLE}.model_args", _MODEL_ARGS),
    *under(f"{ROLE}.training_args", TRAINING_ARGS),
    *under(f"{ROLE}.data_args", DATA_ARGS),
    Row(f"{ROLE}.strategy_args.strategy_name", _strategy),
    *under(_SETTINGS, _STRATEGY_ROWS),
    *under(ROLE, _SINGLE_ROWS),
)
