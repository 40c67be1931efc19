"""Where the bytes of samples are kept: an interface, and Redis as its first implementation.

The ledger decides which payloads exist; a payload store only keeps them. A payload that the ledger names must
be there, so `prepare` and `put_commands` come no later than the transition that names it, and
`delete_commands` no earlier than the one that forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from redis.asyncio import Redis

from controller.store.fence import Command

PayloadKey = tuple[str, int]
"""Group id and index of the sample."""
Payload = bytes | memoryview


class PayloadStore(Protocol):
    """What the controller asks of a place for payloads."""

    async def prepare(self, items: Mapping[PayloadKey, Payload]) -> None:
        """Awaited before the ledger takes the samples: a bulk store uploads here, Redis has nothing to do."""

    def put_commands(self, items: Mapping[PayloadKey, Payload]) -> list[Command]:
        """Redis commands that belong into the transaction of the transition that names these payloads."""

    def delete_commands(self, keys: Sequence[PayloadKey]) -> list[Command]:
        """Redis commands that belong into the transaction of the transition that forgets these payloads."""

    async def get(self, keys: Sequence[PayloadKey]) -> list[bytes | None]:
        """Payloads in the order of `keys`; None where there is none."""


class RedisPayloads:
    """Payloads as plain string keys beside the job's tables, written in the ledger's own transaction."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def _key(self, key: PayloadKey) -> str:
        return f"{self._namespace}payload:{key[0]}:{key[1]}"

    async def prepare(self, items: Mapping[PayloadKey, Payload]) -> None:
        return None

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
