"""The output head of a model: from hidden states to logits.

    z = s (h Wᵀ + b) / T,  or under a cap c: c tanh(s (h Wᵀ + b) / c) / T

`policy_worker.model.logits.logprobs` computes log-probs, entropies and KLs from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class VocabularyShard(NamedTuple):
    """Which ids the rows of an output matrix are of, on this rank of a group: those from `first` on.

    Ranks have rows in their order, at least one each; how many may differ."""

    group: dist.ProcessGroup
    first: int


class Head(NamedTuple):
    """How a model makes logits of hidden states: weight [V, D], bias [V], factor s and cap c of the formula above.

    vocabulary: where weight and bias have the rows of some ids only. Whatever is computed of hidden states, which are
    the same on all ranks of its group, is over all ids then, and the same on all ranks."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    vocabulary: VocabularyShard | None = None

    def to(self, device: torch.device | str) -> Head:
        """The same on another device, which the group has to serve."""
        bias = None if self.bias is None else self.bias.to(device)
        return self._replace(weight=self.weight.to(device), bias=bias)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [K, V] of hidden states [K, D], for the rows that it has, without gradient."""
        return logits_into(hidden, self, 1.0, new_like(hidden, len(hidden), len(self.weight)))

    @property
    def first(self) -> int:
        """The id of its first row."""
        return 0 if self.vocabulary is None else self.vocabulary.first

    @property
    def ranks(self) -> int:
        """Over how many its rows are spread."""
        return 1 if self.vocabulary is None else dist.get_world_size(self.vocabulary.group)

    def rows(self, chosen: slice) -> Head:
        """These of its rows alone, as if its vocabulary had no others."""
        bias = None if self.bias is None else self.bias[chosen]
        return self._replace(weight=self.weight[chosen], bias=bias, vocabulary=None)

    def on_rows_of(self, other: Head) -> Head:
        """This head, over the rows of the other one.

        Raises `ValueError`: it has other ones, of a vocabulary that is spread in another way."""
        first, rows = other.first, len(other.weight)
        if self.vocabulary is None and other.vocabulary is not None:
            bias = None if self.bias is None else self.bias[first : first + rows]
            return self._replace(weight=self.weight[first : first + rows], bias=bias, vocabulary=other.vocabulary)
        if (self.first, len(self.weight)) != (first, rows):
            raise ValueError(
                f"rows {self.first} to {self.first + len(self.weight) - 1} of one vocabulary next to rows {first} to "
                f"{first + rows - 1} of another: spread both over the same ranks"
            )
        return self


def new_like(like: Tensor, *shape: int) -> Tensor:
    """Make an empty tensor of that shape, on the device of `like`; float64 if that is, else float32."""
    return like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32))


def logits_into(hidden: Tensor, head: Head, temperature: float, out: Tensor) -> Tensor:
    """z of the module's docstring, [chunk, V], float32 or float64: what is sampled from, before any filter."""
    weight, bias, scale, softcap = head[:4]
    factor = scale / (temperature if softcap is None else softcap)
    if hidden.dtype == out.dtype:
        torch.addmm(
            out if bias is None else bias,
            hidden,
            weight.T,
            beta=float(bias is not None) * factor,
            alpha=factor,
            out=out,
        )
    else:
        out.copy_(torch.nn.functional.linear(hidden, weight, bias))
        if factor != 1.0:
            out.mul_(factor)
    return out if softcap is None else out.tanh_().mul_(softcap / temperature)
