"""The roles of ROLL's training: `actor_train`, the policy that learns, then its reference model and its critic."""

from __future__ import annotations

import math
from typing import Any

from convert.engine import values
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, KeyPath, needs
from convert.engine.values import BadValue, shown
from convert.roll import facts
from convert.roll.converters import KEYS, POLICY, count, is_one_of, named_devices, paths, reason, role_of
from schema.config.overrides import is_dropout

ROLE = "actor_train"


# --- mesh and batches ---------------------------------------------------------------------------------------


def _policy_devices(context: ConversionContext, leaf: KeyPath) -> Result:
    placed = named_devices(context, leaf)
    if placed is None:
        return implicit("null: no devices are named")
    sizes = facts.mesh(context).sizes("policy")
    return mapped(("placement.policy", placed), *sizes, note=count(len(placed), "device"))


def _dimension(context: ConversionContext, leaf: KeyPath) -> Result:
    """One size of the mesh, checked against the others."""
    name = leaf.ours[0].rpartition(".")[2].removesuffix("_size")
    return leaf.to(getattr(facts.mesh(context), name))


def _fsdp_size(context: ConversionContext, leaf: KeyPath) -> Result:
    shape = facts.mesh(context)
    hybrid = shape.dp_replicate != 1
    note = f"HSDP: {shape.world} / {values.integer(leaf.value)} replicas" if hybrid else "pure FSDP2"
    return leaf.to(shape.dp_shard, shape.dp_replicate, note=note)


# --- model --------------------------------------------------------------------------------------------------


def _no_checkpointing(context: ConversionContext, leaf: KeyPath) -> Result:
    keys = (facts.config_key(ROLE, name) for name in ("recompute_granularity", "moe_layer_recompute"))
    if facts.strategy(context, ROLE).startswith("megatron") and any(context.get(key, None) for key in keys):
        return implicit("recompute_granularity and moe_layer_recompute decide for Megatron")
    return leaf.to(not values.flag(leaf.value))


def _attention(context: ConversionContext, leaf: KeyPath) -> Result:
    versions = {"fa2": 2, "flash_attention_2": 2, "fa3": 3, "flash_attention_3": 3}
    if is_one_of(leaf.value, versions):
        return leaf.to(versions[leaf.value])
    if leaf.value in (None, "sdpa", "auto", "eager", "disabled"):
        return implicit("the model's own attention; exact in every case")
    raise BadValue(f"expected sdpa, auto, fa2 or fa3, got {shown(leaf.value)}")


def _parts(value: Any) -> list[str]:
    """Names of a list, or of a text with commas between them."""
    return [part.strip() for text in values.texts(value) for part in text.split(",")]


def _freeze(context: ConversionContext, leaf: KeyPath) -> Result:
    prefixes = filter(None, _parts(leaf.value))
    context.warn(
        f"freeze_module_prefix = {shown(leaf.value)} freezes every parameter whose name begins so; "
        "policy.trainable_map takes exact names of the transformers model: see that these are such names"
    )
    return leaf.to(dict.fromkeys(prefixes, False))


def _lora_target(context: ConversionContext, leaf: KeyPath) -> Result:
    names = list(filter(None, _parts(leaf.value)))
    return leaf.to("all-linear" if names in (["all"], ["all-linear"]) else names)


_without_lora = facts.only_with(
    lambda context: bool(context.get(f"{ROLE}.model_args.lora_target", None)), "no adapters: lora_target is not set"
)


def _lora_alpha(context: ConversionContext, leaf: KeyPath) -> Result:
    rank = context.integer(f"{ROLE}.model_args.lora_rank", 8) or 8
    return leaf.to(2 * rank if leaf.value is None else values.number(leaf.value))


def _override(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, {}):
        return implicit("no override")
    if not leaf.rest:
        raise BadValue(f"expected a table, got {shown(leaf.value)}")
    if is_dropout(leaf.rest):
        return implicit("dropout is off in training: log-probs would be of another model")
    return mapped((f"policy.override_config.{leaf.rest}", leaf.value))


# --- strategy -----------------------------------------------------------------------------------------------


_unpacked = needs(f"{ROLE}.use_sequence_packing", "packing is off")
_fixed_in_train = needs(f"{ROLE}.use_dynamic_batching_in_train", "dynamic batching is off")
_fixed_in_infer = needs(f"{ROLE}.use_dynamic_batching_in_infer", "dynamic batching is off")


