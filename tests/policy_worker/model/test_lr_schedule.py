from __future__ import annotations

import math

import pytest

from policy_worker.model.lr_schedule import DecayType, Schedule


def factors(schedule: Schedule, *steps: int) -> list[float]:
    return [schedule.factor(step) for step in steps]


def test_constant_without_warmup_and_decay():
    assert factors(Schedule(100), 0, 50, 99, 100, 1000) == [1.0] * 5


def test_warmup_is_linear_from_its_start_factor():
    schedule = Schedule(100, warmup_steps=4, warmup_start_factor=0.2)
    assert factors(schedule, 0, 1, 2, 3, 4, 5) == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_no_step_of_a_warmup_is_trained_at_rate_zero():
    assert factors(Schedule(100, warmup_steps=20), 0, 19) == [0.05, 1.0]
    assert factors(Schedule(100, warmup_steps=1), 0) == [1.0]


def test_a_float_is_a_share_of_all_steps():
    assert Schedule(50, warmup_steps=0.1).warmup == 5
    assert Schedule(50, warmup_steps=1).warmup == 1
    assert Schedule(50, warmup_steps=1.0).warmup == 50


@pytest.mark.parametrize(
    ("kind", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", (1 + math.cos(math.pi / 4)) / 2, 0.5),
        ("wsd", (1 + math.cos(math.pi / 4)) / 2, 0.5),
        ("sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_decay_by_hand(kind: DecayType, quarter: float, half: float):
    schedule = Schedule(100, decay_ratio=0.4, decay_type=kind, min_factor=0.1)
    expected = [1.0, 1.0, 0.1 + 0.9 * quarter, 0.1 + 0.9 * half, 0.1, 0.1]
    assert factors(schedule, 59, 60, 70, 80, 100, 500) == pytest.approx(expected)


@pytest.mark.parametrize(("ratio", "kind"), [(None, "linear"), (0.0, "cosine"), (0.4, "none"), (0.4, None)])
def test_without_ratio_or_type_nothing_decays(ratio: float | None, kind: DecayType | None):
    schedule = Schedule(100, decay_ratio=ratio, decay_type=kind, min_factor=0.1)
    assert factors(schedule, 70, 100, 200) == [1.0, 1.0, 1.0]


def test_decay_waits_for_the_end_of_the_warmup():
    schedule = Schedule(100, warmup_steps=20, decay_ratio=1.0, decay_type="linear")
    assert factors(schedule, 9, 20, 60, 100) == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_never_outside_of_its_bounds():
    schedule = Schedule(37, warmup_steps=0.3, decay_ratio=0.5, decay_type="sqrt", min_factor=0.05)
    values = factors(schedule, *range(60))
    assert all(0 <= value <= 1 for value in values)
    assert values[:12] == sorted(values[:12])
    assert values[18:] == sorted(values[18:], reverse=True)
