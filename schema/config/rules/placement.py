"""Rules of `[placement]`: every device has one owner unless sharing is asked for, and no role has more or fewer
than its replicas take. What the machine itself has is another matter (`launcher.preflight.checks`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from schema.config.layout import (
    RoleLayout,
    apart_layouts,
    mesh_text,
    placed_roles,
    policy_layout,
    reference_layout,
    rollout_layout,
)
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import InGrpo, Refusal, Rule, refused
from schema.config.sections.placement import flat

SHARE_KEY = "rollout.gpu_memory_utilization"
MOST_SHARE = 0.9
"""Above it nothing is left for a trainer next to the engine: CUDA contexts and NCCL take some GiB alone."""
COMFORTABLE_SHARE = 0.6
"""A trainer holds weights, gradients, two moments and activations: seldom less than 40 % of what serving takes."""
_NO_ROLE = "{} are devices of a role that this job does not have"
_SHOWN = 8  # devices named in a message
NEXT_TO_POLICY = ("reference", "critic")
"""Models of the policy's processes."""
_ROLES = ("policy", "rollout", "reference", "critic", "reward_model")


def devices_are_distinct(config: Config) -> Iterator[Problem]:
    """A device stands once in a role: two replicas or two ranks of one role cannot have the same GPU."""
    for role in placed_roles(config):
        twice = sorted(device for device, count in Counter(role.devices).items() if count > 1)
        if twice:
            says = f"device {_names(twice)} is listed more than once in {role.key} = {role.listed}"
            yield refused(config, role.key, says, "name each device once")


def sharing_is_asked_for(config: Config) -> Iterator[Problem]:
    """Roles meet on a device exactly when `share` says so."""
    share, key, nothing = config.placement.share, "placement.share", 'write {!} = "none"'
    if not config.is_grpo:
        if share != "none":
            says = "is {}, but {train.train_policy.type=} has no rollout replicas to share with"
            if config.generates:
                says = "is {}, but supervised training goes on while {validation.generate=} answers"
            yield refused(config, key, says, nothing)
        return
    policy, rollout = policy_layout(config), rollout_layout(config)
    if not policy.listed or not rollout.listed:
        return
    common = sorted(set(policy.devices) & set(rollout.devices))
    lists = f"{policy.key} = {policy.listed} and {rollout.key} = {rollout.listed}"
    if common and share == "none":
        says = f"{lists} have device {_names(common)} in common, and {{.share=}}"
        hint = 'write {.share!} = "memory" (both roles stay in its memory), or lists without common devices'
        yield refused(config, rollout.key, says, hint, (policy.key, key))
    if not common and share != "none":
        says = f"is {{}}, but {lists} have no device in common"
        yield refused(config, key, says, nothing, (policy.key, rollout.key))


def other_roles_share_too(config: Config) -> Iterator[Problem]:
    """The critic may live with the policy, which it trains with; any other company is sharing."""
    lists = {role: getattr(config.placement, role) for role in _ROLES}
    others = {"critic": ["rollout"], "reference": ["rollout"], "reward_model": ["policy", "rollout"]}
    pairs = [(role, other) for role, company in others.items() for other in company]
    for role, other in pairs if config.placement.share == "none" else ():
        if common := sorted(set(flat(lists[role])) & set(flat(lists[other]))):
            says = (
                f"{{!}} = {lists[role]} and {{.{other}!}} = {lists[other]} have device {_names(common)} in common, "
                "and {.share=}"
            )
            hint = 'write {.share!} = "memory", or lists without common devices'
            yield refused(config, f"placement.{role}", says, hint, (f".{other}", ".share"))


def others_are_apart(config: Config) -> Iterator[Problem]:
    """Reference model and critic have the policy's devices or others, not some of them, nor each other's."""
    seen = [policy_layout(config)]
    for role in apart_layouts(config):
        for other in seen:
            if common := sorted(set(role.devices) & set(other.devices)):
                says = f"{role.listed} and {other.key} = {other.listed} have device {_names(common)} in common"
                hint = "write {!} = [], which is sharded over the policy's devices, or devices of its own"
                yield refused(config, role.key, says, hint, (other.key,))
        seen.append(role)


def devices_are_there(config: Config) -> Iterator[Problem]:
    """A device number is below nodes * gpus_per_node, where that is stated."""
    per_node, nodes = config.placement.gpus_per_node, config.placement.nodes
    related = (".gpus_per_node", ".nodes")
    for name in _ROLES:
        key, devices = f"placement.{name}", getattr(config.placement, name)
        if per_node is None and nodes > 1 and devices:
            says = "device numbers over {.nodes=} need to know the GPUs of each"
            hint = "write {.gpus_per_node!} = 8, or as many as each node has"
            yield refused(config, key, says, hint, related)
        beyond = sorted({d for d in flat(devices) if per_node is not None and d >= nodes * per_node})
        if beyond:
            says = f"names device {_names(beyond)}, but {{.nodes=}} * {{.gpus_per_node=}} are "
            hint = "write smaller numbers, or leave {.gpus_per_node!} out to use what is found"
            if nodes > 1:
                hint = f"write smaller numbers, or a {{.gpus_per_node!}} above {beyond[-1] // nodes}"
            yield refused(config, key, f"{says}{nodes * (per_node or 0)} devices", hint, related)


