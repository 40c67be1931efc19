"""Whoever was handed a publication can fetch its chain until it asks again or is lost, whatever else happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controller.state.publications import Publications
from controller.state.replicas import Registry, Replica
from schema.wire.messages import HeartbeatRequest, PublishRequest, RegisterRequest
from schema.wire.weights import Publication
from tests.support.effort import examples

KEEP, REMEMBERED = 2, 5
NAMES = st.sampled_from(["a", "b", "c"])


def publish_request(version: int, number: int, begins: int | None = None, heard: int = 0) -> PublishRequest:
    return PublishRequest(
        request_id=f"request-{number}", replica_id="policy-0.1", incarnation=1, policy_epoch=1,
        version=version, uri=f"v{number}", manifest_hash=f"m{number}", content_hash=f"c{number}", n_bytes=1,
        kind="full" if begins is None else "delta", begins=begins, newest_publication=heard,
    )  # fmt: skip


class Process:
    """A trainer process: what it published, and where the chain of its next publication begins."""

    def __init__(self) -> None:
        self.begins: int | None = None
        self.history: list[Publication] = []


class Chains(RuleBasedStateMachine):
    """A controller that may restart or lose history, trainers, replicas that are slow, and the files of a store."""

    @initialize()
    def begin(self) -> None:
        self.publications, self.registry = Publications(KEEP, remembered=REMEMBERED), Registry(10.0)
        self.committed = self.timeline = self.requests = self.highest = self.began = 0
        self.files: set[str] = set()
        self.chains: dict[str, list[str]] = {}  # manifest hash -> hashes from its anchor to itself
        self.forgotten: set[str] = set()  # collected, and the store has lost that
        self.trainer = Process()
        self.told: dict[str, set[str]] = {}  # replica -> manifest hashes of what it was handed
        self.saved: list[dict[str, Any]] = [self.save()]
        self.publish(step=False, anchor=False, dense=True)

    # ---- the controller -----------------------------------------------------------------------------------

    def save(self) -> dict[str, Any]:
        return {
            "publications": [entry.to_record() for entry in self.publications.recent(10**6)],
            "replicas": [replica.to_record() for replica in self.registry],
            "committed": getattr(self, "committed", 0),
            "timeline": getattr(self, "timeline", 0),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self.publications = Publications(KEEP, saved["publications"], self.highest, REMEMBERED)
        self.registry = Registry(10.0, saved["replicas"])

    @rule()
    def the_controller_restarts(self) -> None:
        self.restore(self.save())

    @rule(back=st.integers(1, 12))
    def the_store_loses_history(self, back: int) -> None:
        """Replicas ask anew, the trainer declares what it published; what others collected nobody knows any more."""
        saved = self.saved[max(0, len(self.saved) - back)]
        self.restore(saved)
        self.told.clear()
        if saved["timeline"] != self.timeline:
            self.publications.rewind(min(self.began, saved["committed"]))
        self.publications.declare(self.trainer.history, self.timeline)
        kept = [entry.publication for entry in self.publications.recent(10**6) if entry.files == "kept"]
        self.forgotten |= {known.manifest_hash for known in kept} - self.files
        assert not self.forgotten & {known.manifest_hash for known in self.trainer.history}
        self.saved.append(self.save())

    # ---- trainers -----------------------------------------------------------------------------------------

    @rule(step=st.booleans(), anchor=st.booleans(), dense=st.booleans())
    def publish(self, step: bool, anchor: bool, dense: bool) -> None:
        """dense: a full version instead of a delta. anchor: a full version beside it, for the next chain."""
        self.committed += step
        self.requests += 1
        begins = None if dense or self.trainer.begins is None else self.trainer.begins
        request = publish_request(self.committed, self.requests, begins, self.highest)
        mine = self.publications.publish(request, self.timeline, self.committed)
        assert mine.id > self.highest
        self.highest = mine.id
        self.files.add(mine.manifest_hash)
        own = [known.manifest_hash for known in self.trainer.history if begins and known.id >= begins]
        self.chains[mine.manifest_hash] = [*own, mine.manifest_hash]
        self.trainer.history.append(mine)
        if anchor or begins is None:
            self.trainer.begins = mine.id
        self.collect()
        self.saved.append(self.save())

    def collect(self) -> None:
        rollouts = self.registry.present("rollout")
        held = set[int]().union(*(replica.publications for replica in rollouts))
        gone = self.publications.collect(held)
        self.files -= {known.manifest_hash for known in self.trainer.history if known.id in gone}
        self.trainer.history = [known for known in self.trainer.history if known.id not in gone]
        kept = [entry for entry in self.publications.recent(10**6) if entry.files == "kept"]
        longest = max(map(len, self.chains.values()))
        assert len(kept) <= (KEEP + 1 + len(held)) * longest
        if not held and not self.timeline:
            assert len(kept) < KEEP + longest + 1

    @rule()
    def the_trainer_restarts(self) -> None:
        self.trainer = Process()

    @rule(step=st.integers(0, 20))
    def the_trainer_goes_back(self, step: int) -> None:
        if step < self.committed:
            self.committed = self.began = step
            self.timeline += 1
            self.publications.rewind(step)
            self.trainer = Process()
            self.saved.append(self.save())

    # ---- replicas -----------------------------------------------------------------------------------------

    def present(self, name: str) -> Replica | None:
        replica = self.registry.by_name(name)
        return replica if replica is not None and replica.present else None

    def hand_out(self, replica: Replica, newest: Publication | None) -> None:
        if newest is not None:
            self.registry.hand_out(replica, newest.id)
            self.told.setdefault(replica.name, set()).add(newest.manifest_hash)
        self.saved.append(self.save())

    @rule(name=NAMES)
    def joins(self, name: str) -> None:
        self.requests += 1
        request = RegisterRequest(request_id=f"register-{self.requests}", role="rollout", name=name)
        replica = self.registry.register(request, 0.0).replica
        self.told.pop(name, None)
        self.hand_out(replica, self.publications.newest)

    @rule(name=NAMES)
    def asks_again(self, name: str) -> None:
        replica = self.present(name)
        if replica is not None:
            self.registry.asks(replica)
            self.told.pop(name, None)
            self.hand_out(replica, self.publications.newest)

    @rule(name=NAMES)
    def begins_to_read(self, name: str) -> None:
        """A heartbeat says what it reads; then a poll of before is answered late, and it asks again."""
        replica, newest = self.present(name), self.publications.newest
        if replica is not None and newest is not None:
            self.registry.hand_out(replica, newest.id)
            self.registry.beat(replica, 0.0, HeartbeatRequest(incarnation=1, fetching=newest.id))
            self.registry.asks(replica)
            self.told[name] = {newest.manifest_hash}
            for _ in range(KEEP + 1):
                self.publish(step=True, anchor=False, dense=True)

    @rule(name=NAMES)
    def is_lost(self, name: str) -> None:
        replica = self.present(name)
        if replica is not None:
            self.registry.gone(replica, "")
            self.told.pop(name, None)

    @rule(name=NAMES)
    @precondition(lambda self: self.publications.newest is not None)
    def holds_the_newest(self, name: str) -> None:
        replica, newest = self.present(name), self.publications.newest
        if replica is not None and newest is not None:
            replica.publication_id, replica.version = newest.id, newest.version

    # ---- what holds ---------------------------------------------------------------------------------------

    @invariant()
    def what_was_handed_out_is_there(self) -> None:
        for name, handed in self.told.items():
            for publication in handed:
                assert set(self.chains[publication]) <= self.files | self.forgotten, (name, publication)

    @invariant()
    def the_newest_can_be_fetched(self) -> None:
        newest = self.publications.newest
        if newest is not None:
            assert set(self.chains[newest.manifest_hash]) <= self.files | self.forgotten


Chains.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)
TestChains = pytest.mark.scaled(Chains.TestCase)


# ---- by hand --------------------------------------------------------------------------------------------------


def test_a_chain_stays_with_the_publication_that_needs_it() -> None:
    publications = Publications(keep=1)
    publications.publish(publish_request(0, 1), 0, 9)
    for number in (2, 3, 4):
        publications.publish(publish_request(number, number, begins=1), 0, 9)
        assert publications.collect(()) == []
    publications.publish(publish_request(5, 5, begins=4), 0, 9)  # 4 has got a full version beside it
    assert publications.collect({3}) == [], "somebody reads 3, and 1 and 2 with it"
    assert publications.collect(()) == [1, 2, 3]


def test_what_stays_as_a_link_alone_is_not_handed_out() -> None:
    """4 begins the chain of 5; its own chain, which began at 1, is gone."""
    publications = Publications(keep=1)
    for version, begins in enumerate((None, 1, 2)):
        publications.publish(publish_request(version, version + 1, begins), 0, 9)
    assert publications.collect(()) == [1]
    publications.rewind(1)
    assert not publications.can_be_fetched(2)
    assert publications.newest is None


def test_an_anchor_that_is_still_to_come_keeps_its_publication() -> None:
    """The chain of 3 is broken; its full version is what 4 begins with."""
    publications = Publications(keep=1)
    publications.publish(publish_request(0, 1), 0, 9)
    broken = publications.publish(publish_request(1, 2, begins=1), 0, 9).model_copy()
    restored = Publications(1, [entry.to_record() for entry in publications.recent(9)])
    restored.declare([broken], 0)
    for entry in restored.recent(9):
        assert entry.files == "kept"
    third = restored.publish(publish_request(2, 3, begins=2), 0, 9)
    assert 3 not in restored.collect(())
    assert restored.newest == third


def test_declared_under_another_id_the_chain_keeps_its_numbers() -> None:
    """Ids 2 and 3 went to others meanwhile; the trainer goes on to call its own by what it was told."""
    publications = Publications(keep=1)
    for version, number in ((0, 1), (1, 2), (2, 3)):
        publications.publish(publish_request(version, number), 0, 9)
    mine = [
        Publication(id=number, version=5, timeline=1, uri=f"m{number}", manifest_hash=f"mine-{number}",
                    content_hash="c", n_bytes=1, kind="delta" if number > 2 else "full", begins=begins)
        for number, begins in ((2, 0), (3, 2))
    ]  # fmt: skip
    publications.rewind(0)
    publications.declare(mine, 1)
    assert publications.newest is not None
    assert (publications.newest.id, publications.newest.manifest_hash) == (5, "mine-3")
    following = publications.publish(publish_request(6, 6, begins=2), 1, 9)
    assert publications.newest == following
    assert publications.collect(()) == [1], "2 and 3 would be taken for the trainer's own"
    publications.publish(publish_request(7, 7, begins=following.id), 1, 9)
    assert publications.collect(()) == [2, 3], "the trainer's, which are 4 and 5 here"
    publications.declare(mine, 1)
    assert publications.highest_id == 7


def test_of_a_long_run_the_oldest_are_forgotten() -> None:
    """Their rows go, and whoever still names one is told that it is gone, not that the store has lost it."""
    publications = Publications(keep=1, remembered=3)
    rows: set[int] = set()
    for number in range(1, 11):
        publications.publish(publish_request(number, number), 0, 99)
        publications.collect({4} if number < 7 else ())
        rows |= {entry.publication.id for entry in publications.take_changes()}
        rows -= set(publications.take_forgotten())
        assert rows == {entry.publication.id for entry in publications.recent(99)}
        assert 4 in rows or number not in (4, 5, 6), "somebody holds it"
    assert len(rows) == 3
    assert publications.knows(1)
    assert publications.valid(1) is None
    restored = Publications(1, [entry.to_record() for entry in publications.recent(9)], remembered=3)
    assert restored.knows(1)
    assert not restored.knows(11)
    assert restored.newest == publications.newest


def test_a_list_that_was_lost_with_its_trainer_is_told_to_the_next_one() -> None:
    publications = Publications(keep=1)
    for number in (1, 2):
        publications.publish(publish_request(number, number), 0, 9)
    assert publications.collect(()) == [1]  # and the trainer is killed before it has the answer
    successor = {"policy_epoch": 2}
    publications.publish(publish_request(3, 3).model_copy(update=successor), 0, 9)
    assert publications.collect(()) == [1, 2]
    restored = Publications(1, [entry.to_record() for entry in publications.recent(9)])
    restored.publish(publish_request(4, 4).model_copy(update=successor), 0, 9)
    assert restored.collect(()) == [3]
