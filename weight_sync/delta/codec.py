"""Which elements of a tensor changed, and their new values: the sparse payload, bit by bit.

    payload   for each block of BLOCK elements, ascending: | head | lengths | skips | values |
    head      u32: number of changed elements, + bytes per skip << 24; 0 alone where nothing changed
    lengths   u32 for each plane
    skips     how many unchanged elements lie before each changed one, as byte planes, lowest first
    values    the new values as unsigned integers, as byte planes, lowest first

A plane holds one byte of every changed element. Its length says how it is stored: 0 all zeros, the number of
elements as it is, less than that one zstd frame. All numbers are little-endian. `docs/weights.md` has an example.

Invariant: `apply(encode(old, new), old)` gives the bits of `new`, and gives them again when it is repeated or was
interrupted, because new values are written and nothing is added. Elements are unsigned integers here, so NaN
payloads and −0.0 are values like any other. A payload is hostile until it is read to its end: any order of
skips is ascending by construction, what is allocated is bounded by the block before it is allocated, and
everything that does not fit is a `CodecError`.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from weight_sync.errors import WeightError
from weight_sync.layout import BLOCK, digest

Array = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]

_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=20, hash_log=6, chain_log=6, search_log=1, min_match=7, strategy=zstandard.STRATEGY_FAST
)
"""Planes are noise or skewed bytes, hardly ever repeated strings: an entropy coder, with as little search for matches
as zstd allows, is smaller and twice as fast as its level 1."""
_WORTH = 64
"""Bytes below which a plane is not compressed: a frame has more than ten bytes of its own."""
_HEAD = struct.Struct("<I")
QUEUED_BLOCKS = 32
"""Blocks that threads may encode before they are asked for: some for each, while what is ready is written."""


class CodecError(WeightError):
    """A sparse payload is not one: it ends early or late, or says what cannot be."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The changes of one tensor.

    Attributes:
        changed: number of elements that differ. parts: the payload, in pieces to be written one after the
        other; empty when nothing changed. n_bytes: their sum. digest: hash of the new tensor (`tensor_digest`).
    """

    changed: int
    parts: list[bytes]
    n_bytes: int
    digest: bytes


class _EncodedBlock(NamedTuple):
    """The same of one block."""

    changed: int
    parts: list[bytes]
    digest: bytes


class _Tools(threading.local):
    """Holds what each thread keeps between blocks."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()
        self.flags = np.zeros(BLOCK, np.bool_)


_tools = _Tools()


