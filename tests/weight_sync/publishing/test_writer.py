"""Versions written by several processes, full and as deltas: what is in them, and when nothing becomes visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schema.wire.weights import ChainLink
from tests.support.effort import examples
from tests.weight_sync.helpers import bits, small
from weight_sync import DirectoryStore, WeightError, publish
from weight_sync.delta.delta import open_delta
from weight_sync.layout import content_hash
from weight_sync.manifest import open_piece
from weight_sync.publishing.writer import (
    DenseError,
    PublishedVersion,
    WrittenPart,
    after,
    assemble,
    changed_elements,
    finish,
    write_delta,
    write_full,
)

Tensors = dict[str, torch.Tensor]


def put_full(store: DirectoryStore, ranks: list[Tensors], version: int = 0) -> tuple[PublishedVersion, Any]:
    """Each rank writes its own; the parts travel as JSON."""
    with store.stage(f"full-{version}") as stage:
        parts = [write_full(stage, tensors.items(), f"r{i}-") for i, tensors in enumerate(ranks)]
        parts = [WrittenPart.model_validate_json(part.model_dump_json()) for part in parts]
        manifest = assemble(parts, version=version, timeline=0)
        return finish(stage, f"full-{version}", manifest), manifest.tensors


def put_delta(
    store: DirectoryStore, old: list[Tensors], new: list[Tensors], table: Any, version: int = 1
) -> tuple[PublishedVersion, Any]:
    with store.stage(f"delta-{version}") as stage:
        parts = [
            write_delta(stage, [(name, was[name], now[name]) for name in now], f"r{i}-")
            for i, (was, now) in enumerate(zip(old, new, strict=True))
        ]
        manifest = assemble(parts, version=version, timeline=0, base=table)
        return finish(stage, f"delta-{version}", manifest), after(table, manifest.tensors)


def applied(root: Path, published: PublishedVersion, base: Tensors) -> Tensors:
    found = {name: tensor.clone() for name, tensor in base.items()}
    for change in open_delta(root, published.piece).changes():
        if change.positions is None:
            found[change.name] = change.values.clone().view(change.shape)
        else:
            flat = found[change.name].view(-1)
            flat[change.positions] = change.values
    return found


def equal(found: Tensors, expected: Tensors) -> bool:
    return {n: (t.dtype, t.shape, bits(t)) for n, t in found.items()} == {
        n: (t.dtype, t.shape, bits(t)) for n, t in expected.items()
    }


def test_parts_of_several_processes_make_one_version(tmp_path: Path) -> None:
    store, tensors = DirectoryStore(tmp_path), small()
    names = sorted(tensors)
    ranks = [{name: tensors[name] for name in names[i::3]} for i in range(3)]
    published, table = put_full(store, ranks)
    alone = publish(store, version=0, timeline=0, tensors=tensors.items())
    assert published.content_hash == alone.content_hash == content_hash(table)
    opened = open_piece(store, published.piece, "full")
    assert set(opened.data) == set(tensors)
    assert sorted(file.name for file in opened.manifest.files) == [f"r{i}-00000.safetensors" for i in range(3)]


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.float8_e4m3fn]


@pytest.mark.scaled
@settings(max_examples=examples(12), deadline=None)
@given(st.data())
def test_a_delta_gives_the_bits_of_the_new_version(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Whatever changes: NaN payloads and −0.0 too, since the bytes are random."""
    root = tmp_path_factory.mktemp("store")
    store = DirectoryStore(root)
    old: list[Tensors] = [{}, {}]
    new: list[Tensors] = [{}, {}]
    n_changed = 0
    for i in range(data.draw(st.integers(1, 5))):
        dtype = data.draw(st.sampled_from(DTYPES))
        n, size = data.draw(st.integers(0, 300)), dtype.itemsize
        raw = torch.frombuffer(
            bytearray(data.draw(st.binary(min_size=n * size + 1, max_size=n * size + 1))), dtype=torch.uint8
        )[1:].clone()
        was, now = raw.clone(), raw.clone()
        for at in data.draw(st.lists(st.integers(0, max(0, n * size - 1)), max_size=20)) if n else ():
            now[at] ^= data.draw(st.integers(0, 255))
        n_changed += int((was != now).view(-1, size).any(1).sum()) if n else 0
        old[i % 2][f"t{i}"], new[i % 2][f"t{i}"] = was.view(dtype), now.view(dtype)
    _, table = put_full(store, old)
    published, table_after = put_delta(store, old, new, table)
    delta = open_delta(root, published.piece)
    assert delta.base == content_hash(table)
    whole = {name for name, entry in delta.manifest.tensors.items() if entry.changed is None}
    if not whole:
        assert changed_elements(delta.manifest.tensors.values()) == n_changed
    assert equal(applied(root, published, {**old[0], **old[1]}), {**new[0], **new[1]})
    full, _ = put_full(store, new, version=1)
    assert full.content_hash == published.content_hash == content_hash(table_after)


def test_each_tensor_is_stored_the_smaller_way(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    old = {"few": torch.zeros(9999), "all": torch.zeros(9999), "none": torch.ones(9999), "empty": torch.empty(0)}
    new = {**old, "few": old["few"].clone(), "all": torch.randn(9999)}
    new["few"][17] = -0.0  # other bits, equal as a float
    _, table = put_full(store, [old])
    published, _ = put_delta(store, [old], [new], table)
    tensors = open_delta(tmp_path, published.piece).manifest.tensors
    assert {name: entry.changed for name, entry in tensors.items()} == {"few": 1, "all": None}
    assert changed_elements(tensors.values()) == 10_000


def test_a_delta_without_changes_has_no_files(tmp_path: Path) -> None:
    store, tensors = DirectoryStore(tmp_path), small()
    full, table = put_full(store, [tensors, {}])
    published, _ = put_delta(store, [tensors, {}], [tensors, {}], table)
    manifest = open_delta(tmp_path, published.piece).manifest
    assert (manifest.files, manifest.tensors, published.n_bytes) == ([], {}, 0)
    assert published.content_hash == full.content_hash


def test_a_delta_that_grows_too_large_is_given_up(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with pytest.raises(DenseError, match="more than 100 bytes"), store.stage("v") as stage:
        write_delta(stage, [("a", torch.zeros(100), torch.randn(100))], most_bytes=100)
    assert store.versions() == []


def test_contradictions_between_processes_are_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with store.stage("v") as stage:
        a = write_full(stage, [("a", torch.ones(1))], "r0-")
        b = write_full(stage, [("b", torch.ones(2))], "r1-")
    with pytest.raises(WeightError, match="'a' was handed to publish twice"):
        assemble([a, b, a], version=0, timeline=0)
    with pytest.raises(WeightError, match="wrote the file 'r0-00000"):
        assemble([a, b.model_copy(update={"files": a.files})], version=0, timeline=0)
    with pytest.raises(WeightError, match="no tensors"):
        assemble([], version=0, timeline=0)
    with pytest.raises(WeightError, match="'b' of a delta is not one of its base"):
        assemble([b], version=0, timeline=0, base=a.tensors)
    with pytest.raises(WeightError, match="keeps type and shape"), store.stage("w") as stage:
        write_delta(stage, [("a", torch.ones(1), torch.ones(2))])
    assert store.versions() == []


def test_the_chain_stands_in_the_manifest(tmp_path: Path) -> None:
    store, tensors = DirectoryStore(tmp_path), small()
    full, table = put_full(store, [tensors])
    link = ChainLink(version=0, content_hash=full.content_hash, full=full.piece)
    assert assemble([], version=1, timeline=0, base=table, chain=[link]).chain == [link]
