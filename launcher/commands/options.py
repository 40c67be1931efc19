"""Arguments and options that several commands share, and how they print."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.errors import LaunchError
from schema.util.text import visible

if TYPE_CHECKING:
    from schema.config import Problem

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, VALUE as in TOML; may be repeated."),
]
Configs = Annotated[list[Path], typer.Argument(metavar="CONFIG", help="The TOML file; of several, later ones win.")]
Targets = Annotated[
    list[str] | None, typer.Argument(metavar="RUN_DIR|CONFIG|URL", help="The job. Default: ./outputs.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=0, help="Plan for another machine, with so many GPUs on each node.")
]
GpuMemory = Annotated[
    float | None, typer.Option("--gpu-memory", metavar="GIB", min=0.1, help="Memory of each of --gpus, in GiB.")
]
Cores = Annotated[int | None, typer.Option("--cores", min=1, help="Cores of that machine. Unset: as many as here.")]
HostMemory = Annotated[
    float | None, typer.Option("--host-memory", metavar="GIB", min=0.1, help="Memory of that machine, in GiB.")
]


def print_json(value: Any) -> None:
    """JSON on standard output; what JSON has no word for (a date in a TOML file) becomes a string."""
    typer.echo(json.dumps(value, indent=2, default=str))


def report(as_json: bool, text: str, **facts: Any) -> None:
    """Print the result of a command: a line for people, or the facts for programs."""
    print_json(facts) if as_json else typer.echo(text)


def print_problems(kind: str, problems: Iterable[Problem], unlisted: int = 0) -> None:
    """One block per problem on standard error. unlisted: problems that are not among them."""
    from schema.config.problem import MOST_SHOWN

    shown = list(problems)
    for problem in shown[:MOST_SHOWN]:
        typer.echo(printable(f"{kind}: {problem.render()}"), err=True)
    if unlisted := unlisted + len(shown[MOST_SHOWN:]):
        typer.echo(f"{kind}: and {unlisted:,} more", err=True)


def printable(text: str) -> str:
    """Text of files and arguments for a terminal; bytes of the environment that are no text are escaped."""
    return visible(text.encode("utf-8", "backslashreplace").decode())


def write_file(output: Path, text: str) -> None:
    """Write what the user asked for. Raises LaunchError."""
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{output} cannot be written: {error.strerror}") from None


def as_dicts(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Problems for a program."""
    return [asdict(problem) for problem in problems]
