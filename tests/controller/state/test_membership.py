"""Epochs of policy replicas: single decisions by hand, and whole jobs whose replicas die at any moment."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field

import pytest

from controller.state.membership import PATIENCE, Membership, Order, dealt
from tests.support.effort import examples


def one(parts: int = 2, step: int = 4) -> Membership:
    """A member before a step, and its weights are known."""
    found = Membership(parts)
    found.found("a", step)
    assert found.join("a", step, "w").action == "train"
    return found


def pair(parts: int = 2) -> Membership:
    """Two members, before step 5."""
    found = one(parts)
    found.join("b", 0, "old")
    found.committed(4)
    found.begin("a", 5, "v")
    found.save(5)
    assert found.healed("b", 5, "v").action == "train"
    assert found.begin("a", 5, "v").action == "train"
    return found


def test_the_first_one_begins_at_once_and_the_next_one_waits_for_a_checkpoint():
    found = Membership(2)
    assert found.join("a", 4, "w").action == "heal", "it has to register while nobody is there"
    found.found("a", 4)
    assert found.join("a", 4, "w") == Order("train", 1, (0, 1), ("a",), (2,), 4)
    assert found.join("b", 0, "old").action == "wait"
    assert found.begin("a", 4, "w").action == "train", "nobody waits for it within a step"
    found.committed(4)
    assert [found.begin("a", 5, "v").action, found.join("b", 0, "old").action] == ["save", "wait"]
    found.save(5)
    assert found.begin("a", 5, "v").action == "wait"
    assert found.join("b", 0, "old") == Order("heal", 1, step=5)
    assert found.healed("b", 4, "v").action == "heal", "that is another checkpoint"
    assert found.healed("b", 5, "v") == Order("train", 2, (1,), ("a", "b"), (1, 1), 5)
    assert found.begin("a", 5, "v") == Order("train", 2, (0,), ("a", "b"), (1, 1), 5)


def test_who_comes_with_the_same_weights_takes_part_at_once():
    found = one()
    assert found.join("b", 4, "other").action == "wait"
    assert found.join("b", 4, "w") == Order("train", 2, (1,), ("a", "b"), (1, 1), 4)
    found = one()
    found.ready("a", 1, 4, 0)
    found.holds("a", 1, 4, 0)
    assert found.join("b", 4, "w").action == "wait", "the step is under way"


def test_a_round_is_exchanged_when_all_are_ready_and_applied_when_all_hold_it():
    found = pair()
    assert found.ready("a", 2, 5, 0).action == "wait"
    assert found.ready("a", 2, 5, 0).action == "wait", "asked again"
    assert [found.ready(name, 2, 5, 0).action for name in "ba"] == ["exchange"] * 2
    assert found.holds("a", 2, 5, 0).action == "wait"
    assert [found.holds(name, 2, 5, 0).action for name in "ba"] == ["apply"] * 2
    assert found.ready("a", 2, 5, 1).action == "wait"
    assert found.begin("b", 6).action == "wait"
    assert found.begin("a", 6) == Order("commit", 2, step=5)


def test_who_dies_before_that_is_replaced_and_after_that_is_not_needed():
    found = pair()
    found.ready("a", 2, 5, 0)
    found.gone("b")
    assert found.ready("a", 2, 5, 0) == Order("again", 3, (0, 1), ("a",), (2,))
    assert (found.ready("a", 3, 5, 0).action, found.holds("a", 3, 5, 0).action) == ("exchange", "apply")
    found = pair()
    found.holds("a", 2, 5, 0)
    found.holds("b", 2, 5, 0)
    found.gone("a")
    assert found.holds("b", 2, 5, 0).action == "apply"
    assert found.begin("b", 6).action == "commit", "what the dead leader has left"


def test_an_exchange_that_fails_is_begun_anew_with_the_same_parts():
    found = pair()
    found.ready("a", 2, 5, 0)
    found.broken("b", 2)
    found.broken("a", 2)
    assert found.ready("a", 2, 5, 0) == Order("again", 3, (0,), ("a", "b"), (1, 1))
    assert found.holds("b", 2, 5, 0) == Order("again", 3, (1,), ("a", "b"), (1, 1))


def test_who_is_not_a_member_has_to_heal():
    found = pair()
    found.gone("b")
    calls = [found.begin("b", 5), found.ready("b", 2, 5, 0), found.holds("b", 2, 5, 0)]
    assert {order.action for order in calls} == {"heal"}
    assert found.begin("a", 4).action == "heal", "of before"
    assert found.begin("a", 7).action == "heal", "of a history that is lost"


def test_those_who_wait_while_all_members_die_register_anew():
    found = pair()
    found.join("c", 0, "old")
    found.gone("a")
    found.gone("b")
    assert found.join("c", 0, "old") == Order("heal", 4)
    found.found("c", 3)
    assert found.begin("c", 3, "u") == Order("train", 5, (0, 1), ("c",), (2,), 3)


def test_who_loads_for_too_long_waits_for_another_step():
    found = pair()
    found.join("c", 0, "old")
    found.committed(5)
    assert [found.begin(name, 6, "u").action for name in "ba"] == ["wait", "save"]
    assert found.give_up() == ["c"]
    assert found.begin("b", 6, "u").action == "train"
    found.committed(6)
    assert [found.begin(name, 7, "t").action for name in "ba"] == ["wait", "save"]


def test_who_computes_other_numbers_is_out():
    found = pair()
    found.committed(5)
    assert found.begin("b", 6, "false").action == "wait"
    assert found.begin("a", 6, "u") == Order("train", 3, (0, 1), ("a",), (2,), 6), (
        "two differ: the leader's count"
    )
    calls = [found.begin("b", 6, "u"), found.holds("b", 2, 6, 0), found.join("b", 6, "u")]
    assert {order.action for order in calls} == {"differs"}
    found = pair()
    found.join("c", 5, "v")
    found.committed(5)
    orders = [found.begin(name, 6, "false" if name == "a" else "u").action for name in "abc"]
    assert (orders, found.leader, found.begin("a", 6).action) == (["wait", "wait", "train"], "b", "differs")
    found = one()
    found.join("b", 0, "old")
    found.committed(4)
    found.begin("a", 5, "v")
    found.save(5)
    assert found.healed("b", 5, "false").action == "differs", "what it has loaded is not what was saved"


def test_the_slower_one_gets_fewer_parts():
    assert dealt(4, [1.0, 1.0]) == [2, 2]
    assert dealt(4, [1.0, 4.0]) == [3, 1]
    assert dealt(2, [1.0, 9.0]) == [2, 0]
    assert dealt(3, []) == []
    found = pair(parts=4)
    for step in range(5, 5 + PATIENCE):
        assert [found.begin(name, step, "v").parts for name in "aba"][1:] == [(2, 3), (0, 1)]
        found.ready("a", 2, step, 0, seconds=1.0)
        found.ready("b", 2, step, 0, seconds=4.0)
        found.committed(step)
    assert [found.begin(name, step + 1, "v").parts for name in "aba"][1:] == [(3,), (0, 1, 2)]


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
        return mine == theirs and self.does == "exchange"


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
        self.rot = self.chance.choice([0.0, 0.05])
        self.rotten: set[str] = set()

    # ---- what replicas do ---------------------------------------------------------------------------------

    def act(self, one: Replica) -> None:
        getattr(self, f"_{one.does}")(one)

    def _enter(self, one: Replica) -> None:
        """It registers, with the newest checkpoint."""
        newest = max(self.checkpoints)
        if not self.control.members:
            self.control.found(one.name, newest)
            self.committed = {step: found for step, found in self.committed.items() if step <= newest}
            self.applied = {at: found for at, found in self.applied.items() if at < (newest, 0)}
        one.weights, one.step, one.number, one.own = self.checkpoints[newest], newest, 0, {}
        one.does = "join"

    def _join(self, one: Replica) -> None:
        order = self.control.join(one.name, one.step, one.weights)
        if order.action == "heal" and order.step >= 0 and self.chance.random() < 0.5:  # it takes a while
            loaded = self.checkpoints[order.step]
            one.weights, one.step = loaded, order.step
            order = self.control.healed(one.name, order.step, loaded)
        if order.action == "train":
            self._take(one, order)
        elif order.action in ("commit", "save"):
            one.does = "begin"
        elif order.action == "heal" and order.step < 0:
            one.does = "enter"
        else:
            self._obey(one, order)

    def _obey(self, one: Replica, order: Order) -> None:
        """What ends a process, or begins a round anew."""
        if order.action == "again":
            self._take(one, order)
        elif order.action == "differs" or (order.action == "heal" and order.step < 0):
            assert order.action == "heal" or one.name in self.rotten, "it has the right weights"
            del self.replicas[one.name]
            self.undetected.append(one.name)

    def _take(self, one: Replica, order: Order) -> None:
        one.order, one.does = order, "compute"
        one.own = {part: one.own[part] for part in order.parts if part in one.own}
        one.got, one.sent = {}, set()

    def _begin(self, one: Replica) -> None:
        others = self.control.members.keys() - {one.name}
        last = one.step == self.control.step and others == self.control._said.keys() - {one.name}
        if (
            last
            and one.name != self.control.leader
            and not self.control.weights
            and self.chance.random() < self.rot
        ):
            one.weights = mixed(one.weights, "a bit has turned")  # and a leader with the right ones is there
            self.rotten.add(one.name)
        order = self.control.begin(one.name, one.step, one.weights)
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
        else:
            self._obey(one, order)

    def _compute(self, one: Replica) -> None:
        for part in one.order.parts:
            if part not in one.own:
                self.formed += 1
                salt = "" if self.exact else self.formed
                one.own[part] = mixed(one.weights, one.step, one.number, part, salt)
        one.got.update({part: one.own[part] for part in one.order.parts})
        seconds = self.chance.choice([0.0, 1.0, 5.0])
        order = self.control.ready(one.name, one.order.epoch, one.step, one.number, seconds)
        if order.action == "exchange":
            one.does = "exchange"
        self._obey(one, order)

    def _exchange(self, one: Replica) -> None:
        open_ways = [
            (other, part)
            for other in self.replicas.values()
            for part in one.order.parts
            if other is not one and (other.name, part) not in one.sent and other.meets(one)
        ]
        if open_ways and self.chance.random() < 0.9:
            other, part = self.chance.choice(open_ways)
            other.got[part] = one.own[part]
            one.sent.add((other.name, part))
        elif len(one.got) < self.control.parts:
            if self.chance.random() < 0.1:  # nothing has come for too long
                self.control.broken(one.name, one.order.epoch)
                one.does = "compute"
        else:
            order = self.control.holds(one.name, one.order.epoch, one.step, one.number)
            if order.action == "apply":
                self._apply(one)
            self._obey(one, order)

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
    job.rot = 0.0
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
