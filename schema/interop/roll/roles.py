"""The other roles of ROLL: reference model, critic, rewards, and the environments of agents."""

from __future__ import annotations

from typing import Any

from schema.interop.engine import to, values
from schema.interop.engine.keys import words
from schema.interop.engine.model import Result, implicit, mapped
from schema.interop.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed
from schema.interop.engine.values import BadValue, shown
from schema.interop.roll.converters import (
    asks,
    dtype,
    is_one_of,
    lost,
    named_devices,
    repeats,
    stored_dtype,
    under,
    wins,
)
from schema.interop.roll.facts import devices, global_batch, has_critic, has_reference, mesh, samples_per_step

_INFER = ("megatron_infer", "fsdp2_infer", "deepspeed_infer", "hf_infer")
_TRAIN = ("megatron_train", "fsdp2_train", "deepspeed_train")


def _no_reference(context: ConversionContext) -> str:
    return "" if has_reference(context) else "no KL term reads a reference model: none is loaded"


def _no_critic(context: ConversionContext) -> str:
    return "" if has_critic(context) else "only gae has a critic"


# --- a role with a mesh of its own --------------------------------------------------------------------------


def _role_devices(role: str, ours: str) -> Converter:
    """Devices and mesh of a role: written where they are not the policy's."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        found = named_devices(context, leaf)
        if found is None:
            return implicit("null: the policy's devices")
        targets: list[tuple[str, Any]] = []
        if found != devices(context, "actor_train"):
            targets.append((f"placement.{ours}", found))
        if mesh(context, role) != mesh(context):
            targets += [
                (f"{ours}.parallelism.{name}", size) for name, size in mesh(context, role).sizes().items()
            ]
        return mapped(*targets) if targets else implicit("devices and mesh are the policy's")

    words = "where they are not actor_train's"
    return Converter(run, (f"placement.{ours}", f"{ours}.parallelism"), words)


def _role_size(role: str, ours: str, name: str, key: str) -> Converter:
    """One size of a role's mesh; where the whole mesh is the policy's nothing is written."""

    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        own = mesh(context, role)
        if own == mesh(context):
            return implicit("the mesh is the policy's")
        return mapped((f"{ours}.parallelism.{key}", getattr(own, name)))

    return Converter(run, (f"{ours}.parallelism.{key}",), "where the mesh is not the policy's")


def _strategy_name(known: tuple[str, ...]) -> Converter:
    def run(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value not in known:
            raise BadValue(f"expected one of {', '.join(known)}, got {shown(leaf.value)}")
        return implicit("sharded by FSDP2 with the sizes of the strategy_config; the numbers are the same")

    return Converter(run, (), "all strategies become FSDP2")


def _mesh_rules(role: str, ours: str) -> tuple[Rule, ...]:
    sizes = {
        "tensor_model_parallel_size": ("tp", "tp_size"),
        "pipeline_model_parallel_size": ("pp", "pp_size"),
        "context_parallel_size": ("cp", "cp_size"),
        "expert_model_parallel_size": ("ep", "ep_size"),
        "virtual_pipeline_model_parallel_size": ("virtual_pp", "virtual_pp_size"),
        "fsdp_size": ("dp_shard", "dp_shard_size"),
    }
    return tuple(Rule(key, _role_size(role, ours, *names)) for key, names in sizes.items())


def _model_rules(role: str, model: Converter) -> tuple[Rule, ...]:
    frozen = to.always("the reference model is never trained")
    if role != _REFERENCE:
        frozen = lost(f"{role}.model_args.freeze_module_prefix")
    return (
        Rule("model_name_or_path", model),
        Rule("attn_implementation", to.always("attention is that of actor_train"), also=("flash_attn",)),
        Rule("model_type", to.always("follows from the role")),
        Rule("device_map", to.always("the mesh places the model")),
        Rule("num_labels", to.always("a value is one number")),
        *(
            Rule(key, to.always("adapters are those of actor_train"))
            for key in ("lora_target", "lora_rank", "lora_alpha", "lora_dropout", "additional_target")
        ),
        Rule("freeze_module_prefix", frozen),
        Rule("vision_dp", lost(f"{role}.model_args.vision_dp")),
    )


def _settings(role: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return under(f"{role}.strategy_args.strategy_config", rules)


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


_REFERENCE = "reference"
_REFERENCE_RULES: tuple[Rule, ...] = (
    *under(f"{_REFERENCE}.model_args", _model_rules(_REFERENCE, _reference_model)),
    Rule(
        f"{_REFERENCE}.model_args.dtype",
        repeats(
            lambda context: context.get("actor_train.model_args.dtype", "bf16"),
            "the policy's type",
            wins("train.param_dtype for the policy; here for the reference too"),
        ),
    ),
    Rule(
        f"{_REFERENCE}.model_args.disable_gradient_checkpointing",
        to.always("the reference model has no backward pass"),
    ),
    Rule(f"{_REFERENCE}.model_args.ulysses_size", _role_size(_REFERENCE, "reference", "cp", "cp_size")),
    Rule(
        f"{_REFERENCE}.model_args.model_config_kwargs.*",
        to.always("the reference has the policy's configuration"),
    ),
    Rule(f"{_REFERENCE}.data_args.template", to.always("the reference reads tokens")),
    Rule(f"{_REFERENCE}.strategy_args.strategy_name", _strategy_name(_INFER)),
    *_settings(_REFERENCE, _mesh_rules(_REFERENCE, "reference")),
    *_settings(
        _REFERENCE,
        (
            Rule("offload_policy", to.flag("reference.offload")),
            *(
                Rule(key, to.always("follows actor_train's setting"))
                for key in words(
                    "sequence_parallel moe_token_dispatcher_type moe_grouped_gemm moe_shared_expert_overlap "
                    "param_dtype reduce_dtype reshard_after_forward use_distributed_optimizer "
                    "recompute_granularity moe_layer_recompute overlap_grad_reduce"
                )
            ),
        ),
    ),
    Rule(f"{_REFERENCE}.device_mapping", _role_devices(_REFERENCE, "reference")),
    Rule(f"{_REFERENCE}.infer_batch_size", to.integer("reference.mini_batch")),
    Rule(
        f"{_REFERENCE}.use_dynamic_batching_in_infer",
        to.always("max_tokens_per_microbatch_in_infer says how large"),
    ),
    Rule(
        f"{_REFERENCE}.max_tokens_per_microbatch_in_infer",
        asks((0, None), "no cap", to.integer("reference.max_token_len_per_mini_batch")),
    ),
    Rule(f"{_REFERENCE}.use_sequence_packing", to.always("follows actor_train's setting")),
    Rule(f"{_REFERENCE}.num_gpus_per_worker", to.always("applies to inference engines only")),
    Rule(f"{_REFERENCE}.world_size", to.always("follows from device_mapping")),
    Rule(f"{_REFERENCE}.worker_cls", to.unless((None,), "ROLL's own", lost(f"{_REFERENCE}.worker_cls"))),
)


# --- critic -------------------------------------------------------------------------------------------------


@computed("critic.model_name_or_path", words="else reward_pretrain", null="null: reward_pretrain")
def _critic_model(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(("critic.model_name_or_path", values.path(leaf.value)))


@computed(
    "critic.param_dtype",
    "critic.master_dtype",
    words="with a param_dtype of the strategy: the master weights",
)
def _critic_dtype(context: ConversionContext, leaf: KeyPath) -> Result:
    plain = dtype("critic.param_dtype").run(context, leaf)
    computing = context.get("critic.strategy_args.strategy_config.param_dtype", None)
    if not plain.targets or computing is None:
        return plain
    return stored_dtype("critic", plain.targets[0][1], computing)


@computed(
    "critic.model_gradient_checkpointing",
    words="the reverse: true → false",
    null="null: activations are recomputed, as by default",
)
def _critic_checkpointing(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(("critic.model_gradient_checkpointing", not values.flag(leaf.value)))


@computed("critic.batch_size_per_optimize", words="the global batch, where it is not the whole rollout")
def _critic_accumulation(context: ConversionContext, leaf: KeyPath) -> Result:
    batch, formula = global_batch(context, "critic")
    if batch >= samples_per_step(context):
        return implicit(f"global batch {formula}: one optimizer step for the whole rollout")
    return mapped(("critic.batch_size_per_optimize", batch), note=f"global batch {formula}")


@computed(
    "critic.recompute_granularity", "critic.model_gradient_checkpointing", words="null: nothing is recomputed"
)
def _critic_recompute(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None:
        return mapped(("critic.model_gradient_checkpointing", False))
    if leaf.value not in ("full", "selective"):
        raise BadValue(f"expected full or selective, got {shown(leaf.value)}")
    return mapped(("critic.model_gradient_checkpointing", True), ("critic.recompute_granularity", leaf.value))


@computed("critic.fsdp_reshard_after_forward", words="true → `always`, false → `never`")
def _critic_reshard(context: ConversionContext, leaf: KeyPath) -> Result:
    return mapped(("critic.fsdp_reshard_after_forward", "always" if values.flag(leaf.value) else "never"))


_CRITIC = "critic"
_CRITIC_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "none",
    "constant_with_warmup": "none",
}


@computed("critic.optm_decay_type", "critic.optm_decay_ratio", words="as for actor_train")
def _critic_schedule(context: ConversionContext, leaf: KeyPath) -> Result:
    if not is_one_of(leaf.value, _CRITIC_SCHEDULES):
        raise BadValue(f"expected one of {', '.join(_CRITIC_SCHEDULES)}, got {shown(leaf.value)}")
    ours = _CRITIC_SCHEDULES[leaf.value]
    if ours == "none":
        return mapped(("critic.optm_decay_type", "none"))
    total = max(context.integer("max_steps", 500) or 0, 1)
    warmup = min(context.integer("critic.training_args.warmup_steps", 0) or 0, total)
    return mapped(
        ("critic.optm_decay_type", ours), ("critic.optm_decay_ratio", round(1.0 - warmup / total, 6) or 1.0)
    )


_CRITIC_RULES: tuple[Rule, ...] = (
    *under(f"{_CRITIC}.model_args", _model_rules(_CRITIC, _critic_model)),
    Rule(f"{_CRITIC}.model_args.dtype", _critic_dtype),
    Rule(f"{_CRITIC}.model_args.disable_gradient_checkpointing", _critic_checkpointing),
    Rule(f"{_CRITIC}.model_args.ulysses_size", _role_size(_CRITIC, "critic", "cp", "cp_size")),
    Rule(f"{_CRITIC}.data_args.template", to.always("the critic reads tokens")),
    Rule(f"{_CRITIC}.training_args.learning_rate", to.number("critic.optm_lr"), default=5e-5),
    Rule(f"{_CRITIC}.training_args.weight_decay", to.number("critic.optm_weight_decay"), default=0.0),
    Rule(f"{_CRITIC}.training_args.per_device_train_batch_size", to.integer("critic.mini_batch")),
    Rule(f"{_CRITIC}.training_args.gradient_accumulation_steps", _critic_accumulation),
    Rule(f"{_CRITIC}.training_args.warmup_steps", to.integer("critic.optm_warmup_steps"), default=0),
    Rule(
        f"{_CRITIC}.training_args.warmup_ratio",
        asks((0, 0.0), "no warm-up", to.number("critic.optm_warmup_steps")),
    ),
    Rule(f"{_CRITIC}.training_args.lr_scheduler_type", _critic_schedule, default="linear"),
    Rule(f"{_CRITIC}.training_args.num_train_epochs", to.always("max_steps ends the run")),
    Rule(f"{_CRITIC}.training_args.max_grad_norm", to.number("critic.optm_grad_norm_clip")),
    Rule(f"{_CRITIC}.strategy_args.strategy_name", _strategy_name(_TRAIN)),
    *_settings(_CRITIC, _mesh_rules(_CRITIC, "critic")),
    *_settings(
        _CRITIC,
        (
            Rule("recompute_granularity", _critic_recompute),
            Rule("moe_layer_recompute", to.flag("critic.recompute_moe_layers")),
            Rule("overlap_grad_reduce", to.flag("critic.overlap_grad_reduce")),
            Rule(
                "use_distributed_optimizer", to.always("the optimizer is always sharded with its parameters")
            ),
            Rule("optimizer_cpu_offload", to.flag("critic.optimizer_offload")),
            Rule("param_dtype", dtype("critic.param_dtype")),
            Rule("reduce_dtype", dtype("critic.fsdp_reduce_dtype")),
            Rule("reshard_after_forward", _critic_reshard),
            Rule("offload_policy", to.flag("critic.fsdp_offload")),
            Rule("sequence_parallel", to.flag("critic.parallelism.sequence_parallel")),
            *(
                Rule(key, to.always("the critic's experts run as the policy's"))
                for key in ("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_shared_expert_overlap")
            ),
        ),
    ),
    Rule(f"{_CRITIC}.device_mapping", _role_devices(_CRITIC, "critic")),
    Rule(f"{_CRITIC}.infer_batch_size", to.integer("critic.forward_mini_batch")),
    Rule(f"{_CRITIC}.num_gpus_per_worker", to.always("applies to inference engines only")),
    Rule(f"{_CRITIC}.world_size", to.always("follows from device_mapping")),
    Rule(f"{_CRITIC}.worker_cls", to.unless((None,), "ROLL's own", lost(f"{_CRITIC}.worker_cls"))),
)


def _only_when(rules: tuple[Rule, ...], when: Any) -> tuple[Rule, ...]:
    return tuple(
        Rule(rule.key, rule.converter, rule.default, rule.also, rule.when or when, rule.words)
        for rule in rules
    )


ROLE_RULES: tuple[Rule, ...] = (
    *_only_when(_REFERENCE_RULES, _no_reference),
    *_only_when(_CRITIC_RULES, _no_critic),
)