def _sequence_parallel(context: ConversionContext, leaf: KeyPath) -> Result:
    is_on = leaf.value is not None and values.flag(leaf.value)
    if is_on and facts.mesh(context).tp == 1:
        return leaf.to(False, note="Megatron ignores it: tensor_model_parallel_size = 1 has one rank")
    return leaf.to(is_on)


def _model_only(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("model, optimizer and the rest are saved")
    return leaf.to(["model"])


def _router_replay(context: ConversionContext, leaf: KeyPath) -> Result:
    mode = values.one_of(leaf.value, ("disable", "R2", "R3"))
    if mode == "disable":
        return implicit("the trainer chooses experts by itself")
    return no_counterpart(reason(leaf.key)) if mode == "R2" else leaf.to("ids")


# --- optimizer ----------------------------------------------------------------------------------------------


def _betas(context: ConversionContext, leaf: KeyPath) -> Result:
    values.number(leaf.value)
    defaults = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    return leaf.to([context.number(f"{ROLE}.training_args.{key}", beta) for key, beta in defaults.items()])


def _epochs(context: ConversionContext, leaf: KeyPath) -> Result:
    if (context.integer("max_steps", 500) or 0) > 0:
        return implicit("max_steps ends the run, whatever num_train_epochs says")
    return leaf.to(max(math.ceil(values.number(leaf.value)), 1))


def _precision(context: ConversionContext, leaf: KeyPath) -> Result:
    if not values.flag(leaf.value):
        return implicit("model_args.dtype decides")
    return leaf.to("bfloat16" if leaf.name == "bf16" else "float16")


def _per_device(context: ConversionContext, leaf: KeyPath) -> Result:
    samples, shape = values.integer(leaf.value), facts.mesh(context)
    if shape.pp == 1:
        return leaf.to(samples)
    steps = context.integer(f"{ROLE}.training_args.gradient_accumulation_steps", 1) or 1
    pieces = steps if steps % shape.pp == 0 else shape.pp
    together, piece = zip(leaf.ours, (samples * pieces, samples), strict=True)
    return mapped(piece, together, note=f"{pieces} pieces go through the pipeline together")


def _accumulation(context: ConversionContext, leaf: KeyPath) -> Result:
    batch, formula = facts.global_batch(context)
    samples = facts.samples_per_step(context)
    if batch == samples:
        return implicit(f"global batch {formula}, all samples of a rollout: one optimizer step, as here")
    if batch > samples:
        shape = facts.mesh(context)
        per_device = context.integer(f"{ROLE}.training_args.per_device_train_batch_size", 8) or 1
        steps, remainder = divmod(samples * shape.model_ranks, per_device * shape.world)
        remedy = "" if remainder else f"; {steps} would make it one optimizer step"
        context.warn(
            f"the global batch {formula} is more than the {samples} samples of a rollout: ROLL would never "
            f"fill it; one optimizer step for the whole rollout is written{remedy}"
        )
        return implicit(f"global batch {formula} > {samples} samples: one optimizer step for all of them")
    if samples % batch:
        context.warn(
            f"the global batch {formula} does not divide the {samples} samples of a rollout: ROLL leaves out "
            f"the last {samples % batch}, here every sample is trained on"
        )
    note = f"global batch {formula}; {samples} samples a rollout: {samples / batch:g} optimizer steps"
    return leaf.to(batch, note=note)


# --- data ---------------------------------------------------------------------------------------------------


_DATA = f"{ROLE}.data_args"


def _is_set(value: Any) -> bool:
    return True


def _eval_files(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.get("validation.data_args.file_name", None):
        return implicit("validation.data_args.file_name is taken instead")
    return leaf.to(paths(leaf.value))


def _messages(context: ConversionContext, leaf: KeyPath) -> Result:
    if context.get(f"{_DATA}.prompt", None) is not None:
        context.warn(
            "data_args.prompt and data_args.messages exclude each other, and ROLL refuses both; prompt is taken"
        )
        return implicit("data_args.prompt is taken; ROLL refuses both")
    return leaf.to(values.text(leaf.value))


def _shares(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, {}):
        return implicit("no shares")
    domains = context.below(f"{_DATA}.domain_interleave_probs")
    if len(domains) <= 1:
        return implicit("one domain: all prompts are its")
    context.warn(
        "domain_shares counts a row by its value in domain_column_name, ROLL by the reward whose tag_included "
        "holds that value: where they differ, write the domain into the column"
    )
    share, key = values.number(leaf.value), f"{POLICY}.domain_shares.{leaf.rest}"
    *others, last = domains
    remainder = round(1.0 - math.fsum(values.number(domains[name]) for name in others), 12)
    if leaf.rest != last or abs(remainder - share) <= 1e-6:
        return mapped((key, share))
    if remainder <= 0:
        raise BadValue(
            f"the other domains have {1.0 - remainder:g} in all and leave nothing for {last}, the last one"
        )
    context.warn(
        f"domain_interleave_probs do not add up to 1: ROLL gives {last}, the last domain, what the others leave of a "
        f"batch, {remainder:g} in place of {share:g}"
    )
    return mapped((key, remainder), note="ROLL gives the last domain what the others leave")


def _tag(context: ConversionContext, leaf: KeyPath) -> Result:
    if len(context.below(f"{_DATA}.domain_interleave_probs")) <= 1:
        return implicit("one domain: no shares to keep")
    return leaf.to(values.text(leaf.value))


def _prompt(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    context.warn(
        f"data_args.prompt = {name}: ROLL gives a model the text of this column as it is, without a chat template. "
        "Here it is the user's message in the model's own template; for the bare text write a file with "
        "{{ messages[0]['content'] }} and name it in rollout.multi_turn_config.custom_chat_template_path"
    )
    return leaf.to(name)


ACTOR_TRAIN_RULES = KEYS.rules("actor_train", globals())


# --- reference and critic, with meshes of their own ---------------------------------------------------------


_no_reference = facts.only_with(facts.has_reference, "no KL term reads a reference model: none is loaded")


def _sizes(context: ConversionContext, role: str) -> list[tuple[str, int]]:
    """The whole mesh of a role, as sizes that are not written are not ROLL's; nothing where it is the policy's."""
    shape = facts.mesh(context, role)
    return [] if shape == facts.mesh(context) else shape.sizes(role)


def _role_devices(context: ConversionContext, leaf: KeyPath) -> Result:
    """Devices and mesh of a role: written where they are not the policy's."""
    placed = named_devices(context, leaf)
    if placed is None:
        return implicit("null: the policy's devices")
    targets: list[tuple[str, Any]] = []
    if placed != facts.devices(context, "actor_train"):
        targets.append((leaf.ours[0], placed))
    targets += _sizes(context, role_of(leaf))
    return mapped(*targets) if targets else implicit("devices and mesh are the policy's")


def _role_size(context: ConversionContext, leaf: KeyPath) -> Result:
    """One size of a role's mesh."""
    sizes = _sizes(context, role_of(leaf))
    return mapped(*sizes) if sizes else implicit("the mesh is the policy's")


def _role_sequence_parallel(context: ConversionContext, leaf: KeyPath) -> Result:
    shape, is_on = facts.mesh(context, role_of(leaf)), values.flag(leaf.value)
    if shape.tp == 1:
        return implicit("no effect without tensor parallelism")
    return implicit("the mesh is the policy's") if shape == facts.mesh(context) else leaf.to(is_on)


def _policy_dtype(context: ConversionContext) -> Any:
    return context.get("actor_train.model_args.dtype", "bf16")


def _reference_model(context: ConversionContext, leaf: KeyPath) -> Result:
    keys = [f"{role}.model_args.model_name_or_path" for role in ("actor_train", "actor_infer", "reference")]
    if any(context.get(key, None) is None for key in keys) and context.has("pretrain"):
        return implicit("ROLL takes pretrain unless all three roles name a model")
    if leaf.value in (context.get(keys[0], None), context.get("pretrain", None)):
        return implicit("the policy's initial weights")
    return leaf.to(values.path(leaf.value))


def _critic_accumulation(context: ConversionContext, leaf: KeyPath) -> Result:
    batch, formula = facts.global_batch(context, "critic")
    if batch >= facts.samples_per_step(context):
        return implicit(f"global batch {formula}: one optimizer step for the whole rollout")
    return leaf.to(batch, note=f"global batch {formula}")


def _is_off(value: Any) -> bool:
    return not values.flag(value)


_path_of = values.path

ROLE_RULES = tuple(rule for role in ("reference", "critic") for rule in KEYS.rules(role, {"role": role}, globals()))
