"""Log-probs of given tokens, entropies and KLs, straight from hidden states and the output head.

    z = s (h Wᵀ + b) / T,   log π(y) = z_y − log Σ exp z,   H = log Σ exp z − E z,   E x = Σ p x,   p = softmax(z)

where the model caps its logits at c, z = c tanh(s (h Wᵀ + b) / c) / T. To another model, with z' of its own:

    KL = E (z − z') − log Σ exp z + log Σ exp z'

The logits [K, V] are the largest tensor of training (a vocabulary of 150,000 makes 10 tokens of them as large as
a layer's activations for 500). They are computed for a chunk of tokens at a time, and again in backward but for the
last chunk, from log Σ exp z, E z and E (z − z') of each token:

    ∂ log π(y) / ∂z = 1[y] − p        ∂H / ∂z = −p (z − E z)        ∂KL / ∂z = p (z − z' − E (z − z'))

and from there ∂z / ∂(h Wᵀ + b) = s / T, times 1 − (z T / c)² under a cap.

Where tokens were drawn from another distribution than this one, z is what `policy_worker.model.drawn` makes of the
logits. Ids that could not be drawn have probability 0 and z = `LEAST` instead of −∞, so that 0 · z = 0.

Where the rows of W are spread over ranks, each computes z of its own ids. The largest z, Σ exp z and the means over p
of parts of a vocabulary make those of the whole, so ranks exchange a few numbers for each token, once for all chunks,
and in backward the sum of the gradients of h.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from policy_worker.model.drawn import Drawn, places_of
from policy_worker.model.head import Head, logits_into, new_like

CHUNK_ELEMENTS = 2**25
"""Logits in memory at once (128 MiB in float32): large enough for full-speed products, small next to a model."""
BLOCK_ELEMENTS = 2**18
"""Logits that a CPU turns into probabilities at once: with what is made of them they fit its second-level cache."""
LEAST = -1e30


class TokenOutputs(NamedTuple):
    """Per token, [K]: log-prob of the label, entropy of the distribution, whether the label was the likeliest.

    kl: to `Beside`, where there is one. hidden: the states that all of it comes from, [K, D], where asked for.
    more: what the caller computes of states and output head (see `PolicyModel.forward`)."""

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
    compared: Beside | None = None,
) -> TokenOutputs:
    """Log-probs (with gradient), entropy (with gradient) and correctness of `labels`.

    Args:
        hidden: last hidden states of the positions that predict, [K, D].
        head: over V tokens. Products are in the dtype of its matrix, everything after in float32 (float64 for
            float64 input).
        labels: int64 [K].
        temperature: that the labels were sampled at, > 0.
        drawn: what else the labels were sampled with.
        compared: the model that the KL is to (with gradient, over the whole vocabulary); see `token_kl`.
    """
    outputs = _outputs(hidden, head, labels[:, None], temperature, chunk_elements, drawn, compared)
    logprobs, entropy, correct, kl = outputs
    return TokenOutputs(logprobs.sum(1), entropy, correct[:, 0], kl)  # FSDP2 warns of a view


def token_kl(
    hidden: Tensor,
    head: Head,
    compared: Beside,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
    drawn: Drawn | None = None,
) -> Tensor:
    """KL of each token's distribution to the other model's, over the whole vocabulary, with gradient, [K].

    Arguments as of `token_logprobs`, for both models. Two chunks of logits are in memory at once, of half the size.
    """
    none = torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device)
    return _outputs(hidden, head, none, temperature, chunk_elements, drawn, compared)[3]


def logprobs_at(
    hidden: Tensor, head: Head, ids: Tensor, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """Log-probs, with gradient, of several tokens at each position, [K, k].

    ids: int64 [K, k], different ones at each position. Other arguments as of `token_logprobs`."""
    return _outputs(hidden, head, ids, temperature, chunk_elements)[0]


@torch.no_grad()
def top_tokens(
    hidden: Tensor, head: Head, k: int, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> TopTokens:
    """The k likeliest tokens of each position. Other arguments as of `token_logprobs`."""
    how = _How(temperature, _chunks(len(hidden), chunk_elements, head))
    statistics = new_like(hidden, 3, len(hidden))
    values = new_like(hidden, len(hidden), k).fill_(LEAST)
    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    buffer = how.buffer(hidden, head)
    for part in how.parts:
        z, _ = _scores(hidden[part], head, how, part, buffer)
        statistics[:, part] = _statistics(z)
        here = min(k, z.shape[1])
        values[part, :here], ids[part, :here] = z.topk(here, dim=1)
    values, places = torch.cat(list(_gathered(values, head)), dim=1).topk(k, dim=1)
    ids = torch.cat(list(_gathered(ids + head.first, head)), dim=1).gather(1, places)
    top, log_sum, _ = _combined(_gathered(statistics, head))
    return TopTokens(values - top[:, None] - log_sum[:, None], ids)


class _How(NamedTuple):
    """How z is made of hidden states and head, and of which tokens at once. other: the model that a KL is to."""

    temperature: float
    parts: Sequence[slice]
    drawn: Drawn | None = None
    other: Beside | None = None

    def buffer(self, hidden: Tensor, head: Head) -> Tensor:
        """Room for z of a chunk."""
        return new_like(hidden, max((part.stop - part.start for part in self.parts), default=0), len(head.weight))


def _outputs(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    temperature: float,
    chunk_elements: int,
    drawn: Drawn | None = None,
    compared: Beside | None = None,
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Log-probs of ids [K, k] and whether each is the likeliest; entropy and KL (None without `compared`), [K]."""
    matrices = 1 + (compared is not None) + (head.softcap is not None) + (drawn.matrices if drawn else 0)
    if compared is not None:
        other = compared.head.on_rows_of(head)
        compared = Beside(compared.hidden.to(other.weight.dtype), other)
    parts = _chunks(len(hidden), chunk_elements // matrices, head)
    if drawn is not None and head.vocabulary is not None:
        drawn = drawn.among(head.first, len(head.weight))
    how = _How(temperature, parts, drawn, compared)
    outputs: tuple[Tensor, Tensor, Tensor, Any] = _Outputs.apply(hidden, *head[:2], ids, head, how)
    return outputs


class _Outputs(torch.autograd.Function):
    """`_outputs`, of which all but the second have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: Head, how: _How
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        other = how.other
        n = 3 if other is None else 6
        numbers, (places, here) = new_like(hidden, n + ids.shape[1], len(hidden)), _places(ids, head)
        buffer, slope, z_other = how.buffer(hidden, head), None, None
        buffer_other = None if other is None else torch.empty_like(buffer)
        for part in how.parts:
            z, slope = _scores(hidden[part], head, how, part, buffer, slopes=part is how.parts[-1])
            if other is not None:
                z_other, _ = _scores(other.hidden[part], other.head, how, part, buffer_other)
            numbers[:n, part] = _statistics(z, z_other)
            numbers[n:, part] = torch.where(here[part], z.gather(1, places[part]), 0).T
        numbers = _gathered(numbers, head)
        largest, log_sum, mean, *of_other = _combined(numbers[:, :n])
        at = numbers[:, n:].sum(0).T
        kl = of_other[2] - log_sum + of_other[1] if of_other else None
        ctx.save_for_backward(hidden, weight, bias, ids, largest, log_sum, mean, *of_other)
        ctx.head, ctx.how = head._replace(weight=None, bias=None), how
        ctx.last = buffer, slope  # within the budget anyway: saves backward one product of it
        correct = at >= largest[:, None]
        ctx.mark_non_differentiable(correct)
        ctx.set_materialize_grads(False)
        return at - largest[:, None] - log_sum[:, None], log_sum - mean, correct, kl

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None, _: None, of_kl: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if of_logprobs is None and of_entropy is None and of_kl is None:
            return (None,) * 6
        hidden, weight, bias, ids, *statistics = ctx.saved_tensors
        head, how, last = ctx.head._replace(weight=weight, bias=bias), ctx.how, ctx.last
        ctx.last = None  # becomes a gradient: a second backward computes it again
        buffer, slope = last or (how.buffer(hidden, head), None)
        buffer_other = None if of_kl is None else torch.empty_like(buffer)
        factor = head.scale / how.temperature
        slopes = _Slopes.of(of_logprobs, of_entropy, of_kl, statistics, factor)
        sums = _HeadGradients(hidden, head, ctx.needs_input_grad)
        places, here = _places(ids, head)
        for part in reversed(how.parts):
            z, z_other = buffer[: part.stop - part.start], None
            if last is None:
                _, slope = _scores(hidden[part], head, how, part, buffer, slopes=True)
            if buffer_other is not None:
                z_other, _ = _scores(how.other.hidden[part], how.other.head, how, part, buffer_other)
            slopes.take(part, z, z_other)
            if of_logprobs is not None:
                rows = torch.arange(len(z), device=z.device)[:, None]
                of_label = torch.where(here[part], of_logprobs[part] * factor, 0)
                # Deterministic, unlike scatter_add_.
                z.index_put_((rows, places[part]), of_label, accumulate=True)
            sums.add(part, z if slope is None else z.mul_(slope))
            last = None
        return *sums.found(), None, None, None


class _Slopes(NamedTuple):
    """Gradients of z, but for what 1[y] adds: exp(z − m) (level + tilt (z − m) + lean (z − m − z' + m')).

    All [K], m and m' the largest z and z'."""

    largest: Tensor
    largest_other: Tensor | None
    level: Tensor
    tilt: Tensor | None
    lean: Tensor | None

    @staticmethod
    def of(
        of_logprobs: Tensor | None,
        of_entropy: Tensor | None,
        of_kl: Tensor | None,
        statistics: Sequence[Tensor],
        factor: float,
    ) -> _Slopes:
        """From gradients and `_combined` statistics; times a factor."""
        largest, log_sum, mean, *of_other = statistics
        share = log_sum.neg().exp_().mul_(factor)
        level, tilt, lean = torch.zeros_like(share), None, None
        if of_logprobs is not None:
            level -= of_logprobs.sum(1)
        if of_entropy is not None:
            level += of_entropy * mean
            tilt = -of_entropy * share
        if of_kl is not None:
            level -= of_kl * of_other[2]
            lean = of_kl * share
        return _Slopes(largest, of_other[0] if of_other else None, level.mul_(share), tilt, lean)

    def take(self, part: slice, z: Tensor, z_other: Any) -> None:
        """Turn z of a part into its gradient; z' is lost too. z_other: a tensor where there is a KL, else None."""
        of_part: list[Any] = [None if column is None else column[part, None] for column in self]
        largest, largest_other, level, tilt, lean = of_part
        for rows, room in _blocks(z, int(tilt is not None)):
            d = z[rows].sub_(largest[rows])
            by = level[rows]
            if tilt is not None:
                by = torch.mul(d, tilt[rows], out=room[0]).add_(by)
            if lean is not None:
                difference = z_other[rows].sub_(largest_other[rows]).sub_(d).neg_()
                by = difference.mul_(lean[rows]).add_(by)
            d.exp_().mul_(by)


class _HeadGradients:
    """Gradients of hidden states, matrix and bias, where they are wanted, added up over chunks of tokens."""

    def __init__(self, hidden: Tensor, head: Head, wanted: Sequence[bool]) -> None:
        self._hidden, self._head = hidden, head
        self._of_hidden, self._of_weight, self._of_bias = (
            new_like(tensor, *tensor.shape).zero_() if tensor is not None and wanted[i] else None
            for i, tensor in enumerate((hidden, head.weight, head.bias))
        )

    def add(self, part: slice, grad: Tensor) -> None:
        """grad: of h Wᵀ + b, [chunk, V]."""
        if self._of_bias is not None:
            self._of_bias += grad.sum(0)
        low = grad.to(self._hidden.dtype)
        if self._of_hidden is not None:
            self._of_hidden[part] = low @ self._head.weight
        if self._of_weight is not None and low is grad:
            self._of_weight.addmm_(grad.T, self._hidden[part])
        elif self._of_weight is not None:
            self._of_weight += low.T @ self._hidden[part]

    def found(self) -> Iterator[Tensor | None]:
        """Return gradients of hidden states, matrix and bias, in their types. A collective of a spread vocabulary."""
        if self._of_hidden is not None and self._head.vocabulary is not None:
            dist.all_reduce(self._of_hidden, group=self._head.vocabulary.group)
        pairs = (
            (self._of_hidden, self._hidden),
            (self._of_weight, self._head.weight),
            (self._of_bias, self._head.bias),
        )
        return (None if total is None or of is None else total.to(of.dtype) for total, of in pairs)


def _chunks(tokens: int, elements: int, head: Head) -> Sequence[slice]:
    """Cut tokens into as few parts of equal size as have at most so many logits each, on all ranks together."""
    most = max(1, elements // (len(head.weight) * head.ranks))
    size = -(-tokens // max(1, -(-tokens // most)))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, max(1, size))]


def _blocks(z: Tensor, rooms: int) -> Iterator[tuple[slice, Sequence[Tensor]]]:
    """Rows of [chunk, V], on a CPU so many as have `BLOCK_ELEMENTS` together, else all of them; and so many matrices
    of their shape, the same ones each time, since new ones of this size would scatter over malloc's heap."""
    size = max(1, BLOCK_ELEMENTS // z.shape[1]) if z.device.type == "cpu" else len(z)
    room = z.new_empty(rooms, size, z.shape[1])
    for start in range(0, len(z), size):
        rows = slice(start, min(start + size, len(z)))
        yield rows, room[:, : rows.stop - start].unbind()


def _places(ids: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Which rows of the head ids are (0 for those of other ranks), and which are here."""
    if head.vocabulary is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    return places_of(ids, head.first, len(head.weight))


def _statistics(z: Tensor, other: Tensor | None = None) -> Tensor:
    """Take of z [chunk, V] max z, log Σ exp (z − max z), E (z − max z); with another model's z', which is lost, also
    max z', log Σ exp (z' − max z'), E (z − max z − z' + max z'); [3 or 6, chunk]."""
    statistics = z.new_empty(3 if other is None else 6, len(z))
    for rows, (d, p, *difference) in _blocks(z, len(statistics) // 3 + 1):
        largest = statistics[0, rows] = z[rows].amax(1)
        torch.exp(torch.sub(z[rows], largest[:, None], out=d), out=p)
        total = p.sum(1)
        statistics[1, rows] = total.log()
        if other is not None:
            largest = statistics[3, rows] = other[rows].amax(1)
            d_other = other[rows].sub_(largest[:, None])
            statistics[5, rows] = torch.sub(d, d_other, out=difference[0]).mul_(p).sum(1) / total
            statistics[4, rows] = d_other.exp_().sum(1).log()
        statistics[2, rows] = d.mul_(p).sum(1) / total
    return statistics


def _gathered(values: Tensor, head: Head) -> Tensor:
    """Gather the values of all ranks that have a part of the vocabulary, [ranks, …]. A collective of them."""
    if head.vocabulary is None:
        return values[None]
    parts = [torch.empty_like(values) for _ in range(head.ranks)]
    dist.all_gather(parts, values.contiguous(), group=head.vocabulary.group)
    return torch.stack(parts)


def _combined(parts: Tensor) -> list[Tensor]:
    """Combine `_statistics` of parts of a vocabulary, [ranks, 3 or 6, K], into those of the whole."""
    largest, shift, log_sum = _combined_sum(parts[:, 0], parts[:, 1])
    weights = (parts[:, 1] + shift - log_sum).exp()
    statistics = [largest, log_sum, (weights * (parts[:, 2] + shift)).sum(0)]
    if parts.shape[1] > 3:
        other, shift_other, log_sum_other = _combined_sum(parts[:, 3], parts[:, 4])
        statistics += [other, log_sum_other, (weights * (parts[:, 5] + shift - shift_other)).sum(0)]
    return statistics


def _combined_sum(largest: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest of all, by how much those of parts are less, and log Σ exp (z − the largest), of [ranks, K]."""
    of_all = largest.amax(0)
    shift = largest - of_all
    return of_all, shift, (log_sum + shift).logsumexp(0)


def _scores(
    hidden: Tensor, head: Head, how: _How, part: slice, buffer: Tensor, *, slopes: bool = False
) -> tuple[Tensor, Tensor | None]:
    """z of the tokens of a part, [chunk, V], in the beginning of the buffer.

    With `slopes` also the derivative of z by s (h Wᵀ + b) / T, [chunk, V], where it is not 1 everywhere."""
    temperature = how.temperature if how.drawn is None else 1.0
    z, slope = logits_into(hidden, head, temperature, buffer[: len(hidden)]), None
    if slopes and head.softcap is not None:  # 1 − tanh²
        slope = 1 - (z * (temperature / head.softcap)).square_()
    if how.drawn is not None:
        bend = how.drawn.apply(z, part.start, how.temperature, with_slope=slopes)
        z.clamp_(min=LEAST)
        if bend is not None:
            slope = bend if slope is None else slope.mul_(bend)
    return z, slope
