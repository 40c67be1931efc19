"""The controller's tables in Redis, written through with group commit.

Callers change their state in memory, name what changed and wait; everything named while one transaction is on
its way goes together into the next:

    change memory ─ write() ─▶ pending ─ one MULTI/EXEC at a time ─▶ all callers of that transaction are answered

Invariants
    - What `write` has returned for is in Redis. With nothing left to write it still waits for whatever earlier
      callers are waiting for, so an idempotent repeat is never answered from memory alone.
    - Rows are rendered when their transaction is built, with the memory of that moment. All changes up to that
      moment are pending by then, so each transaction takes Redis from one consistent state to a later one.
    - When Redis is away, waiting callers get `StoreUnavailable`, while what is pending stays and is written first
      when Redis is back. Commands only set and delete, so sending one twice is harmless.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from pydantic_core import to_json
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from controller.store.errors import Fenced, HistoryLost, StoreError, StoreUnavailable
from controller.store.fence import REPLY_TIMEOUT, Command, FencedConnection
from controller.store.payloads import Payload, PayloadKey, PayloadStore, RedisPayloads
from controller.store.server import ServerFacts

log = logging.getLogger(__name__)

FIRST_PAUSE, MAX_PAUSE = 0.05, 2.0
"""Seconds between attempts to reach Redis: a restarted server is found soon, a dead one is not flooded."""
LOCK_SECONDS = 10
"""Life of the lock key. The lock only tells who is in charge; what protects the state is the epoch."""
DURABLE_TIMEOUT = 10.0
"""Seconds to wait for the append-only file: with `everysec` it takes at most one or two."""
SCAN_COUNT = 500

Render = Callable[[], Any]
"""Gives a row as JSON-compatible values."""


class Table(StrEnum):
    """One Redis hash each: field -> JSON."""

    HEADERS = "headers"
    GROUPS = "groups"
    REPLICAS = "replicas"
    PUBLICATIONS = "publications"
    VALIDATION = "validation"
    STEPS = "steps"


Saved = dict[Table, dict[str, Any]]
"""Everything that was stored, parsed."""


@dataclass(slots=True)
class _Pending:
    rows: dict[tuple[Table, str], Render | None] = field(default_factory=dict)
    payloads: dict[PayloadKey, Payload | None] = field(default_factory=dict)
    lock: bool = False
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.payloads or self.lock)


class StateStore:
    """See the module's docstring. One per controller; use from one event loop."""

    def __init__(self, pool: ConnectionPool, namespace: str, facts: ServerFacts) -> None:
        self.facts = facts
        self.namespace = namespace
        self.fatal: asyncio.Future[StoreError] = asyncio.get_running_loop().create_future()
        self._client = Redis(connection_pool=pool)
        self._fence = FencedConnection(pool, self._key("epoch"), self._key("seq"))
        self.payloads: PayloadStore = RedisPayloads(self._client, namespace)
        self._pending = _Pending()
        self._in_flight: _Pending | None = None
        self._wake = asyncio.Event()
        self._outage: str | None = None
        self._writer: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        prefix: str,
        job_id: str,
        password: str | None = None,
        require_durable: bool = False,
        patience: float = 10.0,
    ) -> tuple[Self, Saved]:
        """Connect, take the job over from whoever had it, and read everything back.

        Raises:
            StoreUnavailable: no answer within `patience` seconds.
            UnsuitableServer: too old, or not durable where `require_durable` asks for it.
        """
        options: dict[str, Any] = {"socket_timeout": REPLY_TIMEOUT, "retry": Retry(NoBackoff(), 0)}
        if password:
            options["password"] = password
        pool: ConnectionPool = ConnectionPool.from_url(url, **options)
        facts = await _server_facts(Redis(connection_pool=pool), url, patience)
        facts.check(require_durable=require_durable)
        store = cls(pool, f"{prefix}:{job_id}:", facts)
        try:
            await store._take_over()
            saved = await store._load()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis at {_where(url)} failed while the job was read: {error}") from None
        store._writer = asyncio.create_task(store._write_forever(), name="store-writer")
        return store, saved

    # ---- writing ------------------------------------------------------------------------------------------

    def require(self) -> None:
        """Raise `StoreUnavailable` while Redis is away: better before a change than after it."""
        if self.fatal.done():
            raise StoreUnavailable(str(self.fatal.result()))
        if self._outage is not None:
            raise StoreUnavailable(self._outage)

    @property
    def available(self) -> bool:
        return self._outage is None and not self.fatal.done()

    def enqueue(
        self,
        rows: Mapping[tuple[Table, str], Render | None],
        puts: Mapping[PayloadKey, Payload] | None = None,
        deletes: Sequence[PayloadKey] = (),
    ) -> None:
        """Name what changed; None deletes a row. Of a payload put and deleted at once, nothing remains."""
        self._pending.rows.update(rows)
        self._pending.payloads.update(puts or {})
        self._pending.payloads.update((key, None) for key in deletes)

    async def flush(self) -> None:
        """Wait until everything named so far, by anybody, is in Redis. Raises `StoreUnavailable`."""
        self.require()
        if self._pending:
            target = self._pending
            self._wake.set()
        elif self._in_flight is not None:
            target = self._in_flight
        else:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        target.waiters.append(waiter)
        await waiter

    async def flush_durably(self) -> None:
        """As `flush`, and wait until it is in the append-only file where the server can tell."""
        await self.flush()
        if not self.facts.can_wait_for_file:
            return
        pipeline = self._client.pipeline(transaction=False)
        pipeline.set(self._key("durable"), self._fence.seq)  # WAITAOF waits for writes of its own connection
        pipeline.execute_command("WAITAOF", 1, 0, int(DURABLE_TIMEOUT * 1000))
        try:
            _, (local, _replicas) = await pipeline.execute()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis failed while its append-only file was awaited: {error}") from None
        if not local:
            raise StoreUnavailable(f"Redis did not sync its append-only file within {DURABLE_TIMEOUT:.0f} s")

    async def renew_lock(self) -> None:
        """Say that this controller is alive; finds out about a successor even when nothing else happens."""
        self._pending.lock = True
        await self.flush()

    async def _write_forever(self) -> None:
        try:
            await self._write_loop()
        except Exception as error:  # a bug: nothing can be acknowledged from here on, so the process must end
            log.exception("the store cannot go on")
            self._end(StoreError(f"the store cannot go on: {error!r}"))

    async def _write_loop(self) -> None:
        pause = FIRST_PAUSE
        while True:
            if self._in_flight is None:
                await self._wake.wait()
                self._wake.clear()
                self._in_flight, self._pending = self._pending, _Pending()
                commands = self._commands(self._in_flight)
            try:
                await self._fence.execute(commands)
            except (Fenced, HistoryLost) as error:
                self._end(error)
                return
            except (RedisError, OSError) as error:
                self._suspend(error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, MAX_PAUSE)
                continue
            if self._outage is not None:
                log.warning("Redis is back: everything that was pending is written")
            self._outage, pause = None, FIRST_PAUSE
            _answer(self._in_flight.waiters, None)
            self._in_flight = None

    def _commands(self, batch: _Pending) -> list[Command]:
        """The transaction of a batch: rows rendered now, payloads before the deletion of others."""
        sets: dict[Table, list[str | bytes]] = {}
        gone: dict[Table, list[str]] = {}
        for (table, name), render in batch.rows.items():
            if render is None:
                gone.setdefault(table, []).append(name)
            else:
                sets.setdefault(table, []).extend((name, _dump(render())))
        commands: list[Command] = [("HSET", self._key(table), *parts) for table, parts in sets.items()]
        commands += [("HDEL", self._key(table), *names) for table, names in gone.items()]
        payloads = batch.payloads.items()
        commands += self.payloads.put_commands({key: data for key, data in payloads if data is not None})
        commands += self.payloads.delete_commands([key for key, data in payloads if data is None])
        if batch.lock:
            commands.append(("SET", self._key("lock"), self._lock_text(), "EX", LOCK_SECONDS))
            commands.append(("SET", self._key("alive"), time.time()))
        return commands

    def _suspend(self, error: Exception) -> None:
        if self._outage is None:
            log.error("Redis does not take writes, answering 503 until it does: %s", error)
        self._outage = f"Redis does not take writes: {error}"
        for batch in (self._in_flight, self._pending):
            if batch is not None:
                _answer(batch.waiters, StoreUnavailable(self._outage))
                batch.waiters = []

    def _end(self, error: StoreError) -> None:
        self.fatal.set_result(error)
        for batch in (self._in_flight, self._pending):
            if batch is not None:
                _answer(batch.waiters, StoreUnavailable(str(error)))

    # ---- start and end ------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        pipeline = self._client.pipeline(transaction=True)
        pipeline.get(self._key("lock"))
        pipeline.incr(self._key("epoch"))
        pipeline.set(self._key("lock"), self._lock_text(), ex=LOCK_SECONDS)
        lock, epoch, _ = await pipeline.execute()
        self._fence.epoch = int(epoch)
        if lock is not None:
            log.warning("taking the job over from a controller that was alive just now: %s", lock.decode())

    async def _load(self) -> Saved:
        self._fence.seq = int(await self._client.get(self._key("seq")) or 0)
        saved: Saved = {}
        for table in Table:
            rows = saved[table] = {}
            async for name, value in self._client.hscan_iter(self._key(table), count=SCAN_COUNT):
                rows[name.decode()] = json.loads(value)
        return saved

    async def alive_at(self) -> float | None:
        """Unix time at which a controller of this job was last known to be alive; None for a new job."""
        value = await self._client.get(self._key("alive"))
        return None if value is None else float(value)

    async def get_payloads(self, keys: Sequence[PayloadKey]) -> list[bytes | None]:
        """Payloads in the order of `keys`. Raises `StoreUnavailable`."""
        try:
            return await self.payloads.get(keys)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis does not answer: {error}") from None

    async def close(self) -> None:
        """Write what is pending if Redis takes it, give the lock back and disconnect."""
        if self.available:
            with suppress(StoreUnavailable, asyncio.TimeoutError):
                await asyncio.wait_for(self.flush(), DURABLE_TIMEOUT)
        if self._writer is not None:
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer
        await self._fence.close()
        if self.available:
            with suppress(RedisError, OSError):
                await self._client.delete(self._key("lock"))
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    def _key(self, name: str) -> str:
        return self.namespace + name

    def _lock_text(self) -> str:
        return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "epoch": self._fence.epoch})


def _dump(value: Any) -> bytes:
    return to_json(
        value, inf_nan_mode="constants"
    )  # read back by json.loads, five times as fast as json.dumps


def _answer(waiters: Sequence[asyncio.Future[None]], error: StoreUnavailable | None) -> None:
    for waiter in waiters:
        if waiter.done():  # its request was cancelled meanwhile
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def _where(url: str) -> str:
    """The address without its credentials."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


async def _server_facts(client: Redis, url: str, patience: float) -> ServerFacts:
    give_up, pause = time.monotonic() + patience, FIRST_PAUSE
    while True:
        try:
            return ServerFacts.from_info(await client.info())
        except (RedisError, OSError) as error:
            if time.monotonic() + pause > give_up:
                raise StoreUnavailable(f"no answer from Redis at {_where(url)}: {error}") from None
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE)
