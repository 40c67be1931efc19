"""The gradients of this rank: of each part of a batch as one vector, and their sum over all parts.

    backward of a part ─▶ .grad of each parameter ─▶ take: a vector ─▶ Exchange ─▶ add_up: the sum in .grad

The sum is ((part 0 + part 1) + part 2) + …, number by number, in the type of the gradients: the same bits, whoever
has computed which part. A parameter without a gradient counts as zeros where another part has one for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from policy_worker.memory.offload import local_of
from policy_worker.replicas.exchange import Exchange, Round


class PartGradients:
    """Gradients of some parameters, all of the type of these."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        kinds = {parameter.dtype for parameter in self._parameters}
        assert len(kinds) <= 1, f"gradients of several types: {kinds}"
        self._sizes = [local_of(parameter).numel() for parameter in self._parameters]
        self._vectors: dict[int, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where the vectors are."""
        return local_of(self._parameters[0]).device

    @property
    def numbers(self) -> int:
        """Length of a vector: for each parameter whether it has a gradient, then all gradients of this rank."""
        return sum(self._sizes) + len(self._sizes)

    @property
    def bytes_of_part(self) -> int:
        """Size of a vector."""
        return self.numbers * local_of(self._parameters[0]).element_size()

    @torch.no_grad()
    def take(self, part: int) -> None:
        """Move the gradients, which are those of this part, out of the parameters into a vector."""
        vector = self._empty()
        marks, rest = vector[: len(self._sizes)], vector[len(self._sizes) :]
        for number, (parameter, place) in enumerate(zip(self._parameters, self._places(rest), strict=True)):
            marks[number] = float(parameter.grad is not None)
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(local_of(parameter.grad).reshape(-1))
            parameter.grad = None
        self._vectors[part] = vector

    @torch.no_grad()
    def add_up(self, exchange: Exchange, round_: Round) -> None:
        """Give each parameter the sum over all parts; the vectors stay, for another attempt.

        Raises `ExchangeEnded`: parameters have no gradients."""
        vectors_here = {part: self._vectors[part] for part in round_.mine} or {-1: self._empty()}
        total = torch.empty_like(next(iter(vectors_here.values())))
        for where, vectors in exchange.pieces(round_, vectors_here):
            piece = total[where].copy_(vectors[0])
            for vector in vectors[1:]:
                piece.add_(vector)
        marks, rest = total[: len(self._sizes)], total[len(self._sizes) :]
        for has_gradient, parameter, place in zip(
            (marks != 0).tolist(), self._parameters, self._places(rest), strict=True
        ):
            parameter.grad = _like(parameter, place) if has_gradient else None

    def forget(self) -> None:
        """Drop the vectors: the step was applied, or given up."""
        self._vectors.clear()

    def _empty(self) -> Tensor:
        first = local_of(self._parameters[0])
        return torch.empty(self.numbers, dtype=first.dtype, device=first.device)

    def _places(self, rest: Tensor) -> Iterator[Tensor]:
        return iter(rest.split(self._sizes))


def _like(parameter: nn.Parameter, numbers: Tensor) -> Any:
    local = numbers.view(local_of(parameter).shape)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
