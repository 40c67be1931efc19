"""Send what a micro-batch is made of to the device in one copy, from memory that the device reads by itself.

A copy of pageable memory waits for the device, and each of a dozen small ones costs a launch; one of pinned memory
does neither. PyTorch keeps pinned memory until the copies out of it have ended, and gives it to the next one then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes of which each tensor's place is a multiple: at least the size of an element of any type."""
Value = TypeVar("Value")


def on_device(value: Value, device: torch.device | str) -> Value:
    """The same with all tensors on a device, within dataclasses, tuples, lists and dicts of them.

    Tensors in host memory are parts of one allocation there; others move one by one. For a CPU: the value itself."""
    device = torch.device(device)
    if device.type == "cpu":
        return value
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _mapped(value, note)
    arrived = iter(_in_one_copy([t for t in tensors if t.device.type == "cpu"], device))
    return cast(Value, _mapped(value, lambda t: next(arrived) if t.device.type == "cpu" else t.to(device)))


def _in_one_copy(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, place in zip(tensors, places, strict=True):
        _part(host, place, tensor).copy_(tensor)
    arrived = host.to(device, non_blocking=True)
    return [_part(arrived, place, tensor) for tensor, place in zip(tensors, places, strict=True)]


def _part(buffer: Tensor, place: int, like: Tensor) -> Tensor:
    return buffer[place : place + like.nbytes].view(like.dtype).view(like.shape)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _mapped(getattr(value, f.name), change) for f in fields(value)}
        return replace(value, **changed)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value
