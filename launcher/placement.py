"""Which processes a job has and what each gets: a pure function of the config and the machine.

    redis (if embedded) ─ controller ─ policy-0 (ranks 0 … n-1) ─ rollout-0 … rollout-k

GPUs are dealt in this order: first the rollout replicas' fixed needs are set aside, `dp_shard_size = -1` takes
what is left, then policy replicas get the first devices and rollout replicas the rest. Without GPUs everything
runs on CPU and -1 means one rank. On a machine with a single GPU a policy and a rollout replica of one GPU each
share it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.machine import Machine
from launcher.restarts import Role
from schema.config import Config


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: what to run, without secrets. `name` is also that of its log file."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Replica:
    """Processes that live and die together. `rendezvous`: its ranks need a fresh MASTER_PORT at each start."""

    name: str
    role: Role
    processes: tuple[ProcessSpec, ...]
    rendezvous: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """How many GPUs (or, on CPU, ranks) a job takes."""

    policy_replicas: int
    policy_ranks: int
    rollout_replicas: int
    rollout_gpus: int

    @property
    def gpus(self) -> int:
        return self.policy_replicas * self.policy_ranks + self.rollout_replicas * self.rollout_gpus


class PlacementError(ValueError):
    """The job does not fit this machine; the message says what it needs and what there is."""


def needs(config: Config, gpus: int) -> Needs:
    """Ranks per replica. -1 of `policy.parallelism.dp_shard_size` takes the GPUs that rollouts leave."""
    mesh, engine = config.policy.parallelism, config.rollout.parallelism
    rollouts = engine.n_init_replicas if config.is_grpo else 0
    per_rollout = engine.tp_size * engine.pp_size * engine.cp_size * max(1, engine.dp_shard_size)
    fixed = mesh.tp_size * mesh.cp_size * mesh.pp_size * mesh.dp_replicate_size
    shards = mesh.dp_shard_size
    if shards == -1:
        left = gpus - rollouts * per_rollout
        shards = max(1, left // (fixed * mesh.n_init_replicas))
    return Needs(mesh.n_init_replicas, fixed * shards, rollouts, per_rollout if rollouts else 0)


def cpu_threads(config: Config, machine: Machine, worker_processes: int) -> int:
    """Torch threads per worker process: two OpenMP teams on one core slow each other down many times."""
    return config.launcher.cpu_threads or max(1, machine.cores // max(1, worker_processes))


def place(config: Config, machine: Machine) -> list[Replica]:
    """Policy and rollout replicas with their devices and threads. Raises PlacementError."""
    wanted = needs(config, len(machine.gpus))
    devices = _deal(wanted, machine.gpus)
    workers = wanted.policy_replicas * wanted.policy_ranks + wanted.rollout_replicas
    threads = str(cpu_threads(config, machine, workers))
    common = {"COSMOS_CPU_THREADS": threads, "OMP_NUM_THREADS": threads}
    replicas = []
    for index in range(wanted.policy_replicas):
        name = f"policy-{index}"
        replicas.append(_policy(name, wanted.policy_ranks, {**common, **_visible(devices[name])}))
    for index in range(wanted.rollout_replicas):
        name = f"rollout-{index}"
        replicas.append(_rollout(name, {**common, **_visible(devices[name])}))
    return replicas


def _deal(wanted: Needs, gpus: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Devices of each replica; empty tuples when the job runs on CPU."""
    sizes = {f"policy-{i}": wanted.policy_ranks for i in range(wanted.policy_replicas)}
    sizes |= {f"rollout-{i}": wanted.rollout_gpus for i in range(wanted.rollout_replicas)}
    if not gpus:
        return dict.fromkeys(sizes, ())
    if shares_gpu(wanted, len(gpus)):
        return dict.fromkeys(sizes, gpus)
    if wanted.gpus > len(gpus):
        raise PlacementError(
            f"the job needs {wanted.gpus} GPUs ({wanted.policy_replicas} policy replicas of {wanted.policy_ranks}, "
            f"{wanted.rollout_replicas} rollout replicas of {wanted.rollout_gpus}), this machine has {len(gpus)}"
        )
    dealt: dict[str, tuple[str, ...]] = {}
    start = 0
    for name, size in sizes.items():
        dealt[name] = gpus[start : start + size]
        start += size
    return dealt


def shares_gpu(wanted: Needs, gpus: int) -> bool:
    """Whether one policy and one rollout replica, each of one GPU, share the only one."""
    return gpus == 1 and wanted.policy_replicas * wanted.policy_ranks == 1 and wanted.gpus == 2


def _visible(devices: tuple[str, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    # -P: a folder named `schema` or `controller` in the user's directory must not shadow ours.
    return (sys.executable, "-P", "-m", name, *arguments)


def _policy(name: str, ranks: int, env: dict[str, str]) -> Replica:
    processes = tuple(
        ProcessSpec(
            name=name if ranks == 1 else f"{name}-rank{rank}",
            role=Role.POLICY,
            argv=_module("policy_worker"),
            env={
                **env,
                "COSMOS_REPLICA_NAME": name,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
            },
            rank=rank,
        )
        for rank in range(ranks)
    )
    return Replica(name, Role.POLICY, processes, rendezvous=True)


def _rollout(name: str, env: dict[str, str]) -> Replica:
    spec = ProcessSpec(name, Role.ROLLOUT, _module("rollout_worker"), {**env, "COSMOS_REPLICA_NAME": name})
    return Replica(name, Role.ROLLOUT, (spec,))


def controller(run_dir: str, host: str, port: int) -> Replica:
    """The controller; its secrets and the address of Redis come with the environment."""
    argv = _module("controller", "--run-dir", run_dir, "--host", host, "--port", str(port))
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return Replica("controller", Role.CONTROLLER, (ProcessSpec("controller", Role.CONTROLLER, argv, env),))


def data_preparation(run_dir: str) -> Replica:
    """The process that tokenises the datasets and ends."""
    argv = _module("controller.data.prepare", "--run-dir", run_dir)
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return Replica("data", Role.DATA, (ProcessSpec("data", Role.DATA, argv, env),))
