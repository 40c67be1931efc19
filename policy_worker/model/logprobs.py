"""Log-probs of given tokens, and the entropy there, straight from hidden states and the output matrix.

    z = h Wᵀ / T,   log π(y) = z_y − log Σ exp z,   H = log Σ exp z − Σ softmax(z) z

The logits [K, V] are the largest tensor of training (a vocabulary of 150,000 makes 10 tokens of them as large as
a layer's activations for 500). They are computed for a chunk of tokens at a time and computed again in backward:

    ∂ log π(y) / ∂z = 1[y] − p            ∂H / ∂z = −p (log p + H)

The same for the KL to another model over the whole vocabulary:

    KL = Σ p (log p − log q),   ∂KL / ∂z = p (log p − log q − KL)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**25
"""Logits in memory at once (128 MiB in float32): large enough for full-speed products, small next to a model."""


class TokenOutputs(NamedTuple):
    """Per token, [K]: log-prob of the label, entropy of the distribution, whether the label was the likeliest.

    kl: to `Beside`, where there is one. hidden: the states that all of it comes from, [K, D], where asked for.
    more: what the caller computes of states and output matrix (see `PolicyModel.forward`).
    """

    logprobs: Tensor
    entropy: Tensor
    correct: Tensor
    kl: Tensor | None = None
    hidden: Tensor | None = None
    more: Any = ()


class TopTokens(NamedTuple):
    """The likeliest tokens of each position, the first one first: log-probs and ids, [K, k]."""

    logprobs: Tensor
    ids: Tensor


class Beside(NamedTuple):
    """Another model's distributions at the same tokens: its hidden states [K, D'] and output matrix [V, D']."""

    hidden: Tensor
    weight: Tensor


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenOutputs:
    """Log-probs (with gradient), entropy (with gradient) and correctness of `labels`.

    Args:
        hidden: last hidden states of the positions that predict, [K, D].
        weight: output matrix, [V, D]. Products are in its dtype, everything after in float32 (float64 for
            float64 input).
        labels: int64 [K].
        temperature: that the labels were sampled at, > 0.
    """
    chunk = max(1, chunk_elements // weight.shape[0])
    return TokenOutputs(*_TokenLogprobs.apply(hidden, weight, labels, temperature, chunk))


def token_kl(
    hidden: Tensor,
    weight: Tensor,
    beside: Beside,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """KL of each token's distribution to the other model's, over the whole vocabulary, with gradient, [K].

    Arguments as of `token_logprobs`, for both models. Two chunks of logits are in memory at once, of half the size.
    """
    if not len(hidden):
        return hidden.sum(1).to(_accurate(hidden.dtype))
    chunk = max(1, chunk_elements // (2 * weight.shape[0]))
    other = Beside(beside.hidden.to(beside.weight.dtype), beside.weight)
    found: Tensor = _TokenKl.apply(hidden, weight, *other, temperature, chunk)
    return found


class _TokenKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        states: Tensor,
        matrix: Tensor,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        kl = hidden.new_empty(len(hidden), dtype=_accurate(hidden.dtype))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_p = _log_softmax(hidden[part], weight, temperature)
            difference = log_p - _log_softmax(states[part], matrix, temperature)
            kl[part] = torch.linalg.vecdot(log_p.exp_(), difference)
        ctx.save_for_backward(hidden, weight, states, matrix, kl)
        ctx.temperature, ctx.chunk = temperature, chunk
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        hidden, weight, states, matrix, kl = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=kl.dtype)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _log_softmax(hidden[part], weight, ctx.temperature)
            slope = (log_p - _log_softmax(states[part], matrix, ctx.temperature)).sub_(kl[part, None])
            grad = slope.mul_(log_p.exp_()).mul_(grad_kl[part, None] / ctx.temperature).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight.add_(grad.T @ hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


@torch.no_grad()
def top_tokens(
    hidden: Tensor, weight: Tensor, k: int, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> TopTokens:
    """The k likeliest tokens of each position. Other arguments as of `token_logprobs`."""
    chunk = max(1, chunk_elements // weight.shape[0])
    found = [
        _log_softmax(part, weight, temperature).topk(k, dim=1) for part in hidden.split(chunk)
    ]  # of no positions one empty part
    return TopTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def logprobs_at(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Log-probs, with gradient, of several tokens at each position, [K, k].

    ids: int64 [K, k], different ones at each position. Other arguments as of `token_logprobs`.
    """
    chunk = max(1, chunk_elements // weight.shape[0])
    found: Tensor = _LogprobsAt.apply(hidden, weight, ids, temperature, chunk)
    return found


class _LogprobsAt(torch.autograd.Function):
    """∂ log π(y_j) / ∂z = 1[y_j] − p, so of all of them together Σ_j g_j 1[y_j] − p Σ_j g_j."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, chunk: int
    ) -> Tensor:
        found = hidden.new_empty(ids.shape, dtype=_accurate(hidden.dtype))
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            found[part] = _log_softmax(hidden[part], weight, temperature).gather(1, ids[part])
        ctx.save_for_backward(hidden, weight, ids)
        ctx.temperature, ctx.chunk = temperature, chunk
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, ids = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype)
        for start in range(0, len(ids), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            slope = _log_softmax(hidden[part], weight, ctx.temperature).exp_()
            slope.mul_(-grad[part].sum(1, keepdim=True))
            rows = torch.arange(len(slope), device=slope.device)[:, None]
            slope[rows, ids[part]] += grad[part]  # deterministic, unlike scatter_add: no id is there twice
            slope = slope.div_(ctx.temperature).to(weight.dtype)
            grad_hidden[part] = slope @ weight
            grad_weight.add_(slope.T @ hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = hidden.new_empty(len(labels), dtype=_accurate(hidden.dtype))
        entropy, correct = torch.empty_like(logprobs), torch.empty_like(labels, dtype=torch.bool)
        log_p = None
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            log_p = _log_softmax(hidden[part], weight, temperature)
            logprobs[part] = log_p.gather(1, labels[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
            correct[part] = logprobs[part] >= log_p.amax(1)
        # A single chunk is within the budget anyway: kept, it saves backward one product.
        ctx.save_for_backward(hidden, weight, labels, entropy, log_p if len(labels) <= chunk else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(correct)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, correct

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        hidden, weight, labels, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype)
        for start in range(0, len(labels), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _log_softmax(hidden[part], weight, ctx.temperature) if kept is None else kept
            grad = log_p.exp()
            if grad_entropy is None:
                grad.mul_(-grad_logprobs[part, None])  # type: ignore[index]
            else:
                slope = (log_p + entropy[part, None]).mul_(grad_entropy[part, None])
                grad.mul_(slope if grad_logprobs is None else slope.add_(grad_logprobs[part, None])).neg_()
            if grad_logprobs is not None:
                rows = torch.arange(grad.shape[0], device=grad.device)
                grad[rows, labels[part]] += grad_logprobs[
                    part
                ]  # deterministic on GPUs too, unlike scatter_add
            grad = (grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight.add_(grad.T @ hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[chunk, V], float32 or float64."""
    logits = (hidden @ weight.T).to(_accurate(hidden.dtype))
    return torch.log_softmax(logits if temperature == 1.0 else logits.div_(temperature), dim=1)
