"""Ages of tokens, sums over micro-batches, and samples that are kept as text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from policy_worker.model.micro_batch import MicroBatch, TrainSample
from policy_worker.parallel.group import Group
from policy_worker.training.metrics import (
    KeptSamples,
    Metrics,
    PartSums,
    age_metrics,
    age_sums,
    table_metrics,
)
from schema.wire.messages import MOST_TRAINED, CommitRequest
from tests.policy_worker.material import make_sample, make_table, with_baselines


def of_ages(ages: dict[int, int], bound: int) -> Metrics:
    versions = np.repeat([1000 - age for age in ages], list(ages.values())).astype(np.int32)
    samples = [TrainSample([], versions), TrainSample([])]
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


def test_a_group_says_something_if_its_answers_differ_from_the_greedy_one():
    def without_variance(bases: list[float]) -> float:
        samples = [
            make_sample(at % 2, [5], [7], [-1.0], score) for at, score in enumerate([1.0, 1.0, 0.0, 0.0])
        ]
        table = make_table(with_baselines(samples, bases, 2) if bases else samples, 3 if bases else 2)
        metrics = table_metrics(table, [0.0] * table.n_samples, {})
        assert (metrics["samples"], metrics["response_tokens_mean"], metrics["reward/right"]) == (
            4.0,
            1.0,
            0.5,
        )
        assert metrics.get("greedy_score") == (sum(bases) / 2 if bases else None)
        return metrics["zero_variance_fraction"]

    assert [without_variance(bases) for bases in ([], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0])] == [
        1.0,
        1.0,
        0.5,
        0.0,
    ]


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


@pytest.mark.parametrize(
    ("tokens", "limit", "whole", "with_advantage"),
    [
        ([1] * (MOST_TRAINED + 5), 10**8, MOST_TRAINED, MOST_TRAINED),
        ([900, 7, 900, 0, 7], 60_000, 4, 5),
        ([3] * 20, 12_000, 4, 11),
    ],
    ids=["many", "long", "of a small limit"],
)
def test_a_commit_has_room_for_the_samples_it_shows(
    group: Group, tokens: list[int], limit: int, whole: int, with_advantage: int
) -> None:
    n = len(tokens)
    samples = [make_sample(at, [5], [7] * count, [-1.0] * count, 1.0) for at, count in enumerate(tokens)]
    table = make_table(samples).model_copy(update={"group_ids": [f"e0-p{at}" for at in range(n)]})
    kept = KeptSamples(table, 1, 1, limit)
    sample = torch.repeat_interleave(torch.arange(n), torch.tensor(tokens))
    logprobs = torch.full([len(sample)], -1.2345678e20)
    kept.add(MicroBatch(*[torch.empty(0)] * 5, sample, list(range(n))), logprobs)
    found = kept.gather(group, [-1 / 3] * n)
    request = CommitRequest(
        request_id="12345678", replica_id="p", incarnation=1, policy_epoch=1, samples=found
    )
    assert len(request.model_dump_json()) <= limit // 2 + 200
    assert len(found) == with_advantage
    assert sum(len(one.logprobs) == tokens[one.index] for one in found) == whole
    assert kept.cut == n - whole
