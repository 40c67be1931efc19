"""Program of one rank: shards models as trainers do, and writes what it gathers of them.

python -m tests.weight_sync.publishing.gather_program DIRECTORY
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from schema.config.sections.policy import LoraConfig
from tests.weight_sync.helpers import put
from tests.weight_sync.test_hf_names import CASES, model_of
from weight_sync import DirectoryStore, HubNames, WeightError, hub_tensors, lora
from weight_sync.publishing.gather import TensorGathering

DTYPES = (torch.bfloat16, None)


class Odd(torch.nn.Module):
    """Rows that do not divide, ranks without a row, a replicated scalar, a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(5, 7)
        self.b = torch.nn.Linear(3, 1, bias=False)
        self.register_buffer("steps", torch.tensor([1, 2, 3]))
        self.register_buffer("scale", torch.tensor(0.25))


def build(case: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if case == "odd":
        return Odd()
    kind, changes = CASES["untied" if case == "adapters" else case]
    model = model_of(kind, **changes)
    if case == "adapters":
        lora.inject(model, LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    return model


SHARDED = ("odd", "tied", "untied", "fused projections", "experts", "adapters")


def main(root: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    copies = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")) if world == 4 else mesh
    for case in SHARDED:
        model: Any = build(case)
        for layer in () if case == "odd" else model.model.layers:
            fully_shard(layer, mesh=copies)
        fully_shard(model, mesh=copies)
        gathering = TensorGathering(HubNames(model), rank, world)
        for dtype in DTYPES:  # one after the other: a second time must be like the first
            found = {name: tensor.clone() for name, tensor in gathering.tensors(dtype)}
            save_file(found, root / f"{case}-{dtype}-{rank}.safetensors")
        n_bytes = sum(unit.n_bytes for unit in gathering.owned)
        (root / f"{case}-{rank}.json").write_text(json.dumps(n_bytes))
        if rank == 0:
            publication = put(DirectoryStore(root / "store"), hub_tensors(model))
            (root / f"{case}.json").write_text(publication.model_dump_json())
        else:
            for _ in hub_tensors(model):
                pass
        torch.distributed.barrier()
        del model, gathering  # they hold groups, whose threads must not outlive the interpreter
        gc.collect()
    layouts = [(mesh, [Shard(1)])]
    if world == 4:
        layouts += [(copies, [Shard(1), Shard(0)]), (copies, [Shard(0), Shard(0)]), (copies, [Replicate(), Shard(1)])]
    for over, placements in layouts:
        other = torch.nn.Linear(7, 5, bias=False)
        whole = torch.arange(35.0).view(5, 7)
        other.weight = torch.nn.Parameter(distribute_tensor(whole, over, placements))
        for name, tensor in TensorGathering(HubNames(other), rank, world).tensors():
            assert (rank, name) == (0, "weight")
            assert torch.equal(tensor, whole), placements
        with pytest.raises(WeightError, match="'weight' is laid out as"):
            TensorGathering(HubNames(other), rank, world + 1)
    if world == 4:  # FSDP2 shards what tensor parallelism has cut, 4 rows and 3, into 2, 2 and 2, 1
        cut, shards = copies["shards"], copies["copies"]
        for placement in (Shard(0), Shard(1), Replicate()):
            other = torch.nn.Linear(5, 7, bias=False)
            whole = torch.arange(35.0).view(7, 5)
            other.weight = torch.nn.Parameter(distribute_tensor(whole, cut, [placement]))
            fully_shard(other, mesh=shards)
            found = dict(TensorGathering(HubNames(other), rank, world).tensors())
            assert torch.equal(found["weight"], whole) if rank == 0 else not found
        packed = DTensor.from_local(whole[:1], copies, [Replicate(), _StridedShard(0, split_factor=2)])
        other.weight = torch.nn.Parameter(packed)
        with pytest.raises(WeightError, match="'weight' is laid out as"):
            TensorGathering(HubNames(other), rank, world)
        del cut, shards, packed
    del other, mesh, copies, layouts, over
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
