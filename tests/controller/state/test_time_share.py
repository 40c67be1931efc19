"""Turns on shared devices, simulated: whatever dies when, trainer and rollout replicas never have them together,
nobody waits for ever, and a controller that is restarted knows enough."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controller.state.time_share import TimeShare
from tests.support.effort import SOAK

NAMES = ("a", "b")


class TurnsMachine(RuleBasedStateMachine):
    """What processes really hold, next to what `TimeShare` knows of it. Calls may be late, lost or repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.time_share = TimeShare()
        self.epoch = 0
        self.trainer: str | None = None
        """None: there is none. `out`: it has given the devices; `wants`; `has`."""
        self.rollouts: dict[str, bool] = {}
        """Whether each one that is present has memory."""
        self.lives = dict.fromkeys(NAMES, 0)
        self.sequence = 0
        self.sent: list[tuple[str, int, bool]] = []
        """Calls of rollout replicas that the network may still deliver."""

    def id_of(self, name: str) -> str:
        return f"{name}.{self.lives[name]}"

    def theirs(self) -> bool:
        return not self.time_share.of_policy(self.epoch, self.trainer is not None)

    def call(self, replica: str, sequence: int, holds: bool) -> bool:
        """As the service."""
        if self.time_share.hears(replica, sequence):
            self.time_share.wakes(replica) if holds else self.time_share.sleeps(replica)
        if yours := self.theirs():
            self.time_share.wakes(replica)
        return yours

    # ---- the trainer ----------------------------------------------------------------------------------------

    @rule()
    def a_trainer_registers(self) -> None:
        self.epoch += 1
        self.trainer = "wants"

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def the_trainer_goes_on(self) -> None:
        if self.trainer == "out":
            self.time_share.given, self.trainer = 0, "wants"
        elif self.trainer == "has":
            self.time_share.given, self.trainer = self.epoch, "out"
        elif not self.time_share.awake([self.id_of(name) for name in self.rollouts]):
            self.trainer = "has"

    @precondition(lambda self: self.trainer is not None)
    @rule()
    def it_is_gone(self) -> None:
        self.trainer = None

    # ---- rollout replicas -----------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def a_replica_registers(self, name: str) -> None:
        """Also in the place of one that has not been noticed to be dead."""
        self.lives[name] += 1
        self.rollouts[name] = False

    @precondition(lambda self: self.rollouts)
    @rule(data=st.data(), answered=st.booleans())
    def a_replica_calls(self, data: st.DataObject, answered: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.rollouts)))
        self.sequence += 1
        call = self.id_of(name), self.sequence, self.rollouts[name]
        self.sent = [*self.sent[-1:], call]
        yours = self.call(*call)
        if answered:
            self.rollouts[name] = yours

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def a_call_comes_again(self, data: st.DataObject) -> None:
        replica, sequence, holds = data.draw(st.sampled_from(self.sent))
        if replica in map(self.id_of, self.rollouts):
            self.call(replica, sequence, holds)

    @precondition(lambda self: self.rollouts)
    @rule(data=st.data())
    def a_replica_is_gone(self, data: st.DataObject) -> None:
        del self.rollouts[data.draw(st.sampled_from(sorted(self.rollouts)))]

    # ---- the controller -------------------------------------------------------------------------------------

    @rule()
    def the_controller_is_restarted(self) -> None:
        self.time_share = TimeShare(self.time_share.given)
        self.sent = []  # connections end with it

    @rule()
    def the_store_loses_what_was_given(self) -> None:
        """The trainer goes on to its next batch, by which it says again what it wants."""
        self.sent = []
        if self.trainer == "out":
            self.time_share = TimeShare()
            self.time_share.given = self.epoch  # it says so with its next call
        else:
            self.time_share = TimeShare()

    @rule()
    def names_are_forgotten(self) -> None:
        self.time_share.forget([self.id_of(name) for name in self.rollouts])

    @invariant()
    def one_side_alone_has_the_devices(self) -> None:
        assert self.trainer != "has" or not any(self.rollouts.values())

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """Two calls of each replica that is there, and the trainer is let in; it gives, and they are."""
        turns, given = self.time_share, self.time_share.given
        asleep, heard = set(turns._asleep), dict(turns._heard)
        if self.trainer == "wants":
            for number, name in enumerate(self.rollouts):
                assert self.call(self.id_of(name), self.sequence + 1 + number, self.rollouts[name]) is False
                assert self.call(self.id_of(name), self.sequence + 10 + number, False) is False
            assert not turns.awake([self.id_of(name) for name in self.rollouts])
        elif self.trainer != "has" and self.epoch:
            for number, name in enumerate(self.rollouts):
                assert self.call(self.id_of(name), self.sequence + 1 + number, False) is True
        turns.given, turns._asleep, turns._heard = given, asleep, heard


TestTurns = TurnsMachine.TestCase
TestTurns.settings = settings(max_examples=3000 if SOAK else 80, stateful_step_count=60, deadline=None)


def test_rollout_replicas_wait_for_the_first_trainer() -> None:
    assert TimeShare().of_policy(0, trainer_present=False)
    assert not TimeShare().of_policy(1, trainer_present=False), "one that has died holds nobody up"
    assert TimeShare().of_policy(1, trainer_present=True), "it has the devices until it gives them"
    assert not TimeShare(given=1).of_policy(1, trainer_present=True)
    assert TimeShare(given=1).of_policy(2, trainer_present=True), "what an earlier one gave the next has again"
