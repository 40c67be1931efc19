"""Which processes a job has and what each gets: a pure function of the config and the machine.

    redis (if embedded) ─ controller ─ policy-0 (ranks 0 … n-1) ─ rollout-0 … rollout-k

The GPUs of a machine are numbered in the order of CUDA_VISIBLE_DEVICES; the first `placement.gpus_per_node` of them
are used, and device i is GPU i % gpus_per_node of node i // gpus_per_node. Roles that `[placement]` lists get exactly
those; those of a reference model and a critic are the policy's too, one for each rank, after its own. The others are
dealt in this order: what rollout replicas need is set aside, `dp_shard_size = -1` takes what is left, policy replicas
get the first free devices and rollout replicas the next. No GPU is ever given to two replicas, unless
`placement.share` allows it: then each role is dealt over all devices, and one policy and one rollout replica may meet
on each. Without GPUs everything runs on CPU and -1 means one rank: the ranks of the policy fill the nodes evenly in
order, and each rollout replica goes where the fewest workers are.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.plan.credentials import given_to
from launcher.plan.machine import Machine
from launcher.plan.needs import (
    MOST_ON_CPU,
    Needs,
    PlacementError,
    absent_devices,
    needs,
    spans_nodes,
    too_few,
    too_few_to_replay,
    too_many,
    unlike_the_policy,
)
from launcher.restarts import Role
from schema.config import Config, Problem
from schema.config.layout import RoleLayout, apart_layouts, placed_roles, policy_layout, unit_ranks
from schema.config.rules.placement import PLACEMENT_RULES
from schema.util.gpus import PART_VARIABLE, variable_for


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: what to run, without secrets. `name` is also that of its log file."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    replica: int = 0
    """Number of its replica among those of its role."""
    rank: int = 0
    node: int = 0
    """Which machine it runs on; 0 is that of the launcher."""
    profiled: bool = False
    """Whether it runs under Nsight Systems."""

    def environment(
        self, config: Config, env: Mapping[str, str], secrets: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """All variables of the process. env: those of its machine's launcher. secrets: its secrets and addresses."""
        return {**given_to(self.role, config, env), **self.env, **(secrets or {})}


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """Processes that live and die together. `rendezvous`: its ranks meet anew at each start.

    devices: its GPUs by the numbers that `[placement]` uses, those of reference model and critic last; empty on CPU.
    """

    name: str
    role: Role
    processes: tuple[ProcessSpec, ...]
    rendezvous: bool = False
    devices: tuple[int, ...] = ()


