"""The program `cosmos-launch`: runs a command, and turns every error that a user can correct into a message.

The commands are in `launcher.app`.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Sequence

from launcher.processes.signals import ended_at_once, take_interrupts

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends by SystemExit. A Ctrl-C is not an error, however early it comes."""
    take_interrupts()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print \u2013 where its encoding lacks a character
            stream.reconfigure(errors="backslashreplace")
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run(arguments: list[str]) -> None:
    with ended_at_once():
        import typer

        from convert import hints
        from launcher.app import app
        from launcher.commands.options import print_problems
        from launcher.errors import LaunchError
        from launcher.restarts import EXIT_CONFIG, EXIT_FAILED

    hints.install()
    try:
        _refuse_bare_file(arguments)
        app(args=_name_newest(arguments))
    except LaunchError as error:
        typer.echo("error: " + error.render(), err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.strerror is None:
            raise
        fault = " cannot be written" if error.errno == errno.ENOSPC else ""
        typer.echo(f"error: {error.filename or 'the output'}{fault}: {error.strerror}", err=True)
        sys.exit(EXIT_FAILED)
    except ValueError as error:
        from schema.config import ConfigError

        if not isinstance(error, ConfigError):
            raise
        print_problems("error", error.problems, error.more)
        sys.exit(EXIT_CONFIG)


def _refuse_bare_file(arguments: list[str]) -> None:
    """`cosmos-launch run.toml` does not say what to do with it."""
    from launcher.errors import LaunchError

    first = arguments[0] if arguments else ""
    if first.endswith((".toml", ".yaml", ".yml")):
        hint = f"cosmos-launch --config {first} runs it, cosmos-launch validate {first} checks it"
        if not first.endswith(".toml"):
            hint = f"cosmos-launch convert {first} -o run.toml"
        raise LaunchError(f"{first} is a file, not a command", hint)


def _name_newest(arguments: list[str]) -> list[str]:
    """`--resume` with nothing behind it means the newest run: typer has no options whose value may be absent."""
    from launcher.app import COMMANDS

    spelled = list(arguments)
    for i, argument in enumerate(arguments):
        following = arguments[i + 1] if i + 1 < len(arguments) else "-"
        if argument == "--resume" and (following.startswith("-") or following in COMMANDS):
            spelled[i] = "--resume="
    return spelled


if __name__ == "__main__":
    main()
