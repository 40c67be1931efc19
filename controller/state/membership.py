"""Who trains: policy replicas by epochs, and the parts of the batch that each of them computes. Pure.

    joins ─▶ waits ─ a step is committed ─▶ heals ─▶ member ─▶ gone
      └─── nobody is there, or it has their weights ──▲

The batch of an optimizer step is cut into as many parts as replicas were asked for, however many there are. Each
part's gradient is formed by one member; all members add those of all parts in the same order, so that their weights
are the same, bit by bit, and do not depend on who computed what.

An *epoch* is a set of members with their parts. It ends whenever one goes, comes, or gets other parts, and what
belongs to an earlier one changes nothing any more. A step is a number of *rounds*, most of which are an optimizer
step each. In a round all members compute their parts, then, when all are ready, exchange what they found, and use it
when every member holds the results of all parts: that is decided here, once, and before it nobody uses them. Who goes
before that is not waited for: the others form its parts anew, from the weights that they all have. Who goes after it
is not needed.

The leader, who is there for longest, commits, publishes and saves. A step that it did not come to commit is committed
by the next one. Before each step all members say what their weights are (a checksum); those who differ from most of
them, or from the leader where as many have either, are out. Between two steps, while somebody waits, the leader saves
a checkpoint, and those who wait load it; who comes with the same weights need not.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

REMEMBERED = 0.8
"""Share of what was known of a member's speed that is kept when it reports again."""
WORTH, PATIENCE = 0.2, 8
"""Share of a step's time that has to be saved for parts to change hands, and steps that an epoch lasts before it is
looked whether it would be."""
UNKNOWN = 1.0
"""Seconds for a part of a member whose speed nobody knows, where all are unknown; else the mean of the others."""

Action = Literal["train", "wait", "commit", "save", "heal", "exchange", "apply", "again", "differs", "batch"]


