"""Proof that the weights inside of an engine are the ones it was given, whatever layout it keeps them in.

An engine fuses, pads and shards what it loads, so its parameters cannot simply be hashed against a manifest.
But a loader only ever *copies*: while it runs, `LoadTrace` watches every copy that torch makes and remembers
which part of which parameter came from which part of which tensor. Afterwards it reads both sides again:

    each remembered part of a parameter has the bits of its source, cast to the parameter's type
    each element of each parameter was written: none is left over from the version before
    each element of each given tensor was read: none was ignored

Sources are mapped files whose hashes were checked, so the chain reaches from the controller's publication to the
memory that the engine computes with. No model or layout is known here. The remembered copies are also the map by
which deltas find their elements afterwards (`engines.scatter`).

What a layer makes of its parameters after they were loaded (`layers`) is proven there; `settle` proves that what it
is made from are the published tensors.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_worker.engines.scatter import (
    BITS,
    PublishedTensor,
    Region,
    UnmappedError,
    WeightMap,
    WeightSlot,
    region_of,
    storage_of,
)

_aten = torch.ops.aten


@dataclass(frozen=True)
class ProofReport:
    """It holds what a trace found. Plain values: it travels from the engine's processes to the worker."""

    problems: list[str]
    read: dict[str, list[Region]]
    """For each given tensor, the parts of it that this rank loaded, from its first element on."""
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


