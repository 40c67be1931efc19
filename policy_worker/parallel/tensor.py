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

An adapter of a layer (`policy_worker.model.lora`) is cut as the layer is.

Gradients of copies are alike on all ranks, but where a copy serves own heads alone (norms of queries and keys): these
are partial sums until `finish_gradients`, once per optimizer step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.model.logprobs import VocabularyShard
from policy_worker.model.lora import adapted
from policy_worker.model.model import AnyModel
from policy_worker.model.stages import Elsewhere
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
    _check_adapters(lm, plan)
    ends = (lm.get_input_embeddings(), lm.get_output_embeddings())
    embeddings, head = (None if isinstance(end, Elsewhere) else end for end in ends)
    is_tied = head is not None and embeddings is not None and head.weight is embeddings.weight
    if embeddings is not None:
        ranks.cut_embeddings(embeddings)
    if head is not None:
        cut(head, mesh, ROWS)
        head.weight = embeddings.weight if is_tied else head.weight
        model.vocabulary_shard = ranks.shard_of(head.weight)
    copies: dict[str, _Copies] = {}
    for name, layer in lm.named_modules():
        style = plan.get(_pattern(name))
        if style is None or layer in ends:
            continue
        if style in STYLES and (isinstance(layer, nn.Linear) or adapted(layer)):
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


def _pattern(name: str) -> str:
    """The name of a module as a plan has it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check_adapters(lm: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """Raises `SettingsError`: an adapter is where layers are cut in a way of their own, or one is trained whole."""
    apart = lm.get_input_embeddings(), lm.get_output_embeddings()
    for name, layer in lm.named_modules():
        cut_so = any(layer is one for one in apart) or plan.get(_pattern(name)) is not None
        if cut_so and hasattr(layer, "modules_to_save"):
            raise SettingsError(
                f"tensor parallelism cannot cut {name}, of which there are two with modules_to_save: leave it out of "
                f"them, or write tp_size = 1"
            )
        if adapted(layer) and not layer.lora_A:
            raise SettingsError(
                f"tensor parallelism cannot cut {name} with an adapter: leave it out of target_modules, or write "
                f"tp_size = 1"
            )


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

    def cut_linear(self, layer: Any, style: Style, copies: _Copies) -> None:
        """One matrix, with its adapter if it has one; its bias is added once.

        An adapter's matrix at the side that is cut is cut likewise. The other one is a copy, to which a share of its
        gradient flows back: that of the rank's rows or columns.
        """
        base = layer.base_layer if adapted(layer) else layer
        if base.weight.shape[style.cut.dim] % self._size:
            raise SettingsError(
                f"tp_size = {self._size} does not divide the {base.weight.shape[style.cut.dim]} "
                f"{'outputs' if style.cut is ROWS else 'inputs'} of {base}: write a size that does"
            )
        cut(base, self._mesh, style.cut)
        adds_bias = style.cut is COLUMNS and base.bias is not None
        if base is not layer:
            for inputs, outputs in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
                own, other = (outputs, inputs) if style.cut is ROWS else (inputs, outputs)
                cut(own, self._mesh, style.cut)
                cut(other, self._mesh, COPY)
                wrap(own, _plain)
                wrap(other, _plain, partial=True)
            wrap(base, lambda forward, x: nn.functional.linear(x, base.weight) if adds_bias else forward(x))

        def compute(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            if style.before:
                x = copies.of(x, self._group) if style.before is Copy else style.before.apply(x, self._group)
            y = nn.functional.linear(x, base.weight) if adds_bias and base is layer else forward(x)
            y = style.after.apply(y, self._group) if style.after else y
            return y + _local(base.bias) if adds_bias else y

        wrap(layer, compute)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _plain(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x)


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
