"""Context parallelism (Ulysses): each rank of a unit has a piece of the positions of its rows, and in the attention
all positions of some heads.

    embeddings, norms, MLPs, output head     [R, L / n] positions, all heads of each
                                                 │  all-to-all         ▲  all-to-all
    attention                                    ▼  [R, L] positions   │  H / n heads

So the attention is the one of whole rows, with its blocks and windows, and everything else acts on single positions.
Outputs of tokens are gathered, so that each rank computes the same loss, and takes from its gradient that of its own
tokens: the gradient of a parameter on a rank is that of its piece, and FSDP adds them up (see `fsdp`).

Source: DeepSpeed Ulysses, arXiv 2309.14509. Where there are fewer heads of keys and values than ranks, they are
repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from policy_worker.model.attention import Outputs
from policy_worker.model.model import AnyModel
from policy_worker.parallel.mesh import CP


def apply_context(model: AnyModel, mesh: DeviceMesh) -> AnyModel:
    """Cut the rows of `model` over the mesh's `cp` dimension, if it has one."""
    if CP in (mesh.mesh_dim_names or ()):
        model.context = Ulysses(mesh.get_group(CP))
    return model


class Ulysses:
    """This rank's piece of the rows that a group shares: a `policy_worker.model.attention.AttentionContext`."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)

    def cut(self, rows: Tensor) -> Tensor:
        """This rank's piece [R, L / n] of whole rows [R, L]."""
        return rows.chunk(self._size, 1)[self._rank]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """All heads of its positions, [R, H, L / n, D] each → all positions of its heads, [R, H / n, L, D]."""
        repeats = self._size // gcd(self._size, key.shape[1])
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
        return cast(Sequence[Tensor], _Exchange.apply(self._group, query, key, value))

    def to_positions(self, outputs: Tensor) -> Tensor:
        """All positions of its heads, [R, L, H / n, D] → all heads of its positions, [R, L / n, H, D]."""
        return cast(Sequence[Tensor], _Exchange.apply(self._group, outputs))[0]

    def gather(self, outputs: Outputs, pieces: Sequence[Tensor]) -> Outputs:
        """Gather the outputs of all tokens, with gradient; see `AttentionContext.gather`. A collective."""
        if isinstance(outputs, Tensor):
            return cast(Outputs, _Gather.apply(self._group, pieces, outputs))
        if isinstance(outputs, tuple):
            parts = [self.gather(part, pieces) for part in outputs]
            return cast(Outputs, type(outputs)(*parts) if hasattr(outputs, "_fields") else tuple(parts))
        return outputs


class _Exchange(Function):
    """Scatters the second dimension of tensors over the ranks, and gathers the third.

    [R, A, B / n, …] → [R, A / n, B, …]"""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return _all_to_all(group, tensors, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_all_to_all(ctx.group, gradients, 2, 1)


def _all_to_all(group: ProcessGroup, tensors: Sequence[Tensor], scatter: int, gather: int) -> tuple[Tensor, ...]:
    """All tensors in one message to each rank: its part of dimension `scatter` of each."""
    parts = [torch.stack(tensor.chunk(dist.get_world_size(group), scatter)) for tensor in tensors]
    sent = torch.cat([part.flatten(1) for part in parts], 1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    arrived = received.split([part[0].numel() for part in parts], 1)
    pairs = zip(arrived, parts, strict=True)
    return tuple(torch.cat([*of_tensor.view_as(part)], gather) for of_tensor, part in pairs)


class _Gather(Function):
    """[k, …] of each rank → [K, …] on all; the gradient, which is the same on all ranks, is cut again."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, pieces: Sequence[Tensor], own: Tensor) -> Tensor:
        ctx.mine = pieces[dist.get_rank(group)]
        longest = max(map(len, pieces))
        outputs = own.new_empty(sum(map(len, pieces)), *own.shape[1:])
        if not outputs.numel():
            return outputs
        row = own.new_zeros(longest, *own.shape[1:])
        row[: len(own)] = own
        sent = row.flatten().view(torch.uint8)  # of any type
        received = [torch.empty_like(sent) for _ in pieces]
        dist.all_gather(received, sent, group=group)
        for piece, part in zip(pieces, received, strict=True):
            outputs[piece] = part.view(own.dtype).view_as(row)[: len(piece)]
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, gradient.index_select(0, ctx.mine)
