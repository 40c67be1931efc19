"""A model cut into the stages of a pipeline: runs of its layers, before the first of them the embeddings, behind the
last one the norm and the head.

A stage runs by the model's own forward, in which the layers of other stages let states through: so a layer keeps its
number, and with it its kind of attention and its mask. Whatever else the forward does to embeddings or behind the
layers meets states that nobody reads. `policy_worker.parallel.pipeline_stages` cuts a model so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass
class StageInput:
    """A stage in one forward.

    received: the states before its layers; None: it begins with the embeddings. passed: those behind its layers, once
    it has run; the last stage goes on to the norm instead."""

    layers: range
    is_last: bool
    received: Tensor | None = None
    passed: Tensor | None = None

    def through(self, number: int, states: Tensor) -> Tensor:
        """Return what becomes of states at a layer of another stage."""
        if number == self.layers.stop:
            self.passed = states
        entering = self.received is not None and number == self.layers.start - 1
        return cast(Tensor, self.received) if entering else states


class Elsewhere(nn.Module):
    """Stands for a module of another stage. What the model asks of a layer but computing is answered alike."""

    def __init__(self, original: nn.Module, through: Callable[[Tensor], Tensor] = lambda states: states) -> None:
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
        self.entry: StageInput | None = None
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
    """The stages of a model that this rank of the pipeline has: number `rank`, then every `ranks`-th one.

    parts: the layers of each stage of the model. holders: by name of a parameter or buffer, the rank that answers for
    it. tied: the parameter that the first and the last stage have both; "": there is none. width, dtype: of the
    states between stages. whole: the transformers model as it was, without its numbers."""

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

    def entry(self, stage: int, received: Tensor | None) -> StageInput:
        """For a forward of one of this rank's stages."""
        return StageInput(self.parts[stage], stage == len(self.parts) - 1, received)

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
    each, rest = divmod(layers, stages)
    starts = [number * each + min(number, rest) for number in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]
