"""Teachers in a step: against the naive implementation, by source, where nothing else has a gradient, however cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from policy_worker.parallel.rank_group import RankGroup
from schema.wire.sample import Sample
from tests.policy_worker.material import (
    from_sources,
    make_config,
    make_sample,
    random_samples,
    tiny_model,
    with_common_prompts,
)
from tests.policy_worker.reference import grpo_loss
from tests.policy_worker.training.test_grpo import assert_equal_gradients, trained
from tests.support.devices import rounding

LOSSES: list[dict[str, Any]] = [
    {"loss": "reverse_kl_advantage", "weight": 0.5},
    {"loss": "reverse_kl_k2"},
    {"loss": "reverse_kl_k3", "weight": 2.0},
    {"loss": "reverse_kl_full", "weight": 0.5},
    {"loss": "top_k_jsd", "top_k": 5, "beta": 0.3, "weight": 3.0},
]


def teacher(name: str = "one", **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": "unused", **keys}


def expected(
    samples: list[Sample], grpo: dict[str, Any], teachers: list[dict[str, Any]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the naive implementation."""
    model, config = tiny_model(), make_config(grpo, teacher=teachers)
    others = [(one, tiny_model(seed=2 + i).lm) for i, one in enumerate(config.teacher)]
    frozen = tiny_model(seed=1).lm if config.has_reference else None
    loss = grpo_loss(model.lm, samples, config.grpo, frozen=frozen, teachers=others)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("keys", LOSSES, ids=lambda keys: keys["loss"])
def test_equals_an_independent_implementation(group: RankGroup, keys: dict[str, Any]) -> None:
    samples, teachers = with_common_prompts(random_samples(12, n_masked=1)), [teacher(**keys)]
    grpo = {"kl_beta": 0.1, "kl_type": "k2", "epsilon_high": 0.28}
    metrics, gradients = trained(group, samples, {"mini_batch": 5, **grpo}, teacher=teachers)
    loss, wanted = expected(samples, grpo, teachers)
    assert metrics["loss"] == pytest.approx(loss, rel=rounding(1e-5))
    assert_equal_gradients(wanted, gradients, 5e-5)
    assert metrics["teacher/one/tokens"] == sum(s.header.response_tokens for s in samples[1:])


def test_several_teachers_by_source_and_none(group: RankGroup) -> None:
    """The first group has two teachers, the second one, the third none."""
    samples = from_sources(random_samples(12), ["math", "code", "talk"])
    teachers = [
        teacher("math", source=["math"], loss="reverse_kl_full"),
        teacher("both", source=["math", "code"], loss="top_k_jsd", top_k=3),
    ]
    metrics, gradients = trained(group, samples, {"mini_batch": 5}, teacher=teachers)
    loss, wanted = expected(samples, {}, teachers)
    assert metrics["loss"] == pytest.approx(loss, rel=rounding(1e-5))
    assert_equal_gradients(wanted, gradients, 5e-5)
    _, alone = trained(group, samples, {"mini_batch": 5}, teacher=[teacher(source=["other"])])
    _, without = trained(group, samples, {"mini_batch": 5})
    assert_equal_gradients(without, alone)


@pytest.mark.parametrize("keys", LOSSES, ids=lambda keys: keys["loss"])
def test_samples_without_an_advantage_are_taught(group: RankGroup, keys: dict[str, Any]) -> None:
    """All scores are alike, as with rewards of weight 0: only teachers are left, and no sample is skipped for it."""
    samples = [make_sample(i, [4, 5, 6], [7 + i, 9, 11], [-4.0, -4.5, -4.2], 0.0) for i in range(8)]
    wide = {"epsilon_low": 0.9, "epsilon_high": 9.0}
    metrics, gradients = trained(group, samples, wide, teacher=[teacher(**keys)])
    loss, wanted = expected(samples, wide, [teacher(**keys)])
    assert metrics["computed_fraction"] == 1.0
    assert metrics["loss"] == pytest.approx(loss, rel=rounding(1e-5))
    assert_equal_gradients(wanted, gradients, 5e-5)
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-3
    skipped, _ = trained(group, samples, {}, teacher=[teacher(**{**keys, "weight": 0.0})])
    assert skipped["computed_fraction"] < 0.5, "a teacher of weight 0 is only measured"


@pytest.mark.parametrize("keys", LOSSES, ids=lambda keys: keys["loss"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_cut_changes_the_gradient(group: RankGroup, keys: dict[str, Any], packed: bool) -> None:
    samples = from_sources(with_common_prompts(random_samples(12, n_masked=2)), ["math", "code"])
    both = [teacher(source=["math"], **keys), teacher("two", source=["code"], loss="reverse_kl_advantage")]
    train = {"sequence_packing": packed}
    _, whole = trained(group, samples, {"mini_batch": 12}, teacher=both)
    cut = [{**one, "mini_batch": 2} for one in both]
    _, parts = trained(group, samples, {"max_token_len_per_mini_batch": 30}, train, teacher=cut)
    assert_equal_gradients(whole, parts, 1e-5)


def test_metrics_are_means_per_token(group: RankGroup) -> None:
    samples = random_samples(8)
    metrics, _ = trained(group, samples, {}, teacher=[teacher(weight=0.0)], train={"metrics_of_all_samples": True})
    lm, gap, n = tiny_model(seed=2).lm, 0.0, 0
    with torch.no_grad():
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids.astype("int64"))
            q = torch.log_softmax(lm(input_ids=ids[None]).logits[0], 1)
            for i in range(1, len(ids)):
                if sample.loss_mask[i]:
                    gap, n = gap + float(sample.logprobs[i]) - float(q[i - 1, ids[i]]), n + 1
    assert metrics["teacher/one/kl"] == pytest.approx(gap / n, rel=rounding(1e-5))
    assert metrics["teacher/one/tokens"] == n
