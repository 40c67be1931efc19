"""Whatever the algorithm, a step is the same number however it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from policy_worker.model.logits.logprobs import TokenOutputs
from policy_worker.model.micro_batch import MicroBatch
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.training.columns import LEFT_OUT
from policy_worker.training.grpo import Grpo
from schema.config import GrpoConfig
from schema.wire.sample import Sample
from tests.policy_worker.material import (
    cut_short,
    make_config,
    random_samples,
    tiny_model,
    with_common_prompts,
    with_shared_prefixes,
)
from tests.policy_worker.reference import grpo_loss
from tests.policy_worker.training.cases import algorithm, cut
from tests.policy_worker.training.test_grpo import trained
from tests.support.devices import rounding
from tests.support.effort import examples

NAIVE = {
    "variant": ("grpo", "dapo", "gspo"),
    "advantage_estimator": ("grpo",),
    "whiten_advantages": (None, False),
    "loss_type": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"),
}
"""What the naive implementation knows."""


@pytest.fixture(autouse=True, scope="module")
def in_double() -> Iterator[None]:
    """A sum over the tokens of a step that cancels out is rounded by more than the bounds in float32."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def is_naive(options: dict[str, Any], grpo: GrpoConfig) -> bool:
    in_reward = grpo.kl_in_reward.beta and (grpo.recomputes_old or grpo.positive_nll_coef)
    filtered = options["min_filter_prefix_tokens"] is not None
    return not (in_reward or filtered) and all(options[name] in known for name, known in NAIVE.items())


def samples_of(random: Random, options: dict[str, Any]) -> list[Sample]:
    found = random_samples(12, random.randrange(99), n_masked=random.choice([0, 1, 3]))
    found = with_common_prompts(cut_short(found))
    return with_shared_prefixes(found) if options["min_filter_prefix_tokens"] else found


def share_nothing(algorithm: Grpo) -> None:
    trainer = algorithm._trainer
    trainer.least_spared = None
    trainer.mesh = trainer.mesh._replace(layout=replace(trainer.mesh.layout, least_spared=None))


def plant_nan(algorithm: Grpo) -> None:
    """Where a token is left out, the model says NaN."""
    forward = algorithm._trainer.forward

    def planted(batch: MicroBatch, **asked: Any) -> TokenOutputs:
        out = forward(batch, **asked)
        if LEFT_OUT not in batch.columns:
            return out
        nan = torch.full_like(out.logprobs, torch.nan)
        return out._replace(logprobs=torch.where(batch.columns[LEFT_OUT] > 0, nan, out.logprobs))

    algorithm._trainer.forward = planted


@pytest.mark.scaled
@settings(max_examples=examples(12), deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_no_way_to_compute_a_step_changes_it(group: RankGroup, random: Random):
    options = algorithm(random)
    samples, (size, train) = samples_of(random, options), cut(random)
    note(f"{options}, {size}, {train}")
    whole, expected = trained(
        group, samples, {**options, "mini_batch": 12}, {"metrics_of_all_samples": True}, share_nothing
    )
    metrics, gradients = trained(group, samples, {**options, **size}, train, plant_nan)
    assert gradients.keys() == expected.keys(), "both train, or neither has a token that counts"
    if not expected:
        return
    same = {"loss", "grad_norm"} if gradients else set()
    if train["metrics_of_all_samples"]:
        same |= whole.keys() & {"entropy", "behaviour_kl", "clip_fraction", "ratio_max"}
    for name in same:
        assert metrics[name] == pytest.approx(whole[name], rel=rounding(1e-4), abs=1e-6), name
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 0.05)
        assert (gradients[name] - gradient).abs().max().item() <= rounding(3e-5) * scale, name
    model, config = tiny_model(), make_config(options)
    if is_naive(options, config.grpo):
        frozen = tiny_model(seed=1).lm if config.has_reference else None
        grpo_loss(model.lm, samples, config.grpo, frozen=frozen).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            scale = max(parameter.grad.abs().max().item(), 0.05)
            assert (expected[name] - parameter.grad.cpu()).abs().max().item() <= rounding(1e-4) * scale, name
