"""Which policy replicas train together, in membership epochs, and which parts of the batch each computes. Pure.

    joins ─▶ waits ─ a step is committed ─▶ heals ─▶ member ─▶ gone
      └─── nobody trains, or it has their weights ─────▲

The batch of an optimizer step is cut into as many parts as replicas were requested, however many are present. One
member computes the gradient of each part; all members add the gradients of all parts in the same order, so that their
weights are equal, bit by bit, and do not depend on which member computed what.

A *membership epoch* is a set of members with their parts. It ends whenever a member leaves, joins, or gets other
parts; messages of an earlier one change nothing. A step is a number of *rounds*, most of which are an optimizer step
each. In a round all members compute their parts (`ready`), exchange the results when all are ready (`holds`), and use
them once every member holds the results of all parts: that is decided here, once, and no member uses them before. A
member that leaves before the decision is not waited for: the others recompute its parts, from the weights that they
share. One that leaves after it is not needed.

The leader, the member that has been present for longest, commits, publishes and saves. A step that it did not commit
is committed by the next leader. Before each step all members send the checksum of their weights; those that differ
from most of them, or from the leader where as many have either, are excluded. While replicas wait to join, the leader
saves a checkpoint between two steps, and they load it; a replica that comes with the same weights need not.

**Lost history.** The record of all this may come back older than the answers that were given. What a member sends
then proves the decisions that it can only follow from:

| message                  | proves                                                                                 |
|--------------------------|----------------------------------------------------------------------------------------|
| any, its `epoch` above   | that membership epoch was given out, its members and parts are forgotten: the next one |
| the present one          | gets a higher number                                                                   |
| any, its `leads` above   | all members in front of the sender have left (`lead`)                                  |
| the known one            |                                                                                        |
| `begin(t + 1)`           | all rounds of step t were decided: the others have to apply what they hold of them      |
| `begin(t + 2)`,          | step t was committed, which only the sender can repeat: it declares itself and replays |
| `ready(t + 1, …)`, …     | it (`forgot`, `recover`), as it does where its registration is unknown                 |
| `ready(t, n)`,           | the weights before step t were compared, and `weights` is right; rounds before n were  |
| `holds(t, n)`            | decided, the last one with the exchange of membership epoch `applied`                  |
| `holds` in the present   | all members were ready: those that are still at `ready` have to exchange               |
| membership epoch         |                                                                                        |
| `holds` in another one   | that exchange was complete: it counts if all members hold it, and is repeated as soon  |
|                          | as one of them is known not to                                                         |
| `join`, `healed`; `begin`| no decision; a replica with the members' weights before the step is admitted           |
| of one that was forgotten|                                                                                        |
| `commit`, `saved`,       | themselves; they may come again                                                        |
| `publish`, `checkpoint`  |                                                                                        |
| `broken`                 | nothing beyond its `epoch`                                                             |
| `declare`                | registration, policy epoch and as many commits as it names; a later policy epoch ends  |
|                          | all other members                                                                      |
| `register`               | the incarnation before it has ended                                                    |

Why it is safe: results of one membership epoch's exchange are the same for all that hold them. `applied`, the epoch
of the exchange that a member used last, therefore identifies its weights within a step by induction, as the checksum
does between two; a member whose `applied` differs from the known one has used other results, in a history that is
lost, and has to begin anew. A position only moves forward, so no round is used twice, and no member is ordered to use
results of an exchange that did not count.

For stalls that this does not resolve there is a limit (`controller.state.standstill`), after which `begin_anew` keeps
the members that are farthest.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

REMEMBERED = 0.8
"""Share of the known speed of a member that is kept when it reports again."""
WORTH, PATIENCE = 0.2, 8
"""Share of a step's time that must be saved for parts to change hands, and steps that a membership epoch lasts before
that is checked."""
UNKNOWN = 1.0
"""Seconds for a part where the speed of all members is unknown; else the mean of the others is taken."""

Action = Literal["train", "wait", "commit", "save", "heal", "exchange", "apply", "again", "differs", "batch"]


@dataclass(slots=True)
class Member:
    """parts: numbers of those that it computes. seconds: time of one part; 0: not known."""

    parts: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MemberOrder:
    """The next action of a replica.

    train: the step, with these parts of this membership epoch. commit, save: as the leader, the step before, or its
    checkpoint. exchange: what it computed. apply: the results of all parts. again: the round, with these parts of
    this membership epoch. heal: load a checkpoint of `step` committed steps, or register anew where it is -1.
    differs: end, its weights are not those of the others. batch: request the batch again, it has changed. wait: ask
    again.

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

    def __init__(self, parts: int, step: int = 0, first_membership_epoch: int = 0) -> None:
        """first_epoch: lower bound of the membership epochs that begin from now on."""
        self.parts, self.epoch = parts, 0
        self.step, self.number = step, 0
        """The training step that is next to be committed, and its round that is next to be applied."""
        self.trained = False
        """Whether all rounds of the step are decided."""
        self.applied = 0
        """Membership epoch whose exchange counted in the round before; 0: not known."""
        self.led = 0
        """The latest membership epoch in which a member began to lead, as far as members reported it."""
        self.members: dict[str, Member] = {}
        """In the order in which they joined: the first one leads."""
        self.waiting: dict[str, bool] = {}
        """Replicas that have joined, and whether each was asked to load the checkpoint of this step."""
        self.saved = False
        """Whether that checkpoint exists."""
        self._began = step
        """The first step of this membership epoch."""
        self._first_membership_epoch = first_membership_epoch
        self.weights = ""
        """Checksum of all members' weights before the step; "": not compared yet."""
        self.kind: dict[str, str] = {}
        """The fingerprint that all members share, as the first one reported."""
        self.odd: set[str] = set()
        """Replicas that had other weights."""
        self._said: dict[str, str] = {}
        self._ready: set[str] = set()
        """Members that have computed their parts of this epoch."""
        self._holding: dict[str, int] = {}
        """By member: the membership epoch of the exchange of this round that it holds."""
        self._without: set[str] = set()
        """Members that are known to hold no results of this round."""
        self._places: dict[str, tuple[int, int]] = {}
        """By member: step and round at which it reported itself last."""

    @property
    def leader(self) -> str:
        """ "" without members."""
        return next(iter(self.members), "")

    @property
    def expected(self) -> list[str]:
        """Replicas that the others wait for: members, and those that were asked to load a checkpoint."""
        return [*self.members, *(name for name, asked in self.waiting.items() if asked)]

    # ---- members ------------------------------------------------------------------------------------------

    def found(self, name: str, step: int) -> None:
        """A replica registers while nobody trains: it begins as it is, with the weights of `step` steps."""
        assert not self.members
        self.waiting.pop(name, None)
        self.give_up()
        self.members[name], self.kind = Member(), {}
        self._at(step)
        self.renew()

    def join(self, name: str, step: int, weights: str) -> MemberOrder:
        """A replica that has registered has the weights of `step` committed steps, and wants to take part."""
        if name in self.odd:
            return MemberOrder("differs", self.epoch)
        if name in self.members:
            return self.begin(name, step, weights)
        if not self.members:  # it registers, and others may have come before it
            self.waiting.pop(name, None)
            return MemberOrder("heal", self.epoch)
        if self.begins(step) and weights == self.weights != "":
            return self._admit(name)
        asked = self.waiting.setdefault(name, False) and self.saved
        return MemberOrder("heal", self.epoch, step=self.step) if asked else MemberOrder("wait", self.epoch)

    def healed(self, name: str, step: int, weights: str) -> MemberOrder:
        """It has loaded the weights of `step` committed steps: a member, if the others still wait there."""
        if name in self.members or not self.waiting.get(name) or not self.saved or not self.begins(step):
            return self.join(name, step, weights)
        if self.weights and weights != self.weights:
            self._expel(name)
            return MemberOrder("differs", self.epoch)
        return self._admit(name)

    def recover(self, name: str, committed: int, epoch: int, *, leads: int = 0, anew: bool = False) -> None:
        """A replica declares itself: it is a member. Steps that the store lost are counted as it replays them
        (`follow`), not before: it may end in the middle.

        Other members stay: those that do not know as many steps find out when they ask.

        committed: steps that are committed now. epoch: lower bound of the membership epochs from now on. leads: see
        `lead`. anew: its policy epoch began after all that is known here, so that nobody else is a member.
        """
        self._first_membership_epoch = max(self._first_membership_epoch, epoch)
        known = name in self.members
        if anew:
            self.members = {name: self.members.get(name, Member())}
            self.kind = {}
        if anew or committed < self.step or not self.members:
            self._at(committed)
        self.follow(committed)
        self.members.setdefault(name, Member())
        self.waiting.pop(name, None)
        if anew or not known:
            self.renew()
        self.lead(name, leads)

    def lead(self, name: str, since: int) -> None:
        """A member leads since membership epoch `since`: members in front of it had left then."""
        if name not in self.members or since <= self.led:
            return
        self.led = since
        if name != self.leader:
            self.members = {name: self.members.pop(name), **self.members}
            self.renew()

    def gone(self, name: str) -> bool:
        """A replica has ended, or leaves. Returns whether it was a member."""
        self.waiting.pop(name, None)
        self.odd.discard(name)
        if self.members.pop(name, None) is None:
            return False
        self._places.pop(name, None)
        self._holding.pop(name, None)
        self._said.pop(name, None)
        self._without.discard(name)
        self.renew()
        return True

    def begin_anew(self) -> list[str]:
        """All members wait for each other: a new membership epoch of those that are farthest. Returns the others,
        which have to begin anew; those that load a checkpoint join at a later step."""
        self.give_up()
        places = {name: self._places.get(name, (self.step, 0)) for name in self.members}
        top = max(places.values(), default=(self.step, self.number))
        if top[0] == self.step and top[1] > self.number:
            self._next(top[1])
        elif top[0] == self.step + 1:
            self.trained = True
        behind = [name for name, place in places.items() if place < top]
        for name in behind:
            del self.members[name]
        if not self.weights and self._said.keys() & self.members.keys():
            self._compare()
        self.renew()
        return behind

    def _admit(self, name: str) -> MemberOrder:
        self.waiting.pop(name, None)
        self.members[name] = Member()
        self._said[name] = self.weights
        self._without.add(name)
        self.renew()
        return self._plan(name)

    def _expel(self, name: str) -> None:
        self.gone(name)
        self.odd.add(name)

    def begins(self, step: int) -> bool:
        """Whether this step is the present one, and no round of it is decided."""
        return (step, 0) == (self.step, self.number) and not self.trained

    # ---- steps --------------------------------------------------------------------------------------------

    def forgot(self, step: int, *, begins: bool) -> bool:
        """Whether a replica that is at this step knows of commits that are forgotten here, so that it has to declare
        itself. begins: it calls `begin`, which comes before its step before is committed, too."""
        return step > self.step + begins

    def begin(self, name: str, step: int, weights: str = "", applied: int = 0) -> MemberOrder:
        """A member has trained all steps before `step`. weights: its checksum. applied: see `Membership.applied`."""
        if name in self.odd:
            return MemberOrder("differs", self.epoch)
        if name not in self.members:
            if self.begins(step) and weights == self.weights != "":  # it was one, and that is forgotten
                return self._admit(name)
            return MemberOrder("heal", self.epoch)
        if step > self.step + 1:
            return MemberOrder("heal", self.epoch)
        self._places[name] = step, 0
        if step > self.step:
            self.trained, self.applied = True, applied or self.applied
            return MemberOrder("commit" if name == self.leader else "wait", self.epoch, step=self.step)
        if not self.begins(step):
            return MemberOrder("heal", self.epoch)
        self._without.add(name)
        if not self._agrees(name, weights):
            return MemberOrder("differs", self.epoch)
        if not self.weights:
            if any(other not in self._said for other in self.members):
                return MemberOrder("wait", self.epoch)
            self._compare()
            if name in self.odd:
                return MemberOrder("differs", self.epoch)
        if any(self.waiting.values()):
            saves = name == self.leader and not self.saved
            return MemberOrder("save" if saves else "wait", self.epoch, step=step)
        return self._plan(name)

    def ready(
        self,
        name: str,
        epoch: int,
        step: int,
        number: int,
        seconds: float = 0.0,
        *,
        weights: str = "",
        applied: int = 0,
    ) -> MemberOrder:
        """A member has computed its parts of a round. seconds: that each of them took. weights: before the step."""
        order = self._round(name, epoch, step, number, weights, applied)
        if order is not None:  # nobody applies what it does not hold
            return MemberOrder("heal", self.epoch) if order.action == "apply" else order
        self._holding.pop(name, None)
        self._without.add(name)
        if epoch != self.epoch:
            return self._again(name, epoch)
        if name not in self._ready:
            self._ready.add(name)
            self._note(name, seconds)
        return MemberOrder("exchange" if self._ready >= self.members.keys() else "wait", self.epoch)

    def holds(
        self, name: str, epoch: int, step: int, number: int, *, weights: str = "", applied: int = 0
    ) -> MemberOrder:
        """A member holds the results of all parts of a round, as they were exchanged in a membership epoch."""
        order = self._round(name, epoch, step, number, weights, applied)
        if order is not None:
            return order
        self._without.discard(name)
        self._holding[name] = epoch
        if all(self._holding.get(other) == epoch for other in self.members):
            self._next(self.number + 1, epoch)
            return MemberOrder("apply", self.epoch)
        if epoch == self.epoch:
            self._ready.update(self.members)
            return MemberOrder("wait", self.epoch)
        if self._without or any(held != epoch for held in self._holding.values()):
            return self._again(name, epoch)
        return MemberOrder("wait", self.epoch)  # others may hold the same, or have used it

    def broken(self, name: str, epoch: int) -> None:
        """A member could not exchange: all begin the round anew, as they are."""
        if name in self.members and epoch == self.epoch:
            self._begin_membership_epoch()

    def committed(self, step: int) -> None:
        """A step is committed: replicas that wait may join before the next one."""
        if step == self.step and self.members:
            self._at(step + 1, self.applied)
            self.waiting = dict.fromkeys(self.waiting, True)
            if self.step - self._began >= PATIENCE:
                self._level()

    def follow(self, committed: int) -> None:
        """So many steps are committed: some of them may have been replayed."""
        while self.members and self.step < committed:
            self.committed(self.step)

    def save(self, step: int) -> None:
        """There is a checkpoint of so many committed steps."""
        self.saved = self.saved or step == self.step

    def give_up(self) -> list[str]:
        """Replicas that load take too long: they wait for another step. Returns their names."""
        late = [name for name, asked in self.waiting.items() if asked]
        self.waiting = dict.fromkeys(self.waiting, False)
        return late

    def _at(self, step: int, applied: int = 0) -> None:
        self.step, self.saved, self.weights, self.trained = step, False, "", False
        self._said.clear()
        self._next(0, applied)

    def _next(self, number: int, applied: int = 0) -> None:
        self.number, self.applied = number, applied
        self._ready.clear()
        self._holding.clear()
        self._without.clear()

    def _round(self, name: str, epoch: int, step: int, number: int, weights: str, applied: int) -> MemberOrder | None:
        """Return the action of a replica that is not, or cannot be, at the present round; None if it is."""
        if name not in self.members:
            return MemberOrder("differs" if name in self.odd else "heal", self.epoch)
        if step > self.step:
            return MemberOrder("heal", self.epoch)
        self._places[name] = step, number
        if (step, number) < (self.step, self.number) or self.trained:
            # An epoch whose exchange counted in one round ended before any other exchange of that round.
            return MemberOrder("apply" if self.applied in (0, epoch) else "heal", self.epoch)
        if number > self.number:
            self._next(number, applied)
        elif number and applied and self.applied not in (0, applied):
            return MemberOrder("heal", self.epoch)
        if not self._agrees(name, weights):
            return MemberOrder("differs", self.epoch)
        self.weights = self.weights or weights
        return None

    def _again(self, name: str, epoch: int) -> MemberOrder:
        """The round, in the present membership epoch, which is later than `epoch`."""
        if epoch > self.epoch:
            self._first_membership_epoch = max(self._first_membership_epoch, epoch + 1)
            self.renew()
        return MemberOrder("again", *self._share(name))

    def _agrees(self, name: str, weights: str) -> bool:
        """Note the checksum of a member, and whether it is that of the others where theirs is known."""
        if weights:
            self._said[name] = weights
            if self.weights and weights != self.weights:
                self._expel(name)
                return False
        return True

    def _compare(self) -> None:
        """Members have sent the checksums of their weights."""
        checksums = [self._said[name] for name in self.members if name in self._said]
        self.weights = max(checksums, key=lambda checksum: (checksums.count(checksum), checksum == checksums[0]))
        for name in [name for name in self.members if self._said.get(name, self.weights) != self.weights]:
            self._expel(name)

    # ---- parts --------------------------------------------------------------------------------------------

    def _plan(self, name: str) -> MemberOrder:
        return MemberOrder("train", *self._share(name), step=self.step)

    def _share(self, name: str) -> tuple[int, tuple[int, ...], tuple[str, ...], tuple[int, ...]]:
        shares = self.shares()
        return self.epoch, tuple(self.members[name].parts), tuple(shares), tuple(shares.values())

    def _begin_membership_epoch(self) -> None:
        self.epoch = max(self.epoch + 1, self._first_membership_epoch)
        self._began = self.step
        self._ready.clear()

    def renew(self) -> None:
        """Begin a membership epoch: deal all parts anew."""
        self._begin_membership_epoch()
        counts = dealt(self.parts, self._speeds())
        first = 0
        for member, count in zip(self.members.values(), counts, strict=True):
            member.parts = list(range(first, first + count))
            first += count

    def _level(self) -> None:
        """Deal anew where some are slow, and it is worth a membership epoch."""
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
        """All but which member has reported, computed and holds what: they report it again."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "number": self.number,
            "trained": self.trained,
            "applied": self.applied,
            "led": self.led,
            "members": {name: asdict(member) for name, member in self.members.items()},
            "waiting": dict(self.waiting),
            "saved": self.saved,
            "weights": self.weights,
            "kind": self.kind,
        }

    @classmethod
    def from_record(cls, parts: int, record: Mapping[str, Any], first_membership_epoch: int = 0) -> Membership:
        """Restore a record; another number of parts is redistributed. first_membership_epoch: see `__init__`."""
        membership = cls(parts, record["step"], first_membership_epoch)
        membership.epoch, membership.number, membership.saved = record["epoch"], record["number"], record["saved"]
        membership.trained, membership.applied = record.get("trained", False), record.get("applied", 0)
        membership.led, membership.weights, membership.kind = record.get("led", 0), record["weights"], record["kind"]
        membership.members = {name: Member(**member) for name, member in record["members"].items()}
        membership.waiting = dict(record["waiting"])
        if membership.members and sum(len(member.parts) for member in membership.members.values()) != parts:
            membership.renew()
        return membership


def dealt(parts: int, seconds: list[float]) -> list[int]:
    """How many parts each member computes, so that the last one is done as early as possible.

    seconds: time of a part for each member. Of two that would be done alike the one with fewer parts gets it, or the
    earlier one.
    """
    done = [(each, 0, index) for index, each in enumerate(seconds)]  # when, if it takes one more than it has
    heapq.heapify(done)
    for _ in range(parts if seconds else 0):
        at, count, index = done[0]
        heapq.heapreplace(done, (at + seconds[index], count + 1, index))
    return [count for _, count, _ in sorted(done, key=lambda entry: entry[2])]


def _longest(counts: list[int], seconds: list[float]) -> float:
    return max((count * each for count, each in zip(counts, seconds, strict=True)), default=0.0)
