"""Configurations of other systems, read and turned into ours: verl, ROLL and cosmos-rl's own TOML.

    conversion = convert(Path("ppo_trainer.yaml"))
    text = to_toml(conversion)             # ours, with comments
    report = to_report(conversion)         # what became of every key

How `engine` is built, from the bottom: `keys`, `yamlfile`, `composed`, `interpolation`, `source` read a file; `model`
says what a conversion is; `rules` is the language of the tables, `to` has converters and `values` types;
`engine` applies them; `fallback` knows what only changes speed; `unsupported` is the closed list of what has no
counterpart; `write` makes text of it; `registry` finds the reader. A system is a folder with a `READER` in its
`reader`, the rules by topic, `facts` that several keys say together, and its part of the closed list.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schema.interop.engine.model import Conversion

SYSTEMS = {"verl": "schema.interop.verl", "roll": "schema.interop.roll", "cosmos-rl": "schema.interop.cosmos"}
"""The name of a system on the command line -> its folder."""


def convert(path: Path | str, system: str | None = None, env: Mapping[str, str] | None = None) -> Conversion:
    """Convert a file. system: one of SYSTEMS, or None to find out. env: for `${oc.env:…}`; None: empty.

    Raises ConfigError (`schema.config`) where the file cannot be read, is not a configuration of a known
    system, or refers to what is not there. Keys it cannot place are entries of the result, not errors.
    """
    from schema.interop.engine.source import read_file

    return convert_text(read_file(Path(path)), str(path), system, env)


def convert_text(
    text: str, name: str = "input", system: str | None = None, env: Mapping[str, str] | None = None
) -> Conversion:
    """Convert a text; `name` is what errors and comments call it, and its ending distinguishes YAML from TOML."""
    from schema.interop.engine.engine import convert_source
    from schema.interop.engine.registry import detect, kind_of, reader, readers
    from schema.interop.engine.source import read_source

    source = read_source(text, name)
    if system is None:
        chosen, kind = detect(source, readers())
    else:
        chosen = reader(system)
        kind = kind_of(source, chosen)
    return convert_source(source, chosen, kind, {} if env is None else env)
