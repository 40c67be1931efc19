"""`cosmos-launch join`: one more rollout replica for a job that runs, on a machine that shares its run directory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.errors import LaunchError
from launcher.processes.signals import ended_at_once
from launcher.restarts import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from launcher.plan.rundir import RunDir
    from launcher.processes.supervisor import Exit, Situation

POLL = 1.0


def join(
    run: Annotated[
        str, typer.Argument(metavar="RUN_DIR", help="The job's run directory, which this machine shares.")
    ],
    name: Annotated[
        str,
        typer.Option(
            "--name", help="Name of the replica, the same when it comes back. Unset: by host and process."
        ),
    ] = "",
    wait: Annotated[
        float,
        typer.Option("--wait", min=0.0, metavar="SECONDS", help="Wait so long for the job to be there."),
    ] = 0.0,
) -> None:
    """Add a rollout replica to a job that runs, on the GPUs of CUDA_VISIBLE_DEVICES; Ctrl-C lets it leave.

    It is started again when it crashes, as the job's own are, and ends with the job. Its log is in the run directory.
    """
    with ended_at_once():
        from launcher.plan.rundir import RunDir

    place = RunDir(Path(run).expanduser().absolute())
    url = _address(place, wait)
    raise typer.Exit(
        asyncio.run(_serve(place, url, name or f"{socket.gethostname()}-{os.getpid()}", os.environ))
    )


def _address(run: RunDir, wait: float) -> str:
    """Where the job's controller answers. Raises LaunchError: there is none in time, or the job is over."""
    give_up, said = time.monotonic() + wait, ""
    while True:
        url, trouble = _look(run)
        if not trouble:
            return url
        if time.monotonic() >= give_up:
            raise LaunchError(
                f"{run.path} takes no replica: {trouble}", "--wait SECONDS waits for it", EXIT_FAILED
            )
        if trouble != said:
            typer.echo(f"waiting for {run.path}: {trouble}")
            said = trouble
        time.sleep(POLL)


def _look(run: RunDir) -> tuple[str, str]:
    """The controller's address, and what is wrong with it."""
    from controller.client import Client, ControllerError
    from controller.client import calls as api
    from launcher.plan.rundir import read_json
    from schema.wire.messages import TERMINAL_PHASES

    found, token = read_json(run.controller_json), run.read_token("rollout")
    if found is None or "url" not in found:
        return "", "it has no controller yet"
    if not token:
        return "", f"{run.path / '.tokens' / 'rollout'} cannot be read"
    url = str(found["url"])
    try:
        with Client(url, token, tls_ca=_config(run)["controller"]["tls_ca"] or None) as client:
            status = client.send(api.job())
    except ControllerError as error:
        return url, str(error)
    if status.phase in TERMINAL_PHASES:
        return url, f"the job is {status.phase}"
    return url, ""


def _config(run: RunDir) -> dict[str, Any]:
    from launcher.plan.rundir import read_json

    return read_json(run.config_json) or {"controller": {"tls_ca": ""}}


class _Observer:
    def __init__(self) -> None:
        self.code = EXIT_OK

    async def exited(self, exit_: Exit) -> Situation:
        from launcher.processes.supervisor import Situation

        self.code = exit_.code
        return Situation(over=False, needed=False)

    def event(self, text: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S')} {text}")


async def _serve(run: RunDir, url: str, name: str, env: Mapping[str, str]) -> int:
    """Keep the replica up until it leaves; its exit code."""
    from launcher.plan import nsight
    from launcher.plan.credentials import given_to
    from launcher.plan.placement import ProcessSpec, joined
    from launcher.plan.rundir import Tokens, environment
    from launcher.processes.host import Folders
    from launcher.processes.signals import stop_signals
    from launcher.processes.supervisor import Setting, Supervisor
    from launcher.restarts import Budget
    from schema.config import Config

    config = Config.model_validate(_config(run))
    tokens = Tokens("", run.read_token("rollout") or "", "")

    def whole(spec: ProcessSpec) -> dict[str, str]:
        own = environment(spec.role, tokens, url, "", "", config.controller.tls_ca)
        return {**given_to(spec.role, config, env), **spec.env, **own}

    launcher, observer = config.launcher, _Observer()
    budget = Budget(launcher.max_restarts, launcher.restart_backoff, launcher.restart_backoff_max)
    folders = Folders(run.logs, run.locks, run.profiles)
    supervisor = Supervisor(Setting(folders, nsight.grace(config), budget, whole), observer)
    loop, asked = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in stop_signals():
        loop.add_signal_handler(number, asked.put_nowait, int(number))
    kept = supervisor.launch(joined(config, name))
    observer.event(f"{name} joins {url}; its log: {folders.log_of(kept.replica.processes[0])}")
    left = asyncio.create_task(kept.done.wait())
    interrupted = asyncio.create_task(asked.get())
    try:
        await asyncio.wait({left, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not interrupted.done():
            if supervisor.ended.done():
                observer.event(supervisor.ended.result().verdict.reason)
            return observer.code
        observer.event(f"leaving ({signal.Signals(interrupted.result()).name}); again kills it at once")
        stopping = asyncio.create_task(supervisor.stop([name]))
        again = asyncio.create_task(asked.get())
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        return 128 + interrupted.result()
    finally:
        await supervisor.kill_all()
