"""How a node finds the head's run: a file in `train.output_dir`, which all machines share.

<train.output_dir>/.nodes/<address and port of the head>.json      0600, in a directory of 0700

It holds the token that head and nodes prove to each other. One that is left of a head which was killed does no harm:
what listens at its address by then does not have the token. One that another user has put there is not believed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path

from launcher.errors import LaunchError
from launcher.paths import absolute
from launcher.plan.rundir import RunDir
from launcher.processes.private_directory import make_private
from schema.config import Config
from schema.util.atomic_file import write_text
from schema.util.host import has_address
from schema.util.proxies import is_loopback
from schema.wire.store_url import is_url

DEFAULT_PORT = 29600
"""The port of the head, where its address names none."""
MOST_BYTES = 65536
"""Largest file that is read."""


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where the head listens: the same on every machine."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> HeadAddress:
        """`host`, `host:port`, `[v6]:port` or a bare v6 address. Raises LaunchError."""
        parts = re.fullmatch(r"\[(?P<v6>[^]]+)](?::(?P<v6port>\d+))?|(?P<host>[^:\s]+)(?::(?P<port>\d+))?", text)
        if parts is None and text.count(":") > 1 and re.fullmatch(r"[0-9a-fA-F:.]+", text):
            return cls(text, DEFAULT_PORT)
        port = int((parts["v6port"] or parts["port"] or DEFAULT_PORT) if parts else 0)
        if parts is None or not 0 < port < 65536:
            raise LaunchError(
                f"--head {text} is not an address",
                f"write a name or address of the head, with a port if {DEFAULT_PORT} is taken: --head node-0:29700",
            )
        return cls(parts["v6"] or parts["host"], port)

    def listening_host(self) -> str | None:
        """Return the host to listen at; None, all addresses, where its name means the loopback one to the head."""
        with suppress(ValueError):
            ip_address(self.host)
            return self.host
        try:
            infos = socket.getaddrinfo(self.host, 0, type=socket.SOCK_STREAM)
        except OSError:
            return self.host
        return None if all(is_loopback(str(info[4][0])) for info in infos) else self.host

    def is_here(self) -> bool:
        """Whether this machine has the address: one can listen there. Raises LaunchError if the name is unknown."""
        try:
            return has_address(self.host)
        except OSError as error:
            raise LaunchError(
                f"--head {self.host} cannot be resolved on {socket.gethostname()}: {error.strerror}",
                "write an address that every machine of the job can resolve",
            ) from None


class AnnouncementError(Exception):
    """An announcement that cannot be believed: its writer has chosen the token."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A head that waits for nodes. token: it is known to the head and to those who may read the file."""

    address: str
    run: str
    token: str
    host: str
    pid: int

    def write(self, path: Path) -> None:
        """Raises OSError."""
        make_private(path.parent)
        write_text(path, json.dumps(asdict(self)) + "\n", mode=0o600)

    @classmethod
    def read(cls, path: Path) -> Announcement | None:
        """None while there is none. Raises AnnouncementError: another user may have written it."""
        try:
            # A FIFO that another user has put there is opened without waiting for its writer.
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(handle, "rb") as file:
                facts, output = os.fstat(handle), path.parent.parent.stat()
                content = file.read(MOST_BYTES) if stat.S_ISREG(facts.st_mode) else b""
        except OSError:
            return None
        if facts.st_uid not in (os.geteuid(), output.st_uid) or facts.st_mode & 0o022:
            raise AnnouncementError(
                f"{path} is of user {facts.st_uid} with mode {facts.st_mode & 0o777:o}, and a head writes it with "
                "mode 600 as the user who starts the nodes: remove it, and choose a train.output_dir in which nobody "
                "else may write"
            )
        try:
            made = cls(**json.loads(content))
        except (TypeError, ValueError):
            return None
        return made if isinstance(made.token, str) and made.token else None


def place_of(config: Config, head: HeadAddress) -> Path:
    """The file of a head."""
    name = re.sub(r"[^A-Za-z0-9.-]", "_", str(head))
    return Path(absolute(config.train.output_dir)) / ".nodes" / f"{name}.json"


def shared_directories(config: Config, run: RunDir) -> Mapping[str, str]:
    """Return the directories that every machine of a job must see alike and write to, by the key that names each.

    train.output_dir: ranks on several machines write parts of one checkpoint and of one weight version, rollout
    replicas read versions, the head shows everybody's logs.
    """

    def directories() -> Iterator[tuple[str, str]]:
        yield "train.output_dir", str(run.path)
        if config.weight_sync.store and not is_url(config.weight_sync.store):
            yield "weight_sync.store", absolute(config.weight_sync.store)
        if config.controller.payload_store:
            yield "controller.payload_store", absolute(config.controller.payload_store)

    return dict(directories())
