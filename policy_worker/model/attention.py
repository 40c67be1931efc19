"""Attention within blocks of one row: samples that begin alike share the positions of what they have in common.

    row      [ shared | own | own | … ][ own | own | … ] …       [1, T], no padding
    block    `shared` positions, then the own ones of its samples, one sample after the other

The positions of `shared` see each other causally; those of a sample see `shared` and, causally, themselves. Whatever
else a model does acts on single positions, so that what samples share is computed once, and nothing for padding; own
positions are padded to the longest of their block for the attention alone, or not at all where a kernel takes
sequences of any length: of each sample its own queries, with the keys of `shared` before its own. It costs what its
blocks cost, whereas a mask over the whole row would cost the square of the row. A layer with a sliding window of n
sees the last n positions of a sample alone, itself among them.

Where several processes share the rows, each with a piece of their positions, a `AttentionContext` gives the attention
whole rows of some heads and takes its outputs back: blocks are of whole rows whoever computes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from policy_worker.model import flash
from policy_worker.model.flash import Sequences

log = logging.getLogger(__name__)

NAME, USUAL = "blocks", "sdpa"
"""The names in transformers of this attention, and of the one whose place it takes."""
LEAST_FILL = 0.75
"""Samples of one block without shared positions are at least this part of its longest."""

Outputs = TypeVar("Outputs")


class AttentionContext(Protocol):
    """One process' share of rows that n processes have: a piece of their positions, and in the attention some
    heads (see `policy_worker.parallel.context`)."""

    def cut(self, rows: Tensor) -> Tensor:
        """Its piece [R, L / n] of whole rows [R, L]."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """All heads of its positions, [R, H, L / n, D] each → all positions of its heads, [R, H / n, L, D]."""

    def to_positions(self, outputs: Tensor) -> Tensor:
        """All positions of its heads, [R, L, H / n, D] → all heads of its positions, [R, L / n, H, D]."""

    def gather(self, outputs: Outputs, pieces: Sequence[Tensor]) -> Outputs:
        """From outputs of its tokens [k, …], a tensor or tuples, to those of all tokens [K, …], with gradient.

        pieces: int64 [k] for each process, which of the K tokens are its own."""


class Scattered:
    """One process with all of a row, whose positions are scattered among others: a context for probes.

    A model that acts on single positions outside of its attention computes the same of them as of the row itself.
    heads: how many its layers were seen to have. places: where the positions are among `length`."""

    def __init__(self, places: Tensor, length: int) -> None:
        self.places, self._length, self.heads = places, length, set[int]()

    def cut(self, rows: Tensor) -> Tensor:
        return rows.new_ones(len(rows), self._length).index_copy_(1, self.places, rows)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        self.heads.add(query.shape[1])
        return [tensor.index_select(2, self.places) for tensor in (query, key, value)]

    def to_positions(self, outputs: Tensor) -> Tensor:
        wide = outputs.new_zeros(len(outputs), self._length, *outputs.shape[2:])
        return wide.index_copy_(1, self.places, outputs)

    def gather(self, outputs: Outputs, pieces: Sequence[Tensor]) -> Outputs:
        del pieces
        return outputs


class Block(NamedTuple):
    """One block: it begins at `start` of the row, with `shared` positions; then come those of its samples, `lengths`
    of each."""

    start: int
    shared: int
    lengths: tuple[int, ...]

    @property
    def pieces(self) -> list[int]:
        """Lengths of the parts of the row that sequences are made of: shared ones, and those of each sample, or all
        of them where none are shared."""
        return [self.shared, *filter(None, self.lengths)] if self.shared else [sum(self.lengths)]


class Blocks:
    """The blocks of a row as one value, into which a compiler does not look: it would compile anew for other ones.

    What their attention needs on the device is made by the first layer that asks, for all."""

    def __init__(self, blocks: Sequence[Block], starts: Tensor | None = None) -> None:
        """starts: `starts_of` them, on the device; None: made when it is asked for."""
        self.all = tuple(blocks)
        self._starts = starts
        self._shares = any(block.shared for block in blocks)
        self._sequences: Sequences | None = None
        self._padded: dict[Block, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, int, int | None], Tensor | None] = {}

    def sequences(self, device: torch.device) -> Sequences:
        """Describe what a kernel attends within: the shared positions of a block, and each sample behind them."""
        if self._sequences is None:
            lengths = _lengths_of(self.all)
            longest = (max((pair[side] for pair in lengths), default=0) for side in (0, 1))
            starts = torch.from_numpy(starts_of(self.all)).to(device) if self._starts is None else self._starts
            self._sequences = Sequences(*starts.clone(), *longest)  # whole storages may be kept for backward
        return self._sequences

    def keys_of(self, row: Tensor) -> Tensor:
        """Keys or values of the sequences, [T, H, D], of those of the row [L, H, D]: shared ones again for each
        sample. Their gradients add up in one sum, in the same order each time."""
        if not self._shares:
            return row
        pieces = iter(row.split([n for block in self.all for n in block.pieces]))
        keys: list[Tensor] = []
        for block in self.all:
            keys.append(next(pieces))
            samples = len(block.pieces) - 1
            for shared in keys[-1].expand(samples, -1, -1, -1).unbind() if samples else ():
                keys += shared, next(pieces)
        return torch.cat(keys)

    def padded(self, block: Block, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where in the row the own positions of each sample are, padded with any, [samples · width]; and where in
        that each own position is, in the order of the row."""
        if block not in self._padded:
            first, width, ends = block.start + block.shared, max(block.lengths), np.cumsum(block.lengths)
            places = np.full((len(block.lengths), width), block.start, np.int64)
            back = [np.zeros(0, np.int64)]
            for number, (length, end) in enumerate(zip(block.lengths, ends.tolist(), strict=True)):
                places[number, :length] = first + np.arange(end - length, end)
                back.append(number * width + np.arange(length))
            tensors = (torch.from_numpy(array).to(device) for array in (places.reshape(-1), np.concatenate(back)))
            self._padded[block] = next(tensors), next(tensors)
        return self._padded[block]

    def mask(self, before: int, width: int, window: int | None, device: torch.device) -> Tensor | None:
        """See `_mask`."""
        if (key := (before, width, window)) not in self._masks:
            self._masks[key] = _mask(before, width, window, device)
        return self._masks[key]


