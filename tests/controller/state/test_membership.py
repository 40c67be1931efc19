"""Epochs of policy replicas: single decisions by hand, and whole jobs whose replicas die at any moment."""

from __future__ import annotations

import pytest

from controller.state.membership import PATIENCE, MemberOrder, Membership, dealt
from tests.controller.state.crew import Crew, alone
from tests.support.effort import SOAK, examples


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
    assert found.join("a", 4, "w") == MemberOrder("train", 1, (0, 1), ("a",), (2,), 4)
    assert found.join("b", 0, "old").action == "wait"
    assert found.begin("a", 4, "w").action == "train", "nobody waits for it within a step"
    found.committed(4)
    assert [found.begin("a", 5, "v").action, found.join("b", 0, "old").action] == ["save", "wait"]
    found.save(5)
    assert found.begin("a", 5, "v").action == "wait"
    assert found.join("b", 0, "old") == MemberOrder("heal", 1, step=5)
    assert found.healed("b", 4, "v").action == "heal", "that is another checkpoint"
    assert found.healed("b", 5, "v") == MemberOrder("train", 2, (1,), ("a", "b"), (1, 1), 5)
    assert found.begin("a", 5, "v") == MemberOrder("train", 2, (0,), ("a", "b"), (1, 1), 5)


def test_who_comes_with_the_same_weights_takes_part_at_once():
    found = one()
    assert found.join("b", 4, "other").action == "wait"
    assert found.join("b", 4, "w") == MemberOrder("train", 2, (1,), ("a", "b"), (1, 1), 4)
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
    assert found.begin("a", 6) == MemberOrder("commit", 2, step=5)


def test_who_dies_before_that_is_replaced_and_after_that_is_not_needed():
    found = pair()
    found.ready("a", 2, 5, 0)
    found.gone("b")
    assert found.ready("a", 2, 5, 0) == MemberOrder("again", 3, (0, 1), ("a",), (2,))
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
    assert found.ready("a", 2, 5, 0) == MemberOrder("again", 3, (0,), ("a", "b"), (1, 1))
    assert found.holds("b", 2, 5, 0) == MemberOrder("again", 3, (1,), ("a", "b"), (1, 1))


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
    assert found.join("c", 0, "old") == MemberOrder("heal", 4)
    found.found("c", 3)
    assert found.begin("c", 3, "u") == MemberOrder("train", 5, (0, 1), ("c",), (2,), 3)


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
    assert found.begin("a", 6, "u") == MemberOrder("train", 3, (0, 1), ("a",), (2,), 6), (
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


def jobs(usual: int) -> range:
    """Seeds of simulated jobs: two hundred times as many in a soak."""
    return range(examples(usual) * (10 if SOAK else 1))


@pytest.mark.scaled
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "inexact"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_whoever_dies_the_weights_are_those_of_one_replica(parts: int, exact: bool) -> None:
    wanted = alone(parts)
    for seed in jobs(20):
        crew = Crew(seed, parts, exact)
        crew.run(faults=crew.chance.choice([0.0, 0.01, 0.05]))
        if exact:
            assert crew.committed == wanted, f"seed {seed}"


@pytest.mark.scaled
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_job_ends_whatever_the_store_loses(size: int) -> None:
    wanted = alone(size)
    for seed in jobs(60):
        crew = Crew(seed, size, exact=seed % 2 == 0, size=size, loses=True)
        crew.run(faults=crew.chance.choice([0.01, 0.03, 0.1]))
        assert crew.standstills == 0, f"seed {seed}: the members had to begin anew"
        if crew.exact:
            assert crew.committed == wanted, f"seed {seed}"
