"""The lock decides who is in charge of a job. It is a lock in Redis that ends by itself.

    nobody holds it: never taken, given back, or not renewed for its whole life ──┐
    its holder ran on this host, in this process namespace, and is dead ──────────┼──▶ take it at once
    `--replace`: whoever starts us says that the holder is gone or may be fenced ─┘
    anything else ───────────────────────────────────────────────────────────────────▶ stand by, look again

Taking it is one transaction (WATCH lock, raise the epoch, set the lock), so of several that stand by one gets it.
What protects the state is the epoch (`controller.store.fence`); the lock keeps two controllers from taking the
job from each other, and it lets its holder answer from memory:

    `Term.valid` ⇒ the lock cannot have expired yet ⇒ no other process can have taken over without our knowing

unless it was taken by `--replace`, or the clock of Redis jumped: then reads may be stale for at most the life of
the lock, writes never. The term is measured with a clock that also runs while this process or the whole machine is
suspended, so a controller that was stopped and woken refuses to answer before it has done anything else.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import WatchError

from schema.util.host import boot_id

log = logging.getLogger(__name__)

RENEWALS = 4
"""Renewals per life of a lock: two may be lost or late before it runs out."""
MAX_RENEWAL = 2.5
"""Longest time in seconds between two renewals: they also find out about a successor."""
LOOK = 0.25
"""Seconds between looks at a lock while standing by: one that is given back is taken at once."""
TRUSTED = 0.8
"""Part of its life for which the holder trusts the lock: clocks of two machines differ by far less than the rest."""
PROC = Path("/proc")
DEAD_STATES = frozenset("ZX")
"""A zombie has ended; only its parent has not looked yet."""


def elapsed() -> float:
    """Seconds on a clock that never jumps and runs on while the machine sleeps (where there is one)."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def steady_clock() -> Callable[[], float]:
    """A clock that is set to Unix time now and goes on as `elapsed`: who sets the system's clock does not move it."""
    began = time.time() - elapsed()
    return lambda: began + elapsed()


@dataclass(frozen=True, slots=True)
class LockHolder:
    """One controller process, recognisable from others on its host; where the system does not tell: empty."""

    url: str
    host: str
    pid: int
    epoch: int = 0
    boot: str = ""
    namespace: str = ""
    started: str = ""
    key: str = ""
    """Random: tells one attempt to hold the lock from another."""

    @classmethod
    def myself(cls, url: str) -> Self:
        pid = os.getpid()
        return cls(
            url,
            socket.gethostname(),
            pid,
            boot=boot_id(),
            namespace=_pid_namespace(),
            started=_start_time(pid) or "",
            key=secrets.token_hex(8),
        )

    @classmethod
    def parse(cls, text: bytes | str) -> Self:
        """From the lock key; what cannot be read is a holder about whom nothing is known."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return cls(url="", host="", pid=0)

    def render(self) -> str:
        return json.dumps(asdict(self))

    def is_dead(self) -> bool:
        """Whether it certainly is: same boot and process namespace, and its process is gone or another one."""
        if not (self.boot and self.namespace and self.started):
            return False
        if (self.boot, self.namespace) != (boot_id(), _pid_namespace()):
            return False
        return _start_time(self.pid) != self.started

    def __str__(self) -> str:
        where = f" at {self.url}" if self.url else ""
        return f"the controller{where} (pid {self.pid} on {self.host or 'an unknown host'})"


@cache
def _pid_namespace() -> str:
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """When a process of this namespace began, in ticks since the boot; None if it has ended."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in DEAD_STATES else fields[19]


class Term:
    """Until when the holder may trust its lock. See the module's docstring."""

    def __init__(self, seconds: float, clock: Callable[[], float] = elapsed) -> None:
        self.seconds = seconds
        self.clock = clock
        self._since = float("-inf")

    def renewed(self, since: float) -> None:
        """A transaction that set the lock was sent at `since` (on this clock) and has been executed."""
        self._since = max(self._since, since)

    @property
    def interval(self) -> float:
        """Seconds between renewals."""
        return min(self.seconds / RENEWALS, MAX_RENEWAL)

    @property
    def valid(self) -> bool:
        return self.clock() - self._since < self.seconds * TRUSTED


@dataclass(frozen=True, slots=True)
class Attempt:
    """The outcome of an attempt to take the lock: it is `mine` now, or held by `other`. Neither: another process was
    quicker."""

    mine: LockHolder | None = None
    other: LockHolder | None = None


async def attempt(client: Redis, lock: str, epoch: str, me: LockHolder, seconds: float, *, replace: bool) -> Attempt:
    """Take the lock in the key `lock` for `seconds`, and raise the epoch. Raises RedisError, OSError."""
    async with client.pipeline(transaction=True) as pipeline:
        await pipeline.watch(lock, epoch)
        text = await pipeline.get(lock)
        other = None if text is None else LockHolder.parse(text)
        if other is not None and not (replace or other.is_dead() or other.key == me.key):
            return Attempt(other=other)
        # With the date: a store that lost history may have forgotten some.
        known = int(await pipeline.get(epoch) or 0)
        taken = dataclasses.replace(me, epoch=max(known + 1, int(time.time() * 1000)))
        pipeline.multi()  # type: ignore[no-untyped-call]
        pipeline.set(epoch, taken.epoch)
        pipeline.set(lock, taken.render(), px=round(seconds * 1000))
        try:
            await pipeline.execute()
        except WatchError:
            return Attempt()
    if other is not None and other.key != me.key:  # else the answer to an earlier attempt was lost
        log.warning("taking the job over from %s, which %s", other, "is replaced" if replace else "is dead")
    return Attempt(mine=taken)
