"""Held-open lease requests: in order, all kinds, and without asking a thousand for one change."""

from __future__ import annotations

import asyncio

import pytest

from controller.errors import ApiError
from controller.notify import ChangeSignal
from controller.services import lease_queue
from controller.services.lease_queue import UNEVEN, LeaseQueue
from schema.wire.messages import ErrorCode, LeaseReply, LeaseRequest, LeaseStatus
from tests.controller.conftest import in_event_loop

THROTTLED = LeaseReply(status=LeaseStatus.THROTTLED)
GRANTED = LeaseReply(status=LeaseStatus.GRANTED)
SOON = 20.0


class Office:
    """A queue in front of a number of groups to give away."""

    def __init__(self) -> None:
        self.groups = 0
        self.alike = True
        self.closing = False
        self.asked: list[str] = []
        self.served: list[str] = []
        self.staged = 0
        self.lost: set[str] = set()
        self.full: set[str] = set()
        self.only_version: int | None = None
        self.changed = ChangeSignal()
        self.queue = LeaseQueue(self.changed, self.decide, lambda: self.alike, self.stage, lambda: self.closing)

    def stage(self) -> None:
        self.staged += 1

    def decide(self, request: LeaseRequest, patient: bool) -> LeaseReply:
        self.asked.append(request.replica_id)
        if request.replica_id in self.full and not patient:
            return UNEVEN
        if request.replica_id in self.lost:
            raise ApiError(ErrorCode.UNKNOWN_REPLICA, "gone")
        if not self.groups or self.only_version not in (None, request.version):
            return THROTTLED
        self.groups -= 1
        self.served.append(request.replica_id)
        return GRANTED

    def ask(self, name: str, version: int = 0, seconds: float = SOON) -> asyncio.Task[LeaseReply]:
        request = LeaseRequest(
            request_id=f"request-{name}", replica_id=name, incarnation=1, version=version, publication_id=1,
            max_groups=1, wait_s=seconds,
        )  # fmt: skip
        return asyncio.create_task(self.queue.wait(request, THROTTLED, seconds))

    async def change(self) -> None:
        """Something happened; everybody who is to be woken has been."""
        self.changed.notify()
        for _ in range(10):
            await asyncio.sleep(0)


async def settled(*tasks: asyncio.Task[LeaseReply]) -> list[LeaseStatus]:
    return [reply.status for reply in await asyncio.gather(*tasks)]


@in_event_loop
async def test_who_waits_longest_is_served_first() -> None:
    office = Office()
    tasks = [office.ask(f"r{i}") for i in range(5)]
    await office.change()
    office.groups = 2
    await office.change()
    assert office.served == ["r0", "r1"]
    assert await settled(*tasks[:2]) == [LeaseStatus.GRANTED] * 2
    office.groups = 3
    await office.change()
    assert office.served == [f"r{i}" for i in range(5)]
    assert len(office.queue) == 0
    await settled(*tasks)


@in_event_loop
async def test_who_holds_its_share_stands_back_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_queue, "PATIENCE_S", 0.05)
    office = Office()
    office.full = {"r0", "r1"}
    tasks = [office.ask(f"r{i}") for i in range(4)]
    await office.change()
    office.groups = 1
    await office.change()
    assert office.served == ["r2"], "its refusal is none of the next"
    office.groups = 2
    await office.change()
    assert office.served == ["r2", "r3"]
    await settled(tasks[0])
    assert office.served == ["r2", "r3", "r0"]
    tasks[1].cancel()


@in_event_loop
async def test_one_refusal_speaks_for_its_kind() -> None:
    office = Office()
    tasks = [office.ask(f"r{i}", version=i % 2) for i in range(100)]
    await office.change()
    office.asked.clear()
    await office.change()
    assert len(office.asked) == 2, "one of each version"
    office.alike = False
    office.asked.clear()
    await office.change()
    assert len(office.asked) == 100
    office.alike, office.groups, office.only_version = True, 1, 1
    await office.change()
    assert office.served == ["r1"], "the refusal of version 0 is none of version 1"
    office.closing = True
    await office.change()
    assert await settled(*tasks) == [LeaseStatus.THROTTLED, LeaseStatus.GRANTED] + [LeaseStatus.THROTTLED] * 98


@in_event_loop
async def test_what_changed_before_it_waited_is_not_missed() -> None:
    office = Office()
    first = office.ask("r0")
    await office.change()
    office.groups = 1
    second = office.ask("r1")  # no change is told after this
    assert await settled(second) == [LeaseStatus.GRANTED]
    assert office.staged > 0
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert len(office.queue) == 0


@in_event_loop
async def test_newcomers_do_not_overtake() -> None:
    office = Office()
    waiting = office.ask("r0")
    await office.change()
    office.groups = 1
    office.changed.notify()
    office.queue.catch_up()
    assert office.served == ["r0"]
    await settled(waiting)


@in_event_loop
async def test_time_ends_a_wait_with_the_last_refusal() -> None:
    office = Office()
    assert await settled(office.ask("r0", seconds=0.01)) == [LeaseStatus.THROTTLED]
    assert len(office.queue) == 0


@in_event_loop
async def test_the_same_request_again_ends_its_predecessor() -> None:
    office = Office()
    first = office.ask("r0")
    await office.change()
    second = office.ask("r0")
    await office.change()
    assert await settled(first) == [LeaseStatus.THROTTLED]
    office.groups = 1
    await office.change()
    assert await settled(second) == [LeaseStatus.GRANTED]


@in_event_loop
async def test_a_lost_replica_is_told_and_holds_up_nobody() -> None:
    office = Office()
    lost, other = office.ask("r0"), office.ask("r1")
    await office.change()
    office.lost, office.groups = {"r0"}, 1
    await office.change()
    with pytest.raises(ApiError):
        await lost
    assert await settled(other) == [LeaseStatus.GRANTED]
