"""One copy per host: bit-equal at every version, fetched once, mended whoever dies and whatever is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.objects import running_objects
from tests.support.waiting import PATIENCE
from tests.weight_sync.host.advancer import vanish
from tests.weight_sync.stores.store_material import use
from tests.weight_sync.versions import RemoteStore, Tensors, Versions, same, stepped
from weight_sync.delta.delta import open_delta
from weight_sync.errors import WeightError
from weight_sync.host.files import FETCHED, open_copy
from weight_sync.host.host_copy import CopiedWeights, HostCopy
from weight_sync.stores import DirectoryStore, Store, open_store


def opened(place: Path, store: Store) -> HostCopy:
    return HostCopy(place, store, lock_timeout=PATIENCE)


def holds(weights: CopiedWeights, versions: Versions, version: int) -> bool:
    """Whether the copy is bit-equal to a version, read as the replica and as another process reads it."""
    expected = versions.weights[version]
    with weights.reading() as publication:
        assert publication.version == version
        here = same(weights.tensors(), expected)
    with open_copy(weights.copy_directory) as view:
        assert view.content_hash == versions.publications[version].content_hash
        return here and same(view.tensors(), expected)


@pytest.fixture(params=["directory", pytest.param("remote", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path, versions: Versions) -> Iterator[DirectoryStore]:
    if request.param == "directory":
        yield DirectoryStore(versions.root)
    else:
        yield RemoteStore(versions.root, tmp_path / "notes")


@pytest.fixture
def copy(place: Path, store: DirectoryStore) -> Iterator[HostCopy]:
    copy = opened(place, store)
    yield copy
    copy.close()


def test_every_version_in_turn(place: Path, copy: HostCopy, versions: Versions) -> None:
    served = dict(versions.weights[0])
    weights = copy.advance(versions.newest, patience=0.0)
    assert holds(weights, versions, 0)
    assert weights.changes_since("other") is None
    assert weights.density is None
    for version in range(1, 10):
        before = weights.publication.content_hash
        weights = copy.advance(versions.next(), patience=0.0)
        assert holds(weights, versions, version)
        assert weights.density is not None
        assert 0 < weights.density < 0.02
        found = weights.changes_since(before)
        assert found is not None
        assert len(found) == 1
        for root, piece in found:
            for change in open_delta(root, piece).changes():
                flat = served[change.name].clone().reshape(-1)
                flat[slice(None) if change.positions is None else change.positions] = change.values
                served[change.name] = flat.reshape(change.shape)
        assert same(served.items(), versions.weights[version])
        assert weights.changes_since(weights.publication.content_hash) == []
    copy.close()
    assert not place.exists()


def test_who_joins_late(copy: HostCopy, versions: Versions, store: DirectoryStore) -> None:
    for _ in range(14):
        versions.next()
    weights = copy.advance(versions.newest, patience=0.0)
    assert holds(weights, versions, 14)
    anchor = versions.links[12].full
    assert anchor is not None
    deltas = [link.delta.n_bytes for link in versions.links[13:] if link.delta is not None]
    assert weights.n_bytes == anchor.n_bytes + sum(deltas)
    if isinstance(store, RemoteStore):
        names = {key.split("/")[0] for key in store.accesses()}
        assert len(names) == 3


def test_who_lags_takes_deltas_in_one_go(copy: HostCopy, versions: Versions) -> None:
    first = copy.advance(versions.newest, patience=0.0)
    for _ in range(3):
        versions.next()
    weights = copy.advance(versions.newest, patience=0.0)
    assert holds(weights, versions, 3)
    found = weights.changes_since(first.publication.content_hash)
    assert found is not None
    assert [piece.uri for _, piece in found] == [p.uri for p in versions.publications[1:]]
    # An older wish is not a step back: what is there is handed out.
    late = copy.advance(versions.publications[1], patience=0.0)
    assert late.publication == versions.newest
    assert late.n_bytes == 0
    with first.reading() as publication:
        assert publication == versions.newest


def test_a_full_version_and_one_without_changes(copy: HostCopy, versions: Versions) -> None:
    copy.advance(versions.newest, patience=0.0)
    for weights, full in ((stepped(versions.weights[0], 1, 0.9), True), (None, False)):
        versions.next(weights, full=full)
        assert holds(copy.advance(versions.newest, patience=0.0), versions, len(versions.weights) - 1)
    versions.next(dict(versions.weights[-1]))
    same_again = copy.advance(versions.newest, patience=0.0)
    assert same_again.n_bytes == 0
    assert same_again.publication == versions.newest
    assert holds(same_again, versions, 3)
    versions.next(stepped(versions.weights[-1], 4, 0.9))  # as a delta all the same: tensors stored whole
    assert holds(copy.advance(versions.newest, patience=0.0), versions, 4)


@pytest.mark.slow
def test_from_a_bucket(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetched once, kept for who lags; a lost object is planned around."""
    with running_objects("bucket") as objects:
        use(objects.environment, monkeypatch)
        store = open_store("s3://bucket/weights")
        versions = Versions(tmp_path, store=store)
        copy = HostCopy(place, store)
        first = copy.advance(versions.newest, patience=0.0)
        for version in range(1, 4):
            weights = copy.advance(versions.next(), patience=0.0)
            assert holds(weights, versions, version)
        found = weights.changes_since(first.publication.content_hash)
        assert found is not None
        assert [root for root, _ in found] == [place / FETCHED] * 3
        assert all(open_delta(root, piece).changes() for root, piece in found)
        versions.next()
        lost = f"weights/{versions.newest.uri.split('/')[0]}/00000.safetensors"
        objects.client().delete_object(Bucket="bucket", Key=lost)
        with pytest.raises(WeightError, match="no such object"):
            copy.advance(versions.newest, patience=0.0)
        weights = copy.advance(versions.next(), patience=0.0)  # its chain names the anchor of version 4
        assert holds(weights, versions, 5)
        copy.close()


