"""An object store for tests: moto's server, a real process that speaks S3 over HTTP on a free port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


LEAST_PART = 64 * 1024
"""Bytes of the smallest part of a multipart upload here; 5 MiB at S3, which costs seconds in every test."""


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
        env = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": str(LEAST_PART)}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers, "moto's server")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "moto's server has ended"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)

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
    limit: int | None = None
    """What comes after so many bytes waits in the door until it is shut."""
    _listener: socket.socket | None = None
    _open: list[socket.socket] = field(default_factory=list)
    _door: threading.Condition = field(default_factory=threading.Condition)

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self.limit is not None and self.passed >= self.limit

    def open(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        """Then open without a limit."""
        with self._door:
            listener, self._listener = self._listener, None
            found, self._open = self._open, []
            for each in [*([listener] if listener else []), *found]:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self.limit = None
            self._door.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                inside, _ = listener.accept()
                self._let_through(listener, inside)

    def _let_through(self, listener: socket.socket, inside: socket.socket) -> None:
        try:
            outside = socket.create_connection(("127.0.0.1", self.target))
        except OSError:  # the store is away: whoever asks for it learns that
            inside.close()
            return
        with self._door:
            if self._listener is not listener:
                inside.close()
                outside.close()
                return
            self._open += [inside, outside]
        for source, sink in ((inside, outside), (outside, inside)):
            copy = threading.Thread(target=self._copy, args=(source, sink, source is inside), daemon=True)
            copy.start()

    def _copy(self, source: socket.socket, sink: socket.socket, inwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if inwards:
                    self._enter(len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _enter(self, n_bytes: int) -> None:
        with self._door:
            self._door.wait_for(lambda: not self.full, PATIENCE)
            self.passed += n_bytes
