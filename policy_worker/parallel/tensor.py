"""Tensor parallelism: each rank has some heads, some of each MLP's width, some experts and some of the vocabulary.

    x ─copy─▶ [W of q, k, v: rows]  ─▶ attention over own heads ─▶ [W of o: columns]    ─add─▶
    x ─copy─▶ [W of gate, up: rows] ─▶ own part of the width    ─▶ [W of down: columns] ─add─▶

Which layer is cut how is the model's own knowledge (the plan of transformers). Beyond it embeddings and output head
are cut by tokens of the vocabulary, so that tied ones stay one tensor (`Head` computes with its part), and experts
are never cut: each rank has some of them. Whatever is not cut is a copy on each rank.

Every parameter becomes a DTensor of the tp dimension, so that what comes after (FSDP2, optimizer, publishing,
checkpoints) needs no knowledge of this module. A layer computes with its own part as a plain tensor. Activations are
exchanged by four functions, in pairs that are each other's transposes:

    copy      x, alike on every rank     backward: add         join      the ranks' parts side by side
    add       the sum over the ranks     backward: copy        part      own part of x, alike on every rank

Gradients of copies are alike on all ranks, but where a copy serves own heads alone (norms of queries and keys): these
are partial sums until `sum_gradients`, once per optimizer step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from policy_worker.errors import SettingsError
from policy_worker.model.logprobs import VocabularyShard
from policy_worker.model.model import AnyModel
from weight_sync.publishing.gather import box_at

ROWS, COLUMNS, COPY = Shard(0), Shard(1), Replicate()


class Style(NamedTuple):
    """How a linear layer is cut; what becomes of its input before and of its output after it."""

    cut: Shard
    before: str = ""
    after: str = ""


STYLES = {
    "colwise": Style(ROWS, before="copy"),
    "colwise_gather_output": Style(ROWS, before="copy", after="join"),
    "rowwise": Style(COLUMNS, after="add"),
    "rowwise_split_input": Style(COLUMNS, before="part", after="add"),
}
"""By their names in a plan of transformers, which speaks of Wᵀ."""
OWN_HEADS, EXPERTS = "replicated_with_grad_allreduce", "moe_tp_experts"
"""Of copies that serve the heads of a rank alone; of a layer of experts."""


def apply_tp(model: AnyModel, mesh: DeviceMesh) -> AnyModel:
    """Cut `model` in place over the tp dimension; every rank has all of it before.

    Raises:
        SettingsError: the model has no plan, or one of a kind that is not known here.
    """
    lm, plan, ranks = model.lm, model.lm.tp_plan, _Ranks(mesh)
    if not plan:
        raise SettingsError(
            f"{type(lm).__name__} does not say how tensor parallelism cuts it: write tp_size = 1 for it"
        )
    embeddings, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    ranks.cut_embeddings(embeddings)
    if head is not None:
        ranks.cut(head, ROWS)
        head.weight = embeddings.weight if is_tied else head.weight
        model.vocabulary_shard = ranks.shard_of(head.weight)
    copies: dict[str, _Copies] = {}
    for name, layer in lm.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or layer is head or layer is embeddings:
            continue
        if style in STYLES and isinstance(layer, nn.Linear):
            block = name.rpartition(".")[0]
            ranks.cut_linear(layer, STYLES[style], copies.setdefault(block, _Copies(lm.get_submodule(block))))
        elif style == EXPERTS:
            ranks.cut_experts(name, layer)
        elif style == OWN_HEADS:
            ranks.cut(layer, COPY)
            _wrap(layer, lambda forward, *inputs: forward(*inputs), partial=True)
        else:
            raise SettingsError(
                f"{type(lm).__name__} is cut in a way that tensor parallelism does not know here: {name} is "
                f"{style!r}; write tp_size = 1 for it"
            )
    for layer in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in layer.parameters(recurse=False)):
            ranks.cut(layer, COPY)
            _wrap(layer, lambda forward, *inputs, **named: forward(*inputs, **named))
    return model


@torch.no_grad()
def sum_gradients(model: nn.Module) -> None:
    """Make whole gradients of partial sums, before an optimizer step. A collective of the tp dimension."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


