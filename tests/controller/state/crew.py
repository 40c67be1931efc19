"""Whole jobs of policy replicas whose controller, replicas, messages and store are subject to chance.

A replica acts once at a time, as `policy_worker.replicas.membership` and `policy_worker.session` do: it calls the
controller, which writes its record before it answers. `lose` takes an older record for the present one, as a store
that lost its last writes; registrations and commits come back as old as the rest.

Asserted all the time: gradients are exchanged between equal weights alone, each version of a timeline has one
content, and no number that was handed out gets another meaning. The store of half of the jobs keeps commits,
registrations and checkpoints, as one does that says what is on disk (WAITAOF). Of any other a version may get
another content, but only one that the store has lost and no member knows.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from controller.state.membership import MemberOrder, Membership
from controller.state.standstill import Standstill

STEPS, UPDATES = 6, 2
"""Training steps, and optimizer steps of each."""
TICK_S = 0.1
"""Simulated seconds from one act to the next."""
MOST_TICKS = 20_000
"""In which each job has to end."""


def mixed(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass
class Replica:
    """What a policy replica does, one act at a time. weights: a digest of all that was ever applied to them."""

    name: str
    does: str = "enter"
    weights: str = ""
    before: str = ""
    """Its weights before the step."""
    policy_epoch: int = 0
    known: int = 0
    """Committed steps that it has heard of."""
    step: int = 0
    number: int = 0
    applied: int = 0
    leads: int = 0
    order: MemberOrder = field(default_factory=lambda: MemberOrder("wait"))
    own: dict[int, str] = field(default_factory=dict)
    got: dict[int, str] = field(default_factory=dict)
    sent: set[tuple[str, int]] = field(default_factory=set)
    history: dict[int, str] = field(default_factory=dict)
    """The versions that its weights descend from."""

    @property
    def takes_part(self) -> bool:
        return self.does not in ("enter", "join")

    def meets(self, other: Replica) -> bool:
        """Whether both are at the same optimizer step in the same membership epoch, and this one listens."""
        mine, theirs = ((one.order.epoch, one.step, one.number) for one in (self, other))
        return mine == theirs and self.does == "exchange"


@dataclass(frozen=True)
class Stored:
    """What the store holds: the record of the membership, who is registered, and the policy epoch."""

    record: str
    registered: frozenset[str]
    policy_epoch: int


class Crew:
    """See the module's docstring.

    exact: whether a part's gradient depends on the weights alone, not on who formed it, and when. size: replicas that
    there are at most. loses: whether the store does.
    """

    def __init__(self, seed: int, parts: int, exact: bool, *, size: int = 3, loses: bool = False) -> None:
        self.chance, self.exact, self.size, self.loses = random.Random(seed), exact, size, loses
        self.control = Membership(parts)
        self.standstill = Standstill()
        self.registered: set[str] = set()
        self.policy_epoch = 0
        self.past: deque[Stored] = deque(maxlen=50)
        self.replicas: dict[str, Replica] = {}
        self.keeps = self.chance.random() < 0.5
        """Whether what is committed, registered or saved is on disk before it is answered."""
        self.lost: set[tuple[int, int]] = set()
        """Policy epochs and versions whose commit the store has lost."""
        self.undetected: set[str] = set()
        self.checkpoints = {0: {0: "start"}}
        """By step: the versions that its weights descend from."""
        self.timelines: dict[int, dict[int, str]] = {0: {0: "start"}}
        """By policy epoch: the weights of each version that was committed."""
        self.meanings: dict[tuple[object, ...], object] = {}
        self.born = self.formed = self.tick = 0
        self.losses = self.standstills = self.left = 0
        self.rot = self.chance.choice([0.0, 0.05])
        self.rotten: set[str] = set()
        self.faults = 0.0
        self.calm_at = self.chance.choice([30, 100, 300, 2_000])
        """The tick from which on nothing fails any more."""
        self.kills = self.chance.random() < 0.5
        self.write()

    # ---- controller and store -----------------------------------------------------------------------------

    @property
    def calm(self) -> bool:
        return self.tick > self.calm_at

    @property
    def committed(self) -> dict[int, str]:
        """The weights of each version of the present timeline."""
        return self.timelines[self.policy_epoch]

    def means(self, *number: object, content: object) -> None:
        """A number was handed out: it has this content for ever."""
        assert self.meanings.setdefault(number, content) == content, f"{number} has two meanings"

    def write(self, *, kept: bool = False) -> None:
        """kept: it is on disk before the answer, where the store can say so."""
        record = json.dumps(self.control.to_record())
        stored = Stored(record, frozenset(self.registered), self.policy_epoch)
        if kept and self.keeps:
            self.past.clear()
        if not self.past or self.past[-1] != stored:
            self.past.append(stored)

    def restart(self) -> None:
        """Another controller goes on with what the store holds."""
        stored = self.past[-1]
        self.registered, self.policy_epoch = set(stored.registered), stored.policy_epoch
        self.control = Membership.from_record(self.control.parts, json.loads(stored.record), self.clock())
        self.standstill = Standstill()
        self.undetected |= self.registered - self.replicas.keys()

    def lose(self) -> None:
        """The store comes back without its last writes."""
        self.losses += 1
        for _ in range(self.chance.choice([1, 1, 1, 2, 3, 10])):
            if len(self.past) > 1:
                self.past.pop()
        self.restart()
        known = self.policy_epoch, self.control.step
        versions = {(epoch, step) for epoch, timeline in self.timelines.items() for step in timeline}
        self.lost |= {version for version in versions if version > known}

    def clock(self) -> int:
        """Above all membership epochs that there can have been, as the date is."""
        self.tick += 1
        return 1_000_000 + self.tick

    def ask(self, one: Replica, call: Callable[[], MemberOrder], *, begins: bool = False) -> MemberOrder:
        """A call of a replica that is registered, and its answer, which may get lost."""
        control = self.control
        if one.policy_epoch != self.policy_epoch:
            order = MemberOrder("heal")
        else:
            if one.takes_part and control.forgot(one.step, begins=begins):
                self.declare(one)
                if control.forgot(one.step, begins=begins):
                    return MemberOrder("wait")
            control.lead(one.name, one.leads)
            order = call()
        self.standstill.heard(one.name, self.tick * TICK_S, waits=order.action == "wait")
        self.write()
        if order.action in ("train", "again"):
            self.means("membership epoch", order.epoch, content=(order.members, order.counts))
        if not self.calm and self.chance.random() < self.faults:
            return MemberOrder("wait")
        one.leads = (one.leads or control.epoch) if control.leader == one.name else 0
        one.known = max(one.known, control.step)
        return order

    def declare(self, one: Replica) -> None:
        """A replica knows more than the store: it brings it up to its own state, steps and all."""
        anew = one.policy_epoch > self.policy_epoch
        if not anew and (one.policy_epoch < self.policy_epoch or one.step < self.control.step):
            del self.replicas[one.name]  # refused: another history goes on
            self.undetected.add(one.name)
            return
        self.policy_epoch = one.policy_epoch
        self.registered.add(one.name)
        committed = one.step if anew else self.control.step
        self.control.recover(one.name, committed, self.clock(), leads=one.leads, anew=anew)
        self._commit({step: weights for step, weights in one.history.items() if step <= committed})
        self.write(kept=True)
        while self.control.step < one.step:
            if not self.calm and self.chance.random() < 0.1:
                return  # it is cut off from the controller before it has replayed the rest
            replayed = self.control.step + 1
            self._commit({replayed: one.history[replayed]})
            self.control.follow(replayed)
            self.write(kept=True)

    def _commit(self, history: dict[int, str]) -> None:
        """Versions are committed, maybe again: each has one content, unless nobody can know the one that it had."""
        for step, weights in history.items():
            before = self.committed.setdefault(step, weights)
            if before != weights:
                forgotten = (self.policy_epoch, step) in self.lost and not self._known(step, before)
                assert forgotten, f"version {step} has two contents"
                self.committed[step] = weights

    def _known(self, step: int, weights: str) -> list[str]:
        """Members with a version of the present timeline."""
        members = [one for one in self.replicas.values() if one.name in self.control.members]
        return [one.name for one in members if one.history.get(step) == weights]

    # ---- what replicas do ---------------------------------------------------------------------------------

    def act(self, one: Replica) -> None:
        if one.does != "enter":
            known = one.name in self.registered
            if not one.takes_part and not known:
                self._register_anew(one)
                return
            beats = self.chance.random() < 0.1 and one.known > self.control.step
            if one.takes_part and (not known or beats):
                self.declare(one)
                return
        getattr(self, f"_{one.does}")(one)

    def _register_anew(self, one: Replica) -> None:
        """Under another incarnation, which takes the place of this one."""
        del self.replicas[one.name]
        self.undetected.add(one.name)
        self.bear()

    def _enter(self, one: Replica) -> None:
        """It registers, with the newest checkpoint."""
        newest = max(self.checkpoints)
        self.registered.add(one.name)
        if not self.control.members:
            self.control.found(one.name, newest)
            self.policy_epoch = max(self.policy_epoch + 1, self.clock())
            self.means("policy epoch", self.policy_epoch, content=one.name)
            self.timelines[self.policy_epoch] = dict(self.checkpoints[newest])
        self._restore(one, newest)
        one.policy_epoch, one.known, one.does = self.policy_epoch, 0, "join"
        self.write(kept=True)

    def _restore(self, one: Replica, step: int) -> None:
        one.history = dict(self.checkpoints[step])
        one.weights, one.step, one.number, one.own = one.history[step], step, 0, {}

    def _join(self, one: Replica) -> None:
        order = self.ask(one, lambda: self.control.join(one.name, one.step, one.weights))
        if order.action == "heal" and order.step >= 0:
            one.does = "load"
        elif order.action == "train":
            self._take(one, order)
        elif order.action in ("commit", "save"):
            one.does = "begin"
        elif order.action == "heal":
            self._register_anew(one)
        else:
            self._obey(one, order)
        one.order = order if order.action == "heal" else one.order

    def _load(self, one: Replica) -> None:
        if self.chance.random() < 0.5:  # it takes a while
            return
        self._restore(one, one.order.step)
        one.does = "join"
        order = self.ask(one, lambda: self.control.healed(one.name, one.step, one.weights))
        if order.action == "train":
            self._take(one, order)
        elif order.action == "differs":
            self._obey(one, order)

    def _obey(self, one: Replica, order: MemberOrder) -> None:
        """What ends a process, or begins a round anew."""
        if order.action == "again":
            self._take(one, order)
        elif order.action == "differs" or (order.action == "heal" and order.step < 0):
            assert order.action == "heal" or one.name in self.rotten, "it has the right weights"
            self.left += 1
            del self.replicas[one.name]
            self.undetected.add(one.name)

    def _take(self, one: Replica, order: MemberOrder) -> None:
        one.order, one.does = order, "compute"
        one.own = {part: one.own[part] for part in order.parts if part in one.own}
        one.got, one.sent = {}, set()
        one.before = one.before if one.number else one.weights

    def _begin(self, one: Replica) -> None:
        others = self.control.members.keys() - {one.name}
        last = one.step == self.control.step and others == self.control._said.keys() - {one.name}
        if last and one.name != self.control.leader and not self.control.weights and self.chance.random() < self.rot:
            one.weights = mixed(one.weights, "a bit has turned")  # and a leader with the right ones is there
            self.rotten.add(one.name)
        order = self.ask(one, lambda: self.control.begin(one.name, one.step, one.weights, one.applied), begins=True)
        if order.action == "train":
            one.own = {}
            self._take(one, order)
        elif order.action == "commit":
            assert order.step + 1 == one.step
            self._commit(one.history)
            self.control.committed(order.step)
            self.write(kept=True)
            if self.chance.random() < 0.2:
                self.checkpoints[one.step] = dict(one.history)
        elif order.action == "save":
            self.checkpoints[one.step] = dict(one.history)
            self.control.save(one.step)
            self.write(kept=True)
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
        order = self.ask(
            one,
            lambda: self.control.ready(
                one.name, one.order.epoch, one.step, one.number, seconds, weights=one.before, applied=one.applied
            ),
        )
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
            assert other.weights == one.weights, f"{one.name} and {other.name} exchange with other weights"
            self.means(
                "exchange", one.policy_epoch, one.step, one.number, one.order.epoch, part, content=one.own[part]
            )
            other.got[part] = one.own[part]
            one.sent.add((other.name, part))
        elif len(one.got) < self.control.parts:
            if self.chance.random() < 0.1:  # nothing has come for too long
                self.control.broken(one.name, one.order.epoch)
                self.write()
                one.does = "compute"
        else:
            order = self.ask(
                one,
                lambda: self.control.holds(
                    one.name, one.order.epoch, one.step, one.number, weights=one.before, applied=one.applied
                ),
            )
            if order.action == "apply":
                self._apply(one)
            self._obey(one, order)

    def _apply(self, one: Replica) -> None:
        one.weights = mixed(one.weights, [one.got[part] for part in range(self.control.parts)])
        one.own, one.got, one.sent, one.number = {}, {}, set(), one.number + 1
        one.does, one.applied = "compute", one.order.epoch
        if one.number == UPDATES:
            one.step, one.number, one.does = one.step + 1, 0, "begin"
            one.history[one.step] = one.weights

    # ---- what goes wrong ----------------------------------------------------------------------------------

    def fault(self) -> None:
        kinds = ["kill", "kill", "part", "born", "restart", "late"] if self.kills else ["born", "restart"]
        kind = self.chance.choice([*kinds, *["lose"] * len(kinds)] if self.loses else kinds)
        if kind == "kill" and self.replicas:
            name = self.chance.choice(list(self.replicas))
            del self.replicas[name]
            self.undetected.add(name)
        elif kind == "part" and self.control.members:  # it lives, and was not heard of for too long
            self.control.gone(self.chance.choice(list(self.control.members)))
            self.write()
        elif kind == "restart":
            self.restart()
        elif kind == "lose":
            self.lose()
        elif kind == "late":
            self.control.give_up()
            self.write()
        elif kind == "born" and len(self.replicas) < self.size:
            self.bear()

    def bear(self) -> None:
        """A replica comes."""
        self.born += 1
        self.replicas[f"r{self.born}"] = Replica(f"r{self.born}")

    def detect(self) -> None:
        for name in self.undetected:
            self.control.gone(name)
            self.registered.discard(name)
        self.undetected.clear()
        self.write()

    def look(self) -> None:
        """The controller's look at the clock."""
        self.standstill.at(self.control.step)
        if self.standstill.is_over(self.control.expected, self.tick * TICK_S):
            self.standstills += 1
            self.control.begin_anew()
            self.write()

    def run(self, faults: float) -> None:
        self.faults = faults if self.loses else 0.0
        while self.tick < MOST_TICKS:
            self.tick += 1
            if max(self.committed) >= STEPS and self.control.step >= STEPS:
                return
            if not self.calm and self.chance.random() < faults:
                self.fault()
            if self.chance.random() < 0.1:
                self.detect()
            if not self.replicas or (
                not self.calm and self.chance.random() < 0.02 and len(self.replicas) < self.size
            ):
                self.bear()
            self.act(self.chance.choice(list(self.replicas.values())))
            self.look()
        raise AssertionError("it does not come to an end")


def alone(parts: int) -> dict[int, str]:
    """The weights of each version of a job of one replica that nothing happens to."""
    crew = Crew(0, parts, exact=True)
    crew.rot = 0.0
    crew.bear()
    while max(crew.committed) < STEPS:
        crew.tick += 1
        crew.act(next(iter(crew.replicas.values())))
    return crew.committed
