"""Where the elements of published tensors lie in an engine's parameters, and how they are overwritten there.

    position of a published tensor ──source region──▶ indices (i, j, …) ──target region──▶ element of a storage

A full load only copies strided parts of published tensors onto strided parts of parameters: fused, padded, sharded
along any dimension, tied, one part to several places. Each copy is an affine map between two regions of the same
shape, so the elements that a delta changes are found in the parameters without knowing model or layout. Where a
kernel has its own order of the elements of a block (experts on a CPU), a permutation follows.

Invariant: a `Patch` is complete before it touches anything. Everything that can be wrong with a change (unknown
tensor, other shape, no such element) is found by `WeightMap.patch`; applying it is a few scatters in place, and
exactly the elements that were written are read back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weight_sync.delta.delta import TensorChange

Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a view, in elements of what it is a view of."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are moved and compared as integers of their size: every bit of every type counts."""


DEVICE_SHARE = 0.5
"""Share of a GPU's free memory that prepared changes may take; the rest of them travels as they are written."""
_CUT = 8192
"""Elements that are written before they are read back on a CPU: each may fill a cache line of its own, 512 KiB."""


class UnmappedError(Exception):
    """A change or a load for which no place in the parameters is known. Nothing was written."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One copy of a full load: a part of a published tensor, and where it lies in the engine."""

    parameter: str
    """Name of the engine's parameter, for messages."""
    storage: torch.Tensor
    """[elements] the whole storage that the parameter lies in, in the parameter's type."""
    source: Region
    """In the published tensor in C order; strides of 0 where one element is copied to several places."""
    target: Region
    """In the storage; of the same shape as the source."""
    order: torch.Tensor | None = None
    """[n] int64, of a storage that was permuted after it was loaded, in blocks of n: where in its block the element
    lies that was loaded at i. None: everything lies where it was loaded."""

    @property
    def elements(self) -> int:
        """Elements of the target."""
        return math.prod(self.target[1])

    def permuted(self, loaded: torch.Tensor) -> torch.Tensor:
        """Where elements of the storage lie now, by where they were loaded: int64, of the same shape."""
        if self.order is None:
            return loaded
        inside = loaded % self.order.numel()
        return loaded - inside + self.order[inside]

    def kept(self, *, repeats: bool) -> torch.Tensor:
        """The bits of the target, in its shape; without `repeats`, one of those to which one element was copied."""
        bits, once = _bits(self.storage), self.target if repeats else self.source
        if self.order is None:
            return first_of_repeats(bits, self.target, once)
        offset, shape, strides = self.target
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        loaded = first_of_repeats(torch.arange(offset, offset + last + 1), (0, shape, strides), once)
        return bits[self.permuted(loaded).to(bits.device)]


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """Type and shape of a published tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """[elements] all of a tensor's storage, in its type."""
    whole = tensor.detach()
    return whole.as_strided((whole.untyped_storage().nbytes() // whole.itemsize,), (1,), 0)


def region_of(tensor: torch.Tensor) -> Region:
    """A view as a region of its storage."""
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def spare_bytes(device: torch.device) -> float:
    """How much of a patch may wait in the memory of the parameters' device, for `WeightMap.patch`."""
    if device.type != "cuda":
        return math.inf
    free: int = torch.cuda.mem_get_info(device)[0]
    return free * DEVICE_SHARE


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor in C order."""
    strides = (math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return 0, tuple(shape), tuple(strides)


class _Affine:
    """The map of one place, from positions to elements of its storage.

    Axes are ordered by falling source stride, and each stride is larger than everything below it can reach, so the
    indices of a position are found by dividing, one axis after the other.
    """

    def __init__(self, place: WeightSlot) -> None:
        self._place = place
        (self._first, shape, inner), (self._target, other, outer) = place.source, place.target
        assert shape == other, "source and target of a copy have one shape"
        axes = [axis for axis in zip(shape, inner, outer, strict=True) if axis[0] != 1]
        self._repeats = [(length, to) for length, stride, to in axes if stride == 0]
        self._axes = _merged(sorted((axis for axis in axes if axis[1] != 0), key=lambda axis: -axis[1]))
        self._last = self._first + sum((length - 1) * stride for length, stride, _ in self._axes)
        below = 0
        for length, stride, _ in reversed(self._axes):
            if stride <= below:
                raise UnmappedError(f"{place.parameter} was loaded from overlapping parts of a tensor")
            below += (length - 1) * stride

    def elements(self, positions: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Elements of the storage that hold these positions, and the value of each.

        Args:
            positions: [n] int64, ascending. values: [n].

        Returns:
            [m] int64 and [m]; None when none of the positions lies in the source.
        """
        ends = torch.tensor([self._first, self._last + 1])
        start, end = torch.searchsorted(positions, ends).tolist()
        if start == end:
            return None
        rest, values = positions[start:end] - self._first, values[start:end]
        if len(self._axes) == 1 and self._axes[0][1] == 1:
            target = rest * self._axes[0][2] + self._target
        else:
            target = torch.full_like(rest, self._target)
            inside = torch.ones_like(rest, dtype=torch.bool)
            for length, stride, to in self._axes:
                index = torch.div(rest, stride, rounding_mode="floor")
                inside &= index < length
                rest -= index * stride
                target += index * to
            inside &= rest == 0
            if not bool(inside.all()):
                target, values = target[inside], values[inside]
        for length, to in self._repeats:
            target = (target[:, None] + torch.arange(length) * to).reshape(-1)
            values = values.repeat_interleave(length)
        return (self._place.permuted(target), values) if len(target) else None


def _merged(axes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbouring axes that step evenly on both sides as one: whole rows become one long axis."""
    merged: list[tuple[int, int, int]] = []
    for length, stride, to in axes:
        if merged and merged[-1][1:] == (length * stride, length * to):
            merged[-1] = (merged[-1][0] * length, stride, to)
        else:
            merged.append((length, stride, to))
    return merged


@dataclass(frozen=True, slots=True)
class _Write:
    """Bits that go into a storage: at elements (`index`), or over a region."""

    parameter: str
    storage: torch.Tensor
    index: torch.Tensor | None
    region: Region
    values: torch.Tensor

    def apply(self) -> None:
        if self.index is None:
            self._view().copy_(self.values)
        else:
            self.storage.scatter_(0, self._at(), self.values.to(self.storage.device))

    def differs(self) -> torch.Tensor:
        """[] bool, on the storage's device: no synchronisation."""
        values = self.values.to(self.storage.device)
        stored = self._view() if self.index is None else self.storage.gather(0, self._at())
        return (stored != values).any()

    def cuts(self) -> list[_Write]:
        """The same writes, on a CPU in cuts that stay in its cache."""
        if self.index is None or self.storage.device.type != "cpu":
            return [self]
        return [
            replace(self, index=index, values=values)
            for index, values in zip(self.index.split(_CUT), self.values.split(_CUT), strict=True)
        ]

    def _at(self) -> torch.Tensor:
        assert self.index is not None
        return self.index.to(self.storage.device)

    def _view(self) -> torch.Tensor:
        offset, shape, strides = self.region
        return self.storage.as_strided(shape, strides, offset)


class Patch:
    """Prepared writes. `apply` may be repeated; nothing else writes the parameters meanwhile."""

    def __init__(self, writes: Sequence[_Write], shared: Sequence[_Write] = ()) -> None:
        """shared: those of the writes that others may write over."""
        self._writes, self._shared = writes, shared

    @property
    def elements(self) -> int:
        """Elements of parameters that it writes."""
        return sum(write.values.numel() for write in self._writes)

    def apply(self) -> list[str]:
        """Write everything, in place, and read it back.

        On a CPU each cut is read while it is still in its cache: elements that are far apart cost as much as all of
        memory between them, once instead of twice. Elsewhere there is one synchronisation with the device at the end.
        Elements that several published tensors share are read once more in the end.

        Returns:
            What is wrong: parameters that do not hold what was written.
        """
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}

        def read(write: _Write) -> None:
            by_device.setdefault(write.storage.device, []).append((write.parameter, write.differs()))

        for write in self._writes:
            write.apply()
            read(write)
        for write in self._shared:
            read(write)
        differing: dict[str, None] = {}
        for flagged in by_device.values():
            flags = torch.stack([differs for _, differs in flagged]).tolist()
            differing |= {name: None for (name, _), differs in zip(flagged, flags, strict=True) if differs}
        return [f"{name} does not hold the elements that were written" for name in differing]


class WeightMap:
    """Where all published tensors lie in the parameters of one model (on several ranks: in this rank's)."""

    def __init__(self, published: Mapping[str, PublishedTensor], places: Mapping[str, Sequence[WeightSlot]]) -> None:
        """Raises `UnmappedError` for a copy that cannot be turned into positions."""
        self.published = dict(published)
        self.places = {name: tuple(places.get(name, ())) for name in published}
        self._maps = {name: [_Affine(place) for place in slots] for name, slots in self.places.items()}
        self._sharing = _sharing(self.places)

    def check(self, model: torch.nn.Module) -> None:
        """Raises `UnmappedError` when a parameter lies elsewhere than it did: writes would go nowhere."""
        here = {
            name: tensor.untyped_storage().data_ptr()
            for name, tensor in [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
        }
        for places in self.places.values():
            for place in places:
                if here.get(place.parameter) != place.storage.untyped_storage().data_ptr():
                    raise UnmappedError(f"{place.parameter} has moved in memory since it was loaded")

    def served_dtype(self, name: str) -> torch.dtype | None:
        """Type in which a tensor is kept; None where no part of it lies here.

        Raises `UnmappedError` where parts of it have several.
        """
        kinds = {place.storage.dtype for place in self.places[name]}
        if len(kinds) > 1:
            raise UnmappedError(f"{name} is kept as {' and '.join(sorted(map(str, kinds)))}")
        return kinds.pop() if kinds else None

    def patch(self, changes: Iterable[TensorChange], *, device_bytes: float = math.inf) -> Patch:
        """Turn changes into writes.

        Args:
            changes: in any order, each tensor at most once. device_bytes: how much of the patch may be kept in
            the memory of the parameters' device; the rest stays on the host and travels when it is applied.

        Raises:
            UnmappedError: a tensor is unknown, or of another type or shape.
            ValueError: a position is outside of its tensor.
        """
        writes: list[_Write] = []
        shared: list[_Write] = []
        for change in changes:
            for write in self._writes(change):
                index_bytes = 0 if write.index is None else write.index.nbytes
                needed = write.values.nbytes + index_bytes
                if write.index is not None and needed <= device_bytes:
                    device_bytes -= 0 if write.storage.device.type == "cpu" else needed
                    device = write.storage.device
                    index, values = write.index.to(device), write.values.to(device)
                    write = replace(write, index=index, values=values)  # noqa: PLW2901
                cuts = write.cuts()
                writes += cuts
                shared += cuts if change.name in self._sharing else []
        return Patch(writes, shared)

    def _writes(self, change: TensorChange) -> Iterator[_Write]:
        self._check(change)
        for place, affine in zip(self.places[change.name], self._maps[change.name], strict=True):
            storage = _bits(place.storage)
            values = _bits(change.values.contiguous().to(place.storage.dtype))
            positions = change.positions
            if positions is None and place.order is None:
                if values.numel():
                    offset, shape, strides = place.source
                    part = values.as_strided(shape, strides, values.storage_offset() + offset)
                    yield _Write(place.parameter, storage, None, place.target, part)
                continue
            if positions is None:
                positions, values = torch.arange(values.numel()), values.reshape(-1)
            elements = affine.elements(positions, values)
            if elements is not None:
                yield _Write(place.parameter, storage, elements[0], place.target, elements[1])

    def _check(self, change: TensorChange) -> None:
        known = self.published.get(change.name)
        if known is None:
            raise UnmappedError(f"{change.name} is not one of the tensors that were loaded")
        if (known.dtype, known.shape) != (change.dtype, tuple(change.shape)):
            raise UnmappedError(
                f"{change.name} changes as {change.dtype} {list(change.shape)}, loaded was {known.dtype} "
                f"{list(known.shape)}"
            )
        expected = known.elements if change.positions is None else change.positions.numel()
        if change.values.numel() != expected:
            raise ValueError(f"{change.name}: {change.values.numel()} values for {expected} elements")
        if change.positions is not None and expected:
            first, last = int(change.positions[0]), int(change.positions[-1])
            if not 0 <= first <= last < known.elements:
                raise ValueError(
                    f"{change.name}: positions {first} to {last} in a tensor of {known.elements} elements"
                )

    def read(self, name: str, out: torch.Tensor) -> bool:
        """Put a published tensor together from the parameters; parts that do not lie here are left as they are.

        Args:
            name: of the tensor. out: [elements] of the type in which it is kept, on the CPU.

        Returns:
            Whether all places that hold the same element agree.
        """
        pairs = [(first_of_repeats(_bits(out), place.source, place.source), place) for place in self.places[name]]
        for target, place in pairs:
            target.copy_(place.kept(repeats=False))
        if sum(place.elements for place in self.places[name]) <= self.published[name].elements:
            return True
        agree = True
        for place in self.places[name]:
            offset, shape, strides = place.source
            here = _bits(out).as_strided(shape, strides, out.storage_offset() + offset)
            positions = place.kept(repeats=True)
            agree = agree and bool((positions.to(here.device) == here).all())
        return agree


def _sharing(places: Mapping[str, Sequence[WeightSlot]]) -> frozenset[str]:
    """Published tensors that may have an element in common with another one, as tied ones do: the bytes of a storage
    between their first and last element overlap."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, slots in places.items():
        for place in slots:
            if place.elements:
                offset, shape, strides = place.target
                last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
                size = place.storage.itemsize
                storage = place.storage.untyped_storage().data_ptr()
                spans.setdefault(storage, []).append((offset * size, (last + 1) * size, name))
    sharing: set[str] = set()
    for ordered in map(sorted, spans.values()):
        open_spans: list[tuple[int, str]] = []
        for start, end, name in ordered:
            open_spans = [(until, other) for until, other in open_spans if until > start]
            sharing |= {both for _, other in open_spans if other != name for both in (other, name)}
            open_spans.append((end, name))
    return frozenset(sharing)


def merge(deltas: Sequence[Iterable[TensorChange]]) -> Iterator[TensorChange]:
    """Yield what several deltas, oldest first, change together: each element with its last value.

    One delta is passed through as it is read; of several, what they change is in memory at once.
    """
    if len(deltas) == 1:
        yield from deltas[0]
        return
    changes: dict[str, TensorChange] = {}
    for delta in deltas:
        for change in delta:
            before = changes.get(change.name)
            changes[change.name] = change if before is None else _over(before, change)
    yield from changes.values()


def _over(before: TensorChange, after: TensorChange) -> TensorChange:
    if after.positions is None or (before.dtype, before.shape) != (after.dtype, after.shape):
        return after
    if before.positions is None:
        values = _bits(before.values).clone()
        values[after.positions] = _bits(after.values)
        return TensorChange(after.name, after.dtype, after.shape, None, values.view(after.dtype))
    kept = torch.ones(before.positions.numel(), dtype=torch.bool)
    place = torch.searchsorted(after.positions, before.positions).clamp_(max=max(after.positions.numel() - 1, 0))
    if after.positions.numel():
        kept = after.positions[place] != before.positions
    positions = torch.cat([before.positions[kept], after.positions])
    values = torch.cat([_bits(before.values)[kept], _bits(after.values)])
    positions, order = positions.sort()
    return TensorChange(after.name, after.dtype, after.shape, positions, values[order].view(after.dtype))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.itemsize])


def first_of_repeats(storage: torch.Tensor, region: Region, source: Region) -> torch.Tensor:
    """A view of a region, with one element where the source repeats one."""
    offset, shape, strides = region
    lengths = [1 if stride == 0 and n else n for n, stride in zip(shape, source[2], strict=True)]
    return storage.as_strided(lengths, strides, storage.storage_offset() + offset)
