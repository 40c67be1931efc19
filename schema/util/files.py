"""The mode of files: those of a run follow the umask of whoever starts it, whichever library writes them."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """What the block puts in the place of `path` gets the mode of any new file there; safetensors makes it 0600.

    Raises:
        OSError: the file cannot be made.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)
