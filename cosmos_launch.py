"""The program `cosmos-launch`: proves that the packages it will import are its own, then runs `launcher.cli`.

Their names are common words. Another project's `schema` (PyPI has one), or a `schema.py` in a folder of PYTHONPATH,
would be imported in place of ours.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = (
    "schema", "tokenization", "convert", "controller", "weight_sync", "policy_worker", "rollout_worker", "launcher",
)  # fmt: skip
"""All packages of this project, in the order in which they may import each other."""
EXIT_CONFIG = 2
_MARK = b"cosmos-launch"
"""Stands in the first line of each package's `__init__.py`."""


def strangers() -> dict[str, str]:
    """The packages that Python finds under our names and that are not ours, by name; "": it finds none."""
    here, found = Path(__file__).resolve().parent, {}
    for name in PACKAGES:
        spec = find_spec(name)
        origin = Path(spec.origin) if spec is not None and spec.origin else None
        if origin is None or origin.resolve() != here / name / "__init__.py" or not _is_marked(origin):
            found[name] = "" if origin is None else str(origin)
    return found


def _is_marked(file: Path) -> bool:
    with file.open("rb") as text:
        return _MARK in text.readline()


def main() -> None:
    """The console script; ends by SystemExit."""
    faults = [
        f"error: cosmos-launch would import {name!r} from {path or 'nowhere'}, which is not its own package\n"
        for name, path in strangers().items()
    ]
    if faults:
        faults.append(
            "    install it into an environment of its own (python3 -m venv .venv; .venv/bin/pip install …), without "
            "packages of these names, and keep modules of these names off PYTHONPATH\n"
        )
        sys.stderr.writelines(faults)
        sys.exit(EXIT_CONFIG)
    from launcher.cli import main as run

    run()


if __name__ == "__main__":
    main()
