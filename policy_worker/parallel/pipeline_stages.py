"""Cutting a model into the stages of a pipeline (`policy_worker.model.stages`): each rank keeps its own.

That stages in a row compute what the whole model does is proven before anything is taken away: with the model's own
weights, or on a small copy of one that will read its weights.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from policy_worker.errors import SettingsError
from policy_worker.model.model import Backbone
from policy_worker.model.prepare import PROBE_TOLERANCE, Lead, alone, distance, on_copy, probe_of
from policy_worker.model.stages import Elsewhere, StageInput, StageLayers, Stages, parts_of
from weight_sync import HubNames
from weight_sync.lora import Publishes

KEY = "policy.parallelism.pp_size"
LENGTH = 8
"""Tokens of the probe."""
COPIED = 3
"""Layers of a copy at least, each a stage: the first, one in between, and the last."""


def cut(model: Backbone, rank: int, ranks: int, chunks: int = 1, lead: Lead = alone) -> None:
    """Leave of a model what a rank's stages need, in place.

    lead: proves for all ranks what is proven on a copy.

    Raises `SettingsError`: it has fewer layers than stages, or its stages would not compute what it computes."""
    form = _Form.of(model)
    layers, stages = StageLayers(form.layers), ranks * chunks
    if stages > len(layers):
        raise SettingsError(
            f"{form.kind} has {len(layers)} layers, too few for {stages} stages: write {KEY} = "
            f"{max(len(layers) // chunks, 1)} or less"
        )
    parts, whole = parts_of(len(layers), stages), _without_numbers(model.lm)
    holders = form.holders(model, parts, ranks)
    if model.weights is None:
        states = _proven(model, form, layers, parts)
        width, dtype = states.shape[-1], states.dtype
    else:
        width = lead(lambda: on_copy(model, _width_of_copy, COPIED))
        dtype = model.lm.get_input_embeddings().weight.dtype
        _install(model, form, layers)
    tied = f"{form.embeddings}.weight" if form.is_tied(model) else ""
    model.stages = Stages(rank, ranks, parts, layers, holders, tied, width, dtype, whole)
    layers.keep({number for part in parts[rank::ranks] for number in part})
    if rank and not (model.stages.has_last and tied):
        _replace(model, form.embeddings)
    if not model.stages.has_last:
        for name in form.ends:
            _replace(model, name)


@dataclass(frozen=True)
class _Form:
    """Dotted names of what a model consists of. ends: what comes behind its layers, parameters or modules."""

    kind: str
    base: str
    layers_name: str
    layers: nn.ModuleList
    embeddings: str
    ends: tuple[str, ...]

    @staticmethod
    def of(model: Backbone) -> _Form:
        """Raises `SettingsError`: it is not one row of layers between embeddings and a head."""
        base, first = model.lm.base_model, model.decoder_layers()[0]
        names = {module: name for name, module in model.named_modules()}
        children = dict(base.named_children())
        rows = [n for n, m in children.items() if isinstance(m, nn.ModuleList) and first in list(m)]
        embeddings, head = model.lm.get_input_embeddings(), model.lm.get_output_embeddings()
        kind = type(model.lm).__name__
        if not rows or embeddings not in children.values():
            raise SettingsError(
                f"{kind} cannot be cut into stages: it is not one row of layers between embeddings and a head; "
                f"write {KEY} = 1"
            )
        after = list(children)[list(children).index(rows[0]) + 1 :]
        ends = [names[children[name]] for name in after if children[name].state_dict()]
        ends += [names[head]] if head is not None else []
        ends += [name for name, _ in model.named_parameters(recurse=False)]
        return _Form(
            kind, names[base], rows[0], cast(nn.ModuleList, children[rows[0]]), names[embeddings], tuple(ends)
        )

    def holders(self, model: Backbone, parts: Sequence[range], ranks: int) -> dict[str, int]:
        """By name of a parameter or buffer, the rank that answers for it. Raises `SettingsError`: nobody would."""
        of_layer = {number: stage % ranks for stage, part in enumerate(parts) for number in part}
        of_layers = f"{self.base}.{self.layers_name}."
        holder_of = {}
        for name in model.state_dict():
            if name.startswith(of_layers):
                holder_of[name] = of_layer[int(name.removeprefix(of_layers).partition(".")[0])]
            elif name.startswith(f"{self.embeddings}."):
                holder_of[name] = 0
            elif any(name == end or name.startswith(f"{end}.") for end in self.ends):
                holder_of[name] = ranks - 1
            else:
                raise SettingsError(
                    f"{self.kind} cannot be cut into stages: {name} is neither of its layers nor of embeddings and "
                    f"head; write {KEY} = 1"
                )
        return holder_of

    def is_tied(self, model: Backbone) -> bool:
        """Whether the head is the embeddings."""
        head = model.lm.get_output_embeddings()
        return head is not None and head.weight is model.lm.get_input_embeddings().weight


def names_here(model: Backbone, *, lora: Publishes = "merged") -> HubNames:
    """Name what the ranks that have the same stages of a model answer for, or all of it."""
    copies = () if model.stages is None else model.stages.copies
    return HubNames(model.lm, lora=lora, without={name.removeprefix("lm.") for name in copies})


def names_of_all(model: Backbone, *, lora: Publishes = "merged") -> HubNames:
    """Name the tensors of the whole model; those of one that is cut have no numbers."""
    return HubNames(model.lm if model.stages is None else model.stages.whole, lora=lora)


def _without_numbers(lm: nn.Module) -> nn.Module:
    """A copy of a module whose tensors are on the device meta."""
    made: dict[int, Tensor] = {}
    for tensor in itertools.chain(lm.parameters(), lm.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        made[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(lm, made)


def _replace(model: Backbone, name: str) -> None:
    """Put a placeholder where a module or parameter is."""
    above, _, last = name.rpartition(".")
    parent = model.get_submodule(above)
    held = getattr(parent, last)
    setattr(parent, last, None if isinstance(held, nn.Parameter) else Elsewhere(held))


def _install(model: Backbone, form: _Form, layers: StageLayers) -> None:
    setattr(model.get_submodule(form.base), form.layers_name, layers)


def _width_of_copy(copy: Backbone) -> int:
    """Prove a small model, each layer of which is a stage; the width of its states, which is that of the large one.

    Raises `SettingsError` as `_proven`."""
    form = _Form.of(copy)
    layers = StageLayers(form.layers)
    return int(_proven(copy, form, layers, parts_of(len(layers), len(layers))).shape[-1])


@torch.no_grad()
def _proven(model: Backbone, form: _Form, layers: StageLayers, parts: Sequence[range]) -> Tensor:
    """Put the layers into the model, and show that its stages in a row compute what it did; the last states.

    Each again after others have seen other tokens: what a layer leaves for one of another stage would not be there.
    Sliding windows are shorter than the probe meanwhile, so that kinds of layers differ. Raises `SettingsError`."""
    training, facts = model.training, model.lm.config.get_text_config()
    window = getattr(facts, "sliding_window", None)
    (ids, positions), others = probe_of(model, LENGTH), torch.arange(2, LENGTH + 2)[None] % model.vocabulary

    def run(ids: Tensor, stage: int, received: Tensor | None) -> Tensor:
        layers.entry = StageInput(parts[stage], stage == len(parts) - 1, received)
        return model._hidden(ids, positions, entry=layers.entry)

    model.eval()
    try:
        if window:
            facts.sliding_window = LENGTH // 2
        expected = model._hidden(ids, positions)
        _install(model, form, layers)
        states: list[Tensor | None] = [None]
        for stage in range(len(parts)):
            states.append(run(ids, stage, states[-1]))
        last = cast(Tensor, states[-1])
        error = distance(last, expected)
        for stage in reversed(range(len(parts))):
            run(others, 0, None)
            error = max(error, distance(run(ids, stage, states[stage]), cast(Tensor, states[stage + 1])))
    except (TypeError, AttributeError, RuntimeError, LookupError, ValueError, AssertionError) as fault:
        raise SettingsError(
            f"{form.kind} cannot be cut into stages: its forward does not go through its layers alone "
            f"({type(fault).__name__}: {fault}); write {KEY} = 1"
        ) from fault
    finally:
        if window:
            facts.sliding_window = window
        model.train(training)
    if not error <= PROBE_TOLERANCE.get(expected.dtype, PROBE_TOLERANCE[torch.float32]):
        raise SettingsError(
            f"{form.kind} cannot be cut into stages: they compute something else than the whole model (off by "
            f"{error:.3g}); write {KEY} = 1"
        )
    return last
