"""Attention within blocks of one row: samples that begin alike share the positions of what they have in common.

    row      [ shared | own | own | … ][ own | own | … ] …       [1, T], no padding
    block    `shared` positions, then the own ones of its samples, one sample after the other

The positions of `shared` see each other causally; those of a sample see `shared` and, causally, themselves. Whatever
else a model does acts on single positions, so that what samples share is computed once, and nothing for padding; own
positions are padded to the longest of their block for the attention alone. It costs what its blocks cost, whereas a
mask over the whole row would cost the square of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME, USUAL = "blocks", "sdpa"
"""The names in transformers of this attention, and of the one whose place it takes."""
LEAST_FILL = 0.75
"""Samples of one block without shared positions are at least this part of its longest."""


class Block(NamedTuple):
    """One block: it begins at `start` of the row, with `shared` positions; then come those of `samples` samples.

    own: [samples · width], where in the row the positions of each sample are, padded with any. back: where in that
    each own position is, in the order of the row. mask: [width, shared + width]; None without shared positions.
    """

    start: int
    shared: int
    samples: int
    own: Tensor
    back: Tensor
    mask: Tensor | None


def block_of(start: int, shared: int, lengths: Sequence[int], device: torch.device | str) -> Block:
    """A block whose samples have these own lengths."""
    first, width = start + shared, max(lengths)
    ends = np.cumsum(lengths)
    own = np.full((len(lengths), width), start, np.int64)
    back = [np.zeros(0, np.int64)]
    for number, (length, end) in enumerate(zip(lengths, ends.tolist(), strict=True)):
        own[number, :length] = first + np.arange(end - length, end)
        back.append(number * width + np.arange(length))
    mask = torch.ones(width, shared + width, dtype=torch.bool, device=device).tril(shared) if shared else None
    return Block(
        start, shared, len(lengths), _indices(own, device), _indices(np.concatenate(back), device), mask
    )


def _indices(array: npt.NDArray[np.int64], device: torch.device | str) -> Tensor:
    return torch.from_numpy(array.reshape(-1)).to(device, non_blocking=True)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    blocks: Sequence[Block] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in a layer: query [R, H, L, D], key and value [R, H', L, D] → [R, L, H, D].

    Without blocks each row is a sequence of its own, causal: the attention of torch as transformers calls it.

    Raises:
        ValueError: the layer wants what this attention does not do.
    """
    if options.get("sliding_window") is not None or options.get("s_aux") is not None:
        raise ValueError("it has layers with a sliding window or with attention sinks")
    if not blocks:
        found, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return found, None
    row = tuple(tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
    return torch.cat([part for block in blocks for part in _within(block, row, scaling)])[None], None


def _within(block: Block, row: tuple[Tensor, ...], scale: float | None) -> list[Tensor]:
    """The outputs of a block, [n, H, D], in the order of the row."""
    found = []
    shared = [tensor[block.start : block.start + block.shared].transpose(0, 1)[None] for tensor in row]
    how: dict[str, Any] = {"scale": scale, "enable_gqa": row[0].shape[1] != row[1].shape[1]}
    if block.shared:
        found.append(scaled_dot_product_attention(*shared, is_causal=True, **how)[0].transpose(0, 1))
    if len(block.back):
        query, *others = (
            tensor.index_select(0, block.own).unflatten(0, (block.samples, -1)).transpose(1, 2)
            for tensor in row
        )
        if block.shared:
            pairs = zip(shared[1:], others, strict=True)
            others = [torch.cat([of_all.expand(block.samples, -1, -1, -1), own], 2) for of_all, own in pairs]
            if query.is_cuda and how["enable_gqa"]:
                # With a mask, only the slowest kernel takes fewer heads of keys than of queries.
                others = [tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in others]
                how["enable_gqa"] = False
        out = scaled_dot_product_attention(query, *others, block.mask, is_causal=block.mask is None, **how)
        found.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.back))
    return found


AttentionInterface.register(NAME, attend)
