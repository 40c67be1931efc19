"""The two ends of vLLM's NCCL engine speak with each other, and with the installed vLLM's own classes.

What needs GPUs is replaced by its like on a CPU: NCCL's communicator by queues, and the packing on streams by one
tensor after the other. Everything else is vLLM's and ours.
"""

from __future__ import annotations

import queue
import socket
import threading
from dataclasses import asdict
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

from policy_worker.weights.nccl_sender import LineClient, NcclSender, byte_source
from rollout_worker.engines.vllm.nccl import ChunkSink, NcclReceiver
from schema.wire.weights import FileEntry
from tests.support.waiting import PATIENCE
from weight_sync.transport import TransferError
from weight_sync.transport.group import Chunk, Line, chunks_of
from weight_sync.transport.wire import Deadline

pytestmark = pytest.mark.slow  # it imports vLLM, as the other slow ones do

FILES = {"a.safetensors": bytes(range(200)), "b.safetensors": b"xyz"}
CHUNKS = chunks_of([FileEntry(name=name, n_bytes=len(data), hash="") for name, data in FILES.items()], 64)


def read(file: str) -> memoryview:
    return memoryview(bytearray(FILES[file]))


class Fabric:
    """All communicators of one test: what rank 0 broadcasts lies in the queue of every other rank."""

    def __init__(self) -> None:
        self.queues: dict[int, queue.Queue[torch.Tensor]] = {}
        self.made = self.destroyed = 0
        self.torn = False

    def trainer(self, info: Any, rank: int = 0) -> Communicator:
        del rank
        self.made += 1
        self.queues = {rank: queue.Queue() for rank in range(1, info.world_size)}
        return Communicator(self, 0)

    def worker(self, info: NCCLWeightTransferInitInfo, parallel_config: Any) -> Communicator:
        assert (parallel_config.rank, parallel_config.world_size) == (0, 1)
        assert parallel_config.data_parallel_index == 0
        assert 1 <= info.rank_offset < info.world_size
        return Communicator(self, info.rank_offset)


class Communicator:
    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank = fabric, rank

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        if self.rank == 0:
            if self.fabric.torn:
                raise RuntimeError("NCCL error: unhandled system error")
            for receiver in self.fabric.queues.values():
                receiver.put(tensor.clone())
        else:
            tensor.copy_(self.fabric.queues[self.rank].get(timeout=PATIENCE))

    def destroy(self) -> None:
        self.fabric.destroyed += 1


def produce(*, iterator: Any, group: Any, src: int, post_iter_func: Any, **_: Any) -> None:
    for item in iterator:
        group.broadcast(post_iter_func(item), src=src)


def consume(*, iterator: Any, group: Any, src: int, post_unpack_func: Any, **_: Any) -> None:
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(shape, dtype=dtype)
        group.broadcast(tensor, src=src)
        post_unpack_func([(name, tensor)])


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    made = Fabric()
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", made.trainer)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", made.worker)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", produce)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", consume)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return made


class Round:
    """One sending to some receivers; what each got, or why not."""

    def __init__(self, sender: NcclSender, receivers: list[NcclReceiver], timeout: float = PATIENCE) -> None:
        self.got: list[dict[str, bytearray]] = [{} for _ in receivers]
        self.errors: list[Exception | None] = [None for _ in receivers]
        self.error: Exception | None = None
        pairs = [socket.socketpair() for _ in receivers]
        threads = [
            threading.Thread(target=self._receive, args=(i, receiver, Line(pairs[i][1], Deadline(timeout))))
            for i, receiver in enumerate(receivers)
        ]
        for thread in threads:
            thread.start()
        try:
            sender.send([Line(near, Deadline(timeout)) for near, _ in pairs], CHUNKS, read)
        except Exception as error:
            self.error = error
            for near, _ in pairs:
                near.close()
        for thread in threads:
            thread.join()
        for near, far in pairs:
            near.close()
            far.close()

    def _receive(self, i: int, receiver: NcclReceiver, line: Line) -> None:
        def write(chunk: Chunk, data: memoryview) -> None:
            file = self.got[i].setdefault(chunk.file, bytearray(len(FILES[chunk.file])))
            file[chunk.offset : chunk.offset + chunk.n_bytes] = data

        try:
            receiver.receive(line, CHUNKS, write)
        except (TransferError, OSError, EOFError) as error:
            self.errors[i] = error


@pytest.fixture
def sender() -> NcclSender:
    return NcclSender("127.0.0.1")


def test_all_members_get_all_bytes_and_the_group_stays(fabric: Fabric, sender: NcclSender) -> None:
    receivers = [NcclReceiver(), NcclReceiver()]
    for _ in range(3):
        found = Round(sender, receivers)
        assert (found.error, found.errors) == (None, [None, None])
        assert found.got == [FILES, FILES]
    assert fabric.made == 1


def test_the_group_is_built_anew_when_members_change(fabric: Fabric, sender: NcclSender) -> None:
    stays, leaves, comes = NcclReceiver(), NcclReceiver(), NcclReceiver()
    for members in ([stays, leaves], [stays], [stays, comes], [comes, stays]):
        found = Round(sender, members)
        assert found.error is None
        assert found.got == [FILES] * len(members)
    assert fabric.made == 4


def test_a_failure_ends_for_all_and_the_next_round_works(fabric: Fabric, sender: NcclSender) -> None:
    receivers = [NcclReceiver(), NcclReceiver()]
    assert Round(sender, receivers).error is None
    fabric.torn = True
    found = Round(sender, receivers, timeout=0.5)
    assert "NCCL error" in str(found.error)
    assert all(error is not None for error in found.errors)
    fabric.torn = False
    assert Round(sender, receivers).got == [FILES, FILES]
    assert sender.works
    assert all(receiver.works for receiver in receivers)


def test_a_fabric_that_keeps_failing_is_given_up(fabric: Fabric, sender: NcclSender) -> None:
    fabric.torn = True
    for _ in range(3):
        assert sender.works
        assert Round(sender, [NcclReceiver()], timeout=0.5).error is not None
    assert not sender.works


def test_the_interfaces_are_those_of_the_installed_vllm() -> None:
    near, far = socket.socketpair()
    with near, far:
        line = Line(near, Deadline(PATIENCE))
        client, source = LineClient([line]), byte_source(CHUNKS, read)
        assert isinstance(client, VLLMWeightSyncClient)
        assert isinstance(source, WeightSource)
        sent = list(nccl_engine.NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata()))
        assert [name for name, _ in sent] == [chunk.name for chunk in CHUNKS]
        payload = worker_init_payload(
            NCCLWeightTransferInitInfo(master_address="a", master_port=1, rank_offset=1, world_size=2)
        )
        assert NCCLWeightTransferInitInfo(**payload).rank_offset == 1
        update = nccl_engine.NCCLWeightTransferUpdateInfo(
            names=[name for name, _ in sent],
            dtype_names=["uint8" for _ in sent],
            shapes=[list(tensor.shape) for _, tensor in sent],
        )
        told = asdict(update)
        sink = ChunkSink(CHUNKS, lambda *_: None)
        assert [*zip(told["names"], told["dtype_names"], told["shapes"], strict=True)] == sink.announced


def test_missing_chunks_are_told() -> None:
    sink = ChunkSink(CHUNKS, lambda *_: None)
    sink.load_weights([(CHUNKS[0].name, torch.zeros(CHUNKS[0].n_bytes, dtype=torch.uint8))])
    with pytest.raises(TransferError, match="chunks did not come"):
        sink.check()
