"""The controller's tables in Redis, written through with group commit.

Callers change their state in memory, name what changed and wait; everything named while one transaction is on
its way goes together into the next:

    change memory ─ enqueue() ─▶ pending ─ one MULTI/EXEC at a time ─▶ all that wait in flush() go on

Invariants
    - What `flush` has returned for is in Redis. With nothing left to write it still waits for whatever earlier
      callers are waiting for, so an idempotent repeat is never answered from memory alone.
    - Rows are rendered when their transaction is built, with the memory of that moment. All changes up to that
      moment are pending by then, so each transaction takes Redis from one consistent state to a later one.
    - When Redis is away, waiting callers get `StoreUnavailable`, while what is pending stays and is written first
      when Redis is back. Commands only set and delete, so sending one twice is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic_core import from_json, to_json
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from controller.cancellation import end
from controller.store.errors import Fenced, Held, HistoryLost, StateStoreError, StoreUnavailable
from controller.store.fence import REPLY_TIMEOUT, Command, FencedConnection
from controller.store.lock import LOOK, Attempt, LockHolder, Term, attempt, elapsed
from controller.store.payloads import Payload, PayloadKey, RedisPayloads
from controller.store.server_check import BACKOFF, ServerFacts, server_facts
from schema.config.secrets import cut
from schema.util.tls import redis_options

log = logging.getLogger(__name__)

LOCK_SECONDS = 10.0
"""Life of the lock, where the caller does not say."""
DURABLE_TIMEOUT = 10.0
"""Seconds to wait for the append-only file: with `everysec` it takes at most one or two."""
SCAN_COUNT = 2000

Render = Callable[[], Any]
"""Gives a row as values that pydantic turns into JSON; None or an empty list: the row does not exist (any more)."""


class Table(StrEnum):
    """One Redis hash each: field -> JSON."""

    HEADERS = "headers"
    GROUPS = "groups"
    SAMPLES = "samples"
    HISTORY = "history"
    REPLICAS = "replicas"
    PUBLICATIONS = "publications"
    VALIDATION = "validation"
    STEPS = "steps"
    EVENTS = "events"


Saved = dict[Table, dict[str, Any]]
"""Everything that was stored, parsed."""


@dataclass(slots=True)
class _Pending:
    rows: dict[tuple[Table, str], Render | None] = field(default_factory=dict)
    payloads: dict[PayloadKey, Payload | None] = field(default_factory=dict)
    n_bytes: int = 0
    """The sum over all payloads."""
    lock: Literal["renew", "release"] | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rows or self.payloads or self.lock)

    def put(self, key: PayloadKey, data: Payload | None) -> None:
        """Write or (None) delete a payload; of one that is put and deleted at once nothing remains."""
        known = self.payloads.get(key)
        self.n_bytes += (0 if data is None else len(data)) - (0 if known is None else len(known))
        self.payloads[key] = data


class StateStore:
    """See the module's docstring. One per controller; use from one event loop."""

    def __init__(
        self, pool: ConnectionPool, namespace: str, facts: ServerFacts, holder: LockHolder, term: Term
    ) -> None:
        self.facts = facts
        self.namespace = namespace
        self.holder, self._term = holder, term
        self.stamp: Callable[[], float] = elapsed
        """The clock of everything that is written; `alive` says what it read when this controller was alive last."""
        self.alive_at: float | None = None
        """The time that the clock of the controller before read when it was alive last; None for a new job."""
        self.fatal: asyncio.Future[StateStoreError] = asyncio.get_running_loop().create_future()
        self._client = Redis(connection_pool=pool)
        self._fence = FencedConnection(pool, self._key("epoch"), self._key("seq"))
        self.payloads = RedisPayloads(self._client, namespace)
        self._pending = _Pending()
        self._in_flight: _Pending | None = None
        self._wake = asyncio.Event()
        self._outage: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        """Then the lock is given back and must not be taken again."""

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
        address: str = "",
        lock_seconds: float = LOCK_SECONDS,
        replace: bool = False,
        stand_by: Callable[[LockHolder], None] | None = None,
        clock: Callable[[], float] = elapsed,
        connection_class: type[AbstractConnection] | None = None,
    ) -> tuple[Self, Saved]:
        """Connect, take charge of the job (see `controller.store.lock`), and read everything back.

        While another controller is in charge, `stand_by` is called with it again and again; without `stand_by`
        that is an error. `address`: our own URL, for others that stand by.

        Raises:
            StoreUnavailable: no answer within `patience` seconds.
            UnsuitableServer: too old, or not durable where `require_durable` asks for it.
            Held: another controller is in charge.
        """
        options: dict[str, Any] = {"socket_timeout": REPLY_TIMEOUT, "retry": Retry(NoBackoff(), 0)}
        options |= redis_options(url)
        if password:
            options["password"] = password
        if connection_class is not None:
            options["connection_class"] = connection_class
        pool: ConnectionPool = ConnectionPool.from_url(url, **options)
        try:
            facts = await server_facts(Redis(connection_pool=pool), patience)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"no answer from Redis at {_where(url)}: {_said(error)}") from None
        facts.check(require_durable=require_durable)
        store = cls(pool, f"{prefix}:{job_id}:", facts, LockHolder.myself(address), Term(lock_seconds, clock))
        try:
            await store._take_charge(replace, stand_by)
            saved = await store._load()
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis at {_where(url)} failed while the job was read: {_said(error)}") from None
        store._pending.lock = "renew"  # with the first rows: what this controller writes is of its own clock
        store._tasks = [
            asyncio.create_task(store._write_forever(), name="store-writer"),
            asyncio.create_task(store._keep_lock(), name="store-lock"),
        ]
        return store, saved

    # ---- writing ------------------------------------------------------------------------------------------

    def require(self) -> None:
        """Raise `StoreUnavailable` unless this controller may change its state and answer from it now.

        Redis must be there (better known before a change than after it), and the lock must be ours for certain:
        what a process remembers that was suspended for longer than its lock lived may be another's past.
        """
        self._require_redis()
        if not self._term.valid:
            raise StoreUnavailable("the lock of this job could not be renewed in Redis in time: it is being renewed")

    def _require_redis(self) -> None:
        if self.fatal.done():
            raise StoreUnavailable(str(self.fatal.result()))
        if self._outage is not None:
            raise StoreUnavailable(self._outage)

    @property
    def in_charge(self) -> bool:
        """Whether the lock is ours for certain: memory may be shown, also while Redis is away for a moment."""
        return not self.fatal.done() and self._term.valid

    @property
    def outage(self) -> str | None:
        """Why Redis does not take writes, if that is so."""
        return self._outage

    @property
    def available(self) -> bool:
        return self._outage is None and self.in_charge

    @property
    def backlog_bytes(self) -> int:
        """Payload bytes that wait for Redis."""
        in_flight = 0 if self._in_flight is None else self._in_flight.n_bytes
        return in_flight + self._pending.n_bytes

    def enqueue(
        self,
        rows: Mapping[tuple[Table, str], Render | None],
        puts: Mapping[PayloadKey, Payload] | None = None,
        deletes: Sequence[PayloadKey] = (),
    ) -> None:
        """Name what changed; None deletes a row. Of a payload put and deleted at once, nothing remains."""
        self._pending.rows.update(rows)
        for key, data in (puts or {}).items():
            self._pending.put(key, data)
        for key in deletes:
            self._pending.put(key, None)

    async def flush(self) -> None:
        """Wait until everything named so far, by anybody, is in Redis. Raises `StoreUnavailable`."""
        self._require_redis()
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
        """Flush, and wait until it is in the append-only file where the server can tell."""
        await self.flush()
        if not self.facts.can_wait_for_file:
            return
        try:
            in_file = await self._fence.wait_for_file(self._key("durable"), DURABLE_TIMEOUT)
        except (Fenced, HistoryLost) as error:
            self._end(error)
            raise StoreUnavailable(str(error)) from None
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis failed while its append-only file was awaited: {_said(error)}") from None
        if not in_file:
            raise StoreUnavailable(f"Redis did not sync its append-only file within {DURABLE_TIMEOUT:.0f} s")

    async def renew_lock(self) -> None:
        """Say that this controller is alive; finds out about a successor even when nothing else happens."""
        self._pending.lock = "renew"
        await self.flush()

    async def _keep_lock(self) -> None:
        while not self.fatal.done() and not self._closing:
            with suppress(StoreUnavailable):  # it is renewed first of all when Redis is back
                await self.renew_lock()
            await asyncio.sleep(self._term.interval)

    async def _write_forever(self) -> None:
        try:
            await self._write_loop()
        except Exception as error:  # a bug: nothing can be acknowledged from here on, so the process must end
            log.exception("the store cannot go on")
            self._end(StateStoreError(f"the store cannot go on: {error!r}"))

    async def _write_loop(self) -> None:
        attempt = 0
        while True:
            if self._in_flight is None:
                await self._wake.wait()
                self._wake.clear()
                self._in_flight, self._pending = self._pending, _Pending()
                commands = self._commands(self._in_flight)
            began = self._term.clock()
            try:
                await self._fence.execute(commands)
            except (Fenced, HistoryLost) as error:
                self._end(error)
                return
            except (RedisError, OSError) as error:
                self._suspend(error)
                attempt += 1
                await asyncio.sleep(BACKOFF.after(attempt))
                continue
            if self._outage is not None:
                log.warning("Redis is back: everything that was pending is written")
            self._outage, attempt = None, 0
            if self._in_flight.lock == "renew":
                self._term.renewed(began)
            _answer(self._in_flight.waiters, None)
            self._in_flight = None

    def _commands(self, batch: _Pending) -> list[Command]:
        """The transaction of a batch: rows rendered now, payloads before the deletion of others."""
        sets: dict[Table, list[str | bytes]] = {}
        gone: dict[Table, list[str]] = {}
        for (table, name), render in batch.rows.items():
            row = None if render is None else render()
            if row is None or row == []:
                gone.setdefault(table, []).append(name)
            else:
                sets.setdefault(table, []).extend((name, _dump(row)))
        commands: list[Command] = [("HSET", self._key(table), *parts) for table, parts in sets.items()]
        commands += [("HDEL", self._key(table), *names) for table, names in gone.items()]
        payloads = batch.payloads.items()
        commands += self.payloads.put_commands({key: data for key, data in payloads if data is not None})
        commands += self.payloads.delete_commands([key for key, data in payloads if data is None])
        if batch.lock == "release":
            commands.append(("DEL", self._key("lock")))
        elif batch.lock == "renew":
            life = round(self._term.seconds * 1000)
            commands.append(("SET", self._key("lock"), self.holder.render(), "PX", life))
            commands.append(("SET", self._key("alive"), self.stamp()))
        return commands

    def _suspend(self, error: Exception) -> None:
        why = _said(error)
        if self._outage is None:
            log.error("Redis does not take writes, answering 503 until it does: %s", why)
        self._outage = f"Redis does not take writes: {why}"
        for batch in (self._in_flight, self._pending):
            if batch is not None:
                _answer(batch.waiters, StoreUnavailable(self._outage))
                batch.waiters = []

    def _end(self, error: StateStoreError) -> None:
        if self.fatal.done():
            return
        self.fatal.set_result(error)
        for batch in (self._in_flight, self._pending):
            if batch is not None:
                _answer(batch.waiters, StoreUnavailable(str(error)))

    # ---- start and end ------------------------------------------------------------------------------------

    async def _take_charge(self, replace: bool, stand_by: Callable[[LockHolder], None] | None) -> None:
        """Wait until the lock may be taken, and take it. Raises `Held` where waiting is not wanted."""
        while True:
            began, outcome = self._term.clock(), Attempt()
            try:
                outcome = await attempt(
                    self._client, self._key("lock"), self._key("epoch"), self.holder, self._term.seconds,
                    replace=replace,
                )  # fmt: skip
            except (RedisError, OSError):
                if stand_by is None:
                    raise  # else an outage while standing by: look again
            if outcome.mine is not None:
                self.holder, self._fence.fencing_token = outcome.mine, outcome.mine.epoch
                self._term.renewed(began)
                return
            if stand_by is None:
                raise Held(f"{outcome.other or 'another one'} is in charge of this job")
            if outcome.other is not None:
                stand_by(outcome.other)
            await asyncio.sleep(LOOK)

    async def _load(self) -> Saved:
        self._fence.seq = int(await self._client.get(self._key("seq")) or 0)
        alive = await self._client.get(self._key("alive"))
        self.alive_at = None if alive is None else float(alive)
        saved: Saved = {}
        for table in Table:
            rows = saved[table] = {}
            async for name, value in self._client.hscan_iter(self._key(table), count=SCAN_COUNT):
                rows[name.decode()] = from_json(value)
        return saved

    async def get_payloads(self, keys: Sequence[PayloadKey]) -> list[bytes | None]:
        """Payloads in the order of `keys`. Raises `StoreUnavailable`."""
        try:
            return await self.payloads.get(keys)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis does not answer: {_said(error)}") from None

    async def close(self) -> None:
        """Write what is pending if Redis takes it, give the lock back and disconnect."""
        self._closing = True
        if self._outage is None and not self.fatal.done():
            self._pending.lock = "release"
            with suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(DURABLE_TIMEOUT):
                    await self.flush()
        await end(self._tasks)
        await self._fence.close()
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    def _key(self, name: str) -> str:
        return self.namespace + name


def _dump(value: Any) -> bytes:
    return to_json(value, inf_nan_mode="constants")  # five times as fast as json.dumps


def _answer(waiters: Sequence[asyncio.Future[None]], error: StoreUnavailable | None) -> None:
    for waiter in waiters:
        if waiter.done():  # its request was cancelled meanwhile
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def _said(error: Exception) -> str:
    return str(error) or "no answer in time"  # asyncio's TimeoutError says nothing


def _where(url: str) -> str:
    """The address without its credentials and options."""
    return str(cut(url)).partition("?")[0]
