"""Coordinates by arithmetic are those of the mesh that torch makes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from policy_worker.errors import SettingsError
from policy_worker.model.model import PolicyModel
from policy_worker.parallel.distribute import check_heads
from policy_worker.parallel.mesh import ParallelDims, device_mesh
from schema.config.sections.policy import ParallelismConfig
from tests.policy_worker.material import tiny_lm
from tests.policy_worker.norm_program import CLIP, step_of
from tests.policy_worker.ranks import start_ranks, wait_ranks

SIZES = st.tuples(*[st.integers(1, 3)] * 5).filter(lambda shape: math.prod(shape) <= 24)


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of many, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def coordinates(mesh: DeviceMesh, rank: int) -> dict[str, int]:
    """By name, of any rank; 0 in dimensions that the mesh does not have."""
    found = (mesh.mesh == rank).nonzero()[0].tolist()
    return dict.fromkeys(asdict(ParallelDims()), 0) | dict(zip(mesh.mesh_dim_names or (), found, strict=True))


@settings(max_examples=60)
@given(shape=SIZES, data=st.data())
def test_coordinates_are_those_of_the_mesh(shape: tuple[int, ...], data: st.DataObject):
    sizes = ParallelDims(*shape)
    rank = data.draw(st.integers(0, sizes.ranks - 1))
    with as_rank(rank, sizes.ranks):
        mesh = device_mesh(sizes, "cpu")
        assert mesh.size() == sizes.ranks
        assert mesh["dp_shard"].size() == sizes.dp_shard
        assert mesh.get_coordinate() == tuple(coordinates(mesh, rank)[name] for name in mesh.mesh_dim_names or ())
        where = [coordinates(mesh, other) for other in range(sizes.ranks)]
    pairs = [(at["dp_replicate"], at["dp_shard"]) for at in where]
    assert [sizes.data_rank(other) for other in range(sizes.ranks)] == [
        replicate * sizes.dp_shard + shard for replicate, shard in pairs
    ]
    assert sizes.data_ranks == len(set(pairs))
    assert sizes.unit(rank) == [other for other, pair in enumerate(pairs) if pair == pairs[rank]]
    leader = sizes.unit(rank)[0]
    assert [where[leader][name] for name in ("pp", "cp", "tp")] == [0, 0, 0]


@given(shape=SIZES, open_shards=st.booleans())
def test_configured_sizes_are_found_again(shape: tuple[int, ...], open_shards: bool):
    sizes = ParallelDims(*shape)
    configured = {f"{name}_size": size for name, size in asdict(sizes).items() if name != "sequence"}
    if open_shards:
        configured["dp_shard_size"] = -1
    assert ParallelDims.of_config(ParallelismConfig(**configured), sizes.ranks) == sizes


@pytest.mark.parametrize(
    ("configured", "world", "message"),
    [
        ({"dp_shard_size": 3, "tp_size": 1}, 2, r"dp_shard_size = 3 makes a mesh of 3 ranks .* has 2: start"),
        ({"dp_shard_size": -1, "tp_size": 2}, 3, r"2 ranks \(tp_size 2\), but this replica has 3"),
        ({"dp_shard_size": -1, "tp_size": 4}, 2, r"4 ranks \(tp_size 4\), but this replica has 2"),
    ],
)
def test_sizes_of_other_ranks_are_refused(configured: dict[str, int], world: int, message: str):
    with pytest.raises(SettingsError, match=message):
        ParallelDims.of_config(ParallelismConfig(**configured), world)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["foreach", "fused", "for-loop"])
def test_one_norm_of_parameters_on_different_meshes(tmp_path: Path, impl: str):
    expected = step_of(impl, lambda _, tensor: tensor)
    assert expected["norm"] > 10 * CLIP
    arguments = ["tests.policy_worker.norm_program", str(tmp_path), impl]
    for code, output in wait_ranks(start_ranks(4, arguments)):
        assert code == 0, output
    for name, tensor in load_file(tmp_path / "tensors.safetensors").items():
        assert torch.allclose(tensor, expected[name], rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (ParallelDims(tp=2, cp=2), ""),
        (ParallelDims(tp=4), "tp_size = 4 does not divide the 2 key/value heads of Qwen3ForCausalLM"),
        (ParallelDims(cp=3), "tp_size = 1 * cp_size = 3 does not divide the 4 attention heads"),
        (ParallelDims(cp=4), ""),
    ],
)
def test_ranks_get_whole_heads(sizes: ParallelDims, words: str):
    model = PolicyModel(tiny_lm())
    with pytest.raises(SettingsError, match=re.escape(words)) if words else nullcontext():
        check_heads(model, sizes)
