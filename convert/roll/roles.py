"""The other roles of ROLL: reference model, critic, rewards, and the environments of agents."""

from __future__ import annotations

from typing import Any

from convert.engine import to, values
from convert.engine.keys import words
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed, rules_below
from convert.engine.unsupported import below
from convert.roll.converters import (
    LORA_KEYS,
    dtype,
    lost,
    model_dtype,
    named_devices,
    recomputation,
    repeats,
    reshard,
    wins,
)
from convert.roll.facts import (
    SIZES,
    Mesh,
    devices,
    global_batch,
    has_reference,
    mesh,
    no_critic,
    samples_per_step,
)
from convert.roll.training import CLIPPED, Rates

_INFER = ("megatron_infer", "fsdp2_infer", "deepspeed_infer", "hf_infer")
_TRAIN = ("megatron_train", "fsdp2_train", "deepspeed_train")
_SETTINGS = "strategy_args.strategy_config"


def _no_reference(context: ConversionContext) -> str:
    return "" if has_reference(context) else "no KL term reads a reference model: none is loaded"


# --- a role with a mesh of its own --------------------------------------------------------------------------


def _role_devices(role: str) -> Converter:
    """Devices and mesh of a role: written where they are not the policy's."""

    @computed(f"placement.{role}", f"{role}.parallelism", words="where they are not actor_train's")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        found = named_devices(context, leaf)
        if found is None:
            return implicit("null: the policy's devices")
        targets: list[tuple[str, Any]] = []
        if found != devices(context, "actor_train"):
            targets.append((f"placement.{role}", found))
        own = mesh(context, role)
        if own != mesh(context):
            targets += _sizes(role, own)
        return mapped(*targets) if targets else implicit("devices and mesh are the policy's")

    return convert


def _sizes(role: str, own: Mesh) -> list[tuple[str, Any]]:
    """A whole mesh, since the sizes that are not written are not those of ROLL."""
    return [(f"{role}.parallelism.{name}", size) for name, size in own.sizes().items()]


def _role_size(role: str, name: str) -> Converter:
    """The mesh of a role, of which this is one size; where it is the policy's nothing is written."""
    ours = f"{role}.parallelism.{name}_size"

    @computed(ours, words="where the mesh is not the policy's")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        own = mesh(context, role)
        if own == mesh(context):
            return implicit("the mesh is the policy's")
        return mapped(*_sizes(role, own))

    return convert


def _sequence_parallel(role: str) -> Converter:
    ours = f"{role}.parallelism.sequence_parallel"

    @computed(ours, words="where the mesh is not the policy's")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        own, value = mesh(context, role), values.flag(leaf.value)
        if own == mesh(context) or own.tp == 1:
            return implicit(
                "the mesh is the policy's" if own.tp > 1 else "no effect without tensor parallelism"
            )
        return mapped((ours, value))

    return convert


def _strategy_name(known: tuple[str, ...]) -> Converter:
    @computed(words="all strategies become FSDP2")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        values.one_of(leaf.value, known)
        return implicit("sharded by FSDP2 with the sizes of the strategy_config; the numbers are the same")

    return convert


def _mesh_sizes(role: str) -> dict[str, Converter]:
    sizes = SIZES | {"fsdp_size": "dp_shard"}
    return {f"{_SETTINGS}.{key}": _role_size(role, name) for key, name in sizes.items()}


def _model(role: str, model: Converter, frozen: Converter) -> dict[str, Converter]:
    """`model_args` of a role, as far as another one decides them."""
    table = {
        "model_name_or_path": model,
        "attn_implementation": to.always("attention is that of actor_train"),
        "model_type": to.always("follows from the role"),
        "device_map": to.always("the mesh places the model"),
        "num_labels": to.always("a value is one number"),
        **dict.fromkeys(LORA_KEYS, to.always("adapters are those of actor_train")),
        "freeze_module_prefix": frozen,
        "vision_dp": lost(f"{role}.model_args.vision_dp"),
    }
    return below("model_args", table)


def _worker(role: str) -> dict[str, Converter]:
    return {
        "num_gpus_per_worker": to.always("applies to inference engines only"),
        "world_size": to.always("follows from device_mapping"),
        "worker_cls": to.unless((None,), "ROLL's own", lost(f"{role}.worker_cls")),
    }


_ALSO = {"model_args.attn_implementation": ("model_args.flash_attn",)}


# --- reference ----------------------------------------------------------------------------------------------


@computed(
    "reference.model_name_or_path",
    words="where every role names its own; else pretrain",
    null="null: pretrain",
)
def _reference_model(context: ConversionContext, leaf: KeyPath) -> Result:
    keys = [f"{role}.model_args.model_name_or_path" for role in ("actor_train", "actor_infer", "reference")]
    if any(context.get(key, None) is None for key in keys) and context.has("pretrain"):
        return implicit("ROLL takes pretrain unless all three roles name a model")
    if leaf.value in (context.get(keys[0], None), context.get("pretrain", None)):
        return implicit("the policy's initial weights")
    return mapped(("reference.model_name_or_path", values.path(leaf.value)))


