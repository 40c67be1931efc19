"""Expert parallelism: each rank has some experts of a mixture, whole, and computes what they say to all tokens.

    shared       ranks of tensor parallelism have the same tokens: each computes its experts', and all are added up
                 (not with sequence parallelism, where they have other ones)
    allgather    every rank gets the tokens of all; what its experts say to them is added up where they are from
    alltoall     each token travels to the ranks of its experts, and what they say back

    overlapped   `alltoall`, and while tokens travel to the experts a shared one computes what it says to all

`shared` and `allgather` send tokens of other ranks' experts to one that is not there, which transformers' layers of
experts skip. Every rank takes part in every exchange, with or without tokens, and gives its experts a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import nan

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.model.model import AnyModel
from policy_worker.model.sequence import EXPERTS, pattern
from policy_worker.parallel.collectives import (
    ROWS,
    AllGatherRows,
    AllReduceBackward,
    AllReduceForward,
    ReduceScatterRows,
    cut,
    gathered,
    travel,
    wrap,
)

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens [T, D], ids of their experts [T, k], weights of these [T, k]) → what they say, weighted and added up."""
Dispatch = Callable[[Forward, Tensor, Tensor, Tensor, int, dist.ProcessGroup], Tensor]
"""The same of all ranks, by a forward that knows `n` experts: (forward, tokens, ids, weights, n, group)."""


def apply_ep(model: AnyModel, mesh: DeviceMesh, dispatcher: str) -> AnyModel:
    """Spread the experts of `model`, if it has any, in place over the ep dimension; every rank has all before."""
    for layer, shared in expert_layers(model.lm):
        spread_experts(layer, shared, mesh, dispatcher)
    return model


def expert_layers(lm: PreTrainedModel) -> list[tuple[nn.Module, nn.Module | None]]:
    """The layers of experts, as the model's plan for tensor parallelism names them, and the shared expert of each."""
    plan = lm.tp_plan or {}
    named = ((name, layer) for name, layer in lm.named_modules() if plan.get(pattern(name)) == EXPERTS)
    return [(layer, shared_expert(lm, name)) for name, layer in named]


def shared_expert(lm: PreTrainedModel, name: str) -> nn.Module | None:
    """The expert that sees all tokens, next to a layer of experts of this name."""
    children = dict(lm.get_submodule(name.rpartition(".")[0]).named_children())
    return children.get("shared_experts", children.get("shared_expert"))


