"""Tensor parallelism: each rank has some heads, some of each MLP's width, some experts and some of the vocabulary.

    x ─copy─▶ [W of q, k, v: rows]  ─▶ attention over own heads ─▶ [W of o: columns]    ─add─▶
    x ─copy─▶ [W of gate, up: rows] ─▶ own part of the width    ─▶ [W of down: columns] ─add─▶

Which layer is cut how is the model's own knowledge (the plan of transformers). Beyond it embeddings and output head
are cut by tokens of the vocabulary, so that tied ones stay one tensor (`Head` computes with its part), and experts
are never cut: each rank has some of them. Whatever is not cut is a copy on each rank.

Every parameter becomes a DTensor of the tp dimension, so that what comes after (FSDP2, optimizer, publishing,
checkpoints) needs no knowledge of this module. A layer computes with its own part as a plain tensor. Activations are
exchanged by the functions of `policy_worker.parallel.collectives`.

With sequence parallelism (`policy_worker.model.sequence`) what passes between blocks is cut by positions: a block
gathers them where `copy` stands here, and where `add` stands each rank gets its part of the sum. That is as much to
send. Ranks have other tokens then, which reach experts by the exchanges of expert parallelism.

An adapter of a layer (`policy_worker.model.lora`) is cut as the layer is.

Gradients of copies are alike on all ranks, but where a copy serves own heads (norms of queries and keys) or own
positions alone: these are partial sums until `finish_gradients`, once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.memory.activations import is_kept_on_host, is_recomputed
from policy_worker.memory.offload import local_of
from policy_worker.model.logits.head import VocabularyShard
from policy_worker.model.lora import adapted
from policy_worker.model.model import AnyModel
from policy_worker.model.sequence import EXPERTS, blocks_of, gather_into, pattern
from policy_worker.model.stages import Elsewhere
from policy_worker.parallel.collectives import (
    COLUMNS,
    COPY,
    ROWS,
    AllGatherColumns,
    AllGatherRows,
    AllReduceBackward,
    AllReduceForward,
    ReduceScatterRows,
    SplitColumns,
    UniteRows,
    cut,
    wrap,
)
from policy_worker.parallel.experts import shared_expert, spread_experts
from weight_sync.publishing.gather import box_at


class Style(NamedTuple):
    """How a linear layer is cut; what becomes of its input before and of its output after it."""

    cut: Shard
    before: type[torch.autograd.Function] | None = None
    after: type[torch.autograd.Function] | None = None


STYLES = {
    "colwise": Style(ROWS, before=AllReduceBackward),
    "colwise_gather_output": Style(ROWS, before=AllReduceBackward, after=AllGatherColumns),
    "rowwise": Style(COLUMNS, after=AllReduceForward),
    "rowwise_split_input": Style(COLUMNS, before=SplitColumns, after=AllReduceForward),
}
"""By their names in a plan of transformers, which speaks of Wᵀ."""
OWN_HEADS = "replicated_with_grad_allreduce"
"""The style of copies that serve the heads of a rank alone, or its width of an MLP."""
SHARED = {*STYLES, OWN_HEADS}


def apply_tp(model: AnyModel, mesh: DeviceMesh, dispatcher: str | None = None) -> AnyModel:
    """Cut `model` in place over the tp dimension; every rank has all of it before.

    dispatcher: with sequence parallelism, how tokens reach experts (see `experts`); None: without it.

    Raises `SettingsError`: the model has no plan, or one of a kind that is not known here."""
    lm, ranks = model.lm, _Ranks(mesh, sequence=dispatcher is not None)
    if not lm.tp_plan:
        raise SettingsError(
            f"{type(lm).__name__} does not say how tensor parallelism cuts it: write tp_size = 1 for it"
        )
    plan = _whole_plan(lm)
    _check_adapters(lm, plan)
    ends = (lm.get_input_embeddings(), lm.get_output_embeddings())
    here: list[Any] = [None if isinstance(end, Elsewhere) else end for end in ends]
    embeddings, head = here
    is_tied = head is not None and embeddings is not None and head.weight is embeddings.weight
    if embeddings is not None:
        ranks.cut_embeddings(embeddings)
    if head is not None:
        cut(head, mesh, ROWS)
        head.weight = embeddings.weight if is_tied else head.weight
        model.vocabulary_shard = ranks.shard_of(head.weight)
    blocks = {
        name: _Block(block, ranks, _is_all_cut(block, name, plan), keeps=_keeps(lm, name))
        for name, block in blocks_of(lm).items()
    }
    for name, layer in lm.named_modules():
        style = plan.get(pattern(name))
        if style is None or layer in ends:
            continue
        if style in STYLES and (isinstance(layer, nn.Linear) or adapted(layer)):
            ranks.cut_linear(layer, STYLES[style], blocks.get(name.rpartition(".")[0]))
        elif style == EXPERTS:
            spread_experts(layer, shared_expert(lm, name), mesh, dispatcher or "shared")
        elif style == OWN_HEADS:
            cut(layer, mesh, COPY)
            wrap(layer, lambda forward, *inputs, **named: forward(*inputs, **named), partial=True)
        else:
            raise SettingsError(
                f"{type(lm).__name__} is cut in a way that tensor parallelism does not know here: {name} is "
                f"{style!r}; write tp_size = 1 for it"
            )
    see_all = {model, *(layer for name in blocks for layer in lm.get_submodule(name).modules())}
    for layer in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in layer.parameters(recurse=False)):
            cut(layer, mesh, COPY)
            partial = ranks.sequence and layer not in see_all
            wrap(layer, lambda forward, *inputs, **named: forward(*inputs, **named), partial=partial)
    if ranks.sequence:
        model.gather = ranks.unite
    return model


def _whole_plan(lm: PreTrainedModel) -> dict[str, str]:
    """The model's plan, with what some leave out: norms and activations between layers that are cut, which unlike
    those before such layers have no parameters of the states' width."""
    plan, width = dict(lm.tp_plan), lm.config.get_text_config().hidden_size
    for name, block in blocks_of(lm).items():
        inner = {part for layer in block.modules() if adapted(layer) for part in [*layer.modules()][1:]}
        named = ((suffix, part) for suffix, part in block.named_modules() if suffix and part not in inner)
        parts = {pattern(f"{name}.{suffix}"): part for suffix, part in named}
        linear = (plan.get(at) for at, part in parts.items() if isinstance(part, nn.Linear) or adapted(part))
        if all(style in ("colwise", "rowwise") for style in linear):
            unplanned = ((at, [*part.parameters(recurse=False)]) for at, part in parts.items() if at not in plan)
            others = (at for at, some in unplanned if some and all(p.numel() != width for p in some))
            plan |= dict.fromkeys(others, OWN_HEADS)
    return plan


