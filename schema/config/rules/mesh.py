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
    ranks_per_shard,
    reference_is_within,
)
from schema.config.loading.tomlwrite import toml_value
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.idle import written
from schema.config.rules.rows import Each, Row, Rule, refused, value_at
from schema.config.sections.policy import ParallelismConfig

_WHOLE = ("model", "optimizer", "extra")
"""Contents of a checkpoint from which training goes on as if nothing had happened."""
_POLICY, _CAP = "train.train_policy", "max_token_len_per_mini_batch"
_REPLICAS = "policy.parallelism.n_init_replicas"


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
    if config.has_critic and (mesh := critic.parallelism) is not None:
        own = _first((f"critic.{_CAP}", critic.max_token_len_per_mini_batch))
        yield TrainerMesh("critic.parallelism", mesh, "critic.mini_batch", critic.mini_batch, own)
    if config.has_reference and (mesh := reference.parallelism) is not None:
        caps = (f"reference.{_CAP}", reference.max_token_len_per_mini_batch)
        own = _first(caps, ("reference.mini_batch", reference.mini_batch))
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
            says = f"{{}} is not {{{_REPLICAS}=}}, whose ranks it is on"
            yield refused(config, f"{section}.n_init_replicas", says)
        yield from _wrong_ranks(config, section, mesh)


def _wrong_ranks(config: Config, section: str, mesh: ParallelismConfig) -> Iterator[Problem]:
    ranks, per_shard, mesh_ranks = policy_ranks(config), ranks_per_shard(mesh), ranks_of(mesh)
    makes, policy_mesh = (
        f"{{}} makes a mesh of {mesh_ranks or per_shard} ranks ({mesh_text(mesh)})",
        mesh_text(config.policy.parallelism),
    )
    name, hint, fault = "dp_shard_size", "", ""
    if ranks is None:  # as many as there are devices
        least = policy_layout(config).ranks_per_shard
        if mesh_ranks is not None and mesh_ranks % least:
            fault, hint = f": no multiple of {least} ({policy_mesh})", "write {!} = -1, or a multiple"
    elif mesh_ranks != ranks and (mesh_ranks is not None or ranks % per_shard):
        fault = f", and the policy's has {ranks} ({policy_mesh})"
        hint = f"write {{!}} = {ranks // per_shard}, or -1 for all that are left"
        if ranks % per_shard:
            sizes = ("tp_size", "cp_size", "pp_size", "dp_replicate_size")
            names = [size for size in sizes if getattr(mesh, size) > 1]
            unit_sizes, name = "".join(f"{section}.{size} = 1 and " for size in names), names[0]
            hint = f"write {unit_sizes}{section}.dp_shard_size = {ranks}, or other sizes whose product is {ranks}"
    if fault:
        yield refused(config, f"{section}.{name}", makes + fault, hint, ("policy.parallelism",))


def own_meshes_stand_alone(config: Config) -> Iterator[Problem]:
    """A model with a mesh of its own excludes features that need it on the policy's mesh or on other devices."""
    for layout in apart_layouts(config):
        if own_mesh(config, layout.name) is not None:
            key, words = f"{layout.name}.parallelism", "this build cannot do one over devices of its own yet"
            message = f"is a mesh over the policy's ranks: {words} ({layout.key} = {layout.listed})"
            yield Problem(key, message, None, f"leave [{key}] or {layout.key} out", related=(layout.key,))
    if not config.has_reference or own_mesh(config, "reference") is None:
        return
    grpo, key, interval = config.grpo, "reference.parallelism", config.grpo.reference_reset_interval
    full = '"full" compares probabilities of all tokens, for which the reference\'s states must be where the '
    full += "policy's are"
    copy = f"{interval} makes it a copy of the policy, which this build cannot do yet in another mesh"
    kinds = {f"{_POLICY}.kl_type": (grpo.kl_beta, grpo.kl_type)}
    kinds[f"{_POLICY}.kl_in_reward.type"] = (grpo.kl_in_reward.beta, grpo.kl_in_reward.type)
    reasons = {other: full for other, (beta, kind) in kinds.items() if beta and kind == "full"}
    if reference_is_within(config):
        reasons["policy.lora"] = "makes the reference model the policy without its adapters"
    if interval:
        reasons[f"{_POLICY}.reference_reset_interval"] = copy
    for other, reason in reasons.items():
        message = f"is a mesh of the reference model's own, and {other} = {reason}"
        hint = f"leave [{key}] out, so that its mesh is the policy's"
        yield Problem(key, message, None, hint, related=(other,))