def _lengths_of(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """How many queries and keys each sequence of blocks has."""
    shared = ([(block.shared, block.shared)] if block.shared else [] for block in blocks)
    own = ([(n, block.shared + n) for n in block.lengths if n] for block in blocks)
    return [pair for parts in zip(shared, own, strict=True) for part in parts for pair in part]


def starts_of(blocks: Sequence[Block]) -> npt.NDArray[np.int32]:
    """Where queries and keys of each sequence begin, and the last one ends, [2, S + 1]: see `Sequences`."""
    lengths = np.array([(0, 0), *_lengths_of(blocks)], np.int32)
    return np.ascontiguousarray(lengths.cumsum(0, dtype=np.int32).T)


def _mask(before: int, width: int, window: int | None, device: torch.device) -> Tensor | None:
    """[width, before + width]: what the last `width` positions of a sample see. None: all up to themselves."""
    if not before and (window is None or window >= width):
        return None
    mask = torch.ones(width, before + width, dtype=torch.bool, device=device).tril_(before)
    return mask if window is None else mask.triu_(before - window + 1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    blocks: Blocks | None = None,
    context: AttentionContext | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers calls it in a layer: query [R, H, L, D], key and value [R, H', L, D] → [R, L, H, D].

    Without blocks each row is a sequence of its own, causal. blocks: of whole rows. context: L is its piece of them.

    Raises `ValueError`: the layer wants what this attention does not do."""
    del module
    if options.get("s_aux") is not None:
        raise ValueError("it has layers with attention sinks")
    if context is not None:
        query, key, value = context.to_heads(query, key, value)
    form = _Form(scaling, sliding_window, options.get("softcap"))
    if attention_mask is None and form.cap is None and flash.has_kernel(query, key, value):
        outputs = _at_once(query, key, value, blocks, scaling, sliding_window)
    elif blocks is not None:
        row = tuple(tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [L, H, D]
        parts = [part for block in blocks.all for part in _within(blocks, block, row, form)]
        outputs = _lengthened(torch.cat(parts), query.shape[2])
    else:
        mask = attention_mask
        if mask is None:
            mask = _mask(0, query.shape[2], sliding_window, query.device)
        outputs = _attention(query, key, value, mask, form).transpose(1, 2)
    return outputs if context is None else context.to_positions(outputs), None


def _lengthened(outputs: Tensor, length: int) -> Tensor:
    """Outputs [n, H, D] of a row [1, length, H, D]; nothing behind them is a position of a sequence."""
    return pad(outputs, (0, 0, 0, 0, 0, length - len(outputs)))[None]


def _at_once(
    query: Tensor, key: Tensor, value: Tensor, blocks: Blocks | None, scale: float | None, window: int | None
) -> Tensor:
    """[R, L, H, D] of queries [R, H, L, D], keys and values [R, H', L, D]: all sequences in one call of a kernel."""
    rows, length, device = len(query), query.shape[2], query.device
    if blocks is None:
        starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
        sequences = Sequences(starts, starts, length, length)
        query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        return flash.Chosen.kernel(query, key, value, sequences, scale, window).unflatten(0, (rows, length))
    computed = sum(sum(block.pieces) for block in blocks.all)
    query, key, value = (tensor[0].transpose(0, 1)[:computed] for tensor in (query, key, value))
    key, value = blocks.keys_of(key), blocks.keys_of(value)
    return _lengthened(flash.Chosen.kernel(query, key, value, blocks.sequences(device), scale, window), length)


def _within(blocks: Blocks, block: Block, row: tuple[Tensor, ...], form: _Form) -> list[Tensor]:
    """The outputs of a block, [n, H, D], in the order of the row, by kernels that take sequences of one length."""
    outputs = []
    shared = [tensor[block.start : block.start + block.shared].transpose(0, 1)[None] for tensor in row]
    device = row[0].device
    if block.shared:
        query, key, value = shared
        mask = blocks.mask(0, block.shared, form.window, device)
        outputs.append(_attention(query, key, value, mask, form)[0].transpose(0, 1))
    if any(block.lengths):
        own, back = blocks.padded(block, device)
        query, key, value = (
            tensor.index_select(0, own).unflatten(0, (len(block.lengths), -1)).transpose(1, 2) for tensor in row
        )
        mask = blocks.mask(block.shared, query.shape[2], form.window, device)
        if block.shared:
            pairs = zip(shared[1:], (key, value), strict=True)
            key, value = (
                torch.cat([prompt.expand(len(response), -1, -1, -1), response], 2) for prompt, response in pairs
            )
        out = _attention(query, key, value, mask, form)
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, back))
    return outputs


class _Form(NamedTuple):
    """How scores are made: their factor, how far back a position sees, and at what they are capped."""

    scale: float | None
    window: int | None
    cap: float | None


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: _Form) -> Tensor:
    """[R, H, n, D] of queries [R, H, n, D], keys and values [R, H', m, D]: the last n of m positions, each of which
    sees up to itself, or the last `window` of these; mask says the same, None without a window where n is m."""
    grouped, scale = query.shape[1] != key.shape[1], form.scale
    if form.cap is not None:
        return _capped(query, key, value, mask, form)
    if query.is_cuda:
        flash.say_slow(query.dtype, query.shape[-1], value.shape[-1])
        if grouped:  # of torch's kernels for these types and sizes only the slowest takes fewer heads of keys
            key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
            grouped = False
    return scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: _Form) -> Tensor:
    """Compute `_attention` of scores s of which c tanh(s / c) counts. PyTorch has no kernel for it."""
    assert form.cap is not None
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if form.scale is None else form.scale)
    scores = form.cap * (scores / form.cap).tanh()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    accurate = torch.promote_types(scores.dtype, torch.float32)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1, accurate).to(value.dtype) @ value


def hide_from_compiler() -> None:
    """Let compiled layers call this attention as it is: its blocks are others in each row."""
    AttentionInterface.register(NAME, torch.compiler.disable(attend))


AttentionInterface.register(NAME, attend)
