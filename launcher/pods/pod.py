"""`cosmos-launch pod ROLE`: what one pod of a job does, by its environment alone.

    controller   write config.json ─▶ prepare the data ─▶ become the controller
    policy       ┐ wait for the controller ─▶ compare code and configuration ─▶ run this pod's processes
    rollout      ┘

    COSMOS_CONTROLLER_URL, COSMOS_TOKEN      of a worker: where the controller is, and the token of the role
    COSMOS_TOKEN_*, COSMOS_REDIS_*           of the controller, which reads them itself
    COSMOS_POD                               name of a rollout pod; that of a StatefulSet ends with its number
    LWS_GROUP_SIZE, LWS_WORKER_INDEX,        set by LeaderWorkerSet (0.6 or later): how many pods an engine has, which
    LWS_LEADER_ADDRESS                       of them this is, and where the first one is
    COSMOS_POLICY, JOB_COMPLETION_INDEX      number of the policy replica, and of this pod among its pods
    COSMOS_START, COSMOS_ATTEMPT             the same for all pods of one start of a replica, and new for the next
    COSMOS_NODE_ADDRESS                      of this pod, for the other ranks
    COSMOS_TERMINATION_LOG                   where the reason of the end goes: /dev/termination-log

Exit codes are those of the processes. A policy that leaves in order before the job is over has not succeeded, though
its processes say 0: it would count as complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer
from pydantic import ValidationError

from controller.client import AsyncClient, Client, ControllerError
from controller.client import calls as api
from launcher.errors import LaunchError
from launcher.nodes.agreement import ABSENT, PACKAGES, difference, facts
from launcher.paths import leaves
from launcher.plan import nsight, placement, pods
from launcher.plan.credentials import worker_secrets
from launcher.plan.placement import ProcessSpec
from launcher.plan.pods import EnginePod
from launcher.plan.rundir import RunDir, read_json
from launcher.pods import children
from launcher.pods.children import EndedChildren
from launcher.restarts import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, SIGNALLED, Role, is_hung
from schema.config import Config
from schema.config.chat_template import changed_since
from schema.util.atomic_file import write_text
from schema.util.file_lock import open_lock, release, try_lock
from schema.wire.data_report import has_all_rows
from schema.wire.invalid import describe
from schema.wire.messages import TERMINAL_PHASES, JobStatus, Phase

ANY = "0.0.0.0"  # noqa: S104 - pods are reached from other nodes; who may is the NetworkPolicy's business
TERMINATION_LOG = "/dev/termination-log"
MOST_MESSAGE = 4096
"""Bytes that Kubernetes keeps of a termination message."""
LOOK = 0.5
LOOK_AT_REPLICAS = 20.0
"""Seconds between looks whether this pod's replica is silent."""
ASKING = 60.0
"""Seconds in which the controller says whether the job is over."""
MAY_CHANGE = ("kubernetes.", "autoscale.", "controller.", "launcher.", "logging.", "redis.", "profiler.")
"""Sections that a run may go on with other values of."""
AGREEMENT = "agreement.json"
"""In the run directory: what the controller's pod has, which the others must have, too."""


def run_pod(role: Role, file: Path, *, stay: bool, keep: Path | None) -> int:
    """Run one pod to its end; the exit code. Raises LaunchError, whose text is left where the platform reads it.

    file: the resolved configuration. stay: when the job is over, wait for SIGTERM. keep: a folder of this pod alone.
    """
    try:
        config = _read(file)
        if role is Role.CONTROLLER:
            _controller(config)
        return _worker(role, config, file, stay=stay, keep=keep)
    except LaunchError as error:
        _tell(error.render())
        raise


def _read(path: Path) -> Config:
    try:
        return Config.model_validate_json(path.read_bytes())
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be read: {error.strerror}", "mount the ConfigMap of the job there"
        ) from None
    except ValidationError as error:
        raise LaunchError(
            f"{path}: {describe(error.errors(include_url=False))}",
            "render the manifests with the version of cosmos-launch that is in the image",
        ) from None


def _run_dir(config: Config) -> RunDir:
    return RunDir(Path(config.train.output_dir) / config.train.timestamp)


def _tell(reason: str) -> None:
    """Leave the reason of the end where the platform reads it, if it does."""
    path = Path(os.environ.get("COSMOS_TERMINATION_LOG", TERMINATION_LOG))
    if path.exists():
        path.write_bytes(reason.encode()[-MOST_MESSAGE:])


def _controller(config: Config) -> NoReturn:
    """Become the controller of the job. Raises LaunchError."""
    run = _run_dir(config)
    run.make()
    with _alone(run, config.controller.start_timeout):  # a stand-by begins at the same time
        _keep_config(run, config)
        if not has_all_rows(run.prompts):
            _prepare(run, config)
        elif warning := changed_since(config, run.path):
            sys.stderr.write(f"warning: {warning}\n")
    write_text(run.path / AGREEMENT, json.dumps(_facts(config)))
    (spec,) = placement.controller(str(run.path), ANY, config.controller.port).processes
    secrets_ = {
        name: text for name, text in os.environ.items() if name.startswith(("COSMOS_TOKEN_", "COSMOS_REDIS_"))
    }
    env = spec.environment(config, os.environ, secrets_)
    sys.stdout.flush()
    os.execve(spec.argv[0], list(spec.argv), env)  # noqa: S606 - the same program, with arguments of ours


