from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from policy_worker.algorithms.losses import (
    POLICY_LOSSES,
    Clip,
    LossType,
    PolicyTokens,
    TokenLoss,
    masked_max,
    masked_sum,
    policy_loss,
    policy_loss_of,
    segment_mean,
)
from policy_worker.algorithms.mismatch import mismatch_sums
from policy_worker.algorithms.objective import (
    Correction,
    KlType,
    LossConfig,
    Normalizers,
    adapted,
    k3,
    kl_penalty,
    policy_objective,
    token_weights,
)
from policy_worker.errors import OwnCodeFailedError, SettingsError

CLIP = Clip(low=0.2, high=0.28, dual=3.0)


def tokens(ratio: list[float], advantage: list[float], **change: object) -> PolicyTokens:
    old = torch.full((len(ratio),), -2.0, dtype=torch.float64)
    facts = {
        "logprobs": old + torch.tensor(ratio, dtype=torch.float64).log(),
        "old_logprobs": old,
        "advantages": torch.tensor(advantage, dtype=torch.float64),
        "mask": torch.ones(len(ratio), dtype=torch.bool),
        "sample": torch.zeros(len(ratio), dtype=torch.int64),
        "n_samples": 1,
        "entropy": torch.zeros(len(ratio), dtype=torch.float64),
        "sample_tokens": torch.ones(len(ratio), dtype=torch.float64),
        "positive": torch.zeros(len(ratio), dtype=torch.bool),
    }
    return PolicyTokens(**(facts | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.56, True),  # 1.28 * 2
        (0.5, 2.0, -1.0, False),  # a good token that became unlikely is pulled back
        (0.5, -1.0, 0.8, True),  # 0.8 * 1
        (1.5, -1.0, 1.5, False),
        (5.0, -1.0, 3.0, True),  # dual clip: 3 * 1
        (5.0, 1.0, -1.28, True),
        (1.0, 0.0, 0.0, False),
    ],
)
def test_grpo_by_hand(ratio: float, advantage: float, loss: float, clipped: bool):
    found = policy_loss_of("grpo").loss_fn(tokens([ratio], [advantage]), CLIP)
    assert found.loss.item() == pytest.approx(loss, rel=1e-12)
    assert found.ratio.item() == pytest.approx(ratio, rel=1e-12)
    assert found.clipped.item() is clipped


@pytest.mark.parametrize(
    ("variant", "clip", "ratio", "advantage", "loss", "gradient"),
    [
        ("dapo", CLIP, 1.1, 2.0, -2.2, -2.2),
        ("dapo", CLIP, 1.5, 2.0, -2.56, 0.0),
        ("dapo", CLIP, 0.7, -1.0, 0.8, 0.0),
        ("dapo", CLIP, 4.0, -1.0, 3.0, 0.0),
        ("cispo", CLIP, 1.5, 2.0, -1.28 * 2 * (math.log(1.5) - 2), -1.28 * 2),
        ("cispo", CLIP, 0.5, -1.0, 0.8 * (math.log(0.5) - 2), 0.8),
        ("cispo", Clip(-1.0, -1.0, 3.0), 5.0, 1.0, -5 * (math.log(5) - 2), -5.0),
        ("reinforce", CLIP, 1.5, 2.0, -2 * (math.log(1.5) - 2), -2.0),
        ("grpo", Clip(0.2, 0.2, 3.0, rho=2.0), 1.5, 2.0, -3.0, -3.0),
        ("grpo", Clip(0.2, 0.2, 3.0, rho=2.0), 2.5, 2.0, -4.0, 0.0),
        ("grpo", Clip(0.2, 0.2, 3.0, rho=2.0), 2.5, -2.0, 4.0, 0.0),
        ("grpo", Clip(0.2, -1.0, 3.0), 9.0, 1.0, -9.0, -9.0),  # open above
        ("grpo", Clip(-1.0, 0.2, 30.0), 0.1, -1.0, 0.1, 0.1),  # open below
        ("sapo", CLIP, 1.0, 2.0, -4.0, -2.0),  # f(1) = 2 / tau, f'(1) = 1
        ("sapo", CLIP, 1.0, -1.0, 2 / 1.05, 1.0),
    ],
)
def test_other_losses_by_hand(variant: str, clip: Clip, ratio: float, advantage: float, loss: float, gradient: float):
    facts = tokens([ratio], [advantage])
    facts.logprobs.requires_grad_()
    found = policy_loss_of(variant).loss_fn(facts, clip).loss
    found.sum().backward()
    assert found.item() == pytest.approx(loss, rel=1e-9)
    assert facts.logprobs.grad is not None
    assert facts.logprobs.grad.item() == pytest.approx(gradient, rel=1e-9)


