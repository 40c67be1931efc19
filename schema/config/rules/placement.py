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
from schema.config.rules.rows import InGrpo, Refusal, Rule
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
            message = f"device {_names(twice)} is listed more than once in {role.key} = {role.listed}"
            yield Problem(role.key, message, role.listed, "name each device once")


def sharing_is_asked_for(config: Config) -> list[Problem]:
    """Roles meet on a device exactly when `share` says so."""
    share, key = config.placement.share, "placement.share"
    if not config.is_grpo:
        if share == "none":
            return []
        message = f'is "{share}", but train.train_policy.type = "sft" has no rollout replicas to share with'
        hint = f'write {key} = "none"'
        return [Problem(key, message, share, hint, related=("train.train_policy.type",))]
    policy, rollout = policy_layout(config), rollout_layout(config)
    if not policy.listed or not rollout.listed:
        return []
    both = sorted(set(policy.devices) & set(rollout.devices))
    lists = f"placement.policy = {policy.listed} and placement.rollout = {rollout.listed}"
    related = (policy.key, rollout.key)
    if both and share == "none":
        message = f'{lists} have device {_names(both)} in common, and {key} = "none"'
        hint = f'write {key} = "memory" (both roles stay in its memory), or lists without common devices'
        return [Problem(rollout.key, message, rollout.listed, hint, related=(policy.key, key))]
    if not both and share != "none":
        message = f'is "{share}", but {lists} have no device in common'
        return [Problem(key, message, share, f'write {key} = "none"', related=related)]
    return []


def other_roles_share_too(config: Config) -> Iterator[Problem]:
    """The critic may live with the policy, which it trains with; any other company is sharing."""
    placement = config.placement
    if placement.share != "none":
        return
    pairs = [
        ("critic", "rollout"),
        ("reference", "rollout"),
        ("reward_model", "policy"),
        ("reward_model", "rollout"),
    ]
    for role, other in pairs:
        mine, theirs = flat(getattr(placement, role)), flat(getattr(placement, other))
        both = sorted(set(mine) & set(theirs))
        if both:
            key, lists = f"placement.{role}", (getattr(placement, role), getattr(placement, other))
            message = (
                f"placement.{role} = {lists[0]} and placement.{other} = {lists[1]} have device {_names(both)} in "
                'common, and placement.share = "none"'
            )
            hint = 'write placement.share = "memory", or lists without common devices'
            related = (f"placement.{other}", "placement.share")
            yield Problem(key, message, lists[0], hint, related=related)


def others_are_apart(config: Config) -> Iterator[Problem]:
    """Reference model and critic have the policy's devices or others, not some of them, nor each other's."""
    there = [policy_layout(config)]
    for role in apart_layouts(config):
        for other in there:
            if both := sorted(set(role.devices) & set(other.devices)):
                message = (
                    f"{role.listed} and {other.key} = {other.listed} have device {_names(both)} in common"
                )
                hint = f"write {role.key} = [], which is sharded over the policy's devices, or devices of its own"
                yield Problem(role.key, message, role.listed, hint, related=(other.key,))
        there.append(role)


def devices_are_there(config: Config) -> Iterator[Problem]:
    """A device number is below nodes * gpus_per_node, where that is stated."""
    placement = config.placement
    per_node, nodes = placement.gpus_per_node, placement.nodes
    related = ("placement.gpus_per_node", "placement.nodes")
    for name in _ROLES:
        key, devices = f"placement.{name}", getattr(placement, name)
        if per_node is None and nodes > 1 and devices:
            message = f"device numbers over placement.nodes = {nodes} need to know the GPUs of each"
            hint = "write placement.gpus_per_node = 8, or as many as each node has"
            yield Problem(key, message, devices, hint, related=related)
        beyond = sorted({d for d in flat(devices) if per_node is not None and d >= nodes * per_node})
        if beyond:
            message = (
                f"names device {_names(beyond)}, but placement.nodes = {nodes} * placement.gpus_per_node = "
                f"{per_node} are {nodes * (per_node or 0)} devices"
            )
            hint = "write smaller numbers, or leave placement.gpus_per_node out to use what is found"
            if nodes > 1:
                hint = f"write smaller numbers, or a placement.gpus_per_node above {beyond[-1] // nodes}"
            yield Problem(key, message, devices, hint, related=related)


