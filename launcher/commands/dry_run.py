"""`cosmos-launch --dry-run`: every process with its command, and how much memory each takes. Starts nothing.

Checked ─▶ place ─▶ processes ─┬─▶ memory of each (launcher.preflight.memory) ─▶ sums per GPU and host ─▶ warnings
                               └─▶ command lines, environment without secrets
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.job.checked import Checked
from launcher.plan import credentials, nsight, placement, redis_server
from launcher.plan.addresses import controller_url
from launcher.plan.credentials import environment
from launcher.plan.machine import Machine, MachineMemory, find_capacity
from launcher.plan.needs import PlacementError
from launcher.plan.placement import PlacedReplica, ProcessSpec, place
from launcher.plan.rundir import RunDir, RunTokens, choose
from launcher.preflight import memory, serving_memory
from launcher.preflight.memory import MemoryPart, size_text
from launcher.preflight.models import LocalModel, UnknownModelError, find_model
from launcher.preflight.serving_memory import Cache
from launcher.restarts import Role
from schema.config import Config, ConfigError, Problem
from schema.config.layout import apart_layouts, mesh_text, unit_ranks
from schema.config.secrets import MASK, masked

HOST = memory.HOST
SECRETS = RunTokens(MASK, MASK, MASK)
FREE_PORT, FREE_SOCKET = "<a free port>", "<a temporary directory>/redis.sock"
WHAT = {
    "data": "tokenises the data and ends",
    "answers": "reads the answers of the file and ends",
    "scores": "scores them by the reward functions and ends",
    "redis": "embedded Valkey, the store of the controller's state",
    "controller": "leases prompts, keeps samples and state",
    "policy": "trains",
    "rollout": "generates and scores",
}
"""By the name of a process, else by its role."""


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process. device: what its memory is counted on, `GPU 0` or `host`. Secrets in `env` are masked."""

    name: str
    role: str
    what: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    gpus: tuple[str, ...]
    threads: int | None
    device: str
    memory: tuple[MemoryPart, ...] = ()
    cache: Cache | None = None
    node: int = 0


@dataclass(slots=True)
class Planned:
    """The plan of a start. used: bytes per device; capacity: bytes per device, 0 where it is not known.

    nodes: machines, all taken to be like `machine`; of several, names of devices begin with theirs.
    """

    machine: Machine
    run_dir: str
    continued: bool
    model: LocalModel | None
    no_model: str
    processes: list[PlannedProcess]
    shared: tuple[MemoryPart, ...]
    used: dict[str, int] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)
    warnings: list[Problem] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    """Uploads and their targets, in words."""
    summary: list[tuple[str, str]] = field(default_factory=list)
    """Steps, batches and roles, in words: name and text."""
    nodes: int = 1

    def on(self, node: int, place: str) -> str:
        """The name of a device of a node."""
        return place if self.nodes == 1 else f"node {node} {place}"

    def as_dict(self) -> dict[str, Any]:
        """For a program; sizes are bytes."""
        data = asdict(self)
        for process, planned in zip(data["processes"], self.processes, strict=True):
            process["memory_bytes"] = sum(part.bytes for part in planned.memory)
            if planned.cache is not None:
                process["cache"]["tokens"] = planned.cache.tokens
        return data


def plan(checked: Checked) -> Planned:
    """Decide everything that a start decides. Raises LaunchError or ConfigError where a start would be refused."""
    config, env = checked.config, checked.request.env
    run, continued = choose(config, checked.resumes, time.time())
    model, no_model = (None, "an evaluation loads none") if config.is_evaluation else _model(config, env)
    teachers = _teachers(config, env)
    try:
        workers = [] if config.is_evaluation else place(config, *[checked.machine] * config.placement.nodes)
    except PlacementError as error:  # of a described machine; for this one it was checked
        raise ConfigError([error.problem]) from None
    described = checked.request.described
    capacity = find_capacity(checked.machine.gpus) if described is None else described.memory()
    processes = [
        _process(config, spec, run, env, _memory_of(config, model, teachers, capacity, replica, spec))
        for replica in [*_services(config, run), *workers]
        for spec in replica.processes
    ]
    shared: tuple[MemoryPart, ...] = ()
    if model is not None and config.generates:
        shared = serving_memory.host_copy(config, model), serving_memory.snapshots(config, model)
    planned = Planned(
        checked.machine, str(run.path), continued, model, no_model, processes, shared,
        warnings=list(checked.warnings), uploads=list(credentials.upload_targets(config, run.path.name, env)),
    )  # fmt: skip
    planned.nodes = 1 if config.is_evaluation else config.placement.nodes
    planned.summary = [] if config.is_evaluation else list(_summary(config, workers))
    _sum_up(planned, capacity, config.shares_time)
    planned.warnings += _warnings(planned, config)
    return planned


