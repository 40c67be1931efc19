"""How many devices each role takes, and which of them `[placement]` names: arithmetic without a machine.

    devices of a role = replicas * ranks_per_shard * shards        ranks_per_shard = tp * cp * pp * dp_replicate
    shards: dp_shard_size; None while it is -1, which takes what there is

Expert parallelism spreads over these devices and needs none of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schema.config.root import Config
from schema.config.sections.placement import Devices, flat
from schema.config.sections.policy import ParallelismConfig


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """The devices of one role. `name`: its key in `[placement]`. `sized_by`: the role whose mesh it has."""

    name: str
    replicas: int
    ranks_per_shard: int
    shards: int | None
    listed: Devices
    sized_by: str

    @property
    def section(self) -> str:
        """The section that says how many devices it takes."""
        return f"{self.sized_by}.parallelism"

    @property
    def key(self) -> str:
        """The key of its device list."""
        return f"placement.{self.name}"

    @property
    def size(self) -> int | None:
        """Devices of one replica; None while dp_shard_size = -1 leaves it open."""
        return None if self.shards is None else self.ranks_per_shard * self.shards

    @property
    def nested(self) -> bool:
        """Whether the list names the devices of each replica."""
        return any(isinstance(item, list) for item in self.listed)

    @property
    def devices(self) -> list[int]:
        """Every listed device, in order."""
        return flat(self.listed)

    def dealt(self, devices: Sequence[int]) -> list[tuple[int, ...]]:
        """Devices by replica: equal parts in order. Their number has been checked."""
        part = len(devices) // self.replicas
        return [tuple(devices[i * part : (i + 1) * part]) for i in range(self.replicas)]


def mesh_of(config: Config, role: str) -> ParallelismConfig:
    """The mesh of a model of the policy's ranks: `policy`, `reference` or `critic`."""
    own = {"reference": config.reference.parallelism, "critic": config.critic.parallelism}.get(role)
    return own or config.policy.parallelism


def own_mesh(config: Config, role: str) -> ParallelismConfig | None:
    """Return the mesh of the reference model or the critic if it differs from the policy's."""
    own, ranks = mesh_of(config, role), policy_ranks(config)
    same = _whole(own, ranks).model_dump() == _whole(config.policy.parallelism, ranks).model_dump()
    return None if same else own


def policy_ranks(config: Config) -> int | None:
    """The ranks of one policy replica; None while they are as many as there are devices."""
    policy = policy_layout(config)
    return policy.size or (len(policy.devices) // policy.replicas if policy.listed else None)


def _whole(mesh: ParallelismConfig, ranks: int | None) -> ParallelismConfig:
    """The mesh without -1, as far as the number of its ranks is known."""
    if mesh.dp_shard_size != -1 or ranks is None or ranks % ranks_per_shard(mesh):
        return mesh
    return mesh.model_copy(update={"dp_shard_size": ranks // ranks_per_shard(mesh)})


def policy_layout(config: Config) -> RoleLayout:
    """The policy replicas."""
    mesh = config.policy.parallelism
    shards = None if mesh.dp_shard_size == -1 else mesh.dp_shard_size
    per_shard = ranks_per_shard(mesh)
    return RoleLayout("policy", mesh.n_init_replicas, per_shard, shards, config.placement.policy, "policy")


def rollout_layout(config: Config) -> RoleLayout:
    """The rollout replicas; -1 means one there."""
    mesh = config.rollout.parallelism
    shards = max(1, mesh.dp_shard_size)
    per_shard = ranks_per_shard(mesh)
    return RoleLayout("rollout", mesh.n_init_replicas, per_shard, shards, config.placement.rollout, "rollout")


def reference_layout(config: Config) -> RoleLayout | None:
    """The reference model where it has devices of its own: one for each data rank of the policy."""
    return _next_to_policy(config, "reference", config.placement.reference) if config.has_reference else None


def reference_is_within(config: Config) -> bool:
    """Whether the reference model needs no weights of its own: it is the policy with the adapters it began with."""
    same = config.reference.model_name_or_path in (None, config.policy.model_name_or_path)
    return config.has_reference and config.policy.lora is not None and same and reference_layout(config) is None


def critic_layout(config: Config) -> RoleLayout | None:
    """The critic, likewise."""
    return _next_to_policy(config, "critic", config.placement.critic) if config.has_critic else None


def _next_to_policy(config: Config, name: str, listed: Devices) -> RoleLayout | None:
    policy = policy_layout(config)
    if not listed or sorted(flat(listed)) == sorted(policy.devices):
        return None
    shards = policy.shards
    if shards is None and policy.listed:
        shards = max(1, len(policy.devices) // (policy.replicas * policy.ranks_per_shard))
    copies = config.policy.parallelism.dp_replicate_size
    return RoleLayout(name, policy.replicas, copies, shards, listed, "policy")


def layouts(config: Config) -> list[RoleLayout]:
    """The roles with devices of their own: policy where it trains, and rollout where the job generates."""
    policy = [] if config.validation.only else [policy_layout(config)]
    return [*policy, *([rollout_layout(config)] if config.generates else [])]


def apart_layouts(config: Config) -> list[RoleLayout]:
    """The models of the policy's processes that have devices of their own, in the order of their devices."""
    return [layout for layout in (reference_layout(config), critic_layout(config)) if layout]


def placed_roles(config: Config) -> list[RoleLayout]:
    """Everything that has devices."""
    return [*layouts(config), *apart_layouts(config)]


def ranks_of(mesh: ParallelismConfig) -> int | None:
    """All ranks of a mesh; None while dp_shard_size = -1 leaves them open."""
    return None if mesh.dp_shard_size == -1 else ranks_per_shard(mesh) * mesh.dp_shard_size


def ranks_per_shard(mesh: ParallelismConfig) -> int:
    """The product of all sizes of a mesh but dp_shard_size."""
    return unit_ranks(mesh) * mesh.dp_replicate_size


def unit_ranks(mesh: ParallelismConfig) -> int:
    """How many ranks train the same samples together: a unit (`policy_worker.parallel.mesh`)."""
    return mesh.tp_size * mesh.cp_size * mesh.pp_size


def mesh_text(mesh: ParallelismConfig) -> str:
    """`tp_size 2 * dp_shard_size 4`: the factors of a replica's size that are not 1."""
    names = ("tp_size", "cp_size", "pp_size", "dp_replicate_size", "dp_shard_size")
    factors = [f"{name} {getattr(mesh, name)}" for name in names if getattr(mesh, name) not in (1, -1)]
    return " * ".join(factors) or "one device"
