"""Finding a job that runs, or ran: what `cosmos-launch status` and `stop` speak to.

A target is a run directory, a directory of runs (the newest counts), the files of a configuration (their
`train.output_dir`; the environment and --set count as in the run), or the URL of a controller, for which the user
token comes from COSMOS_TOKEN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import LaunchError
from launcher.restarts import EXIT_FAILED
from launcher.rundir import RunDir, newest, read_json
from schema.config import load_config

DEFAULT_OUTPUT = "./outputs"
HOW_TO_GET_IN = (
    "export COSMOS_TOKEN with the job's user token: it is in <run directory>/.tokens/user on the machine that "
    "started the job"
)


@dataclass(frozen=True, slots=True)
class Live:
    """A controller that should answer."""

    url: str
    token: str
    run_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """A run without a launcher. `summary` is None when it was killed before it could write one."""

    run_dir: Path
    summary: dict[str, Any] | None


def find(targets: Sequence[str], overrides: Sequence[str], env: Mapping[str, str]) -> Live | Dead:
    """Find the job. Raises LaunchError (nothing there, no token) or ConfigError (a broken configuration)."""
    target = targets[0] if targets else None
    is_url = target is not None and target.startswith(("http://", "https://"))
    _check_targets(targets, overrides, are_files=not is_url and all(Path(name).is_file() for name in targets))
    if target is not None and is_url:
        token = env.get("COSMOS_TOKEN", "")
        if not token:
            raise LaunchError(f"COSMOS_TOKEN is not set: {target} answers only to a token", HOW_TO_GET_IN)
        return Live(target, token)
    run = _run_dir(targets, overrides, env)
    if not run.is_alive():
        return Dead(run.path, read_json(run.summary_json))
    address, user = read_json(run.controller_json), run.read_token()
    if address is None or "url" not in address:
        raise LaunchError(
            f"the job in {run.path} is starting: its controller is not there yet",
            f"try again in a moment; its logs are in {run.logs}",
            EXIT_FAILED,
        )
    token = user or env.get("COSMOS_TOKEN", "")
    if not token:
        raise LaunchError(
            f"{run.path}/.tokens/user cannot be read, and COSMOS_TOKEN is not set", HOW_TO_GET_IN
        )
    return Live(str(address["url"]), token, run.path)


def _check_targets(targets: Sequence[str], overrides: Sequence[str], are_files: bool) -> None:
    """Several targets, and --set, mean a configuration."""
    if len(targets) > 1 and not are_files:
        wrong = next((name for name in targets if not Path(name).is_file()), targets[0])
        raise LaunchError(f"{wrong} is not a file", "of several targets each must be a configuration")
    if overrides and not (targets and are_files):
        raise LaunchError("--set changes a configuration, and none is named", "name its file too")


def _run_dir(targets: Sequence[str], overrides: Sequence[str], env: Mapping[str, str]) -> RunDir:
    path = Path(targets[0] if targets else DEFAULT_OUTPUT)
    if path.is_file():
        config = load_config([Path(name) for name in targets], overrides, env)
        path = Path(config.train.output_dir).expanduser()
        if config.train.timestamp:
            path /= config.train.timestamp
    if not path.is_dir():
        what = f"{path} does not exist" if targets else f"there is no {DEFAULT_OUTPUT} here"
        raise LaunchError(what, "name a run directory, a configuration or the URL of a controller")
    path = path.absolute()
    if (path / "config.json").is_file() and (path / "logs").is_dir():
        return RunDir(path)
    run = newest(path)
    if run is None:
        raise LaunchError(f"{path} holds no run", "name a run directory: <train.output_dir>/<timestamp>")
    return run


def inspect(live: Live) -> dict[str, Any]:
    """What the controller says now, as JSON-compatible values. Raises LaunchError if it does not."""
    from controller import api
    from controller.client import Client, ControllerError

    try:
        with Client(live.url, live.token) as client:
            return {
                "alive": True,
                "url": live.url,
                "run_dir": str(live.run_dir) if live.run_dir else None,
                "status": client.send(api.job()).model_dump(mode="json"),
                "ledger": client.send(api.ledger()).model_dump(mode="json"),
                "replicas": [replica.model_dump(mode="json") for replica in client.send(api.replicas())],
            }
    except ControllerError as error:
        raise _unreachable(live, error) from None


def stop(live: Live) -> str:
    """Ask a job to stop in order; returns its phase. Raises LaunchError if the controller does not answer."""
    from controller import api
    from controller.client import Client, ControllerError

    try:
        with Client(live.url, live.token) as client:
            return str(client.send(api.operate("stop")).phase)
    except ControllerError as error:
        raise _unreachable(live, error) from None


def _unreachable(live: Live, error: Exception) -> LaunchError:
    from controller.client import Unauthorized

    if isinstance(error, Unauthorized):
        return LaunchError(f"{live.url} refuses the token: {error}", HOW_TO_GET_IN)
    hint = f"its logs are in {live.run_dir / 'logs'}" if live.run_dir else "is the address right?"
    return LaunchError(str(error), hint, EXIT_FAILED)


def status_lines(found: Mapping[str, Any]) -> list[str]:
    """A live job's status for people."""
    from launcher.display import View, line
    from schema.wire.messages import JobStatus

    status = JobStatus.model_validate(found["status"])
    ledger = found["ledger"]
    bound = ledger["bound"] if status.mode == "grpo" else None
    states = ", ".join(f"{name} {count}" for name, count in ledger["states"].items() if count) or "none yet"
    lines = [f"{status.name} ({status.job_id}) at {found['url']}"]
    lines += ["  " + line(View(status=status, bound=bound))]
    lines += [f"  groups: {states}"] if status.mode == "grpo" else []
    for replica in found["replicas"]:
        gauges = " ".join(f"{key}={value:.3g}" for key, value in sorted(replica["gauges"].items()))
        lines.append(
            f"  {replica['name']}: {replica['state']}, version {replica['version']}, {replica['leases']} leases, "
            f"pid {replica['pid']}, seen {replica['last_seen_s']:.0f} s ago {gauges}".rstrip()
        )
    return lines