def _model(config: Config, env: Mapping[str, str]) -> tuple[LocalModel | None, str]:
    try:
        return find_model(config.policy.model_name_or_path, config.policy.model_revision, env), ""
    except UnknownModelError as error:
        return None, str(error)


def _teachers(config: Config, env: Mapping[str, str]) -> dict[str, LocalModel]:
    """The local teachers that are on this machine, by name."""
    models: dict[str, LocalModel] = {}
    for teacher in config.local_teachers:
        with suppress(UnknownModelError):
            models[teacher.name] = find_model(str(teacher.model), None, env)
    return models


def _services(config: Config, run: RunDir) -> Iterator[PlacedReplica]:
    """The processes around the workers, in the order of their start."""
    if config.is_evaluation:
        yield from placement.evaluation(str(run.path))
        return
    binary = redis_server.valkey_binary()
    if not config.redis.url and binary is not None:
        argv = redis_server.command(binary, FREE_SOCKET, run.redis)
        yield PlacedReplica("redis", Role.REDIS, (ProcessSpec("redis", Role.REDIS, argv),))
    yield placement.data_preparation(str(run.path), early=not config.train.resume)
    yield placement.controller(str(run.path), config.controller.host, config.controller.port or FREE_PORT)


_Memory = tuple[str, tuple[MemoryPart, ...], Cache | None]
"""The device of a process, what it takes there, and the cache of an engine."""


