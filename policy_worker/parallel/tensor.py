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
are partial sums until `finish_gradients`, once per optimizer step.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from policy_worker.errors import SettingsError
from policy_worker.model.logprobs import VocabularyShard
from policy_worker.model.model import AnyModel
from policy_worker.parallel.experts import EXPERTS, spread_experts
from policy_worker.parallel.parts import COLUMNS, COPY, ROWS, Add, Copy, Join, Part, cut, wrap
from weight_sync.publishing.gather import box_at


class Style(NamedTuple):
    """How a linear layer is cut; what becomes of its input before and of its output after it."""

    cut: Shard
    before: type[torch.autograd.Function] | None = None
    after: type[torch.autograd.Function] | None = None


STYLES = {
    "colwise": Style(ROWS, before=Copy),
    "colwise_gather_output": Style(ROWS, before=Copy, after=Join),
    "rowwise": Style(COLUMNS, after=Add),
    "rowwise_split_input": Style(COLUMNS, before=Part, after=Add),
}
"""By their names in a plan of transformers, which speaks of Wᵀ."""
OWN_HEADS = "replicated_with_grad_allreduce"
"""That of copies that serve the heads of a rank alone."""


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
        cut(head, mesh, ROWS)
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
            spread_experts(layer, mesh, "shared")
        elif style == OWN_HEADS:
            cut(layer, mesh, COPY)
            wrap(layer, lambda forward, *inputs: forward(*inputs), partial=True)
        else:
            raise SettingsError(
                f"{type(lm).__name__} is cut in a way that tensor parallelism does not know here: {name} is "
                f"{style!r}; write tp_size = 1 for it"
            )
    for layer in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in layer.parameters(recurse=False)):
            cut(layer, mesh, COPY)
            wrap(layer, lambda forward, *inputs, **named: forward(*inputs, **named))
    return model


class _Ranks:
    """Those that share the layers, seen from one of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._group = mesh, mesh.get_group()
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    def shard_of(self, weight: Tensor) -> VocabularyShard:
        """Which tokens the rows of this rank are of."""
        return VocabularyShard(
            self._group, box_at(weight.shape, [self._size], [self._rank], [ROWS]).starts[0]
        )

    def cut_embeddings(self, layer: nn.Embedding) -> None:
        """Tokens of other ranks get zeros from this one."""
        cut(layer, self._mesh, ROWS)
        first, n = self.shard_of(layer.weight).first, len(layer.weight.to_local())
        padding = -1 if layer.padding_idx is None else layer.padding_idx - first
        layer.padding_idx = padding if 0 <= padding < n else None

        def embed(forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
            others = (ids < first) | (ids >= first + n)
            found = forward((ids - first).masked_fill(others, 0)).masked_fill(others[..., None], 0)
            return Add.apply(found, self._group)

        wrap(layer, embed)

    def cut_linear(self, layer: nn.Linear, style: Style, copies: _Copies) -> None:
        """One matrix; its bias is added once."""
        if layer.weight.shape[style.cut.dim] % self._size:
            raise SettingsError(
                f"tp_size = {self._size} does not divide the {layer.weight.shape[style.cut.dim]} "
                f"{'outputs' if style.cut is ROWS else 'inputs'} of {layer}: write a size that does"
            )
        cut(layer, self._mesh, style.cut)

        def compute(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            if style.before:
                x = copies.of(x, self._group) if style.before is Copy else style.before.apply(x, self._group)
            bias = layer.bias if style.cut is COLUMNS else None
            y = forward(x) if bias is None else nn.functional.linear(x, layer.weight)
            y = style.after.apply(y, self._group) if style.after else y
            return y if bias is None else y + bias

        wrap(layer, compute)


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
            self._source, self._copy = x, Copy.apply(x, group)
        return self._copy