def _keeps(lm: PreTrainedModel, name: str) -> bool:
    """Whether a block keeps what it gathered: it, or what is around it, is computed again or keeps in host memory."""
    around = (lm.get_submodule(".".join(name.split(".")[:n])) for n in range(1, name.count(".") + 2))
    return lm.is_gradient_checkpointing or any(is_recomputed(m) or is_kept_on_host(m) for m in around)


def _is_all_cut(block: nn.Module, name: str, plan: Mapping[str, str]) -> bool:
    """Whether ranks share all that a block computes: what each finds of a gradient of its input are then shares."""
    named = ((plan.get(pattern(f"{name}.{suffix}")), layer) for suffix, layer in block.named_modules())
    layers = (layer for style, layer in named if style in SHARED)
    return {*block.parameters()} <= {parameter for layer in layers for parameter in layer.parameters()}


def _check_adapters(lm: PreTrainedModel, plan: Mapping[str, str]) -> None:
    """Raises `SettingsError`: an adapter is where layers are cut in a way of their own, or one is trained whole."""
    apart = lm.get_input_embeddings(), lm.get_output_embeddings()
    for name, layer in lm.named_modules():
        cut_so = any(layer is end for end in apart) or plan.get(pattern(name)) is not None
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
    """The ranks that share the layers, seen from one of them."""

    def __init__(self, mesh: DeviceMesh, *, sequence: bool) -> None:
        self._mesh, self._group, self.sequence = mesh, mesh.get_group(), sequence
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    def copy(self, x: Tensor) -> Tensor:
        """Copy what is alike on all ranks."""
        return cast(Tensor, AllReduceBackward.apply(x, self._group))

    def add(self, x: Tensor) -> Tensor:
        """The sum over the ranks; with sequence parallelism that of this rank's positions."""
        return (
            self._by_position(ReduceScatterRows, x)
            if self.sequence
            else cast(Tensor, AllReduceForward.apply(x, self._group))
        )

    def gather(self, x: Tensor) -> Tensor:
        """All positions, of whose gradient each rank will find a share."""
        return self._by_position(AllGatherRows, x)

    def unite(self, x: Tensor) -> Tensor:
        """All positions, of which all ranks will compute the same."""
        return self._by_position(UniteRows, x)

    def _by_position(self, function: type[torch.autograd.Function], x: Tensor) -> Tensor:
        return function.apply(x.movedim(-2, 0), self._group).movedim(0, -2).contiguous()

    def shard_of(self, weight: Tensor) -> VocabularyShard:
        """Which tokens the rows of this rank are of."""
        return VocabularyShard(self._group, box_at(weight.shape, [self._size], [self._rank], [ROWS]).starts[0])

    def cut_embeddings(self, layer: nn.Embedding) -> None:
        """Tokens of other ranks get zeros from this one."""
        cut(layer, self._mesh, ROWS)
        first, n = self.shard_of(layer.weight).first, len(layer.weight.to_local())
        padding = -1 if layer.padding_idx is None else layer.padding_idx - first
        layer.padding_idx = padding if 0 <= padding < n else None

        def embed(forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
            others = (ids < first) | (ids >= first + n)
            embedded = forward((ids - first).masked_fill(others, 0)).masked_fill(others[..., None], 0)
            return self.add(embedded)

        wrap(layer, embed)

    def cut_linear(self, layer: Any, style: Style, block: _Block | None) -> None:
        """One matrix, with its adapter if it has one; its bias is added once.

        An adapter's matrix at the side that is cut is cut likewise. The other one is a copy, to which a share of its
        gradient flows back: that of the rank's rows or columns."""
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
                cut_matrix, copied_matrix = (outputs, inputs) if style.cut is ROWS else (inputs, outputs)
                cut(cut_matrix, self._mesh, style.cut)
                cut(copied_matrix, self._mesh, COPY)
                wrap(cut_matrix, _plain)
                wrap(copied_matrix, _plain, partial=True)
            wrap(base, lambda forward, x: nn.functional.linear(x, base.weight) if adds_bias else forward(x))

        def compute(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            if style.before:
                x = (
                    block.copy_of(x)
                    if block and style.before is AllReduceBackward
                    else style.before.apply(x, self._group)
                )
            y = nn.functional.linear(x, base.weight) if adds_bias and base is layer else forward(x)
            if style.after:
                y = self.add(y) if style.after is AllReduceForward else style.after.apply(y, self._group)
            if adds_bias:
                bias = local_of(base.bias)
                y = y + (self.copy(bias) if self.sequence else bias)
            return y

        wrap(layer, compute)


def _plain(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x)


class _Again:
    """The memory that a block keeps for its backward: of states that it gathered this rank's part alone."""

    def __init__(self, own: Tensor, gathered: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        self._own, self._gather, self._place = own, gather, gathered.untyped_storage().data_ptr()
        self._views = 0
        self._gathered: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != self._place:
            return tensor
        self._views += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        """A collective for the first of the views that are kept; it is given back with the last one."""
        if isinstance(kept, Tensor):
            return kept
        gathered = self._gather(self._own) if self._gathered is None else self._gathered
        self._views -= 1
        self._gathered = gathered if self._views else None
        return gathered.as_strided(*kept)


class _Block:
    """A module whose layers read all positions.

    What several of its layers read is one copy, whose gradients are then added up in one exchange. Where it gathers
    positions and is all cut, these are added up where it gathered. keeps: what it gathered stays for its backward,
    which is near where it is computed again, or in host memory; else it is gathered again."""

    def __init__(self, block: nn.Module, ranks: _Ranks, is_all_cut: bool, *, keeps: bool) -> None:
        self._source: Tensor | None = None
        self._copy: Tensor | None = None
        self._copies: Callable[[Tensor], Tensor] = ranks.copy
        if ranks.sequence:
            gather = ranks.gather if is_all_cut else ranks.unite
            self._copies = (lambda x: x) if is_all_cut else ranks.copy
            own: list[Tensor] = []

            def enter(states: Tensor) -> Tensor:
                own.append(states.detach())
                return gather(states)

            forward = block.forward

            def compute(*inputs: Any, **named: Any) -> Any:
                again = _Again(own.pop(), inputs[0] if inputs else named["hidden_states"], ranks.unite)
                with saved_tensors_hooks(again.pack, again.unpack):
                    return forward(*inputs, **named)

            gather_into(block, gather if keeps else enter)
            if not keeps:
                block.forward = compute

        def forget(*_: Any) -> None:
            self._source = self._copy = None

        block.register_forward_hook(forget, always_call=True)

    def copy_of(self, x: Tensor) -> Tensor:
        if x is not self._source or self._copy is None:
            self._source, self._copy = x, self._copies(x)
        return self._copy
