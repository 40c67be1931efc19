"""The process group of a policy replica, and the few messages its ranks exchange outside of training.

Tensors of training go over the mesh (gloo on the CPU, NCCL on GPUs). Control messages (the step's table, a
decision to leave) are JSON bytes over a gloo group of its own, never pickles; payloads are bytes over one of each
unit (see `mesh`). Their time-out is longer than the longest wait for a lost controller, since the other ranks wait
while the one that asks does.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from policy_worker.errors import PolicyError, RendezvousError, SettingsError
from policy_worker.parallel.mesh import ParallelDims, device_mesh
from policy_worker.process import RankEnvironment
from schema.util.gpus import UnusableGpuError, part_of_gpu, require_dealt_gpus
from weight_sync import HubNames
from weight_sync.publishing.gather import TensorGathering

log = logging.getLogger(__name__)
T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Time-out of training's collectives: far longer than any micro-batch, so its end means that a rank is gone."""
CONTROL_MARGIN = timedelta(minutes=2)


CONTEXT_BYTES = 1 << 30
"""Memory of a GPU that a process takes next to its tensors: CUDA's context, NCCL's buffers."""


def keep_to_part(device: torch.device) -> None:
    """Leave an engine its part of a GPU's memory, also while it is down: else it would find none at its restart."""
    if (part := part_of_gpu()) < 1.0:
        context = CONTEXT_BYTES / torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(max(part - context, part / 2), device)


