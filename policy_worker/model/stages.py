"""A model cut into the stages of a pipeline: runs of its layers, before the first of them the embeddings, behind the
last one the norm and the head.

    cut       leaves in a model what this rank's stages have; parameters keep their names
    Entry     one stage in a forward: states [R, L, D] enter before its layers and are passed on behind them

A stage runs by the model's own forward, in which the layers of other stages let states through: so a layer keeps its
number, and with it its kind of attention and its mask. Whatever else the forward does to embeddings or behind the
layers meets states that nobody reads. That stages in a row then compute what the whole model does is proven before
anything is taken away: with the model's own weights, or on a small copy of one that will read its weights.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from policy_worker.errors import SettingsError
from policy_worker.model.model import PROBE_TOLERANCE, Backbone, Lead, alone, on_copy
from weight_sync import HubNames
from weight_sync.lora import Publishes

KEY = "policy.parallelism.pp_size"
LENGTH = 8
"""Tokens of the probe."""
COPIED = 3
"""Layers of a copy at least, each a stage: the first, one in between, and the last."""


@dataclass
class Entry:
    """A stage in one forward.

    received: the states before its layers; None: it begins with the embeddings. passed: those behind its layers, once
    it has run; the last stage goes on to the norm instead.
    """

    layers: range
    is_last: bool
    received: Tensor | None = None
    passed: Tensor | None = None

    def through(self, number: int, states: Tensor) -> Tensor:
        """What becomes of states at a layer of another stage."""
        if number == self.layers.stop:
            self.passed = states
        entering = self.received is not None and number == self.layers.start - 1
        return cast(Tensor, self.received) if entering else states


class Elsewhere(nn.Module):
    """Stands for a module of another stage. What the model asks of a layer but computing is answered alike."""

    def __init__(
        self, original: nn.Module, through: Callable[[Tensor], Tensor] = lambda states: states
    ) -> None:
        super().__init__()
        plain = (str, int, float, bool, type(None))
        facts = {name: value for name, value in vars(original).items() if isinstance(value, plain)}
        self.__dict__.update({name: value for name, value in facts.items() if not name.startswith("_")})
        self._through = through

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._through(hidden_states)


class StageLayers(nn.ModuleList):
    """The layers of a model, of which those of the stage at hand compute when they are gone through."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(layers)
        self.entry: Entry | None = None
        self._others = [Elsewhere(layer, self._through(number)) for number, layer in enumerate(layers)]

    def keep(self, own: Collection[int]) -> None:
        """Take away all other layers."""
        for number, other in enumerate(self._others):
            if number not in own:
                self._modules[str(number)] = other

    def _through(self, number: int) -> Callable[[Tensor], Tensor]:
        def through(states: Tensor) -> Tensor:
            assert self.entry is not None
            return self.entry.through(number, states)

        return through

    def _chosen(self) -> list[nn.Module]:
        assert self.entry is not None
        held = list(cast(Mapping[str, nn.Module], self._modules).values())
        run = self.entry.layers
        return [layer if number in run else self._others[number] for number, layer in enumerate(held)]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._chosen())

    def __getitem__(self, index: Any) -> Any:
        return self._chosen()[index]


@dataclass
class Stages:
    """Those of a model that this rank of the pipeline has: number `rank`, then every `ranks`-th one.

    parts: the layers of each stage of the model. holders: by name of a parameter or buffer, the rank that answers for
    it. tied: the parameter that the first and the last stage have both; "": there is none. width, dtype: of the
    states between stages. whole: the transformers model as it was, without its numbers.
    """

    rank: int
    ranks: int
    parts: list[range]
    layers: StageLayers
    holders: dict[str, int]
    tied: str
    width: int
    dtype: torch.dtype
    whole: nn.Module

    @property
    def chunks(self) -> int:
        """How many stages each rank has."""
        return len(self.parts) // self.ranks

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, and with it the output head."""
        return self.rank == self.ranks - 1

    def entry(self, stage: int, received: Tensor | None) -> Entry:
        """For a forward of one of this rank's stages."""
        return Entry(self.parts[stage], stage == len(self.parts) - 1, received)

    @property
    def copies(self) -> list[str]:
        """Parameters that this rank has and another one answers for: tied embeddings, on the last stage."""
        return [self.tied] if self.tied and self.has_last else []

    def has_elsewhere(self, name: str) -> bool:
        """Whether another rank answers for what has this name, or for the tensor that the name begins with."""
        beginnings = itertools.accumulate(name.split("."), lambda a, b: f"{a}.{b}")
        return any(self.holders.get(beginning, self.rank) != self.rank for beginning in beginnings)