TINY = {
    "a": torch.arange(20_000, dtype=torch.float32).reshape(100, 200),
    "b": torch.linspace(-1, 1, 3000).to(torch.bfloat16),
    "c": torch.tensor(1.5),
}


def changed(weights: Tensors, how: str, seed: int) -> Tensors:
    """Nothing, a few elements of one tensor, most of one, or all."""
    if how == "nothing":
        return dict(weights)
    if how == "everything":
        return {name: tensor + 1 for name, tensor in weights.items()}
    generator = torch.Generator().manual_seed(seed)
    name = ("a", "b")[seed % 2]
    new = weights[name].clone().view(-1)
    hit = torch.randperm(len(new), generator=generator)[: 7 if how == "few" else len(new) * 3 // 4]
    new[hit] = torch.randn(len(hit), generator=generator).to(new.dtype)
    return {**weights, name: new.reshape(weights[name].shape)}


STEP = st.tuples(st.just("publish"), st.sampled_from(["nothing", "few", "few", "most", "everything", "full"]))
ADVANCE = st.tuples(st.just("advance"), st.integers(0, 3))
VANISH = st.tuples(st.just("vanish"), st.none())


@pytest.mark.scaled
@pytest.mark.slow
@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP | STEP | ADVANCE | ADVANCE | VANISH, min_size=5, max_size=25), remote=st.booleans())
def test_any_history(tmp_path: Path, steps: list[tuple[str, Any]], remote: bool) -> None:
    """Whatever is published, asked for (also late) and lost: what is handed out is right, and never an older one."""
    root = tmp_path / token_hex(4)
    versions = Versions(root / "store", weights=TINY, anchor_every=3)
    store = RemoteStore(versions.root, root / "notes") if remote else versions.store
    copies = [opened(root / "copy", store) for _ in range(2)]
    for i, (what, how) in enumerate(steps):
        if what == "publish":
            versions.next(changed(versions.weights[-1], "few" if how == "full" else how, i), full=how == "full")
        elif what == "vanish":
            for copy in copies:
                vanish(copy)
            copies = [opened(root / "copy", store) for _ in copies]
        else:
            asked = versions.publications[max(0, len(versions.publications) - 1 - how)]
            weights = copies[i % 2].advance(asked, patience=0.0)
            assert weights.publication.id >= asked.id
            assert holds(weights, versions, weights.publication.version)
    for copy in copies:
        copy.close()
    assert not (root / "copy").exists()