def lists_fit_replicas(config: Config) -> list[Problem]:
    """A list has exactly the devices that the replicas of its role take; -1 takes what the list gives."""
    return [problem for role in placed_roles(config) if role.listed for problem in _misfit(config, role)]


def _misfit(config: Config, role: RoleLayout) -> list[Problem]:
    section = role.section
    replicas, given = f"{section}.n_init_replicas", len(role.devices)
    related = (section,)
    if role.nested and len(role.listed) != role.replicas:
        message = f"names the devices of {len(role.listed)} replicas, but {replicas} = {role.replicas}"
        hint = f"write {replicas} = {len(role.listed)}"
        return [Problem(role.key, message, role.listed, hint, related=related)]
    parts = [len(item) for item in role.listed if isinstance(item, list)]
    mesh = mesh_text((config.rollout if role.name == "rollout" else config.policy).parallelism)
    if role.name in NEXT_TO_POLICY:
        mesh = "one for each data rank of the policy"
    if len(set(parts)) > 1:
        message = f"gives its replicas {_names(parts)} devices, but each takes as many as the others ({mesh})"
        return [Problem(role.key, message, role.listed, "give each as many devices", related=related)]
    unit = role.unit * (role.shards or 1)
    if given == role.replicas * unit or (
        role.shards is None and given and given % (role.replicas * unit) == 0
    ):
        return []
    open_size = " or a multiple" if role.shards is None else ""
    message = (
        f"names {given} devices, but {replicas} = {role.replicas} of {unit} ({mesh}) take "
        f"{role.replicas * unit}{open_size}"
    )
    return [Problem(role.key, message, role.listed, _fitting(config, role, given), related=related)]


def most_devices(takes: Mapping[str, int], shared: bool) -> int:
    """Devices of a job whose roles take so many. shared: policy and rollout may meet on each."""
    together = [takes.get(role, 0) for role in ("policy", "rollout")]
    return (max(together) if shared else sum(together)) + sum(takes.get(role, 0) for role in NEXT_TO_POLICY)


def _fitting(config: Config, role: RoleLayout, given: int) -> str:
    """Return the hint by which a role takes the devices that its list names."""
    section, unit = role.section, role.unit * (role.shards or 1)
    hint = f"name {role.replicas * unit} devices"
    if given and given % (role.replicas * role.unit) == 0 and role.name == "policy":
        return f"write {section}.dp_shard_size = {given // (role.replicas * role.unit)}, or {hint}"
    if given and given % unit == 0 and not role.nested and role.name not in NEXT_TO_POLICY:
        return f"write {section}.n_init_replicas = {given // unit}, or {hint}"
    if (
        role.name == "rollout"
        and not config.rollout.engine.one_device
        and given
        and given % role.replicas == 0
    ):
        others = unit // config.rollout.parallelism.tp_size
        if given % (role.replicas * others) == 0:
            return f"write {section}.tp_size = {given // (role.replicas * others)}, or {hint}"
    return hint


def devices_suffice(config: Config) -> Iterator[Problem]:
    """Where the machines' GPUs are stated, the roles fit upon them together."""
    placement, roles = config.placement, placed_roles(config)
    if not placement.gpus_per_node or all(role.listed for role in roles):
        return
    total = placement.nodes * placement.gpus_per_node
    takes = {role.name: len(role.devices) or role.replicas * role.unit * (role.shards or 1) for role in roles}
    needed = most_devices(takes, shared=placement.share != "none")
    if needed <= total:
        return
    key = "placement.gpus_per_node"
    parts = ", ".join(f"{name} {count}" for name, count in takes.items())
    nodes = (
        f"placement.nodes = {placement.nodes} * {placement.gpus_per_node}" if placement.nodes > 1 else total
    )
    message = f"{nodes} GPUs are fewer than the {needed} that the roles take ({parts})"
    hint = f"write {key} = {-(-needed // placement.nodes)}, or fewer replicas or smaller ones"
    if len(roles) > 1 and placement.share == "none" and most_devices(takes, shared=True) <= total:
        hint += ', or placement.share = "memory"'
    related = tuple(dict.fromkeys(role.section for role in roles))
    yield Problem(key, message, placement.gpus_per_node, hint, related=related)