def lists_fit_replicas(config: Config) -> list[Problem]:
    """A list has exactly the devices that the replicas of its role take; -1 takes what the list gives."""
    return [problem for role in placed_roles(config) if role.listed for problem in _misfit(config, role)]


def _misfit(config: Config, role: RoleLayout) -> list[Problem]:
    replicas, device_count = f"{role.section}.n_init_replicas", len(role.devices)
    related = (role.section,)
    if role.nested and len(role.listed) != role.replicas:
        says = f"names the devices of {len(role.listed)} replicas, but {replicas} = {role.replicas}"
        return [refused(config, role.key, says, f"write {replicas} = {len(role.listed)}", related)]
    parts = [len(item) for item in role.listed if isinstance(item, list)]
    mesh = mesh_text((config.rollout if role.name == "rollout" else config.policy).parallelism)
    if role.name in NEXT_TO_POLICY:
        mesh = "one for each data rank of the policy"
    if len(set(parts)) > 1:
        says = f"gives its replicas {_names(parts)} devices, but each takes as many as the others ({mesh})"
        return [refused(config, role.key, says, "give each as many devices", related)]
    of_replica = role.ranks_per_shard * (role.shards or 1)
    takes, is_open = role.replicas * of_replica, role.shards is None
    if device_count == takes or (is_open and device_count and device_count % takes == 0):
        return []
    says = f"names {device_count} devices, but {replicas} = {role.replicas} of {of_replica} ({mesh}) take {takes}"
    says += " or a multiple" * is_open
    return [refused(config, role.key, says, _fitting(config, role, device_count), related)]


def most_devices(takes: Mapping[str, int], shared: bool) -> int:
    """Devices of a job whose roles take so many. shared: policy and rollout may meet on each."""
    together = [takes.get(role, 0) for role in ("policy", "rollout")]
    return (max(together) if shared else sum(together)) + sum(takes.get(role, 0) for role in NEXT_TO_POLICY)


def _fitting(config: Config, role: RoleLayout, device_count: int) -> str:
    """Return the hint by which a role takes the devices that its list names."""
    section, of_replica, replicas = role.section, role.ranks_per_shard * (role.shards or 1), role.replicas
    name = f"name {replicas * of_replica} devices"
    if not device_count:
        return name
    if device_count % (replicas * role.ranks_per_shard) == 0 and role.name == "policy":
        return f"write {section}.dp_shard_size = {device_count // (replicas * role.ranks_per_shard)}, or {name}"
    if device_count % of_replica == 0 and not role.nested and role.name not in NEXT_TO_POLICY:
        return f"write {section}.n_init_replicas = {device_count // of_replica}, or {name}"
    if role.name == "rollout" and not config.rollout.engine.one_device:
        others = of_replica // config.rollout.parallelism.tp_size
        if device_count % (replicas * others) == 0:
            return f"write {section}.tp_size = {device_count // (replicas * others)}, or {name}"
    return name


def devices_suffice(config: Config) -> Iterator[Problem]:
    """Where the machines' GPUs are stated, the roles fit upon them together."""
    placement, roles = config.placement, placed_roles(config)
    if not placement.gpus_per_node or all(role.listed for role in roles):
        return
    total = placement.nodes * placement.gpus_per_node
    takes = {
        role.name: len(role.devices) or role.replicas * role.ranks_per_shard * (role.shards or 1) for role in roles
    }
    needed = most_devices(takes, shared=placement.share != "none")
    if needed <= total:
        return
    nodes = "{placement.nodes=} * {}" if placement.nodes > 1 else total
    parts = ", ".join(f"{name} {count}" for name, count in takes.items())
    says = f"{nodes} GPUs are fewer than the {needed} that the roles take ({parts})"
    hint = f"write {{!}} = {-(-needed // placement.nodes)}, or fewer replicas or smaller ones"
    if len(roles) > 1 and placement.share == "none" and most_devices(takes, shared=True) <= total:
        hint += ', or placement.share = "memory"'
    related = dict.fromkeys(role.section for role in roles)
    yield refused(config, "placement.gpus_per_node", says, hint, related)


def no_device_is_idle(config: Config) -> Iterator[Problem]:
    """Where all devices are stated and all roles are listed, a device that nobody has is a mistake."""
    placement, roles = config.placement, placed_roles(config)
    if placement.gpus_per_node is None or not all(role.listed for role in roles):
        return
    total = placement.nodes * placement.gpus_per_node
    used = {device for role in _ROLES for device in flat(getattr(placement, role))}
    count = total - sum(1 for device in used if device < total)
    if count <= 0:
        return
    idle = list(islice((device for device in range(total) if device not in used), _SHOWN))
    names = _names(idle) + (f" and {count - len(idle)} more" if count > len(idle) else "")
    lists = " nor ".join(f"{role.key} = {role.listed}" for role in roles)
    says = f"device {names} of {total} is {'in neither' if len(roles) > 1 else 'not in'} {lists}"
    hint = "leave it out if these devices are for other jobs"
    if placement.nodes == 1 and used == set(range(len(used))):
        hint = f"write {{!}} = {len(used)}, or name them"
    yield refused(config, "placement.gpus_per_node", says, hint, [role.key for role in roles])


