"""Each way to lose something is seen, from the trainer's own log and the summary."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.judge import Batch, Event, Evidence, Resumed, Shape, history, judge, parse, together

SHAPE = Shape(positions=6, epochs=1, groups_per_step=2, samples_per_group=2, bound=1)


def batch(step: int, *positions: int, oldest: int | None = None, timeline: int = 0, samples: int = 4) -> Batch:
    groups = tuple((0, position) for position in positions)
    return Batch(step, timeline, samples, step if oldest is None else oldest, step, groups)


WHOLE: list[Event] = [batch(0, 0, 1), batch(1, 2, 3), batch(2, 4, 5)]


def summary(**changes: Any) -> dict[str, Any]:
    ledger = {
        "created": 6,
        "states": {
            "waiting": 0, "leased": 0, "ready": 0, "batched": 0, "trained": 0, "durable": 6, "dropped": 0,
        },
        "dropped": {},
        "staleness": {"0": 8, "1": 4},
        "max_staleness": 1,
        "bound": 1,
        "over_bound": 0,
    }  # fmt: skip
    ledger |= {key: value for key, value in changes.items() if key in ledger}
    return {
        "outcome": changes.get("outcome", "finished"),
        "status": {"phase": "finished", "step": changes.get("step", 3)},
        "steps": [{"step": step} for step in range(changes.get("step", 3))],
        "ledger": ledger,
    }


def violations(events: list[Event], **changes: Any) -> str:
    evidence = Evidence(changes.pop("exit_code", 0), summary(**changes), events)
    return "\n".join(judge(evidence, SHAPE))


def test_a_whole_job_is_whole() -> None:
    assert violations(WHOLE) == ""


def test_going_back_to_a_checkpoint_is_no_loss() -> None:
    again: list[Event] = [Resumed(1), batch(1, 3, 4, timeline=1), batch(2, 5, 2, timeline=1)]
    assert violations([*WHOLE, *again]) == ""
    assert [found.groups for found in history([*WHOLE, *again]) if isinstance(found, Batch)] == [
        ((0, 0), (0, 1)),
        ((0, 3), (0, 4)),
        ((0, 5), (0, 2)),
    ]


def test_a_trainer_that_was_stopped_does_not_lead_back() -> None:
    """It writes of the batch that it had got when it goes on; then it hears that the others are further."""
    line = "12:00:0{} INFO step {} of timeline 0 trains 4 samples of versions {} to {}: e0-p{}..{}"
    ahead = [line.format(second, step, step, step, 2 * step, 2 * step + 1) for second, step in enumerate(range(3))]
    stopped = [line.format(9, 1, 1, 1, 2, 3)]
    assert together([ahead, stopped]) == WHOLE


def test_a_drop_explains_a_gap() -> None:
    states = {"waiting": 0, "leased": 0, "ready": 0, "batched": 0, "trained": 0, "durable": 5, "dropped": 1}
    events: list[Event] = [batch(0, 0, 1), batch(1, 2, 3), batch(2, 4, samples=2)]
    found = {"states": states, "dropped": {"poison": 1}, "staleness": {"0": 10}}
    assert violations(events, **found) == ""
    assert "1 positions were never trained, 0 were dropped: e0-p5" in violations(events)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([*WHOLE[:2], batch(2, 4, 1)], "trained more than once: e0-p1"),
        ([*WHOLE[:2], batch(2, 4, 7)], "not of this job: e0-p7"),
        ([batch(0, 0, 1), batch(1, 2, 3), batch(2, 4, 5, oldest=0)], "2 steps old; the bound is 1"),
        ([batch(0, 0, 1), batch(2, 2, 3), batch(3, 4, 5)], "not 0, 1, 2"),
        ([batch(0, 0, 1), batch(1, 2), batch(2, 4, 5)], "step 1 trained only 1 groups"),
        ([*WHOLE[:2], batch(1, 2, 3), batch(2, 4, 5)], "step 1 was trained on weights that contain 2 steps"),
        ([*WHOLE, Resumed(1), batch(2, 4, 5)], "step 2 was trained on weights that contain 1 steps"),
    ],
)
def test_the_witness_is_believed(events: list[Event], says: str) -> None:
    assert says in violations(events)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"exit_code": 1}, "exit code 1"),
        ({"outcome": "stopped"}, "outcome"),
        ({"step": 2}, "steps: the summary says 2, it must be 3"),
        ({"created": 7}, "groups created"),
        ({"staleness": {"0": 8}}, "trained samples: the summary says 8, it must be 12"),
        ({"max_staleness": 2}, "staleness of 2"),
        ({"over_bound": 1}, "samples over the bound"),
        ({"bound": 4}, "bound"),
    ],
)
def test_the_ledger_must_agree(changes: dict[str, Any], says: str) -> None:
    assert says in violations(WHOLE, **changes)


KEPT = {step: [f"e0-p{2 * step + i}/{index}" for i in range(2) for index in range(2)] for step in range(3)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({1: KEPT[1][1:]}, "answers of step 1 that are missing, twice or of others: ['e0-p2/0']"),
        ({1: [*KEPT[1], KEPT[1][0]]}, "['e0-p2/0']"),
        ({2: []}, "answers of step 2"),
        ({3: KEPT[0]}, "answers of steps that were not trained: [3]"),
    ],
)
def test_every_answer_of_a_step_is_kept_once(change: dict[int, list[str]], says: str) -> None:
    found = "\n".join(judge(Evidence(0, summary(), WHOLE, answers=KEPT | change), SHAPE))
    assert says in found if says else not found


def test_what_went_wrong_meanwhile_and_what_is_left_are_told() -> None:
    evidence = Evidence(0, summary(), WHOLE, left_behind=["port 1 is listened on"], errors=["stuck"])
    assert judge(evidence, SHAPE) == ["stuck", "port 1 is listened on"]
    assert "there is no summary.json" in judge(Evidence(0, None, WHOLE), SHAPE)


def test_the_trainers_log_is_read() -> None:
    head = "2026-11-20 10:00:00,000 INFO rank0 policy_worker"
    lines = [
        f"{head}.step_batch: step 7 of timeline 1 trains 16 samples of versions 5 to 7: e0-p28..30 e1-p0",
        f"{head}.loop: step 7 trained: loss=0.1",
        f"{head}.checkpoints.load: resumed from /a/run/checkpoints/step-00000005 (5 committed steps)",
        f"{head}.step_batch: step 8 of timeline 1 trains 16 samples of versions 5 to",
    ]
    groups = ((0, 28), (0, 29), (0, 30), (1, 0))
    assert parse(lines) == [Batch(7, 1, 16, 5, 7, groups), Resumed(5)]
