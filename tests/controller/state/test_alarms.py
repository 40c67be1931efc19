"""Alarms by hand-made courses: each begins when its condition holds, is over when it does not, and none without."""

from __future__ import annotations

import pytest

from controller.state.alarms import BEGINNING, WINDOW, Alarms, Change
from schema.wire.messages import StepRecord, ValidationRecord

HEALTHY = {
    "entropy": 1.0, "response_tokens_mean": 100.0, "zero_variance_fraction": 0.2, "truncated_fraction": 0.1,
    "reward_mean": 0.5, "reward/right": 0.4, "reward/format": 0.4,
}  # fmt: skip


def feed(alarms: Alarms, steps: int, first: int = 0, **metrics: float) -> list[Change]:
    changes = []
    for number in range(first, first + steps):
        changes += alarms.step(StepRecord(step=number, at=1.0, metrics={**HEALTHY, **metrics}))
    return changes


def validation(version: int, score: float | None) -> ValidationRecord:
    return ValidationRecord(
        version=version, at=1.0, samples=4, score_mean=score, rewards_mean={}, response_tokens_mean=1.0
    )


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("entropy", {"entropy": 0.1}),
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


def test_one_low_step_is_not_a_collapse() -> None:
    alarms = Alarms({})
    assert feed(alarms, 20) + feed(alarms, 1, 20, entropy=0.0) + feed(alarms, 20, 21) == []


def test_a_falling_validation_is_an_alarm_only_while_the_reward_rises() -> None:
    alarms = Alarms({})
    feed(alarms, WINDOW)
    assert alarms.validation(validation(8, 0.5)) == []
    feed(alarms, WINDOW, 8, reward_mean=0.9)
    (begun,) = alarms.validation(validation(16, 0.3))
    assert begun.name == "overfitting"
    assert "0.500 at its best, 0.300 now" in begun.text
    (over,) = feed(alarms, WINDOW, 16, reward_mean=0.4)
    assert not over.on
    assert alarms.validation(validation(24, None)) == []


def test_steps_without_metrics_raise_nothing() -> None:
    alarms = Alarms({"right": 1.0, "format": 1.0})
    assert alarms.step(StepRecord(step=0, at=1.0, metrics={})) == []
    alarms.rewind()
    assert alarms.validation(validation(0, None)) == []
