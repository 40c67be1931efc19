"""The check finds what the Redis server is and what it can promise, once at start."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from controller.store.errors import UnsuitableServer
from schema.util.backoff import Backoff

log = logging.getLogger(__name__)

BACKOFF = Backoff(0.05, 2.0)
"""Seconds between attempts to reach Redis: a restarted server is found soon, a dead one is not flooded."""
OLDEST = (6, 2)
"""GETDEL, reliable MULTI semantics with scripts off, and what managed services still run."""
WAITAOF_SINCE = (7, 2)
"""First version that can tell when a write has reached the append-only file."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """From `INFO`: it is allowed where `CONFIG GET` is not."""

    name: str
    version: tuple[int, ...]
    append_only: bool
    eviction: str
    syncs_always: bool = False
    """`appendfsync always`: a write is on disk before it is acknowledged."""

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Self:
        return cls(
            name=str(info.get("server_name", "redis")),
            version=tuple(int(part) for part in str(info["redis_version"]).split(".") if part.isdigit()),
            append_only=bool(info.get("aof_enabled", 0)),
            eviction=str(info.get("maxmemory_policy", "noeviction")),
        )

    @property
    def can_wait_for_file(self) -> bool:
        """Whether WAITAOF answers: a server compatible with 7.2, with its append-only file on."""
        return self.append_only and self.version >= WAITAOF_SINCE

    @property
    def keeps_what_it_acknowledges(self) -> bool:
        """Whether a commit that was answered is on disk for certain (see `StateStore.flush_durably`)."""
        return self.append_only and (self.syncs_always or self.can_wait_for_file)

    def shortcomings(self) -> list[str]:
        """Why acknowledged state could be lost, with the remedy."""
        problems = []
        if self.append_only and not self.keeps_what_it_acknowledges:
            problems.append(
                "it is older than 7.2 and does not report when a commit is on disk, a power cut may lose the last "
                "ones: set `appendfsync always`"
            )
        if not self.append_only:
            problems.append("its append-only file is off, a restart loses the job: set `appendonly yes`")
        if self.eviction != "noeviction":
            problems.append(
                f"it may evict keys when memory is full (maxmemory-policy {self.eviction}): "
                "set `maxmemory-policy noeviction`"
            )
        return problems

    def check(self, *, require_durable: bool) -> None:
        """Warn, or raise `UnsuitableServer`, about what this server cannot do."""
        if self.version < OLDEST:
            have, need = ".".join(map(str, self.version)), ".".join(map(str, OLDEST))
            raise UnsuitableServer(f"the Redis server is {have}; {need} or newer is needed (7.2 is better)")
        for problem in self.shortcomings():
            if require_durable:
                raise UnsuitableServer(f"the Redis server is not durable: {problem}")
            log.warning("the Redis server is not durable: %s", problem)


async def server_facts(client: Redis, patience: float) -> ServerFacts:
    """Return what the server is, once it answers. Raises RedisError, OSError if it does not within `patience`
    seconds."""
    give_up = time.monotonic() + patience
    attempt = 0
    while True:
        attempt += 1
        try:
            return await sync_always(client, ServerFacts.from_info(await client.info()))
        except (RedisError, OSError):
            pause = BACKOFF.after(attempt)
            if time.monotonic() + pause > give_up:
                raise
            await asyncio.sleep(pause)


async def sync_always(client: Redis, facts: ServerFacts) -> ServerFacts:
    """Have a server that cannot tell when a commit is on disk (no WAITAOF) sync its file at every write.

    What it does not allow is said by `ServerFacts.shortcomings`. Raises RedisError, OSError if it is away.
    """
    if not facts.append_only or facts.can_wait_for_file:
        return facts
    try:
        policy = (await client.config_get("appendfsync")).get("appendfsync")
        if policy != "always":
            await client.config_set("appendfsync", "always")
            log.warning("the Redis server is older than 7.2: set `appendfsync always` (it was %s)", policy)
    except ResponseError as error:  # no right to CONFIG, as with managed servers
        log.debug("appendfsync cannot be looked at or set: %s", error)
        return facts
    return dataclasses.replace(facts, syncs_always=True)
