"""Attention within blocks of one row: samples that begin alike share the positions of what they have in common.

    row      [ shared | own | own | … ][ own | own | … ] …       [1, T], no padding
    block    `shared` positions, then the own ones of its samples, one sample after the other

The positions of `shared` see each other causally; those of a sample see `shared` and, causally, themselves. Whatever
else a model does acts on single positions, so that what samples share is computed once, and nothing for padding; own
positions are padded to the longest of their block for the attention alone. It costs what its blocks cost, whereas a
mask over the whole row would cost the square of the row. A layer with a sliding window of n sees the last n positions
of a sample alone, itself among them.

Where several processes share the rows, each with a piece of their positions, a `AttentionContext` gives the attention
whole rows of some heads and takes its outputs back: blocks are of whole rows whoever computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from policy_worker.errors import SettingsError

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
    """One block: it begins at `start` of the row, with `shared` positions; then come those of `samples` samples.

    own: [samples · width], where in the row the positions of each sample are, padded with any. back: where in that
    each own position is, in the order of the row. mask: [width, shared + width]; None without shared positions."""

    start: int
    shared: int
    samples: int
    own: Tensor
    back: Tensor
    mask: Tensor | None


class Blocks:
    """The blocks of a row as one value, into which a compiler does not look: it would compile anew for other ones."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.all = blocks


def block_of(start: int, shared: int, lengths: Sequence[int], device: torch.device | str) -> Block:
    """A block whose samples have these own lengths."""
    first, width = start + shared, max(lengths)
    ends = np.cumsum(lengths)
    own = np.full((len(lengths), width), start, np.int64)
    back = [np.zeros(0, np.int64)]
    for number, (length, end) in enumerate(zip(lengths, ends.tolist(), strict=True)):
        own[number, :length] = first + np.arange(end - length, end)
        back.append(number * width + np.arange(length))
    return Block(
        start,
        shared,
        len(lengths),
        _indices(own, device),
        _indices(np.concatenate(back), device),
        _mask(shared, width, None, device),
    )


def _indices(array: npt.NDArray[np.int64], device: torch.device | str) -> Tensor:
    return torch.from_numpy(array.reshape(-1)).to(device, non_blocking=True)


def _mask(before: int, width: int, window: int | None, device: torch.device | str) -> Tensor | None:
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
    if blocks is not None:
        row = tuple(tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [L, H, D]
        parts = [part for block in blocks.all for part in _within(block, row, scaling, sliding_window)]
        padding = query.shape[2] - sum(map(len, parts))
        outputs = pad(torch.cat(parts), (0, 0, 0, 0, 0, padding))[None]
    else:
        mask = attention_mask
        if mask is None:
            mask = _mask(0, query.shape[2], sliding_window, query.device)
        outputs = _attention(query, key, value, mask, scaling, sliding_window).transpose(1, 2)
    return outputs if context is None else context.to_positions(outputs), None


def _within(block: Block, row: tuple[Tensor, ...], scale: float | None, window: int | None) -> list[Tensor]:
    """The outputs of a block, [n, H, D], in the order of the row."""
    outputs = []
    shared = [tensor[block.start : block.start + block.shared].transpose(0, 1)[None] for tensor in row]
    device = row[0].device
    if block.shared:
        mask = _mask(0, block.shared, window, device)
        query, key, value = shared
        outputs.append(_attention(query, key, value, mask, scale, window)[0].transpose(0, 1))
    if len(block.back):
        query, key, value = (
            tensor.index_select(0, block.own).unflatten(0, (block.samples, -1)).transpose(1, 2) for tensor in row
        )
        mask = block.mask if window is None else _mask(block.shared, query.shape[2], window, device)
        if block.shared:
            pairs = zip(shared[1:], (key, value), strict=True)
            key, value = (
                torch.cat([prompt.expand(block.samples, -1, -1, -1), response], 2) for prompt, response in pairs
            )
        out = _attention(query, key, value, mask, scale, window)
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, block.back))
    return outputs


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, window: int | None
) -> Tensor:
    """[R, H, n, D] of queries [R, H, n, D], keys and values [R, H', m, D]: the last n of m positions, each of which
    sees up to itself, or the last `window` of these; mask says the same, None without a window where n is m."""
    if Chosen.flash is not None and _on_gpu(query):
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return Chosen.flash(query, key, value, scale, window).transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (mask is not None or not key.shape[-1] == value.shape[-1] <= 256):
        # Then only the slowest kernel takes fewer heads of keys than of queries.
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
        grouped = False
    return scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


# ---- FlashAttention --------------------------------------------------------------------------------------------

FLASH = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
"""The module of each version."""
Flash = Callable[[Tensor, Tensor, Tensor, float | None, int | None], Tensor]
"""(queries [R, n, H, D], keys, values [R, m, H', D], scale, window) → [R, n, H, D], causal and aligned at the end."""


class Chosen:
    """The kernel of this process' attention on a GPU. flash: None: torch's kernels."""

    flash: Flash | None = None


def use_flash(version: int | None) -> None:
    """Compute what is on a GPU with this version of FlashAttention from now on; None: with torch's kernels.

    What is on a CPU, as the small models by which architectures are proven, is computed by torch in any case.

    Raises `SettingsError`: it cannot be imported."""
    if version is None:
        Chosen.flash = None
        return
    try:
        function = import_module(FLASH[version]).flash_attn_func
    except (ImportError, OSError, AttributeError) as error:
        raise SettingsError(
            f"train.fa_version = {version}: {FLASH[version]} cannot be imported ({error}): see docs/precision.md, or "
            f"leave it out"
        ) from error
    Chosen.flash = staticmethod(flash_of(function, version))


def flash_of(function: Callable[..., Any], version: int) -> Flash:
    """`flash_attn_func` of a version's module, under the arguments that they have in common.

    From 2.1 on causal queries are the last ones of the keys' positions (Dao-AILab/flash-attention, README), which is
    how own positions see those that they share. No window is (-1, -1) in versions 2 and 3, (None, None) in 4."""
    endless = None if version == 4 else -1

    def attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        size = (endless, endless) if window is None else (window - 1, 0)
        alike = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
        output = function(query, key, value, softmax_scale=scale, causal=True, window_size=size, **alike)
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)  # some add the log-sum-exp

    return attention


def hide_from_compiler() -> None:
    """Let compiled layers call this attention as it is: its blocks are others in each row."""
    AttentionInterface.register(NAME, torch.compiler.disable(attend))


AttentionInterface.register(NAME, attend)