def no_device_is_idle(config: Config) -> Iterator[Problem]:
    """Where all devices are stated and all roles are listed, a device that nobody has is a mistake."""
    placement, roles = config.placement, placed_roles(config)
    if placement.gpus_per_node is None or not all(role.listed for role in roles):
        return
    total, used = placement.nodes * placement.gpus_per_node, _named(config)
    count = total - sum(1 for device in used if device < total)
    if count <= 0:
        return
    idle = list(islice((device for device in range(total) if device not in used), _SHOWN))
    names = _names(idle) + (f" and {count - len(idle)} more" if count > len(idle) else "")
    lists = " nor ".join(f"{role.key} = {role.listed}" for role in roles)
    message = (
        f"device {names} of {total} is in neither {lists}"
        if len(roles) > 1
        else (f"device {names} of {total} is not in {lists}")
    )
    key, hint = "placement.gpus_per_node", "leave it out if these devices are for other jobs"
    if placement.nodes == 1 and used == set(range(len(used))):
        hint = f"write {key} = {len(used)}, or name them"
    yield Problem(key, message, placement.gpus_per_node, hint, related=tuple(role.key for role in roles))


def _named(config: Config) -> set[int]:
    """Devices that any role names, also those of roles other than policy and rollout."""
    return {device for role in _ROLES for device in flat(getattr(config.placement, role))}


def models_apart_are_whole(config: Config) -> Iterator[Problem]:
    """A model with devices of its own has one for each data rank, which a mesh that cuts models does not serve."""
    mesh = config.policy.parallelism
    sizes = {name: getattr(mesh, name) for name in ("tp_size", "cp_size", "pp_size")}
    for layout in apart_layouts(config):
        for name, size in sizes.items():
            if size > 1:
                key = f"policy.parallelism.{name}"
                message = (
                    f"{layout.listed} has one device for each data rank of the policy, and this build cannot do that "
                    f"yet where {key} = {size} makes several ranks of each"
                )
                hint = f"leave {layout.key} out, so that the policy's devices have the model too"
                yield Problem(layout.key, message, layout.listed, hint, related=(key,))


def turns_are_of_common_devices(config: Config) -> Iterator[Problem]:
    """In turns, a replica with devices of its own would sleep for nothing."""
    policy, rollout = policy_layout(config), rollout_layout(config)
    own = sorted(set(rollout.devices) - set(policy.devices))
    if config.takes_turns and policy.listed and set(rollout.devices) & set(policy.devices) and own:
        message = (
            f"{rollout.listed} has device {_names(own)} that {policy.key} = {policy.listed} has not: a replica there "
            f'would sleep in the trainer\'s turns (placement.share = "time")'
        )
        hint = f'write placement.share = "memory", or name devices of {policy.key} alone'
        yield Problem(rollout.key, message, rollout.listed, hint, related=(policy.key, "placement.share"))


def _engine_shares_gpu(config: Config) -> bool:
    return config.is_grpo and config.placement.share == "memory" and config.rollout.engine.reserves_memory


def _names(devices: list[int]) -> str:
    return ", ".join(map(str, devices))


PLACEMENT_RULES: tuple[Rule, ...] = (
    Refusal(tuple(f"placement.{role}" for role in ("rollout", "reference", "critic", "reward_model")),
        lambda c: not c.is_grpo, _NO_ROLE + " ({train.train_policy.type=})",
        'write {!} = [], or {train.train_policy.type!} = "grpo"'),
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
    turns_are_of_common_devices,
)  # fmt: skip
PLACEMENT_WARNINGS: tuple[Rule, ...] = (
    Refusal(SHARE_KEY,
        lambda c: _engine_shares_gpu(c) and COMFORTABLE_SHARE < c.rollout.gpu_memory_utilization <= MOST_SHARE,
        lambda c: f"the engine takes {c.rollout.gpu_memory_utilization:.0%} of GPUs that it shares with the trainer "
        "({placement.share=})",
        "write {.gpu_memory_utilization!} = 0.5 if the trainer runs out of memory"),
    Refusal("train.train_policy.allowed_outdated_steps", lambda c: c.takes_turns and c.staleness_bound > 0,
        "{} lets samples get older, and nothing is generated while a step is trained ({placement.share=}): it only "
        "saves answers that are unfinished when a batch is complete",
        "write {.allowed_outdated_steps!} = 0"),
)  # fmt: skip
