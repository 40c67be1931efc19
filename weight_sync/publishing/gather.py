"""Hub tensors of a sharded model, each on the one rank that owns it.

    round:  every rank gets one stored tensor of its own, in pieces, and gives its pieces of the others'

A mesh of several dimensions may hold each piece several times: an owner takes those of the ranks that differ from it
in sharded dimensions alone, so that what copies of a model (HSDP) hold never travels between them. Where FSDP2 shards
what tensor parallelism has cut, the dimension of the former comes first in the mesh and cuts last (`_StridedShard`).

Invariant: a tensor is whole on its owner only. Beside the model a rank holds the unit that it is gathering (see
`weight_sync.hf_names`), and in each round its pieces of as many tensors as there are ranks: about one more tensor.
Tensors that every rank has whole need no traffic. All ranks run through all rounds, in the same order; a round is
one all-to-all, which gloo and NCCL both have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weight_sync.errors import WeightError
from weight_sync.hf_names import HubNames, Unit, cast


def owners(sizes: Sequence[int], world: int) -> list[int]:
    """Which rank owns each unit: the largest first, each to the rank with the least so far; ties to the first.

    The load of no rank exceeds the mean by more than the largest unit, and every rank computes the same."""
    loads = [0] * world
    result = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(world), key=lambda rank: (loads[rank], rank))
        result[i] = rank
        loads[rank] += sizes[i]
    return result


class TensorGathering:
    """The share of a model that each rank owns, and the way that it gets it. All ranks call alike.

    names: of the model, made on every rank. rank, world: of this process among those that publish it. group: these;
    None: all ranks. A model that is cut into stages is one for the ranks of each stage.

    Raises `WeightError`: a tensor is laid out in another way than in shards and copies over all ranks."""

    def __init__(self, names: HubNames, rank: int, world: int, group: dist.ProcessGroup | None = None) -> None:
        self._names, self._rank, self._world, self._group = names, rank, world, group
        self._global = range(world) if group is None else dist.get_process_group_ranks(group)
        units = names.units
        owner = owners([unit.n_bytes for unit in units], world)
        self.owned: list[Unit] = [unit for unit, of in zip(units, owner, strict=True) if of == rank]
        for name, tensor in names.stored.items():
            if _is_sharded(tensor):
                _check(name, tensor, world)
        # By rank: the sharded tensors that travel to it, in the order of its units.
        self._travels: list[list[tuple[str, bool]]] = [[] for _ in range(world)]
        for unit, of in zip(units, owner, strict=True):
            self._travels[of] += [(name, unit.exact) for name in unit.names if _is_sharded(names.stored[name])]

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Hub names and whole tensors of this rank's units, on the device of the model. A collective, run to its end.

        dtype: as for `hub_tensors`; what travels is cast before."""
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
        sent = [
            torch.empty(0, dtype=torch.uint8) if item is None else self._piece_for(owner, *item, dtype)
            for owner, item in enumerate(travels)
        ]
        device = next(piece.device for piece, item in zip(sent, travels, strict=True) if item is not None)
        own_item = travels[self._rank]
        boxes: dict[int, Box] = {}
        kind, shape = torch.uint8, torch.Size()
        if own_item is not None:
            tensor = self._names.stored[own_item[0]]
            assert isinstance(tensor, DTensor)
            boxes, shape = pieces_for(self._global[self._rank], tensor), tensor.shape
            kind = cast(tensor.new_empty(0), dtype if own_item[1] else None).dtype
        sizes = [boxes[rank].count * kind.itemsize if rank in boxes else 0 for rank in self._global]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(
            received,
            torch.cat([piece.to(device) for piece in sent]),
            sizes,
            [len(piece) for piece in sent],
            group=self._group,
        )
        return None if own_item is None else _put_together(received.view(kind), shape, boxes)

    def _piece_for(self, owner: int, name: str, exact: bool, dtype: torch.dtype | None) -> torch.Tensor:
        """The bytes of this rank's piece of a tensor, if its owner takes that from here."""
        tensor = self._names.stored[name]
        assert isinstance(tensor, DTensor)
        part = _local(tensor)
        if part.numel() == 0 or not _gives(self._global[self._rank], self._global[owner], tensor):
            return part.new_empty(0, dtype=torch.uint8)
        return cast(part, dtype if exact else None).contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Box:
    """Where a piece lies in its tensor: by dimension the first index, and how many."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Slices of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


def pieces_for(owner: int, tensor: DTensor) -> dict[int, Box]:
    """The ranks from which `owner` takes a tensor, in order, and the piece of each: together all of it, once.

    The owner must be in the tensor's mesh."""
    mesh = tensor.device_mesh.mesh
    return {
        rank: box_at(tensor.shape, tuple(mesh.shape), _place(rank, tensor), tensor.placements)
        for rank in sorted(mesh.flatten().tolist())
        if _gives(rank, owner, tensor)
    }


