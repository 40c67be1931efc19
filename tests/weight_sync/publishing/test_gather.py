"""Sharded models: each tensor comes whole to the rank that owns it, and to no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from schema.wire.weights import Publication
from tests.policy_worker.ranks import start_ranks, wait_ranks
from tests.support.devices import WITHOUT_GPU
from tests.support.fetched import fetch
from tests.weight_sync.helpers import all_bits
from tests.weight_sync.publishing.gather_program import DTYPES, SHARDED, build
from weight_sync import HubNames, hub_tensors
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


PROGRAM = "tests.weight_sync.publishing.gather_program"


@pytest.fixture(scope="module", params=[4, pytest.param(3, marks=pytest.mark.soak)])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """World size, and what its ranks have written. A layout that is not ours was refused by all of them."""
    root = tmp_path_factory.mktemp("sharded")
    for code, output in wait_ranks(start_ranks(request.param, [PROGRAM, str(root)], **WITHOUT_GPU)):
        assert code == 0, output
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
