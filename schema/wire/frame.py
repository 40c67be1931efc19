"""Frames: safetensors bytes with string metadata, built and taken apart without touching the tensors.

    8 bytes little-endian N | N bytes JSON header | tensor bytes

A *frame* is one safetensors file in memory. A *bundle* is a frame whose tensors are themselves frames, stored
as uint8 and named "0", "1", …: several samples in one request, or the payloads of one training step. Who
passes a bundle on (the controller) reads the JSON header and slices; it never decodes a tensor.

Frames come from other processes, so everything here treats its input as hostile: every error is a
`FrameError`, sizes are bounded before anything is allocated, and no byte outside the declared ranges is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.numpy import load as _safetensors_load
from safetensors.numpy import save as _safetensors_save

CONTENT_TYPE = "application/x-safetensors"
MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Far above any header we write (a step of 8,192 samples with 20 rewards each needs about 4 MB)."""

_LENGTH_BYTES = 8


class FrameError(ValueError):
    """A frame that is truncated, inconsistent, or larger than allowed."""


class FrameEntry(NamedTuple):
    """Where one tensor lies: dtype name as safetensors writes it, shape, byte range after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """The parsed JSON header of a frame; `body` is the offset of the first tensor byte."""

    metadata: dict[str, str]
    entries: dict[str, FrameEntry]
    body: int


def read_header(data: bytes | memoryview) -> Header:
    """Parse and check the header of a frame.

    Raises:
        FrameError: the frame is truncated, its header is not what safetensors allows, or ranges overlap or
            point outside of the data.
    """
    raw, metadata, body = _parse(data)
    limit = len(data) - body
    entries = {name: _entry(name, value, limit) for name, value in raw.items()}
    _check_contiguous(entries, limit)
    return Header(metadata, entries, body)


def read_metadata(data: bytes | memoryview) -> dict[str, str]:
    """The metadata of a frame, checked exactly as by `read_header`: for who never looks at the tensors.

    Raises:
        FrameError: as `read_header`.
    """
    raw, metadata, body = _parse(data)
    limit = len(data) - body
    position = 0
    for name, value in raw.items():  # in the order of their bytes, as safetensors and we write them
        start, end = _range(name, value, limit)
        if start != position:
            entries = {name: _entry(name, value, limit) for name, value in raw.items()}
            _check_contiguous(entries, limit)
            return metadata
        position = end
    if position != limit:
        raise FrameError(f"frame has {limit - position} bytes that no entry names")
    return metadata


def _parse(data: bytes | memoryview) -> tuple[dict[str, Any], dict[str, str], int]:
    """The JSON header without its metadata, the metadata, and the offset of the first tensor byte."""
    size = len(data)
    if size < _LENGTH_BYTES:
        raise FrameError(f"frame of {size} bytes is shorter than its length field")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    body = _LENGTH_BYTES + length
    if length > MAX_HEADER_BYTES or body > size:
        raise FrameError(f"frame header claims {length} bytes, frame has {size}")
    try:
        raw = from_json(bytes(data[_LENGTH_BYTES:body]))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"frame header is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise FrameError("frame header is not a JSON object")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FrameError("frame metadata must map strings to strings")
    for value in metadata.values():
        if not isinstance(value, str):
            raise FrameError("frame metadata must map strings to strings")
    return raw, metadata, body


def _range(name: str, value: Any, limit: int) -> tuple[int, int]:
    """The byte range of an entry, which is checked. Raises `FrameError`."""
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        whole = type(start) is int and type(end) is int and type(shape) is list
    except (KeyError, TypeError, ValueError):
        raise FrameError(f"frame entry {name[:80]!r} is malformed") from None
    if whole:
        for number in shape:
            if type(number) is not int or number < 0:
                whole = False
    if not whole or type(dtype) is not str or not 0 <= start <= end <= limit:
        raise FrameError(f"frame entry {name[:80]!r} lies outside of the frame")
    return start, end


def _entry(name: str, value: Any, limit: int) -> FrameEntry:
    start, end = _range(name, value, limit)
    return FrameEntry(value["dtype"], tuple(value["shape"]), start, end)


def _check_contiguous(entries: Mapping[str, FrameEntry], size: int) -> None:
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise FrameError(f"frame entry {name[:80]!r} overlaps its neighbour or leaves a gap")
        position = entry.end
    if position != size:
        raise FrameError(f"frame has {size - position} bytes that no entry names")


def encode_frame(tensors: Mapping[str, npt.NDArray[np.generic]], metadata: Mapping[str, str]) -> bytes:
    """Serialise arrays (made contiguous where needed) and string metadata."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return bytes(_safetensors_save(arrays, dict(metadata)))


def decode_frame(data: bytes | memoryview) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, str]]:
    """Inverse of `encode_frame`. Raises `FrameError` on anything that is not a well-formed frame."""
    header = read_header(data)
    try:
        return _safetensors_load(bytes(data)), header.metadata
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise FrameError(f"frame cannot be decoded: {error}") from None


def pack_bundle(frames: Sequence[bytes | memoryview], metadata: Mapping[str, str]) -> bytes:
    """Put frames side by side into one bundle, in order. Copies bytes, decodes nothing."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for index, frame in enumerate(frames):
        end = position + len(frame)
        header[str(index)] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # safetensors pads the header so that tensors start aligned
    if len(text) > MAX_HEADER_BYTES:
        raise FrameError(f"bundle header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}: send fewer samples")
    return b"".join((len(text).to_bytes(_LENGTH_BYTES, "little"), text, *frames))


def unpack_bundle(data: bytes | memoryview) -> tuple[list[memoryview], dict[str, str]]:
    """Inverse of `pack_bundle`; the views share memory with `data`.

    Raises:
        FrameError: not a bundle (entries must be uint8 and named "0" … "n-1").
    """
    ranges, metadata = bundle_ranges(data)
    view = memoryview(data)
    return [view[start:end] for start, end in ranges], metadata


def bundle_ranges(data: bytes | memoryview) -> tuple[list[tuple[int, int]], dict[str, str]]:
    """Where the frames of a bundle lie in it. Raises `FrameError` as `unpack_bundle`."""
    metadata, entries, body = read_header(data)
    ranges: list[tuple[int, int]] = []
    for index in range(len(entries)):
        entry = entries.get(str(index))
        if entry is None or entry.dtype != "U8" or entry.shape != (entry.end - entry.start,):
            raise FrameError(f"bundle entry {index} is missing or not a byte string")
        ranges.append((body + entry.start, body + entry.end))
    return ranges, metadata
