"""How torch.distributed.checkpoint's plans become files: safetensors, one per rank, and no pickle.

torch's own file format keeps its metadata as a pickle, so this is a storage of our own below its planners:

    model-00001.safetensors   header: __metadata__.chunks = {name: [key, offsets, global shape]}
                              "model.lm.x@4096,0"       the piece of tensor `model.lm.x` at row 4096, column 0

Each rank plans, writes and reads alone: which piece a rank holds is known to it without asking, and
which pieces a checkpoint holds stands in the headers. So saving needs no collective, which lets it run in the
background, and any number of ranks can read what any number wrote.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from policy_worker.checkpoints.layout import FileFacts
from policy_worker.errors import DamagedCheckpointError
from weight_sync.errors import WeightError
from weight_sync.layout import dtype_name, tensor_bytes
from weight_sync.publishing.gather import Box
from weight_sync.publishing.host_arena import HostArena
from weight_sync.stored import StoredTensor, all_of, open_file

State = dict[str, Tensor]
"""Tensors by key: whole ones, or DTensors of which each rank holds a piece."""

CHUNKS = "chunks"


@dataclass(frozen=True)
class TensorPiece:
    """The piece of one tensor that this rank holds: `data` lies at `offsets` in a tensor of shape `size`."""

    key: str
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    data: Tensor

    @property
    def name(self) -> str:
        return piece_name(self.key, self.offsets)


def piece_name(key: str, offsets: tuple[int, ...]) -> str:
    return f"{key}@{','.join(map(str, offsets))}"


# ---- write ----------------------------------------------------------------------------------------------------


def pieces_of(state: State) -> list[TensorPiece]:
    """List what this rank has to write, by torch's plan. Nothing is copied or communicated."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    pieces = (_piece(item, planner) for item in planner.create_local_plan().items)
    return [piece for piece in pieces if piece.data.numel()]


def _piece(item: WriteItem, planner: DefaultSavePlanner) -> TensorPiece:
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor: only tensors are kept in a checkpoint")
    data = planner.resolve_data(item)
    assert isinstance(data, Tensor)
    offsets, size = tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.size)
    return TensorPiece(item.index.fqn, offsets, size, data.detach())