def test_geo_mean_by_hand():
    # log-ratios log 2 (clipped to 0.28) and log 0.5 (kept: a good token that became unlikely)
    facts = tokens([2.0, 0.5], [1.0, 1.0])
    facts.logprobs.requires_grad_()
    found = policy_loss_of("geo_mean").loss_fn(facts, CLIP)
    expected = -math.exp((0.28 + math.log(0.5)) / 2)
    assert found.loss.tolist() == pytest.approx([expected, expected], rel=1e-9)
    (found.loss.sum() / 2).backward()
    assert facts.logprobs.grad is not None
    assert facts.logprobs.grad.tolist() == pytest.approx([0.0, expected / 2], rel=1e-9)
    assert found.clipped.tolist() == [True, False]
    idle = policy_loss_of("geo_mean").loss_fn(tokens([2.0, 0.5, 1.5, 0.5], [0.0, 0.0, 1.0, -1.0]), CLIP)
    assert idle.clipped.tolist() == [False, False, True, True], "an advantage of 0 points to no side"


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [("k1", 0.5, 1.0), ("abs", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_kl_by_hand(kind: KlType, value: float, slope: float):
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = kl_penalty(logprobs, torch.tensor([-1.5], dtype=torch.float64), kind)
    found.sum().backward()
    assert found.item() == pytest.approx(value, rel=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-12)


def test_the_log_ratio_is_bounded():
    batch = tokens([1.0], [1.0], logprobs=torch.tensor([0.0]), old_logprobs=torch.tensor([-80.0]))
    found = policy_loss_of("grpo").loss_fn(batch, Clip(0.2, 1e30, 3.0))
    assert found.ratio.item() == pytest.approx(math.exp(20), rel=1e-5)


def test_gspo_by_hand():
    # two samples: log ratios (0.1, 0.3) and (-0.5,); the sequence ratios are e^0.2 and e^-0.5
    batch = tokens(
        [math.exp(0.1), math.exp(0.3), math.exp(-0.5)], [1.0, 1.0, -2.0],
        sample=torch.tensor([0, 0, 1]), n_samples=2,
    )  # fmt: skip
    found = policy_loss_of("gspo").loss_fn(batch, Clip(0.3, 0.3, 3.0))
    assert found.ratio.tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(-0.5)], rel=1e-12)
    assert found.loss.tolist() == pytest.approx([-math.exp(0.2)] * 2 + [1.4], rel=1e-12)  # 0.7 * 2
    assert found.clipped.tolist() == [False, False, True]


@pytest.mark.parametrize("kl_type", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("variant", POLICY_LOSSES)
def test_nothing_outside_of_the_mask_matters(variant: str, kl_type: KlType):
    rng = np.random.default_rng(0)
    names = ("logprobs", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "entropy")
    values = {name: rng.normal(-2, 0.3, 6) for name in names}
    config = LossConfig(variant, CLIP, "token-mean", None, 0.1, 0.1, 0.1, kl_type, unbiased_kl_estimate=True)
    mask = torch.tensor([True, True, False, True, False, True])
    results = []
    for rubbish in (7.0, math.nan):
        vectors = {name: torch.tensor(np.where(mask, v, rubbish)) for name, v in values.items()}
        logprobs = vectors.pop("logprobs").requires_grad_()
        sample = torch.tensor([0, 0, 0, 1, 1, 1])
        batch = tokens([1.0] * 6, [1.0] * 6, logprobs=logprobs, mask=mask, sample=sample, n_samples=2, **vectors)
        batch = replace(batch, weights=Correction("sequence", 2.0).weights(batch))
        loss, parts = policy_objective(batch, Normalizers(tokens=4, samples=2), config)
        loss.backward()
        assert logprobs.grad is not None
        results.append((loss.item(), logprobs.grad.tolist(), {name: part.item() for name, part in parts.items()}))
    assert results[0] == results[1]
    assert results[0][1][2] == results[0][1][4] == 0.0


def test_an_adaptive_coefficient_by_hand():
    assert adapted(0.1, 0.2, 0.1, 100, 1000) == pytest.approx(0.1 * 1.02)
    assert adapted(0.1, 0.0, 0.1, 100, 1000) == pytest.approx(0.1 * 0.98)
    assert adapted(0.1, 0.11, 0.1, 100, 1000) == pytest.approx(0.1 * 1.01)
    # with five horizons of samples in a step it would be 0, and with more it would be negative
    assert adapted(0.1, 0.0, 0.1, 5000, 1000) == pytest.approx(0.08)


def test_k3_by_hand():
    log_p = torch.tensor([-1.0, -1.0, -60.0, -6.0, -60.0], dtype=torch.float64)
    log_q = torch.tensor([-1.0, -1.5, -100.0, -1.0, -1.0], dtype=torch.float64)
    expected = [0.0, math.exp(-0.5) + 0.5 - 1, math.exp(-20) + 19, math.exp(5) - 6, math.exp(20) - 21]
    assert k3(log_p, log_q).tolist() == pytest.approx(expected, rel=1e-12)
    assert kl_penalty(log_p, log_q, "k3").tolist() == pytest.approx([*expected[:2], 10.0, 10.0, 10.0])


def test_metrics_of_kl_are_not_cut():
    """One of two tokens is e^5 times likelier than it was: 10 is what a loss would see of it at most."""
    facts = tokens([math.exp(5), 1.0], [1.0, 1.0])
    facts = replace(facts, ref_logprobs=facts.logprobs + facts.logprobs - facts.old_logprobs)
    _, parts = policy_objective(facts, Normalizers(tokens=2, samples=1), LossConfig("grpo", CLIP, "token-mean"))
    sums = mismatch_sums(facts.logprobs, facts.old_logprobs, {"engine": facts.mask}, 2.0)
    for found in (parts["behaviour_kl"], parts["reference_kl"], sums["engine_k3"]):
        assert found.item() == pytest.approx(math.exp(5) - 6)


def test_k3_keeps_its_digits_near_zero():
    found = k3(torch.zeros(1), torch.full((1,), 1e-4))
    assert found.item() == pytest.approx(5e-9, rel=1e-3)


def test_a_loss_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"variant = 'plain' is not .* known are grpo, dapo, gspo"):
        policy_loss_of("plain")
    monkeypatch.setitem(POLICY_LOSSES, "plain", POLICY_LOSSES["grpo"])  # so that it is gone after the test

    @policy_loss("plain", loss_type="seq-mean-token-sum")
    def plain(tokens: PolicyTokens, clip: Clip) -> TokenLoss:
        return TokenLoss(-tokens.advantages, tokens.advantages, tokens.mask)

    config = LossConfig("plain", CLIP, "token-mean")
    loss, _ = policy_objective(tokens([1.0] * 4, [3.0] * 4), Normalizers(tokens=4, samples=2), config)
    assert loss.item() == -6.0