class RankGroup:
    """All ranks of this replica. store: where they meet; None: at MASTER_ADDR and MASTER_PORT. `control_timeout`
    seconds bound the wait for a control message. ranks_here: how many of them are on this machine."""

    def __init__(
        self, environment: RankEnvironment, store: dist.Store | None = None, control_timeout: float = 600.0
    ) -> None:
        self.rank, self.world = environment.rank, environment.world
        self.device = pick_device(environment.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            keep_to_part(self.device)
        self.ranks_here, self._rank_here = environment.local_world, environment.local_rank
        _initialise(environment, self.device, store)
        self.sizes = ParallelDims(dp_shard=self.world)
        self._mesh: DeviceMesh | None = None
        self._second_mesh: DeviceMesh | None = None
        self._control: Any = None
        self._unit: Any = None
        self.stage_group: dist.ProcessGroup | None = None
        """The ranks that have the same stage of the model; None: all ranks have all of it."""
        self.set_control_timeout(control_timeout)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks with the controller."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank trains on."""
        return self.sizes.data_rank(self.rank)

    @property
    def data_ranks(self) -> int:
        """Into how many shares a batch is cut."""
        return self.sizes.data_ranks

    @property
    def leads_unit(self) -> bool:
        """Whether this is the rank that fetches its share of a batch."""
        return self.sizes.unit(self.rank)[0] == self.rank

    @property
    def leads_stage(self) -> bool:
        """Whether this is the first of the ranks that have the same stage of the model."""
        return self.sizes.stage_ranks(self.rank)[0] == self.rank

    @property
    def counts(self) -> bool:
        """Whether this is the rank whose numbers count for its share of a batch: of those that have the last stage of
        the model, and so its outputs, the first one of the unit."""
        return self.sizes.counting(self.rank) == self.rank

    def other_device(self, role: int) -> torch.device:
        """Pick this rank's device after those of all ranks on this machine: the rank is a data rank of its own;
        the CPU on a machine without GPUs.

        role: 1 for the first role with devices of its own, 2 for the next one.

        Raises `SettingsError`: there are fewer."""
        return pick_device(role * self.ranks_here + self._rank_here)

    def set_control_timeout(self, seconds: float) -> None:
        """A collective, before `arrange`; called by all ranks with the same value."""
        self._timeout = timedelta(seconds=seconds) + CONTROL_MARGIN
        if self.world > 1:
            self._control = dist.new_group(backend="gloo", timeout=self._timeout)

    def arrange(self, sizes: ParallelDims) -> None:
        """Give the ranks their coordinates; until then all of them shard. A collective, before `mesh`."""
        assert sizes.ranks == self.world
        assert self._mesh is None, "it was made with other sizes"
        self.sizes, unit = sizes, sizes.unit(self.rank)
        if len(unit) > 1:
            self._unit = dist.new_group(unit, backend="gloo", timeout=self._timeout, use_local_synchronization=True)
        if sizes.pp > 1:
            self.stage_group = dist.new_group(
                sizes.stage_ranks(self.rank), timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True
            )

    def arranged(self, sizes: ParallelDims) -> RankGroup:
        """The same ranks with other coordinates, for a model with a mesh of its own; this group where they are the
        same. A collective."""
        if sizes == self.sizes:
            return self
        other = copy(self)
        other._mesh = other._second_mesh = other._unit = other.stage_group = None
        other.arrange(sizes)
        return other

    def gathering(self, names: HubNames) -> TensorGathering:
        """How whole tensors of a model come to one rank each, of those that have the same stage of it."""
        ranks = self.sizes.stage_ranks(self.rank)
        return TensorGathering(names, ranks.index(self.rank), len(ranks), self.stage_group)

    def mesh(self) -> DeviceMesh:
        """The one mesh of all ranks. A collective when it is asked for first."""
        self._mesh = self._mesh or device_mesh(self.sizes, self.device.type)
        return self._mesh

    def second_mesh(self) -> DeviceMesh:
        """The same over other devices, by process groups of its own. A collective when it is asked for first."""
        self._second_mesh = self._second_mesh or device_mesh(self.sizes, self.device.type)
        return self._second_mesh

    def lead(self, decide: Callable[[], Any]) -> Any:
        """Rank 0 decides, all ranks get the answer (a JSON value). An error of rank 0's ends all of them.

        Raises `PolicyError`: on the other ranks, with the same exit code, if `decide` raised on rank 0 (which raises
        what it was)."""
        if self.world == 1:
            return decide()
        value, cause, failed = None, None, None
        if self.leads:
            try:
                value = decide()
            except Exception as error:
                cause = error
                failed = [f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1)]
        failed, value = json.loads(bytes(_broadcast(json.dumps([failed, value]).encode(), self._control)))
        if cause is not None:
            raise cause
        if failed is not None:
            elsewhere = PolicyError(f"rank 0 ended: {failed[0]}")
            elsewhere.exit_code = failed[1]
            raise elsewhere
        return value

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in order of rank, on each of them."""
        if self.world == 1:
            return [value]
        data = bytearray(json.dumps(value).encode())
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._control)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(data.ljust(longest), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self._control)
        return [json.loads(bytes(part.numpy())[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def sibling(self, control_timeout: float) -> RankGroup:
        """The same ranks with control messages of their own, for another thread of each. A collective."""
        other = copy(self)
        other.set_control_timeout(control_timeout)
        return other

    def share(
        self, frames: Sequence[bytes | memoryview] | None, source: int = 0
    ) -> Sequence[bytes | memoryview] | None:
        """In each unit what its leader has, on all its ranks. A collective of the unit; the others pass None.

        source: the rank of the unit that has it instead."""
        if self._unit is None:
            return frames
        lengths = json.dumps(None if frames is None else [len(frame) for frame in frames]).encode()
        sizes = json.loads(bytes(_broadcast(lengths, self._unit, source)))
        if not sizes:
            return cast(list[bytes] | None, sizes)
        data = _broadcast(b"".join(frames or ()), self._unit, source)
        return [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def from_last_stage(self, value: T) -> T:
        """The JSON value of the rank that counts, on all ranks of its unit. A collective of the unit."""
        if self.sizes.pp == 1:
            return value
        frames = self.share([json.dumps(value).encode()] if self.counts else None, self._last_stage)
        assert frames is not None
        return cast(T, json.loads(bytes(frames[0])))

    def tensors_from_last_stage(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the rank that counts, on the CPU, on all ranks of its unit. A collective of the unit."""
        if self.sizes.pp == 1:
            return list(tensors)
        frames: list[bytes] | None = None
        if self.counts:
            facts = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
            frames = [json.dumps(facts).encode(), *(_bytes_of(tensor) for tensor in tensors)]
        received = self.share(frames, self._last_stage)
        assert received is not None
        facts = json.loads(bytes(received[0]))
        return [
            torch.frombuffer(bytearray(frame), dtype=getattr(torch, dtype)).view(shape)
            if len(frame)
            else torch.empty(shape, dtype=getattr(torch, dtype))
            for (dtype, shape), frame in zip(facts, received[1:], strict=True)
        ]

    def to_all_ranks(
        self, by_row: Mapping[int, Tensor], lengths: Mapping[int, int], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        """By row a number for each of its tokens, from the rank that counts for its share, on all ranks: bit for bit,
        as one rank adds them to zeros. A collective.

        by_row: [n_i] each, of this rank's share; no row is in two of them. lengths: n_i of the rows of all shares."""
        numbers = torch.zeros(sum(lengths.values()), dtype=dtype)
        of_rows = dict(zip(lengths, numbers.split([*lengths.values()]), strict=True))
        if self.counts:
            for row, tensor in by_row.items():
                of_rows[row].copy_(tensor)
        if self.world > 1:
            dist.all_reduce(numbers, group=self._control)
        return of_rows

    @property
    def _last_stage(self) -> int:
        """Which rank of the unit counts."""
        return self.sizes.unit(self.rank).index(self.sizes.counting(self.rank))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.all_reduce([float(flag)], "max")[0] > 0

    def all_reduce(self, values: list[float], how: str) -> list[float]:
        """Sum each number over data ranks ("sum"), or take over all ranks the sum ("total") or maximum ("max"), in
        float64.

        The ranks of a unit have summed the same samples: one of them counts, which is exact."""
        if self.world == 1:
            return values
        if how == "sum" and not self.counts:
            values = [0.0] * len(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM, group=self._control)
        return [float(value) for value in tensor]

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self._control)

    def close(self) -> None:
        """Leave the process group; safe to call twice."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _broadcast(data: bytes, group: Any, source: int = 0) -> memoryview:
    """Bring what one rank of a group (the first one) has, at least one byte, to all of them."""
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=source)
    if dist.get_rank(group) == source:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        buffer = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, group=group, group_src=source)
    return memoryview(buffer.numpy())


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def pick_device(number: int) -> torch.device:
    """One of the accelerators that this process sees, or the CPU where there is none.

    Raises `SettingsError`: it sees fewer, or cannot open those that the launcher dealt to it."""
    if not torch.cuda.is_available():
        try:
            require_dealt_gpus(torch.cuda.init, torch.version.cuda)
        except UnusableGpuError as error:
            raise SettingsError(str(error)) from error
        return torch.device("cpu")
    if number >= torch.cuda.device_count():
        raise SettingsError(
            f"this rank needs GPU {number} of those in CUDA_VISIBLE_DEVICES, and this process sees "
            f"{torch.cuda.device_count()}: start fewer ranks or widen CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", number)


def _initialise(environment: RankEnvironment, device: torch.device, store: dist.Store | None) -> None:
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    rank, world = environment.rank, environment.world
    if world == 1:  # alone: no address, no port
        store = dist.HashStore()
    if store is None:
        log.info("rank %d of %d joins %s:%s", rank, world, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} of {world} on {socket.gethostname()} ({environment.address}) cannot reach all others, on "
            f"ports that they choose freely: {str(error).splitlines()[0]}"
        ) from error
