"""Checks of the machine before any process starts: all problems at once, one message each.

The configuration itself (types, rules, files, columns) is checked by `schema.config.load_config`; this is about
ports, packages, GPUs, Redis and disk, which differ from machine to machine. `cosmos-launch validate` shows
the same findings as warnings, since the job may run elsewhere.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.paths import absolute
from launcher.plan import redis_server
from launcher.plan.machine import Machine, has_module
from launcher.plan.needs import PlacementError, needs
from launcher.plan.nsight import check_nsight
from launcher.plan.placement import place_elastic
from launcher.plan.tls import check_encryption, unencrypted_addresses
from launcher.preflight.hardware import check_engine_hardware, check_gpus_open, check_hardware
from launcher.preflight.memory import size_text
from launcher.preflight.packages import (
    check_engine_options,
    check_engine_version,
    check_overrides,
    installed_vllm,
    missing_compiler,
    missing_packages,
)
from schema.config import Config, Problem, check_warnings, local_path
from schema.config.layout import policy_layout
from schema.config.rules.engine import impossible_without_gpus
from schema.config.rules.named import unread_models
from schema.config.rules.profiler import absent_ranks
from schema.util.gpus import VISIBLE

MIN_FREE_BYTES = 64 * 1024 * 1024
"""Room for logs, prepared data and the state of the ledger of a small job."""

MOST_CPU_RANKS = 2
"""One trainer and one engine: a job with more of them is written for GPUs and takes too long on cores."""


@dataclass(slots=True)
class Findings:
    """Problems end the start, warnings are shown."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def check_all(
    config: Config,
    machine: Machine,
    env: Mapping[str, str],
    *,
    asks_redis: bool,
    joins: bool = False,
    rollouts: bool = True,
) -> Findings:
    """Everything that can be checked before a process starts. asks_redis: whether the named server may be asked.

    Takes seconds on a machine with GPUs, which PyTorch is asked to open.

    joins: controller and Redis run elsewhere. rollouts: whether the job starts its rollout replicas itself.
    """
    machine_findings = check_machine(config, machine, joins=joins, rollouts=rollouts)
    redis = check_redis(config, env) if asks_redis and not joins else Findings()
    warnings = check_warnings(config) + unencrypted_addresses(config, env)
    problems = machine_findings.problems + redis.problems + unset_variables(config, env)
    unusable, doubtful = ([], []) if config.is_evaluation else check_gpus_open(machine)
    return Findings(problems + unusable, warnings + machine_findings.warnings + redis.warnings + doubtful)


def check_machine(config: Config, machine: Machine, *, joins: bool = False, rollouts: bool = True) -> Findings:
    """Everything that can be found without the network; takes milliseconds.

    joins: the controller runs elsewhere. rollouts: whether the job starts its rollout replicas itself.
    """
    findings = Findings()
    findings.problems += missing_packages(config, has_module)
    if config.is_evaluation:  # reads a file and runs reward functions: no port, GPU or Redis
        _check_disk(config, findings)
        return findings
    findings.warnings += unread_models(config)
    findings.problems += check_engine_version(config, installed_vllm())
    findings.problems += check_engine_options(config)
    findings.problems += check_overrides(config)
    findings.problems += check_nsight(config)
    if not joins:
        findings.problems += _port_problems(config.controller.host, config.controller.port)
    problems, warnings = check_encryption(config)
    findings.problems += problems
    findings.warnings += warnings
    _check_gpus(config, machine, findings, rollouts=rollouts)
    _check_disk(config, findings)
    if not config.redis.url and redis_server.valkey_binary() is None:
        message = "the embedded Valkey is not installed for this machine"
        findings.problems.append(Problem("redis.url", message, "", redis_server.MISSING_HINT))
    return findings


def check_redis(config: Config, env: Mapping[str, str]) -> Findings:
    """Whether the named server answers and keeps what it is given. May take `CONNECT_TIMEOUT` seconds."""
    findings, server = Findings(), redis_server.named(config.redis, env)
    if server is None or config.is_evaluation:
        return findings
    try:
        warnings = redis_server.check(server, config.controller.require_durable_redis)
    except redis_server.RedisUnusableError as problem:
        findings.problems.append(Problem("redis.url", problem.message, None, problem.hint))
    else:
        hint = "set `appendonly yes` and `maxmemory-policy noeviction`"
        findings.warnings += [Problem("redis.url", text, None, hint) for text in warnings]
    return findings


def unset_variables(config: Config, env: Mapping[str, str]) -> list[Problem]:
    """Variables that `reward.environment` and teachers name and the environment of this command does not have."""
    names = {f"reward.environment[{index}]": name for index, name in enumerate(config.reward.environment)}
    for index, teacher in enumerate([] if config.validation.only else config.teacher):
        if teacher.key_variable:
            names[f"teacher[{index}].key_variable"] = teacher.key_variable
    hint = "export {}=… before the start, or leave the name out"
    return [
        Problem(key, f"{name} is not set in the environment", name, hint.format(name))
        for key, name in names.items()
        if name not in env and name != VISIBLE  # the launcher gives each replica its own
    ]


