"""A directory for the temporary files of vLLM's processes: sockets, and files by which its ranks meet.

vLLM leaves them where one of its processes is killed. So they lie in a directory that a replica removes at its end;
that of a replica which was killed is removed by the next one of the same user, which finds its lock free.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from schema.util.file_lock import try_lock

PREFIX = "cosmos-vllm-"
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Of a directory in which vLLM names sockets (sun_path)."""


class Scratch:
    """Made by the replica before it starts vLLM; `remove` is idempotent."""

    def __init__(self) -> None:
        """Raises `OSError`: no directory can be made there, or none can be locked."""
        root = Path(tempfile.gettempdir())
        if len(os.fsencode(root)) + len(f"/{PREFIX}01234567") > LONGEST:
            root = Path("/tmp")  # noqa: S108 - what is made in it is 0700
        _sweep(root)
        self._lock: int | None = None
        while self._lock is None:  # another replica may take one without a lock for left behind
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            self._lock = _lock(self.path)

    def environment(self) -> dict[str, str]:
        """For vLLM's processes. What is compiled stays where others find it again."""
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
        return {
            "TMPDIR": str(self.path),
            "VLLM_RPC_BASE_PATH": os.environ.get("VLLM_RPC_BASE_PATH", str(self.path)),
            "TORCHINDUCTOR_CACHE_DIR": compiled,
        }

    def remove(self) -> None:
        """When vLLM's processes have ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep(root: Path) -> None:
    """Remove the directories of replicas that are gone."""
    for left in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if left.lstat().st_uid == os.geteuid() and (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _lock(directory: Path) -> int | None:
    """Take the lock of a directory; None: its replica has it, or it is gone. Raises `OSError`."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if try_lock(handle, exclusive=True) and directory.exists():
            return handle
    except OSError:
        os.close(handle)
        raise
    os.close(handle)
    return None
