"""Gradients of parts between members: the same sum bit by bit, whoever has what; and every wait has an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from policy_worker.replicas import exchange as base
from policy_worker.replicas.exchange import Exchange, ExchangeEnded, ExchangeWatch, Round
from policy_worker.replicas.gradients import PartGradients
from policy_worker.replicas.transports import CollectiveExchange, StoredExchange
from tests.support.waiting import PATIENCE
from weight_sync.stores.directory import DirectoryStore

SHAPES = [(7, 5), (3,), (40, 11)]


class Place:
    """Where members meet: one test's."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self.reason = ""
        self._store = dist.HashStore()

    def exchange(self, me: int, members: int, seconds: float = PATIENCE, epoch: int = 1) -> Exchange:
        watch = ExchangeWatch(lambda: self.reason, seconds)
        if self._kind == "stored":
            return StoredExchange(DirectoryStore(self._folder), 0, watch)
        store = dist.PrefixStore(f"e{epoch}/", self._store)
        return CollectiveExchange(store, me, members, torch.device("cpu"), watch, seconds)


@pytest.fixture(params=["collective", "stored"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path / "store")


def gradients(part: int, number: int = 0) -> list[Tensor | None]:
    """Of each parameter; the middle one has none in even parts."""
    generator = torch.Generator().manual_seed(1000 * number + part)
    found = [torch.randn(shape, generator=generator) * 10.0 ** (part % 3) for shape in SHAPES]
    return [found[0], found[1] if part % 2 else None, found[2]]


def summed(parts: int, number: int = 0) -> list[Tensor]:
    """As it should be: one after the other."""
    totals = [torch.zeros(shape) for shape in SHAPES]
    for part in range(parts):
        for index, gradient in enumerate(gradients(part, number)):
            own = torch.zeros(SHAPES[index]) if gradient is None else gradient
            totals[index] = own.clone() if part == 0 else totals[index] + own
    return totals


class Member:
    """A replica's rank, with parameters of its own."""

    def __init__(self, exchange: Exchange) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.parts, self.exchange = PartGradients(self.parameters), exchange

    def compute(self, parts: list[int], number: int = 0) -> None:
        for part in parts:
            if part in self.parts._vectors:
                continue
            for parameter, gradient in zip(self.parameters, gradients(part, number), strict=True):
                parameter.grad = gradient
            self.parts.take(part)

    def step(self, round_: Round) -> list[Tensor | None]:
        owned = [part for part, owner in enumerate(round_.owners) if owner == round_.me]
        self.compute(owned, round_.number)
        self.parts.add_up(self.exchange, round_)
        return [parameter.grad for parameter in self.parameters]


def at_once(works: list[Callable[[], Any]]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [pool.submit(work) for work in works]


@pytest.mark.parametrize("counts", [(1,), (4,), (1, 1), (3, 1), (2, 0, 1)], ids=str)
def test_the_sum_is_the_same_whoever_has_which_part(
    place: Place, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 400)
    wanted = [summed(sum(counts), number) for number in range(3)]
    all_hold = threading.Barrier(len(counts), timeout=PATIENCE)

    def work(me: int) -> list[list[Tensor | None]]:
        member = Member(place.exchange(me, len(counts)))
        try:
            found = []
            for number in range(3):
                found.append(member.step(Round(0, 5, number, 1, counts, me)))
                all_hold.wait()
                member.parts.forget()
            return found
        finally:
            member.exchange.close()

    for future in at_once([lambda me=me: work(me) for me in range(len(counts))]):
        for number, found in enumerate(future.result()):
            for index, gradient in enumerate(found):
                if sum(counts) == 1 and index == 1:
                    assert gradient is None
                else:
                    assert gradient is not None
                    assert torch.equal(gradient, wanted[number][index])


def test_who_is_left_computes_what_is_missing(place: Place) -> None:
    one = Member(place.exchange(0, 1))
    one.compute([0])
    with pytest.raises(ExchangeEnded, match="did not come within 1 s"):
        one.parts.add_up(place.exchange(0, 2, 1.0, epoch=2), Round(0, 5, 0, 2, (1, 1), 0))
    one.exchange = place.exchange(0, 1, epoch=3)
    found = one.step(Round(0, 5, 0, 3, (2,), 0))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, summed(2), strict=True) if mine is not None)


def test_a_new_epoch_ends_the_waiting(place: Place) -> None:
    members = [one.result() for one in at_once([lambda me=me: Member(place.exchange(me, 2)) for me in (0, 1)])]
    began = time.monotonic()
    threading.Timer(0.3, lambda: setattr(place, "reason", "epoch 2 has begun")).start()
    with pytest.raises(ExchangeEnded, match=r"t0-s5-n0-e1.*: epoch 2 has begun"):
        members[0].step(Round(0, 5, 0, 1, (1, 1), 0))
    with pytest.raises(ExchangeEnded, match=": epoch 2 has begun"):
        Member(place.exchange(2, 3, epoch=9)).step(Round(0, 5, 0, 9, (1, 1, 1), 2))
    assert time.monotonic() - began < PATIENCE / 2


def test_what_is_stored_is_proven_and_removed(tmp_path: Path) -> None:
    place = Place("stored", tmp_path)
    one, other = (Member(place.exchange(me, 2, 2.0)) for me in (0, 1))
    one.compute([0])
    round_ = Round(0, 5, 0, 1, (1, 1), 0)
    name = f"gradients.{round_.name}-p1-r0"
    other.compute([1])
    assert isinstance(other.exchange, StoredExchange)
    other.exchange._write(name, other.parts._vectors[1])
    (tmp_path / name / "gradient").chmod(0o600)
    with (tmp_path / name / "gradient").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(ExchangeEnded, match=f"{name} is not as it was written"):
        one.parts.add_up(one.exchange, round_)
    alone = Member(place.exchange(0, 1))
    for number in range(4):
        alone.step(Round(0, 6, number, 1, (2,), 0))
        alone.parts.forget()
    assert len(list(tmp_path.glob("*.t0-s6-*"))) == 4, "those of the last two rounds"
    alone.exchange.close()
    assert list(tmp_path.glob("*.t0-s6-*")) == []


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    place = Place("stored", tmp_path)
    one, other = Member(place.exchange(0, 2)), place.exchange(1, 2)
    round_ = Round(0, 5, 0, 1, (1, 1), 0)
    assert isinstance(other, StoredExchange)
    other._write(f"gradients.{round_.name}-p1-r0", torch.zeros(7))
    with pytest.raises(ExchangeEnded, match="is of another model or mesh"):
        one.step(round_)
