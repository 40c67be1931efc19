"""The definitions of a step's metrics, sums over micro-batches, and samples that are kept as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
import pytest
import torch

from controller.ledger.assembly import build_table
from controller.ledger.group import Group as LedgerGroup
from controller.ledger.group import GroupState, SampleMeta
from policy_worker.model.micro_batch import MicroBatch, TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from policy_worker.training.metrics import Metrics, PartSums, SampleCollector, age_metrics, age_sums, table_metrics
from schema.config import Config
from schema.wire.batch import encode_batch
from schema.wire.messages import MOST_TRAINED, CommitRequest
from schema.wire.sample import Sample, encode_sample
from tests.policy_worker.material import (
    encode_step,
    make_config,
    make_sample,
    make_table,
    make_trainer,
    tiny_model,
    train_step,
    with_baselines,
)
from tests.policy_worker.reference import token_facts
from tests.support.devices import rounding


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
        samples = [make_sample(at % 2, [5], [7], [-1.0], score) for at, score in enumerate([1.0, 1.0, 0.0, 0.0])]
        table = make_table(with_baselines(samples, bases, 2) if bases else samples, 3 if bases else 2)
        metrics = table_metrics(table, [0.0] * table.n_samples, {})
        assert (metrics["samples"], metrics["response_tokens_mean"], metrics["reward/right"]) == (4.0, 1.0, 0.5)
        assert metrics.get("greedy_score") == (sum(bases) / 2 if bases else None)
        return metrics["zero_variance_fraction"]

    assert [without_variance(bases) for bases in ([], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0])] == [1.0, 1.0, 0.5, 0.0]


STEP, BOUND = 5, 4


@dataclass
class Made:
    """A sample of the step below: its generated tokens are of one version, and the policy's log-prob of each is above
    the behaviour's by `ahead`. What the controller does to its score has not been done yet."""

    ahead: list[float]
    score: float | None
    reason: str = "stop"
    version: int = STEP

    def sample(self, index: int, prompt: int) -> Sample:
        """As a replica pushes it."""
        response = [(11 * index + 7 * at) % 50 + 5 for at in range(len(self.ahead))]
        version = self.version if response else -1
        found = make_sample(index, [3] * prompt, response, [-9.0] * len(response), self.score, version)
        found.header = found.header.model_copy(update={"finish_reason": self.reason})
        ids, generated = torch.from_numpy(found.token_ids.astype("int64")), found.loss_mask == 1
        with torch.no_grad():
            logits = tiny_model().lm(input_ids=ids[None], use_cache=False).logits[0]
        chosen = torch.log_softmax(logits, 1)[:-1].gather(1, ids[1:, None])[:, 0].double().numpy()
        found.logprobs[generated] = chosen[generated[1:]] - self.ahead
        return found


MADE = [
    [  # a prompt of 2 tokens
        Made([0.5, 0.0, -0.5], 1.0),
        Made([-0.5], 0.0, version=3),
        Made([0.0] * 6, 0.0, "length"),  # masked
        Made([0.0] * 9, 0.25, "overlong", 4),
    ],
    [  # of 3: nothing in this group differs, so the first one is computed for want of others
        Made([1.0, 1.0], 0.5),
        Made([0.0] * 4, 0.5, version=1),
        Made([], None, "abort"),  # failed
        Made([0.0] * 5, None, "length"),  # cut, and its reward failed at that
    ],
    [  # of 1
        Made([0.1, 0.1], 2.0),
        Made([1.2, *[0.0] * 5, -0.1], -1.0, version=2),
        Made([0.0], 0.5, version=4),  # as good as the mean: idle
        Made([0.0] * 3, 0.5, "length"),  # masked, and idle besides
    ],
]
"""Three groups, one for each optimizer step; each sample is a micro-batch of its own."""
ADVANTAGE = {(0, 0): 2 / 3, (0, 1): -1 / 3, (1, 0): 0.0, (2, 0): 1.5, (2, 1): -1.5}
"""Of those that are computed: score less the mean of the group, in which masked samples count."""


