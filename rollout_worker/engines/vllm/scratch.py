"""Directories for the temporary files of vLLM's processes: sockets, and files by which its ranks meet.

vLLM leaves them where one of its processes is killed. So they lie in directories that a replica removes at its end;
those of a replica which was killed are removed by the next one of the same user and machine, which finds their locks
free.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from schema.util.file_lock import try_lock
from schema.util.host import boot_id, short_directory

PREFIX = "cosmos-vllm-"
SOCKET = len("/00000000-0000-0000-0000-000000000000")
"""Bytes that vLLM adds to a directory in which it names sockets."""


class Scratch:
    """Made by the replica before it starts vLLM; `remove` is idempotent."""

    def __init__(self) -> None:
        """Raises `OSError`: no directory can be made there, or none can be locked."""
        # Others may share the directory, and locks of one machine may mean nothing to another.
        self._prefix = f"{PREFIX}{boot_id()[:8]}-"
        self._locks: dict[Path, int] = {}
        self.path = self.sockets = self._make(Path(tempfile.gettempdir()))
        short = short_directory(len(f"/{self._prefix}01234567") + SOCKET)
        if short != self.path.parent:
            self.sockets = self._make(short)

    def environment(self) -> dict[str, str]:
        """For vLLM's processes. What is compiled stays where others find it again."""
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        return {
            "TMPDIR": str(self.path),
            "VLLM_RPC_BASE_PATH": os.environ.get("VLLM_RPC_BASE_PATH") or str(self.sockets),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(),
        }

    def remove(self) -> None:
        """When vLLM's processes have ended."""
        for path, lock in self._locks.items():
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
        self._locks.clear()

    def _make(self, root: Path) -> Path:
        for left in root.glob(f"{self._prefix}*"):
            with suppress(OSError):
                if left.lstat().st_uid == os.geteuid() and (lock := _lock(left)) is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
        while True:  # another replica may take one that is not locked yet for left behind
            path = Path(tempfile.mkdtemp(prefix=self._prefix, dir=root))
            if (lock := _lock(path)) is not None:
                self._locks[path] = lock
                return path


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