def cpu_threads(config: Config, machine: Machine, worker_processes: int) -> int:
    """Torch threads per worker process: two OpenMP teams on one core slow each other down many times."""
    return config.launcher.cpu_threads or max(1, machine.cores // max(1, worker_processes))


def usable_gpus(config: Config, machine: Machine, node: int = 0) -> tuple[str, ...]:
    """The GPUs that this job may have; `gpus_per_node` leaves the later ones alone. Raises PlacementError."""
    requested, count = config.placement.gpus_per_node, len(machine.gpus)
    if requested is None or requested <= count:
        return machine.gpus[:requested]
    key = "placement.gpus_per_node"
    present = f"{count} GPUs" if count else "no GPU that the installed torch can use"
    hint = f"write {key} = {count}, or leave it out to use what is found" if count else "leave it out"
    where = f"node {node}" if node else "this machine"
    raise PlacementError(Problem(key, f"{requested} GPUs are requested, {where} has {present}", requested, hint))


def place(config: Config, *machines: Machine, rollouts: bool = True) -> list[PlacedReplica]:
    """Policy and rollout replicas with their devices and threads, over these nodes. Raises PlacementError.

    rollouts: see `needs`.
    """
    for problem in (problem for rule in PLACEMENT_RULES for problem in rule(config)):
        raise PlacementError(problem)
    gpus = _gpus_by_node(config, machines)
    count = sum(map(len, gpus))
    needed = needs(config, count, rollouts=rollouts)
    workers = needed.policy_replicas * needed.policy_ranks + needed.rollout_replicas
    if not count and workers > MOST_ON_CPU * len(machines):
        raise PlacementError(too_many(needed, workers, len(machines)))
    devices = _deal(config, needed, count)
    nodes = _nodes(needed, devices, len(machines), len(gpus[0]))
    for role in apart_layouts(config) if count else ():
        _check_nearness(role, devices[role.name], nodes.policy, len(gpus[0]))
    each = Counter(node for ranks in (*nodes.policy, nodes.rollout) for node in ranks)
    common = []
    for node, machine in enumerate(machines):
        threads = str(cpu_threads(config, machine, each[node]))
        common.append({"COSMOS_CPU_THREADS": threads, "OMP_NUM_THREADS": threads})
    replicas, profiled = [], config.profiler.enable_nsys
    apart = [devices[role.name] for role in apart_layouts(config)]
    policies = [sum(parts, ()) for parts in zip(devices.get("policy", []), *apart, strict=True)]
    shared = (
        {device for dealt in devices.get("rollout", []) for device in dealt} if _divides_memory(config) else set()
    )
    part = {PART_VARIABLE: f"{1.0 - config.rollout.gpu_memory_utilization:.4g}"}
    for index, dealt in enumerate(policies):
        envs = [{**common[node], **_visible(gpus, node, dealt)} for node in range(len(machines))]
        if shared & set(dealt):  # ranks take equally much, those whose GPU has no engine too
            envs = [env | part for env in envs]
        replicas.append(_policy(f"policy-{index}", nodes.policy[index], envs, dealt, profiled, index=index))
    if config.validation.only:  # publishes the model, from the host's memory
        replicas.append(_policy("policy-0", [0], [{**common[0], "CUDA_VISIBLE_DEVICES": ""}], (), profiled=False))
    for index, dealt in enumerate(devices.get("rollout", [])):
        node = nodes.rollout[index]
        env = {**common[node], **_visible(gpus, node, dealt)}
        replicas.append(_rollout(f"rollout-{index}", env, dealt, node, profiled, index))
    return replicas


def place_elastic(
    config: Config, *machines: Machine, rollouts: bool = True
) -> tuple[list[PlacedReplica], list[PlacedReplica]]:
    """The replicas of the start, and further rollout replicas that there is room for, up to `autoscale.max_replicas`.

    There is none where `dp_shard_size = -1` takes what the start leaves, or where `placement.rollout` lists devices.
    Raises PlacementError.
    """
    first, scale = place(config, *machines, rollouts=rollouts), config.autoscale
    begun = config.rollout.parallelism.n_init_replicas if config.generates else 0
    if not scale.enable or not rollouts or (policy_layout(config).size is None and machines[0].gpus):
        return first, []
    most = sum(len(machine.gpus) for machine in machines) or MOST_ON_CPU * len(machines)
    for count in range(min(scale.max_replicas, begun + most), begun, -1):
        with suppress(PlacementError):
            every = place(_with_rollouts(config, count), *machines)
            late = {f"rollout-{index}" for index in range(begun, count)}
            return [each for each in every if each.name not in late], [each for each in every if each.name in late]
    return first, []


def _divides_memory(config: Config) -> bool:
    """Whether engines take a part of the memory of GPUs that ranks of the policy have too."""
    return config.placement.share == "memory" and config.rollout.engine.reserves_memory


def engines_before(config: Config, replicas: Sequence[PlacedReplica]) -> dict[str, frozenset[str]]:
    """For each policy replica that shares GPUs with engines which reserve memory: the rollout replicas that boot
    before it starts.

    Such an engine measures the memory that is free while it boots, and takes what others allocate and release
    meanwhile for its own. It needs no trainer to boot, whereas a trainer needs samples before its memory is complete.
    """
    rollouts = [replica for replica in replicas if replica.role is Role.ROLLOUT and _divides_memory(config)]
    engines = {
        policy.name: frozenset(rollout.name for rollout in rollouts if set(rollout.devices) & set(policy.devices))
        for policy in replicas
        if policy.role is Role.POLICY
    }
    return {name: names for name, names in engines.items() if names}


def process_of(replicas: Iterable[PlacedReplica], role: Role, replica: int, rank: int) -> ProcessSpec | None:
    """The process of a replica, by their numbers: what a head and a node mean by them is the same."""
    processes = (spec for candidate in replicas for spec in candidate.processes)
    identity = (role, replica, rank)
    return next((spec for spec in processes if (spec.role, spec.replica, spec.rank) == identity), None)


def _with_rollouts(config: Config, count: int) -> Config:
    mesh = config.rollout.parallelism.model_copy(update={"n_init_replicas": count})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"parallelism": mesh})})


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The node of each rank of each policy replica, and of each rollout replica."""

    policy: list[list[int]]
    rollout: list[int]


def _gpus_by_node(config: Config, machines: Sequence[Machine]) -> list[tuple[str, ...]]:
    """The GPUs of each node that this job may have, as many on each. Raises PlacementError."""
    gpus = [usable_gpus(config, machine, node) for node, machine in enumerate(machines)]
    for node, names in enumerate(gpus):
        if len(names) != len(gpus[0]):
            message = f"node 0 has {len(gpus[0])} GPUs and node {node} has {len(names)}; devices are numbered by it"
            hint = f"write placement.gpus_per_node = {min(map(len, gpus))}"
            raise PlacementError(Problem("placement.gpus_per_node", message, None, hint))
    return gpus


def _nodes(needed: Needs, devices: Mapping[str, list[tuple[int, ...]]], count: int, gpus_per_node: int) -> _Nodes:
    rollouts = devices.get("rollout", [])
    if gpus_per_node:
        ranks = needed.policy_ranks
        of_policy = [[device // gpus_per_node for device in dealt[:ranks]] for dealt in devices.get("policy", [])]
        for index, dealt in enumerate(rollouts):
            if len({device // gpus_per_node for device in dealt}) > 1:
                raise PlacementError(spans_nodes(index, dealt, gpus_per_node))
        return _Nodes(of_policy, [dealt[0] // gpus_per_node for dealt in rollouts])
    part = -(-needed.policy_ranks // count)
    of_policy = [[rank // part for rank in range(needed.policy_ranks)]] * needed.policy_replicas
    each, of_rollouts = Counter(node for dealt in of_policy for node in dealt), list[int]()
    for _ in rollouts:
        of_rollouts.append(min(range(count), key=lambda node: (each[node], -node)))
        each[of_rollouts[-1]] += 1
    return _Nodes(of_policy, of_rollouts)


def _check_nearness(
    role: RoleLayout, devices: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]], gpus_per_node: int
) -> None:
    """Raises PlacementError: a rank of the policy has its reference model or critic on another machine.

    devices, nodes: of each rank, for each replica of the policy.
    """
    for of_replica, of_ranks in zip(devices, nodes, strict=True):
        for rank, (device, node) in enumerate(zip(of_replica, of_ranks, strict=True)):
            if device // gpus_per_node != node or node < max(of_ranks[:rank], default=0):
                message = (
                    f"{role.listed} gives rank {rank} of the policy device {device} on machine "
                    f"{device // gpus_per_node}, and the rank is on machine {node}, of {gpus_per_node} GPUs each"
                )
                hint = (
                    f"name devices machine by machine in placement.policy and {role.key}, each on that of its rank, "
                    f"or write {role.key} = []"
                )
                raise PlacementError(Problem(role.key, message, role.listed, hint, related=("placement.policy",)))


def replay(config: Config, machine: Machine, ranks: int, arguments: Sequence[str]) -> PlacedReplica:
    """The ranks of a trainer alone, on the devices of the first replica in the job, and with as many threads.

    ranks: where `dp_shard_size = -1` leaves it open. arguments: of `policy_worker.replay`.
    Raises PlacementError.
    """
    role, gpus = policy_layout(config), usable_gpus(config, machine)
    world, needed = role.size or ranks, needs(config, len(gpus))
    listed = [other for other in placed_roles(config) if other.listed]
    available = role.devices or _free(config, listed, len(gpus))
    devices = tuple(available[:world]) if gpus else ()
    if gpus and len(devices) < world:
        raise PlacementError(too_few_to_replay(role, world, len(available), listed, len(gpus)))
    for other in apart_layouts(config) if gpus else ():
        if len(other.devices) < (copies := _data_ranks(config, world)):
            raise PlacementError(unlike_the_policy(other, copies))
        devices += tuple(other.devices[:copies])
    if beyond := sorted(device for device in devices if device >= len(gpus)):
        raise PlacementError(absent_devices(role, beyond, len(gpus)))
    workers = needed.policy_replicas * world + needed.rollout_replicas
    threads = str(cpu_threads(config, machine, workers))
    env = {"COSMOS_CPU_THREADS": threads, "OMP_NUM_THREADS": threads} | _visible([gpus], 0, devices)
    profiled, argv = config.profiler.enable_nsys, _module("policy_worker.replay", *arguments)
    return _policy("replay", [0] * world, [env], devices, profiled, argv)


def _deal(config: Config, needed: Needs, count: int) -> dict[str, list[tuple[int, ...]]]:
    """Role -> devices of each replica; empty tuples when it has none of its own, or the job runs on CPU."""
    roles = {role.name: role for role in placed_roles(config)}
    if not needed.rollout_replicas:
        roles.pop("rollout", None)
    listed = [role for role in roles.values() if role.listed]
    dealt: dict[str, list[tuple[int, ...]]] = {}
    if not count:
        if listed:
            raise PlacementError(_no_gpus(listed))
        return {role.name: [()] * role.replicas for role in roles.values()}
    for role in listed:
        if beyond := sorted(device for device in role.devices if device >= count):
            raise PlacementError(absent_devices(role, beyond, count))
    free = _free(config, listed, count)
    totals = {"policy": needed.policy_replicas * needed.policy_ranks}
    totals["rollout"] = needed.rollout_replicas * needed.rollout_gpus
    start, shared = 0, config.placement.share != "none"
    for name, role in roles.items():
        if role.nested:
            dealt[name] = [tuple(item) for item in role.listed if isinstance(item, list)]
        elif role.listed:
            dealt[name] = role.dealt(role.devices)
        else:
            taken = free[start : start + totals[name]]
            if len(taken) < totals[name]:
                raise PlacementError(too_few(config, needed, listed, len(free), count))
            dealt[name] = role.dealt(taken)
            start += 0 if shared else totals[name]
    for role in apart_layouts(config):
        if len(role.devices) != (copies := _data_ranks(config, totals["policy"])):
            raise PlacementError(unlike_the_policy(role, copies))
    return dealt


def _free(config: Config, listed: list[RoleLayout], count: int) -> list[int]:
    """Devices of the roles that have no list, in the order in which they are dealt."""
    alone = {device for role in apart_layouts(config) for device in role.devices}
    named = [device for role in listed for device in role.devices if device not in alone]
    others = sorted(set(range(count)) - alone - set(named))
    return (named if config.placement.share != "none" else []) + others


def _no_gpus(listed: list[RoleLayout]) -> Problem:
    keys = " and ".join(role.key for role in listed)
    names = f"{keys} name" if len(listed) > 1 else "names"
    message = f"{names} devices, and this machine has no GPU that the installed torch can use"
    hint = f"leave {keys} out: without GPUs all processes share the cores"
    return Problem(listed[0].key, message, listed[0].listed, hint, related=tuple(r.key for r in listed[1:]))


def _data_ranks(config: Config, ranks: int) -> int:
    """Return how many of these ranks of the policy have samples of their own."""
    return ranks // unit_ranks(config.policy.parallelism)


def _visible(gpus: Sequence[tuple[str, ...]], node: int, devices: Sequence[int]) -> dict[str, str]:
    """Return the variables that show processes of a node these devices."""
    per_node = len(gpus[0])
    names = [gpus[node][device % per_node] for device in devices if device // per_node == node]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} | variable_for(len(names))


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    # -P: a folder named `schema` or `controller` in the user's directory must not shadow ours.
    return (sys.executable, "-P", "-m", name, *arguments)


def _policy(
    name: str,
    nodes: Sequence[int],
    envs: Sequence[dict[str, str]],
    devices: tuple[int, ...],
    profiled: bool,
    argv: tuple[str, ...] = (),
    index: int = 0,
) -> PlacedReplica:
    """nodes: of each rank. envs: of each node. index: of the replica among those of its role."""
    ranks, on_node = len(nodes), Counter(nodes)
    processes = tuple(
        ProcessSpec(
            name=name if ranks == 1 else f"{name}-rank{rank}",
            role=Role.POLICY,
            argv=argv or _module("policy_worker"),
            env={
                **envs[node],
                "COSMOS_REPLICA_NAME": name,
                "RANK": str(rank),
                "LOCAL_RANK": str(list(nodes[:rank]).count(node)),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(on_node[node]),
            },
            replica=index,
            rank=rank,
            node=node,
            profiled=profiled,
        )
        for rank, node in enumerate(nodes)
    )
    return PlacedReplica(name, Role.POLICY, processes, rendezvous=True, devices=devices)


def _rollout(
    name: str, env: dict[str, str], devices: tuple[int, ...], node: int, profiled: bool, index: int = 0
) -> PlacedReplica:
    """index: of the replica among those of its role."""
    env, argv = {**env, "COSMOS_REPLICA_NAME": name}, _module("rollout_worker")
    spec = ProcessSpec(name, Role.ROLLOUT, argv, env, replica=index, node=node, profiled=profiled)
    return PlacedReplica(name, Role.ROLLOUT, (spec,), devices=devices)


def another_policy(config: Config, name: str, *machines: Machine) -> PlacedReplica:
    """A policy replica of its own on all GPUs of these machines, whichever it is. Raises PlacementError."""
    mesh = config.policy.parallelism.model_copy(update={"n_init_replicas": 1})
    bare: dict[str, Any] = {"nodes": len(machines), "gpus_per_node": None, "policy": [], "rollout": []}
    alone = config.model_copy(
        update={
            "placement": config.placement.model_copy(update=bare),
            "policy": config.policy.model_copy(update={"parallelism": mesh}),
        }
    )
    (placed,) = place(alone, *machines, rollouts=False)
    processes = tuple(
        replace(spec, name=spec.name.replace(placed.name, name, 1), env={**spec.env, "COSMOS_REPLICA_NAME": name})
        for spec in placed.processes
    )
    return replace(placed, name=name, processes=processes)


def joined(config: Config, name: str, gpus: int) -> PlacedReplica:
    """A rollout replica that joins a job, on all GPUs that its machine or pod has, so many."""
    env = {"COSMOS_CPU_THREADS": str(config.launcher.cpu_threads)} if config.launcher.cpu_threads else {}
    env |= variable_for(gpus)
    return _rollout(name, env, (), 0, profiled=False)


def follower(name: str) -> PlacedReplica:
    """A further machine of an engine, whose replica is that of the first."""
    argv = _module("rollout_worker.engines.vllm.follower")
    return PlacedReplica(name, Role.ROLLOUT, (ProcessSpec(name, Role.ROLLOUT, argv),))


def controller(run_dir: str, host: str, port: int | str) -> PlacedReplica:
    """The controller; its secrets and the address of Redis come with the environment."""
    return _service("controller", Role.CONTROLLER, "controller", run_dir, "--host", host, "--port", str(port))


def data_preparation(run_dir: str, *, early: bool = False) -> PlacedReplica:
    """The process that tokenises the datasets and ends. early: the job may begin before it has prepared all rows."""
    return _service("data", Role.DATA, "controller.data.prepare", run_dir, *(["--early"] if early else []))


def evaluation(run_dir: str) -> list[PlacedReplica]:
    """The two processes of an evaluation, one after the other."""
    return [
        _service("answers", Role.DATA, "controller.data.evaluation", run_dir),
        _service("scores", Role.DATA, "rollout_worker.evaluate", run_dir),
    ]


def _service(name: str, role: Role, module: str, run_dir: str, *arguments: str) -> PlacedReplica:
    """One process around the workers, without a GPU."""
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    argv = _module(module, "--run-dir", run_dir, *arguments)
    return PlacedReplica(name, role, (ProcessSpec(name, role, argv, env),))
