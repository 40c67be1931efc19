"""The command `convert`: another system's configuration as ours, and an account of every key of it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.commands.options import AsJson, as_dicts, print_json, print_problems, printable, write_file
from launcher.errors import LaunchError
from launcher.restarts import EXIT_CONFIG

if TYPE_CHECKING:
    from convert.engine.model import Conversion
    from schema.config import Problem

MOST_LINES = 1000
"""Lines of the account on a terminal: verl's longest file has 900 keys."""
File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="A YAML of verl or ROLL, a TOML of cosmos-rl, a shell script, or words."),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value]...",
        help="Words of Hydra for the file: key=value, +key=value, ++key=value. After --, also ~key.",
    ),
]
AllowUnknown = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-unknown",
        metavar="KEY",
        help="Leave out this key though it is not understood; by the name in the report; may be repeated.",
    ),
]
SearchPath = Annotated[
    list[Path] | None,
    typer.Option(
        "--search-path",
        metavar="DIR",
        help="A directory of files that the file names, for instance verl's own; may be repeated.",
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME=VALUE",
        help="A value that a script's job depends on: of a variable, of an argument (1, 2, …), or what a command "
        "prints; may be repeated.",
    ),
]
Number = Annotated[
    int | None, typer.Option("--launch", metavar="N", help="Which job of a script that starts several, from 1.")
]
_ALIASES = {"cosmos": "cosmos-rl"}


def convert(
    file: File,
    words: Words = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The file to write. Default, or -: standard output."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="verl|roll|cosmos", help="The file's system. Default: detected from its keys."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Exit code 2 if a part of the method is unsupported, a key is not understood, or a nearest value "
            "was taken.",
        ),
    ] = False,
    allow_unknown: AllowUnknown = None,
    search_path: SearchPath = None,
    env: Env = None,
    launch: Number = None,
    as_json: AsJson = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Account for every key, not only for what is lost or not understood.")
    ] = False,
) -> None:
    """Turn a configuration of verl, ROLL or cosmos-rl into ours, and account for its keys.

    A key that is not understood, in a table of the source that decides what is trained, makes the result one that
    validate refuses, unless --allow-unknown names it. A file of another system is refused.

    The TOML goes to standard output or to -o. The account of the keys, short unless --full is given, goes to
    standard error, or with --json, whole, to standard output. `${oc.env:NAME}` reads this environment; nothing in
    the file is evaluated.

    \b
      cosmos-launch convert ppo_trainer.yaml -o run.toml                    a file, with what its `defaults` name
      cosmos-launch convert job.yaml data.train_batch_size=64 +trainer.x=1  with words of Hydra
      cosmos-launch convert run.sh --launch 2 --env NGPUS=8                 the job that a script starts
      cosmos-launch convert words.txt --search-path verl/trainer/config     the words of a job, one in each line
    """
    from convert import convert as convert_file
    from convert.engine.write import to_toml
    from convert.launches.reading import ConversionRequest

    output = None if output == Path("-") else output
    if output is not None and not force and output.exists():
        raise LaunchError(f"{output} already exists", "give another name, or --force to replace it")
    request = ConversionRequest(
        words or (), search_path or (), launch, _answers(env or ()), os.environ.get("HOME", "")
    )
    conversion = convert_file(file, _system(system), os.environ, allow_unknown or (), request)
    text = to_toml(conversion)
    if output is not None:
        write_file(output, text)
    problems, unlisted = _problems(conversion, output)
    if as_json:
        print_json(_account(conversion, text, problems, unlisted))
    else:
        if output is None:
            sys.stdout.flush()
            typer.echo(text.encode("utf-8", "backslashreplace"), nl=False)  # TOML is UTF-8 on any terminal
        _explain(conversion, output, problems, unlisted, full)
    if strict and (short := _falls_short(conversion)):
        typer.echo(f"error: --strict: {short}", err=True)
        raise typer.Exit(EXIT_CONFIG)


def _answers(given: Sequence[str]) -> dict[str, str]:
    for text in given:
        if "=" not in text[1:]:
            raise LaunchError(f"--env {text} has no value", "write --env NAME=VALUE")
    # What a command prints has the command's text for a name, which may hold the sign.
    return dict(text.split("=", 1) if re.match(r"\w+=", text) else text.rsplit("=", 1) for text in given)


def _system(name: str | None) -> str | None:
    from convert.engine.registry import SYSTEMS

    if name is None:
        return None
    chosen = _ALIASES.get(name.lower(), name.lower())
    if chosen not in SYSTEMS:
        raise LaunchError(f"--system {name}: no such system", f"one of {', '.join(SYSTEMS)}")
    return chosen


def _problems(conversion: Conversion, output: Path | None) -> tuple[tuple[Problem, ...], int]:
    """The problems that our loader finds in the result, and how many more; with their places, where it is a file."""
    from schema.config import ConfigError, check_config, load_config

    try:
        if output is None or not output.is_file():  # /dev/null
            check_config(conversion.config)
        else:
            load_config(output)
    except ConfigError as error:
        return error.problems, error.more
    return (), 0


def _falls_short(conversion: Conversion) -> str:
    """List what is lost of the method, not understood, or replaced by the nearest value; "" where nothing is."""
    from convert.engine.model import Outcome

    unknown = [entry.source for entry in conversion.of(Outcome.UNKNOWN)]
    nearest = [entry.source for entry in conversion.entries if entry.faithful]
    nearest += [addition.key for addition in conversion.additions if addition.faithful is not None]
    short = {"unsupported": conversion.unsupported, "not understood": unknown, "nearest values": nearest}
    return "; ".join(f"{shortfall}: {printable(', '.join(keys))}" for shortfall, keys in short.items() if keys)


def _account(conversion: Conversion, text: str, problems: tuple[Problem, ...], unlisted: int) -> dict[str, Any]:
    from convert.engine.write import to_json

    return {
        **to_json(conversion),
        "toml": text,
        "valid": not problems,
        "problems": as_dicts(problems),
        "more_problems": unlisted,
    }


def _explain(
    conversion: Conversion, output: Path | None, problems: tuple[Problem, ...], unlisted: int, full: bool
) -> None:
    from convert.engine.write import to_report
    from schema.config.problem import format_key
    from schema.config.sections.unsupported import TABLE

    typer.echo(_cut(to_report(conversion, full)), err=True)
    if not full:
        typer.echo("\n--full accounts for every key; the comments of the TOML do too", err=True)
    typer.echo("", err=True)
    listed = {format_key((TABLE, key)) for key in conversion.unsupported}  # by the report, with their lines
    print_problems("error", [problem for problem in problems if problem.key not in listed], unlisted)
    name = "the result" if output is None else printable(str(output))
    if problems:
        count = "1 thing" if len(problems) == 1 else f"{len(problems) + unlisted:,} things"
        typer.echo(f"{name} needs {count} changed before it runs here", err=True)
    else:
        typer.echo(f"{name} is valid", err=True)


def _cut(text: str) -> str:
    lines = text.split("\n")
    if len(lines) > MOST_LINES:
        omission = f"and {len(lines) - MOST_LINES:,} more lines: the written TOML names every key"
        text = "\n".join([*lines[:MOST_LINES], omission])
    return printable(text)
