"""The other roles of ROLL's training: reference model and critic, with meshes of their own."""

from __future__ import annotations

from typing import Any

from convert.engine import values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath
from convert.roll.converters import KEYS, named_devices, role_of
from convert.roll.facts import devices, global_batch, has_reference, mesh, only_with, samples_per_step

_no_reference = only_with(has_reference, "no KL term reads a reference model: none is loaded")


def _sizes(context: ConversionContext, role: str) -> list[tuple[str, int]]:
    """The whole mesh of a role, as sizes that are not written are not ROLL's; nothing where it is the policy's."""
    shape = mesh(context, role)
    return [] if shape == mesh(context) else shape.sizes(role)


def _role_devices(context: ConversionContext, leaf: KeyPath) -> Result:
    """Devices and mesh of a role: written where they are not the policy's."""
    placed = named_devices(context, leaf)
    if placed is None:
        return implicit("null: the policy's devices")
    targets: list[tuple[str, Any]] = []
    if placed != devices(context, "actor_train"):
        targets.append((leaf.ours[0], placed))
    targets += _sizes(context, role_of(leaf))
    return mapped(*targets) if targets else implicit("devices and mesh are the policy's")


def _role_size(context: ConversionContext, leaf: KeyPath) -> Result:
    """One size of a role's mesh."""
    sizes = _sizes(context, role_of(leaf))
    return mapped(*sizes) if sizes else implicit("the mesh is the policy's")


def _role_sequence_parallel(context: ConversionContext, leaf: KeyPath) -> Result:
    shape, asked = mesh(context, role_of(leaf)), values.flag(leaf.value)
    if shape.tp == 1:
        return implicit("no effect without tensor parallelism")
    return implicit("the mesh is the policy's") if shape == mesh(context) else leaf.to(asked)


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
    batch, formula = global_batch(context, "critic")
    if batch >= samples_per_step(context):
        return implicit(f"global batch {formula}: one optimizer step for the whole rollout")
    return leaf.to(batch, note=f"global batch {formula}")


def _is_off(value: Any) -> bool:
    return not values.flag(value)


_path_of = values.path

ROLE_RULES = tuple(
    rule for role in ("reference", "critic") for rule in KEYS.rules(role, {"role": role}, globals())
)
