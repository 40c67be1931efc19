from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controller.errors import ApiError
from controller.state.replicas import MAX_ABSENT, Registry, Replica
from schema.wire.messages import ErrorCode, HeartbeatRequest, RegisterRequest, Role

TIMEOUT = 10.0
BEAT = HeartbeatRequest(incarnation=1, version=3)


def request(name: str = "rollout-0", number: int = 0, role: Role = "rollout") -> RegisterRequest:
    return RegisterRequest(request_id=f"request-{number:04}", role=role, name=name)


@pytest.fixture
def registry() -> Registry:
    return Registry(TIMEOUT)


def refusal(call: object, *arguments: object, **named: object) -> ErrorCode:
    with pytest.raises(ApiError) as refused:
        call(*arguments, **named)  # type: ignore[operator]
    return refused.value.code


def test_a_repeated_registration_gets_the_same_incarnation(registry: Registry) -> None:
    first = registry.register(request(), 0.0)
    again = registry.register(request(), 1.0)
    assert again.repeated
    assert again.replica is first.replica


def test_only_the_newest_incarnation_is_heard(registry: Registry) -> None:
    old = registry.register(request(number=0), 0.0).replica
    new = registry.register(request(number=1), 1.0)
    assert (new.replica.incarnation, new.superseded) == (2, old.replica_id)
    assert refusal(registry.check, old.replica_id, 1) is ErrorCode.STALE_INCARNATION
    assert refusal(registry.check, new.replica.replica_id, 1) is ErrorCode.STALE_INCARNATION
    assert refusal(registry.register, request(number=0), 2.0) is ErrorCode.STALE_INCARNATION
    assert registry.check(new.replica.replica_id, 2) is new.replica


def test_unknown_left_and_foreign_replicas_are_refused(registry: Registry) -> None:
    replica = registry.register(request(), 0.0).replica
    assert refusal(registry.check, "nobody.1", 1) is ErrorCode.UNKNOWN_REPLICA
    assert refusal(registry.check, "rollout-0.7", 7) is ErrorCode.UNKNOWN_REPLICA
    assert refusal(registry.check, replica.replica_id, 1, "policy") is ErrorCode.FORBIDDEN
    assert refusal(registry.register, request(number=5, role="policy"), 0.0) is ErrorCode.CONFLICT
    registry.leave(replica)
    assert refusal(registry.check, replica.replica_id, 1) is ErrorCode.UNKNOWN_REPLICA


@pytest.mark.parametrize("number", ["", "0", "01", "-1", "1_0", "\u00b2", "\u0663", "9" * 5000])
def test_an_id_that_no_replica_ever_had_is_unknown(registry: Registry, number: str) -> None:
    for n in range(12):
        registry.register(request(number=n), 0.0)
    assert refusal(registry.find, f"rollout-0.{number}") is ErrorCode.UNKNOWN_REPLICA


def test_there_is_one_trainer_at_a_time(registry: Registry) -> None:
    registry.register(request("a", 0, "policy"), 0.0)
    assert refusal(registry.register, request("b", 1, "policy"), 0.0) is ErrorCode.CONFLICT
    assert registry.register(request("a", 2, "policy"), 0.0).replica.incarnation == 2
    registry.expire(TIMEOUT + 1)
    assert registry.register(request("b", 3, "policy"), 20.0).replica.incarnation == 1


def test_a_trainer_that_was_lost_does_not_come_back_beside_another(registry: Registry) -> None:
    old = registry.register(request("a", 0, "policy"), 0.0).replica
    registry.expire(TIMEOUT + 1)
    new = registry.register(request("b", 1, "policy"), 20.0).replica
    assert refusal(registry.check, old.replica_id, 1) is ErrorCode.UNKNOWN_REPLICA
    assert refusal(registry.register, request("a", 0, "policy"), 21.0) is ErrorCode.STALE_INCARNATION
    registry.seen(old, 22.0)
    assert registry.present("policy") == [new]


def test_silence_loses_a_replica_and_a_beat_brings_it_back_as_it_was(registry: Registry) -> None:
    replica = registry.register(request(), 0.0).replica
    registry.drain(replica)
    assert registry.expire(TIMEOUT) == []
    assert registry.expire(TIMEOUT + 0.1) == [replica]
    assert registry.expire(TIMEOUT + 0.2) == []
    registry.beat(replica, 20.0, BEAT)
    assert replica.state == "draining"


def test_a_beat_that_comes_late_only_says_that_it_lives(registry: Registry) -> None:
    replica = registry.register(request(), 0.0).replica
    for at, (sequence, number, is_news) in enumerate([(5, 50, True), (4, 10, False), (5, 20, False), (6, 60, True)]):
        gauges = {"reward_attempts": float(number), "running": 1.0 * number}
        facts = {"version": number, "fetching": number, "status": str(number), "gauges": gauges}
        beat = HeartbeatRequest.model_validate({"incarnation": 1, "sequence": sequence, **facts})
        before = {name: getattr(replica, name) for name in facts}
        assert registry.beat(replica, float(at), beat) is is_news
        assert {name: getattr(replica, name) for name in facts} == (facts if is_news else before)
        assert replica.last_seen == at


