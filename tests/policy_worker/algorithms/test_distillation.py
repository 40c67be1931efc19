"""Formulas of distillation against numbers made by hand and against the definition, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from policy_worker.algorithms.distillation import reverse_kl_advantage, reverse_kl_estimate, top_k_jsd
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import logprobs_at, top_tokens

K, V, D = 7, 11, 5


def logs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_advantage_by_hand() -> None:
    found = reverse_kl_advantage(torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.5, -0.5, -9999.0]))
    assert found.tolist() == [-0.5, 1.5, -20.0]


@pytest.mark.parametrize(
    ("loss", "value", "slope"), [("reverse_kl_k2", 0.5, 1.0), ("reverse_kl_k3", math.exp(-1), None)]
)
def test_estimates_by_hand(loss: str, value: float, slope: float | None) -> None:
    """log π − log q = 1."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = reverse_kl_estimate(logprobs, torch.tensor([-2.0], dtype=torch.float64), loss)
    found.sum().backward()
    assert found.item() == pytest.approx(value, rel=1e-12)
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(-1) if slope is None else slope, rel=1e-12)


def test_estimates_agree_with_the_full_kl_in_the_mean() -> None:
    """Over all tokens with their probabilities: k3 in its value, k2 in its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(V, dtype=torch.float64, generator=generator).mul_(0.5).requires_grad_()
    q = torch.randn(V, dtype=torch.float64, generator=generator).mul_(0.5).log_softmax(0)
    p = logits.log_softmax(0)
    full = (p.exp() * (p - q)).sum()
    (expected,) = torch.autograd.grad(full, logits, retain_graph=True)
    weights = p.exp().detach()
    k2 = (weights * reverse_kl_estimate(p, q, "reverse_kl_k2")).sum()
    (slope,) = torch.autograd.grad(k2, logits, retain_graph=True)
    assert torch.allclose(slope, expected, rtol=1e-10)
    assert torch.allclose((weights * reverse_kl_estimate(p, q, "reverse_kl_k3")).sum(), full, rtol=1e-10)


def test_a_token_that_the_teacher_rules_out_is_bounded_and_keeps_its_gradient() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    reverse_kl_estimate(logprobs, torch.tensor([-9999.0]), "reverse_kl_k2").sum().backward()
    assert logprobs.grad.item() == 20.0


def test_divergence_by_hand() -> None:
    """Teacher (1/2, 1/4, rest 1/4), policy (1/4, 1/4, rest 1/2), half and half: m = (3/8, 1/4, 3/8)."""
    found = top_k_jsd(logs(0.25, 0.25), logs(0.5, 0.25), 0.5).item()
    q = 0.5 * math.log(0.5 / 0.375) + 0.25 * math.log(0.25 / 0.375)
    p = 0.25 * math.log(0.25 / 0.375) + 0.5 * math.log(0.5 / 0.375)
    assert found == pytest.approx(0.5 * q + 0.5 * p, rel=1e-12)


def test_divergence_tends_to_the_forward_and_the_reverse_kl() -> None:
    p, q = (0.25, 0.25, 0.5), (0.5, 0.25, 0.25)
    forward = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    reverse = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    policy, teacher = logs(*p[:2]), logs(*q[:2])
    assert top_k_jsd(policy, teacher, 1e-6).item() / 1e-6 == pytest.approx(forward, rel=1e-4)
    assert top_k_jsd(policy, teacher, 1 - 1e-6).item() / 1e-6 == pytest.approx(reverse, rel=1e-4)


@pytest.mark.parametrize("k", [1, 3, V])
@pytest.mark.parametrize("chunk_elements", [V, 3 * V, 10**6])
def test_divergence_and_its_gradient_equal_the_definition(k: int, chunk_elements: int) -> None:
    """In chunks or at once: as from all logits, and with k = V as over the whole vocabulary without a rest."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    hidden, weight = draw(K, D).requires_grad_(), draw(V, D).requires_grad_()
    states, matrix, beta, temperature = draw(K, D), draw(V, D), 0.3, 0.7
    top = top_tokens(states, Head(matrix), k, temperature, chunk_elements)
    ours = logprobs_at(hidden, Head(weight), top.ids, temperature, chunk_elements)
    found = top_k_jsd(ours, top.logprobs, beta)
    (found * torch.arange(1, K + 1)).sum().backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None

    p = torch.softmax(hidden @ weight.T / temperature, 1)
    q = torch.softmax(states @ matrix.T / temperature, 1)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(K):
        chosen = sorted(range(V), key=lambda v: -float(q[i, v]))[:k]
        outcomes = [(p[i, v], q[i, v]) for v in chosen]
        if k < V:
            others = [v for v in range(V) if v not in chosen]
            outcomes.append((p[i, others].sum(), q[i, others].sum()))
        jsd = sum(
            beta * b * torch.log(b / (beta * b + (1 - beta) * a))
            + (1 - beta) * a * torch.log(a / (beta * b + (1 - beta) * a))
            for a, b in outcomes
        )
        assert found[i].item() == pytest.approx(jsd.item(), rel=1e-6, abs=1e-9)
        total = total + (i + 1) * jsd
    total.backward()
    for mine, expected in zip(grads, (hidden.grad, weight.grad), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-6, atol=1e-9)


def test_no_tokens_are_no_error() -> None:
    empty, weight = torch.zeros(0, D), torch.randn(V, D).requires_grad_()
    top = top_tokens(empty, Head(weight), 3)
    assert top.ids.shape == (0, 3)
    logprobs_at(empty, Head(weight), top.ids).sum().backward()
    assert not weight.grad.any()
