"""Log-probs of given tokens, entropies and KLs, straight from hidden states and the output head.

    z = s (h Wᵀ + b) / T,   log π(y) = z_y − log Σ exp z,   H = log Σ exp z − E z,   E x = Σ p x,   p = softmax(z)

where the model caps its logits at c, z = c tanh(s (h Wᵀ + b) / c) / T. To another model, with z' of its own:

    KL = E (z − z') − log Σ exp z + log Σ exp z'

The logits [K, V] are the largest tensor of training (a vocabulary of 150,000 makes 10 tokens of them as large as
a layer's activations for 500). They are computed for a chunk of tokens at a time, and again in backward, from
log Σ exp z, E z and E (z − z') of each token:

    ∂ log π(y) / ∂z = 1[y] − p        ∂H / ∂z = −p (z − E z)        ∂KL / ∂z = p (z − z' − E (z − z'))

and from there ∂z / ∂(h Wᵀ + b) = s / T, times 1 − (z T / c)² under a cap.

Chunks of backward are of tokens or of ids. The gradient of h is whole after each chunk of tokens and that of W adds
up over them; with chunks of ids it is the other way round. What is the smaller adds up, [K, D] or [V, D], but chunks
are of tokens where only h has a gradient, and where z is made of whole rows of logits. Then the last chunk of forward
is the first of backward, and is not computed again.

Where tokens were drawn from another distribution than this one, z is what `policy_worker.model.logits.drawn` makes of
the logits. Ids that could not be drawn have probability 0 and z = `LEAST` instead of −∞, so that 0 · z = 0.

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

from policy_worker.model.logits.drawn import Drawn, places_of
from policy_worker.model.logits.head import Head, logits_into, new_like
from policy_worker.model.logits.softmax import Fused, LogitForm, Slopes, combined, statistics_of
from schema.util.gpus import logits_at_once

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
    chunk_elements: int | None = None,
    drawn: Drawn | None = None,
    compared: Beside | None = None,
    fused: Fused | None = None,
) -> TokenOutputs:
    """Log-probs (with gradient), entropy (with gradient) and correctness of `labels`.

    Args:
        hidden: last hidden states of the positions that predict, [K, D].
        head: over V tokens. Products are in the dtype of its matrix, everything after in float32 (float64 for
            float64 input).
        labels: int64 [K].
        temperature: that the labels were sampled at, > 0.
        chunk_elements: logits in memory at once; None: `chunk_of` the device.
        drawn: what else the labels were sampled with.
        compared: the model that the KL is to (with gradient, over the whole vocabulary); see `token_kl`.
        fused: computes it where nothing is drawn or compared; None: operation after operation, as elsewhere.
    """
    outputs = _outputs(hidden, head, labels[:, None], temperature, chunk_elements, drawn, compared, fused)
    logprobs, entropy, correct, kl = outputs
    return TokenOutputs(logprobs.sum(1), entropy, correct[:, 0], kl)  # FSDP2 warns of a view


def token_kl(
    hidden: Tensor,
    head: Head,
    compared: Beside,
    temperature: float = 1.0,
    chunk_elements: int | None = None,
    drawn: Drawn | None = None,
) -> Tensor:
    """KL of each token's distribution to the other model's, over the whole vocabulary, with gradient, [K].

    Arguments as of `token_logprobs`, for both models. Two chunks of logits are in memory at once, of half the size.
    """
    none = torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device)
    return _outputs(hidden, head, none, temperature, chunk_elements, drawn, compared)[3]


def logprobs_at(
    hidden: Tensor, head: Head, ids: Tensor, temperature: float = 1.0, chunk_elements: int | None = None
) -> Tensor:
    """Log-probs, with gradient, of several tokens at each position, [K, k].

    ids: int64 [K, k], different ones at each position. Other arguments as of `token_logprobs`."""
    return _outputs(hidden, head, ids, temperature, chunk_elements)[0]


@torch.no_grad()
def top_tokens(
    hidden: Tensor, head: Head, k: int, temperature: float = 1.0, chunk_elements: int | None = None
) -> TopTokens:
    """The k likeliest tokens of each position. Other arguments as of `token_logprobs`."""
    how = _How(temperature, chunk_elements or chunk_of(hidden.device))
    statistics = new_like(hidden, 3, len(hidden))
    values = new_like(hidden, len(hidden), k).fill_(LEAST)
    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    tiles = how.of_tokens(hidden, head)
    buffer = _buffer(tiles, hidden)
    for part, _ in tiles:
        z, _ = _scores(hidden[part], head, how, part, buffer)
        statistics[:, part] = statistics_of(z)
        here = min(k, z.shape[1])
        values[part, :here], ids[part, :here] = z.topk(here, dim=1)
    values, places = torch.cat(list(_gathered(values, head)), dim=1).topk(k, dim=1)
    ids = torch.cat(list(_gathered(ids + head.first, head)), dim=1).gather(1, places)
    top, log_sum, _ = combined(_gathered(statistics, head))
    return TopTokens(values - top[:, None] - log_sum[:, None], ids)


class _Tile(NamedTuple):
    """Logits that are in memory at once: of these tokens, for these rows of the head."""

    tokens: slice
    ids: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.stop - self.tokens.start, self.ids.stop - self.ids.start


class _How(NamedTuple):
    """How z is made of hidden states and head, and how many of them at once. other: the model that a KL is to."""

    temperature: float
    elements: int
    drawn: Drawn | None = None
    other: Beside | None = None
    fused: Fused | None = None

    def logits(self, tiles: Sequence[_Tile], hidden: Tensor) -> _Logits | _FusedLogits:
        """Room and functions for the logits of tiles."""
        return (
            _Logits(self, tiles, hidden) if self.fused is None else _FusedLogits(self.fused, self.temperature, tiles)
        )

    def of_tokens(self, hidden: Tensor, head: Head) -> list[_Tile]:
        """Chunks of tokens, for all rows of the head: the same on all ranks that have a part of the vocabulary."""
        most = max(1, self.elements // (len(head.weight) * head.ranks))
        return [_Tile(part, slice(0, len(head.weight))) for part in _cut(len(hidden), most)]

    def of_ids(self, hidden: Tensor, head: Head) -> list[_Tile]:
        """Chunks of rows of the head, for all tokens."""
        most = max(1, self.elements // (max(1, len(hidden)) * head.ranks))
        return [_Tile(slice(0, len(hidden)), part) for part in _cut(len(head.weight), most)]


def _outputs(
    hidden: Tensor,
    head: Head,
    ids: Tensor,
    temperature: float,
    chunk_elements: int | None,
    drawn: Drawn | None = None,
    compared: Beside | None = None,
    fused: Fused | None = None,
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Log-probs of ids [K, k] and whether each is the likeliest; entropy and KL (None without `compared`), [K]."""
    matrices = 1 + (compared is not None) + (head.softcap is not None) + (drawn.matrices if drawn else 0)
    if compared is not None:
        other = compared.head.on_rows_of(head)
        compared = Beside(compared.hidden.to(other.weight.dtype), other)
    if drawn is not None and head.vocabulary is not None:
        drawn = drawn.among(head.first, len(head.weight))
    fused = fused if drawn is None and compared is None else None
    how = _How(temperature, (chunk_elements or chunk_of(hidden.device)) // matrices, drawn, compared, fused)
    outputs: tuple[Tensor, Tensor, Tensor, Any] = _Outputs.apply(hidden, *head[:2], ids, head, how)
    return outputs


class _Outputs(torch.autograd.Function):
    """`_outputs`, of which all but the second have a gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: Head, how: _How
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        n = 3 if how.other is None else 6
        numbers, (places, here) = new_like(hidden, n + ids.shape[1], len(hidden)), _places(ids, head)
        tiles = how.of_tokens(hidden, head)
        by_ids = _by_ids(tiles, hidden, head, how, ctx.needs_input_grad)
        logits = how.logits(tiles, hidden)
        for tile in tiles:
            part = tile.tokens
            numbers[:n, part], at = logits.numbers(tile, hidden, head, places[part])
            numbers[n:, part] = torch.where(here[part], at, 0).T
        numbers = _gathered(numbers, head)
        largest, log_sum, mean, *of_other = combined(numbers[:, :n])
        at = numbers[:, n:].sum(0).T
        kl = of_other[2] - log_sum + of_other[1] if of_other else None
        ctx.save_for_backward(hidden, weight, bias, ids, largest, log_sum, mean, *of_other)
        ctx.head, ctx.how, ctx.by_ids = head._replace(weight=None, bias=None), how, by_ids
        ctx.logits = None if by_ids else logits  # within the budget anyway: saves backward one product of it
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
        head, how, logits = ctx.head._replace(weight=weight, bias=bias), ctx.how, ctx.logits
        ctx.logits = None  # becomes a gradient: a second backward computes it again
        tiles = how.of_ids(hidden, head) if ctx.by_ids else how.of_tokens(hidden, head)[::-1]
        logits = logits or how.logits(tiles, hidden)
        factor = head.scale / how.temperature
        slopes = Slopes.of(of_logprobs, of_entropy, of_kl, statistics, factor)
        of_labels = new_like(hidden, *ids.shape).zero_() if of_logprobs is None else of_logprobs * factor
        sums = _HeadGradients(hidden, head, ctx.needs_input_grad, by_ids=ctx.by_ids)
        for tile in tiles:
            part, first = tile.tokens, head.first + tile.ids.start
            places, here = places_of(ids[part], first, tile.shape[1])
            of_tile = torch.where(here, of_labels[part], 0)
            sums.add(tile, logits.gradient(tile, hidden, head, slopes, places, of_tile))
        return *sums.total(), None, None, None


class _Logits:
    """z of a tile, block by block, in a buffer in which it becomes its gradient: for every formula.

    The tile that was computed last is not computed again. Hidden states and head are given each time, since what is
    kept for backward may not hold on to them."""

    def __init__(self, how: _How, tiles: Sequence[_Tile], like: Tensor) -> None:
        self._how, self._buffer = how, _buffer(tiles, like)
        self._buffer_other: Tensor | None = None
        self._last = tiles[-1] if tiles else None
        self._computed: _Tile | None = None
        self._slope: Tensor | None = None

    def numbers(self, tile: _Tile, hidden: Tensor, head: Head, places: Tensor) -> tuple[Tensor, Tensor]:
        """`statistics_of` the tile, and z at places [chunk, k] of its rows, [chunk, k]."""
        z = self._compute(tile, hidden, head, slopes=tile is self._last)
        return statistics_of(z, self._compute_other(tile)), z.gather(1, places)

    def gradient(
        self, tile: _Tile, hidden: Tensor, head: Head, slopes: Slopes, places: Tensor, of_labels: Tensor
    ) -> Tensor:
        """Gradient of h Wᵀ + b, [chunk, V]; of_labels, [chunk, k]: what is added to that of z at places."""
        is_computed, self._computed = self._computed == tile, None
        z = _room(self._buffer, tile.shape) if is_computed else self._compute(tile, hidden, head, slopes=True)
        slopes.take(tile.tokens, z, None if slopes.lean is None else self._compute_other(tile))
        rows = torch.arange(len(z), device=z.device)[:, None]
        z.index_put_((rows, places), of_labels, accumulate=True)  # deterministic, unlike scatter_add_
        return z if self._slope is None else z.mul_(self._slope)

    def _compute(self, tile: _Tile, hidden: Tensor, head: Head, *, slopes: bool) -> Tensor:
        part, self._computed = tile.tokens, tile if slopes else None
        z, self._slope = _scores(hidden[part], head.rows(tile.ids), self._how, part, self._buffer, slopes=slopes)
        return z

    def _compute_other(self, tile: _Tile) -> Tensor | None:
        """The other model's z, which is lost by what it is used for."""
        how, part = self._how, tile.tokens
        if how.other is None:
            return None
        if self._buffer_other is None:
            self._buffer_other = torch.empty_like(self._buffer)
        return _scores(how.other.hidden[part], how.other.head.rows(tile.ids), how, part, self._buffer_other)[0]


class _FusedLogits:
    """Does what `_Logits` does by functions that a compiler makes one pass each of, from the product itself."""

    def __init__(self, fused: Fused, temperature: float, tiles: Sequence[_Tile]) -> None:
        self._fused, self._temperature = fused, temperature
        self._last = tiles[-1] if tiles else None
        self._kept: tuple[_Tile, Tensor] | None = None

    def numbers(self, tile: _Tile, hidden: Tensor, head: Head, places: Tensor) -> tuple[Tensor, Tensor]:
        product, form = self._product(tile, hidden, head), self._form(head)
        self._kept = (tile, product) if tile is self._last else None
        return self._fused.statistics(product, form), form.z(product.gather(1, places))

    def gradient(
        self, tile: _Tile, hidden: Tensor, head: Head, slopes: Slopes, places: Tensor, of_labels: Tensor
    ) -> Tensor:
        kept, self._kept = self._kept, None
        product = kept[1] if kept is not None and kept[0] == tile else self._product(tile, hidden, head)
        of_tokens, form = slopes.of_part(tile.tokens), self._form(head)
        return self._fused.gradient(product, form, of_tokens, places[:, 0], of_labels[:, 0])

    def _product(self, tile: _Tile, hidden: Tensor, head: Head) -> Tensor:
        rows = head.rows(tile.ids)
        return torch.nn.functional.linear(hidden[tile.tokens], rows.weight, rows.bias)

    def _form(self, head: Head) -> LogitForm:
        return LogitForm.of(head, self._temperature)


class _HeadGradients:
    """Gradients of hidden states, matrix and bias, where they are wanted, of all tiles.

    What one tile alone adds to is computed in its own type; what all add to adds up in float32 (or float64)."""

    def __init__(self, hidden: Tensor, head: Head, wanted: Sequence[bool], *, by_ids: bool) -> None:
        self._hidden, self._head, self._by_ids = hidden, head, by_ids

        def zeros(of: Tensor, adds_up: bool) -> Tensor:
            return new_like(of, *of.shape).zero_() if adds_up else torch.zeros_like(of)

        of_hidden, of_weight, of_bias = wanted[:3]
        self._of_hidden = zeros(hidden, by_ids or head.vocabulary is not None) if of_hidden else None
        self._of_weight = zeros(head.weight, not by_ids) if of_weight else None
        self._of_bias = None if head.bias is None or not of_bias else zeros(head.bias, not by_ids)

    def add(self, tile: _Tile, grad: Tensor) -> None:
        """grad: of h Wᵀ + b, of a tile."""
        low, (tokens, ids) = grad.to(self._hidden.dtype), tile
        if self._of_bias is not None:
            self._of_bias[ids] += grad.sum(0)
        if self._of_hidden is not None:
            _add_product(self._of_hidden[tokens], low, self._head.weight[ids], alone=not self._by_ids)
        if self._of_weight is not None:
            _add_product(self._of_weight[ids], low.T, self._hidden[tokens], alone=self._by_ids)

    def total(self) -> Iterator[Tensor | None]:
        """Return gradients of hidden states, matrix and bias, in their types. A collective of a spread vocabulary."""
        if self._of_hidden is not None and self._head.vocabulary is not None:
            dist.all_reduce(self._of_hidden, group=self._head.vocabulary.group)
        pairs = (
            (self._of_hidden, self._hidden),
            (self._of_weight, self._head.weight),
            (self._of_bias, self._head.bias),
        )
        return (None if total is None or of is None else total.to(of.dtype) for total, of in pairs)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, alone: bool) -> None:
    """Add a b to a total, which is zero where it is `alone`. It keeps the product's own precision on a GPU."""
    if alone and a.dtype == total.dtype:
        torch.mm(a, b, out=total)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        total += torch.mm(a, b, out_dtype=torch.float32)
    else:
        total += a @ b


