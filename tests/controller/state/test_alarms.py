"""Alarms by hand-made courses: each begins when its condition holds, is over when it does not, and none without."""

from __future__ import annotations

from random import Random

import pytest

from controller.state.alarms import BEGINNING, COLLAPSES, WINDOW, AlarmChange, Alarms
from controller.state.step_log import StepLog
from schema.wire.messages import StepRecord, ValidationRecord

HEALTHY = {
    "entropy": 1.0, "response_tokens_mean": 100.0, "zero_variance_fraction": 0.2, "truncated_fraction": 0.1,
    "reward_mean": 0.5, "reward/right": 0.4, "reward/format": 0.4,
}  # fmt: skip


def feed(alarms: Alarms, steps: int, first: int = 0, **metrics: float) -> list[AlarmChange]:
    changes = []
    for number in range(first, first + steps):
        changes += alarms.step(StepRecord(step=number, at=1.0, metrics={**HEALTHY, **metrics}))
    return changes


def validation(version: int, score: float | None, error: float = 0.01) -> ValidationRecord:
    return ValidationRecord(
        version=version,
        at=1.0,
        samples=64,
        score_mean=score,
        score_error=error,
        rewards_mean={},
        response_tokens_mean=1.0,
    )


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("entropy", {"entropy": 0.05}),
        ("length", {"response_tokens_mean": 3.0}),
        ("no_variance", {"zero_variance_fraction": 1.0}),
        ("cut_off", {"truncated_fraction": 0.9}),
        ("dominance", {"reward/right": 0.4, "reward/format": 0.001}),
    ],
)
def test_an_alarm_begins_and_is_over(name: str, metrics: dict[str, float]) -> None:
    alarms = Alarms({"right": 1.0, "format": 1.0})
    assert feed(alarms, BEGINNING) == []
    begun = feed(alarms, 2 * WINDOW, BEGINNING, **metrics)
    assert [(change.name, change.on) for change in begun] == [(name, True)]
    assert alarms.active.keys() == {name}
    over = feed(alarms, 2 * WINDOW, 100)
    assert [(change.name, change.on) for change in over] == [(name, False)]
    assert alarms.active == {}


@pytest.mark.parametrize("without", [1, BEGINNING, 40])
def test_first_steps_without_entropy_do_not_silence_its_alarm(without: int) -> None:
    """The critic warms up, or everything is masked."""
    records = [
        StepRecord(step=n, at=1.0, metrics={} if n < without or n == 65 else {"entropy": 2.0 if n < 60 else 0.01})
        for n in range(69)
    ]
    alarms, stored = Alarms({}), StepLog()
    for record in records:
        alarms.step(record)
        stored.add(record, 1, 1)
    assert alarms.active.keys() == {"entropy"}
    again = Alarms({})
    again.restore(stored.ends(WINDOW + 1, BEGINNING, COLLAPSES), [])
    assert again.active == alarms.active, "nor in a controller that starts again"
    alarms.rewind(without + 4)
    assert feed(alarms, 3, without + 4, entropy=0.01) == [
        AlarmChange("entropy", text, False) for text in again.active.values()
    ], "four first values are left"


def test_one_low_step_is_not_a_collapse() -> None:
    alarms = Alarms({})
    low = feed(alarms, 1, 20, entropy=0.0, zero_variance_fraction=1.0)
    assert feed(alarms, 20) + low + feed(alarms, 20, 21) == []


def test_the_penalty_for_long_answers_is_a_part_of_the_score() -> None:
    alarms = Alarms({"right": 1.0, "format": 0.1})
    parts = {"reward/right": 0.0, "reward/format": 1.0}
    assert feed(alarms, WINDOW, **parts, **{"reward/overlong": -0.9}) == []
    (begun,) = feed(alarms, WINDOW, WINDOW, **parts)
    assert begun.text.startswith("100% of the score come from the reward format")


