"""Configurations of other systems, read and turned into ours: verl, ROLL and cosmos-rl's own TOML.

    conversion = convert(Path("ppo_trainer.yaml"))
    text = to_toml(conversion)             # ours, with comments
    report = to_report(conversion)         # what became of every key

How `engine` is built, from the bottom: `keys`, `yamlfile`, `interpolation`, `source` read a file; `model`
says what a conversion is; `rules` is the language of the tables, `to` has converters and `values` types;
`engine` applies them; `strangers` deals with keys that no rule knows; `fallback` knows what only changes speed;
`unsupported` is the closed list of what has no counterpart; `write` makes text of it; `registry` finds the reader,
and `foreign` recognises systems that have none. A system is a folder with a `READER` in its
`reader`, the rules by topic, `facts` that several keys say together, and its part of the closed list.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schema.interop.engine.model import Conversion

SYSTEMS = {"verl": "schema.interop.verl", "roll": "schema.interop.roll", "cosmos-rl": "schema.interop.cosmos"}
"""The name of a system on the command line -> its folder."""


def convert(
    path: Path | str,
    system: str | None = None,
    env: Mapping[str, str] | None = None,
    allow_unknown: Collection[str] = (),
) -> Conversion:
    """Convert a file. system: one of SYSTEMS, or None to find out. env: for `${oc.env:…}`; None: empty.

    allow_unknown: dotted keys of the file that are not understood and may be left out all the same.

    Raises ConfigError (`schema.config`) where the file cannot be read, is not a configuration of a known
    system, refers to what is not there, or has no such key to leave out. Keys it cannot place are entries of the
    result, not errors, unless they are most of the file.
    """
    from schema.interop.engine.source import read_file

    return convert_text(read_file(Path(path)), str(path), system, env, allow_unknown)


def convert_text(
    text: str,
    name: str = "input",
    system: str | None = None,
    env: Mapping[str, str] | None = None,
    allow_unknown: Collection[str] = (),
) -> Conversion:
    """Convert a text; `name` is what errors and comments call it, and its ending distinguishes YAML from TOML."""
    from schema.interop.engine.engine import convert_source
    from schema.interop.engine.registry import detect, kind_of, reader, readers
    from schema.interop.engine.source import read_source
    from schema.interop.foreign import other_system

    source = read_source(text, name)
    if system is None:
        chosen, kind = detect(source, readers())
    else:
        chosen = reader(system)
        kind = kind_of(source, chosen)
    conversion = convert_source(source, chosen, kind, {} if env is None else env, allow_unknown)
    if (other := other_system(source.data)) is not None:
        why = ", as asked for" if system is not None else f", for it has keys that only {chosen.title} has"
        warning = f"this looks like a file of {other.title}; its keys are read as {chosen.title}'s{why}"
        conversion = replace(conversion, warnings=(warning, *conversion.warnings))
    return conversion
