"""Commands for somebody who writes a configuration: init, explain, schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.options import AsJson, print_json
from launcher.errors import LaunchError

Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file instead.")
]


def schema(output: Output = None) -> None:
    """Print the JSON schema of the configuration."""
    from schema.config.reference.export import schema_text

    if output is None:
        typer.echo(schema_text(), nl=False)
        return
    try:
        output.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{output} cannot be written: {error.strerror}") from None


def explain(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A key, a section, a part of a name or a pattern.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explain a key: what it does, type, bounds, default, an example, and where it is read."""
    from launcher.commands.explain import lines
    from schema.config.reference.lookup import look_up

    found = look_up(key or "")
    if as_json:
        print_json(found.as_dict())
    else:
        typer.echo("\n".join(lines(found)))


def init(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Which one; without it they are listed.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write; - prints it.")
    ] = Path("run.toml"),
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A model in place of the recipe's: a directory or a name."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs to write it for. Default: those found.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="vllm|transformers", help="Default: vllm where it is installed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented configuration to start from."""
    from launcher.commands import init as starting

    if recipe is None:
        typer.echo("\n".join(starting.listing()))
        return
    request = starting.Request(recipe, output, model or "", gpus, engine or "", force)
    for line in starting.start(request, os.environ):
        typer.echo(line)