def hand_made_step(group: RankGroup) -> Metrics:
    """What the trainer reports of it, of the table that the controller makes."""
    samples = [
        [made.sample(index, prompt) for index, made in enumerate(row)]
        for prompt, row in zip((2, 3, 1), MADE, strict=True)
    ]
    groups = [
        LedgerGroup(
            0, n, GroupState.READY, samples={s.header.index: SampleMeta.of(s.header, 0, "lease") for s in row}
        )
        for n, row in enumerate(samples)
    ]
    table = build_table(STEP, 0, 1, groups)
    answer = encode_batch(table, [encode_sample(sample) for row in samples for sample in row])
    grpo = {
        "unbiased_advantage": True, "sample_masks": {"truncated": True}, "mini_batch": 1,
        "batch_size_per_optimize": 4, "allowed_outdated_steps": BOUND,
    }  # fmt: skip
    config = make_config(grpo, {"train_batch_per_replica": 12, "optm_lr": 1e-9})
    source = BatchSource(group, lambda call: answer, 1, BOUND)
    return train_step(Grpo(config, make_trainer(config, group), source), STEP)


def test_each_metric_of_a_hand_made_step_is_what_docs_metrics_says(group: RankGroup):
    metrics = hand_made_step(group)
    computed = {place: MADE[place[0]][place[1]] for place in ADVANTAGE}
    tokens = [(x, ADVANTAGE[place]) for place, made in computed.items() for x in made.ahead]
    assert len(tokens) == 15
    losses = [-min(exp(x) * a, min(max(exp(x), 0.8), 1.2) * a) for x, a in tokens]
    losses = [min(loss, -3.0 * a) if a < 0 else loss for loss, (_, a) in zip(losses, tokens, strict=True)]
    expected = {
        "sampled": 12, "samples": 9, "tokens": 29 + 3 * 2 + 2 * 3 + 4 * 1,
        "truncated_fraction": 4 / 12, "truncated_unscored_fraction": 2 / 12, "overlong_fraction": 1 / 12,
        "failed_fraction": 2 / 12, "masked_fraction/truncated": 2 / 12, "computed_fraction": 5 / 12,
        "response_tokens_mean": (3 + 1 + 6 + 9 + 2 + 4 + 5 + 2 + 7 + 1 + 3) / 11,
        "reward_mean": (1 + 0.5 + 0.5 + 2 - 1 + 0.5 + 0.5) / 9, "reward/right": 4 / 9,
        "advantage_abs_mean": (2 / 3 + 1 / 3 + 1 / 3 + 1.5 + 1.5) / 9,
        "zero_variance_fraction": 1 / 3, "staleness_mean": (2 + 4 + 3 + 1) / 9, "staleness_max": 4,
        "staleness_tokens/0": 7 / 15, "staleness_tokens/1": 0, "staleness_tokens/2": 1 / 15,
        "staleness_tokens/3": 7 / 15, "staleness_tokens/4": 0, "staleness_tokens_mean": (2 + 7 * 3) / 15,
        "left_out_fraction": (6 + 3) / 29, "shared_fraction": 0,
        "optimizer_steps": 3, "lr": 1e-9,
        "loss": (sum(losses[:4]) / 4 + 0 + sum(losses[6:]) / 10) / 3,  # of all tokens in the loss, idle ones too
        "clip_fraction": 3 / 15, "ratio_max": exp(1.2),
        "behaviour_kl": sum(exp(x) - 1 - x for x, _ in tokens) / 15,
        "mismatch/engine_k1": 0, "mismatch/engine_ratio_max": exp(0.5), "mismatch/engine_cut": 0,
        "mismatch/engine_k3": (exp(0.5) + exp(-0.5) - 2) / 3,
        "mismatch/engine_ess": (exp(0.5) + 1 + exp(-0.5)) ** 2 / (3 * (exp(1) + 1 + exp(-1))),
        "mismatch/stale_k1": 0.5, "mismatch/stale_k3": exp(-0.5) - 0.5, "mismatch/stale_ess": 1,
        "mismatch/stale_ratio_max": exp(-0.5), "mismatch/stale_cut": 0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=rounding(2e-5), abs=2e-6)
    assert metrics.keys() - expected == {"entropy", "grad_norm", "ahead_fraction"}
    entropies = [
        entropy.item()
        for (g, index), made in computed.items()
        for _, entropy, _ in token_facts(tiny_model().lm, made.sample(index, (2, 3, 1)[g]), 1.0)
    ]
    assert metrics["entropy"] == pytest.approx(sum(entropies) / 15, rel=rounding(1e-5))