def _memory_of(
    config: Config,
    model: LocalModel | None,
    teachers: Mapping[str, LocalModel],
    capacity: MachineMemory,
    replica: PlacedReplica,
    spec: ProcessSpec,
) -> _Memory:
    """Estimate what one process takes, on the device that it works on."""
    gpus = _gpus(spec)
    if not gpus or spec.role not in (Role.POLICY, Role.ROLLOUT):
        device = HOST
    else:
        device = f"GPU {gpus[spec.rank % len(gpus) if spec.role is Role.POLICY else 0]}"
    if model is not None and spec.role is Role.POLICY:
        mesh, ranks = config.policy.parallelism, len(replica.processes)
        shards = max(1, ranks // mesh.dp_replicate_size)
        data_ranks = max(1, ranks // unit_ranks(mesh))
        apart = {}
        for number, role in enumerate(apart_layouts(config) if gpus else ()):
            gpu = gpus[ranks + number * data_ranks + spec.rank * data_ranks // ranks]
            apart[role.name] = f"GPU {gpu}"
        of_gpu = capacity.gpus.get(device.removeprefix("GPU "), 0) if gpus else 0
        parts = memory.trainer(config, model, shards, data_ranks, apart, teachers, of_gpu)
        if gpus:
            parts += serving_memory.published_on_device(config, model, ranks, of_gpu)
        return device, parts, None
    if model is not None and spec.role is Role.ROLLOUT:
        return _rollout_memory(config, model, capacity, device, gpus)
    return device, (), None


def _rollout_memory(
    config: Config, model: LocalModel, capacity: MachineMemory, device: str, gpus: tuple[str, ...]
) -> _Memory:
    ranks, on_gpu = max(1, len(gpus)), bool(gpus)
    free = capacity.gpus.get(gpus[0], 0) if on_gpu else capacity.host_free
    cache = serving_memory.rollout_cache(config, model, ranks, free, on_gpu=on_gpu) if free else None
    parts = [serving_memory.rollout_weights(config, model, ranks)]
    if cache is not None:
        takes_all = on_gpu and config.rollout.engine.reserves_memory
        words = f"{size_text(cache.per_token)} per token, room for {cache.tokens:,} tokens"
        parts.append(MemoryPart("KV cache", cache.room if takes_all else cache.bytes, words))
    return device, tuple(parts), cache


def _gpus(spec: ProcessSpec) -> tuple[str, ...]:
    return tuple(name for name in spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)


def _process(
    config: Config, spec: ProcessSpec, run: RunDir, env: Mapping[str, str], needs: _Memory
) -> PlannedProcess:
    url = controller_url(config, config.controller.port or FREE_PORT)
    store = str(masked(config.redis.url)) or f"unix://{FREE_SOCKET}"
    password = MASK if config.redis.url and env.get("COSMOS_REDIS_PASSWORD") else ""
    secrets = environment(spec.role, SECRETS, url, store, password, config.controller.tls_ca)
    if spec.role is Role.POLICY:
        secrets |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": FREE_PORT}
    threads = spec.env.get("COSMOS_CPU_THREADS")
    purpose = WHAT.get(spec.name) or WHAT[str(spec.role)]
    argv = (*(nsight.command(run.profiles, spec.name) if spec.profiled else ()), *spec.argv)
    return PlannedProcess(
        spec.name, str(spec.role), purpose, argv, {**spec.env, **secrets}, _gpus(spec),
        int(threads) if threads else None, *needs, spec.node,
    )  # fmt: skip


def _sum_up(planned: Planned, capacity: MachineMemory, shares_time: bool) -> None:
    """Bytes per device; every process also takes host memory for its program, and loads its model there.

    takes_turns: a GPU holds trainer or engine, not both."""
    used = planned.used
    for node in range(planned.nodes):
        used[planned.on(node, HOST)] = sum(part.bytes for part in planned.shared)
    of_role: dict[tuple[int, str, str], int] = {}
    for process in planned.processes:
        node = process.node
        used[planned.on(node, HOST)] += memory.PROGRAM_BYTES.get(process.role, 0)
        # The first device stands for all of a rollout replica: each holds the same.
        others = process.gpus[1:] if process.role == Role.ROLLOUT else ()
        for device in (process.device, *(f"GPU {name}" for name in others)):
            used.setdefault(planned.on(node, device), 0)
            for part in process.memory:
                key = node, part.device or device, process.role
                of_role[key] = of_role.get(key, 0) + part.bytes
    for (node, device, role), size in of_role.items():
        in_turn, name = shares_time and device != HOST, planned.on(node, device)
        used[name] = max(used.get(name, 0), size) if in_turn else used.get(name, 0) + size
        if in_turn and role == Role.POLICY:
            used[planned.on(node, HOST)] += size  # where it is between its turns
    free = {HOST: capacity.host_free} | {f"GPU {name}": capacity.gpus.get(name, 0) for name in planned.machine.gpus}
    planned.capacity = {planned.on(node, name): size for node in range(planned.nodes) for name, size in free.items()}


def _summary(config: Config, workers: Sequence[PlacedReplica]) -> Iterator[tuple[str, str]]:
    """Steps, samples, what is in flight at most, and the devices of each role."""
    train, epochs = config.train, config.train.epoch
    steps = f"{train.max_num_steps:,} steps at most, " if train.max_num_steps else ""
    yield "steps", f"{steps}{epochs} {'pass' if epochs == 1 else 'passes'} over the data"
    if config.is_grpo:
        groups, size = config.groups_per_step, config.group_size
        yield (
            "batch",
            f"{config.samples_per_step:,} samples a step: {groups:,} groups of {config.rollout.n_generation}",
        )
        bound = config.staleness_bound
        flying, longest = (bound + 1) * groups, config.longest_sequence
        text = f"{flying:,} groups at most (a staleness of {bound} steps), {flying * size:,} samples"
        yield "in flight", f"{text} of up to {longest:,} tokens: {flying * size * longest:,}"
    else:
        yield "batch", f"{config.samples_per_step:,} samples a step"
    for role in (Role.POLICY, Role.ROLLOUT):
        replicas = [replica for replica in workers if replica.role is role]
        if replicas:
            yield str(role), _devices_of(config, role, replicas)


def _devices_of(config: Config, role: Role, replicas: Sequence[PlacedReplica]) -> str:
    mesh = config.policy.parallelism if role is Role.POLICY else config.rollout.parallelism
    specs = [spec for replica in replicas for spec in replica.processes]
    gpus = sum(len(replica.devices) for replica in replicas)
    text = f"{len(replicas)} {'replica' if len(replicas) == 1 else 'replicas'}"
    if role is Role.POLICY:
        text += f" of {len(replicas[0].processes)} ranks" if len(specs) > 1 else " of one rank"
    text += f" ({mesh_text(mesh)}), " + (f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "on the CPU")
    nodes = sorted({spec.node for spec in specs})
    return text + (f", nodes {', '.join(map(str, nodes))}" if config.placement.nodes > 1 else "")


def _warnings(planned: Planned, config: Config) -> list[Problem]:
    if planned.model is None:
        return []
    warnings = []
    for device, used in planned.used.items():
        capacity = planned.capacity.get(device, 0)
        if capacity and used > capacity:
            warnings.append(_too_much(planned, device, used, capacity))
    for process in planned.processes:
        cache = process.cache
        if cache is not None and cache.tokens < cache.sequence_tokens:
            message = (
                f"the KV cache of {process.name} has room for {cache.tokens:,} tokens, less than one sequence "
                f"of {cache.sequence_tokens:,}"
            )
            hint = "a larger share, a shorter rollout.max_model_len, or more GPUs in rollout.parallelism.tp_size"
            reserves = config.rollout.engine.reserves_memory
            key = "rollout.gpu_memory_utilization" if reserves else "rollout.backend"
            warnings.append(Problem(key, message, None, hint))
            break
    return warnings


def _too_much(planned: Planned, device: str, used: int, capacity: int) -> Problem:
    members = [
        process
        for process in planned.processes
        if planned.on(process.node, process.device) == device and process.memory
    ]
    trains = any(process.role == Role.POLICY for process in members)
    state = "free" if device.endswith(HOST) else "there"
    message = f"about {size_text(used)} are needed on {device}, {size_text(capacity)} are {state}"
    hint = "a smaller rollout.gpu_memory_utilization, or a smaller model"
    if trains:
        hint = (
            "lower train.train_policy.mini_batch (or write max_token_len_per_mini_batch), shard over more ranks "
            "(policy.parallelism.dp_shard_size), or take a smaller model"
        )
    names = {part.name for process in planned.processes for part in process.memory if part.device == device}
    if names:
        role = "reference" if "reference model" in names else "critic"
        hint = f"leave placement.{role} out: then it is sharded over the policy's devices"
        return Problem(f"placement.{role}", message, used, hint)
    return Problem("policy.model_name_or_path", message, used, hint)


def plan_lines(planned: Planned) -> Iterator[str]:
    """The plan for people."""
    machine = planned.machine
    gpus = f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU"
    size = planned.capacity[planned.on(0, HOST)]
    free = f"{size_text(size)} of host memory free" if size or machine.is_here else "host memory unknown"
    yield f"machine   {machine.cores} cores, {gpus}, {free}{'' if machine.is_here else ' (as described)'}"
    yield f"run       {planned.run_dir} ({'continued' if planned.continued else 'new'})"
    if planned.model is not None:
        yield f"model     {planned.model.path}, {planned.model.parameters:,} parameters by {planned.model.source}"
    else:
        yield f"model     no memory estimate: {planned.no_model}"
    yield from (f"{name:<10}{text}" for name, text in planned.summary)
    yield ""
    yield "processes (each also gets the environment of this command; *** are secrets of the run)"
    for process in planned.processes:
        yield from _process_lines(process)
    if planned.model is not None:
        yield ""
        yield from _memory_lines(planned)
    if planned.uploads:
        yield ""
        yield "uploads"
        yield from (f"  {text}" for text in planned.uploads)
    yield ""
    yield "nothing was started"


def _process_lines(process: PlannedProcess) -> Iterator[str]:
    where = [f"GPU {','.join(process.gpus)}"] if process.gpus else []
    threads = [f"CPU threads {process.threads}"] if process.threads else []
    yield f"  {process.name}: {', '.join([process.what, *where, *threads])}"
    yield f"    $ {shlex.join(process.argv)}"
    if process.env:
        yield "    " + " ".join(f"{key}={shlex.quote(value)}" for key, value in process.env.items())


def _memory_lines(planned: Planned) -> Iterator[str]:
    yield "memory (an estimate)"
    for process in planned.processes:
        if not process.memory:
            continue
        total = sum(part.bytes for part in process.memory)
        yield f"  {process.name} on {planned.on(process.node, process.device)}: {size_text(total)}"
        for part in process.memory:
            yield f"    {part.name:<27}{size_text(part.bytes):>10}  {part.formula}" + (
                f" (on {part.device})" if part.device else ""
            )
        cache = process.cache
        if cache is not None:
            full = min(cache.tokens // cache.sequence_tokens, cache.sequences)
            yield (
                f"    {'':<27}{'':>10}  {full:,} of {cache.sequences:,} sequences at once fit at full length, "
                f"{cache.sequence_tokens:,} tokens"
            )
    for part in planned.shared:
        yield f"  {part.name} (host memory): {size_text(part.bytes)}  {part.formula}"
    for device, used in planned.used.items():
        capacity = planned.capacity.get(device, 0)
        of_host = device.endswith(HOST)
        of = f" of {size_text(capacity)}{' free' if of_host else ''}" if capacity else ""
        programs = ", programs included" if of_host else ""
        yield f"  sum on {device}: {size_text(used)}{of}{programs}"
