"""The trainer's side of `weight_sync.transport = "collective"`: see `weight_sync.transport`.

    a GPU, and vLLM installed      the data files go to all hosts at once, by vLLM's NCCL engine
    otherwise, and when that fails they go to each host by itself, over TCP

Nothing here can fail a job: without an offer every replica takes the version from the store, and says so.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from schema.config import Config
from schema.util.threads import in_daemon
from weight_sync.stores import Store
from weight_sync.transport import Sender, TransferError, own_address
from weight_sync.transport.group import Chunk, Line

log = logging.getLogger(__name__)

BUFFER_BYTES, BUFFERS = 256 << 20, 2
"""Bytes of the device's memory, while a version is sent."""
MOST_FAILURES = 3
"""In a row, after which the fabric is not tried again."""


def open_sender(config: Config, store: Store, controller_url: str) -> Sender | None:
    """Make what hands publications out; None where the store alone does, by configuration or because it must."""
    if config.weight_sync.transport != "collective":
        return None
    try:
        address = own_address(controller_url, config.controller.host)
        carrier = NcclSender(address) if nccl_is_here() else None
        sender = Sender(store, address, config.weight_sync.collective_timeout, carrier)
    except OSError as error:
        log.warning("weights go through the store alone: no address of this machine to hand them out at (%s)", error)
        return None
    fabric = "TCP" if carrier is None else "NCCL, or TCP"
    log.info("weights are handed out at %s:%d by %s", sender.address, sender.port, fabric)
    return sender


def nccl_is_here() -> bool:
    """Whether this process can send by vLLM's NCCL engine."""
    return torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


class NcclSender:
    """Sends chunks of files as tensors of bytes, by vLLM's dense NCCL trainer engine. A `SendingCarrier`.

    The group stays as long as its members do, each named by what it drew at random. NCCL knows no time-outs: what
    does not end in time is aborted, and what cannot even be aborted costs one thread and the fabric."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._engine: Any = None
        self._members: list[str] = []
        self._number = 0
        self._failures = 0

    @property
    def works(self) -> bool:
        return self._failures < MOST_FAILURES

    def send(self, lines: Sequence[Line], chunks: Sequence[Chunk], read: Callable[[str], memoryview]) -> None:
        """Send as `SendingCarrier.send` does."""
        try:
            self._in_time(lines, lambda: self._send(lines, chunks, read))
        except BaseException:
            self._failures += 1
            self._leave()
            raise
        self._failures = 0

    def _in_time(self, lines: Sequence[Line], work: Callable[[], None]) -> None:
        """Raises `TimeoutError` when the work, which goes on in a thread, has not ended by the deadline."""
        done = in_daemon(work, "nccl-send")
        left = min(line.deadline.left() for line in lines)
        try:
            done.result(left)
        except TimeoutError:
            # In the making: there is nothing that could be aborted.
            if not done.done() and self._engine is None:
                self._failures = MOST_FAILURES
            raise

    def _send(self, lines: Sequence[Line], chunks: Sequence[Chunk], read: Callable[[str], memoryview]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        heard = [line.hear() for line in lines]
        members = [str(message.get("member")) for message in heard]
        stays = (
            self._engine is not None
            and members == self._members
            and all(message.get("group") == self._number for message in heard)
        )
        source = byte_source(chunks, read)
        for line in lines:
            line.tell({"rebuild": not stays, "group": self._number + (not stays)})
        if not stays:
            self._leave()
            self._number += 1
            info = NCCLTrainerInitInfo(
                rank=0,
                master_address=self._address,
                master_port=_free_port(self._address),
                world_size=1 + len(lines),
                packed=True,
                packed_buffer_size_bytes=BUFFER_BYTES,
                packed_num_buffers=BUFFERS,
            )
            self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=LineClient(lines), source=source)
            self._members = members
        self._engine.client, self._engine.source = LineClient(lines), source
        self._engine.send_weights()

    def _leave(self) -> None:
        engine, self._engine, self._members = self._engine, None, []
        if engine is not None:
            engine.shutdown()


class LineClient:
    """vLLM's `VLLMWeightSyncClient`: what its trainer engine asks of the receivers, sent to all over their lines."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each is one rank of the group, in the order of the lines, after the trainer."""
        offset = int(init_info["rank_offset"])
        for i, line in enumerate(self._lines):
            line.tell({"init": {**init_info, "rank_offset": offset + i}})
        self._heard()

    def start_weight_update(self) -> None:
        """Nothing: files are received, no model is changed."""

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        for line in self._lines:
            line.tell({"update": update_info})
        self._heard()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing, likewise."""

    def _heard(self) -> None:
        for line in self._lines:
            if line.hear() != {"ok": True}:
                raise TransferError("a member has answered something else")


def byte_source(chunks: Sequence[Chunk], read: Callable[[str], memoryview]) -> Any:
    """vLLM's `WeightSource` of the chunks."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Bytes(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(chunk.name, torch.uint8, (chunk.n_bytes,)) for chunk in chunks]

        def __iter__(self) -> Any:
            return device_chunks(chunks, read)

    return Bytes()


def device_chunks(chunks: Sequence[Chunk], read: Callable[[str], memoryview]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bytes [n_bytes] of each chunk on the accelerator, one at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for chunk in chunks:
        data = read(chunk.file)[chunk.offset : chunk.offset + chunk.n_bytes]
        yield chunk.name, torch.frombuffer(data, dtype=torch.uint8).to(device)


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])
