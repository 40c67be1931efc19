"""How tensors lie in data files, and what is hashed.

    | 8 bytes N | JSON header, padded with spaces | tensor | tensor | … |      a plain safetensors file
    |<------------- RESERVED bytes -------------->|

Space for the header is reserved, so tensors are written as they come, one in memory at a time, and the header
goes in front when the file is full. Any safetensors reader loads these files.

Hashes are xxh3-128, as 32 hex digits: against torn, stale and flipped bytes, not against forgers (who would
need the controller's token to point at their manifest). Every byte is hashed once:

    block    BLOCK elements of a tensor in C order, the last one shorter
    tensor   the digests of its blocks
    file     header bytes, then for each of its tensors in file order: of a whole one its hash, of sparse blocks the
             digest of their bytes
    content  names, dtypes, shapes and hashes of all tensors, sorted by name: equal weights have equal content
    manifest the bytes of manifest.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

import torch
import xxhash

from schema.wire.frame import MAX_HEADER_BYTES
from schema.wire.weights import FileEntry, TensorEntry
from weight_sync.errors import WeightError

RESERVED = 64 * 1024
"""Bytes for the header of one file, enough for about 500 tensors; a file whose header is full is closed."""

BLOCK = 1 << 20
"""Elements that are hashed, compared and encoded together: what a cache holds, and enough pieces for every thread."""

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """The safetensors name of a dtype."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise WeightError(f"tensor {tensor!r} has dtype {dtype}, which safetensors cannot hold") from None


def torch_dtype(name: str, tensor: str) -> torch.dtype:
    """The torch dtype of a safetensors name."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise WeightError(f"tensor {tensor!r} has dtype {name!r}, which this build does not know") from None


def tensor_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in C order, without a copy where it lies so in host memory already."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise WeightError(f"tensor {name!r} is {tensor.layout} on {tensor.device}: only plain tensors travel")
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if plain.numel() == 0:
        return memoryview(b"")
    # Not reshape(-1): one element may count as contiguous and still have another stride.
    return memoryview(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())


def as_tensor(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over `data`; copied only where the bytes are not aligned to the dtype."""
    if len(data) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).reshape(tuple(shape))


def size_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    if any(n < 0 for n in shape):
        raise WeightError(f"tensor {name!r} has the impossible shape {list(shape)}")
    return math.prod(shape) * int(dtype.itemsize)


def digest(data: bytes | memoryview) -> bytes:
    """xxh3-128 of some bytes."""
    value: bytes = xxhash.xxh3_128_digest(data)
    return value


def tensor_digest(data: bytes | memoryview, itemsize: int) -> bytes:
    """Hash of a tensor from its bytes in C order: of the digests of its blocks."""
    state, step = xxhash.xxh3_128(), BLOCK * itemsize
    view = memoryview(data)
    for start in range(0, len(view), step):
        state.update(digest(view[start : start + step]))
    value: bytes = state.digest()
    return value


def file_hash(header: bytes | memoryview, tensors: Iterable[bytes]) -> str:
    """Hash of a data file from its header bytes and the digests of its tensors in file order."""
    state = xxhash.xxh3_128(header)
    for value in tensors:
        state.update(value)
    text: str = state.hexdigest()
    return text


def content_hash(tensors: Mapping[str, TensorEntry]) -> str:
    """Hash of the weights themselves, whichever way they are cut into files."""
    rows = [[name, entry.dtype, entry.shape, entry.hash] for name, entry in sorted(tensors.items())]
    return digest(json.dumps(rows, separators=(",", ":")).encode()).hex()


class WeightFile:
    """One data file being written: `add` tensors while `has_room`, then `finish`."""

    def __init__(self, stream: IO[bytes], name: str, max_bytes: int) -> None:
        self._stream, self.name, self._max_bytes = stream, name, max_bytes
        self._rows: list[str] = []
        self._header_size = len("{}") + 8
        self._size = 0
        self._digests: list[bytes] = []
        self._reserved = RESERVED

    def _row(self, name: str, dtype: str, shape: Sequence[int], n_bytes: int) -> str:
        offsets = [self._size, self._size + n_bytes]
        body = json.dumps({"dtype": dtype, "shape": list(shape), "data_offsets": offsets}, separators=(",", ":"))
        return f"{json.dumps(name)}:{body}"

    def has_room(self, name: str, dtype: str, shape: Sequence[int], n_bytes: int) -> bool:
        """Whether one more tensor fits. The first always does, however large."""
        if not self._rows:
            return True
        row = self._row(name, dtype, shape, n_bytes)
        return self._size + n_bytes <= self._max_bytes and self._header_size + len(row.encode()) + 1 <= self._reserved

    def add(self, name: str, dtype: str, shape: Sequence[int], data: memoryview, value: bytes) -> None:
        """Append one tensor, whose bytes have the digest `value` (see the module's table).

        Raises `WeightError` when its name alone would overflow the header."""
        row = self._row(name, dtype, shape, len(data))
        needed = self._header_size + len(row.encode()) + 1
        if needed > self._reserved:
            if self._rows or needed > MAX_HEADER_BYTES:
                raise WeightError(f"the name of tensor {name[:80]!r}… is too long for a header")
            self._reserved = (needed + 7) // 8 * 8
        if not self._rows:
            self._stream.seek(self._reserved)
        self._header_size = needed
        self._rows.append(row)
        self._stream.write(data)
        self._size += len(data)
        self._digests.append(value)

    def finish(self) -> FileEntry:
        """Write the header; the stream is complete afterwards."""
        text = ("{" + ",".join(self._rows) + "}").encode().ljust(self._reserved - 8, b" ")
        header = len(text).to_bytes(8, "little") + text
        self._stream.seek(0)
        self._stream.write(header)
        return FileEntry(name=self.name, n_bytes=self._reserved + self._size, hash=file_hash(header, self._digests))
