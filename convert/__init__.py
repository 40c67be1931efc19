"""Configurations of other systems for cosmos-launch: verl, ROLL and cosmos-rl, read and turned into ours.

    conversion = convert(Path("ppo_trainer.yaml"))
    text = to_toml(conversion)             # ours, with comments
    report = to_report(conversion)         # what became of every key

`launches.reading` finds the configuration that a file holds or starts, `hydra` composes it. How `engine` is built,
from the bottom: `keys`, `interpolation`, `source` read a file; `model` says what a
conversion is; `rules` is what becomes of a key, `to` has converters and `values` types; `table` reads rules, and
the closed list of what has no counterpart (`unsupported`), from rows of a text; `engine` applies them;
`strangers` deals with keys that no rule knows; `fallback` knows what only changes speed; `write` makes text of
it; `registry` finds the reader, and `foreign` recognises systems that have none. `hints` answers our loader. A
system is a folder with a `READER` in its `reader`, its rows, functions of the rows by topic, and `facts` that
several keys say together.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convert.engine.model import Conversion
    from convert.launches.reading import Configuration, ConversionRequest
    from schema.config.problem import Problem

_TOML_LINE = re.compile(r"^[ \t]*(?:\[\[?[\w.\"-]+\]|[\w.-]+ = )", re.MULTILINE)


def convert(
    path: Path | str,
    system: str | None = None,
    env: Mapping[str, str] | None = None,
    allow_unknown: Collection[str] = (),
    request: ConversionRequest | None = None,
) -> Conversion:
    """Convert a file. system: its name on the command line, or None to find out. env: for
    `${oc.env:…}`; None: empty.

    allow_unknown: dotted keys of the file that are not understood and may be left out all the same. request: for a
    file that names others, or starts jobs: words, directories, which job, its variables.

    Raises ConfigError (`schema.config`) where the file cannot be read, is not a configuration of a known
    system, refers to what is not there, or has no such key to leave out. Keys it cannot place are entries of the
    result, not errors, unless they are most of the file.
    """
    from convert.launches.reading import ConversionRequest, configuration

    return _converted(configuration(Path(path), request or ConversionRequest()), system, env, allow_unknown)


def convert_text(
    text: str,
    name: str = "input",
    system: str | None = None,
    env: Mapping[str, str] | None = None,
    allow_unknown: Collection[str] = (),
) -> Conversion:
    """Convert a text; `name` is what errors and comments call it, and its ending distinguishes YAML from TOML."""
    from convert.engine.source import read_source
    from convert.launches.reading import Configuration

    return _converted(Configuration(read_source(text, name)), system, env, allow_unknown)


def _converted(
    configuration: Configuration, system: str | None, env: Mapping[str, str] | None, allow_unknown: Collection[str]
) -> Conversion:
    from convert.engine.engine import convert_source
    from convert.engine.foreign import other_system
    from convert.engine.registry import detect, kind_of, reader, readers

    source = configuration.source
    if (name := system or configuration.system) is not None:
        chosen = reader(name)
        kind = configuration.kind or kind_of(source, chosen)
    else:
        chosen, kind = detect(source, readers())
    environment = {**({} if env is None else env), **configuration.env}
    conversion = convert_source(source, chosen, kind, environment, allow_unknown)
    if (other := other_system(source.data)) is not None:
        why = ", as asked for" if system is not None else f", for it has keys that only {chosen.title} has"
        warning = f"this looks like a file of {other.title}; its keys are read as {chosen.title}'s{why}"
        conversion = replace(conversion, warnings=(warning, *conversion.warnings))
    return replace(conversion, warnings=(*configuration.notes, *conversion.warnings))


def recognise(text: str, name: str) -> Problem | None:
    """Say what a text that is not TOML is: YAML or JSON of a system, a script, a command line; None: none of these.

    name: its file. The hint has the command that converts it, or what can be done where none does.
    """
    from convert.engine.foreign import command_kind, other_system, script_kind
    from convert.engine.registry import detect, readers
    from convert.engine.source import read_source
    from schema.config.problem import ConfigError, Problem

    is_json, is_toml = text.lstrip().startswith("{"), name.endswith(".toml")
    source = None
    try:
        source = read_source(text, name.removesuffix(".toml"))
        chosen, _ = detect(source, readers())
    except ConfigError as error:
        if source is None:
            is_known = script_kind(text, name) != "" or (
                _TOML_LINE.search(text) is None
                and (name.endswith((".yaml", ".yml")) or (not is_toml and command_kind(text) != ""))
            )
        else:
            is_known = not is_json or other_system(source.data) is not None
        problem = error.problems[0]
        return replace(problem, message=f"not TOML: {problem.message}", file=name) if is_known else None
    if is_json and chosen.system == "cosmos-rl":  # most of its keys are ours
        return None
    yaml, target = (shlex.quote(str(Path(name).with_suffix(end))) for end in (".yaml", ".toml"))
    hint = f"convert it: cosmos-launch convert {yaml if is_toml else shlex.quote(name)} -o {target}"
    rename = f"rename it to {yaml}, and " if is_toml else ""
    return Problem("", f"not TOML: a file of {chosen.title}", hint=rename + hint, file=name)