def models_apart_are_whole(config: Config) -> Iterator[Problem]:
    """A model with devices of its own has one for each data rank, which a mesh that cuts models does not serve."""
    mesh = config.policy.parallelism
    for layout in apart_layouts(config):
        for name in ("tp_size", "cp_size", "pp_size"):
            if getattr(mesh, name) > 1:
                says = (
                    f"{layout.listed} has one device for each data rank of the policy, and this build cannot do that "
                    f"yet where {{policy.parallelism.{name}=}} makes several ranks of each"
                )
                hint = "leave {!} out, so that the policy's devices have the model too"
                yield refused(config, layout.key, says, hint)


def time_share_is_of_common_devices(config: Config) -> Iterator[Problem]:
    """In turns, a replica with devices of its own would sleep for nothing."""
    policy, rollout = policy_layout(config), rollout_layout(config)
    own = sorted(set(rollout.devices) - set(policy.devices))
    if config.shares_time and policy.listed and set(rollout.devices) & set(policy.devices) and own:
        says = (
            f"{rollout.listed} has device {_names(own)} that {policy.key} = {policy.listed} has not: a replica there "
            "would sleep in the trainer's turns ({.share=})"
        )
        hint = f'write {{.share!}} = "memory", or name devices of {policy.key} alone'
        yield refused(config, rollout.key, says, hint, (policy.key, ".share"))


def _engine_shares_gpu(config: Config) -> bool:
    return config.is_grpo and config.placement.share == "memory" and config.rollout.engine.reserves_memory


def _names(devices: list[int]) -> str:
    return ", ".join(map(str, devices))


PLACEMENT_RULES: tuple[Rule, ...] = (
    Refusal(("placement.rollout",), lambda c: not c.generates, _NO_ROLE + " ({train.train_policy.type=})",
        "write {!} = [], or let validation generate answers ({validation.generate!})"),
    Refusal(tuple(f"placement.{role}" for role in ("reference", "critic", "reward_model")),
        lambda c: not c.is_grpo, _NO_ROLE + " ({train.train_policy.type=})", "write {!} = []"),
    InGrpo(
        Refusal(("placement.reference",), lambda c: not c.has_reference,
            _NO_ROLE + " ({train.train_policy.kl_beta=}, {train.train_policy.kl_in_reward.beta=})",
            "write {!} = [], or {train.train_policy.kl_beta!} = 0.001", ("train.train_policy.kl_beta",)),
        Refusal(("placement.critic",), lambda c: not c.critic.enable, _NO_ROLE + " ({critic.enable=})",
            'write {!} = [], or {critic.enable!} = true and train.train_policy.advantage_estimator = "gae"'),
        Refusal(("placement.reward_model",), lambda c: not c.reward_model.enable,
            _NO_ROLE + " ({reward_model.enable=})",
            "write {!} = [], or {reward_model.enable!} = true and "
            'reward_model.model_name_or_path = "owner/name"'),
    ),
    devices_are_distinct,
    sharing_is_asked_for,
    other_roles_share_too,
    others_are_apart,
    Refusal(("reference.offload",), lambda c: reference_layout(c) is not None,
        "true frees memory of the policy's devices, and {placement.reference=} uses none",
        "write {.offload!} = false, or {placement.reference!} = []"),
    Refusal(("reference.fsdp_wrap_layers", "reference.fsdp_wrap_min_params"),
        lambda c: reference_layout(c) is not None,
        "{~} says what is sharded, and with {placement.reference=} nothing is",
        "leave it out, or write {placement.reference!} = []"),
    devices_are_there,
    lists_fit_replicas,
    devices_suffice,
    no_device_is_idle,
    Refusal(SHARE_KEY, lambda c: _engine_shares_gpu(c) and c.rollout.gpu_memory_utilization > MOST_SHARE,
        "{} leaves no memory to the trainer on the same GPU ({placement.share=})",
        "write {.gpu_memory_utilization!} = 0.5"),
    models_apart_are_whole,
    time_share_is_of_common_devices,
)  # fmt: skip
PLACEMENT_WARNINGS: tuple[Rule, ...] = (
    Refusal(SHARE_KEY,
        lambda c: _engine_shares_gpu(c) and COMFORTABLE_SHARE < c.rollout.gpu_memory_utilization <= MOST_SHARE,
        lambda c: f"the engine takes {c.rollout.gpu_memory_utilization:.0%} of GPUs that it shares with the trainer "
        "({placement.share=})",
        "write {.gpu_memory_utilization!} = 0.5 if the trainer runs out of memory"),
    Refusal("train.train_policy.allowed_outdated_steps", lambda c: c.shares_time and c.staleness_bound > 0,
        "{} lets samples get older, and nothing is generated while a step is trained ({placement.share=}): it only "
        "saves answers that are unfinished when a batch is complete",
        "write {.allowed_outdated_steps!} = 0"),
)  # fmt: skip