def stages_have_a_pipeline(config: Config) -> Iterator[Problem]:
    """Options of the pipeline need one, and its micro-batches come out whole."""
    for section, mesh, batch_key, batch, instead in trainer_meshes(config):
        if mesh.pp_size == 1:
            says = "{} belongs to a pipeline, and {.pp_size=} has none"
            hint = "leave it out, or choose a larger {.pp_size!}"
            for name, _ in written(mesh, "virtual_pp_size", "pp_micro_batch_size", "pp_schedule"):
                yield refused(config, f"{section}.{name}", says, hint)
        elif instead is None:
            yield from _pipeline_batches(config, section, mesh, batch_key, batch)
        elif any(written(mesh, "pp_micro_batch_size")):
            by = " by their tokens" if instead[0].endswith(_CAP) else ""
            says = f"{{}} has no effect: {{{instead[0]}=}} cuts micro-batches{by}"
            hint = f"leave it out, or {instead[0]}"
            yield refused(config, f"{section}.pp_micro_batch_size", says, hint)


def _pipeline_batches(
    config: Config, section: str, mesh: ParallelismConfig, batch_key: str, batch: int
) -> Iterator[Problem]:
    unit = mesh.pp_micro_batch_size * mesh.pp_size
    if batch % unit:
        says = f"{{{batch_key}=}} samples cannot be cut into pieces of {{}}, a multiple of {{.pp_size=}} in number"
        hint = f"write {batch_key} = {max(batch // unit, 1) * unit}, or a smaller {{!}}"
        yield refused(config, f"{section}.pp_micro_batch_size", says, hint)


def dispatch_has_ranks(config: Config) -> Iterator[Problem]:
    """How tokens travel between experts matters when these are on several ranks, which have other tokens."""
    policy, overlap = config.policy, "policy.moe_shared_expert_overlap"
    meshes = [written_mesh.mesh for written_mesh in trainer_meshes(config)]
    exchange = any(mesh.sequence_parallel or mesh.ep_size not in (1, mesh.tp_size) for mesh in meshes)
    if not exchange and all(mesh.ep_size == 1 for mesh in meshes):
        says = "{} has no effect: {policy.parallelism.ep_size=} keeps all experts on each rank"
        hint = "leave it out, or choose a larger {policy.parallelism.ep_size!}"
        for name, _ in written(policy, "moe_token_dispatcher", "moe_shared_expert_overlap"):
            yield refused(config, f"policy.{name}", says, hint)
    elif policy.moe_shared_expert_overlap and not exchange:
        size, other = "policy.parallelism.tp_size", "policy.parallelism.sequence_parallel"
        says = f"true has no effect: the {{{size}}} ranks of {size} have the same tokens, which "
        says += "travel nowhere"
        yield refused(config, overlap, says, f"write {{!}} = false, or {other} = true", (other,))
    elif policy.moe_shared_expert_overlap and policy.moe_token_dispatcher == "allgather":  # noqa: S105
        says = "true overlaps with an all-to-all, and {.moe_token_dispatcher=}"
        yield refused(config, overlap, says, 'write {.moe_token_dispatcher!} = "alltoall", or {!} = false')