def test_answers_that_nothing_compares_may_all_be_alike() -> None:
    assert feed(Alarms({}, compares=False), 20, zero_variance_fraction=1.0) == []


def test_a_falling_validation_is_an_alarm_only_while_the_reward_rises() -> None:
    alarms = Alarms({})
    feed(alarms, WINDOW)
    assert alarms.validation(validation(8, 0.5)) == []
    feed(alarms, WINDOW, 8, reward_mean=0.9)
    assert alarms.validation(validation(16, 0.3)) == [], "once may be chance"
    (begun,) = alarms.validation(validation(17, 0.3))
    assert begun.name == "overfitting"
    assert "0.500 at its best, 0.300 now" in begun.text
    (over,) = feed(alarms, WINDOW, 17, reward_mean=0.4)
    assert not over.on
    assert alarms.validation(validation(25, None)) == []
    alarms.rewind(8)
    feed(alarms, WINDOW, 8, reward_mean=0.9)
    assert alarms.validation(validation(16, 0.3)) == [], "what was undone does not count"


@pytest.mark.parametrize(("end", "fires"), [(0.7, False), (0.2, True)])
def test_the_noise_of_a_validation_is_no_fall(end: float, fires: bool) -> None:
    """64 prompts every 10 steps: a true accuracy that goes from 0.6 to `end`, while the reward rises."""
    alarmed = 0
    for seed in range(30):
        chance, alarms, changes = Random(seed), Alarms({}), []
        for step in range(200):
            if step % 10 == 0:
                p = 0.6 + (end - 0.6) * step / 200
                mean = sum(chance.random() < p for _ in range(64)) / 64
                changes += alarms.validation(validation(step, mean, (mean * (1 - mean) / 64) ** 0.5))
            changes += feed(alarms, 1, step, reward_mean=chance.gauss(0.5 + step / 500, 0.05))
        alarmed += bool(changes)
    assert (alarmed > 27) if fires else (alarmed < 2), alarmed


def test_what_is_stored_is_known_again() -> None:
    lived, records = Alarms({}), []
    for step in range(60):
        record = StepRecord(step=step, at=1.0, metrics={**HEALTHY, "entropy": 1.0 if step < 20 else 0.01})
        records.append(record)
        lived.step(record)
    again = Alarms({})
    again.restore([*records[:BEGINNING], *records[-WINDOW:]], [])
    assert again.active == lived.active
    assert again.active.keys() == {"entropy"}


def test_cut_answers_without_a_score_are_an_alarm_once_in_a_run() -> None:
    alarms = Alarms({})
    assert feed(alarms, 3, truncated_fraction=0.4, truncated_unscored_fraction=0.0) == []
    (begun,) = feed(alarms, 2, 3, truncated_fraction=0.4, truncated_unscored_fraction=0.375)
    assert (begun.name, begun.on) == ("cut_unpunished", True)
    for words in (
        "37.5% of the answers of step 3", "mean of their group", "policy.model_max_length", "max_response_length",
        "overlong_reward", "reward.on_error",
    ):  # fmt: skip
        assert words in begun.text
    assert len(begun.text) <= 1024, "an event takes no more"
    assert [change.on for change in feed(alarms, WINDOW, 5)] == [False]
    assert feed(alarms, 20, 20, truncated_unscored_fraction=1.0) == [], "it has been shown"
    again, stored = Alarms({}), [StepRecord(step=9, at=1.0, metrics={"truncated_unscored_fraction": 1.0})]
    again.restore(stored, [], alarms.shown)
    assert feed(again, 1, 10, truncated_unscored_fraction=1.0) == []
    assert again.active.keys() == {"cut_unpunished"}, "it holds, and is no news"


def test_steps_without_metrics_raise_nothing() -> None:
    alarms = Alarms({"right": 1.0, "format": 1.0})
    assert alarms.step(StepRecord(step=0, at=1.0, metrics={})) == []
    alarms.rewind(0)
    assert alarms.validation(validation(0, None)) == []
