"""The rule for modes of files in a run directory, and whether they follow it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = (".tokens", ".locks", "redis", "config.json", "config.toml", "origins.json")
"""What is its owner's alone in a run directory, with all that lies below."""


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Of this process, and of what it starts."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def wrong_modes(run: Path, mask: int = 0o027) -> dict[str, str]:
    """Modes, by place, of what is neither private where it must be nor as the umask says."""
    found = {}
    for path in run.rglob("*"):
        place, is_dir = path.relative_to(run), path.is_dir()
        private = place.parts[0] in PRIVATE
        expected = (0o777 if is_dir else 0o666) & ~(0o077 if private else mask)
        mode = stat.S_IMODE(path.lstat().st_mode)
        elsewhere = path.is_symlink() or (place.parts[0] == "redis" and len(place.parts) > 1)
        if mode != expected and not elsewhere:
            found[str(place)] = oct(mode)
    return found
