"""Proof that the weights inside of an engine are the ones it was given, whatever layout it keeps them in.

An engine fuses, pads and shards what it loads, so its parameters cannot simply be hashed against a manifest.
But a loader only ever *copies*: while it runs, `LoadTrace` watches every copy that torch makes and remembers
which part of which parameter came from which part of which tensor. Afterwards it reads both sides again:

    each remembered part of a parameter has the bits of its source, cast to the parameter's type
    each element of each parameter was written: none is left over from the version before
    each element of each given tensor was read: none was ignored

Sources are the mapped files whose hashes `weight_sync.fetch` has checked, so the chain reaches from the
controller's publication to the memory that the engine computes with. No model or layout is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a view, in elements of its storage."""


@dataclass(frozen=True)
class ProofReport:
    """What a trace found. Plain values: it travels from the engine's processes to the worker."""

    problems: list[str]
    read: dict[str, list[Region]]
    """For each given tensor, the parts of it that this rank loaded."""
    sizes: dict[str, int]
    """Elements of each given tensor."""

    def to_dict(self) -> dict[str, Any]:
        return {"problems": self.problems, "read": self.read, "sizes": self.sizes}


@dataclass
class _Copy:
    target: torch.Tensor
    source: torch.Tensor | float


@dataclass
class _Known:
    name: str
    tensor: torch.Tensor
    copies: list[_Copy] = field(default_factory=list)


class LoadTrace(TorchDispatchMode):  # type: ignore[misc]
    """Watches the copies made while it is active. One per update; `given` wraps what the loader iterates over."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._targets: dict[int, _Known] = {}
        for name, parameter in model.named_parameters():
            if parameter.numel():
                self._targets.setdefault(_address(parameter), _Known(name, parameter.data))
        self._given: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        self._sources: list[torch.Tensor] = []
        self.current = ""
        """The tensor that the loader took last, in words."""

    def given(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on to the loader and remember where they lie."""
        for name, tensor in tensors:
            self.current = f"{name} of shape {list(tensor.shape)}"
            self._sizes[name] = tensor.numel()
            if tensor.numel():
                self._given[_address(tensor)] = name
                self._sources.append(tensor)  # kept alive, so that no address is used twice
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (_aten.copy_.default, _aten.fill_.Scalar, _aten.zero_.default):
            target = args[0]
            known = None if target.is_meta else self._targets.get(_address(target))
            if known is not None and target.numel():
                known.copies.append(_Copy(target, 0.0 if func is _aten.zero_.default else args[1]))
        return result

    def report(self) -> ProofReport:
        """Read everything again. Call it when loading is over, outside of the trace."""
        problems: list[str] = []
        read: dict[str, list[Region]] = {name: [] for name in self._sizes}
        for known in self._targets.values():
            problems += self._check(known, read)
        return ProofReport(problems, read, dict(self._sizes))

    def _check(self, known: _Known, read: dict[str, list[Region]]) -> list[str]:
        for copy in known.copies:
            if isinstance(copy.source, torch.Tensor):
                name = self._given.get(_address(copy.source))
                if name is None:
                    return [f"{known.name} was loaded from something other than the published tensors"]
                read[name].append(_region(copy.source))
                if not _same_bits(copy.target, copy.source):
                    return [f"{known.name} differs from the published {name}"]
            elif not bool((copy.target == copy.source).all()):
                return [f"{known.name} does not hold the {copy.source} it was filled with"]
        missing = _unwritten(known.tensor, [copy.target for copy in known.copies])
        if missing:
            total = known.tensor.numel()
            return [f"{missing} of {total} elements of {known.name} were not part of the published weights"]
        return []


def unread(reports: Iterable[ProofReport]) -> list[str]:
    """Given tensors that all ranks together did not load whole. Each rank loads the parts it is responsible for."""
    parts: dict[str, set[Region]] = {}
    sizes: dict[str, int] = {}
    for report in reports:
        sizes |= report.sizes
        for name, regions in report.read.items():
            parts.setdefault(name, set()).update(regions)
    return [name for name, size in sizes.items() if sum(map(_elements, parts.get(name, ()))) < size]


def report_from_dict(data: dict[str, Any]) -> ProofReport:
    """Inverse of `ProofReport.to_dict`, also after JSON or msgpack have turned tuples into lists."""
    read = {
        name: [(offset, tuple(shape), tuple(strides)) for offset, shape, strides in regions]
        for name, regions in data["read"].items()
    }
    return ProofReport(list(data["problems"]), read, dict(data["sizes"]))


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address


def _region(tensor: torch.Tensor) -> Region:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def _elements(region: Region) -> int:
    count = 1
    for length in region[1]:
        count *= length
    return count


def _same_bits(target: torch.Tensor, source: torch.Tensor) -> bool:
    cast = source.to(device=target.device, dtype=target.dtype).expand(target.shape)
    sides = target.contiguous(), cast.contiguous()
    wide = all(_is_wide(side) for side in sides)  # eight bytes at once: twice as fast
    bits = torch.int64 if wide else _BITS[target.dtype.itemsize]
    same: bool = torch.equal(*(side.as_strided((side.numel(),), (1,)).view(bits) for side in sides))
    return same


def _is_wide(side: torch.Tensor) -> bool:
    aligned = side.data_ptr() % 8 == 0 and side.storage_offset() * side.itemsize % 8 == 0
    return bool(aligned and side.nbytes % 8 == 0)


def _unwritten(whole: torch.Tensor, parts: list[torch.Tensor]) -> int:
    """How many elements of a parameter no part covers. Parts are views of the parameter's storage."""
    start: int = whole.storage_offset()
    end: int = start + whole.numel()
    if whole.is_contiguous() and all(part.is_contiguous() for part in parts):
        position, missing = start, 0
        for first, last in sorted((p.storage_offset(), p.storage_offset() + p.numel()) for p in parts):
            missing += max(0, first - position)
            position = max(position, last)
        return missing + max(0, end - position)
    written = torch.zeros(whole.untyped_storage().nbytes() // whole.itemsize, dtype=torch.bool)
    for part in parts:
        written.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
    view = written.as_strided(whole.shape, whole.stride(), whole.storage_offset())
    left: int = (~view).sum().item()
    return left
