"""Frozen models next to the policy: reference, teachers, and the policy as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from policy_worker.model.head import Head
from policy_worker.model.logprobs import TokenOutputs
from policy_worker.model.model import PolicyModel
from policy_worker.model.stages import Stages
from policy_worker.parallel.fsdp import local_of


class EarlierPolicy:
    """The policy as it was, as a reference model where only a part of it trains: that part is kept, and takes the
    place of the present weights while it is called.

    It takes the memory of the weights that train, and is exact whatever these are: adapters, modules that are trained
    whole, adapters that began with a part of the base. kept: by the parameter's name in the model.
    """

    def __init__(self, model: PolicyModel) -> None:
        self._model, self.takes_blocks = model, model.takes_blocks
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._present = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.kept: dict[str, Tensor] = {}
        self.keep()

    @property
    def stages(self) -> Stages | None:
        """The stages of the policy; see `Backbone.stages`."""
        return self._model.stages

    def keep(self) -> None:
        """From now on it is the policy as it is."""
        self.kept = {name: parameter.detach().clone() for name, parameter in self._present.items()}

    def __call__(self, *arguments: Any) -> TokenOutputs:
        """See `PolicyModel.forward`; without gradient."""
        with self._in_place():
            outputs: TokenOutputs = self._model(*arguments)
        return outputs

    def whole_head(self) -> Head:
        """See `PolicyModel.whole_head`."""
        with self._in_place():
            head = self._model.whole_head()
            return head._replace(weight=head.weight.clone()) if self._model.trains_head else head

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._present.items():
            now, other = local_of(parameter), local_of(self.kept[name])
            before = now.clone()
            now.copy_(other)
            other.copy_(before)
        for module in self._sharded:
            module.reshard()  # what was gathered is of other weights
