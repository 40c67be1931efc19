"""Where each rank of a replica stands: one mesh with named dimensions, the last one running fastest over the ranks.

    pp               stages of the model
    dp_replicate     copies of the shards of a parameter (HSDP)          ┐ the data coordinate: ranks that differ
    dp_shard         shards of a parameter (FSDP)                        ┘ here train on different rows
    cp               pieces of a sequence
    tp               pieces of a matrix

Ranks that differ only in pp, cp and tp are a *unit*: together they train one share of the batch. Its first rank leads
it: that one fetches the payloads, and its numbers count where data ranks add theirs up.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, replace

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from policy_worker.errors import SettingsError
from schema.config.layout import mesh_text
from schema.config.sections.policy import ParallelismConfig

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# It warns that a tensor of two mesh dimensions travels along one after the other, as it must.

DP_REPLICATE, DP_SHARD, CP, TP = "dp_replicate", "dp_shard", "cp", "tp"


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each dimension, in the order of the mesh."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @staticmethod
    def of_config(mesh: ParallelismConfig, world: int) -> MeshSizes:
        """The configured sizes on `world` ranks; -1 shards over those that the other sizes leave.

        Raises:
            SettingsError: they are of another number of ranks.
        """
        one = MeshSizes(mesh.pp_size, mesh.dp_replicate_size, 1, mesh.cp_size, mesh.tp_size)
        shards = max(world // one.ranks, 1) if mesh.dp_shard_size == -1 else mesh.dp_shard_size
        sizes = replace(one, dp_shard=shards)
        if sizes.ranks != world:
            raise SettingsError(
                f"policy.parallelism.dp_shard_size = {mesh.dp_shard_size} makes a mesh of {sizes.ranks} ranks "
                f"({mesh_text(mesh)}), but this replica has {world}: start as many ranks, or write sizes whose "
                f"product is {world} (dp_shard_size = -1 takes those that the others leave)"
            )
        return sizes

    @property
    def ranks(self) -> int:
        """Of the whole mesh."""
        return math.prod(asdict(self).values())

    @property
    def data_ranks(self) -> int:
        """Into how many shares a batch is cut: how many units there are."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_ranks(self) -> int:
        """Over how many FSDP averages gradients: the pieces of a sequence have a part of one each."""
        return self.data_ranks * self.cp

    def piece(self, rank: int) -> int:
        """Which of the `cp` pieces of its sequences a rank has."""
        return rank // self.tp % self.cp

    def data_rank(self, rank: int) -> int:
        """Which share of a batch a rank trains on."""
        return rank // (self.cp * self.tp) % self.data_ranks

    def unit(self, rank: int) -> list[int]:
        """The ranks that train on the same share as this one, which is among them; the first leads."""
        return [other for other in range(self.ranks) if self.data_rank(other) == self.data_rank(rank)]


def device_mesh(sizes: MeshSizes, device_type: str) -> DeviceMesh:
    """The mesh of all ranks: the dimensions of more than one rank, and `dp_shard` in any case. A collective.

    The others are left out, since each would cost as many process groups as there are ranks.
    """
    shape = {name: size for name, size in asdict(sizes).items() if size > 1 or name == DP_SHARD}
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of FSDP: over the copies, if there are any, and over shards and pieces of a sequence as one."""
    names = mesh.mesh_dim_names or ()
    shards = mesh[DP_SHARD, CP]._flatten(f"{DP_SHARD}_{CP}") if CP in names else mesh[DP_SHARD]
    return DeviceMesh._concatenate([mesh[DP_REPLICATE], shards]) if DP_REPLICATE in names else shards
