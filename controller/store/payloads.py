"""Where the bytes of samples are kept.

Samples that arrive side by side are kept side by side, as one part of their group's payload. The ledger decides
which parts exist; Redis only keeps them. A part that the ledger names must be there, so `put_commands`
come no later than the transition that names it, and `delete_commands` no earlier than the one that forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from redis.asyncio import Redis

from controller.store.fence import Command

PayloadKey = tuple[str, str]
"""Group id and part (see `controller.ledger.group.SampleMeta`). What was written under a key is never changed."""
Payload = bytes | memoryview


def text_key(group_id: str, index: int) -> PayloadKey:
    """The key of the text of a validation sample: these have no payload. A sample that is made again replaces it."""
    return group_id, f"text.{index}"


class RedisPayloads:
    """Payloads as plain string keys next to the job's tables, written in the ledger's own transaction."""

    def __init__(self, client: Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def _key(self, key: PayloadKey) -> str:
        return f"{self._namespace}payload:{key[0]}:{key[1]}"

    def put_commands(self, items: Mapping[PayloadKey, Payload]) -> list[Command]:
        """Commands that belong into the transaction of the transition that names these payloads."""
        if not items:
            return []
        return [("MSET", *(part for key, data in items.items() for part in (self._key(key), data)))]

    def delete_commands(self, keys: Sequence[PayloadKey]) -> list[Command]:
        """Commands that belong into the transaction of the transition that forgets these payloads."""
        return [("UNLINK", *map(self._key, keys))] if keys else []

    async def get(self, keys: Sequence[PayloadKey]) -> list[bytes | None]:
        """Payloads in the order of `keys`; None where there is none."""
        if not keys:
            return []
        payloads: list[bytes | None] = await self._client.mget(list(map(self._key, keys)))  # type: ignore[assignment]
        return payloads
