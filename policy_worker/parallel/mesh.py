"""Where each rank of a replica stands: one mesh with named dimensions, the last one running fastest over the ranks.

    pp               stages of the model
    dp_replicate     copies of the shards of a parameter (HSDP)          ┐ the data coordinate: ranks that differ
    dp_shard         shards of a parameter (FSDP)                        ┘ here train on different rows
    cp               pieces of a sequence
    tp               pieces of a matrix

Ranks of tp may have a part of the positions each between layers (sequence parallelism).

Where the shares of a batch have some experts each, `ep` ranks of dp_shard are a dimension of their own inside of it.

Ranks that differ only in pp, cp and tp are a *unit*: together they train one share of the batch. Its first rank leads
it, and fetches the payloads. Where data ranks add their numbers up, those of one rank of each unit count: the first
one at the end of the pipeline.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from policy_worker.errors import SettingsError
from schema.config.layout import mesh_text
from schema.config.sections.policy import ParallelismConfig

logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
# It warns that a tensor of two mesh dimensions travels along one after the other, as it must.

PP, DP_REPLICATE, DP_SHARD, EP, CP, TP = "pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each dimension, in the order of the mesh. ep: of those of dp_shard, how many share the experts.

    sequence: whether those of tp have a part of the positions each between layers."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    sequence: bool = False

    @staticmethod
    def of_config(mesh: ParallelismConfig, world: int, section: str = "policy.parallelism") -> ParallelDims:
        """The configured sizes on `world` ranks; -1 shards over those that the other sizes leave.

        section: that the sizes are from. Raises `SettingsError`: they are of another number of ranks."""
        # Where layers are cut, each of these ranks has some experts anyway.
        ep = 1 if mesh.ep_size == mesh.tp_size else mesh.ep_size
        unsharded = ParallelDims(
            mesh.pp_size, mesh.dp_replicate_size, 1, mesh.cp_size, mesh.tp_size, ep, mesh.sequence_parallel
        )
        shards = max(world // unsharded.ranks, 1) if mesh.dp_shard_size == -1 else mesh.dp_shard_size
        sizes = replace(unsharded, dp_shard=shards)
        if sizes.ranks != world:
            raise SettingsError(
                f"{section}.dp_shard_size = {mesh.dp_shard_size} makes a mesh of {sizes.ranks} ranks "
                f"({mesh_text(mesh)}), but this replica has {world}: start as many ranks, or write sizes whose "
                f"product is {world} (dp_shard_size = -1 takes those that the others leave)"
            )
        if sizes.dp_shard % ep:
            raise SettingsError(
                f"{section}.ep_size = {ep} does not divide the {sizes.dp_shard} shards of a parameter on "
                f"{world} ranks ({mesh_text(mesh)}): write one that does"
            )
        return sizes

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Into how many shares a batch is cut: how many units there are."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_ranks(self) -> int:
        """Over how many FSDP averages gradients: the pieces of a sequence have a part of one each."""
        return self.data_ranks * self.cp

    @property
    def parts(self) -> int:
        """Into how many parts a piece of a sequence is cut between layers."""
        return self.tp if self.sequence else 1

    def piece(self, rank: int) -> int:
        """Which of the `cp` pieces of its sequences a rank has."""
        return rank // self.tp % self.cp

    def data_rank(self, rank: int) -> int:
        """Which share of a batch a rank trains on."""
        return rank // (self.cp * self.tp) % self.data_ranks

    def unit(self, rank: int) -> list[int]:
        """The ranks that train on the same share as this one, which is among them; the first leads."""
        return [other for other in range(self.ranks) if self.data_rank(other) == self.data_rank(rank)]

    def stage(self, rank: int) -> int:
        """Which place in the pipeline a rank has."""
        return rank // (self.ranks // self.pp)

    def stage_ranks(self, rank: int) -> list[int]:
        """The ranks at the same place in the pipeline as this one, which is among them."""
        return [other for other in range(self.ranks) if self.stage(other) == self.stage(rank)]

    def counting(self, rank: int) -> int:
        """The rank of the same unit whose numbers count: the first one at the end of the pipeline."""
        return next(other for other in self.unit(rank) if self.stage(other) == self.pp - 1)


def device_mesh(sizes: ParallelDims, device_type: str) -> DeviceMesh:
    """The mesh of all ranks: the dimensions of more than one rank, and `dp_shard` in any case. A collective.

    The others are left out, since each would cost as many process groups as there are ranks."""
    shape = {**asdict(sizes), DP_SHARD: sizes.dp_shard // sizes.ep}
    order = (PP, DP_REPLICATE, DP_SHARD, EP, CP, TP)
    dimensions = {name: shape[name] for name in order if shape[name] > 1 or name == DP_SHARD}
    return init_device_mesh(device_type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


def sharding_mesh(mesh: DeviceMesh, *, experts: bool = False) -> DeviceMesh:
    """The dimensions of FSDP: over the copies, if there are any, and over shards and pieces of a sequence as one.

    experts: of what is cut over the `ep` dimension, which otherwise holds shards too."""
    names = mesh.mesh_dim_names or ()
    cut = [name for name in (DP_SHARD, EP, CP) if name in names and not (experts and name == EP)]
    shards = mesh[*cut]._flatten("_".join(cut)) if len(cut) > 1 else mesh[DP_SHARD]
    return DeviceMesh._concatenate([mesh[DP_REPLICATE], shards]) if DP_REPLICATE in names else shards