# ---- token weights

LENGTHS = torch.tensor([2.0, 2.0, 3.0, 3.0, 3.0])  # a sample of two tokens and one of three
NORM = Normalizers(tokens=5, samples=2)


@pytest.mark.parametrize(
    ("loss_type", "most", "expected"),
    [
        ("token-mean", None, [1 / 5] * 5),
        ("token-sum", None, [1.0] * 5),
        ("seq-mean-token-sum", None, [1 / 2] * 5),
        ("seq-mean-token-mean", None, [1 / 4] * 2 + [1 / 6] * 3),
        ("seq-mean-token-mean", 10, [1 / 20] * 5),
    ],
)
def test_token_weights_by_hand(loss_type: LossType, most: int | None, expected: list[float]):
    assert token_weights(loss_type, LENGTHS, NORM, max_tokens=most).tolist() == pytest.approx(expected)


def test_nothing_to_count_divides_by_nothing():
    weights = token_weights("token-mean", torch.zeros(0), Normalizers(tokens=0, samples=0))
    assert weights.tolist() == []


# ---- masks

NAN = math.nan


def test_values_outside_of_the_mask_never_matter():
    x = torch.tensor([1.0, NAN, 3.0, math.inf], requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    total = masked_sum(x, mask)
    total.backward()
    assert total.item() == 4.0
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_empty_masks_give_zero():
    x = torch.tensor([NAN, 1.0])
    nothing = torch.tensor([False, False])
    assert masked_sum(x, nothing).item() == 0.0
    assert masked_max(x, nothing).item() == 0.0
    assert masked_max(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).item() == 0.0


def test_maximum_under_the_mask():
    assert masked_max(torch.tensor([2.0, 9.0, 3.0]), torch.tensor([True, False, True])).item() == 3.0


def test_segment_means():
    x = torch.tensor([1.0, 3.0, NAN, 10.0, 7.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, False])
    segment = torch.tensor([0, 0, 0, 2, 2])
    means = segment_mean(x, mask, segment, 4)
    assert means.tolist() == [2.0, 0.0, 10.0, 0.0]
    assert means.dtype == torch.float64


OWN = """
import torch

def good(tokens, clip):
    return -tokens.advantages * tokens.logprobs

def short(tokens, clip):
    return tokens.logprobs[:1]

def broken(tokens, clip):
    return tokens.logprobs * float("nan")

def detached(tokens, clip):
    return tokens.logprobs.detach()

def other(tokens, clip):
    return 1.0

def raises(tokens, clip):
    raise KeyError("x")
"""


def test_a_loss_of_ones_own_from_a_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text(OWN)
    facts = tokens([1.5, 1.0], [2.0, 1.0])
    facts.logprobs.requires_grad_()

    def run(name: str) -> TokenLoss:
        return policy_loss_of(f"{tmp_path}/mine.py:{name}").loss_fn(facts, CLIP)

    assert run("good").loss.tolist() == (-facts.advantages * facts.logprobs).tolist()
    assert run("good").ratio.tolist() == pytest.approx([1.5, 1.0])
    faults = {
        "short": r"returned shape \[1\] for 2 tokens",
        "broken": "a loss that is NaN",
        "detached": "without a gradient",
        "other": "returned float, not a tensor",
        "raises": "failed on 2 tokens: KeyError",
    }
    for name, fault in faults.items():
        with pytest.raises(OwnCodeFailedError, match=fault):
            run(name)
    with pytest.raises(SettingsError, match="no file"):
        policy_loss_of(f"{tmp_path}/none.py:loss")
