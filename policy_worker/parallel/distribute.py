"""A model over all dimensions of a mesh: the parallelisms one after the other, each of which knows the mesh alone."""

from __future__ import annotations

import torch

from policy_worker.errors import SettingsError
from policy_worker.model.model import AnyModel
from policy_worker.parallel.context import apply_context
from policy_worker.parallel.experts import apply_ep
from policy_worker.parallel.fsdp import Units, apply_fsdp, needs_sharding
from policy_worker.parallel.kernels import compile_layers, convert_to_fp8
from policy_worker.parallel.mesh import EP, TP, ParallelDims
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.parallel.tensor import apply_tp
from schema.config.sections.optimizer import PrecisionKeys
from schema.config.sections.train import TrainingConfig


def check_heads(model: AnyModel, sizes: ParallelDims) -> None:
    """Whether ranks get whole heads, by transformers' own names for their numbers: a config.json may have others, of
    which the rules of the configuration know nothing. Raises `SettingsError`."""
    text = model.lm.config.get_text_config()
    names = {"attention heads": "num_attention_heads", "key/value heads": "num_key_value_heads"}
    counts = {words: getattr(text, name, None) for words, name in names.items()}
    if getattr(text, "kv_lora_rank", None):  # latent attention: keys and values of all heads come of one
        del counts["key/value heads"]
    for words, count in counts.items():
        # Of keys and values each piece of a context repeats what is missing.
        pieces = sizes.cp if words == "attention heads" else 1
        if isinstance(count, int) and count % (sizes.tp * pieces):
            asked = f"tp_size = {sizes.tp}" + (f" * cp_size = {pieces}" if pieces > 1 else "")
            raise SettingsError(
                f"{asked} does not divide the {count} {words} of {type(model.lm).__name__}: write sizes that do"
            )


def distribute(
    model: AnyModel,
    group: RankGroup,
    keys: PrecisionKeys,
    device: torch.device | None = None,
    *,
    frozen: bool = False,
    offload: bool = False,
    dispatcher: str = "alltoall",
    units: Units | None = None,
) -> AnyModel:
    """Keep of `model` what this rank has, on its device. A collective.

    device: where the ranks have a second mesh, for a role with devices of its own. frozen, offload, units: see
    `apply_fsdp`; those of what trains are in its keys. dispatcher: see `experts`.

    Raises `SettingsError`: the model cannot be cut so, or its layers cannot compute in fp8."""
    check_heads(model, group.sizes)
    ranks = group.sizes.fsdp_ranks
    if not frozen:
        offload, units = keys.fsdp_offload, Units.of_config(keys)
    shards = offload or ranks > 1 if frozen else needs_sharding(ranks, keys)
    mesh = None
    if shards or group.sizes.tp > 1:
        mesh = group.mesh() if device is None else group.second_mesh()
        apply_context(model, mesh)
        if group.sizes.tp > 1:
            apply_tp(model, mesh[TP], dispatcher if group.sizes.sequence else None)
            if model.routing_replay is not None:
                model.routing_replay.part = mesh[TP].get_local_rank(), group.sizes.tp
        elif group.sizes.ep > 1:
            apply_ep(model, mesh[EP], dispatcher)
    if isinstance(keys, TrainingConfig) and keys.fp8.enable_fp8 and not frozen:
        convert_to_fp8(model, keys.fp8)
    if keys.compile:
        compile_layers(model)
    if shards:
        return apply_fsdp(model, mesh, keys, frozen=frozen, offload=offload, units=units or Units())
    place = device or group.device
    return model.read_weights(place).to(place)