def spread_experts(layer: nn.Module, shared: nn.Module | None, mesh: DeviceMesh, dispatcher: str) -> None:
    """Keep this rank's experts of one layer. Raises `SettingsError` if their number cannot be divided."""
    count, ranks, dispatch, group = layer.num_experts, mesh.size(), DISPATCHERS[dispatcher], mesh.get_group()
    if count % ranks:
        raise SettingsError(f"{ranks} ranks cannot share the {count} experts of a layer: choose a divisor of {count}")
    cut(layer, mesh, ROWS)
    layer.num_experts = n = count // ranks
    layer._is_expert_parallel = True

    overlap = _Overlap(shared) if dispatcher == "overlapped" and shared is not None else None

    def compute(forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if overlap is None:
            return dispatch(forward, tokens, ids, weights, n, group)
        with overlap.of(tokens):
            return _alltoall(forward, tokens, ids, weights, n, group, overlap.compute)

    wrap(layer, compute)


class _Overlap:
    """A shared expert, which computes when the layer of experts says so instead of when the model calls it.

    A model that calls it before the layer of experts gets what it will say, which is NaN until then; one that calls
    it afterwards what it has said."""

    def __init__(self, shared: nn.Module) -> None:
        self._call: Callable[[Tensor], Tensor] = shared._call_impl
        self._asked: tuple[Tensor, Tensor] | None = None
        self._said: tuple[Tensor, Tensor] | None = None
        self._tokens: Tensor | None = None
        setattr(shared, "_call_impl", self._answer)  # noqa: B010

    @contextmanager
    def of(self, tokens: Tensor) -> Iterator[None]:
        """It will be asked of the tokens of the experts."""
        self._tokens = tokens
        try:
            yield
        except BaseException:  # what is computed again may end here
            self._asked = self._said = None
            raise
        finally:
            self._tokens = None

    def compute(self) -> None:
        """Compute what it says to all tokens."""
        assert self._tokens is not None
        if self._asked is None:
            self._said = self._tokens, self._call(self._tokens)
            return
        (asked, answer), self._asked = self._asked, None
        _check_same(asked, self._tokens)
        answer.copy_(self._call(asked))

    def _answer(self, tokens: Tensor) -> Tensor:
        if self._said is None:
            self._asked = tokens, torch.full_like(tokens, nan)
            return self._asked[1]
        (seen, said), self._said = self._said, None
        _check_same(tokens, seen)
        return said.view_as(tokens)


def _check_same(tokens: Tensor, others: Tensor) -> None:
    if tokens.data_ptr() != others.data_ptr() or tokens.numel() != others.numel():
        raise SettingsError(
            "policy.moe_shared_expert_overlap = true: the shared expert of this model sees something else than its "
            "experts: write false"
        )


def _of_own(forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor, n: int, rank: int) -> Tensor:
    """Compute what this rank's experts say to tokens."""
    others = ids // n != rank
    said = forward(tokens, (ids - rank * n).masked_fill(others, n), weights.masked_fill(others, 0))
    if torch.is_grad_enabled() and not said.requires_grad:  # nobody asked them: their gradients are zeros
        said = said + 0 * forward(tokens[:1], ids[:1] * 0, weights[:1] * 0)
    return said


def _shared(
    forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor, n: int, group: dist.ProcessGroup
) -> Tensor:
    tokens, weights = AllReduceBackward.apply(tokens, group), AllReduceBackward.apply(weights, group)
    return AllReduceForward.apply(_of_own(forward, tokens, ids, weights, n, group.rank()), group)


def _allgather(
    forward: Forward, tokens: Tensor, ids: Tensor, weights: Tensor, n: int, group: dist.ProcessGroup
) -> Tensor:
    count = len(tokens)
    longest = int(gathered(torch.tensor([count], device=tokens.device), group).max())
    rows = (nn.functional.pad(x, (0, 0, 0, longest - count), value=v) for x, v in ((tokens, 0.0), (weights, 0.0)))
    all_tokens, all_weights = (AllGatherRows.apply(x, group) for x in rows)
    all_ids = gathered(nn.functional.pad(ids, (0, 0, 0, longest - count), value=-1), group)
    return ReduceScatterRows.apply(_of_own(forward, all_tokens, all_ids, all_weights, n, group.rank()), group)[:count]


def _alltoall(
    forward: Forward,
    tokens: Tensor,
    ids: Tensor,
    weights: Tensor,
    n: int,
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor:
    ranks, each = group.size(), ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=n * ranks).view(ranks, n)
    theirs = torch.empty_like(counts)  # of my experts, by the ranks that ask them
    dist.all_to_all_single(theirs, counts, group=group)
    sent, received = torch.stack([counts.sum(1), theirs.sum(1)]).tolist()
    guests = travel(tokens[order // each], sent, received, group, meanwhile)
    experts = torch.arange(n, device=ids.device).repeat(ranks).repeat_interleave(theirs.flatten())
    said = _to_each(forward, guests, experts)
    said = travel(said, received, sent, group)
    by_token = torch.empty_like(said).index_copy(0, order, said).view(len(tokens), each, -1)
    return (by_token * weights[..., None]).sum(1).to(tokens.dtype)


def _to_each(forward: Forward, tokens: Tensor, experts: Tensor) -> Tensor:
    """Compute what one expert says to each token. Without tokens the experts still get a gradient, of zeros."""
    if len(tokens):
        return forward(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))
    nobody = tokens.sum(0, keepdim=True)
    return forward(nobody, experts.new_zeros(1, 1), nobody.new_zeros(1, 1))[:0]


DISPATCHERS: dict[str, Dispatch] = {
    "shared": _shared,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "overlapped": _alltoall,
}
