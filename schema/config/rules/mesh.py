"""Rules of meshes that need no model: which sizes go together, and what an inference engine does not have.

A trainer's mesh has dp_replicate * dp_shard * cp * tp ranks in each of pp stages; experts are spread over the ranks
of one stage. vLLM's engine has tp * dp ranks in each of pp stages and spreads experts over all of a stage or not at
all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from schema.config.base import MOST_RANKS
from schema.config.layout import (
    apart_layouts,
    layouts,
    mesh_of,
    mesh_text,
    own_mesh,
    policy_layout,
    policy_ranks,
    ranks_of,
    reference_is_within,
    unit_of,
)
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written
from schema.config.rules.rows import Each, Row, Rule
from schema.config.sections.policy import ParallelismConfig

_WHOLE = ("model", "optimizer", "extra")
"""Contents of a checkpoint from which training goes on as if nothing had happened."""
_POLICY, _CAP = "train.train_policy", "max_token_len_per_mini_batch"


class TrainerMesh(NamedTuple):
    """One that is written. batch_key, batch: of its micro-batch. instead: what cuts the micro-batches of its pipeline
    in the place of `pp_micro_batch_size`, if anything."""

    section: str
    mesh: ParallelismConfig
    batch_key: str
    batch: int
    instead: tuple[str, int] | None


def trainer_meshes(config: Config) -> Iterator[TrainerMesh]:
    """Each training mesh that is written, that of the policy first."""
    data, critic, reference = config.train.train_policy, config.critic, config.reference
    batch_key, cap = f"{_POLICY}.mini_batch", f"{_POLICY}.{_CAP}"
    instead = _first((cap, data.max_token_len_per_mini_batch))
    yield TrainerMesh("policy.parallelism", config.policy.parallelism, batch_key, data.mini_batch, instead)
    if config.has_critic and critic.parallelism is not None:
        own = _first((f"critic.{_CAP}", critic.max_token_len_per_mini_batch))
        yield TrainerMesh(
            "critic.parallelism", critic.parallelism, "critic.mini_batch", critic.mini_batch, own
        )
    if config.has_reference and reference.parallelism is not None:
        own = _first(
            (f"reference.{_CAP}", reference.max_token_len_per_mini_batch),
            ("reference.mini_batch", reference.mini_batch),
        )
        mesh = reference.parallelism
        yield TrainerMesh("reference.parallelism", mesh, batch_key, data.mini_batch, own or instead)


def _first(*pairs: tuple[str, int | None]) -> tuple[str, int] | None:
    return next(((key, value) for key, value in pairs if value is not None), None)


def roles_have_the_policys_ranks(config: Config) -> Iterator[Problem]:
    """Reference model and critic are on all ranks of a policy replica, whatever their mesh."""
    policy, apart = config.policy.parallelism, {layout.name for layout in apart_layouts(config)}
    for section, mesh, *_ in trainer_meshes(config):
        if section.partition(".")[0] in {"policy", *apart}:
            continue
        if mesh.n_init_replicas != policy.n_init_replicas:
            key, other = f"{section}.n_init_replicas", "policy.parallelism.n_init_replicas"
            message = (
                f"{mesh.n_init_replicas} is not {other} = {policy.n_init_replicas}, whose ranks it is on"
            )
            yield Problem(key, message, mesh.n_init_replicas, "leave it out", related=(other,))
        yield from _wrong_ranks(config, section, mesh)


def _wrong_ranks(config: Config, section: str, mesh: ParallelismConfig) -> Iterator[Problem]:
    ranks, unit = policy_ranks(config), unit_of(mesh)
    found, words = ranks_of(mesh), mesh_text(mesh)
    other, theirs = "policy.parallelism", mesh_text(config.policy.parallelism)
    if ranks is None:  # as many as there are devices
        least = policy_layout(config).unit
        if found is not None and found % least:
            key, size = f"{section}.dp_shard_size", mesh.dp_shard_size
            message = f"{size} makes a mesh of {found} ranks ({words}): no multiple of {least} ({theirs})"
            yield Problem(key, message, size, f"write {key} = -1, or a multiple", related=(other,))
        return
    if found == ranks or (found is None and ranks % unit == 0):
        return
    name, hint = (
        "dp_shard_size",
        f"write {section}.dp_shard_size = {ranks // unit}, or -1 for all that are left",
    )
    if ranks % unit:
        sizes = ("tp_size", "cp_size", "pp_size", "dp_replicate_size")
        name, *more = [name for name in sizes if getattr(mesh, name) > 1]
        ones = "".join(f"{section}.{size} = 1 and " for size in (name, *more))
        hint = f"write {ones}{section}.dp_shard_size = {ranks}, or other sizes whose product is {ranks}"
    size = getattr(mesh, name)
    message = (
        f"{size} makes a mesh of {found or unit} ranks ({words}), and the policy's has {ranks} ({theirs})"
    )
    yield Problem(f"{section}.{name}", message, size, hint, related=(other,))


def own_meshes_stand_alone(config: Config) -> Iterator[Problem]:
    """A model with a mesh of its own excludes features that need it on the policy's mesh or on other devices."""
    for layout in apart_layouts(config):
        if own_mesh(config, layout.name) is not None:
            key = f"{layout.name}.parallelism"
            message = (
                f"is a mesh over the policy's ranks: this build cannot do one over devices of its own yet "
                f"({layout.key} = {layout.listed})"
            )
            yield Problem(key, message, None, f"leave [{key}] or {layout.key} out", related=(layout.key,))
    if not config.has_reference or own_mesh(config, "reference") is None:
        return
    grpo, key = config.grpo, "reference.parallelism"
    reasons: list[tuple[str, str]] = []
    full = "compares probabilities of all tokens, for which the reference's states must be where the policy's are"
    if grpo.kl_beta and grpo.kl_type == "full":
        reasons.append((f"{_POLICY}.kl_type", f'"full" {full}'))
    if grpo.kl_in_reward.beta and grpo.kl_in_reward.type == "full":
        reasons.append((f"{_POLICY}.kl_in_reward.type", f'"full" {full}'))
    if reference_is_within(config):
        reasons.append(("policy.lora", "makes the reference model the policy without its adapters"))
    if interval := grpo.reference_reset_interval:
        reason = f"{interval} makes it a copy of the policy, which this build cannot do yet in another mesh"
        reasons.append((f"{_POLICY}.reference_reset_interval", reason))
    for other, reason in reasons:
        hint = f"leave [{key}] out, so that its mesh is the policy's"
        yield Problem(
            key,
            f"is a mesh of the reference model's own, and {other} = {reason}",
            None,
            hint,
            related=(other,),
        )


