"""Commands for a job that runs, or ran: status, stop."""

from __future__ import annotations

import json
import os

import typer

from launcher.commands.options import AsJson, Overrides, Targets
from launcher.errors import LaunchError
from launcher.restarts import EXIT_FAILED


def status(targets: Targets = None, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Show a job that runs, or how it ended. Exit code 1 if it was killed without a summary."""
    from launcher import remote
    from launcher.report import rows

    found = remote.find(targets or [], set_ or [], os.environ)
    if isinstance(found, remote.Live):
        data = remote.inspect(found)
        typer.echo(json.dumps(data, indent=2) if as_json else "\n".join(remote.status_lines(data)))
        return
    if as_json:
        typer.echo(
            json.dumps({"alive": False, "run_dir": str(found.run_dir), "summary": found.summary}, indent=2)
        )
    elif found.summary is not None:
        typer.echo(f"{found.run_dir} has ended")
        typer.echo("\n".join(f"  {name}: {value}" for name, value in rows(found.summary)))
    if found.summary is None:
        raise LaunchError(
            f"{found.run_dir} is not running and left no summary: its launcher was killed",
            "start it again with --resume",
            EXIT_FAILED,
        )


def stop(targets: Targets = None, set_: Overrides = None) -> None:
    """End a job in order; `--resume` can go on with it later."""
    from launcher import remote

    found = remote.find(targets or [], set_ or [], os.environ)
    if isinstance(found, remote.Dead):
        raise LaunchError(f"{found.run_dir} is not running", "there is nothing to stop", EXIT_FAILED)
    typer.echo(f"{found.run_dir or found.url}: {remote.stop(found)}")
