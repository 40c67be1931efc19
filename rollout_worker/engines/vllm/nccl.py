"""A host's end of vLLM's NCCL engine: the data files of a version arrive in this process, on the engine's GPU.

vLLM's dense engine hands what it received to the `load_weights` of its model. Its model here is a sink that takes
chunks of files, so that everything after the transfer (hashes, the host's copy, changes in place) is the same for
all transports. The process has a context of its own on the GPU, about half a gigabyte next to the buffers.

NCCL knows no time-outs: what does not end in time is aborted, and what cannot even be aborted costs one thread and
the fabric.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from schema.config import Config
from schema.util.threads import in_daemon
from weight_sync.transport import TransferError
from weight_sync.transport.group import Chunk, Line

MOST_FAILURES = 3
"""In a row, after which the fabric is not tried again."""


def nccl_receiver(config: Config) -> NcclReceiver | None:
    """For a replica whose engine is vLLM on a GPU."""
    on_gpu = config.rollout.backend == "vllm" and torch.cuda.is_available()
    return NcclReceiver() if on_gpu else None


class NcclReceiver:
    """Receives chunks of files as tensors of bytes. A `ReceivingCarrier`."""

    def __init__(self) -> None:
        self._member = secrets.token_hex(8)
        self._engine: Any = None
        self._number = self._failures = 0

    @property
    def works(self) -> bool:
        return self._failures < MOST_FAILURES

    def receive(self, line: Line, chunks: Sequence[Chunk], write: Callable[[Chunk, memoryview], object]) -> None:
        """Receive as `ReceivingCarrier.receive` does. Whatever vLLM raises becomes a `TransferError`."""
        done = in_daemon(lambda: self._receive(line, chunks, write), "nccl-receive")
        try:
            done.result(line.deadline.left())
        except BaseException as error:
            self._failures += 1
            if not done.done() and self._engine is None:  # in the making: nothing could be aborted
                self._failures = MOST_FAILURES
            self._leave()
            if isinstance(error, TransferError | OSError | EOFError) or not isinstance(error, Exception):
                raise
            raise TransferError(f"{type(error).__name__}: {error}") from error
        self._failures = 0

    def _receive(self, line: Line, chunks: Sequence[Chunk], write: Callable[[Chunk, memoryview], object]) -> None:
        line.tell({"member": self._member, "group": self._number if self._engine is not None else 0})
        answer = line.hear()
        sink = ChunkSink(chunks, write)
        if answer.get("rebuild"):
            self._leave()
            self._engine = _engine(sink, line.hear().get("init"))
            self._number = int(answer["group"])
            line.tell({"ok": True})
        engine = self._engine
        if engine is None:
            raise TransferError("the trainer takes this host for a member of a group that it has left")
        engine.model = sink
        update = engine.parse_update_info(line.hear().get("update") or {})
        if [*zip(update.names, update.dtype_names, update.shapes, strict=True)] != sink.announced:
            raise TransferError("the trainer would send other chunks than the manifest has")
        engine.receive_weights(update)
        torch.accelerator.synchronize()
        sink.check()
        line.tell({"ok": True})

    def _leave(self) -> None:
        engine, self._engine, self._number = self._engine, None, 0
        if engine is not None:
            engine.shutdown()


class ChunkSink:
    """vLLM's engine takes it for a model."""

    def __init__(self, chunks: Sequence[Chunk], write: Callable[[Chunk, memoryview], object]) -> None:
        self._chunks = {chunk.name: chunk for chunk in chunks}
        self._write = write
        self.announced = [(chunk.name, "uint8", [chunk.n_bytes]) for chunk in chunks]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Write chunks to their files."""
        names = set()
        for name, tensor in tensors:
            self._write(self._chunks.pop(name), memoryview(tensor.cpu().numpy()))
            names.add(name)
        return names

    def check(self) -> None:
        """Raises `TransferError` when chunks are missing."""
        if self._chunks:
            raise TransferError(f"{len(self._chunks)} chunks did not come")


def _engine(sink: ChunkSink, init: dict[str, Any] | None) -> Any:
    """vLLM's worker engine as a process of its own: rank 0 of one, shifted by the trainer's `rank_offset`."""
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    config: Any = WeightTransferConfig(backend="nccl")
    model: Any = sink
    made: Any = NCCLWeightTransferEngine(config, VllmConfig(), torch.device("cuda", 0), model)
    made.init_transfer_engine(made.parse_init_info(init or {}))
    return made
