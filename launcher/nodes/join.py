"""`cosmos-launch join`: one more replica for a job that runs, on a machine that shares its run directory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import typer

from controller.client import Client, ControllerError
from controller.client import calls as api
from launcher.errors import LaunchError
from launcher.plan.credentials import worker_secrets
from launcher.plan.machine import find_machine
from launcher.plan.needs import PlacementError
from launcher.plan.placement import ProcessSpec, another_policy, joined
from launcher.plan.rundir import RunDir
from launcher.processes.share import until_left
from launcher.processes.signals import queued_signals
from launcher.processes.supervisor import Always, Setting, Situation, Supervisor
from launcher.restarts import EXIT_FAILED, EXIT_OK, SIGNALLED, Role
from schema.config import Config, ConfigError
from schema.wire.messages import TERMINAL_PHASES

POLL = 1.0


def serve(run: RunDir, role: Role, name: str, wait: float, env: Mapping[str, str]) -> int:
    """Keep a replica up for as long as the job runs, whichever start of it; the exit code.

    name: empty for one by host and process. wait: seconds for the job to be there. Raises ConfigError, LaunchError.
    """
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    while True:
        controller = _wait_for(run, role, wait)
        if controller is None:
            return EXIT_OK
        if (code := asyncio.run(_serve(run, controller, name, env))) is not None:
            return code


@dataclass(frozen=True)
class _Controller:
    """Where a start of the job has its controller, and what it lets in: both change with the next start."""

    url: str
    token: str
    role: Role

    @classmethod
    def of(cls, run: RunDir, role: Role) -> _Controller | None:
        written, token = run.read_of_owner(run.controller_json) or {}, run.read_token(role)
        return cls(str(written["url"]), token, role) if token and "url" in written else None


def _wait_for(run: RunDir, role: Role, wait: float) -> _Controller | None:
    """The controller once it answers; None: the job has finished. Raises LaunchError: there is none in time."""
    give_up, reported = time.monotonic() + wait, ""
    while True:
        controller = _Controller.of(run, role)
        phase, trouble = (None, "it has no controller yet") if controller is None else _look(run, controller)
        if phase == "finished":
            typer.echo(f"the job in {run.path} has finished")
            return None
        if not trouble:
            return controller
        if time.monotonic() >= give_up:
            hint = "--wait SECONDS waits for it, here in its shared run directory"
            raise LaunchError(f"{run.path} takes no replica: {trouble}", hint, EXIT_FAILED)
        if trouble != reported:
            typer.echo(f"waiting for {run.path}: {trouble}")
            reported = trouble
        time.sleep(POLL)


def _look(run: RunDir, controller: _Controller) -> tuple[str | None, str]:
    """The job's phase, and what keeps replicas out."""
    summary = run.summary()
    if summary is not None and not run.is_alive():
        return str(summary["outcome"]), f"the job has {summary['outcome']}"
    tls_ca = _config(run)["controller"]["tls_ca"] or None
    try:
        with Client(controller.url, controller.token, tls_ca=tls_ca) as client:
            status = client.send(api.job())
    except ControllerError as error:
        return None, str(error)
    return str(status.phase), f"the job has {status.phase}" if status.phase in TERMINAL_PHASES else ""


def _config(run: RunDir) -> dict[str, Any]:
    return run.read_of_owner(run.config_json) or {"controller": {"tls_ca": ""}}


def _say(text: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {text}")


def own_address(url: str) -> str:
    """The address of this machine from which the controller is reached."""
    target = urlsplit(url)
    family = socket.AF_INET6 if ":" in (target.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target.hostname, target.port or 80))  # sends nothing
        return str(probe.getsockname()[0])


async def _serve(run: RunDir, joined_to: _Controller, name: str, env: Mapping[str, str]) -> int | None:
    """Keep the replica up until it leaves; the exit code, or None if it left in order: with this start of the job."""
    config = Config.model_validate(_config(run))
    role = joined_to.role
    if role is Role.POLICY and config.policy.parallelism.n_init_replicas == 1:
        raise LaunchError(
            f"{run.path} has one trainer: policy.parallelism.n_init_replicas = 1",
            "resume it with --set policy.parallelism.n_init_replicas=2",
        )
    try:
        here = find_machine(env)
        replica = joined(config, name, len(here.gpus)) if role is Role.ROLLOUT else another_policy(config, name, here)
    except PlacementError as error:
        raise ConfigError([error.problem]) from None

    def whole(spec: ProcessSpec) -> dict[str, str]:
        secrets = worker_secrets(joined_to.url, joined_to.token, config.controller.tls_ca)
        if role is Role.POLICY:  # by which it is reached by the others
            secrets["COSMOS_NODE_ADDRESS"] = env.get("COSMOS_NODE_ADDRESS") or own_address(joined_to.url)
        return spec.environment(config, env, secrets)

    supervisor = Supervisor(Setting.of_run(config, run, whole), Always(Situation(over=False, needed=False), _say))

    def has_restarted() -> bool:
        return _Controller.of(run, role) != joined_to

    asked = False

    def leave(number: int | None) -> None:
        nonlocal asked
        asked, why = True, "the job was started again"
        if number is not None:
            why = f"{signal.Signals(number).name}; again kills it at once"
        _say(f"leaving ({why})")

    _say(f"{name} joins {joined_to.url}; its log: {supervisor.setting.folders.log_of(replica.processes[0])}")
    with queued_signals() as interrupts:
        number = await until_left(supervisor, replica, interrupts, leave, has_restarted, POLL)
    if asked:
        return None if number is None else SIGNALLED + number
    if supervisor.ended.done():
        _say(supervisor.ended.result().verdict.reason)
    last = supervisor.replicas[name].last_exit
    return (last and last.code) or None
