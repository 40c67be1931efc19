"""Rules of meshes that need no model: which sizes go together, and what an inference engine does not have.

A trainer's mesh has dp_replicate * dp_shard * cp * tp ranks in each of pp stages; experts are spread over the ranks
of one stage. vLLM's engine has tp * dp ranks in each of pp stages and spreads experts over all of a stage or not at
all.
"""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.base import MOST_RANKS
from schema.config.layout import layouts, mesh_text
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written
from schema.config.sections.policy import ParallelismConfig

_POLICY = "train.train_policy"


def trainer_meshes(config: Config) -> Iterator[tuple[str, ParallelismConfig, str, int]]:
    """Each training mesh that is written: section, mesh, key and size of its micro-batch."""
    data = config.train.train_policy
    yield "policy.parallelism", config.policy.parallelism, f"{_POLICY}.mini_batch", data.mini_batch
    if config.is_grpo and config.critic.enable and config.critic.parallelism is not None:
        yield "critic.parallelism", config.critic.parallelism, "critic.mini_batch", config.critic.mini_batch


def stages_have_a_pipeline(config: Config) -> Iterator[Problem]:
    """Options of the pipeline need one, and its micro-batches come out whole."""
    for section, mesh, batch_key, batch in trainer_meshes(config):
        size_key = f"{section}.pp_size"
        if mesh.pp_size == 1:
            for name, value in written(mesh, "virtual_pp_size", "pp_micro_batch_size", "pp_schedule"):
                message = f"{toml_value(value)} belongs to a pipeline, and {size_key} = 1 has none"
                hint = f"leave it out, or choose a larger {size_key}"
                yield Problem(f"{section}.{name}", message, value, hint, related=(size_key,))
        elif (cap := config.train.train_policy.max_token_len_per_mini_batch) is None:
            yield from _pipeline_batches(section, mesh, batch_key, batch)
        else:
            for name, value in written(mesh, "pp_micro_batch_size"):
                cap_key = f"{_POLICY}.max_token_len_per_mini_batch"
                message = f"{value} has no effect: {cap_key} = {cap} cuts micro-batches by their tokens"
                hint = f"leave it out, or {cap_key}"
                yield Problem(f"{section}.{name}", message, value, hint, related=(cap_key,))


def stages_take_any_shape(config: Config) -> Iterator[Problem]:
    """Micro-batches keep their lengths in a pipeline."""
    for section, mesh, _, _ in trainer_meshes(config):
        if mesh.pp_size > 1 and not mesh.pp_dynamic_shape:
            key, size_key = f"{section}.pp_dynamic_shape", f"{section}.pp_size"
            message = (
                f"false is not possible with {size_key} = {mesh.pp_size}: micro-batches have lengths of their own, "
                f"which each stage knows"
            )
            yield Problem(key, message, False, "leave it out", related=(size_key,))


