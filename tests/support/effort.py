"""How hard a randomised proof tries: a little in every run, twenty times as hard in `make soak`."""

from __future__ import annotations

import os

SOAK = os.environ.get("SOAK") == "1"


def examples(usual: int) -> int:
    """Examples, seeds or rounds of a test marked `scaled`: `usual`, in `make soak` twenty times as many."""
    return usual * 20 if SOAK else usual
