"""`cosmos-launch --dry-run`: every process with its command, and how much memory each takes. Starts nothing.

Checked ─▶ place ─▶ processes ─┬─▶ memory of each (launcher.preflight.memory) ─▶ sums per GPU and host ─▶ warnings
                               └─▶ command lines, environment without secrets
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.job.run import Checked
from launcher.plan import credentials, nsight, placement, redis_server
from launcher.plan.machine import Capacity, Machine, find_capacity
from launcher.plan.placement import ProcessSpec, Replica, place
from launcher.plan.rundir import RunDir, Tokens, choose, environment
from launcher.plan.tls import controller_url
from launcher.preflight import memory
from launcher.preflight.memory import Cache, Part, size_text
from launcher.preflight.models import LocalModel, UnknownModelError, find_model
from launcher.restarts import Role
from schema.config import Config, Problem
from schema.config.layout import apart_layouts
from schema.config.secrets import MASK, masked

HOST = memory.HOST
SECRETS = Tokens(MASK, MASK, MASK)
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
    memory: tuple[Part, ...] = ()
    cache: Cache | None = None


@dataclass(slots=True)
class Planned:
    """What a start would do. used: bytes per device; capacity: bytes per device, 0 where it is not known."""

    machine: Machine
    run_dir: str
    continued: bool
    model: LocalModel | None
    no_model: str
    processes: list[PlannedProcess]
    shared: tuple[Part, ...]
    used: dict[str, int] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)
    warnings: list[Problem] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    """What goes where, in words."""

    def as_dict(self) -> dict[str, Any]:
        """For a program; sizes are bytes."""
        data = asdict(self)
        for process, planned in zip(data["processes"], self.processes, strict=True):
            process["memory_bytes"] = sum(part.bytes for part in planned.memory)
            if planned.cache is not None:
                process["cache"]["tokens"] = planned.cache.tokens
        return data


def plan(checked: Checked, *, resume: bool, env: Mapping[str, str]) -> Planned:
    """Decide everything that a start decides. Raises LaunchError where a start would be refused."""
    config = checked.config
    run, continued = choose(config, resume or config.train.resume is True, time.time())
    model, no_model = (None, "an evaluation loads none") if config.is_evaluation else _model(config, env)
    teachers = _teachers(config, env)
    workers = [] if config.is_evaluation else place(config, checked.machine)
    capacity = find_capacity(checked.machine.gpus)
    processes = [
        _process(config, spec, run, env, _memory_of(config, model, teachers, capacity, replica, spec))
        for replica in [*_services(config, run), *workers]
        for spec in replica.processes
    ]
    shared: tuple[Part, ...] = ()
    if model is not None and config.is_grpo:
        shared = memory.host_copy(config, model), memory.snapshots(config, model)
    planned = Planned(
        checked.machine, str(run.path), continued, model, no_model, processes, shared,
        warnings=list(checked.warnings), uploads=list(credentials.upload_targets(config, run.path.name, env)),
    )  # fmt: skip
    _sum_up(planned, capacity, config.takes_turns)
    planned.warnings += _warnings(planned, config)
    return planned


def _model(config: Config, env: Mapping[str, str]) -> tuple[LocalModel | None, str]:
    try:
        return find_model(config.policy.model_name_or_path, config.policy.model_revision, env), ""
    except UnknownModelError as error:
        return None, str(error)


def _teachers(config: Config, env: Mapping[str, str]) -> dict[str, LocalModel]:
    """The local teachers that are on this machine, by name."""
    found: dict[str, LocalModel] = {}
    for teacher in config.local_teachers:
        with suppress(UnknownModelError):
            found[teacher.name] = find_model(str(teacher.model), None, env)
    return found


def _services(config: Config, run: RunDir) -> Iterator[Replica]:
    """The processes around the workers, in the order of their start."""
    if config.is_evaluation:
        yield from placement.evaluation(str(run.path))
        return
    binary = redis_server.valkey_binary()
    if not config.redis.url and binary is not None:
        argv = redis_server.command(binary, FREE_SOCKET, run.redis)
        yield Replica("redis", Role.REDIS, (ProcessSpec("redis", Role.REDIS, argv),))
    yield placement.data_preparation(str(run.path))
    service = placement.controller(str(run.path), config.controller.host, config.controller.port)
    if not config.controller.port:
        (spec,) = service.processes
        argv = (*spec.argv[:-1], FREE_PORT)
        service = Replica(service.name, service.role, (ProcessSpec(spec.name, spec.role, argv, spec.env),))
    yield service


@dataclass(frozen=True, slots=True)
class _Memory:
    device: str
    parts: tuple[Part, ...] = ()
    cache: Cache | None = None


def _memory_of(
    config: Config,
    model: LocalModel | None,
    teachers: Mapping[str, LocalModel],
    capacity: Capacity,
    replica: Replica,
    spec: ProcessSpec,
) -> _Memory:
    """What one process takes, on the device that it works on."""
    gpus = _gpus(spec)
    if not gpus or spec.role not in (Role.POLICY, Role.ROLLOUT):
        device = HOST
    else:
        device = f"GPU {gpus[spec.rank % len(gpus) if spec.role is Role.POLICY else 0]}"
    if model is not None and spec.role is Role.POLICY:
        mesh, ranks = config.policy.parallelism, len(replica.processes)
        shards = max(1, ranks // mesh.dp_replicate_size)
        data_ranks = max(1, ranks // (mesh.tp_size * mesh.cp_size * mesh.pp_size))
        apart = {}
        for number, role in enumerate(apart_layouts(config) if gpus else ()):
            mine = gpus[ranks + number * data_ranks + spec.rank * data_ranks // ranks]
            apart[role.name] = f"GPU {mine}"
        return _Memory(device, memory.trainer(config, model, shards, data_ranks, apart, teachers))
    if model is not None and spec.role is Role.ROLLOUT:
        return _rollout_memory(config, model, capacity, device, gpus)
    return _Memory(device)


def _rollout_memory(
    config: Config, model: LocalModel, capacity: Capacity, device: str, gpus: tuple[str, ...]
) -> _Memory:
    ranks, on_gpu = max(1, len(gpus)), bool(gpus)
    free = capacity.gpus.get(gpus[0], 0) if on_gpu else capacity.host_free
    cache = memory.rollout_cache(config, model, ranks, free, on_gpu=on_gpu) if free else None
    parts = [memory.rollout_weights(config, model, ranks)]
    if cache is not None:
        takes_all = on_gpu and config.rollout.engine.reserves_memory
        words = f"{size_text(cache.per_token)} per token, room for {cache.tokens:,} tokens"
        parts.append(Part("KV cache", cache.room if takes_all else cache.bytes, words))
    return _Memory(device, tuple(parts), cache)


def _gpus(spec: ProcessSpec) -> tuple[str, ...]:
    return tuple(name for name in spec.env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name)


def _process(
    config: Config, spec: ProcessSpec, run: RunDir, env: Mapping[str, str], needs: _Memory
) -> PlannedProcess:
    url = controller_url(config, config.controller.port or FREE_PORT)
    store = str(masked(config.redis.url)) or f"unix://{FREE_SOCKET}"
    password = MASK if config.redis.url and env.get("COSMOS_REDIS_PASSWORD") else ""
    own = environment(spec.role, SECRETS, url, store, password, config.controller.tls_ca)
    if spec.role is Role.POLICY:
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": FREE_PORT}
    threads = spec.env.get("COSMOS_CPU_THREADS")
    what = WHAT.get(spec.name) or WHAT[str(spec.role)]
    argv = (*(nsight.command(run.profiles, spec.name) if spec.profiled else ()), *spec.argv)
    return PlannedProcess(
        spec.name, str(spec.role), what, argv, {**spec.env, **own}, _gpus(spec),
        int(threads) if threads else None, needs.device, needs.parts, needs.cache,
    )  # fmt: skip


# ---- sums -------------------------------------------------------------------------------------------------


def _sum_up(planned: Planned, capacity: Capacity, takes_turns: bool) -> None:
    """Bytes per device; every process also takes host memory for its program, and loads its model there.

    takes_turns: a GPU holds trainer or engine, not both."""
    used = planned.used
    used[HOST] = sum(part.bytes for part in planned.shared)
    of_role: dict[tuple[str, str], int] = {}
    for process in planned.processes:
        used[HOST] += memory.PROGRAM_BYTES.get(process.role, 0)
        # The first device stands for all of a rollout replica: each holds the same.
        others = process.gpus[1:] if process.role == Role.ROLLOUT else ()
        for device in (process.device, *(f"GPU {name}" for name in others)):
            used.setdefault(device, 0)
            for part in process.memory:
                place = part.device or device
                of_role[place, process.role] = of_role.get((place, process.role), 0) + part.bytes
    for (place, role), size in of_role.items():
        in_turns = takes_turns and place != HOST
        used[place] = max(used.get(place, 0), size) if in_turns else used.get(place, 0) + size
        if in_turns and role == Role.POLICY:
            used[HOST] += size  # where it is between its turns
    planned.capacity = {HOST: capacity.host_free}
    planned.capacity |= {f"GPU {name}": capacity.gpus.get(name, 0) for name in planned.machine.gpus}


def _warnings(planned: Planned, config: Config) -> list[Problem]:
    if planned.model is None:
        return []
    found = []
    for device, used in planned.used.items():
        there = planned.capacity.get(device, 0)
        if there and used > there:
            found.append(_too_much(planned, device, used, there))
    for process in planned.processes:
        cache = process.cache
        if cache is not None and cache.tokens < cache.sequence_tokens:
            message = (
                f"the KV cache of {process.name} has room for {cache.tokens:,} tokens, less than one sequence "
                f"of {cache.sequence_tokens:,}"
            )
            hint = (
                "a larger share, a shorter rollout.max_model_len, or more GPUs in rollout.parallelism.tp_size"
            )
            reserves = config.rollout.engine.reserves_memory
            key = "rollout.gpu_memory_utilization" if reserves else "rollout.backend"
            found.append(Problem(key, message, None, hint))
            break
    return found


def _too_much(planned: Planned, device: str, used: int, there: int) -> Problem:
    members = [process for process in planned.processes if process.device == device and process.memory]
    trains = any(process.role == Role.POLICY for process in members)
    state = "free" if device == HOST else "there"
    message = f"about {size_text(used)} are needed on {device}, {size_text(there)} are {state}"
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


# ---- text -------------------------------------------------------------------------------------------------


def plan_lines(planned: Planned) -> Iterator[str]:
    """The plan for people."""
    machine = planned.machine
    gpus = f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU"
    yield f"machine   {machine.cores} cores, {gpus}, {size_text(planned.capacity[HOST])} of host memory free"
    yield f"run       {planned.run_dir} ({'continued' if planned.continued else 'new'})"
    if planned.model is not None:
        yield f"model     {planned.model.path}, {planned.model.parameters:,} parameters by {planned.model.source}"
    else:
        yield f"model     no memory estimate: {planned.no_model}"
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
        yield f"  {process.name} on {process.device}: {size_text(total)}"
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
        there = planned.capacity.get(device, 0)
        of = f" of {size_text(there)}{' free' if device == HOST else ''}" if there else ""
        programs = ", programs included" if device == HOST else ""
        yield f"  sum on {device}: {size_text(used)}{of}{programs}"
