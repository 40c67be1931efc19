"""Activations for the backward: all of them, fewer where some are computed again, or all of them in host memory.

    recompute      a module keeps what enters it, and computes the rest again when its backward comes
    keep_on_host   what the backward of a layer needs is in host memory between its forward and its backward

Both act on the call of a module, around its hooks: what FSDP2 and sequence parallelism gather for it is gathered
again with it, and so is every exchange within it (of tokens between experts, say). Numbers stay the same bit for bit:
the same operations see the same inputs, and random states are those of the forward.

Copies to and from the host run on streams of their own. A layer's activations leave the device while the next layers
compute, `LEAVING_LAYERS` of them; those of the layer before come back while a layer's backward computes. Without a
GPU they are copied within host memory.

Source: arXiv 2205.05198 (section 5, selective recomputation).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

LEAST_BYTES = 1024
"""Smaller tensors stay: a copy costs more than they take."""
LEAVING_LAYERS = 1
"""Layers whose activations may still be leaving the device while one computes."""


def recompute(module: nn.Module) -> None:
    """Let a module compute again in backward what it does not keep."""
    kind: Any = type(module)
    module.__class__ = _recomputed(kind)


def is_recomputed(module: nn.Module) -> bool:
    """Whether a module, by `recompute`, computes again."""
    return getattr(module, "_computes_again", False)


def keep_on_host(layer: nn.Module) -> None:
    """Let what a layer keeps for its backward be in host memory."""
    kind: Any = type(layer)
    layer.__class__ = _kept_on_host(kind)


def is_kept_on_host(layer: nn.Module) -> bool:
    """Whether a layer, by `keep_on_host`, has activations in host memory."""
    return getattr(layer, "_keeps_on_host", False)


def _named_as(kind: type[nn.Module], made: type[nn.Module]) -> type[nn.Module]:
    """A model goes by the names of its classes: which of them are its layers."""
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return made


@cache
def _recomputed(kind: Any) -> type[nn.Module]:
    class Recomputed(kind):
        _computes_again = True

        def __call__(self, *inputs: Any, **named: Any) -> Any:
            call = super().__call__
            if not (self.training and torch.is_grad_enabled()):
                return call(*inputs, **named)
            names = [name for name, value in named.items() if isinstance(value, Tensor)]
            others = {name: value for name, value in named.items() if name not in names}

            def compute(*given: Any) -> Any:
                tensors = dict(zip(names, given[len(inputs) :], strict=True))
                return call(*given[: len(inputs)], **tensors, **others)

            # What is kept goes through the hooks of a layer around: only arguments by position do.
            return checkpoint(compute, *inputs, *(named[name] for name in names), use_reentrant=False)

    return _named_as(kind, Recomputed)


@cache
def _kept_on_host(kind: Any) -> type[nn.Module]:
    class KeptOnHost(kind):
        _keeps_on_host = True

        def __call__(self, *inputs: Any, **named: Any) -> Any:
            if not (self.training and torch.is_grad_enabled()):
                return super().__call__(*inputs, **named)
            given = [leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor)]
            kept = _Kept(self, given)
            with saved_tensors_hooks(kept.pack, kept.unpack):
                outputs = super().__call__(*inputs, **named)
            kept.end()
            return outputs

    return _named_as(kind, KeptOnHost)


class _Kept:
    """The tensors that one call of a layer keeps: each storage once, however many tensors view it.

    Left where they are: weights, what the layer is given without gradient (positions, masks), and small tensors."""

    def __init__(self, layer: nn.Module, given: list[Tensor]) -> None:
        self._weights = [module._parameters for module in layer.modules() if module._parameters]
        self._given = {_place(tensor) for tensor in given if not tensor.requires_grad}
        self._lane = _lane(given[0].device)
        self._before = self._lane.last
        self._lane.last = ref(self)
        self._lane.make_room(LEAVING_LAYERS)
        self._open: dict[tuple[int, int], tuple[_Stored, Tensor]] = {}
        """By address and version, in the forward: what is stored, and its source."""
        self._stored: list[ReferenceType[_Stored]] = []
        self._returning = False

    def pack(self, tensor: Tensor) -> Any:
        if not self._goes(tensor):
            return tensor
        key = _place(tensor), tensor._version
        if key not in self._open:
            source = _bytes_of(tensor)
            self._open[key] = _Stored(self, self._lane.leave(source)), source
            self._stored.append(ref(self._open[key][0]))
        return _View(self._open[key][0], tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, _View) else packed

    def end(self) -> None:
        """The forward of the layer is over."""
        self._lane.hold([source for _, source in self._open.values()])
        self._open = {}

    def come_back(self) -> None:
        """Begin to bring what is left to the device, and after it what the layer before keeps."""
        if self._returning:
            return
        self._returning = True
        for kept in (self, None if self._before is None else self._before()):
            for stored in [] if kept is None else kept._stored:
                if (left := stored()) is not None:
                    left.begin()

    @property
    def lane(self) -> _Lane:
        return self._lane

    def _goes(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device != self._lane.device or tensor.is_sparse:
            return False
        place = _place(tensor)
        if tensor.untyped_storage().nbytes() < LEAST_BYTES or place in self._given:
            return False
        return all(place != other for other in self._places_of_weights())

    def _places_of_weights(self) -> Iterator[int]:
        for parameters in self._weights:
            for parameter in parameters.values():
                if parameter is not None:
                    yield _place(getattr(parameter, "_local_tensor", parameter))


class _Stored:
    """A storage in host memory. Nobody else holds it but the views that autograd has, with which it goes."""

    def __init__(self, owner: _Kept, host: Tensor) -> None:
        self._owner, self._host = owner, host
        self._arriving: tuple[Tensor, Any] | None = None

    def begin(self) -> None:
        """Begin to bring it to the device."""
        if self._arriving is None:
            self._arriving = self._owner.lane.arrive(self._host)

    def here(self) -> Tensor:
        """Its bytes on the device."""
        self._owner.come_back()
        self.begin()
        assert self._arriving is not None
        arrived, event = self._arriving
        self._owner.lane.wait(event)
        return arrived


class _View(NamedTuple):
    """A tensor of a storage."""

    stored: _Stored
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        here = self.stored.here()
        view = torch.empty(0, dtype=self.dtype, device=here.device)
        return view.set_(here.untyped_storage(), self.offset, self.shape, self.stride)


class _Lane:
    """The way between a device and host memory: a stream for each direction, and what is still on its way out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.last = device, None
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()

    last: ReferenceType[_Kept] | None
    """The tensors of the layer that was called last."""

    def leave(self, source: Tensor) -> Tensor:
        """A copy in host memory, which may still be on its way."""
        if not self._streams:
            return source.clone()
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._streams[0].wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._streams[0]):
            host.copy_(source, non_blocking=True)
        return host

    def hold(self, sources: list[Tensor]) -> None:
        """Keep what is leaving until `make_room`: its memory is written to again only after it has left."""
        if self._streams:
            self._leaving.append((self._streams[0].record_event(), sources))

    def make_room(self, layers: int) -> None:
        """Let no more than so many layers be on their way."""
        while len(self._leaving) > layers:
            event, _ = self._leaving.popleft()
            torch.cuda.current_stream(self.device).wait_event(event)

    def arrive(self, host: Tensor) -> tuple[Tensor, Any]:
        """A copy on the device, and what to wait for."""
        if not self._streams:
            return host, None
        self.make_room(0)
        arriving = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        back = self._streams[1]
        back.wait_stream(self._streams[0])
        back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(back):
            arriving.copy_(host, non_blocking=True)
        return arriving, back.record_event()

    def wait(self, event: Any) -> None:
        """Let what computes from here on see what has arrived."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


@cache
def _lane(device: torch.device) -> _Lane:
    return _Lane(device)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
