"""Epochs of policy replicas: single decisions by hand, and whole jobs whose replicas die at any moment."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field

import pytest

from controller.state.membership import Membership, Order, dealt
from tests.support.effort import examples


def pair() -> Membership:
    """Two members, before step 5."""
    found = Membership(2)
    found.enter("a", 4)
    found.enter("b", 0)
    found.committed(4)
    found.save(5)
    assert found.healed("b", 5).parts == (1,)
    return found


def test_the_first_one_begins_at_once_and_the_next_one_waits_for_a_checkpoint():
    found = Membership(2)
    assert found.enter("a", 4) == Order("train", 1, (0, 1), ("a",), 4)
    assert found.enter("b", 0).action == "wait"
    assert found.begin("a", 4).action == "train", "nobody waits for it within a step"
    assert found.heal("b").action == "wait"
    found.committed(4)
    assert [found.begin("a", 5).action, found.heal("b").action] == ["save", "wait"]
    found.save(5)
    assert (found.begin("a", 5).action, found.heal("b")) == ("wait", Order("heal", 1, step=5))
    assert found.healed("b", 4).action == "heal", "that is another checkpoint"
    assert found.healed("b", 5) == Order("train", 2, (1,), ("a", "b"), 5)
    assert found.begin("a", 5) == Order("train", 2, (0,), ("a", "b"), 5)


def test_an_optimizer_step_is_applied_when_all_hold_it():
    found = pair()
    assert found.holds("a", 2, 5, 0).action == "wait"
    assert found.holds("a", 2, 5, 0).action == "wait", "asked again"
    assert found.holds("b", 2, 5, 0).action == "apply"
    assert found.holds("a", 2, 5, 0).action == "apply"
    assert found.holds("a", 2, 5, 1).action == "wait"
    assert found.begin("b", 6).action == "wait"
    assert found.begin("a", 6) == Order("commit", 2, step=5)


def test_who_dies_before_that_is_replaced_and_after_that_is_not_needed():
    found = pair()
    found.holds("a", 2, 5, 0)
    found.gone("b")
    assert found.holds("a", 2, 5, 0) == Order("again", 3, (0, 1), ("a",))
    assert found.holds("a", 3, 5, 0).action == "apply"
    found = pair()
    found.holds("a", 2, 5, 0)
    found.holds("b", 2, 5, 0)
    found.gone("a")
    assert found.holds("b", 2, 5, 0).action == "apply"
    assert found.begin("b", 6).action == "commit", "what the dead leader has left"


def test_who_is_not_a_member_has_to_heal():
    found = pair()
    found.gone("b")
    assert {found.begin("b", 5).action, found.holds("b", 2, 5, 0).action, found.heal("b").action} == {"heal"}
    assert found.begin("a", 4).action == "heal", "of before"
    assert found.begin("a", 7).action == "heal", "of a history that is lost"


def test_those_who_wait_while_all_members_die_begin_by_themselves():
    found = pair()
    found.enter("c", 0)
    found.gone("a")
    found.gone("b")
    assert found.heal("c") == Order("heal", 4)
    assert found.enter("c", 3) == Order("train", 5, (0, 1), ("c",), 3)
    assert found.begin("c", 3).action == "train"


def test_who_loads_for_too_long_waits_for_another_step():
    found = pair()
    found.enter("c", 0)
    found.committed(5)
    assert found.begin("b", 6).action == "wait"
    assert found.give_up() == ["c"]
    assert found.begin("b", 6).action == "train"
    found.committed(6)
    assert found.begin("a", 7).action == "save"


def test_the_slower_one_gets_fewer_parts():
    assert dealt(4, [1.0, 1.0]) == [2, 2]
    assert dealt(4, [1.0, 4.0]) == [3, 1]
    assert dealt(2, [1.0, 9.0]) == [2, 0]
    assert dealt(3, []) == []
    found = Membership(4)
    found.enter("a", 0)
    found.enter("b", 0)
    found.committed(0)
    found.save(1)
    found.healed("b", 1)
    assert found.begin("a", 1).parts == (0, 1)
    found.holds("a", 2, 1, 0, seconds=1.0)
    found.holds("b", 2, 1, 0, seconds=4.0)
    found.committed(1)
    assert (found.begin("a", 2).parts, found.begin("b", 2).parts) == ((0, 1, 2), (3,))


# ---- whole jobs ----------------------------------------------------------------------------------------------

STEPS, UPDATES = 6, 2
"""Training steps, and optimizer steps of each."""


def mixed(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass
class Replica:
    """What a policy replica does, one act at a time. weights: a digest of all that was ever applied to them."""

    name: str
    does: str = "enter"
    weights: str = ""
    step: int = 0
    number: int = 0
    order: Order = field(default_factory=lambda: Order("wait"))
    own: dict[int, str] = field(default_factory=dict)
    got: dict[int, str] = field(default_factory=dict)
    sent: set[tuple[str, int]] = field(default_factory=set)

    def meets(self, other: Replica) -> bool:
        """Whether both are at the same optimizer step in the same epoch, and this one listens."""
        mine, theirs = ((one.order.epoch, one.step, one.number) for one in (self, other))
        return mine == theirs and self.does in ("compute", "exchange")


class Jobs:
    """A job whose controller, replicas and messages are subject to chance.

    exact: whether a part's gradient depends on the weights alone, not on who formed it, and when.
    """

    def __init__(self, seed: int, parts: int, exact: bool) -> None:
        self.chance, self.exact = random.Random(seed), exact
        self.control = Membership(parts)
        self.replicas: dict[str, Replica] = {}
        self.undetected: list[str] = []
        self.checkpoints = {0: "start"}
        self.committed: dict[int, str] = {0: "start"}
        """The weights of each version of this timeline."""
        self.applied: dict[tuple[int, int], str] = {}
        self.born = self.formed = 0

    # ---- what replicas do ---------------------------------------------------------------------------------

    def act(self, one: Replica) -> None:
        getattr(self, f"_{one.does}")(one)

    def _enter(self, one: Replica) -> None:
        newest = max(self.checkpoints)
        alone = not self.control.members
        order = self.control.enter(one.name, newest)
        if order.action == "wait":
            one.does = "wait"
            return
        assert alone, "others were there, and it began beside them"
        one.weights, one.step, one.number, one.own = self.checkpoints[newest], newest, 0, {}
        self.committed = {step: found for step, found in self.committed.items() if step <= newest}
        self.applied = {at: found for at, found in self.applied.items() if at < (newest, 0)}
        self._take(one, order)

    def _wait(self, one: Replica) -> None:
        order = self.control.heal(one.name)
        if order.action == "heal" and order.step < 0:
            one.does = "enter"
        elif order.action == "heal":
            loaded = self.checkpoints[order.step]
            if self.chance.random() < 0.5:  # it takes a while
                order = self.control.healed(one.name, order.step)
                if order.action == "train":
                    one.weights, one.step, one.number, one.own = loaded, order.step, 0, {}
                    self._take(one, order)

    def _take(self, one: Replica, order: Order) -> None:
        one.order, one.does = order, "compute"
        one.own = {part: one.own[part] for part in order.parts if part in one.own}
        one.got, one.sent = {}, set()

    def _begin(self, one: Replica) -> None:
        order = self.control.begin(one.name, one.step)
        if order.action == "train":
            one.own = {}
            self._take(one, order)
        elif order.action == "commit":
            assert order.step + 1 == one.step
            assert one.step not in self.committed, "it was committed before"
            self.committed[one.step] = one.weights
            self.control.committed(order.step)
            if self.chance.random() < 0.2:
                self.checkpoints[one.step] = one.weights
        elif order.action == "save":
            self.checkpoints[one.step] = one.weights
            self.control.save(one.step)
        elif order.action == "heal":
            one.does = "enter"

    def _compute(self, one: Replica) -> None:
        for part in one.order.parts:
            if part not in one.own:
                self.formed += 1
                salt = "" if self.exact else self.formed
                one.own[part] = mixed(one.weights, one.step, one.number, part, salt)
        one.got.update({part: one.own[part] for part in one.order.parts})
        one.does = "exchange"

    def _exchange(self, one: Replica) -> None:
        open_ways = [
            (other, part)
            for other in self.replicas.values()
            for part in one.order.parts
            if other is not one and (other.name, part) not in one.sent and other.meets(one)
        ]
        if open_ways:
            other, part = self.chance.choice(open_ways)
            other.got[part] = one.own[part]
            one.sent.add((other.name, part))
            return
        if len(one.got) < self.control.parts:
            order = self.control.begin(one.name, one.step)
            if order.action == "heal":
                one.does = "enter"
            elif order.action == "train" and order.epoch != one.order.epoch:
                self._take(one, order)
            return
        seconds = self.chance.choice([0.0, 1.0, 5.0])
        order = self.control.holds(one.name, one.order.epoch, one.step, one.number, seconds)
        if order.action == "apply":
            self._apply(one)
        elif order.action == "again":
            self._take(one, order)
        elif order.action == "heal":
            one.does = "enter"

    def _apply(self, one: Replica) -> None:
        one.weights = mixed(one.weights, [one.got[part] for part in range(self.control.parts)])
        at = (one.step, one.number)
        assert self.applied.setdefault(at, one.weights) == one.weights, f"{one.name} has others at {at}"
        one.own, one.got, one.sent, one.number = {}, {}, set(), one.number + 1
        one.does = "compute"
        if one.number == UPDATES:
            one.step, one.number, one.does = one.step + 1, 0, "begin"

    # ---- what goes wrong ----------------------------------------------------------------------------------

    def fault(self) -> None:
        kind = self.chance.choice(["kill", "kill", "part", "born", "restart", "late"])
        if kind == "kill" and self.replicas:
            name = self.chance.choice(list(self.replicas))
            del self.replicas[name]
            self.undetected.append(name)
        elif kind == "part" and self.control.members:  # it lives, and was not heard of for too long
            self.control.gone(self.chance.choice(list(self.control.members)))
        elif kind == "restart":
            record = json.loads(json.dumps(self.control.to_record()))
            self.control = Membership.from_record(self.control.parts, record)
        elif kind == "late":
            self.control.give_up()
        elif kind == "born":
            self.bear()

    def bear(self) -> None:
        if len(self.replicas) < 3:
            self.born += 1
            self.replicas[f"r{self.born}"] = Replica(f"r{self.born}")

    def detect(self) -> None:
        for name in self.undetected:
            self.control.gone(name)
        self.undetected.clear()

    def run(self, faults: float) -> None:
        for tick in range(20_000):
            if max(self.committed) >= STEPS:
                return
            calm = tick > 2_000
            if not calm and self.chance.random() < faults:
                self.fault()
            if self.chance.random() < 0.1:
                self.detect()
            if not self.replicas or (not calm and self.chance.random() < 0.02):
                self.bear()
            self.act(self.chance.choice(list(self.replicas.values())))
        raise AssertionError("it does not come to an end")


def alone(parts: int) -> dict[int, str]:
    """The weights of each version of a job of one replica that nothing happens to."""
    job = Jobs(0, parts, exact=True)
    job.bear()
    while max(job.committed) < STEPS:
        job.act(job.replicas["r1"])
    return job.committed


@pytest.mark.scaled
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_whoever_dies_the_weights_are_those_of_one_replica(parts: int, exact: bool) -> None:
    wanted = alone(parts)
    for seed in range(examples(50)):
        job = Jobs(seed, parts, exact)
        job.run(faults=job.chance.choice([0.0, 0.01, 0.05]))
        if exact:
            assert job.committed == wanted, f"seed {seed}"