def of_step(group: RankGroup, config: Config, samples: Sequence[Sample], step: int = 0) -> Metrics:
    bound = config.grpo.allowed_outdated_steps
    source = BatchSource(group, lambda call: encode_step(samples, step=step), 1, bound)
    return train_step(Grpo(config, make_trainer(config, group), source), step)


CUT = {"sample_masks": {"truncated": True}}


def test_what_has_no_denominator_is_absent(group: RankGroup):
    samples = [
        make_sample(0, [3, 4], [5, 6], [-1.0] * 2, None, finish_reason="overlong", error=None),
        make_sample(1, [3, 4], [], [], None, version=-1),
    ]
    assert of_step(group, make_config(CUT), samples) == {
        "sampled": 2, "samples": 0, "tokens": 0, "truncated_fraction": 0.5, "truncated_unscored_fraction": 0.5,
        "overlong_fraction": 0.5, "failed_fraction": 0.5, "masked_fraction/truncated": 0, "computed_fraction": 0,
        "response_tokens_mean": 2, "optimizer_steps": 0, "lr": 1e-3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("grpo", "critic", "n_cut", "computed"),
    [
        ({"advantage_estimator": "gae"}, {"warmup_steps": 3}, 0, 0),
        (CUT, {}, 8, 0),
        ({**CUT, "batch_size_per_optimize": 4}, {}, 4, 4),
        ({**CUT, "batch_size_per_optimize": 4, "mu_iterations": 2}, {}, 4, 4),
    ],
    ids=["only the critic learns", "all masked", "a mini-batch masked", "a mini-batch masked, twice"],
)
def test_what_no_optimizer_step_computes_is_not_called_computed(
    group: RankGroup, grpo: dict[str, Any], critic: dict[str, Any], n_cut: int, computed: int
):
    samples = [
        make_sample(
            i, [3] * 9, [5, 6, 7], [-1.0] * 3, i % 2, version=1 if i < 4 else 2,
            finish_reason="length" if i < n_cut else "stop",
        )
        for i in range(8)
    ]  # fmt: skip
    config = make_config({"allowed_outdated_steps": 2, "mini_batch": 4, **grpo}, critic=critic)
    metrics = of_step(group, config, samples, 2)
    assert metrics["computed_fraction"] == computed / 8
    names = {"staleness_tokens/0", "staleness_tokens_mean", "shared_fraction", "entropy"}
    assert names & metrics.keys() == (names if computed else set())
    if computed:
        assert metrics["staleness_tokens/0"] == 1, "the masked ones are those of an older version"
        assert metrics["shared_fraction"] == 0.5625


@pytest.mark.parametrize("packed", [False, True])
def test_prompts_that_are_computed_again_are_not_called_shared(group: RankGroup, packed: bool):
    """Two groups, a micro-batch each; of the longer one sharing would spare 6 of 244 inputs."""
    samples = [make_sample(i, [3] * 30, [5 + i] * 4, [-4.0] * 4, i % 2) for i in range(4)]
    samples += [make_sample(i, [4] * 2, [5 + i] * 60, [-4.0] * 60, i % 2) for i in range(4)]
    config = make_config({"mini_batch": 4}, {"sequence_packing": packed})
    assert of_step(group, config, samples)["shared_fraction"] == 90 / (4 * 34 + 4 * 62)


def test_parts_add_up_within_an_optimizer_step_and_maxima_do_not(group: RankGroup):
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
    group: RankGroup, tokens: list[int], limit: int, whole: int, with_advantage: int
) -> None:
    n = len(tokens)
    samples = [make_sample(at, [5], [7] * count, [-1.0] * count, 1.0) for at, count in enumerate(tokens)]
    table = make_table(samples).model_copy(update={"group_ids": [f"e0-p{at}" for at in range(n)]})
    kept = SampleCollector(table, 1, 1, limit)
    sample = torch.repeat_interleave(torch.arange(n), torch.tensor(tokens))
    logprobs = torch.full([len(sample)], -1.2345678e20)
    kept.add(MicroBatch(*[torch.empty(0)] * 5, sample, list(range(n))), logprobs)
    found = kept.gather(group, [-1 / 3] * n)
    request = CommitRequest(request_id="12345678", replica_id="p", incarnation=1, policy_epoch=1, samples=found)
    assert len(request.model_dump_json()) <= limit // 2 + 200
    assert len(found) == with_advantage
    assert sum(len(one.logprobs) == tokens[one.index] for one in found) == whole
    assert kept.cut == n - whole
