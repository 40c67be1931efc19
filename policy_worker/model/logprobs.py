"""Log-probs of given tokens, and the entropy there, straight from hidden states and the output matrix.

    z = h Wᵀ / T,   log π(y) = z_y − log Σ exp z,   H = log Σ exp z − Σ softmax(z) z

The logits [K, V] are the largest tensor of training (a vocabulary of 150,000 makes 10 tokens of them as large as
a layer's activations for 500). They are computed for a chunk of tokens at a time and computed again in backward:

    ∂ log π(y) / ∂z = 1[y] − p            ∂H / ∂z = −p (log p + H)

The same for the KL to another model over the whole vocabulary:

    KL = Σ p (log p − log q),   ∂KL / ∂z = p (log p − log q − KL)

Where tokens were drawn from another distribution than this one, z is what `policy_worker.model.drawn` makes of the
logits. Ids that could not be drawn have probability 0 and a log-prob of `LEAST` instead of −∞, so that 0 · log 0 = 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from policy_worker.model.drawn import Drawn

CHUNK_ELEMENTS = 2**25
"""Logits in memory at once (128 MiB in float32): large enough for full-speed products, small next to a model."""
LEAST = -1e30


class TokenOutputs(NamedTuple):
    """Per token, [K]: log-prob of the label, entropy of the distribution, whether the label was the likeliest.

    kl: to `Beside`, where there is one. hidden: the states that all of it comes from, [K, D], where asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    correct: Tensor
    kl: Tensor | None = None
    hidden: Tensor | None = None


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
    drawn: Drawn | None = None,
) -> TokenOutputs:
    """Log-probs (with gradient), entropy (with gradient) and correctness of `labels`.

    Args:
        hidden: last hidden states of the positions that predict, [K, D].
        weight: output matrix, [V, D]. Products are in its dtype, everything after in float32 (float64 for
            float64 input).
        labels: int64 [K].
        temperature: that the labels were sampled at, > 0.
        drawn: what else the labels were sampled with.
    """
    chunk = _chunk(chunk_elements, weight, 1, drawn)
    return TokenOutputs(*_TokenLogprobs.apply(hidden, weight, labels, temperature, chunk, drawn))


def token_kl(
    hidden: Tensor,
    weight: Tensor,
    beside: Beside,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
    drawn: Drawn | None = None,
) -> Tensor:
    """KL of each token's distribution to the other model's, over the whole vocabulary, with gradient, [K].

    Arguments as of `token_logprobs`, for both models. Two chunks of logits are in memory at once, of half the size.
    """
    if not len(hidden):
        return hidden.sum(1).to(_accurate(hidden.dtype))
    chunk = _chunk(chunk_elements, weight, 2, drawn)
    other = Beside(beside.hidden.to(beside.weight.dtype), beside.weight)
    found: Tensor = _TokenKl.apply(hidden, weight, *other, temperature, chunk, drawn)
    return found


def _chunk(elements: int, weight: Tensor, matrices: int, drawn: Drawn | None) -> int:
    """Tokens whose matrices [chunk, V] have so many elements together."""
    return max(1, elements // (weight.shape[0] * (matrices + (drawn.matrices if drawn else 0))))


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
        drawn: Drawn | None,
    ) -> Tensor:
        kl = hidden.new_empty(len(hidden), dtype=_accurate(hidden.dtype))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_p, _ = _log_softmax(hidden[part], weight, temperature, drawn, start)
            difference = log_p - _log_softmax(states[part], matrix, temperature, drawn, start)[0]
            kl[part] = torch.linalg.vecdot(log_p.exp_(), difference)
        ctx.save_for_backward(hidden, weight, states, matrix, kl)
        ctx.temperature, ctx.chunk, ctx.drawn = temperature, chunk, drawn
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        hidden, weight, states, matrix, kl = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=kl.dtype)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p, bend = _log_softmax(hidden[part], weight, ctx.temperature, ctx.drawn, start, bends=True)
            log_q, _ = _log_softmax(states[part], matrix, ctx.temperature, ctx.drawn, start)
            grad = (log_p - log_q).sub_(kl[part, None]).mul_(log_p.exp_())
            grad = _of_logits(grad.mul_(grad_kl[part, None]), ctx.temperature, bend).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight.add_(grad.T @ hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk: int,
        drawn: Drawn | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs = hidden.new_empty(len(labels), dtype=_accurate(hidden.dtype))
        entropy, correct = torch.empty_like(logprobs), torch.empty_like(labels, dtype=torch.bool)
        log_p = None
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            log_p, _ = _log_softmax(hidden[part], weight, temperature, drawn, start)
            logprobs[part] = log_p.gather(1, labels[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
            correct[part] = logprobs[part] >= log_p.amax(1)
        # A single chunk is within the budget anyway: kept, it saves backward one product.
        keeps = len(labels) <= chunk and not (drawn and drawn.bends)
        ctx.save_for_backward(hidden, weight, labels, entropy, log_p if keeps else None)
        ctx.temperature, ctx.chunk, ctx.drawn = temperature, chunk, drawn
        ctx.mark_non_differentiable(correct)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, correct

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None, None
        hidden, weight, labels, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype)
        for start in range(0, len(labels), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p, bend = kept, None
            if kept is None:
                log_p, bend = _log_softmax(
                    hidden[part], weight, ctx.temperature, ctx.drawn, start, bends=True
                )
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
            grad = _of_logits(grad, ctx.temperature, bend).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight.add_(grad.T @ hidden[part])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _log_softmax(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    drawn: Drawn | None,
    first: int,
    *,
    bends: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the tokens from `first` on, [chunk, V], float32 or float64; with `bends` also ∂z/∂logits T."""
    logits = (hidden @ weight.T).to(_accurate(hidden.dtype))
    if drawn is None:
        return torch.log_softmax(logits if temperature == 1.0 else logits.div_(temperature), dim=1), None
    bend = drawn.apply(logits, first, temperature, with_slope=bends)
    return torch.log_softmax(logits, dim=1).clamp_(min=LEAST), bend


def _of_logits(grad: Tensor, temperature: float, bend: Tensor | None) -> Tensor:
    """From the gradient of z to that of the logits, in place."""
    if bend is not None:
        grad.mul_(bend)
    return grad if temperature == 1.0 else grad.div_(temperature)
