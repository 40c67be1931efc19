"""A bucket of Google Cloud Storage for tests: the emulator of the package gcp-storage-emulator, a real process."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until


@dataclass
class CloudStorage:
    """One server, which keeps what it has in memory."""

    port: int

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.port}"}

    def post(self, path: str, content: bytes, kind: str = "application/octet-stream") -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=content)
        request.add_header("content-type", kind)
        urllib.request.urlopen(request, timeout=PATIENCE).close()

    def put(self, bucket: str, name: str, content: bytes) -> None:
        self.post(f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}", content)


@contextmanager
def running_cloud_storage(*buckets: str) -> Iterator[CloudStorage]:
    """A server with these buckets, ended at the end."""
    server = CloudStorage(free_port())
    command = [Path(sys.executable).with_name("gcp-storage-emulator"), "start", "--host=127.0.0.1", "--in-memory"]
    process = subprocess.Popen(
        [*command, f"--port={server.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def answers() -> bool:
        assert process.poll() is None, "the emulator has ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/storage/v1/b?project=p", timeout=1).close()
        except OSError:
            return False
        return True

    try:
        until(answers, "the emulator of Google Cloud Storage")
        for bucket in buckets:
            server.post("/storage/v1/b?project=p", json.dumps({"name": bucket}).encode(), "application/json")
        yield server
    finally:
        process.kill()
        process.wait(PATIENCE)