class LoadTrace(TorchDispatchMode):
    """Watches the copies made while it is active. One per update; `given` wraps what the loader iterates over."""

    def __init__(self, model: torch.nn.Module, zeroed: Collection[str] = (), settled: Collection[str] = ()) -> None:
        """zeroed: parameters that hold zeros alone now, so that what is not loaded is padding. settled: those that
        are made of others, which `settle` is called for."""
        super().__init__()
        self._zeroed = zeroed
        self._targets: dict[int, _Known] = {}
        for name, parameter in model.named_parameters():
            if parameter.numel() and name not in settled:
                self._targets.setdefault(_address(parameter), _Known(name, parameter.data))
        self._given = _Given()
        self._problems: list[str] = []
        self._read: dict[str, list[Region]] = {}
        self._passing: dict[int, list[_Copy]] = {}
        """Copies of given tensors into memory of other things than parameters, by its address, until they settle."""
        self.current = ""
        """The tensor that the loader took last, in words."""

    def given(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on to the loader and remember where they lie."""
        for name, tensor in tensors:
            self.current = f"{name} of shape {list(tensor.shape)}"
            self._given.add(name, tensor)
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
            elif known is None and not target.is_meta and self._is_given(args):
                self._passing.setdefault(_address(target), []).append(_Copy(target, args[1]))
        return result

    def _is_given(self, args: tuple[Any, ...]) -> bool:
        source = args[1] if len(args) > 1 else None
        return isinstance(source, torch.Tensor) and self._given.part(source) is not None

    def settle(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Prove now that these tensors, which the loader has just filled, hold published ones and nothing else.

        They may be gone or changed when `report` is called. Call it inside of the trace.
        """
        for name, tensor in parameters.items():
            if tensor.numel():
                known = _Known(name, tensor.data, self._passing.pop(_address(tensor), []))
                self._problems += self._check(known, self._read)

    def report(self) -> ProofReport:
        """Read everything again. Call it when loading is over, outside of the trace."""
        problems = list(self._problems)
        read = {name: list(self._read.get(name, ())) for name in self._given.tensors}
        for known in self._targets.values():
            problems += self._check(known, read)
        return ProofReport(problems, read, {name: tensor.numel() for name, tensor in self._given.tensors.items()})

    def weight_map(self, orders: Mapping[str, torch.Tensor] | None = None) -> WeightMap:
        """Where the given tensors lie in the model. Call it after a report without problems.

        orders: by parameter, how it was permuted after it was loaded; see `scatter.WeightSlot`.

        Raises `UnmappedError` where a loader copied in a way that gives no map.
        """
        places: dict[str, list[WeightSlot]] = {}
        for known in self._targets.values():
            for copy in known.copies:
                source = copy.source
                location = self._given.part(source) if isinstance(source, torch.Tensor) else None
                if location is None or not isinstance(source, torch.Tensor):
                    continue
                name, offset = location
                tensor = self._given.tensors[name]
                if not tensor.is_contiguous() or source.dtype is not tensor.dtype:
                    raise UnmappedError(f"{known.name} was loaded from {name} by reading it as something else")
                spread = source.expand(copy.target.shape)
                region = offset, tuple(spread.shape), tuple(spread.stride())
                places.setdefault(name, []).append(
                    WeightSlot(
                        known.name,
                        storage_of(copy.target),
                        region,
                        region_of(copy.target),
                        (orders or {}).get(known.name),
                    )
                )
        published = {
            name: PublishedTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in self._given.tensors.items()
        }
        return WeightMap(published, places)

    def _check(self, known: _Known, read: dict[str, list[Region]]) -> list[str]:
        for copy in known.copies:
            if isinstance(copy.source, torch.Tensor):
                location = self._given.part(copy.source)
                if location is None:
                    return [f"{known.name} was loaded from something other than the published tensors"]
                name, offset = location
                read.setdefault(name, []).append((offset, *region_of(copy.source)[1:]))
                if not _same_bits(copy.target, copy.source):
                    return [f"{known.name} differs from the published {name}"]
            elif not bool((copy.target == copy.source).all()):
                return [f"{known.name} does not hold the {copy.source} it was filled with"]
        written = [copy.target for copy in known.copies]
        if missing := _unwritten(known.tensor, written):
            total = known.tensor.numel()
            if known.name in self._zeroed and not bool(known.tensor[_left(known.tensor, written)].any()):
                return []
            return [f"{missing} of {total} elements of {known.name} were not part of the published weights"]
        return []


class _Given:
    """The tensors handed to a loader, found again by where in memory a view of one begins."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Kept alive, so that no address is used twice."""
        self._starts: list[tuple[int, str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor
        if tensor.numel():
            bisect.insort(self._starts, (tensor.data_ptr(), name))

    def part(self, view: torch.Tensor) -> tuple[str, int] | None:
        """Which tensor a view is of, and at which of its elements it begins."""
        address = view.data_ptr()
        index = bisect.bisect_right(self._starts, (address, chr(0x10FFFF))) - 1
        if index < 0:
            return None
        start, name = self._starts[index]
        tensor = self.tensors[name]
        if _address(view) != _address(tensor):
            return None
        return name, (address - start) // view.itemsize


def unread(reports: Iterable[ProofReport]) -> list[str]:
    """Given tensors that all ranks together did not load whole. Each rank loads the parts it is responsible for."""
    parts: dict[str, set[Region]] = {}
    sizes: dict[str, int] = {}
    for report in reports:
        sizes |= report.sizes
        for name, regions in report.read.items():
            parts.setdefault(name, set()).update(regions)
    return [
        name for name, size in sizes.items() if sum(math.prod(shape) for _, shape, _ in parts.get(name, ())) < size
    ]


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


def _same_bits(target: torch.Tensor, source: torch.Tensor) -> bool:
    cast = source.to(device=target.device, dtype=target.dtype).expand(target.shape)
    sides = target.contiguous(), cast.contiguous()
    wide = all(_is_wide(side) for side in sides)  # eight bytes at once: twice as fast
    bits = torch.int64 if wide else BITS[target.dtype.itemsize]
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
    return int(_left(whole, parts).sum())


def _left(whole: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """Which elements of a parameter no part covers: bool, of its shape."""
    written = torch.zeros(whole.untyped_storage().nbytes() // whole.itemsize, dtype=torch.bool)
    for part in parts:
        written.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
    return ~written.as_strided(whole.shape, whole.stride(), whole.storage_offset()).to(whole.device)
