"""What Hydra itself makes of words and of configurations: `python hydra_oracle.py`, cases as JSON on standard input.

    ["word", text]                        ──▶ [act, key, package, value as Python writes it], or null
    ["compose", directory, name, words]   ──▶ the table with `${…}` as it is written, or null

It runs where Hydra is installed, and knows nothing of this project.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def word(text: str) -> list[Any] | None:
    from hydra.core.override_parser.overrides_parser import OverridesParser  # type: ignore[import-not-found]

    parsed = OverridesParser.create().parse_override(text)
    if parsed.is_sweep_override():
        return None
    act = "~" if parsed.is_delete() else "++" if parsed.is_force_add() else "+" if parsed.is_add() else ""
    return [act, parsed.key_or_group, parsed.package, repr(plain(parsed.value()))]


def plain(value: Any) -> Any:
    from hydra.core.override_parser.types import QuotedString  # type: ignore[import-not-found]

    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def compose(directory: str, name: str, words: list[str]) -> Any:
    from hydra import compose, initialize_config_dir  # type: ignore[import-not-found]
    from omegaconf import OmegaConf  # type: ignore[import-not-found]

    with initialize_config_dir(config_dir=directory, version_base=None):
        return OmegaConf.to_container(compose(name, overrides=words), resolve=False)


def main() -> None:
    warnings.simplefilter("ignore")
    answers = []
    for kind, *case in json.load(sys.stdin):
        try:
            answers.append(word(*case) if kind == "word" else compose(*case))
        except Exception:
            answers.append(None)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