@dataclass(slots=True)
class Member:
    """parts: numbers of those that it computes. seconds: that one takes; 0: not known."""

    parts: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a replica is to do now.

    train: the step, as these parts of this epoch. commit, save: as the leader, the step before, or its checkpoint.
    exchange: what it computed. apply: what it holds of all. again: the round, as these parts of this epoch. heal:
    load a checkpoint of `step` committed steps, or register anew where it is -1. differs: end, its weights are not
    those of the others. batch: ask for the batch, it is another one by now. wait: ask again.

    counts: parts of each of the members, in order.
    """

    action: Action
    epoch: int = 0
    parts: tuple[int, ...] = ()
    members: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    step: int = -1


class Membership:
    """See the module's docstring. parts: of a batch. Replicas are named by the ids of their incarnations."""

    def __init__(self, parts: int, step: int = 0) -> None:
        self.parts, self.epoch = parts, 0
        self.step, self.number = step, 0
        """The training step that is next to be committed, and its round that is next to be applied."""
        self.members: dict[str, Member] = {}
        """In the order in which they came: the first one leads."""
        self.waiting: dict[str, bool] = {}
        """Who has joined, and whether it was asked to load the checkpoint of this step."""
        self.saved = False
        """Whether that checkpoint is there."""
        self._began = step
        """The first step of this epoch."""
        self.weights = ""
        """Of all members before the step; "": they have not said so."""
        self.kind: dict[str, str] = {}
        """What all members have in common, as the first one said."""
        self.odd: set[str] = set()
        """Who had other weights."""
        self._said: dict[str, str] = {}
        self._ready: set[str] = set()
        self._holding: set[str] = set()

    @property
    def leader(self) -> str:
        """ "" while nobody is there."""
        return next(iter(self.members), "")

    # ---- who is there -------------------------------------------------------------------------------------

    def found(self, name: str, step: int) -> None:
        """A replica registers while nobody is there: it begins as it is, with the weights of `step` steps."""
        assert not self.members
        self.waiting.pop(name, None)
        self.give_up()
        self.members[name], self.kind = Member(), {}
        self._at(step)
        self.renew()

    def join(self, name: str, step: int, weights: str) -> Order:
        """A replica that has registered has the weights of `step` committed steps, and wants to take part."""
        if name in self.odd:
            return Order("differs", self.epoch)
        if name in self.members:
            return self.begin(name, step, weights)
        if not self.members:  # it registers, and others may have come before it
            self.waiting.pop(name, None)
            return Order("heal", self.epoch)
        if (step, self.number) == (self.step, 0) and weights == self.weights != "":
            return self._admit(name)
        asked = self.waiting.setdefault(name, False) and self.saved
        return Order("heal", self.epoch, step=self.step) if asked else Order("wait", self.epoch)

    def healed(self, name: str, step: int, weights: str) -> Order:
        """It has loaded the weights of `step` committed steps: a member, if the others still wait there."""
        if name in self.members or not self.waiting.get(name) or not self.saved or step != self.step:
            return self.join(name, step, weights)
        if self.weights and weights != self.weights:
            self._expel(name)
            return Order("differs", self.epoch)
        return self._admit(name)

    def recover(self, name: str, step: int, epoch: int) -> None:
        """A replica knows of steps that were forgotten here: it is a member, and so are those who know as many.

        epoch: above all that there can have been.
        """
        if name in self.members and step in (self.step, self.step + 1):
            return
        if step != self.step:
            self.members.clear()
            self._at(step)
        self.members.setdefault(name, Member())
        self.waiting.pop(name, None)
        self.epoch = max(self.epoch, epoch)
        self.renew()

    def gone(self, name: str) -> bool:
        """A replica has died, or leaves. Returns whether it was a member."""
        self.waiting.pop(name, None)
        self.odd.discard(name)
        if self.members.pop(name, None) is None:
            return False
        self.renew()
        return True

    def _admit(self, name: str) -> Order:
        self.waiting.pop(name, None)
        self.members[name] = Member()
        self._said[name] = self.weights
        self.renew()
        return self._plan(name)

    def _expel(self, name: str) -> None:
        self.gone(name)
        self.odd.add(name)

    # ---- steps --------------------------------------------------------------------------------------------

    def begin(self, name: str, step: int, weights: str = "") -> Order:
        """A member has trained all steps before `step`. weights: its own."""
        if name in self.odd:
            return Order("differs", self.epoch)
        if name not in self.members or step < self.step or step > self.step + 1:
            return Order("heal", self.epoch)
        if step > self.step:
            return Order("commit" if name == self.leader else "wait", self.epoch, step=self.step)
        if weights:
            self._said[name] = weights
        if not self.weights:
            if any(other not in self._said for other in self.members):
                return Order("wait", self.epoch)
            self._compare()
            if name in self.odd:
                return Order("differs", self.epoch)
        if any(self.waiting.values()):
            saves = name == self.leader and not self.saved
            return Order("save" if saves else "wait", self.epoch, step=step)
        return self._plan(name)

    def ready(self, name: str, epoch: int, step: int, number: int, seconds: float = 0.0) -> Order:
        """A member has computed its parts of a round. seconds: that each of them took."""
        order = self._round(name, epoch, step, number)
        if order is not None:  # nobody applies what it does not hold
            return Order("heal", self.epoch) if order.action == "apply" else order
        if name not in self._ready:
            self._ready.add(name)
            self._note(name, seconds)
        return Order("exchange" if len(self._ready) == len(self.members) else "wait", self.epoch)

    def holds(self, name: str, epoch: int, step: int, number: int) -> Order:
        """A member holds the results of all parts of a round, as they were exchanged in an epoch."""
        order = self._round(name, epoch, step, number)
        if order is not None:
            return order
        self._holding.add(name)
        if len(self._holding) < len(self.members):
            return Order("wait", self.epoch)
        self._next(self.number + 1)
        return Order("apply", self.epoch)

    def broken(self, name: str, epoch: int) -> None:
        """A member could not exchange: all begin the round anew, as they are."""
        if name in self.members and epoch == self.epoch:
            self._begin_epoch()

    def committed(self, step: int) -> None:
        """A step is committed: those who wait come in before the next one."""
        if step == self.step and self.members:
            self._at(step + 1)
            self.waiting = dict.fromkeys(self.waiting, True)
            if self.step - self._began >= PATIENCE:
                self._level()

    def save(self, step: int) -> None:
        """There is a checkpoint of so many committed steps."""
        self.saved = self.saved or step == self.step

    def give_up(self) -> list[str]:
        """Those who load take too long: they wait for another step. Returns who they are."""
        late = [name for name, asked in self.waiting.items() if asked]
        self.waiting = dict.fromkeys(self.waiting, False)
        return late

    def _at(self, step: int) -> None:
        self.step, self.saved, self.weights = step, False, ""
        self._said.clear()
        self._next(0)

    def _next(self, number: int) -> None:
        self.number = number
        self._ready.clear()
        self._holding.clear()

    def _round(self, name: str, epoch: int, step: int, number: int) -> Order | None:
        """What one is to do that is not at the present round; None: it is."""
        if name not in self.members:
            return Order("differs" if name in self.odd else "heal", self.epoch)
        at, now = (step, number), (self.step, self.number)
        if at < now:
            return Order("apply", self.epoch)
        if at > now:
            if step != self.step:
                return Order("heal", self.epoch)
            self._next(number)  # it has applied those before, so that was decided, and forgotten
        return None if epoch == self.epoch else Order("again", *self._share(name))

    def _compare(self) -> None:
        """All members have said what their weights are."""
        found = [self._said[name] for name in self.members]
        self.weights = max(found, key=lambda one: (found.count(one), one == found[0]))
        for name in [name for name in self.members if self._said[name] != self.weights]:
            self._expel(name)

    # ---- parts --------------------------------------------------------------------------------------------

    def _plan(self, name: str) -> Order:
        return Order("train", *self._share(name), step=self.step)

    def _share(self, name: str) -> tuple[int, tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
        shares = self.shares()
        return self.epoch, tuple(self.members[name].parts), tuple(shares), tuple(shares.values())

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self._began = self.step
        self._ready.clear()
        self._holding.clear()

    def renew(self) -> None:
        """Another epoch: deal all parts anew."""
        self._begin_epoch()
        counts = dealt(self.parts, self._speeds())
        first = 0
        for member, count in zip(self.members.values(), counts, strict=True):
            member.parts = list(range(first, first + count))
            first += count

    def _level(self) -> None:
        """Deal anew where some are slow, and it is worth an epoch."""
        speeds = self._speeds()
        as_it_is = _longest([len(member.parts) for member in self.members.values()], speeds)
        if _longest(dealt(self.parts, speeds), speeds) < (1.0 - WORTH) * as_it_is:
            self.renew()

    def _note(self, name: str, seconds: float) -> None:
        member = self.members[name]
        if seconds > 0.0:
            known = member.seconds or seconds
            member.seconds = REMEMBERED * known + (1.0 - REMEMBERED) * seconds

    def _speeds(self) -> list[float]:
        known = [member.seconds for member in self.members.values() if member.seconds]
        usual = sum(known) / len(known) if known else UNKNOWN
        return [member.seconds or usual for member in self.members.values()]

    def shares(self) -> dict[str, int]:
        """How many parts each member has; the first one leads."""
        return {name: len(member.parts) for name, member in self.members.items()}

    # ---- stored -------------------------------------------------------------------------------------------

    def to_record(self) -> dict[str, Any]:
        """Without who has said, computed and holds what: they say it again."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "number": self.number,
            "members": {name: asdict(member) for name, member in self.members.items()},
            "waiting": dict(self.waiting),
            "saved": self.saved,
            "weights": self.weights,
            "kind": self.kind,
        }

    @classmethod
    def from_record(cls, parts: int, record: Mapping[str, Any]) -> Membership:
        """As it was; with another number of parts they are dealt anew."""
        found = cls(parts, record["step"])
        found.epoch, found.number, found.saved = record["epoch"], record["number"], record["saved"]
        found.weights, found.kind = record["weights"], record["kind"]
        found.members = {name: Member(**member) for name, member in record["members"].items()}
        found.waiting = dict(record["waiting"])
        if found.members and sum(len(member.parts) for member in found.members.values()) != parts:
            found.renew()
        return found


def dealt(parts: int, seconds: list[float]) -> list[int]:
    """How many parts each member computes, so that the last one is done as early as possible.

    seconds: that a part takes each. Of two that would be done alike the one with fewer has it, or the earlier one.
    """
    done = [(each, 0, index) for index, each in enumerate(seconds)]  # when, if it takes one more than it has
    heapq.heapify(done)
    for _ in range(parts if seconds else 0):
        at, count, index = done[0]
        heapq.heapreplace(done, (at + seconds[index], count + 1, index))
    return [count for _, count, _ in sorted(done, key=lambda entry: entry[2])]


def _longest(counts: list[int], seconds: list[float]) -> float:
    return max((count * each for count, each in zip(counts, seconds, strict=True)), default=0.0)