def _port_problems(host: str, port: int) -> list[Problem]:
    key = "controller.port"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        hint = "write 127.0.0.1, 0.0.0.0 or an address of this machine"
        return [Problem("controller.host", f"{host} cannot be resolved: {error}", host, hint)]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                hint = "write 127.0.0.1, 0.0.0.0 or an address of this machine"
                return [Problem("controller.host", f"{host} is not an address of this machine", host, hint)]
            hint = "end the program that listens there, choose another port, or 0 for any free one"
            state = "in use" if error.errno == errno.EADDRINUSE else f"not available: {error.strerror}"
            return [Problem(key, f"port {port} on {host} is {state}", port, hint)]
    return []


def _check_gpus(config: Config, machine: Machine, findings: Findings, *, rollouts: bool) -> None:
    try:
        _, reserve = place_elastic(config, *[machine] * config.placement.nodes, rollouts=rollouts)
        findings.warnings += _room_to_scale(config, len(reserve), rollouts=rollouts)
    except PlacementError as error:
        findings.problems.append(error.problem)
    findings.problems += check_hardware(config, machine)
    findings.problems += check_engine_hardware(config, machine)
    if not machine.gpus:
        findings.problems += impossible_without_gpus(config)
    findings.problems += missing_compiler(config, machine, os.environ)
    if config.train.compile and not machine.gpus:
        message = "true compiles for minutes at the start, and on a CPU a step is hardly faster for it"
        hint = "write train.compile = false"
        findings.warnings.append(Problem("train.compile", message, True, hint))
    if machine.unused_gpus:
        message = f"the installed torch is built without CUDA: {machine.unused_gpus} GPUs stay unused"
        findings.warnings.append(Problem("", message, hint="install a CUDA build of torch"))
    nodes = config.placement.nodes
    needed = needs(config, len(machine.gpus) * nodes, rollouts=rollouts)
    if policy_layout(config).size is None:  # else the configuration has been checked for it
        findings.problems += absent_ranks(config, needed.policy_ranks)
    ranks = needed.policy_replicas * needed.policy_ranks + needed.rollout_replicas * needed.rollout_gpus
    if not machine.gpus and ranks > MOST_CPU_RANKS * nodes:
        message = f"{ranks} ranks of trainers and engines would share {machine.cores} cores: this machine has no GPU"
        hint = "start it where the GPUs are, or write policy.parallelism.dp_shard_size = 1 and "
        hint += "rollout.parallelism.n_init_replicas = 1"
        findings.warnings.append(Problem("", message, hint=hint))
    processes = needed.policy_replicas * needed.policy_ranks + needed.rollout_replicas
    threads, fair = config.launcher.cpu_threads, max(1, machine.cores * nodes // processes)
    if not machine.gpus and threads and threads > fair:
        message = f"{processes} worker processes of {threads} threads share {machine.cores} cores"
        hint = f"leave it out: {fair} each, which is faster"
        findings.warnings.append(Problem("launcher.cpu_threads", message, threads, hint))


def _room_to_scale(config: Config, reserve: int, *, rollouts: bool) -> Iterator[Problem]:
    scale, first = config.autoscale, config.rollout.parallelism.n_init_replicas
    if scale.enable and rollouts and config.is_grpo and first + reserve < scale.max_replicas:
        message = f"{scale.max_replicas} rollout replicas may be needed, and there is room for {first + reserve} here"
        hint = f"write {first + reserve}, or let others join from elsewhere (cosmos-launch join)"
        if policy_layout(config).size is None:
            hint = "write a number for policy.parallelism.dp_shard_size: -1 takes all GPUs that the start leaves"
        yield Problem("autoscale.max_replicas", message, scale.max_replicas, hint)


def _check_disk(config: Config, findings: Findings) -> None:
    key, target = "train.output_dir", Path(absolute(config.train.output_dir))
    existing = next(path for path in (target, *target.parents) if os.path.lexists(path))
    if not existing.is_dir():
        hint = "choose another directory"
        findings.problems.append(Problem(key, f"{existing} is not a directory", str(target), hint))
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        hint = "choose another directory, or change its permissions"
        findings.problems.append(Problem(key, f"{existing} cannot be written to", str(target), hint))
        return
    model = 0 if config.is_evaluation else _model_bytes(config.policy.model_name_or_path)
    free = shutil.disk_usage(existing).free
    # With deltas two anchors at a time, and deltas that together are about one more: `keep` is an upper bound.
    versions = 0 if config.weight_sync.store else config.weight_sync.keep + 1
    least, roomy = MIN_FREE_BYTES + (1 + min(versions, 1)) * model, MIN_FREE_BYTES + (versions + 1) * model
    if free < roomy:
        subject = "weight versions and export take" if versions else "the export takes"
        message = f"{size_text(free)} free in {existing}, and {subject} about {size_text(roomy)}"
        problem = Problem(key, message, str(target), "free some room or choose another disk")
        (findings.problems if free < least else findings.warnings).append(problem)


def _model_bytes(name: str) -> int:
    """Bytes of a local model's weights; 0 for a model on the hub."""
    path = local_path(name)
    try:
        return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path else 0
    except OSError:
        return 0
