"""Hub tensors of a sharded model, each on the one rank that owns it.

    round:  every rank gets one stored tensor of its own, in shards, and gives its shards of the others'

Invariant: a tensor is whole on its owner only. Beside the model a rank holds the unit that it is gathering (see
`weight_sync.hf_names`), and in each round its shards of as many tensors as there are ranks: about one more tensor.
Tensors that every rank has whole need no traffic. All ranks run through all rounds, in the same order; a round is
one all-to-all, which gloo and NCCL both have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weight_sync.errors import WeightError
from weight_sync.hf_names import HubNames, Unit, cast


def owners(sizes: Sequence[int], world: int) -> list[int]:
    """Which rank owns each unit: the largest first, each to the rank with the least so far; ties to the first.

    The load of no rank exceeds the mean by more than the largest unit, and every rank computes the same.
    """
    loads = [0] * world
    result = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(world), key=lambda rank: (loads[rank], rank))
        result[i] = rank
        loads[rank] += sizes[i]
    return result


class Gathering:
    """What each rank owns of a model, and how it gets it. All ranks call alike.

    Args:
        names: of the model, made on every rank. rank, world: of this process among those that publish.

    Raises:
        WeightError: a tensor is laid out in another way than in shards of its first dimension.
    """

    def __init__(self, names: HubNames, rank: int, world: int) -> None:
        self._names, self._rank, self._world = names, rank, world
        units = names.units
        owner = owners([unit.n_bytes for unit in units], world)
        self.owned: list[Unit] = [unit for unit, of in zip(units, owner, strict=True) if of == rank]
        self._mesh = _mesh_of(names.stored, world)
        # By rank: the sharded tensors that travel to it, in the order of its units.
        self._travels: list[list[tuple[str, bool]]] = [[] for _ in range(world)]
        for unit, of in zip(units, owner, strict=True):
            self._travels[of] += [
                (name, unit.exact) for name in unit.names if _is_sharded(names.stored[name])
            ]

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Hub names and whole tensors of this rank's units, on the device of the model. A collective, run to its end.

        dtype: as for `hub_tensors`; what travels is cast before.
        """
        rounds = iter(range(max(map(len, self._travels), default=0)))
        for unit in self.owned:
            whole: dict[str, torch.Tensor] = {}
            for name in unit.names:
                tensor = self._names.stored[name]
                if _is_sharded(tensor):
                    received = self._round(next(rounds), dtype)
                    assert received is not None
                    whole[name] = received
                else:
                    whole[name] = _local(tensor)
            yield from self._names.hub(unit, whole, dtype=dtype)
        for number in rounds:  # others still receive
            self._round(number, dtype)

    def _round(self, number: int, dtype: torch.dtype | None) -> torch.Tensor | None:
        """This rank's tensor of a round, if there is one."""
        travels = [names[number] if number < len(names) else None for names in self._travels]
        shards = [
            torch.empty(0, dtype=torch.uint8) if item is None else self._shard(*item, dtype)
            for item in travels
        ]
        device = next(shard.device for shard, item in zip(shards, travels, strict=True) if item is not None)
        sent = torch.cat([shard.to(device) for shard in shards])
        mine = travels[self._rank]
        sizes, kind = [0] * self._world, torch.uint8
        shape: Sequence[int] = (0,)
        if mine is not None:
            tensor = self._names.stored[mine[0]]
            shape, kind = tensor.shape, cast(tensor.new_empty(0), dtype if mine[1] else None).dtype
            row = math.prod(shape[1:]) * kind.itemsize
            sizes = [rows * row for rows in shard_rows(shape[0], self._world)]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        assert self._mesh is not None
        dist.all_to_all_single(
            received, sent, sizes, [len(shard) for shard in shards], group=self._mesh.get_group()
        )
        return received.view(kind).view(tuple(shape)) if mine is not None else None

    def _shard(self, name: str, exact: bool, dtype: torch.dtype | None) -> torch.Tensor:
        """The bytes of this rank's shard of a tensor."""
        part = cast(_local(self._names.stored[name]), dtype if exact else None).contiguous()
        return part.view(-1).view(torch.uint8) if part.numel() else part.new_empty(0, dtype=torch.uint8)


def shard_rows(rows: int, world: int) -> list[int]:
    """Rows of the first dimension that each rank has: as `torch.chunk` cuts, the last ones may have none."""
    each = -(-rows // world)
    return [max(0, min(each, rows - rank * each)) for rank in range(world)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _is_sharded(tensor: torch.Tensor) -> bool:
    return (
        isinstance(tensor, DTensor)
        and tensor.device_mesh.size() > 1
        and any(isinstance(place, Shard) for place in tensor.placements)
    )


def _mesh_of(stored: dict[str, torch.Tensor], world: int) -> DeviceMesh | None:
    """The one mesh over which the model is sharded; None: it is not. Raises `WeightError`."""
    mesh: DeviceMesh | None = None
    for name, tensor in stored.items():
        if not _is_sharded(tensor):
            continue
        assert isinstance(tensor, DTensor)
        if list(tensor.placements) != [Shard(0)] or tensor.device_mesh.size() != world:
            raise WeightError(
                f"tensor {name!r} is laid out as {tensor.placements} over {tensor.device_mesh.size()} of {world} "
                f"ranks: only shards of the first dimension over all ranks can be published"
            )
        mesh = mesh or tensor.device_mesh
        assert mesh == tensor.device_mesh
    return mesh