def _gives(rank: int, owner: int, tensor: DTensor) -> bool:
    """Whether the owner takes this rank's piece: they are in one place of every dimension that holds copies."""
    places = zip(tensor.placements, _place(rank, tensor), _place(owner, tensor), strict=True)
    return all(not placement.is_replicate() or a == b for placement, a, b in places)


def _place(rank: int, tensor: DTensor) -> list[int]:
    """Where in the tensor's mesh a rank is."""
    (place,) = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    return [int(index) for index in place]


def box_at(shape: Sequence[int], mesh: Sequence[int], place: Sequence[int], placements: Sequence[Placement]) -> Box:
    """The piece of a tensor at a place of a mesh: dimensions of the mesh cut one after the other, as torch cuts.

    Those that are strided cut what the others have left."""
    starts, sizes = [0] * len(shape), list(shape)
    cuts = list(zip(mesh, place, placements, strict=True))
    for ranks, index, placement in sorted(cuts, key=lambda cut: isinstance(cut[2], _StridedShard)):
        if isinstance(placement, Shard | _StridedShard):
            cut = shard_rows(sizes[placement.dim], ranks)
            starts[placement.dim] += sum(cut[:index])
            sizes[placement.dim] = cut[index]
    return Box(tuple(starts), tuple(sizes))


def _put_together(received: torch.Tensor, shape: torch.Size, boxes: dict[int, Box]) -> torch.Tensor:
    """A tensor of its pieces, which lie one after the other. Runs of whole rows in order need no copy."""
    filled = [box for box in boxes.values() if box.count]
    rows = all(box.sizes[1:] == shape[1:] for box in filled)
    if rows and all(a.starts < b.starts for a, b in itertools.pairwise(filled)):
        return received.view(shape)
    whole = received.new_empty(shape)
    for box, piece in zip(filled, received.split([box.count for box in filled]), strict=True):
        whole[box.slices()] = piece.view(box.sizes)
    return whole


def shard_rows(rows: int, world: int) -> list[int]:
    """Rows of a dimension that each rank has: as `torch.chunk` cuts, the last ones may have none."""
    each = -(-rows // world)
    return [max(0, min(each, rows - rank * each)) for rank in range(world)]


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a rank has only a piece of it."""
    return isinstance(tensor, DTensor) and any(
        size > 1 and not isinstance(placement, Replicate)
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _check(name: str, tensor: torch.Tensor, world: int) -> None:
    """Raises `WeightError` for a layout that `pieces_for` does not know."""
    assert isinstance(tensor, DTensor)
    shape, placements = tuple(tensor.device_mesh.shape), tensor.placements
    if tensor.device_mesh.size() != world or not all(
        p.is_replicate() or isinstance(p, Shard) or _cuts_last(number, placements, shape)
        for number, p in enumerate(placements)
    ):
        raise WeightError(
            f"tensor {name!r} is laid out as {placements} over {tensor.device_mesh.size()} of {world} ranks: only "
            f"shards and copies over all ranks can be published"
        )


def _cuts_last(number: int, placements: Sequence[Placement], mesh: Sequence[int]) -> bool:
    """Whether a dimension of the mesh cuts what all later ones that cut the same one have left."""
    placement = placements[number]
    later = list(zip(placements, mesh, strict=True))[number + 1 :]
    return isinstance(placement, _StridedShard) and placement.split_factor == math.prod(
        size for p, size in later if isinstance(p, Shard) and p.dim == placement.dim
    )
