"""Finding a job that runs, or ran: what `cosmos-launch status`, `stop` and the like act on.

A target is a run directory, a directory of runs (the newest counts), the files of a configuration (their
`train.output_dir`; the environment and --set count as in the run), or the URL of a controller, for which the user
token comes from COSMOS_TOKEN. In another user's run that one is of no use: its files say where a token is sent, and
whom to trust there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from launcher.errors import LaunchError, NotServingError
from launcher.plan.rundir import RunDir, is_run, newest
from launcher.restarts import EXIT_FAILED

if TYPE_CHECKING:
    from controller.client import Call

T = TypeVar("T")

DEFAULT_OUTPUT = "./outputs"
CLOCK_SLACK = 1.0
"""Seconds by which a file's time may lie before that of the launcher which caused it."""
HOW_TO_GET_IN = (
    "export COSMOS_TOKEN with the job's user token: it is in <run directory>/.tokens/user on the machine that "
    "started the job"
)


@dataclass(frozen=True, slots=True)
class RemoteJob:
    """A job: known by its run directory, or only by the address of its controller."""

    run: RunDir | None
    url: str = ""
    token: str = ""

    @property
    def name(self) -> str:
        return str(self.run.path) if self.run else self.url

    def address(self) -> str:
        """Where its controller listens; empty while there is none yet, and for a run without a launcher."""
        if self.run is None:
            return self.url
        holder, endpoint = self.run.holder(), self.run.read_of_owner(self.run.controller_json)
        if endpoint is None or "url" not in endpoint or not self.run.is_alive():
            return ""
        written = self.run.controller_json.stat().st_mtime
        if holder is not None and written < holder.since - CLOCK_SLACK:
            return ""  # of an earlier start; by now another program may have the port
        return str(endpoint["url"])

    def ask(self, call: Call[T]) -> T:
        """Send one call. Raises LaunchError without a controller, a token or an answer."""
        from controller.client import Client, ControllerError

        url = self.address()
        if not url:
            raise no_controller(self)
        if not self.token:
            where = "" if self.run is None or self.run.is_own else f", and ask its controller: {url}"
            raise LaunchError(f"{self.name} requires a token, and none can be read", HOW_TO_GET_IN + where)
        # The authorities that the run trusts; None: those of COSMOS_TLS_CA, else of the system.
        config = self.run.read_of_owner(self.run.config_json) if self.run else None
        tls_ca = ((config or {}).get("controller") or {}).get("tls_ca") or None
        try:
            with Client(url, self.token, tls_ca=tls_ca) as client:
                return client.send(call)
        except ControllerError as error:
            raise self._refused(url, error) from None

    def _refused(self, url: str, error: Exception) -> LaunchError:
        from controller.client import NotServing, Refused, Unauthorized, UnknownToken, Untrusted

        if isinstance(error, UnknownToken):
            return LaunchError(str(error), HOW_TO_GET_IN)
        if isinstance(error, Unauthorized):
            return LaunchError(f"{url} refuses the token: {error}", HOW_TO_GET_IN)
        if isinstance(error, Untrusted):
            return LaunchError(str(error), "", EXIT_FAILED)  # it says what to do
        if isinstance(error, Refused):
            return LaunchError(error.detail.partition(": ")[2] or error.detail, "", EXIT_FAILED)
        if isinstance(error, NotServing):
            return NotServingError(error.detail, f"asked was {url}; try again in a moment", EXIT_FAILED)
        hint = f"its logs are in {self.run.logs}" if self.run else "check the address"
        return LaunchError(str(error), hint, EXIT_FAILED)


def no_controller(target: RemoteJob) -> LaunchError:
    """Why no controller can be asked."""
    assert target.run is not None
    if target.run.is_alive():
        ending = target.run.launcher().get("ending")
        return LaunchError(
            f"the job in {target.name} is "
            + (f"ending: {ending}" if ending else "starting: its controller is not there yet"),
            f"`cosmos-launch status {target.name}` shows when it has ended"
            if ending
            else f"try again in a moment; its logs are in {target.run.logs}",
            EXIT_FAILED,
        )
    summary = target.run.summary() or {}
    if summary.get("outcome") == "finished":
        return LaunchError(f"{target.name} has finished", "", EXIT_FAILED)
    return LaunchError(
        f"{target.name} is not running", f"`cosmos-launch --resume {target.name}` goes on with it", EXIT_FAILED
    )


def find(targets: Sequence[str], overrides: Sequence[str], env: Mapping[str, str]) -> RemoteJob:
    """Find the job. Raises LaunchError (nothing there, no token) or ConfigError (a broken configuration)."""
    target = targets[0] if targets else None
    is_url = target is not None and target.startswith(("http://", "https://"))
    are_files = not is_url and all(Path(name).is_file() for name in targets)
    if len(targets) > 1 and not are_files:
        wrong = next((name for name in targets if not Path(name).is_file()), targets[0])
        raise LaunchError(f"{wrong} is not a file", "of several targets each must be a configuration")
    if overrides and not (targets and are_files):
        raise LaunchError("--set changes a configuration, and none is named", "name its file too")
    token = env.get("COSMOS_TOKEN", "")
    if target is not None and is_url:
        if not token:
            raise LaunchError(f"COSMOS_TOKEN is not set: {target} requires a token", HOW_TO_GET_IN)
        return RemoteJob(None, target, token)
    run = _run_of(targets, overrides, env)
    return RemoteJob(run, token=run.read_token() or (token if run.is_own else ""))


def _run_of(targets: Sequence[str], overrides: Sequence[str], env: Mapping[str, str]) -> RunDir:
    path = Path(targets[0] if targets else DEFAULT_OUTPUT)
    if path.is_file():
        from schema.config import load_config

        config = load_config([Path(name) for name in targets], overrides, env)
        path = Path(config.train.output_dir).expanduser()
        if config.train.timestamp:
            path /= config.train.timestamp
    return run_below(path, named=bool(targets))


def run_below(path: Path, *, named: bool) -> RunDir:
    """The run in a directory, or the newest one below it. `named`: whether the user wrote its name."""
    if not path.is_dir():
        fault = f"{path} does not exist" if named else f"no {DEFAULT_OUTPUT} here"
        raise LaunchError(fault, "name a run directory, a configuration or the URL of a controller")
    path = path.absolute()
    if not os.access(path, os.R_OK | os.X_OK):
        raise LaunchError(
            f"{path} cannot be read: Permission denied",
            "ask as the user who started it, or ask its controller: COSMOS_TOKEN=… cosmos-launch status URL",
        )
    if is_run(path):
        return RunDir(path)
    run = newest(path, nested=True)  # recipes write to ./outputs/<recipe>
    if run is None:
        raise LaunchError(f"{path} holds no run", "name a run directory: <train.output_dir>/<timestamp>")
    return run
