"""The command `cosmos-launch`. Imports are inside the commands: `--help` and `validate` answer in an instant."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.errors import LaunchError
from launcher.restarts import EXIT_CONFIG, EXIT_FAILED

HELP = """
Train a language model by asynchronous reinforcement learning, from one file.

\b
Start
  cosmos-launch --config run.toml                         run the job, with a live display
  cosmos-launch --config run.toml --set train.epoch=2     change a key for this run
  cosmos-launch --config run.toml --resume                go on with the newest run
  cosmos-launch --config run.toml --dry-run               show which processes would start

\b
Check
  cosmos-launch validate run.toml                         every mistake at once, with line and remedy
  cosmos-launch schema -o config.schema.json              the JSON schema, for editors

\b
Look and operate (from another terminal)
  cosmos-launch status                                    the newest run below ./outputs
  cosmos-launch status outputs/20260131120000 --json      a certain run, for programs
  COSMOS_TOKEN=... cosmos-launch status http://host:port  a job on another machine
  cosmos-launch stop                                      end it in order

\b
One start makes <train.output_dir>/<timestamp>/ with logs/, weights/, checkpoints/, final/ (the trained
model) and summary.json. Ctrl-C ends in order, a second one at once; --resume goes on.

\b
Exit codes: 0 success, 1 the job failed, 2 wrong configuration or usage (nothing was started),
130 stopped (Ctrl-C or `cosmos-launch stop`).
"""

app = typer.Typer(
    name="cosmos-launch",
    help=HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, VALUE as in TOML; may be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The job to run, a TOML file.")
    ] = None,
    set_: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run of train.output_dir.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the processes, start nothing.")
    ] = False,
) -> None:
    """Run a job (without a command)."""
    if context.invoked_subcommand is not None:
        if config is not None or set_ or resume or dry_run:
            raise LaunchError(
                f"--config, --set, --resume and --dry-run go without the command {context.invoked_subcommand!r}",
                "see cosmos-launch --help",
            )
        return
    if config is None:
        raise LaunchError("no job is named", "cosmos-launch --config run.toml (see cosmos-launch --help)")
    from launcher.run import check, launch, plan_text

    if dry_run:
        typer.echo(plan_text(check(config, set_ or [], os.environ)))
        return
    raise typer.Exit(launch(config, set_ or [], resume=resume, env=os.environ))


@app.command()
def validate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file to check.")],
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check a configuration: every mistake at once. Exit code 0 if it is sound, else 2."""
    from launcher.machine import Machine, count_cores
    from launcher.preflight import check_machine
    from schema.config import ConfigError, Problem, check_warnings, load_config

    problems: tuple[Problem, ...] = ()
    warnings: list[Problem] = []
    try:
        loaded = load_config(config, set_ or [])
    except ConfigError as error:
        problems = error.problems
    else:
        # The job may be meant for another machine: what this one lacks is a warning.
        here = check_machine(loaded, Machine(count_cores()))
        warnings = check_warnings(loaded) + here.warnings + here.problems
    if as_json:
        found = {
            "valid": not problems,
            "problems": [_as_dict(problem) for problem in problems],
            "warnings": [_as_dict(warning) for warning in warnings],
        }
        typer.echo(json.dumps(found, indent=2, default=str))
    else:
        for problem in problems:
            typer.echo("error: " + problem.render(), err=True)
        for warning in warnings:
            typer.echo("warning: " + warning.render(), err=True)
        if not problems:
            typer.echo(f"{config} is valid")
    raise typer.Exit(EXIT_CONFIG if problems else 0)


@app.command()
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead.")
    ] = None,
) -> None:
    """Print the JSON schema of the configuration."""
    from schema.config.export import schema_text

    if output is None:
        typer.echo(schema_text(), nl=False)
        return
    try:
        output.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{output} cannot be written: {error.strerror}") from None


@app.command()
def status(
    target: Annotated[
        str | None, typer.Argument(metavar="[RUN_DIR|CONFIG|URL]", help="The job. Default: ./outputs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a job that runs, or how it ended. Exit code 1 if it was killed without a summary."""
    from launcher import remote
    from launcher.report import rows

    found = remote.find(target, os.environ)
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


@app.command()
def stop(
    target: Annotated[
        str | None, typer.Argument(metavar="[RUN_DIR|CONFIG|URL]", help="The job. Default: ./outputs.")
    ] = None,
) -> None:
    """End a job in order; `--resume` can go on with it later."""
    from launcher import remote

    found = remote.find(target, os.environ)
    if isinstance(found, remote.Dead):
        raise LaunchError(f"{found.run_dir} is not running", "there is nothing to stop", EXIT_FAILED)
    typer.echo(f"{found.run_dir or found.url}: {remote.stop(found)}")


def _as_dict(problem: object) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(problem)  # type: ignore[call-overload,no-any-return]


def main() -> None:
    """The console script: errors that the user can put right are messages, not tracebacks."""
    try:
        app()
    except LaunchError as error:
        typer.echo("error: " + error.render(), err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        from schema.config import ConfigError

        if not isinstance(error, ConfigError):
            raise
        for problem in error.problems:
            typer.echo("error: " + problem.render(), err=True)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
