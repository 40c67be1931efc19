"""Log-probs of given tokens, and the entropy there, straight from hidden states and the output head.

    z = s (h Wᵀ + b) / T,   log π(y) = z_y − log Σ exp z,   H = log Σ exp z − Σ softmax(z) z

where the model caps its logits at c, z = c tanh(s (h Wᵀ + b) / c) / T.

The logits [K, V] are the largest tensor of training (a vocabulary of 150,000 makes 10 tokens of them as large as
a layer's activations for 500). They are computed for a chunk of tokens at a time and computed again in backward:

    ∂ log π(y) / ∂z = 1[y] − p            ∂H / ∂z = −p (log p + H)

The same for the KL to another model over the whole vocabulary:

    KL = Σ p (log p − log q),   ∂KL / ∂z = p (log p − log q − KL)

and from there ∂z / ∂(h Wᵀ + b) = s / T, times 1 − (z T / c)² under a cap.

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


class Head(NamedTuple):
    """How a model makes logits of hidden states: weight [V, D], bias [V], factor s and cap c of the formula above."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def to(self, device: torch.device | str) -> Head:
        """The same on another device."""
        bias = None if self.bias is None else self.bias.to(device)
        return self._replace(weight=self.weight.to(device), bias=bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states [K, D]: [K, V], as the model itself computes them."""
        return _logits(hidden, self, 1.0)


class TokenOutputs(NamedTuple):
    """Per token, [K]: log-prob of the label, entropy of the distribution, whether the label was the likeliest.

    kl: to `Beside`, where there is one. hidden: the states that all of it comes from, [K, D], where asked for.
    more: what the caller computes of states and output head (see `PolicyModel.forward`).
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
    """Another model's distributions at the same tokens: its hidden states [K, D'], and its head over V tokens."""

    hidden: Tensor
    head: Head


def token_logprobs(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
    drawn: Drawn | None = None,
) -> TokenOutputs:
    """Log-probs (with gradient), entropy (with gradient) and correctness of `labels`.

    Args:
        hidden: last hidden states of the positions that predict, [K, D].
        head: over V tokens. Products are in the dtype of its matrix, everything after in float32 (float64 for
            float64 input).
        labels: int64 [K].
        temperature: that the labels were sampled at, > 0.
        drawn: what else the labels were sampled with.
    """
    chunk = _chunk(chunk_elements, head, 1, drawn)
    return TokenOutputs(*_TokenLogprobs.apply(hidden, *head, labels, temperature, chunk, drawn))


def token_kl(
    hidden: Tensor,
    head: Head,
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
    chunk = _chunk(chunk_elements, head, 2, drawn)
    other = Beside(beside.hidden.to(beside.head.weight.dtype), beside.head)
    found: Tensor = _TokenKl.apply(hidden, *head, other, temperature, chunk, drawn)
    return found


def _chunk(elements: int, head: Head, matrices: int, drawn: Drawn | None) -> int:
    """Tokens whose matrices [chunk, V] have so many elements together."""
    return max(1, elements // (head.weight.shape[0] * (matrices + (drawn.matrices if drawn else 0))))


class _TokenKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        other: Beside,
        temperature: float,
        chunk: int,
        drawn: Drawn | None,
    ) -> Tensor:
        head = Head(weight, bias, scale, softcap)
        kl = hidden.new_empty(len(hidden), dtype=_accurate(hidden.dtype))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_p, _ = _log_softmax(hidden[part], head, temperature, drawn, start)
            difference = log_p - _log_softmax(other.hidden[part], other.head, temperature, drawn, start)[0]
            kl[part] = torch.linalg.vecdot(log_p.exp_(), difference)
        ctx.save_for_backward(hidden, weight, bias, kl)
        ctx.form, ctx.other, ctx.drawn = (scale, softcap), other, drawn
        ctx.temperature, ctx.chunk = temperature, chunk
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, kl = ctx.saved_tensors
        sums = _HeadGradients(hidden, Head(weight, bias, *ctx.form), ctx.temperature)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            how = ctx.temperature, ctx.drawn, start
            log_p, slope = _log_softmax(hidden[part], sums.head, *how, slopes=True)
            log_q, _ = _log_softmax(ctx.other.hidden[part], ctx.other.head, *how)
            grad = (log_p - log_q).sub_(kl[part, None]).mul_(log_p.exp_())
            sums.add(part, grad.mul_(grad_kl[part, None]), slope)
        return *sums.found(), None, None, None, None, None, None


@torch.no_grad()
def top_tokens(
    hidden: Tensor, head: Head, k: int, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> TopTokens:
    """The k likeliest tokens of each position. Other arguments as of `token_logprobs`."""
    chunk = _chunk(chunk_elements, head, 1, None)
    found = [
        _log_softmax(part, head, temperature)[0].topk(k, dim=1) for part in hidden.split(chunk)
    ]  # of no positions one empty part
    return TopTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def logprobs_at(
    hidden: Tensor, head: Head, ids: Tensor, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """Log-probs, with gradient, of several tokens at each position, [K, k].

    ids: int64 [K, k], different ones at each position. Other arguments as of `token_logprobs`.
    """
    chunk = _chunk(chunk_elements, head, 1, None)
    found: Tensor = _LogprobsAt.apply(hidden, *head, ids, temperature, chunk)
    return found


class _LogprobsAt(torch.autograd.Function):
    """∂ log π(y_j) / ∂z = 1[y_j] − p, so of all of them together Σ_j g_j 1[y_j] − p Σ_j g_j."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        ids: Tensor,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        head = Head(weight, bias, scale, softcap)
        found = hidden.new_empty(ids.shape, dtype=_accurate(hidden.dtype))
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            found[part] = _log_softmax(hidden[part], head, temperature)[0].gather(1, ids[part])
        ctx.save_for_backward(hidden, weight, bias, ids)
        ctx.form, ctx.temperature, ctx.chunk = (scale, softcap), temperature, chunk
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids = ctx.saved_tensors
        sums = _HeadGradients(hidden, Head(weight, bias, *ctx.form), ctx.temperature)
        for start in range(0, len(ids), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p, slope = _log_softmax(hidden[part], sums.head, ctx.temperature, slopes=True)
            of_z = log_p.exp().mul_(-grad[part].sum(1, keepdim=True))
            rows = torch.arange(len(of_z), device=of_z.device)[:, None]
            of_z[rows, ids[part]] += grad[part]  # deterministic, unlike scatter_add: no id is there twice
            sums.add(part, of_z, slope)
        return *sums.found(), None, None, None, None, None


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        labels: Tensor,
        temperature: float,
        chunk: int,
        drawn: Drawn | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(weight, bias, scale, softcap)
        logprobs = hidden.new_empty(len(labels), dtype=_accurate(hidden.dtype))
        entropy, correct = torch.empty_like(logprobs), torch.empty_like(labels, dtype=torch.bool)
        log_p = slope = None
        keeps = len(labels) <= chunk
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            log_p, slope = _log_softmax(hidden[part], head, temperature, drawn, start, slopes=keeps)
            logprobs[part] = log_p.gather(1, labels[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
            correct[part] = logprobs[part] >= log_p.amax(1)
        # A single chunk is within the budget anyway: kept, it saves backward one product.
        kept = (log_p, slope) if keeps else (None, None)
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, *kept)
        ctx.form, ctx.temperature, ctx.chunk, ctx.drawn = (scale, softcap), temperature, chunk, drawn
        ctx.mark_non_differentiable(correct)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, correct

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 9
        hidden, weight, bias, labels, entropy, *kept = ctx.saved_tensors
        sums = _HeadGradients(hidden, Head(weight, bias, *ctx.form), ctx.temperature)
        for start in range(0, len(labels), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p, slope = kept
            if log_p is None:
                how = ctx.temperature, ctx.drawn, start
                log_p, slope = _log_softmax(hidden[part], sums.head, *how, slopes=True)
            grad = log_p.exp()
            if grad_entropy is None:
                grad.mul_(-grad_logprobs[part, None])  # type: ignore[index]
            else:
                of_p = (log_p + entropy[part, None]).mul_(grad_entropy[part, None])
                grad.mul_(of_p if grad_logprobs is None else of_p.add_(grad_logprobs[part, None])).neg_()
            if grad_logprobs is not None:
                rows = torch.arange(grad.shape[0], device=grad.device)
                grad[rows, labels[part]] += grad_logprobs[
                    part
                ]  # deterministic on GPUs too, unlike scatter_add
            sums.add(part, grad, slope)
        return *sums.found(), None, None, None, None, None, None


class _HeadGradients:
    """Gradients of hidden states and head, added up over chunks of tokens."""

    def __init__(self, hidden: Tensor, head: Head, temperature: float) -> None:
        self.head, self._hidden, self._temperature = head, hidden, temperature
        self._of_hidden = torch.empty_like(hidden)
        self._of_weight = torch.zeros_like(head.weight, dtype=_accurate(hidden.dtype))
        self._of_bias = (
            None if head.bias is None else torch.zeros_like(head.bias, dtype=self._of_weight.dtype)
        )

    def add(self, part: slice, grad: Tensor, slope: Tensor | None) -> None:
        """grad: of z, [chunk, V], changed in place. slope: see `_log_softmax`."""
        weight, _, scale, _ = self.head
        if slope is not None:
            grad.mul_(slope)
        if self._temperature != scale:
            grad.div_(self._temperature / scale)
        if self._of_bias is not None:
            self._of_bias.add_(grad.sum(0))
        grad = grad.to(weight.dtype)
        self._of_hidden[part] = grad @ weight
        self._of_weight.add_(grad.T @ self._hidden[part])

    def found(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of hidden states, matrix and bias, in their dtypes."""
        weight, bias = self.head.weight, self.head.bias
        of_bias = None if self._of_bias is None or bias is None else self._of_bias.to(bias.dtype)
        return self._of_hidden, self._of_weight.to(weight.dtype), of_bias


def _log_softmax(
    hidden: Tensor,
    head: Head,
    temperature: float,
    drawn: Drawn | None = None,
    first: int = 0,
    *,
    slopes: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the tokens from `first` on, [chunk, V], float32 or float64.

    With `slopes` also the derivative of z by s (h Wᵀ + b) / T, [chunk, V], where it is not 1 everywhere.
    """
    logits = _logits(hidden, head, 1.0 if drawn else temperature)
    slope = None
    if slopes and head.softcap is not None:  # 1 − tanh²
        slope = 1 - (logits * ((1.0 if drawn else temperature) / head.softcap)).square_()
    if drawn is None:
        return torch.log_softmax(logits, dim=1), slope
    bend = drawn.apply(logits, first, temperature, with_slope=slopes)
    if bend is not None:
        slope = bend if slope is None else slope.mul_(bend)
    return torch.log_softmax(logits, dim=1).clamp_(min=LEAST), slope


def _logits(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    """z of the module's docstring, [chunk, V], float32 or float64: what is sampled from, before any filter."""
    weight, bias, scale, softcap = head
    product = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    logits = product.to(_accurate(hidden.dtype))
    if softcap is not None:
        return logits.mul_(scale / softcap).tanh_().mul_(softcap / temperature)
    return logits if temperature == scale else logits.div_(temperature / scale)