def bits_of(data: bytes | memoryview, itemsize: int) -> Array:
    """The elements of a tensor as unsigned integers, from its bytes in C order: a view, shape `[elements]`."""
    return np.frombuffer(data, _unsigned(itemsize))


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A tensor to encode.

    Attributes:
        old: `[elements]`, at least one, contiguous unsigned integers of 1, 2, 4 or 8 bytes. new: likewise.
        most_bytes: given up beyond this size: the tensor is better stored whole. positions: where they differ,
        ascending, if that is known: then `old` is not read.
    """

    old: Array
    new: Array
    most_bytes: int | None = None
    positions: npt.NDArray[np.int32] | None = None


def encode(old: Array, new: Array, *, most_bytes: int | None = None, pool: Executor | None = None) -> Encoded | None:
    """Compare two tensors of the same dtype and size, which may be 0.

    old, new, most_bytes: see `Pair`. pool: threads that share the blocks; not the pool that this call itself runs in.

    Returns:
        The changes; None when they need more than `most_bytes`."""
    if not len(new):
        return _combine([], most_bytes)
    with closing(encode_each([Pair(old, new, most_bytes)], pool)) as results:
        return next(results)


def encode_each(pairs: Iterable[Pair], pool: Executor | None = None) -> Generator[Encoded | None]:
    """`encode` of one tensor after the other, none of them empty.

    Threads are up to `QUEUED_BLOCKS` blocks ahead of whoever takes the results: so many encoded blocks are in memory
    next to the tensor that is being put together, and so many pairs are drawn early, whose errors come early too.
    When this ends, or is closed, no thread reads a tensor any more."""
    if pool is None:
        for pair in pairs:
            yield _combine((_encode_block(pair, start) for start in _starts(pair)), pair.most_bytes)
        return
    given_up: Pair | None = None
    source = ((pair, start) for pair in pairs for start in _starts(pair) if pair is not given_up)
    flight: deque[tuple[Pair, Future[_EncodedBlock]]] = deque()

    def fill() -> None:
        while len(flight) < QUEUED_BLOCKS and (item := next(source, None)) is not None:
            flight.append((item[0], pool.submit(_encode_block, *item)))

    def blocks(pair: Pair) -> Iterator[_EncodedBlock]:
        while flight and flight[0][0] is pair:
            block = flight[0][1].result()
            flight.popleft()
            fill()
            yield block

    def drop(flying: list[Future[_EncodedBlock]]) -> None:
        wait([future for future in flying if not future.cancel()])

    try:
        fill()
        while flight:
            pair = flight[0][0]
            encoded = _combine(blocks(pair), pair.most_bytes)
            if encoded is None:
                given_up, rest = pair, []
                while flight and flight[0][0] is pair:
                    rest.append(flight.popleft()[1])
                drop(rest)
                fill()
            yield encoded
    finally:
        drop([future for _, future in flight])


def _starts(pair: Pair) -> range:
    assert pair.old.shape == pair.new.shape
    assert pair.old.dtype == pair.new.dtype == _unsigned(pair.old.itemsize)
    assert pair.old.ndim == 1
    assert len(pair.old)
    return range(0, len(pair.new), BLOCK)


def _encode_block(pair: Pair, start: int) -> _EncodedBlock:
    now = pair.new[start : start + BLOCK]
    if pair.positions is None:
        positions = _changed(pair.old[start : start + BLOCK], now)
    else:
        first, last = np.searchsorted(pair.positions, (start, start + len(now)))
        positions = pair.positions[first:last].astype(np.int64) - start
    return _EncodedBlock(len(positions), _pack(positions, now[positions]), digest(now.data))


def _combine(blocks: Iterable[_EncodedBlock], most_bytes: int | None) -> Encoded | None:
    """The changes of a tensor from those of its blocks in order; None as soon as they exceed `most_bytes`."""
    changed, n_bytes, state = 0, 0, xxhash.xxh3_128()
    parts: list[bytes] = []
    for block in blocks:
        changed += block.changed
        parts += block.parts
        n_bytes += sum(map(len, block.parts))
        state.update(block.digest)
        if changed and most_bytes is not None and n_bytes > most_bytes:
            return None
    if not changed:
        return Encoded(0, [], 0, state.digest())
    return Encoded(changed, parts, n_bytes, state.digest())


def _pack(positions: Positions, values: Array) -> list[bytes]:
    """One block: head, lengths and planes.

    positions: of the changed elements in the block, `[changed]`, ascending, all below BLOCK. values: `[changed]`
    unsigned integers."""
    count = len(positions)
    if count == 0:
        return [_HEAD.pack(0)]
    skips = positions.copy()
    skips[1:] -= positions[:-1] + 1
    width = max(1, (int(skips.max()).bit_length() + 7) // 8)
    planes = [_squeeze(plane) for plane in (*_planes(skips, width), *_planes(values, values.itemsize))]
    lengths = [len(plane) for plane in planes]
    return [struct.pack(f"<I{len(planes)}I", count | width << 24, *lengths), *filter(None, planes)]


def decode(payload: memoryview, dtype: npt.DTypeLike, n_elements: int) -> Iterator[tuple[Positions, Array]]:
    """Read the changes block by block, blocks without any left out.

    payload: of one tensor, all of it. dtype: unsigned, of the tensor's itemsize. n_elements: of the tensor.

    Yields:
        Positions in the flattened tensor, ascending, and the new values there; both `[changed]` and writable.

    Raises `CodecError`: the payload is damaged. Blocks that were yielded before may be wrong as well: what is applied
    must be checked by its hash."""
    kind = np.dtype(dtype)
    for block in _blocks(payload, kind.itemsize, n_elements):
        if block.changed:
            positions, values = _unpack(block, payload, kind)
            yield positions + block.start, values


def apply(payload: memoryview, target: Array, pool: Executor | None = None) -> bytes:
    """Write the changes into a tensor in place.

    payload: of one tensor, all of it. target: `[elements]`, contiguous unsigned integers, writable. pool: as for
    `encode`.

    Returns:
        The hash of the tensor as it now is.

    Raises `CodecError`: the payload is damaged. `target` may hold some of it: apply the right one over it."""

    def one(block: _Block) -> bytes:
        part = target[block.start : block.start + block.size]
        if block.changed:
            positions, values = _unpack(block, payload, target.dtype)
            part[positions] = values
        return digest(part.data)

    assert target.dtype == _unsigned(target.itemsize)
    assert target.ndim == 1
    state, blocks = xxhash.xxh3_128(), list(_blocks(payload, target.itemsize, len(target)))
    for value in map(one, blocks) if pool is None else pool.map(one, blocks):
        state.update(value)
    return state.digest()


def _unsigned(itemsize: int) -> np.dtype[Any]:
    return np.dtype(f"<u{itemsize}")


def _changed(old: Array, new: Array) -> Positions:
    """Positions at which two blocks differ. Only words of eight flags with one set are looked at closely."""
    size = len(new)
    flags = _tools.flags[: -(-size // 8) * 8]
    flags[size:] = False
    np.not_equal(old, new, out=flags[:size])
    flagged = flags.view(np.uint64)
    words = np.flatnonzero(flagged.astype(np.bool_))
    if len(words) * 2 > len(flagged):
        return np.flatnonzero(flags)
    flag_indices = np.flatnonzero(flagged[words].view(np.bool_))
    positions: Positions = (words[flag_indices >> 3] << 3) + (flag_indices & 7)
    return positions


def _planes(numbers: Array, width: int) -> Array:
    """The lowest `width` bytes of each number as rows `[width, numbers]`."""
    rows: Array = numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)
    return np.ascontiguousarray(rows[:, :width].T)


def _squeeze(plane: Array) -> bytes:
    if not plane.any():
        return b""
    if len(plane) >= _WORTH:
        packed: bytes = _tools.compressor.compress(plane.data)
        if len(packed) < len(plane):
            return packed
    return plane.tobytes()


class _Block(NamedTuple):
    """Where one block lies in its tensor (elements) and its planes in the payload (bytes)."""

    start: int
    size: int
    changed: int
    width: int
    planes: list[tuple[int, int]]


def _blocks(payload: memoryview, itemsize: int, n_elements: int) -> Iterator[_Block]:
    """Walk over the heads of a payload, to its very end."""
    if len(payload) < _HEAD.size * -(-n_elements // BLOCK):
        raise CodecError(f"{len(payload)} bytes are too few for the blocks of {n_elements} elements")
    at = 0
    for start in range(0, n_elements, BLOCK):
        size = min(BLOCK, n_elements - start)
        if at + _HEAD.size > len(payload):
            raise CodecError(f"the payload ends before the block of element {start}")
        (head,) = _HEAD.unpack_from(payload, at)
        at += _HEAD.size
        count, width = head & 0xFFFFFF, head >> 24
        if head == 0:
            yield _Block(start, size, 0, 0, [])
            continue
        if not (0 < count <= size and 0 < width <= 3):
            raise CodecError(f"the block of element {start} claims {count} changes, {width} bytes each")
        n_planes = width + itemsize
        body = at + 4 * n_planes
        if body > len(payload):
            raise CodecError(f"the payload ends in the block of element {start}")
        lengths = struct.unpack_from(f"<{n_planes}I", payload, at)
        at, planes = body, []
        for length in lengths:
            if length > count or at + length > len(payload):
                raise CodecError(f"a plane of {length} bytes in the block of element {start} does not fit")
            planes.append((at, at + length))
            at += length
        yield _Block(start, size, count, width, planes)
    if at != len(payload):
        raise CodecError(f"{len(payload) - at} bytes follow the last block")


def _unpack(block: _Block, payload: memoryview, dtype: np.dtype[Any]) -> tuple[Positions, Array]:
    """Positions within the block, and values."""
    planes = [_expand(payload[start:end], block) for start, end in block.planes]
    skips = _joined(planes[: block.width], np.dtype("<u4") if block.width > 1 else np.dtype("u1"))
    positions = np.cumsum(skips, dtype=np.int64)
    positions += np.arange(block.changed)
    if positions[-1] >= block.size:
        raise CodecError(f"the block of element {block.start} has changes beyond its {block.size} elements")
    return positions, _joined(planes[block.width :], dtype)


def _expand(data: memoryview, block: _Block) -> memoryview | bytes:
    """The bytes of one plane, one for each changed element."""
    if len(data) == 0:
        return bytes(block.changed)
    if len(data) == block.changed:
        return data
    try:
        if zstandard.frame_content_size(data) != block.changed:
            raise CodecError(f"a plane in the block of element {block.start} has not one byte per change")
        plane: bytes = _tools.decompressor.decompress(data, max_output_size=block.changed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a plane in the block of element {block.start} is damaged: {error}") from None
    if len(plane) != block.changed:
        raise CodecError(f"a plane in the block of element {block.start} has not one byte per change")
    return plane


def _joined(planes: list[memoryview | bytes], dtype: np.dtype[Any]) -> Array:
    """Numbers from their bytes, lowest plane first; missing high planes are zero."""
    rows = np.zeros((len(planes[0]), dtype.itemsize), np.uint8)
    for i, plane in enumerate(planes):
        rows[:, i] = np.frombuffer(plane, np.uint8)
    return rows.reshape(-1).view(dtype)