@contextmanager
def _alone(run: RunDir, seconds: float) -> Iterator[None]:
    """Be the one controller that writes in the run directory. Raises LaunchError: another one is, all the time."""
    path = run.locks / "preparation.lock"
    give_up = time.monotonic() + seconds
    try:
        handle = open_lock(path)
        while not (taken := try_lock(handle, exclusive=True)) and time.monotonic() < give_up:
            time.sleep(LOOK)
    except OSError as error:
        hint = "name a claim whose file system has locks"
        raise LaunchError(f"{path} cannot be locked: {error.strerror}", hint, EXIT_FAILED) from None
    try:
        if not taken:
            raise LaunchError(
                f"another controller has prepared the data in {run.path} for {seconds:g} s",
                "its log says what it does; this one waits again when it is started again",
                EXIT_FAILED,
            )
        yield
    finally:
        release(handle)


def _keep_config(run: RunDir, config: Config) -> None:
    """Write config.json. Raises LaunchError: the run was begun with another configuration, and cannot go on."""
    earlier = run.written_config()
    if earlier is not None:
        before, now = leaves(earlier), leaves(config.to_dict())
        unlike = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        wrong = [key for key in unlike if not key.startswith(MAY_CHANGE)]
        if wrong:
            raise LaunchError(
                f"{run.config_json} began with another configuration, which differs in {', '.join(wrong[:5])}",
                "go on with that one, or begin another run: write another train.timestamp and render again",
            )
        if not unlike:
            return
    run.write_config(config)


def _prepare(run: RunDir, config: Config) -> None:
    processes = placement.data_preparation(str(run.path)).processes
    ended = asyncio.run(children.run(processes, lambda spec: spec.environment(config, os.environ)))
    if ended.signalled:
        raise SystemExit(SIGNALLED + ended.signalled)
    if ended.code != EXIT_OK:
        raise LaunchError(f"the data cannot be prepared: {ended.reason}", exit_code=ended.code)


def _facts(config: Config) -> dict[str, str]:
    return {key: text for key, text in facts(config, os.environ).items() if not key.startswith(MAY_CHANGE)}


def _worker(role: Role, config: Config, file: Path, *, stay: bool, keep: Path | None) -> int:
    """Run this pod's processes to their end; the exit code. Raises LaunchError. file: of the configuration."""
    url, token = _variable("COSMOS_CONTROLLER_URL"), _variable("COSMOS_TOKEN")
    patience = max(config.controller.start_timeout, config.controller.controller_lost_timeout)
    specs = _specs(role, config, file)
    connect = partial(Client, url, token, tls_ca=config.controller.tls_ca or None)
    try:
        with connect(patience=patience) as client:
            client.send(api.ready())
    except ControllerError as error:
        raise LaunchError(f"COSMOS_CONTROLLER_URL: {error}", exit_code=EXIT_FAILED) from None
    _check_agreement(config)
    environment = partial(_environment, config, worker_secrets(url, token, config.controller.tls_ca), keep)
    name = specs[0].env.get("COSMOS_REPLICA_NAME", specs[0].name)
    ended = asyncio.run(children.run(specs, environment, _until_hung(name, config, url, token)))
    status: JobStatus | None = None
    if ended.code == EXIT_OK:
        try:
            with connect(patience=ASKING) as client:
                status = client.send(api.job())
        except ControllerError as error:
            typer.echo(f"whether the job is over is not known: {error}", err=True)
    code, reason = _verdict(role, ended, status)
    _tell(reason)
    typer.echo(reason, err=True)
    if stay and not ended.signalled and _is_over(status):
        typer.echo("nothing is left to do: waiting for SIGTERM", err=True)
        leave = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, leave)
        signal.sigwait(leave)
        return EXIT_OK
    return code


async def _until_hung(name: str, config: Config, url: str, token: str) -> str:
    """Return, in words, when the replica of this pod lives and has been silent for too long."""
    began = time.monotonic()
    timeout = config.controller.heartbeat_timeout + nsight.report_seconds(config)
    async with AsyncClient(url, token, tls_ca=config.controller.tls_ca or None) as client:
        while True:
            await asyncio.sleep(LOOK_AT_REPLICAS)
            with suppress(ControllerError):  # which the replica reports itself
                for info in await client.send(api.replicas(name)):
                    if is_hung(info, time.monotonic() - began, timeout):
                        return f"{name} is alive, but has sent nothing for {info.last_seen_s:.0f} s"


def _is_over(status: JobStatus | None) -> bool:
    return status is not None and (status.phase in TERMINAL_PHASES or status.phase is Phase.FINISHING)