def parts_of(layers: int, stages: int) -> list[range]:
    """Layers of each stage: equally many, the first ones one more where that is not possible."""
    each, more = divmod(layers, stages)
    starts = [number * each + min(number, more) for number in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def cut(model: Backbone, rank: int, ranks: int, chunks: int = 1, lead: Lead = alone) -> None:
    """Leave of a model what a rank's stages need, in place.

    lead: proves for all ranks what is proven on a copy.

    Raises:
        SettingsError: it has fewer layers than stages, or its stages would not compute what it computes.
    """
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
        found = {}
        for name in model.state_dict():
            if name.startswith(of_layers):
                found[name] = of_layer[int(name.removeprefix(of_layers).partition(".")[0])]
            elif name.startswith(f"{self.embeddings}."):
                found[name] = 0
            elif any(name == end or name.startswith(f"{end}.") for end in self.ends):
                found[name] = ranks - 1
            else:
                raise SettingsError(
                    f"{self.kind} cannot be cut into stages: {name} is neither of its layers nor of embeddings and "
                    f"head; write {KEY} = 1"
                )
        return found

    def is_tied(self, model: Backbone) -> bool:
        """Whether the head is the embeddings."""
        head = model.lm.get_output_embeddings()
        return head is not None and head.weight is model.lm.get_input_embeddings().weight


def names_here(model: Backbone, *, lora: Publishes = "merged") -> HubNames:
    """Of what the ranks that have the same stages of a model answer for, or of all of it."""
    copies = () if model.stages is None else model.stages.copies
    return HubNames(model.lm, lora=lora, without={name.removeprefix("lm.") for name in copies})


def names_of_all(model: Backbone, *, lora: Publishes = "merged") -> HubNames:
    """Of the whole model; tensors of one that is cut have no numbers."""
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

    Raises `SettingsError` as `_proven`.
    """
    form = _Form.of(copy)
    layers = StageLayers(form.layers)
    return int(_proven(copy, form, layers, parts_of(len(layers), len(layers))).shape[-1])


@torch.no_grad()
def _proven(model: Backbone, form: _Form, layers: StageLayers, parts: Sequence[range]) -> Tensor:
    """Put the layers into the model, and show that its stages in a row compute what it did; the last states.

    Each again after others have seen other tokens: what a layer leaves for one of another stage would not be there.
    Sliding windows are shorter than the probe meanwhile, so that kinds of layers differ. Raises `SettingsError`.
    """
    training, facts = model.training, model.lm.config.get_text_config()
    window = getattr(facts, "sliding_window", None)
    positions, others = torch.arange(LENGTH)[None], torch.arange(2, LENGTH + 2)[None] % model.vocabulary
    ids = torch.arange(1, LENGTH + 1)[None] * 7919 % model.vocabulary

    def run(ids: Tensor, stage: int, received: Tensor | None) -> Tensor:
        layers.entry = Entry(parts[stage], stage == len(parts) - 1, received)
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
        found = cast(Tensor, states[-1])
        error = _distance(found, expected)
        for stage in reversed(range(len(parts))):
            run(others, 0, None)
            error = max(error, _distance(run(ids, stage, states[stage]), cast(Tensor, states[stage + 1])))
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
    return found


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1.0))
