"""The real service under a bad network, in one deterministic process: job, store, leasing, training, membership.

    trainer, rollout replicas ──▶ network: drops, delays, duplicates, reorders ──▶ controllers ──▶ Redis
       crash, restart, drain         requests and answers, up to a minute late       crash, are cut off,
                                                                                     stand by, take over

Everything runs in virtual time (`tests.support.virtual`); the same seed gives the same run. After every call that a
controller has answered `check` asserts the ledger's invariants, the trainer asserts what it is given, and in the end
the weights must contain every position of the data exactly once, or the ledger says why not.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

from controller.api.routes.samples import _unpack as unpack
from controller.client import calls as api
from controller.errors import ApiError
from controller.ledger.group import GroupState
from controller.services.controller import Controller
from controller.state.job import JobState
from controller.store import Fenced, Saved, StateStore, StoreUnavailable
from schema.config import Config
from schema.wire import messages as m
from schema.wire.batch import StepTable, decode_batch
from schema.wire.messages import ErrorCode, LeaseStatus
from schema.wire.weights import Publication
from tests.controller.drivers import make_frame, make_header
from tests.support.ledger import schedulable
from tests.support.virtual import Redis, VirtualLoop

T = TypeVar("T")
Handler = Callable[[Controller], Awaitable[T]]
EPOCH = 1_000_000.0
"""Unix time at which the simulation begins."""
CHAOS_SECONDS = 150.0
"""Then nothing breaks any more, and the job must come to its end."""
CALM_SECONDS = 900.0
CALL_TIMEOUT = 8.0
LOCK_SECONDS = 4.0


class Lost(Exception):
    """No answer."""


class Refused(Exception):
    """The controller refuses; `code` says why."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class Died(Exception):
    """This process is killed now."""


@dataclass(eq=False)
class Host:
    """One controller process. `serving` is unset while it stands by. `tasks` have an order, unlike those of a set."""

    serving: Controller | None = None
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    ended: str = ""

    def keep(self, *tasks: asyncio.Task[Any]) -> None:
        """They are killed with this host."""
        self.tasks.update(dict.fromkeys(tasks))

    def spawn(self, work: Awaitable[T]) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self.keep(task)
        task.add_done_callback(lambda _: self.tasks.pop(task, None))
        return task


