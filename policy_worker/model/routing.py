"""Routing replay: the mixtures of a model send each token to the experts that the engine chose for it.

    router     scores [N, E] of N tokens for E experts ─ top k ─▶ ids, weights [N, k] ─▶ experts
                                                          ▲
    record     ids [N, k], with "weights" also their weights

A router chooses by one call of `torch.topk`, which is answered by the record while a mixture computes: so it makes
its weights of the recorded experts by its own rule, whatever that is (softmax, sigmoid, groups, a factor), with
gradient. With "weights" these then have the engine's values. Tokens without a record keep the router's choice.

What a router is asked again in backward is of the micro-batch whose backward it is: `Backbone.recall` says which.

Source: Rollout Routing Replay, arXiv 2510.11370, which replays ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from policy_worker.errors import BadBatchError, SettingsError
from policy_worker.model.micro_batch import OWN, Mixtures, RoutingRecord

KEY = "train.train_policy.routing_replay"
ReplayedRouting = Literal["ids", "weights"]


def _is_experts(layer: nn.Module) -> bool:
    """Find layers of experts as the embedded engine does: in this order, they are the mixtures of a record."""
    return type(layer).__name__.endswith("Experts") and hasattr(layer, "num_experts")


class RoutingReplay:
    """The choices that the routers of a model are to make; see the module's docstring."""

    def __init__(self, lm: PreTrainedModel, wanted: ReplayedRouting) -> None:
        """Raises `SettingsError`: the model names no layers of experts, or layers of different ones."""
        named = {name: layer for name, layer in lm.named_modules() if _is_experts(layer)}
        names, layers = [*named], [*named.values()]
        sizes = {int(getattr(layer, "num_experts", 0)) for layer in layers}
        self._what = f'{KEY} = "{wanted}"'
        self.layers = layers
        self.refused = SettingsError(
            f"{self._what}: the routers of {type(lm).__name__} do not choose experts by one top k of scores of all: "
            f'write {KEY} = "none"'
        )
        if len(sizes) != 1:
            fault = "no layers of experts" if not sizes else "layers with different numbers of experts"
            raise SettingsError(f'{self._what}: {type(lm).__name__} has {fault}: write {KEY} = "none"')
        self.mixtures, self.wanted = Mixtures(len(layers), *sizes), wanted
        self.part = (0, 1)
        """Which part of the positions a mixture may see instead of all, and of how many (sequence parallelism)."""
        self._record: RoutingRecord | None = None
        self._off = False
        self._seen: Tensor | None = None
        self._seen_in = set[int]()
        for number, (name, layer) in enumerate(zip(names, layers, strict=True)):
            self._install(number, lm.get_submodule(name.rpartition(".")[0]), layer)

    def begin(self, record: RoutingRecord | None, *, again: bool = False) -> None:
        """From now on the mixtures compute positions of this record. again: as they have before."""
        self._record = None if self._off else record
        self._seen_in = set() if not again else {*range(self.mixtures.layers)}

    @contextmanager
    def off(self) -> Iterator[None]:
        """Routers choose for themselves."""
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def take_seen(self) -> list[float]:
        """Count the recorded choices in forwards since this was asked last, and those that this model would have
        made otherwise. The accelerator is waited for."""
        seen, self._seen = self._seen, None
        return [0.0, 0.0] if seen is None else seen.tolist()

    def _install(self, number: int, block: nn.Module, layer: nn.Module) -> None:
        answer = _Answer(self, number)

        def enter(*_: Any) -> None:
            if self._record is not None:
                answer.__enter__()
                answer.depth += 1

        def leave(*_: Any) -> None:
            if answer.depth:
                answer.depth -= 1
                answer.__exit__(None, None, None)

        def compute(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            leave()  # else each operation of the experts would ask, too
            if self._record is None:
                return inputs
            given, answer.given = answer.given, False
            if not given or len(inputs) != 3:
                raise self.refused
            tokens, ids, weights = inputs
            return tokens, ids, self._weights(number, ids, weights)

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave, always_call=True)
        layer.register_forward_pre_hook(compute)

    def _weights(self, number: int, ids: Tensor, own: Tensor) -> Tensor:
        assert self._record is not None
        if self._record.weights is None or self.wanted == "ids":
            return own
        recorded = self._of(self._record.ids, number, len(ids)) != OWN
        engine = self._of(self._record.weights, number, len(ids)).to(own.dtype)
        return torch.where(recorded, engine + (own - own.detach()), own)

    def choice(self, number: int, own: Tensor) -> Tensor | None:
        """The ids [N, k] that a mixture's router is answered with, whose own choice is known; None: with that.

        Raises `BadBatchError`: another number of experts was recorded for a token."""
        if self._record is None:
            return None
        if own.shape[1] != (chosen := self._record.ids.shape[-1]):
            raise BadBatchError(
                f"{self._what}: the engine chose {chosen} experts for a token, and this model's routers choose "
                f"{own.shape[1]}: engine and trainer have other models"
            )
        record = self._of(self._record.ids, number, len(own)).to(own.dtype)
        recorded = (record != OWN).all(1, keepdim=True)
        if number not in self._seen_in:  # else it is computed again in backward
            self._seen_in.add(number)
            otherwise = (record.sort(1).values != own.sort(1).values).any(1, keepdim=True) & recorded
            seen = torch.stack([recorded.sum(), otherwise.sum()])
            self._seen = seen if self._seen is None else self._seen + seen
        return torch.where(recorded, record, own)

    def _of(self, record: Tensor, number: int, tokens: int) -> Tensor:
        """Pick from [R, L, M, k] what is of one mixture and of the positions that it sees, [N, k]."""
        rows, length = record.shape[:2]
        here = record[:, :, number]
        if tokens != rows * length:
            here = here.chunk(self.part[1], 1)[self.part[0]]
        return here.flatten(0, 1)


class _Answer(TorchFunctionMode):
    """Answers the call of `torch.topk` by which the router of one mixture chooses."""

    def __init__(self, replay: RoutingReplay, number: int) -> None:
        super().__init__()
        self._replay, self._number = replay, number
        self.depth = 0
        self.given = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return answer
        scores = args[0] if args else kwargs["input"]
        if scores.ndim != 2 or scores.shape[1] != self._replay.mixtures.experts:
            return answer
        ids = self._replay.choice(self._number, answer.indices)
        if ids is None:
            return answer
        self.given = True
        return torch.return_types.topk((scores.gather(1, ids), ids))
