"""Gradients and the optimizer's state in host memory, where parameters are on the device.

    Gradients     leave the device as soon as they are whole (those of FSDP2: reduced), and are back for the step
    states_here   an optimizer's state comes to the device for the step of some parameters, and goes back

A step computes on the device, so that its numbers are those of a run that keeps everything there. Host memory is
pinned where there is an accelerator; without one the same copies are made within host memory. With `fsdp_offload`
FSDP2 has parameters in host memory, and so gradients, state and step as well: then none of this is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

NUMBERS = 2**24
"""Numbers of the parameters whose state is on the device at once: large enough for fast copies."""


def mapped(tensor: Tensor, move: Callable[[Tensor], Tensor]) -> Any:
    """The same tensor of moved parts: those of ranks (DTensor), codes and scales (8 bits), or the tensor itself.

    `DTensor.from_local` would bring a part to the device of its mesh, wherever it is meant to be."""
    tensor = tensor.detach()
    if not is_traceable_wrapper_subclass(tensor):
        return move(tensor)
    names, facts = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    inner = {name: mapped(part, move) if isinstance(part, Tensor) else part for name, part in parts.items()}
    return type(tensor).__tensor_unflatten__(inner, facts, tensor.size(), tensor.stride())


def on_host(tensor: Tensor) -> Any:
    """A copy in host memory, which may be on its way from an accelerator until its current stream has reached it."""

    def move(part: Tensor) -> Tensor:
        host = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
        return host.copy_(part, non_blocking=True)

    return mapped(tensor, move)


def on_device(tensor: Tensor, device: torch.device) -> Any:
    """A copy on a device."""
    return mapped(tensor, lambda part: part.to(device, non_blocking=True, copy=True))


def synchronise(device: torch.device) -> None:
    """Wait until the copies of this thread's current stream have arrived, whatever other streams still do."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def local_of(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor, or all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Gradients:
    """Gradients of some parameters, in host memory from the backward that ends them until `bring_back`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.kept: dict[nn.Parameter, Any] = {}
        self._arrivals: list[torch.Event] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        kept = self.kept.get(parameter)
        if kept is None:
            self.kept[parameter] = on_host(gradient)
            if (device := local_of(gradient).device).type != "cpu":
                # FSDP2 calls this on a stream of its own, on which it has reduced the gradient.
                self._arrivals.append(torch.accelerator.current_stream(device).record_event())
        else:  # of an earlier micro-batch
            local_of(kept).add_(local_of(gradient).to("cpu"))

    def bring_back(self) -> None:
        """Give each parameter its gradient."""
        for arrival in self._arrivals:
            arrival.synchronize()
        self._arrivals = []
        while self.kept:  # each leaves the host as it arrives
            parameter, kept = self.kept.popitem()
            parameter.grad = on_device(kept, local_of(parameter).device)


@contextmanager
def states_here(
    states: MutableMapping[nn.Parameter, dict[str, Any]], parameters: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Meanwhile what an optimizer has of these parameters is on their device; before and afterwards on the host,
    in the same tensors. Single numbers (the count of steps) stay where they are."""
    parameters, kept = [*parameters], {}
    for parameter in parameters:
        for name, value in _moments(states, parameter):
            kept[parameter, name] = value
            states[parameter][name] = on_device(value, local_of(parameter).device)
    yield
    for parameter in parameters:
        for name, value in _moments(states, parameter):
            states[parameter][name] = _put(value, kept.get((parameter, name)))


def _moments(
    states: MutableMapping[nn.Parameter, dict[str, Any]], parameter: nn.Parameter
) -> list[tuple[str, Tensor]]:
    state = states.get(parameter, {})
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and value.ndim]


def _put(value: Tensor, host: Tensor | None) -> Any:
    """A tensor of the device in host memory: in one that it has there, or a new one."""
    if host is None:
        return on_host(value)
    parts: list[Tensor] = []
    mapped(value, lambda part: parts.append(part) or part)  # type: ignore[func-returns-value]
    arrived = iter(parts)
    mapped(host, lambda part: part.copy_(next(arrived), non_blocking=True))
    return host


def in_parts(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The same, in order, in lists of about `NUMBERS` numbers on this rank."""
    part: list[nn.Parameter] = []
    numbers = 0
    for parameter in parameters:
        part.append(parameter)
        numbers += local_of(parameter).numel()
        if numbers >= NUMBERS:
            yield part
            part, numbers = [], 0
    if part:
        yield part