class World:
    """See the module's docstring. `run` returns when the job has finished."""

    def __init__(self, seed: int, config: Config, run_dir: Path, n_rollouts: int = 3, chaos: float = 1.0) -> None:
        self.random = Random(seed)
        self.config, self.run_dir, self.n_rollouts, self.chaos = config, run_dir, n_rollouts, chaos
        self.loop = asyncio.get_running_loop()
        self.redis = Redis(self.random, lambda: self.random.uniform(0.0002, 0.003))
        self.hosts: list[Host] = []
        self.ids = 0
        self.calls = 0
        self.saved: dict[int, list[frozenset[str]]] = {0: []}
        """Checkpoints: what each step contained in the weights was made of."""
        self.weights: list[frozenset[str]] = []
        """The same of the weights that were trained to the end."""
        self.answers: dict[object, object] = {}
        self.publications: dict[int, Publication] = {}
        self.granted: dict[tuple[int, str], set[str]] = {}
        self.trainer: object = None
        """The one that registered last."""
        self.in_charge: Host | None = None
        self.redis.written = self._written
        self.done = asyncio.Event()
        self.faults: Counter[str] = Counter()
        self.ahead = 0.0
        """Seconds by which the wall clock was set."""

    # ---- chance -------------------------------------------------------------------------------------------

    @property
    def calm(self) -> bool:
        return self.loop.time() > CHAOS_SECONDS or not self.chaos

    def happens(self, what: str, probability: float) -> bool:
        """Whether a fault happens now."""
        if self.calm or self.random.random() >= probability * self.chaos:
            return False
        self.faults[what] += 1
        return True

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(self.random.uniform(0.2, 1.0) * seconds)

    def new_id(self) -> str:
        self.ids += 1
        return f"request-{self.ids:06d}"

    # ---- controllers --------------------------------------------------------------------------------------

    def wall(self) -> float:
        return EPOCH + self.loop.time() + self.ahead

    async def start(self, host: Host) -> None:
        """What the process does: stand by, read the job, serve."""
        try:
            store, saved = await StateStore.open(
                "redis://simulation", prefix="cosmos", job_id="job", lock_seconds=LOCK_SECONDS, patience=1e6,
                stand_by=lambda holder: None, clock=self.loop.time,
                connection_class=self.redis.connection_class(host),
            )  # fmt: skip
            host.keep(*store._tasks)
            await self.open(host, store, saved)
        except StoreUnavailable as error:
            await self.kill(host, f"could not start: {error}")

    async def open(self, host: Host, store: StateStore, saved: Saved) -> None:
        began = self.wall() - self.loop.time()
        job = JobState(
            self.config, job_id="job", run_dir=self.run_dir, store=store, saved=saved,
            clock=lambda: began + self.loop.time(), wall=self.wall,
        )  # fmt: skip
        job.forgive_downtime(store.alive_at)
        await job.save()
        controller = Controller.of(job)
        host.keep(controller.reaper.start())
        host.serving = controller
        host.keep(asyncio.ensure_future(self._until_fatal(host, store)))

    async def _until_fatal(self, host: Host, store: StateStore) -> None:
        error = await asyncio.shield(store.fatal)
        if isinstance(error, Fenced):
            self.faults["fenced"] += 1
        asyncio.ensure_future(self.kill(host, str(error)))  # noqa: RUF006 - it ends this very task

    async def kill(self, host: Host, why: str) -> None:
        """The process is gone, with all that it was doing; its transactions may still arrive."""
        host.serving, host.ended = None, why
        if host in self.hosts:
            self.hosts.remove(host)
        for task in list(host.tasks):
            task.cancel()
        self.redis.cut(host)

    async def keep_controllers(self) -> None:
        """The launcher: there is always a controller, sometimes two, sometimes none for a while."""
        while not self.done.is_set():
            wanted = 2 if self.happens("second controller", 0.2) else 1
            while len(self.hosts) < wanted:
                host = Host()
                self.hosts.append(host)
                host.spawn(self.start(host))
            await self.pause(5.0)
            for host in list(self.hosts):
                if self.happens("controller killed", 0.06):
                    await self.kill(host, "killed")
                    # Its lock is that of a dead process.
                    if host is self.in_charge and self.random.random() < 0.5:
                        self.redis.data.pop(b"cosmos:job:lock", None)
                elif self.happens("connections cut", 0.1):
                    self.redis.cut(host)
            if self.happens("clock set", 0.1):
                self.ahead += self.random.choice([3600.0, -3600.0])
            if self.happens("controller cut off", 0.05):
                self.hosts.append(host := Host())  # it takes over when the lock of the other one runs out
                host.spawn(self.start(host))
                await self._cut_off(self.hosts[0])

    async def _cut_off(self, host: Host) -> None:
        store = host.serving.job.store if host.serving is not None else None
        if store is None:
            return
        give_up = self.loop.time() + self.random.uniform(1.0, 4 * LOCK_SECONDS)
        while self.loop.time() < give_up:
            self.redis.cut(host)
            await asyncio.sleep(0.05)

    # ---- the network --------------------------------------------------------------------------------------

    async def call(self, handler: Handler[T], timeout: float = CALL_TIMEOUT) -> T:
        """One request, and perhaps its duplicates. Raises `Lost`, `Refused`."""
        answer: asyncio.Future[T] = self.loop.create_future()
        deliveries = 1
        while deliveries < 4 and self.happens("request duplicated", 0.15):
            deliveries += 1
        for number in range(deliveries):
            late = self.random.uniform(0, 60) if number and self.random.random() < 0.4 else 0.0
            work = asyncio.ensure_future(self._deliver(handler, late, answer))
            work.add_done_callback(_seen)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise Lost("no answer in time") from None

    async def _deliver(self, handler: Handler[T], late: float, answer: asyncio.Future[T]) -> None:
        await self._travel(late)
        if self.happens("request lost", 0.05):
            return
        error: Exception | None = None
        result: Any = None
        try:
            result = await self._handle(handler)
        except ApiError as refusal:
            error = Refused(refusal.code, str(refusal))
        except (StoreUnavailable, Lost) as lost:
            error = Lost(str(lost))
        if self.happens("answer lost", 0.05):
            return
        await self._travel(0.0)
        if answer.done():
            return
        answer.set_result(result) if error is None else answer.set_exception(error)

    async def _travel(self, late: float) -> None:
        slow = self.random.uniform(0, 3) if self.happens("delayed", 0.05) else 0.0
        await asyncio.sleep(late + slow + self.random.uniform(0.001, 0.02))

    async def _handle(self, handler: Handler[T]) -> T:
        """What a controller does with a request: any one that is there, the one in charge or not."""
        if not self.hosts:
            raise Lost("connection refused")
        host = self.random.choice(self.hosts)
        controller = host.serving
        if controller is None or not controller.job.store.in_charge:
            raise Lost("standby")
        self.calls += 1
        assert host is self.in_charge, "it trusts a memory that may be another's past"
        try:
            result = await host.spawn(handler(controller))
        except asyncio.CancelledError:
            raise Lost("the controller died") from None
        if host.serving is controller and controller.job.store.available:
            self.check(controller.job)
        return result

    def forget(self, handler: Handler[Any]) -> None:
        """Send a request and die."""
        work = asyncio.ensure_future(self._deliver(handler, 0.0, self.loop.create_future()))
        work.add_done_callback(_seen)

    async def insist(self, handler: Handler[T], timeout: float = CALL_TIMEOUT) -> T:
        """As the client: again and again, while no answer comes."""
        while True:
            try:
                return await self.call(handler, timeout)
            except Lost:
                await self.pause(1.0)

    # ---- invariants ---------------------------------------------------------------------------------------

    def always(self, request: object, answer: object) -> None:
        """Every delivery of one request is answered alike."""
        first = self.answers.setdefault(request, answer)
        assert first == answer, f"{request} was answered {first}, then {answer}"

    def heard(self, publication: Publication | None) -> None:
        """An id means the same weights for everybody, for ever."""
        if publication is not None:
            first = self.publications.setdefault(publication.id, publication)
            assert first == publication, f"publication {publication.id} is {first}, and {publication}"

    def _written(self, client: object, commands: list[list[bytes]]) -> None:
        """Only the controller that took the job over last writes."""
        if any(command[1] == b"cosmos:job:epoch" for command in commands):
            assert isinstance(client, Host)
            self.in_charge = client
        elif client is not self.in_charge:
            self._fail("a controller writes that is not in charge any more")

    def _fail(self, what: str) -> None:
        assert isinstance(self.loop, VirtualLoop)
        self.loop.fail(AssertionError(what))

    def check(self, job: JobState) -> None:
        table = job.require_ledger().table
        status = table.status()
        assert sum(status.states.values()) == status.created == table.frontier
        assert sum(status.dropped.values()) == status.states["dropped"]
        counted = [*table.in_state(GroupState.LEASED), *table.in_state(GroupState.READY)]
        assert table.deadlines == Counter(group.deadline for group in counted)
        assert schedulable(table.deadlines, table.first_step, table.params.groups_per_step)
        assert status.max_staleness <= table.params.staleness_bound
        assert status.over_bound == 0
        held = Counter(group.lease_id for group in table.in_state(GroupState.LEASED))
        assert not held or max(held.values()) == 1, "one lease id for two groups"
        assert len(job.registry.present("policy")) <= 1
        assert not any(group.crashes for group in table.in_state(GroupState.WAITING)), "nobody saw a crash"
        left = [group.expires - job.clock() for group in table.in_state(GroupState.LEASED)]
        assert max(left, default=0.0) <= table.params.lease_timeout + 1e-3, "a clock that is set keeps a lease"

    def check_end(self, job: JobState) -> None:
        """Every position is in the weights once, or was dropped with a reason."""
        table = job.require_ledger().table
        trained = Counter(name for step in self.weights for name in step)
        assert not trained or max(trained.values()) == 1, "a group was trained twice"
        status = table.status()
        kept = status.states["trained"] + status.states["durable"]
        assert kept == len(trained), f"{len(trained)} groups in the weights, {kept} in the ledger"
        assert kept + status.states["dropped"] == table.mixture.limit == status.created
        assert table.committed == len(self.weights)

    # ---- the run ------------------------------------------------------------------------------------------

    async def run(
        self, trainers: Callable[[World], Awaitable[None]], rollout: Callable[[World, str], Awaitable[None]]
    ) -> None:
        works = [self.keep_controllers(), trainers(self)]
        works += [rollout(self, f"rollout-{i}") for i in range(self.n_rollouts)]
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            async with asyncio.timeout(CHAOS_SECONDS + CALM_SECONDS):
                await tasks[1]
                for task in tasks:
                    if task.done():
                        task.result()
                final = await self.insist(_job)
        finally:
            self.done.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.check_end(final)


