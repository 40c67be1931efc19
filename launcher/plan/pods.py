"""The processes of a job over pods: as many pods for each replica as it takes.

Manifests are rendered by this, and a pod finds its part by it: both read the same configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import LaunchError
from launcher.plan.machine import Machine
from launcher.plan.needs import PlacementError, needs
from launcher.plan.placement import ProcessSpec, another_policy, follower, joined
from schema.config import Config, ConfigError


@dataclass(frozen=True, slots=True)
class Pods:
    """replicas: of the policy. each: pods of one. ranks: of one, over its pods. gpus: of a pod of the policy.

    rollouts: replicas at the start, of rollout_pods each. rollout_gpus: of one of these pods.
    """

    replicas: int
    each: int
    ranks: int
    gpus: int
    rollouts: int
    rollout_gpus: int
    rollout_pods: int = 1


def pods(config: Config) -> Pods:
    """How many there are, and what they ask for. Raises LaunchError for what pods cannot do."""
    per_node = config.placement.gpus_per_node
    if per_node is None:
        raise LaunchError(
            "placement.gpus_per_node is unset, and nobody can look at the nodes of a cluster",
            "write placement.gpus_per_node = 8, or as many as a node has; 0 for a job without GPUs",
        )
    if config.placement.share != "none":
        raise LaunchError(f'placement.share = "{config.placement.share}": pods do not share GPUs', "leave it out")
    for name in ("policy", "rollout", "reference", "critic"):
        if getattr(config.placement, name):
            raise LaunchError(
                f"placement.{name} names devices, and a cluster deals them itself",
                f"leave placement.{name} out: sizes of [policy.parallelism] and [rollout.parallelism] say how many",
            )
    needed = needs(config, per_node * config.placement.nodes)
    each = -(-needed.policy_ranks // per_node) if per_node else 1
    if needed.policy_ranks % each:
        raise LaunchError(
            f"{needed.policy_ranks} ranks of the policy cannot be dealt evenly to {each} pods of at most {per_node} "
            "GPUs (placement.gpus_per_node)",
            "write sizes in [policy.parallelism] that fill nodes evenly",
        )
    of_rollout = -(-needed.rollout_gpus // per_node) if per_node and needed.rollout_gpus else 1
    if of_rollout > 1:
        _check_engine(config, needed.rollout_gpus, of_rollout)
    return Pods(
        replicas=needed.policy_replicas,
        each=each,
        ranks=needed.policy_ranks,
        gpus=needed.policy_ranks // each if per_node else 0,
        rollouts=needed.rollout_replicas,
        rollout_gpus=needed.rollout_gpus // of_rollout if per_node else 0,
        rollout_pods=of_rollout,
    )


def _check_engine(config: Config, gpus: int, count: int) -> None:
    """Whether an engine can have its GPUs in so many pods. Raises LaunchError."""
    title = f"a rollout replica of {gpus} GPUs takes {count} pods"
    if gpus % count:
        raise LaunchError(
            f"{title} of at most {config.placement.gpus_per_node} (placement.gpus_per_node), which do not have equal "
            "parts of it",
            "write sizes in [rollout.parallelism] that fill nodes evenly",
        )
    if config.rollout.parallelism.dp_shard_size > 1:
        raise LaunchError(
            f"{title}, and rollout.parallelism.dp_shard_size = {config.rollout.parallelism.dp_shard_size}: the "
            "data-parallel engines of a replica run on one node",
            "write dp_shard_size = 1 and a larger n_init_replicas, or tp_size and pp_size that fill the nodes",
        )
    if cache := config.weight_sync.host_cache:
        raise LaunchError(
            f"{title}, and weight_sync.host_cache = {cache!r} is of one host",
            "leave weight_sync.host_cache out: all pods of an engine read the newest weights in the run directory",
        )
    if config.kubernetes.deletion_cost:
        raise LaunchError(
            f"{title}, and kubernetes.deletion_cost = true is for single pods: of engines of several pods the one "
            "with the highest number goes first",
            "leave kubernetes.deletion_cost out",
        )


def of_policy(config: Config, replica: int, pod: int) -> tuple[ProcessSpec, ...]:
    """The ranks of a policy replica in one of its pods. Raises LaunchError: the job has no such pod."""
    counts = pods(config)
    exists = replica == 0 or (replica > 0 and counts.replicas > 1)  # of several there may be more than at the start
    if not exists or not 0 <= pod < counts.each:
        raise LaunchError(
            f"policy-{replica} has no pod {pod}: the job has {counts.replicas} policy replicas of {counts.each} pods",
            "render the manifests again, and apply them",
        )
    machine = Machine(config.kubernetes.pod_cpus, tuple(map(str, range(counts.gpus))))
    try:
        placed = another_policy(config, f"policy-{replica}", *[machine] * counts.each)
    except PlacementError as error:
        raise ConfigError([error.problem]) from None
    return tuple(spec for spec in placed.processes if spec.node == pod)


@dataclass(frozen=True)
class EnginePod:
    """One of the pods of an engine. leader: address of the first. folder: of the engine alone, on the claim.

    config: the file of this pod's configuration.
    """

    count: int
    index: int
    leader: str
    folder: str
    config: str


def of_rollout(config: Config, name: str, part: EnginePod | None = None) -> tuple[ProcessSpec, ...]:
    """The process of a rollout pod. part: of an engine of several pods."""
    threads = str(config.launcher.cpu_threads or config.kubernetes.pod_cpus)
    env = {"COSMOS_CPU_THREADS": threads, "OMP_NUM_THREADS": threads}
    if part is not None:
        env |= {
            "COSMOS_ENGINE_NODES": str(part.count),
            "COSMOS_ENGINE_NODE": str(part.index),
            "COSMOS_ENGINE_LEADER": part.leader,
            "COSMOS_ENGINE_FOLDER": part.folder,
            "COSMOS_ENGINE_CONFIG": part.config,
        }
    gpus = pods(config).rollout_gpus if config.placement.gpus_per_node else 0
    made = follower(name) if part is not None and part.index else joined(config, name, gpus)
    (spec,) = made.processes
    return (ProcessSpec(spec.name, spec.role, spec.argv, {**spec.env, **env}),)