def write_pieces(path: Path, pieces: list[TensorPiece]) -> FileFacts:
    """One safetensors file, forced to disk; one tensor at a time passes through host memory. Raises `OSError`."""
    ordered = sorted(pieces, key=lambda piece: (-piece.data.dtype.itemsize, piece.name))  # all stay aligned
    chunks = {piece.name: [piece.key, piece.offsets, piece.size] for piece in ordered}
    header: dict[str, Any] = {"__metadata__": {CHUNKS: json.dumps(chunks, separators=(",", ":"))}}
    end = 0
    for piece in ordered:
        start, end = end, end + piece.data.numel() * piece.data.dtype.itemsize
        header[piece.name] = {
            "dtype": dtype_name(piece.data.dtype, piece.name),
            "shape": list(piece.data.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    state, size = xxhash.xxh3_128(), 0
    with path.open("xb") as stream:
        front: tuple[bytes | memoryview, ...] = (len(text).to_bytes(8, "little"), text)
        for data in itertools.chain(front, (tensor_bytes(piece.name, piece.data) for piece in ordered)):
            stream.write(data)
            state.update(data)
            size += len(data)
        stream.flush()
        os.fsync(stream.fileno())
    return FileFacts(bytes=size, hash=state.hexdigest())


class Staging:
    """Copies of pieces in host memory, so that training may go on while they are written.

    The memory is kept for the next save: the first touch of fresh pages costs more than the copy itself."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pin, self._copies = device, device.type == "cuda", dict[str, Tensor]()
        self._arena = HostArena(pinned=self._pin)

    def copy(self, pieces: list[TensorPiece]) -> list[TensorPiece]:
        """The same pieces in host memory; those of an earlier call are overwritten."""
        kept, self._copies = self._copies, {}
        for piece in pieces:
            copy = kept.pop(piece.name, None)
            if copy is None or copy.shape != piece.data.shape or copy.dtype != piece.data.dtype:
                copy = self._arena.tensor(piece.data.shape, piece.data.dtype)
            self._copies[piece.name] = copy.copy_(piece.data, non_blocking=self._pin)
        if self._pin:
            torch.cuda.current_stream(self._device).synchronize()
        return [TensorPiece(p.key, p.offsets, p.size, self._copies[p.name]) for p in pieces]


# ---- read -----------------------------------------------------------------------------------------------------


class StateFiles:
    """The tensors of a checkpoint, whichever ranks wrote them. `close` when done; a context manager."""

    def __init__(self, files: list[Path]) -> None:
        """Raises `DamagedCheckpointError` unless the headers name whole tensors."""
        self._files = files
        self._pieces: dict[str, StoredTensor] = {}
        self.tensors: dict[str, TensorStorageMetadata] = {}
        for path in files:
            self._read_header(path)
        for key, tensor in self.tensors.items():
            held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if held != math.prod(tensor.size):
                self.close()
                raise DamagedCheckpointError(
                    f"tensor {key} is not whole: {held} of {math.prod(tensor.size)} numbers are in "
                    f"{', '.join(str(path) for path in files)}"
                )

    def _read_header(self, path: Path) -> None:
        try:
            metadata, stored = open_file(path)
            for name, (key, offsets, size) in json.loads(metadata[CHUNKS]).items():
                if piece_name(key, tuple(offsets)) in self._pieces:
                    continue  # a replica of what another rank wrote
                piece = self._pieces[piece_name(key, tuple(offsets))] = stored[name]
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece.shape))
                properties = TensorProperties(dtype=piece.dtype)
                tensor = self.tensors.setdefault(key, TensorStorageMetadata(properties, torch.Size(size), []))
                tensor.chunks.append(chunk)
        except (OSError, WeightError, KeyError, ValueError, TypeError) as error:
            self.close()
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error

    def whole(self, key: str) -> Tensor:
        """One tensor, put together. Raises `KeyError`."""
        meta = self.tensors[key]
        result = torch.empty(meta.size, dtype=meta.properties.dtype)
        for chunk in meta.chunks:
            place = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            piece = self._pieces[piece_name(key, place.starts)]
            piece.read_into(result[place.slices()], all_of(piece.shape))
        return result

    def load(self, state: State) -> None:
        """Fill the tensors of `state` in place, each rank its pieces. Raises `DamagedCheckpointError`."""
        planner = DefaultLoadPlanner()
        try:
            planner.set_up_planner(dict(state), Metadata(dict(self.tensors)), is_coordinator=True)
            for item in planner.create_local_plan().items:
                piece = piece_name(item.storage_index.fqn, tuple(item.storage_index.offset or ()))
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                self._pieces[piece].read_into(planner.resolve_tensor(item).detach(), box)
        except Exception as error:  # of the files, and whatever the planner makes of them
            raise DamagedCheckpointError(f"{', '.join(map(str, self._files))} cannot be read: {error}") from error

    def close(self) -> None:
        self._pieces.clear()

    def __enter__(self) -> StateFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def differences(saved: Mapping[str, TensorStorageMetadata], state: State) -> list[str]:
    """List what a checkpoint holds otherwise than this model asks for: names and shapes, most telling first."""
    missing = [f"it lacks {key}" for key in state if key not in saved]
    shapes = [
        f"{key} is {tuple(saved[key].size)} there and {tuple(tensor.shape)} here"
        for key, tensor in state.items()
        if key in saved and tuple(saved[key].size) != tuple(tensor.shape)
    ]
    kinds = {key.split(".", 1)[0] for key in state}
    surplus = [f"it has {key} besides" for key in saved if key.split(".", 1)[0] in kinds and key not in state]
    return shapes + missing + surplus
