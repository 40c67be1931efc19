"""Ages of tokens, and sums over micro-batches."""

from __future__ import annotations

import torch

from policy_worker.model.micro_batch import TrainSample
from policy_worker.parallel.group import Group
from policy_worker.training.metrics import Metrics, PartSums, age_metrics, age_sums


def of_ages(ages: dict[int, int], bound: int) -> Metrics:
    samples = [TrainSample([], {1000 - age: tokens for age, tokens in ages.items()}), TrainSample([])]
    return age_metrics(age_sums(1000, samples, bound), bound)


def test_ages_beyond_the_sixteenth_are_reported_together():
    metrics = of_ages({0: 6, 15: 2, 16: 1, 40: 1}, 1000)
    assert len(metrics) == 18
    shares = {age: metrics[f"staleness_tokens/{age}"] for age in (0, 1, 15, "16_or_more")}
    assert shares == {0: 0.6, 1: 0.0, 15: 0.2, "16_or_more": 0.2}
    assert metrics["staleness_tokens_mean"] == (30 + 16 + 40) / 10
    assert of_ages({16: 1}, 16)["staleness_tokens/16"] == 1.0
    assert of_ages({0: 3}, 0) == {"staleness_tokens/0": 1.0, "staleness_tokens_mean": 0.0}
    assert of_ages({}, 2) == {}


def test_parts_add_up_within_an_optimizer_step_and_maxima_do_not(group: Group):
    sums = PartSums()
    for step in (1.0, 10.0):
        for value in (1.0, 3.0, 2.0):
            sums.add({"loss": torch.tensor(value * step), "max_ratio": torch.tensor(value * step)})
        sums.end_step(grad_norm=step)
    assert sums.reduce(group) == [
        {"loss": 6.0 * step, "max_ratio": 3.0 * step, "grad_norm": step} for step in (1.0, 10.0)
    ]
    assert PartSums().reduce(group) == []
