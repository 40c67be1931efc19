from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from policy_worker.trained.lr_schedule import DecayType, Schedule
from tests.policy_worker.material import make_config


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


def hugging_face(name: str, warmup: int, **options: float) -> list[float]:
    """Factors of forty steps by transformers' schedule of that name, which counts steps from 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=40, scheduler_specific_kwargs=options
    )
    found = []
    for _ in range(40):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "name", "options"),
    [
        (Schedule(40, 8, 0.0, None, "linear", decay_steps=32), "linear", {}),
        (Schedule(40, 8, 0.0, 0.8, "cosine"), "cosine", {}),
        (Schedule(40, 8, 0.0, 0.8, "cosine", num_cycles=1.5), "cosine", {"num_cycles": 1.5}),
        (Schedule(40, 8, 0.0, None, "inverse_sqrt"), "inverse_sqrt", {}),
        (Schedule(40, 8), "constant_with_warmup", {}),
        (
            Schedule(40, 8, 0.0, None, "wsd", 0.1, decay_steps=12, wsd_decay_type="linear"),
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": "linear", "min_lr_ratio": 0.1},
        ),
        (
            Schedule(40, 8, 0.0, None, "wsd", 0.1, decay_steps=12),
            "warmup_stable_decay",
            {"num_decay_steps": 12, "min_lr_ratio": 0.1},
        ),
    ],
)
def test_after_the_warmup_it_is_that_of_transformers(schedule: Schedule, name: str, options: dict[str, Any]):
    assert factors(schedule, *range(8, 40)) == pytest.approx(hugging_face(name, 8, **options)[8:])


def test_the_length_may_be_in_steps():
    by_share = Schedule(100, decay_ratio=0.25, decay_type="linear")
    by_steps = Schedule(100, decay_type="linear", decay_steps=25)
    assert factors(by_share, *range(110)) == factors(by_steps, *range(110))


def test_exponential_end_by_hand():
    # 2^(1 - p) - 1 at p = 0, 1/2, 1
    schedule = Schedule(100, decay_type="wsd", decay_steps=40, wsd_decay_type="exponential", min_factor=0.1)
    half = 0.1 + 0.9 * (math.sqrt(2) - 1)
    assert factors(schedule, 59, 60, 80, 100, 200) == pytest.approx([1.0, 1.0, half, 0.1, 0.1])


def test_whole_waves_end_where_they_began():
    schedule = Schedule(100, decay_type="cosine", decay_steps=40, num_cycles=1.0, min_factor=0.2)
    assert factors(schedule, 60, 80, 100, 150) == pytest.approx([1.0, 0.2, 1.0, 1.0])


def test_inverse_square_root_by_hand():
    schedule = Schedule(1000, 4, decay_type="inverse_sqrt", min_factor=0.25)
    assert factors(schedule, 0, 3, 4, 16, 36, 64, 900) == pytest.approx([0.25, 1, 1, 0.5, 1 / 3, 0.25, 0.25])
    assert factors(Schedule(9, decay_type="inverse_sqrt"), 0, 1, 4) == [1.0, 1.0, 0.5]


def test_all_of_it_comes_from_the_configuration():
    train = make_config(
        train={
            "optm_warmup_steps": 3, "optm_warmup_start_factor": 0.1, "optm_decay_type": "wsd",
            "optm_decay_steps": 5, "optm_wsd_decay_type": "exponential", "optm_min_lr_factor": 0.2,
        }
    ).train  # fmt: skip
    expected = Schedule(20, 3, 0.1, None, "wsd", 0.2, 5, 0.5, "exponential")
    assert Schedule.of_config(train, 20) == expected
    assert Schedule.of_config(make_config(train={"optm_num_cycles": 1.5}).train, 20).num_cycles == 1.5


def test_progress_reaches_both_ends():
    assert [Schedule(5).progress(step) for step in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    assert Schedule(1).progress(0) == 1.0