def _verdict(role: Role, ended: EndedChildren, status: JobStatus | None) -> tuple[int, str]:
    """Exit code and reason of a pod. status: of the job, where its processes have left in order and it is known."""
    if ended.code != EXIT_OK or role is Role.ROLLOUT:
        return ended.code, ended.reason
    if status is not None and _is_over(status):
        if status.phase == "failed":  # another start of the policy would find it so
            return EXIT_CONFIG, f"the job has failed: {status.last_error}"
        return EXIT_OK, f"the job is {status.phase}"
    if ended.signalled:
        return SIGNALLED + ended.signalled, f"left on {signal.Signals(ended.signalled).name}"
    return EXIT_FAILED, "left before the job was over"


def _specs(role: Role, config: Config, file: Path) -> tuple[ProcessSpec, ...]:
    """The processes of this pod. Raises LaunchError."""
    if role is Role.ROLLOUT:
        return pods.of_rollout(config, _variable("COSMOS_POD"), _engine_pod(config, file))
    ordinal = re.search(r"-(\d+)$", os.environ.get("COSMOS_POD", ""))
    replica = _number("COSMOS_POLICY", ordinal[1] if ordinal else "0")
    return pods.of_policy(config, replica, _number("JOB_COMPLETION_INDEX", "0"))


def _engine_pod(config: Config, file: Path) -> EnginePod | None:
    """Which part of an engine this pod is; None: it is a whole one. Raises LaunchError."""
    count, index = _number("LWS_GROUP_SIZE", "1"), _number("LWS_WORKER_INDEX", "0")
    if count < 2:
        return None
    first = _variable("COSMOS_POD")
    if index:  # LeaderWorkerSet calls the others first-1, first-2, …
        first = first.rpartition("-")[0]
    folder = _run_dir(config).path / "engines" / first
    leader = _variable("LWS_LEADER_ADDRESS") if index else _variable("COSMOS_NODE_ADDRESS")
    return EnginePod(count, index, leader, str(folder), str(file.absolute()))


def _environment(config: Config, secrets_: Mapping[str, str], keep: Path | None, spec: ProcessSpec) -> dict[str, str]:
    variables = dict(secrets_)
    if spec.role is Role.ROLLOUT and keep is not None:
        variables["COSMOS_REPLICA_SECRET"] = _kept_secret(keep)
    if spec.role is Role.ROLLOUT and (address := os.environ.get("COSMOS_NODE_ADDRESS")):  # of several pods
        variables["VLLM_HOST_IP"] = address
    if spec.role is Role.POLICY:
        variables["COSMOS_RENDEZVOUS"] = _rendezvous()
        variables["COSMOS_NODE_ADDRESS"] = os.environ.get("COSMOS_NODE_ADDRESS") or "127.0.0.1"
    return spec.environment(config, os.environ, variables)


def _rendezvous() -> str:
    """Where the ranks of this start meet: the same in all pods of a replica, and another one at the next start."""
    start = os.environ.get("COSMOS_START", "")
    if not start:  # this pod has all ranks
        return _ALONE
    whole = f"{start}/{os.environ.get('COSMOS_ATTEMPT', '')}"
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


_ALONE = secrets.token_hex(8)


def _kept_secret(folder: Path) -> str:
    """The secret of this pod's replica: with it a container that is started again has its name at once."""
    path = folder / "replica"
    try:
        return path.read_text()
    except FileNotFoundError:
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(32))
        return path.read_text()


def _both(controller_facts: Mapping[str, str], pod_facts: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Leave out packages that only one of the two has: an image may be built for one role."""
    alone = {name for name in PACKAGES if ABSENT in (controller_facts.get(name, ABSENT), pod_facts.get(name, ABSENT))}
    of_controller, of_pod = (
        {key: text for key, text in facts.items() if key not in alone} for facts in (controller_facts, pod_facts)
    )
    return of_controller, of_pod


def _check_agreement(config: Config) -> None:
    """Raises LaunchError: this pod has other code, or another configuration, than the controller."""
    path = _run_dir(config).path / AGREEMENT
    controller_facts = read_json(path)
    if controller_facts is None:
        raise LaunchError(
            f"{path} is not there, and the controller has written it: this pod sees another volume",
            "mount one claim in all pods, which is ReadWriteMany",
        )
    fault, _ = difference(*_both(controller_facts, _facts(config)))
    if fault:
        raise LaunchError(
            f"this pod does not fit its controller ({path}): {fault}",
            "render the manifests again and apply all of them, with one image",
            EXIT_CONFIG,
        )


def _variable(name: str) -> str:
    text = os.environ.get(name, "")
    if not text:
        raise LaunchError(f"{name} is not set: manifests that `--target kubernetes` writes set it")
    return text


def _number(name: str, default: str) -> int:
    text = os.environ.get(name) or default
    if not text.isdigit():
        raise LaunchError(f"{name} = {text!r} is not a number")
    return int(text)