def chunk_of(device: torch.device) -> int:
    """Logits in memory at once; see `schema.util.gpus.logits_at_once`."""
    return logits_at_once(torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0)


def _by_ids(tiles: Sequence[_Tile], hidden: Tensor, head: Head, how: _How, wanted: Sequence[bool]) -> bool:
    """Whether chunks of backward are of ids; see the module's docstring."""
    return len(tiles) > 1 and wanted[1] and how.drawn is None and len(hidden) < len(head.weight)


def _cut(n: int, most: int) -> list[slice]:
    """Cut n into as few parts of equal size as have at most so many each."""
    size = -(-n // max(1, -(-n // most)))
    return [slice(start, min(start + size, n)) for start in range(0, n, max(1, size))]


def _buffer(tiles: Sequence[_Tile], like: Tensor) -> Tensor:
    """Room for z of each of the tiles, one after the other."""
    return new_like(like, max((tokens * ids for tokens, ids in (tile.shape for tile in tiles)), default=0))


def _room(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
    """The beginning of a buffer as a matrix."""
    return buffer[: shape[0] * shape[1]].view(shape)


def _places(ids: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Which rows of the head ids are (0 for those of other ranks), and which are here."""
    if head.vocabulary is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    return places_of(ids, head.first, len(head.weight))


def _gathered(values: Tensor, head: Head) -> Tensor:
    """Gather the values of all ranks that have a part of the vocabulary, [ranks, …]. A collective of them."""
    if head.vocabulary is None:
        return values[None]
    parts = [torch.empty_like(values) for _ in range(head.ranks)]
    dist.all_gather(parts, values.contiguous(), group=head.vocabulary.group)
    return torch.stack(parts)


def _scores(
    hidden: Tensor, head: Head, how: _How, part: slice, buffer: Tensor, *, slopes: bool = False
) -> tuple[Tensor, Tensor | None]:
    """z of the tokens of a part, [chunk, V], in the beginning of the buffer.

    With `slopes` also the derivative of z by s (h Wᵀ + b) / T, [chunk, V], where it is not 1 everywhere."""
    temperature = how.temperature if how.drawn is None else 1.0
    z, slope = logits_into(hidden, head, temperature, _room(buffer, (len(hidden), len(head.weight)))), None
    if slopes and head.softcap is not None:  # 1 − tanh²
        slope = 1 - (z * (temperature / head.softcap)).square_()
    if how.drawn is not None:
        bend = how.drawn.apply(z, part.start, how.temperature, with_slope=slopes)
        z.clamp_(min=LEAST)
        if bend is not None:
            slope = bend if slope is None else slope.mul_(bend)
    return z, slope
