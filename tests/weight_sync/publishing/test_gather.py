"""Sharded models: each tensor comes whole to the rank that owns it, and to no other."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from schema.config.sections.policy import LoraConfig
from schema.wire.weights import Publication
from tests.support.devices import WITHOUT_GPU
from tests.support.fetched import fetch
from tests.support.ports import free_port
from tests.weight_sync.helpers import all_bits, put
from tests.weight_sync.test_hf_names import CASES, model_of
from weight_sync import DirectoryStore, HubNames, WeightError, hub_tensors, lora
from weight_sync.publishing.gather import TensorGathering, box_at, owners, shard_rows


def test_units_go_to_the_rank_with_the_least() -> None:
    assert owners([5, 9, 1, 7, 3], 2) == [1, 0, 0, 1, 0]  # 9, 3 to the first, 7, 5 to the second, then 1
    assert owners([4, 4, 4], 3) == [0, 1, 2]
    assert owners([4], 3) == [0]
    assert owners([], 2) == []


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_no_rank_owns_much_more_than_the_others(sizes: list[int], world: int) -> None:
    owner = owners(sizes, world)
    loads = [sum(size for size, of in zip(sizes, owner, strict=True) if of == rank) for rank in range(world)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shards_are_cut_as_torch_cuts(rows: int, world: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(world)] if rows else []
    assert shard_rows(rows, world) == chunks + [0] * (world - len(chunks))


@given(st.data())
def test_pieces_lie_where_torch_puts_them(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placement = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    placements = [data.draw(placement) for _ in mesh]
    place = [data.draw(st.integers(0, size - 1)) for size in mesh]
    sizes, starts = _compute_local_shape_and_global_offset(tuple(shape), tuple(mesh), place, placements)
    box = box_at(shape, mesh, place, placements)
    assert box.sizes == sizes
    assert box.starts == starts or box.count == 0


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


def _rank(rank: int, world: int, port: int, root: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
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


@pytest.fixture(scope="module", params=[4, pytest.param(3, marks=pytest.mark.soak)])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """World size, and what its ranks have written. A layout that is not ours was refused by all of them."""
    root = tmp_path_factory.mktemp("sharded")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in WITHOUT_GPU.items():  # of which there may be fewer than ranks
            environment.setenv(name, value)
        mp.spawn(_rank, args=(request.param, free_port(), root), nprocs=request.param)
    return request.param, root


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED)
def test_owners_get_whole_tensors_and_others_nothing(case: str, sharded: tuple[int, Path], tmp_path: Path) -> None:
    world, root = sharded
    model: Any = build(case)
    for dtype in DTYPES:
        parts = [load_file(root / f"{case}-{dtype}-{rank}.safetensors") for rank in range(world)]
        found = {name: tensor for part in parts for name, tensor in part.items()}
        assert sum(map(len, parts)) == len(found)
        expected = all_bits(hub_tensors(model, dtype=dtype))
        assert all_bits(found) == expected
    if case not in ("odd", "adapters"):
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        assert all_bits(saved) == expected
    loads = [json.loads((root / f"{case}-{rank}.json").read_text()) for rank in range(world)]
    assert max(loads) - min(loads) <= max(unit.n_bytes for unit in HubNames(model).units)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED)
def test_a_sharded_model_is_published_tensor_by_tensor(case: str, sharded: tuple[int, Path]) -> None:
    _, root = sharded
    publication = Publication.model_validate_json((root / f"{case}.json").read_text())
    expected = all_bits(hub_tensors(build(case)))
    assert all_bits(fetch(root / "store", publication).tensors()) == expected


def test_a_model_that_is_not_sharded_needs_no_group() -> None:
    model = build("experts")
    found = dict(TensorGathering(HubNames(model), 0, 1).tensors())
    assert all_bits(found) == all_bits(hub_tensors(model))


def test_replicas_of_a_model_share_the_work() -> None:
    model = build("untied")
    parts = [dict(TensorGathering(HubNames(model), rank, 2).tensors()) for rank in range(2)]
    assert not parts[0].keys() & parts[1].keys()
    assert parts[0].keys() | parts[1].keys() == dict(hub_tensors(model)).keys()