_REFERENCE: dict[str, Converter] = {
    **_model("reference", _reference_model, to.always("the reference model is never trained")),
    "model_args.dtype": repeats(
        lambda context: context.get("actor_train.model_args.dtype", "bf16"),
        "the policy's type",
        wins("train.param_dtype for the policy; here for the reference too"),
    ),
    "model_args.disable_gradient_checkpointing": to.always("the reference model has no backward pass"),
    "model_args.ulysses_size": _role_size("reference", "cp"),
    "model_args.model_config_kwargs.*": to.always("the reference has the policy's configuration"),
    "data_args.template": to.always("the reference reads tokens"),
    "strategy_args.strategy_name": _strategy_name(_INFER),
    **_mesh_sizes("reference"),
    f"{_SETTINGS}.offload_policy": to.flag("reference.offload"),
    **dict.fromkeys(
        (
            f"{_SETTINGS}.{key}"
            for key in words(
                "sequence_parallel moe_token_dispatcher_type moe_grouped_gemm moe_shared_expert_overlap "
                "param_dtype reduce_dtype reshard_after_forward use_distributed_optimizer "
                "recompute_granularity moe_layer_recompute overlap_grad_reduce"
            )
        ),
        to.always("follows actor_train's setting"),
    ),
    "device_mapping": _role_devices("reference"),
    "infer_batch_size": to.integer("reference.mini_batch"),
    "use_dynamic_batching_in_infer": to.always("max_tokens_per_microbatch_in_infer says how large"),
    "max_tokens_per_microbatch_in_infer": to.unless(
        (0,), "no cap", to.integer("reference.max_token_len_per_mini_batch", "as it is", "no cap")
    ),
    "use_sequence_packing": to.always("follows actor_train's setting"),
    "router_replay.mode": to.always("the reference model chooses experts by itself, as in ROLL"),
    **_worker("reference"),
}


# --- critic -------------------------------------------------------------------------------------------------


@computed("critic.batch_size_per_optimize", words="the global batch, where it is not the whole rollout")
def _critic_accumulation(context: ConversionContext, leaf: KeyPath) -> Result:
    batch, formula = global_batch(context, "critic")
    if batch >= samples_per_step(context):
        return implicit(f"global batch {formula}: one optimizer step for the whole rollout")
    return mapped(("critic.batch_size_per_optimize", batch), note=f"global batch {formula}")


_CRITIC_MODEL = to.converted(
    "critic.model_name_or_path", values.path, "else reward_pretrain", "null: reward_pretrain"
)
_CRITIC: dict[str, Converter] = {
    **_model("critic", _CRITIC_MODEL, lost("critic.model_args.freeze_module_prefix")),
    "model_args.dtype": model_dtype("critic", "critic"),
    "model_args.disable_gradient_checkpointing": to.converted(
        "critic.model_gradient_checkpointing",
        lambda value: not values.flag(value),
        "the reverse: true → false",
        "null: activations are recomputed, as by default",
    ),
    "model_args.ulysses_size": _role_size("critic", "cp"),
    "data_args.template": to.always("the critic reads tokens"),
    "router_replay.mode": lost("critic.router_replay.mode", "disable"),
    "training_args.learning_rate": to.number("critic.optm_lr"),
    "training_args.weight_decay": to.number("critic.optm_weight_decay"),
    "training_args.per_device_train_batch_size": to.integer("critic.mini_batch"),
    "training_args.gradient_accumulation_steps": _critic_accumulation,
    **below("training_args", Rates("critic", "critic").table()),
    "training_args.num_train_epochs": to.always("max_steps ends the run"),
    "training_args.max_grad_norm": to.always(CLIPPED),
    "training_args.adam_epsilon": to.number("critic.epsilon"),
    "strategy_args.strategy_name": _strategy_name(_TRAIN),
    **_mesh_sizes("critic"),
    **below(
        _SETTINGS,
        {
            **recomputation("critic", "critic", "critic"),
            "overlap_grad_reduce": to.flag("critic.overlap_grad_reduce"),
            "use_distributed_optimizer": to.always("the optimizer is always sharded with its parameters"),
            "optimizer_cpu_offload": to.flag("critic.optimizer_offload"),
            "param_dtype": dtype("critic.param_dtype"),
            "reduce_dtype": dtype("critic.fsdp_reduce_dtype"),
            "reshard_after_forward": reshard("critic"),
            "offload_policy": to.flag("critic.fsdp_offload"),
            "sequence_parallel": _sequence_parallel("critic"),
            **dict.fromkeys(
                ("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_shared_expert_overlap"),
                to.always("the critic's experts run as the policy's"),
            ),
        },
    ),
    "device_mapping": _role_devices("critic"),
    "infer_batch_size": to.integer("critic.forward_mini_batch"),
    **_worker("critic"),
}
_CRITIC_DEFAULTS = {
    "training_args.adam_epsilon": 1e-8,
    "training_args.gradient_accumulation_steps": 1,
    "training_args.learning_rate": 5e-5,
    "training_args.weight_decay": 0.0,
    "training_args.warmup_steps": 0,
    "training_args.lr_scheduler_type": "linear",
}

ROLE_RULES: tuple[Rule, ...] = (
    *rules_below("reference", _REFERENCE, _no_reference, also=_ALSO),
    *rules_below("critic", _CRITIC, no_critic, _CRITIC_DEFAULTS, _ALSO),
)
