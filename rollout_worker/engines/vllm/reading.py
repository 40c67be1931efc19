"""Reading the served weights back out of vLLM's processes, and hashing them as the published tensors they are.

    each rank ─ its parts of a group of tensors ─▶ a file of its own in shared memory ─▶ put together, hashed

Tensors come over in groups, so that the files stay small next to the model; without room in shared memory they are
temporary files, and those of several machines lie where all of them see them. Parts that several ranks hold must be
equal in all of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout_worker.engines.base import Checksum, SharedWeights
from rollout_worker.engines.checksum import Tally, loses_bits
from rollout_worker.engines.scatter import BITS, PublishedTensor, Region, first_of_repeats
from rollout_worker.engines.vllm.adapter import VllmAdapter
from weight_sync.layout import torch_dtype

log = logging.getLogger(__name__)

SHARED = Path("/dev/shm")  # noqa: S108
"""Used where it has room: in a container it may be as small as 64 MiB."""
READ_BYTES = 1 << 28
"""The bytes of a group of tensors, over all ranks, unless one tensor is larger: the files take so much shared
memory."""
_ALIGNMENT = 64


class _NoRoomError(Exception):
    """The files find no place."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A published tensor, the type in which it is kept, and for each rank the parts that lie there."""

    name: str
    published: PublishedTensor
    kept: torch.dtype
    parts: list[list[Region]]

    @property
    def n_bytes(self) -> int:
        return self.published.elements * int(self.kept.itemsize)


async def served_weights(
    adapter: VllmAdapter, weights: SharedWeights | None, content_hash: str, folder: Path | None = None
) -> Checksum:
    """Hash what is served. The weights are not updated meanwhile.

    Args:
        weights: the host's copy, if there is one. content_hash: of what should be served.
        folder: for the files; None: any place on this machine.

    Returns:
        Everything but the seconds. No hash where the files find no room, which is logged.
    """
    layouts = await adapter.layouts()
    known = [layout for layout in layouts if layout is not None]
    if len(known) < len(layouts) or not known:
        return Checksum(None, False, [], 0.0)
    tensors = _joined(known)
    async with AsyncExitStack() as stack:
        copy = None
        if weights is not None and any(loses_bits(tensor.published.dtype, tensor.kept) for tensor in tensors):
            publication = await asyncio.to_thread(stack.enter_context, weights.reading())
            if publication.content_hash == content_hash:
                copy = dict(weights.tensors())
        tally = Tally(copy)
        try:
            for group in _groups(tensors, READ_BYTES // len(known)):
                tally.problems.extend(await _add(adapter, group, len(known), tally, folder))
        except _NoRoomError as error:
            log.warning("the served weights are not compared with the published ones: %s", error)
            return Checksum(None, False, tally.problems, 0.0)
        served_hash = tally.content_hash
    return Checksum(served_hash, tally.exact, tally.problems, 0.0)


async def served_adapter(
    adapter: VllmAdapter, weights: SharedWeights | None, content_hash: str, settings: Mapping[str, str]
) -> Checksum:
    """Compare the adapter that is served, which vLLM has scaled, with the host's copy of it.

    Returns:
        Everything but the seconds. No hash where the copy has moved on.
    """
    if weights is None:
        return Checksum(None, False, [], 0.0)
    async with AsyncExitStack() as stack:
        publication = await asyncio.to_thread(stack.enter_context, weights.reading())
        if publication.content_hash != content_hash:
            return Checksum(None, False, [], 0.0)
        place = {"copy": str(weights.copy_directory), "content_hash": content_hash, **settings}
        problems = await adapter.compare(place)
    return Checksum(None if problems else content_hash, False, problems, 0.0)


def _joined(layouts: Sequence[Mapping[str, Any]]) -> list[_Tensor]:
    tensors = []
    for name, row in layouts[0].items():
        published = PublishedTensor(torch_dtype(row["dtype"], name), tuple(row["shape"]))
        kept = {layout[name]["kept"] for layout in layouts} - {None}
        parts = [
            [(offset, tuple(shape), tuple(strides)) for offset, shape, strides in layout[name]["parts"]]
            for layout in layouts
        ]
        dtype = torch_dtype(kept.pop(), name) if kept else published.dtype
        tensors.append(_Tensor(name, published, dtype, parts))
    return tensors


def _groups(tensors: Sequence[_Tensor], most: int) -> Iterator[list[tuple[_Tensor, int]]]:
    """Tensors with where each begins in its file, so many that a file has at most so many bytes."""
    group: list[tuple[_Tensor, int]] = []
    end = 0
    for tensor in tensors:
        if group and end + tensor.n_bytes > most:
            yield group
            group, end = [], 0
        group.append((tensor, end))
        end += math.ceil(tensor.n_bytes / _ALIGNMENT) * _ALIGNMENT
    if group:
        yield group


async def _add(
    adapter: VllmAdapter, group: Sequence[tuple[_Tensor, int]], n_ranks: int, tally: Tally, folder: Path | None
) -> list[str]:
    """Hash a group of tensors. Returns what is wrong inside of single ranks."""
    last, start = group[-1]
    n_bytes = max(start + last.n_bytes, 1)
    directory = await asyncio.to_thread(_directory, n_ranks * n_bytes, folder)
    try:
        problems = await adapter.read(directory, n_bytes, [(tensor.name, begin) for tensor, begin in group])
        await asyncio.to_thread(_tally, directory, n_bytes, group, n_ranks, tally)
        return problems
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def _directory(n_bytes: int, folder: Path | None = None) -> Path:
    """A new one with room for so many bytes: in a folder, or in shared memory, or else among temporary files."""
    try:
        places = [SHARED, Path(tempfile.gettempdir())] if folder is None else [folder]
        for place in places:
            if place.is_dir() and shutil.disk_usage(place).free >= n_bytes:
                return Path(tempfile.mkdtemp(prefix="cosmos-served-", dir=place))
    except OSError as error:
        raise _NoRoomError(str(error)) from error
    raise _NoRoomError(f"{n_bytes} bytes are free in none of {', '.join(map(str, places))}")


def _tally(directory: Path, n_bytes: int, group: Sequence[tuple[_Tensor, int]], n_ranks: int, tally: Tally) -> None:
    files = [
        torch.from_file(str(directory / str(rank)), shared=True, size=n_bytes, dtype=torch.uint8)
        for rank in range(n_ranks)
    ]
    for tensor, start in group:
        copies = [file[start : start + tensor.n_bytes].view(tensor.kept) for file in files]
        if not _join(tensor, copies):
            tally.problems.append(f"copies of {tensor.name} in several ranks disagree")
        tally.add(tensor.name, tensor.published, copies[0])


def _join(tensor: _Tensor, copies: Sequence[torch.Tensor]) -> bool:
    """Put all parts into the first copy. Returns whether parts that several ranks hold are equal."""
    if len(copies) == 1 or not tensor.published.elements:
        return True
    into = copies[0].view(BITS[tensor.kept.itemsize])
    written = torch.zeros(into.shape, dtype=torch.bool)
    equal = True
    for copy, parts in zip(copies, tensor.parts, strict=True):
        bits = copy.view(BITS[tensor.kept.itemsize])
        for region in parts:
            target, source, seen = (first_of_repeats(flat, region, region) for flat in (into, bits, written))
            equal = equal and bool(((target == source) | ~seen).all())
            target.copy_(source)
            seen.fill_(True)
    return equal