class _Ranks:
    """Those that share the layers, seen from one of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._group = mesh, mesh.get_group()
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    def cut(self, layer: nn.Module, placement: Placement) -> None:
        """Keep of the layer's own parameters what this rank has."""
        for name, whole in layer.named_parameters(recurse=False):
            where = placement if not isinstance(placement, Shard) or placement.dim < whole.ndim else COPY
            box = box_at(whole.shape, [self._size], [self._rank], [where])
            own = whole.detach() if where is COPY else whole.detach()[box.slices()].clone()
            tensor = DTensor.from_local(
                own, self._mesh, [where], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            setattr(layer, name, nn.Parameter(tensor, requires_grad=whole.requires_grad))

    def shard_of(self, weight: Tensor) -> VocabularyShard:
        """Which tokens the rows of this rank are of."""
        return VocabularyShard(
            self._group, box_at(weight.shape, [self._size], [self._rank], [ROWS]).starts[0]
        )

    def cut_embeddings(self, layer: nn.Embedding) -> None:
        """Tokens of other ranks get zeros from this one."""
        self.cut(layer, ROWS)
        first, n = self.shard_of(layer.weight).first, len(layer.weight.to_local())
        padding = -1 if layer.padding_idx is None else layer.padding_idx - first
        layer.padding_idx = padding if 0 <= padding < n else None

        def embed(forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
            others = (ids < first) | (ids >= first + n)
            found = forward((ids - first).masked_fill(others, 0)).masked_fill(others[..., None], 0)
            return self._exchange("add", found)

        _wrap(layer, embed)

    def cut_linear(self, layer: nn.Linear, style: Style, copies: _Copies) -> None:
        """One matrix; its bias is added once."""
        if layer.weight.shape[style.cut.dim] % self._size:
            raise SettingsError(
                f"tp_size = {self._size} does not divide the {layer.weight.shape[style.cut.dim]} "
                f"{'outputs' if style.cut is ROWS else 'inputs'} of {layer}: write a size that does"
            )
        self.cut(layer, style.cut)

        def compute(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            if style.before:
                x = copies.of(x, self._group) if style.before == "copy" else self._exchange(style.before, x)
            bias = layer.bias if style.cut is COLUMNS else None
            y = forward(x) if bias is None else nn.functional.linear(x, layer.weight)
            y = self._exchange(style.after, y) if style.after else y
            return y if bias is None else y + bias

        _wrap(layer, compute)

    def cut_experts(self, name: str, layer: nn.Module) -> None:
        """Each rank computes what its experts say to all tokens. Others' are sent to one that is not there."""
        n = layer.num_experts // self._size
        if layer.num_experts % self._size:
            raise SettingsError(
                f"tp_size = {self._size} does not divide the {layer.num_experts} experts of {name}: write one that "
                f"does"
            )
        self.cut(layer, ROWS)
        layer.num_experts, layer._is_expert_parallel = n, True
        first = self._rank * n

        def compute(forward: Callable[..., Tensor], x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
            others = (experts < first) | (experts >= first + n)
            x, weights = self._exchange("copy", x), self._exchange("copy", weights)
            found = forward(x, (experts - first).masked_fill(others, n), weights.masked_fill(others, 0))
            return self._exchange("add", found)

        _wrap(layer, compute)

    def _exchange(self, how: str, x: Tensor) -> Tensor:
        return _EXCHANGES[how].apply(x, self._group)


class _Copies:
    """The copy of what several layers of one block read, whose gradients are then added up in one exchange."""

    def __init__(self, block: nn.Module) -> None:
        self._source: Tensor | None = None
        self._copy: Tensor | None = None

        def forget(*_: Any) -> None:
            self._source = self._copy = None

        block.register_forward_hook(forget, always_call=True)

    def of(self, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        if x is not self._source or self._copy is None:
            self._source, self._copy = x, _Copy.apply(x, group)
        return self._copy


def _wrap(layer: nn.Module, compute: Callable[..., Any], *, partial: bool = False) -> None:
    """Let `compute` call the layer's forward, for which its parameters are this rank's parts.

    partial: what flows back to them is this rank's share of their gradients.
    """
    forward = layer.forward

    def computed(*inputs: Any, **named: Any) -> Any:
        with _own_parameters(layer, partial):
            return compute(forward, *inputs, **named)

    layer.forward = computed


@contextmanager
def _own_parameters(layer: nn.Module, partial: bool) -> Iterator[None]:
    kept = dict(layer._parameters)
    placements = [Partial()] if partial else None
    layer._parameters.update(
        {n: p.to_local(grad_placements=placements) for n, p in kept.items() if p is not None}
    )
    try:
        yield
    finally:
        layer._parameters.update(kept)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _joined(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _part(grad, ctx.group), None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _joined(grad, ctx.group), None


_EXCHANGES: dict[str, type[torch.autograd.Function]] = {
    "copy": _Copy, "add": _Add, "join": _Join, "part": _Part,
}  # fmt: skip


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    found = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def _joined(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of the last dimension, of the same size."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, -1)


def _part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()]
