"""An object store for tests: moto's server, a real process that speaks S3 over HTTP on a free port."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@dataclass
class ObjectStore:
    """One server. It keeps what it has in memory: killed, it forgets."""

    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url}

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError("moto's server does not answer")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)

    def client(self) -> Any:
        """A boto3 client that needs no environment."""
        import boto3

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        )

    def keys(self, bucket: str) -> list[str]:
        """All keys of a bucket."""
        found = self.client().list_objects_v2(Bucket=bucket).get("Contents", [])
        return sorted(entry["Key"] for entry in found)

    def read(self, bucket: str, key: str) -> bytes:
        body: bytes = self.client().get_object(Bucket=bucket, Key=key)["Body"].read()
        return body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_objects(*buckets: str) -> Iterator[ObjectStore]:
    """A server with these buckets, ended at the end."""
    store = ObjectStore(free_port())
    store.start()
    try:
        for bucket in buckets:
            store.client().create_bucket(Bucket=bucket)
        yield store
    finally:
        store.kill()


@dataclass
class Gate:
    """A door before the store: shut, nobody gets through and whoever is inside is thrown out."""

    target: int
    port: int = field(default_factory=free_port)
    passed: int = 0
    """Bytes that went in."""
    _listener: socket.socket | None = None
    _open: list[socket.socket] = field(default_factory=list)

    def open(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        listener, self._listener = self._listener, None
        for each in [*([listener] if listener else []), *self._open]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                inside, _ = listener.accept()
                outside = socket.create_connection(("127.0.0.1", self.target))
                self._open += [inside, outside]
                for source, sink in ((inside, outside), (outside, inside)):
                    copy = threading.Thread(
                        target=self._copy, args=(source, sink, source is inside), daemon=True
                    )
                    copy.start()

    def _copy(self, source: socket.socket, sink: socket.socket, inwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                self.passed += len(data) if inwards else 0
            sink.shutdown(socket.SHUT_WR)
