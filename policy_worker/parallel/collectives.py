"""A layer of which each rank has a part, and what travels around it.

The parameters of such a layer are DTensors, so that what comes after (FSDP2, optimizer, publishing, checkpoints) need
not know of it; it computes with this rank's part, as plain tensors. Activations are exchanged by functions in
pairs that are each other's transposes:

    copy      x, alike on every rank          backward: add         join      the ranks' parts side by side
    add       the sum over the ranks          backward: copy        part      own part of x, alike on every rank
    gather    rows of all ranks               backward: scatter     travel    rows to the ranks that they are for
    scatter   own rows of the sum             backward: gather                backward: travel back
    unite     rows of all ranks, of which all make the same                   backward: own rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from policy_worker.parallel.mesh import EP
from weight_sync.publishing.gather import box_at

ROWS, COLUMNS, COPY = Shard(0), Shard(1), Replicate()


def cut(layer: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Keep of the layer's own parameters what this rank of a mesh of one dimension has."""
    for name, whole in layer.named_parameters(recurse=False):
        where = placement if not isinstance(placement, Shard) or placement.dim < whole.ndim else COPY
        box = box_at(whole.shape, [mesh.size()], [mesh.get_local_rank()], [where])
        # A clone of a copy too: one view keeps a whole file of weights mapped.
        part = whole.detach()[box.slices()].clone()
        tensor = DTensor.from_local(part, mesh, [where], run_check=False, shape=whole.shape, stride=whole.stride())
        setattr(layer, name, nn.Parameter(tensor, requires_grad=whole.requires_grad))


def wrap(layer: nn.Module, compute: Callable[..., Any], *, partial: bool = False) -> None:
    """Let `compute` call the layer's forward, for which its parameters are this rank's parts.

    partial: what flows back to them is this rank's share of their gradients."""
    forward = layer.forward

    def computed(*inputs: Any, **named: Any) -> Any:
        with _own_parameters(layer, partial):
            return compute(forward, *inputs, **named)

    layer.forward = computed


@contextmanager
def _own_parameters(layer: nn.Module, partial: bool) -> Iterator[None]:
    kept = dict(layer._parameters)
    placements = [Partial()] if partial else None
    layer._parameters.update({n: p.to_local(grad_placements=placements) for n, p in kept.items() if p is not None})
    try:
        yield
    finally:
        layer._parameters.update(kept)


@torch.no_grad()
def finish_gradients(model: nn.Module) -> None:
    """Make whole gradients of partial ones, before an optimizer step. A collective.

    What is used for a part of the work is a sum over ranks. FSDP averages over the ranks that hold a parameter, and
    experts have seen the tokens of more: of all those that share them."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        if any(placement.is_partial() for placement in gradient.placements):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
        mesh = gradient.device_mesh
        if EP in (mesh.mesh_dim_names or ()):
            gradient.to_local().div_(mesh[EP].size())


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _joined(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of the last dimension, of the same size."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()]


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, as many of each."""
    rows = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_single(rows, x.contiguous(), group=group)
    return rows


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_single(rows, x.contiguous(), group=group)
    return rows


def _own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


Exchanged = Callable[[Tensor, dist.ProcessGroup], Tensor]


def _function(forward: Exchanged, backward: Exchanged) -> type[torch.autograd.Function]:
    """A function of (x, group) with the exchange that its gradient takes."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.group), None

    return Exchange


AllReduceBackward, AllReduceForward = (
    _function(lambda x, _: x.view_as(x), _summed),
    _function(_summed, lambda grad, _: grad),
)
AllGatherColumns, SplitColumns = _function(_joined, _part), _function(_part, _joined)
AllGatherRows, ReduceScatterRows = _function(gathered, _scattered), _function(_scattered, gathered)
UniteRows = _function(gathered, _own_rows)


def travel(
    x: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] = lambda: None,
) -> Tensor:
    """Rows to the ranks that they are for. sent, received: how many go to each rank, and come from it.

    meanwhile: computes while they are on their way; its backward runs while their gradients travel back, since of
    what is ready in a backward that comes first which came last."""
    way = _Way(sent, received, group)
    arriving = _Leave.apply(x, way)
    meanwhile()
    return cast(Tensor, _Arrive.apply(arriving, way))


class _Way:
    """Rows that are on their way, there or back."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> None:
        self._sizes, self._group = (list(sent), list(received)), group
        self._open: tuple[dist.Work, Tensor, Tensor] | None = None

    def begin(self, x: Tensor, *, back: bool = False) -> Tensor:
        """Begin to send; return the room of what will have arrived at the end."""
        sent, received = reversed(self._sizes) if back else self._sizes
        leaving, arriving = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        work = dist.all_to_all_single(arriving, leaving, received, sent, group=self._group, async_op=True)
        assert work is not None
        self._open = work, leaving, arriving
        return arriving

    def end(self) -> Tensor:
        """Wait for what arrives, and return it."""
        assert self._open is not None
        work, _, arrived = self._open
        work.wait()
        self._open = None
        return arrived


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.begin(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del grad  # what arrived; it is back by now
        return ctx.way.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        way.end()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.way.begin(grad, back=True)
        return grad, None