def stages_have_a_pipeline(config: Config) -> Iterator[Problem]:
    """Options of the pipeline need one, and its micro-batches come out whole."""
    for section, mesh, batch_key, batch, instead in trainer_meshes(config):
        size_key = f"{section}.pp_size"
        if mesh.pp_size == 1:
            for name, value in written(mesh, "virtual_pp_size", "pp_micro_batch_size", "pp_schedule"):
                message = f"{toml_value(value)} belongs to a pipeline, and {size_key} = 1 has none"
                hint = f"leave it out, or choose a larger {size_key}"
                yield Problem(f"{section}.{name}", message, value, hint, related=(size_key,))
        elif instead is None:
            yield from _pipeline_batches(section, mesh, batch_key, batch)
        else:
            for name, value in written(mesh, "pp_micro_batch_size"):
                cap_key, cap = instead
                by = " by their tokens" if cap_key.endswith(_CAP) else ""
                message = f"{value} has no effect: {cap_key} = {cap} cuts micro-batches{by}"
                hint = f"leave it out, or {cap_key}"
                yield Problem(f"{section}.{name}", message, value, hint, related=(cap_key,))


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


def dispatch_has_ranks(config: Config) -> Iterator[Problem]:
    """How tokens travel between experts matters when these are on several ranks, which have other tokens."""
    policy, size_key = config.policy, "policy.parallelism.ep_size"
    dispatcher = policy.moe_token_dispatcher
    key, meshes = "policy.moe_shared_expert_overlap", [one.mesh for one in trainer_meshes(config)]
    exchange = any(mesh.sequence_parallel or mesh.ep_size not in (1, mesh.tp_size) for mesh in meshes)
    if exchange or any(mesh.ep_size > 1 for mesh in meshes):
        if policy.moe_shared_expert_overlap and not exchange:
            size, other = policy.parallelism.tp_size, "policy.parallelism.sequence_parallel"
            message = (
                f"true has no effect: the {size} ranks of policy.parallelism.tp_size have the same tokens, which "
                "travel nowhere"
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
        if name == "dp_replicate_size":
            hint = f"write {key} = 1 and {section}.n_init_replicas = {mesh.n_init_replicas * value}"
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


def several_trainers_share_their_work(config: Config) -> Iterator[Problem]:
    """Policy replicas exchange gradients and log-probs of parts of a batch, and load each other's checkpoints."""
    key, replicas = "policy.parallelism.n_init_replicas", config.policy.parallelism.n_init_replicas
    if replicas == 1 or config.is_evaluation:
        for name, value in written(config.policy, "exchange"):
            message = f"{key} = {replicas}: there is nobody to exchange gradients with"
            yield Problem(f"policy.{name}", message, value, "leave it out", related=(key,))
        return
    for other, value, why in _kept_alone(config):
        message = f"{replicas} policy replicas do not share {why}: {other} = {toml_value(value)}"
        hint = f"write {key} = 1 with more ranks of that one (dp_shard_size, dp_replicate_size)"
        yield Problem(key, message, replicas, hint, related=(other,))
    if not config.train.ckpt.enable_checkpoint:
        other = "train.ckpt.enable_checkpoint"
        message = (
            f"false, and of {replicas} policy replicas one that comes back loads a checkpoint of the others"
        )
        yield Problem(other, message, False, f"write {other} = true", related=(key,))
    if missing := [name for name in _WHOLE if name not in config.train.ckpt.save_contents]:
        other = "train.ckpt.save_contents"
        lacks = " and ".join(missing)
        message = f"of {replicas} policy replicas one that comes back would not have the others' {lacks}"
        hint = f"write {other} = {toml_value(list(_WHOLE))}"
        yield Problem(other, message, config.train.ckpt.save_contents, hint, related=(key,))


def _kept_alone(config: Config) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what it is) of what is computed by one policy replica alone."""
    if not config.is_grpo:
        return
    if config.teacher:
        yield "teacher", [one.name for one in config.teacher], "the answers of teachers"
    if config.takes_turns:
        yield "placement.share", config.placement.share, "devices with rollout replicas"
    for role in ("reference", "critic"):
        if getattr(config, f"has_{role}") and own_mesh(config, role):
            yield f"{role}.parallelism", mesh_text(mesh_of(config, role)), f"a {role} with a mesh of its own"


Mesh = Row[ParallelismConfig]


def _meshes(config: Config) -> Iterator[tuple[str, ParallelismConfig]]:
    return ((one.section, one.mesh) for one in trainer_meshes(config))


stages_take_any_shape = Each(
    _meshes,
    Mesh("pp_dynamic_shape", lambda mesh: mesh.pp_size > 1 and not mesh.pp_dynamic_shape,
        "false is not possible with {.pp_size=}: micro-batches have lengths of their own, which each stage knows"),
)  # fmt: skip
MESH_RULES: tuple[Rule, ...] = (
    several_trainers_share_their_work,
    roles_have_the_policys_ranks,
    own_meshes_stand_alone,
    ranks_are_countable,
    stages_have_a_pipeline,
    stages_take_any_shape,
    Each(
        _meshes,
        Mesh("sequence_parallel", lambda mesh: mesh.sequence_parallel and mesh.tp_size == 1,
            "true splits sequences over tensor-parallel ranks, and {.tp_size=} has one",
            "write {.sequence_parallel!} = false, or {.tp_size!} = 2"),
    ),
    Each(  # Experts are shared by ranks with other tokens, of dp_shard_size; or by those of tp_size, with the same.
        _meshes,
        Mesh("ep_size", lambda mesh: mesh.ep_size not in (1, mesh.tp_size) and mesh.tp_size > 1,
            "this build cannot do {} yet next to {.tp_size=}, whose ranks share the experts of a layer",
            "write {.ep_size!} = {.tp_size}"),
        Mesh("ep_size", lambda mesh: mesh.ep_size > 1 and mesh.tp_size == 1 and mesh.cp_size > 1,
            "this build cannot do shared experts next to {.cp_size=} yet, whose ranks have pieces of sequences",
            "write {.cp_size!} = 1, or {.ep_size!} = 1"),
        Mesh("ep_size",
            lambda mesh: mesh.tp_size == mesh.cp_size == 1
            and mesh.dp_shard_size != -1 and mesh.dp_shard_size % mesh.ep_size != 0,
            "{} does not divide the {.dp_shard_size} ranks of {.dp_shard_size!}",
            "write {.ep_size!} = {.dp_shard_size}, or {.dp_shard_size!} = {}", (".dp_shard_size",)),
    ),
    dispatch_has_ranks,
    engines_have_such_a_mesh,
)  # fmt: skip
