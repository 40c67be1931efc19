"""What is published is fetched, bit for bit, whatever it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.effort import examples
from tests.support.fetched import fetch
from tests.weight_sync.helpers import bits, put, small
from weight_sync import DirectoryStore, WeightError, publish

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, any bits (NaN payloads, −0.0, denormals), any shape, any strides."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = 1
    for n in shape:
        count *= n
    if dtype is torch.bool:
        raw = bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    else:
        raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    if tensor.dim() >= 2 and draw(st.booleans()):
        tensor = tensor.transpose(0, tensor.dim() - 1)
    if tensor.dim() >= 1 and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    return tensor


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda name: name != "__metadata__"
)


@pytest.mark.scaled
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, tensors(), min_size=1, max_size=6), st.sampled_from([1, 64, 1 << 30]))
def test_bits_survive(tmp_path: Path, given_tensors: dict[str, torch.Tensor], max_file_bytes: int) -> None:
    publication = put(DirectoryStore(tmp_path), given_tensors, max_file_bytes=max_file_bytes)
    found = dict(fetch(tmp_path, publication, patience=0.0).tensors())
    assert list(found) == list(given_tensors)
    for name, tensor in given_tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


def test_every_dtype_of_this_list_is_covered(tmp_path: Path) -> None:
    everything = {str(dtype): torch.zeros(3, dtype=torch.uint8).to(dtype) for dtype in DTYPES}
    found = fetch(tmp_path, put(DirectoryStore(tmp_path), everything))
    assert [found[str(dtype)].dtype for dtype in DTYPES] == DTYPES


def test_lazy_conjugates_and_negatives_are_resolved(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    found = fetch(tmp_path, put(DirectoryStore(tmp_path), {"conj": z.conj(), "neg": z.conj().imag}))
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert found["neg"].tolist() == [-2.0, 4.0]


def test_files_are_split_and_load_in_any_safetensors_reader(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    many = {f"t{i}": torch.full((10,), float(i)) for i in range(7)} | {"large": torch.arange(100.0)}
    publication = put(store, many, max_file_bytes=100)
    version = tmp_path / publication.uri.split("/")[0]
    files = sorted(version.glob("*.safetensors"))
    assert len(files) == 5, "two of 40 bytes each, and the large one alone"
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(file)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {k: v.tolist() for k, v in many.items()}
    assert publication.n_bytes == sum(file.stat().st_size for file in files)


def test_a_full_header_starts_the_next_file(tmp_path: Path) -> None:
    names = {f"{i}-{'x' * 2000}": torch.tensor([float(i)]) for i in range(70)}
    publication = put(DirectoryStore(tmp_path), names)
    weights = fetch(tmp_path, publication)
    assert len(weights.manifest.files) == 3
    assert [float(tensor) for _, tensor in weights.tensors()] == list(range(70))


def test_a_name_longer_than_the_reserved_header(tmp_path: Path) -> None:
    names = {"a": torch.ones(1), "x" * 200_000: torch.ones(2), "b": torch.ones(3)}
    assert len(fetch(tmp_path, put(DirectoryStore(tmp_path), names))) == 3


def test_content_hash_is_of_the_weights_alone(tmp_path: Path) -> None:
    store, weights = DirectoryStore(tmp_path), small()
    first, second = put(store, weights), put(store, reversed(weights.items()), max_file_bytes=16)
    assert first.content_hash == second.content_hash
    assert first.uri != second.uri
    weights["layer.0.scale"] = torch.tensor(-0.0)
    negative = put(store, weights)
    weights["layer.0.scale"] = torch.tensor(0.0)
    assert len({first.content_hash, negative.content_hash, put(store, weights).content_hash}) == 3


@pytest.mark.slow
def test_one_tensor_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Any]] = []

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(6):
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1, "publish holds on to what it has written"
            tensor = torch.full((1000,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor
            del tensor

    assert len(fetch(tmp_path, put(DirectoryStore(tmp_path), produce()))) == 6


def test_a_fetched_tensor_can_be_changed_without_touching_the_store(tmp_path: Path) -> None:
    publication = put(DirectoryStore(tmp_path), {"w": torch.zeros(4)})
    fetch(tmp_path, publication)["w"].fill_(7.0)
    assert fetch(tmp_path, publication)["w"].tolist() == [0.0] * 4


def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(1)
    raise RuntimeError("gathering failed")


ONE = torch.ones(1)
REFUSED: dict[str, tuple[Callable[[], Iterable[tuple[str, torch.Tensor]]], str]] = {
    "a name twice": (lambda: [("a", ONE), ("a", ONE)], "'a' was handed to publish twice"),
    "no tensors": (lambda: [], "no tensors"),
    "a reserved name": (lambda: [("__metadata__", ONE)], "__metadata__"),
    "no values": (lambda: [("m", torch.empty(2, device="meta"))], "'m' is torch.strided on meta"),
    "sparse": (lambda: [("s", torch.eye(2).to_sparse())], "'s' is torch.sparse_coo"),
    "a dtype that safetensors does not have": (
        lambda: [("z", torch.zeros(2, dtype=torch.complex128))],
        "'z' has dtype torch.complex128",
    ),
    "an error of the iterator": (breaking_off, "gathering failed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_left_behind_when_publishing_fails(tmp_path: Path, case: str) -> None:
    pairs, message = REFUSED[case]
    with pytest.raises(RuntimeError if pairs is breaking_off else WeightError, match=message):
        publish(DirectoryStore(tmp_path), version=1, timeline=0, tensors=pairs())
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightError, match="cannot be written"):
        put(DirectoryStore(tmp_path / "file" / "store"), small())


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a.b", "a b"])
def test_names_of_stores_that_are_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="may hold only letters"):
        put(DirectoryStore(tmp_path), small(), name=name)