async def _job(controller: Controller) -> JobState:
    assert controller.job.progress.finished
    return controller.job


def _seen(work: asyncio.Future[Any]) -> None:
    """An assertion in a delivery ends the run, wherever its caller is by now."""
    if not work.cancelled() and work.exception() is not None:
        loop = work.get_loop()
        assert isinstance(loop, VirtualLoop)
        loop.fail(work.exception())


@lru_cache(maxsize=256)
def frame(index: int, version: int) -> bytes:
    return make_frame(make_header(index, version))


def table_of(data: bytes | None) -> tuple[StepTable, list[memoryview]] | None:
    return None if data is None else decode_batch(data)


def bundle(replica: str, group: m.LeasedGroup, indices: list[int], version: int) -> bytes:
    """The body of a push of several samples."""
    items = [m.PushItem(group_id=group.group_id, lease_id=group.lease_id, index=index) for index in indices]
    call = api.push_many(m.PushList(replica_id=replica, pushes=items), [frame(index, version) for index in indices])
    assert call.body is not None
    return call.body


async def push(controller: Controller, body: bytes) -> m.PushReply:
    """What the route does."""
    replica_id, pushes = unpack(body)
    before = {group.id: group.lease_id for group in controller.job.progress.in_state(GroupState.LEASED)}
    reply = await controller.samples.push(replica_id, body, pushes)
    for item, result in zip(pushes, reply.results, strict=True):
        if result.accepted and not result.duplicate:
            assert before.get(item.item.group_id) == item.item.lease_id, "counted under a lease that has ended"
    return reply


@contextmanager
def quiet() -> Iterator[None]:
    """Thousands of runs would log hundreds of thousands of lines."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def seeded(random: Random) -> Iterator[None]:
    """Lease ids, jitter and the like come from the seed too."""
    token = lambda n=16: f"{random.getrandbits(8 * n):0{2 * n}x}"  # noqa: E731
    with patch("secrets.token_hex", token), patch("schema.util.backoff.random", random):
        yield


__all__ = ["Died", "LeaseStatus", "Lost", "Refused", "World", "bundle", "push", "quiet", "seeded", "table_of"]