def test_of_too_many_absent_replicas_the_oldest_is_forgotten_and_its_id_never_used_again(registry: Registry) -> None:
    for number in range(3):  # its third incarnation
        first = registry.register(request("first", number), 0.0).replica
    registry.register(request("here"), 0.0)
    registry.leave(first)
    for number in range(MAX_ABSENT):
        registry.leave(registry.register(request(f"r{number}", number), 1.0 + number).replica)
    assert registry.by_name("first") is None
    assert registry.by_name("here") is not None
    assert registry.by_name("r0") is not None
    assert len(list(registry)) == MAX_ABSENT + 1
    assert registry.take_forgotten() == ["first"]
    assert refusal(registry.check, first.replica_id, 3) is ErrorCode.UNKNOWN_REPLICA
    restored = Registry(TIMEOUT, [replica.to_record() for replica in registry])
    for again in (registry, restored):
        assert again.register(request("first", 9), 5000.0).replica.incarnation == 4
        assert len(list(again)) == MAX_ABSENT + 1


def test_what_replicas_count_is_kept_when_others_take_their_place(registry: Registry) -> None:
    for number in range(3):
        replica = registry.register(request(number=number), 0.0).replica
        for retried in (1.0, 2.0):
            gauges = {"reward_retried": retried, "running": 5.0}
            registry.beat(replica, 0.0, HeartbeatRequest(incarnation=number + 1, gauges=gauges))
    registry.beat(replica, 0.0, HeartbeatRequest(incarnation=3))
    assert registry.total("reward_retried") == 6.0
    assert Registry(TIMEOUT, [replica.to_record()]).total("reward_retried") == 6.0
    registry.leave(replica, "done")
    for number in range(2 * MAX_ABSENT):
        registry.leave(registry.register(request(f"host-{number}"), 0.0).replica, "done")
    assert registry.total("reward_retried") == 6.0
    assert registry.by_name("rollout-0") is None


def test_ids_of_different_names_differ_and_fit_into_a_path(registry: Registry) -> None:
    names = ["a.b", "a_b", "a:b", "a@b", "a-b", "a"]
    ids = [registry.register(request(name, i), 0.0).replica.replica_id for i, name in enumerate(names)]
    assert len(set(ids)) == len(names)
    assert all(set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") for text in ids)


class RegistryMachine(RuleBasedStateMachine):
    """Random schedules: incarnations only rise, one id per name counts, restoring changes nothing."""

    @initialize()
    def begin(self) -> None:
        self.registry, self.now, self.number = Registry(TIMEOUT), 0.0, 0
        self.newest: dict[str, Replica] = {}
        self.old_ids: set[str] = set()
        self.rows: dict[str, dict[str, object]] = {}

    @rule(name=st.sampled_from("abc"), repeat=st.booleans())
    def register(self, name: str, repeat: bool) -> None:
        if not repeat:
            self.number += 1
        role: Role = "policy" if name == "c" else "rollout"
        try:
            registered = self.registry.register(request(name, self.number, role), self.now)
        except ApiError as error:
            assert error.code is ErrorCode.STALE_INCARNATION  # noqa: PT017
            return
        before = self.newest.get(name)
        if registered.repeated:
            assert before is registered.replica
        else:
            assert registered.replica.incarnation == (before.incarnation if before else 0) + 1
            if before is not None:
                self.old_ids.add(before.replica_id)
        self.newest[name] = registered.replica

    @rule(name=st.sampled_from("abc"), event=st.sampled_from(["beat", "drain", "leave", "gone"]))
    def act(self, name: str, event: str) -> None:
        replica = self.newest.get(name)
        if replica is None or replica.state == "left":
            return
        if event == "beat":
            self.registry.beat(replica, self.now, BEAT)
            assert replica.present
        elif event == "drain":
            self.registry.drain(replica)
        elif event == "leave":
            self.registry.leave(replica)
        else:
            self.registry.gone(replica, "killed")
            assert not replica.present

    @rule(seconds=st.floats(0.0, 15.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for replica in self.registry.expire(self.now):
            assert self.now - replica.last_seen > TIMEOUT

    @invariant()
    def newest_only(self) -> None:
        for old in self.old_ids:
            assert refusal(self.registry.find, old) is ErrorCode.STALE_INCARNATION
        for replica in self.newest.values():
            assert self.registry.find(replica.replica_id) is replica
        assert all(
            self.now - replica.last_seen <= TIMEOUT + 15.0 for replica in self.newest.values() if replica.present
        )

    @invariant()
    def restored(self) -> None:
        self.rows.update({replica.name: replica.to_record() for replica in self.registry.take_changes()})
        again = {replica.name: replica for replica in Registry(TIMEOUT, self.rows.values())}
        assert again.keys() == self.newest.keys()
        for name, replica in self.newest.items():
            stored = again[name]
            assert (stored.replica_id, stored.incarnation) == (replica.replica_id, replica.incarnation)
            assert (stored.state, stored.drain_asked) == (replica.state, replica.drain_asked)


RegistryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_random_schedules = RegistryMachine.TestCase
