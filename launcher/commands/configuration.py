"""Commands about a configuration and its keys: validate, show, explain, schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.commands.options import (
    AsJson,
    Configs,
    Cores,
    Gpus,
    Overrides,
    as_dicts,
    print_json,
    print_problems,
    printable,
    write_file,
)
from launcher.errors import LaunchError
from launcher.restarts import EXIT_CONFIG

if TYPE_CHECKING:
    from schema.config import Config
    from schema.wire.data_report import DataReport

READING = 3600.0
"""Seconds to read the data, which may have to be downloaded."""
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead.")]


def validate(
    config: Configs,
    set_: Overrides = None,
    data: Annotated[
        bool,
        typer.Option("--data", help="Read the data too, as a start does: which rows are used, and how they look."),
    ] = False,
    gpus: Gpus = None,
    cores: Cores = None,
    as_json: AsJson = False,
) -> None:
    """Check a configuration: every mistake at once. Exit code 0 if it is valid, else 2."""
    from launcher.plan.machine import DescribedMachine
    from launcher.preflight.checks import check_all
    from launcher.preflight.hardware import slow_on_gpus
    from schema.config import ConfigError, Problem
    from schema.config.loading.load import load
    from schema.wire.data_report import lines as data_lines

    problems: tuple[Problem, ...] = ()
    report = None
    unlisted = 0
    warnings: list[Problem] = []
    try:
        loaded = load(config, set_ or [], os.environ)
    except ConfigError as error:
        problems, unlisted = error.problems, error.more
    else:
        # The job may be meant for another machine: what this one lacks is a warning.
        machine = DescribedMachine(gpus, cores=cores).machine()
        findings = check_all(loaded.config, machine, os.environ, asks_redis=False)
        of_machine = findings.warnings + findings.problems + slow_on_gpus(loaded.config, machine)
        warnings = loaded.warnings + loaded.placed(of_machine)
        report = _read_data(loaded.config) if data else None
    bad_data = report is not None and bool(report.error)
    if report is not None and bad_data:
        bad = report.bad
        messages = [] if bad.first and bad.first[0] in report.error else [report.error]
        problems = tuple(Problem("", text) for text in bad.first + messages)
        unlisted = bad.count - len(bad.first)
    if as_json:
        found_json = {
            "valid": not problems,
            "problems": as_dicts(problems),
            "more_problems": unlisted,
            "warnings": as_dicts(warnings),
        }
        if report is not None:
            found_json["data"] = report.model_dump(mode="json")
        print_json(found_json)
    else:
        print_problems("error", problems, unlisted)
        print_problems("warning", warnings)
        names = printable(" + ".join(map(str, config)))
        for text in data_lines(report, samples=True) if report is not None else ():
            typer.echo(printable(text))
        if bad_data:
            typer.echo(f"{names}: the data cannot be used", err=True)
        elif problems:
            count = "1 mistake" if len(problems) == 1 else f"{len(problems) + unlisted:,} mistakes"
            typer.echo(f"{names}: {count}" + ("; the data was not read" if data else ""), err=True)
        else:
            typer.echo(f"{names} is valid" if len(config) == 1 else f"{names} are valid together")
    raise typer.Exit(EXIT_CONFIG if problems else 0)


def _read_data(config: Config) -> DataReport:
    """Read the data as a job's preparation does, and keep none of it; its report. Raises LaunchError."""
    import json
    import tempfile

    from launcher.paths import resolved
    from launcher.processes.signals import ended_by_exit
    from launcher.processes.step import run_step
    from schema.wire import data_report

    module = "controller.data.evaluation" if config.is_evaluation else "controller.data.prepare"
    with ended_by_exit(), tempfile.TemporaryDirectory(prefix="cosmos-data-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(resolved(config)), encoding="utf-8")
        written = str(data_report.path_of(directory).relative_to(directory))
        rewards, schemes = config.reward.environment, config.data_schemes
        run_step(directory, module, ["--report-only"], READING, result=written, rewards=rewards, data=schemes)
        report = data_report.read(directory)
    if report is None:
        raise LaunchError("the report of the data cannot be read")
    return report


def show(
    config: Configs,
    set_: Overrides = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Only keys that a file, a variable or --set has written.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the resolved configuration, and where each value comes from. The output is TOML again."""
    from launcher.resolved_config import lines, values
    from schema.config.loading.load import load

    shown = values(load(config, set_ or [], os.environ), changed_only=changed)
    if as_json:
        print_json([value.as_dict() for value in shown])
    else:
        typer.echo("\n".join(lines(shown)))


def explain(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A key, a section, a part of a name or a pattern.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a key: what it does, type, bounds, default, an example, and where it is read."""
    from launcher.commands.explain import lines
    from schema.config.reference.lookup import look_up

    answer = look_up(key or "")
    if as_json:
        print_json(answer.as_dict())
    else:
        typer.echo("\n".join(lines(answer)))


def schema(output: Output = None) -> None:
    """Print the JSON schema of the configuration."""
    from schema.config.reference.export import schema_text

    if output is None:
        typer.echo(schema_text(), nl=False)
    else:
        write_file(output, schema_text())
