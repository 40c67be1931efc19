"""How many devices a job needs, and what to say where the machines do not have them."""

from __future__ import annotations

from dataclasses import dataclass

from schema.config import Config, Problem
from schema.config.layout import RoleLayout, apart_layouts, policy_layout, rollout_layout
from schema.config.rules.placement import COMFORTABLE_SHARE, SHARE_KEY

MOST_ON_CPU = 256
"""Worker processes on a machine without GPUs: each loads torch, which takes half a GiB."""


@dataclass(frozen=True, slots=True)
class Needs:
    """How many GPUs (or, on CPU, ranks) a job takes."""

    policy_replicas: int
    policy_ranks: int
    rollout_replicas: int
    rollout_gpus: int


class PlacementError(ValueError):
    """The job does not fit this machine; `problem` has what it needs, what the machine has, and what to write."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def needs(config: Config, gpus: int, *, rollouts: bool = True) -> Needs:
    """Ranks per replica. -1 of `policy.parallelism.dp_shard_size` takes its list, or the GPUs that are left.

    rollouts: whether rollout replicas run here; else they join from elsewhere.
    """
    policy, shared = policy_layout(config), config.placement.share != "none"
    rollout = rollout_layout(config) if config.generates and rollouts else None
    per_rollout = (rollout.size or 1) if rollout else 0
    if config.validation.only:
        return Needs(0, 0, rollout.replicas if rollout else 0, per_rollout)
    ranks = policy.size
    if ranks is None:
        free = gpus - sum(len(role.devices) for role in apart_layouts(config))
        if policy.listed:
            free = len(policy.devices)
        elif rollout is not None and not shared:
            free -= len(rollout.devices) or rollout.replicas * per_rollout
        ranks = policy.ranks_per_shard * max(1, free // (policy.ranks_per_shard * policy.replicas))
    return Needs(policy.replicas, ranks, rollout.replicas if rollout else 0, per_rollout)


def too_many(needed: Needs, workers: int, nodes: int) -> Problem:
    parts = _parts(needed)
    message = f"{workers} worker processes ({parts}) are more than the {MOST_ON_CPU * nodes} that share the cores of "
    message += "a machine without GPUs" if nodes == 1 else f"{nodes} machines without GPUs"
    key = "rollout.parallelism" if needed.rollout_replicas > workers // 2 else "policy.parallelism"
    return Problem(key, message, workers, f"write smaller sizes in [{key}], or run it where the GPUs are")


def _parts(needed: Needs) -> str:
    policy = f"{needed.policy_replicas} policy replicas of {needed.policy_ranks}" if needed.policy_replicas else ""
    rollout = f"{needed.rollout_replicas} rollout replicas" if needed.rollout_replicas else ""
    return ", ".join(filter(None, (policy, rollout)))


def unlike_the_policy(role: RoleLayout, ranks: int) -> Problem:
    named = len(role.devices)
    message = f"names {named} devices, and policy.parallelism.dp_shard_size = -1 makes {ranks} data ranks here"
    hint = f"name {ranks} devices, one for each, or write policy.parallelism.dp_shard_size = {named}"
    return Problem(role.key, message, role.listed, hint, related=("policy.parallelism.dp_shard_size",))


def absent_devices(role: RoleLayout, beyond: list[int], count: int) -> Problem:
    names = ", ".join(map(str, beyond))
    message = f"names device {names}, and this machine has {count} GPUs for this job (0 to {count - 1})"
    return Problem(role.key, message, role.listed, "name devices that are there; look at CUDA_VISIBLE_DEVICES")


def too_few(config: Config, needed: Needs, listed: list[RoleLayout], free: int, count: int) -> Problem:
    policy, rollout = (needed.policy_replicas * needed.policy_ranks, needed.rollout_replicas * needed.rollout_gpus)
    parts = _parts(needed) + (f" of {needed.rollout_gpus}" if needed.rollout_replicas else "")
    shared = config.placement.share != "none"
    total = max(policy, rollout) if shared else policy + rollout
    message = f"the job needs {total} GPUs ({parts}), this machine has {count}"
    if config.placement.gpus_per_node is not None:
        message += " for it (placement.gpus_per_node)"
    if listed and not shared:
        message += f", and {listed[0].key} leaves {free}"
    if rollout and not shared and not listed and max(policy, rollout) <= count:
        return needs_sharing(config, message)
    hint = (
        "lower policy.parallelism or rollout.parallelism (n_init_replicas, dp_shard_size), "
        "or look at CUDA_VISIBLE_DEVICES"
    )
    key = "rollout.parallelism" if needed.rollout_replicas else "policy.parallelism"
    return Problem(key, message, total, hint)


def too_few_to_replay(role: RoleLayout, world: int, available: int, listed: list[RoleLayout], count: int) -> Problem:
    message, key = f"the replay needs {world} GPUs, ", "policy.parallelism.dp_shard_size"
    message += f"{role.key} names {available}" if role.listed else f"this machine has {count}"
    if listed and not role.listed:
        message += f", and {listed[0].key} leaves {available}"
    hint = f"write {key} = {available // role.ranks_per_shard}" if available >= role.ranks_per_shard else ""
    if listed:
        hint += f"{', or ' if hint else 'write '}another {listed[0].key}"
    return Problem(key, message, world, hint or "replay it where the GPUs are")


def needs_sharing(config: Config, message: str) -> Problem:
    """The roles fit one upon the other: say what to write for that, and what happens then."""
    share = config.rollout.gpu_memory_utilization
    hint = 'write placement.share = "memory": both stay in the memory of the same GPUs'
    if config.rollout.engine.reserves_memory:
        part = "" if share <= COMFORTABLE_SHARE else f" (write {SHARE_KEY} = 0.5)"
        hint += f", {config.rollout.engine.title} takes {share:.0%} of it{part} and the trainer what is left"
    related = ("rollout.parallelism", "policy.parallelism", SHARE_KEY)
    return Problem("placement.share", message + ", and none is shared", "none", hint, related=related)


def spans_nodes(index: int, devices: tuple[int, ...], gpus_per_node: int) -> Problem:
    message = (
        f"rollout-{index} would have devices {', '.join(map(str, devices))}, which are on several machines of "
        f"{gpus_per_node} GPUs, and an engine runs on one (--target kubernetes gives it several)"
    )
    hint = "write sizes in [rollout.parallelism] that divide it, or placement.rollout with lists within one machine"
    return Problem("placement.rollout", message, None, hint, related=("placement.gpus_per_node",))
