"""Weights from the trainer's host to a replica's without the store: over TCP, and in chunks through the device.

NCCL refuses two ranks on one GPU, and its engine is vLLM's: with one GPU the chunks go to the device and through a
broadcast of the trainer's own group, and are taken from there by the replica's sink. All but the wire is what a job
runs. Between two GPUs see the section `vllm`.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.bench import Bench
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.weights.nccl_sender import device_chunks
from rollout_worker.engines.vllm.nccl import ChunkSink
from schema.wire.weights import Piece, Publication
from weight_sync.host.host_copy import HostCopy
from weight_sync.publishing.writer import publish
from weight_sync.stores import DirectoryStore
from weight_sync.transport import DirectStore, Sender
from weight_sync.transport.group import Chunk, Line

TIMEOUT = 60.0


class Handover:
    """Both ends of a fabric within one process: chunks pass through the device."""

    works = True

    def __init__(self) -> None:
        self._chunks: list[tuple[str, torch.Tensor]] = []
        self._there = threading.Event()

    def send(self, lines: Sequence[Line], chunks: Sequence[Chunk], read: Callable[[str], memoryview]) -> None:
        for name, tensor in device_chunks(chunks, read):
            dist.broadcast(tensor, 0)
            self._chunks.append((name, tensor))
        self._there.set()

    def receive(self, line: Line, chunks: Sequence[Chunk], write: Callable[[Chunk, memoryview], object]) -> None:
        if not self._there.wait(line.deadline.left()):
            raise TimeoutError("the chunks did not come")
        sink = ChunkSink(chunks, write)
        sink.load_weights(self._chunks)
        sink.check()
        self._chunks = []
        self._there.clear()


def run(bench: Bench) -> None:
    group = RankGroup(RankEnvironment())
    elements = 2**12 if bench.tiny else 2**28
    tensors = {f"part.{i}.weight": torch.randn(elements // 4).to(torch.bfloat16) for i in range(4)}
    total = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    dist.broadcast(torch.zeros(1, device=bench.device), 0)  # makes NCCL's communicator
    try:
        with tempfile.TemporaryDirectory(dir=bench.in_memory(6 * total)) as folder:
            for fabric, carrier in (("tcp", None), ("chunks over the device", Handover())):
                _hand_out(bench, Path(folder) / fabric, fabric, carrier, tensors)
    finally:
        group.close()


def _hand_out(
    bench: Bench, place: Path, fabric: str, carrier: Handover | None, tensors: dict[str, torch.Tensor]
) -> None:
    """Two versions; with the first the sender waits for others who might come, as in a job."""
    place.mkdir()
    store = DirectoryStore(place / "store")
    sender = Sender(store, "127.0.0.1", TIMEOUT, carrier)
    direct = DirectStore(DirectoryStore(place / "nothing"), TIMEOUT, carrier)
    copy = HostCopy(place / "copy", direct)
    try:
        for version, which in ((1, "first"), (2, "second")):
            tensors = {name: tensor + version for name, tensor in tensors.items()}
            made = publish(store, version=version, timeline=0, tensors=tensors.items())
            piece = Piece(uri=made.uri, manifest_hash=made.manifest_hash, n_bytes=made.n_bytes)
            publication = Publication(
                id=version, version=version, timeline=0, uri=made.uri, manifest_hash=made.manifest_hash,
                content_hash=made.content_hash, n_bytes=made.n_bytes, kind="full", offer=sender.offer(piece),
            )  # fmt: skip
            direct.expect(publication)
            seconds = bench.wall(lambda publication=publication: copy.advance(publication))
            weights = copy.advance(publication)
            with weights.reading():
                right = all(torch.equal(tensor, tensors[name]) for name, tensor in weights.tensors())
            outcome = direct.outcome()
            bench.check(
                f"{fabric}, {which} version",
                right and outcome.fallback is None and outcome.files > 0,
                gb=made.n_bytes / 1e9,
                seconds_s=seconds,
                fallback=outcome.fallback or "",
            )
    finally:
        copy.close()
        sender.close()