def engines_have_such_a_mesh(config: Config) -> Iterator[Problem]:
    """Sizes that an inference engine does not have, whatever a trainer can do."""
    if not config.generates:
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
        hint = "leave it out"
        if name == "dp_replicate_size":
            hint = f"write {{!}} = 1 and {{.n_init_replicas!}} = {mesh.n_init_replicas * value}"
        yield refused(config, f"{section}.{name}", f"{{}} is not possible: {never[name]}", hint)
    shards = max(1, mesh.dp_shard_size)
    ranks = mesh.tp_size * shards
    if mesh.ep_size not in (1, ranks):
        says = (
            f"{{}} is not possible: the engine spreads experts over all {ranks} ranks of a stage "
            f"({{.tp_size=}} * {{.dp_shard_size!}} = {shards}) or not at all"
        )
        hint = f"write {{!}} = {ranks}" + ("" if ranks == 1 else ", or 1")
        yield refused(config, f"{section}.ep_size", says, hint, (".tp_size", ".dp_shard_size"))


def ranks_are_countable(config: Config) -> Iterator[Problem]:
    """Replicas times their ranks: each factor is bounded by its field, the product here."""
    for role in layouts(config):
        section, size = f"{role.name}.parallelism", role.ranks_per_shard * (role.shards or 1)
        total = role.replicas * size
        if total > MOST_RANKS:
            says = f"{{}} replicas of {size} ({mesh_text(value_at(config, section))}) are {total} ranks, more than "
            fitting = MOST_RANKS * role.replicas // total
            hint = f"write {{!}} = {fitting}" if fitting else f"write smaller sizes in [{section}]"
            yield refused(config, f"{section}.n_init_replicas", says + str(MOST_RANKS), hint, (section,))


def several_trainers_share_their_work(config: Config) -> Iterator[Problem]:
    """Policy replicas exchange gradients and log-probs of parts of a batch, and load each other's checkpoints."""
    replicas, saved = config.policy.parallelism.n_init_replicas, config.train.ckpt.save_contents
    if replicas == 1 or config.is_evaluation:
        if any(written(config.policy, "exchange")):
            yield refused(config, "policy.exchange", f"{{{_REPLICAS}=}}: there is nobody to exchange gradients with")
        return
    for other, value, why in _kept_alone(config):
        message = f"{replicas} policy replicas do not share {why}: {other} = {toml_value(value)}"
        hint = f"write {_REPLICAS} = 1 with more ranks of that one (dp_shard_size, dp_replicate_size)"
        yield Problem(_REPLICAS, message, replicas, hint, related=(other,))
    says = f"of {replicas} policy replicas one that comes back "
    if not config.train.ckpt.enable_checkpoint:
        key, hint = "train.ckpt.enable_checkpoint", "write {!} = true"
        yield refused(config, key, f"false, and {says}loads a checkpoint of the others", hint, (_REPLICAS,))
    if missing := [name for name in _WHOLE if name not in saved]:
        says += f"would not have the others' {' and '.join(missing)}"
        hint = f"write {{!}} = {toml_value(list(_WHOLE))}"
        yield refused(config, "train.ckpt.save_contents", says, hint, (_REPLICAS,))


def _kept_alone(config: Config) -> Iterator[tuple[str, Any, str]]:
    """(key, value, what it is) of what is computed by one policy replica alone."""
    if not config.is_grpo:
        return
    if config.teacher:
        yield "teacher", [teacher.name for teacher in config.teacher], "the answers of teachers"
    if config.shares_time:
        yield "placement.share", config.placement.share, "devices with rollout replicas"
    for role in ("reference", "critic"):
        if getattr(config, f"has_{role}") and own_mesh(config, role):
            yield f"{role}.parallelism", mesh_text(mesh_of(config, role)), f"a {role} with a mesh of its own"


Mesh = Row[ParallelismConfig]


def _meshes(config: Config) -> Iterator[tuple[str, ParallelismConfig]]:
    return ((trainer_mesh.section, trainer_mesh.mesh) for trainer_mesh in trainer_meshes(config))


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