def _pipeline_batches(section: str, mesh: ParallelismConfig, batch_key: str, batch: int) -> Iterator[Problem]:
    piece_key, size_key, piece = (
        f"{section}.pp_micro_batch_size",
        f"{section}.pp_size",
        mesh.pp_micro_batch_size,
    )
    if batch % piece == 0 and (batch // piece) % mesh.pp_size == 0:
        return
    unit = piece * mesh.pp_size
    message = (
        f"{batch_key} = {batch} samples cannot be cut into pieces of {piece}, a multiple of {size_key} = "
        f"{mesh.pp_size} in number"
    )
    hint = f"write {batch_key} = {max(batch // unit, 1) * unit}, or a smaller {piece_key}"
    yield Problem(piece_key, message, piece, hint, related=(batch_key, size_key))


def sequences_are_split_by_tensors(config: Config) -> Iterator[Problem]:
    """Sequence parallelism is a part of tensor parallelism."""
    for section, mesh, _, _ in trainer_meshes(config):
        if mesh.sequence_parallel and mesh.tp_size == 1:
            key, size_key = f"{section}.sequence_parallel", f"{section}.tp_size"
            message = f"true splits sequences over tensor-parallel ranks, and {size_key} = 1 has one"
            hint = f"write {key} = false, or {size_key} = 2"
            yield Problem(key, message, True, hint, related=(size_key,))


def experts_have_ranks(config: Config) -> Iterator[Problem]:
    """Experts are shared by ranks with other tokens, of dp_shard_size; or by those of tp_size, with the same."""
    for section, mesh, _, _ in trainer_meshes(config):
        key, size, tp = f"{section}.ep_size", mesh.ep_size, f"{section}.tp_size"
        shards, pieces = f"{section}.dp_shard_size", f"{section}.cp_size"
        if size in (1, mesh.tp_size):
            continue
        if mesh.tp_size > 1:
            message = (
                f"this build cannot do {size} yet next to {tp} = {mesh.tp_size}, whose ranks share the experts of a "
                "layer"
            )
            yield Problem(key, message, size, f"write {key} = {mesh.tp_size}", related=(tp,))
        elif mesh.cp_size > 1:
            message = (
                f"this build cannot do shared experts next to {pieces} = {mesh.cp_size} yet, whose ranks have pieces "
                "of sequences"
            )
            yield Problem(key, message, size, f"write {pieces} = 1, or {key} = 1", related=(pieces,))
        elif mesh.dp_shard_size != -1 and mesh.dp_shard_size % size:
            message = f"{size} does not divide the {mesh.dp_shard_size} ranks of {shards}"
            hint = f"write {key} = {mesh.dp_shard_size}, or {shards} = {size}"
            yield Problem(key, message, size, hint, related=(shards,))


def dispatch_has_ranks(config: Config) -> Iterator[Problem]:
    """How tokens travel between experts matters when these are on several ranks, which have other tokens."""
    policy, size_key = config.policy, "policy.parallelism.ep_size"
    dispatcher = policy.moe_token_dispatcher
    key, mesh = "policy.moe_shared_expert_overlap", policy.parallelism
    if policy.parallelism.ep_size > 1 or policy.parallelism.sequence_parallel:
        if policy.moe_shared_expert_overlap and mesh.tp_size > 1 and not mesh.sequence_parallel:
            other = "policy.parallelism.sequence_parallel"
            message = (
                f"true has no effect: the {mesh.tp_size} ranks of policy.parallelism.tp_size have the same tokens, "
                "which travel nowhere"
            )
            yield Problem(key, message, True, f"write {key} = false, or {other} = true", related=(other,))
        elif policy.moe_shared_expert_overlap and dispatcher == "allgather":
            other = "policy.moe_token_dispatcher"
            message = f'true overlaps with an all-to-all, and {other} = "{dispatcher}"'
            hint = f'write {other} = "alltoall", or {key} = false'
            yield Problem(key, message, True, hint, related=(other,))
        return
    for name, value in written(policy, "moe_token_dispatcher", "moe_shared_expert_overlap"):
        message = f"{toml_value(value)} has no effect: {size_key} = 1 keeps all experts on each rank"
        hint = f"leave it out, or choose a larger {size_key}"
        yield Problem(f"policy.{name}", message, value, hint, related=(size_key,))


def engines_have_such_a_mesh(config: Config) -> Iterator[Problem]:
    """Sizes that an inference engine does not have, whatever a trainer can do."""
    if not config.is_grpo:
        return
    mesh, section = config.rollout.parallelism, "rollout.parallelism"
    never = {
        "dp_replicate_size": f"copies of an engine are replicas of their own: {section}.n_init_replicas",
        "cp_size": "an inference engine is not split along the sequence",
        "pp_micro_batch_size": "an inference engine cuts its own micro-batches",
        "virtual_pp_size": "an inference engine has one stage per rank",
        "pp_dynamic_shape": "an inference engine takes any shape",
        "pp_schedule": "an inference engine has its own schedule",
        "sequence_parallel": "an inference engine splits what it can by itself",
    }
    for name, value in written(mesh, *never):
        key, hint = f"{section}.{name}", "leave it out"
        yield Problem(key, f"{toml_value(value)} is not possible: {never[name]}", value, hint)
    ranks = mesh.tp_size * max(1, mesh.dp_shard_size)
    if mesh.ep_size not in (1, ranks):
        key, sizes = f"{section}.ep_size", (f"{section}.tp_size", f"{section}.dp_shard_size")
        message = (
            f"{mesh.ep_size} is not possible: the engine spreads experts over all {ranks} ranks of a stage "
            f"({sizes[0]} = {mesh.tp_size} * {sizes[1]} = {max(1, mesh.dp_shard_size)}) or not at all"
        )
        hint = f"write {key} = {ranks}" + ("" if ranks == 1 else ", or 1")
        yield Problem(key, message, mesh.ep_size, hint, related=sizes)


def ranks_are_countable(config: Config) -> Iterator[Problem]:
    """Replicas times their ranks: each factor is bounded by its field, the product here."""
    for role in layouts(config):
        total, section = role.replicas * role.unit * (role.shards or 1), f"{role.name}.parallelism"
        if total > MOST_RANKS:
            mesh = config.policy.parallelism if role.name == "policy" else config.rollout.parallelism
            message = (
                f"{role.replicas} replicas of {role.unit * (role.shards or 1)} ({mesh_text(mesh)}) are {total} "
                f"ranks, more than {MOST_RANKS}"
            )
            key = f"{section}.n_init_replicas"
            fitting = MOST_RANKS * role.replicas // total
            hint = f"write {key} = {fitting}" if fitting else f"write smaller sizes in [{section}]"
            yield Problem(key, message, role.replicas, hint, related=(section,))


MESH_RULES = (
    ranks_are_countable,
    stages_have_a_pipeline,
    stages_take_any_shape,
    sequences_are_split_by_tensors,
    experts_have_ranks,
    dispatch_has_ranks,
    engines_have_such_a_mesh,
)
