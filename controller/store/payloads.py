"""Where the bytes of samples are kept: an interface, and Redis as its first implementation.

Samples that arrive side by side are kept side by side, as one part of their group's payload. The ledger decides
which parts exist; a payload store only keeps them. A part that the ledger names must be there, so `put_commands`
come no later than the transition that names it, and `delete_commands` no earlier than the one that forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from redis.asyncio import Redis

from controller.store.fence import Command

PayloadKey = tuple[str, str]
"""Group id and part (see `controller.ledger.group.SampleMeta`). What was written under a key is never changed."""
Payload = bytes | memoryview


class PayloadStore(Protocol):
    """What the controller asks of a place for payloads."""

    def put_commands(self, items: Mapping[PayloadKey, Payload]) -> list[Command]:
        """Redis commands that belong into the transaction of the transition that names these payloads."""

    def delete_commands(self, keys: Sequence[PayloadKey]) -> list[Command]:
        """Redis commands that belong into the transaction of the transition that forgets these payloads."""

    async def get(self, keys: Sequence[PayloadKey]) -> list[bytes | None]:
        """Payloads in the order of `keys`; None where there is none."""


class RedisPayloads:
    """Payloads as plain string keys next to the job's tables, written in the ledger's own transaction."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def _key(self, key: PayloadKey) -> str:
        return f"{self._namespace}payload:{key[0]}:{key[1]}"

    def put_commands(self, items: Mapping[PayloadKey, Payload]) -> list[Command]:
        if not items:
            return []
        return [("MSET", *(part for key, data in items.items() for part in (self._key(key), data)))]

    def delete_commands(self, keys: Sequence[PayloadKey]) -> list[Command]:
        return [("UNLINK", *map(self._key, keys))] if keys else []

    async def get(self, keys: Sequence[PayloadKey]) -> list[bytes | None]:
        if not keys:
            return []
        found: list[bytes | None] = await self._client.mget(list(map(self._key, keys)))  # type: ignore[assignment]
        return found
