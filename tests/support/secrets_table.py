"""The table of docs/security.md that says which process holds which secret."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
HEAD = "| secret | variables | held by |"


def secrets_table() -> dict[str, set[str]]:
    """The processes that hold a secret, by its variable; the launcher, which holds all of the user, is not named."""
    _, found, rest = PAGE.read_text().partition(HEAD + "\n")
    assert found, f"{PAGE} has no table with the head {HEAD}"
    table: dict[str, set[str]] = {}
    for line in rest.splitlines()[1:]:
        if not line.startswith("|"):
            break
        _, variables, held = line.strip("| ").split(" | ")
        for name in re.findall("`(.+?)`", variables):
            table[name] = set() if held == "nobody" else set(held.split(", "))
    return table
