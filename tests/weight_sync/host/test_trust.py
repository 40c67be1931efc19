"""What a host copy hands out was proven by this very copy, whatever others wrote, removed or took out of it."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.effort import combinations
from tests.support.waiting import PATIENCE
from tests.weight_sync.host.advancer import right
from tests.weight_sync.versions import RemoteStore, Versions, same
from weight_sync.errors import NotReadableError
from weight_sync.host.files import (
    ADVANCING,
    STATE,
    USERS,
    Advancing,
    WritableTensors,
    open_copy,
    read_state,
    write_model,
)
from weight_sync.host.host_copy import CopiedWeights, HostCopy
from weight_sync.host.users import copy_directory


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "store", anchor_every=1)


def way(weights: CopiedWeights, versions: Versions, version: int) -> list[str] | None:
    """The deltas that are handed out to who serves a version."""
    found = weights.changes_since(versions.publications[version].content_hash)
    return None if found is None else [piece.uri for _, piece in found]


# ---- deltas for engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("remote", [False, True], ids=["directory", "remote"])
def test_a_delta_that_was_found_wrong_is_not_handed_out(
    tmp_path: Path, place: Path, versions: Versions, remote: bool
) -> None:
    """Its file has the hash of its manifest, but what it leads to has not."""
    store = RemoteStore(versions.root, tmp_path / "notes") if remote else versions.store
    copy = HostCopy(place, store, lock_timeout=PATIENCE)
    copy.advance(versions.newest, patience=0.0)
    versions.next(wrong=True)
    weights = copy.advance(versions.next(), patience=0.0)
    assert right(weights, versions), "made anew from the full form of version 1"
    assert way(weights, versions, 0) is None
    assert way(weights, versions, 1) == [versions.newest.uri]
    weights = copy.advance(versions.next(), patience=0.0)
    assert right(weights, versions)
    assert way(weights, versions, 0) is None
    assert way(weights, versions, 2) == [versions.newest.uri]
    copy.close()


def test_deltas_that_were_not_applied_here_are_not_handed_out(copy: HostCopy, versions: Versions) -> None:
    versions.anchor_every = 2
    for _ in range(3):
        versions.next()
    weights = copy.advance(versions.newest, patience=0.0)  # the anchor of version 2, and one delta
    uris = [publication.uri for publication in versions.publications]
    assert [way(weights, versions, i) for i in range(4)] == [None, None, uris[3:], []]
    versions.anchor_every = 100
    for _ in range(2):
        versions.next()
    weights = copy.advance(versions.newest, patience=0.0)
    uris = [publication.uri for publication in versions.publications]
    found = [way(weights, versions, i) for i in range(6)]
    # Only what both deltas lead to was hashed, so nobody takes the second one alone.
    assert found == [None, None, uris[3:], uris[4:], None, []]


def test_the_state_that_another_build_wrote(place: Path, copy: HostCopy, versions: Versions) -> None:
    """It does not say which deltas were applied: none is believed."""
    copy.advance(versions.newest, patience=0.0)
    copy.advance(versions.next(), patience=0.0)
    state = read_state(place)
    assert state is not None
    old = state.model_dump(mode="json") | {"links": [link.model_dump() for link in versions.links]}
    del old["checked"]
    (place / STATE).write_text(json.dumps(old))
    weights = copy.advance(versions.newest, patience=0.0)
    assert weights.n_bytes == 0
    assert way(weights, versions, 0) is None
    weights = copy.advance(versions.next(), patience=0.0)
    assert right(weights, versions)
    assert way(weights, versions, 1) == [versions.newest.uri]


# ---- files that go, marks that are lost ---------------------------------------------------------------------


def data_files(place: Path) -> list[Path]:
    state = read_state(place)
    assert state is not None
    return sorted((place / state.folder).iterdir())


@pytest.mark.parametrize(("replaced", "mapped"), combinations([False, True], [False, True]))
def test_an_advance_notices_data_files_that_went(
    place: Path, copy: HostCopy, versions: Versions, mapped: bool, replaced: bool
) -> None:
    """As when a temporary directory is tidied up by age; what is mapped stays writable."""
    copy.advance(versions.newest, patience=0.0)
    if not mapped:
        copy._writable.forget()
    path = data_files(place)[-1]
    content = path.read_bytes()
    path.unlink()
    if replaced:
        (place / "other").write_bytes(b"\0" * len(content))
        (place / "other").rename(path)
    weights = copy.advance(versions.next(), patience=0.0)
    assert right(weights, versions)
    assert same(copy_again(place, versions), versions.weights[-1])


def copy_again(place: Path, versions: Versions) -> list[tuple[str, torch.Tensor]]:
    """What another process of the host reads."""
    other = HostCopy(place, versions.store, lock_timeout=PATIENCE)
    weights = other.advance(versions.newest, patience=0.0)
    assert weights.n_bytes == 0
    with weights.reading():
        found = [(name, tensor.clone()) for name, tensor in weights.tensors()]
    other.close()
    return found


def test_a_reader_has_files_that_went_made_anew(place: Path, copy: HostCopy, versions: Versions) -> None:
    weights = copy.advance(versions.newest, patience=0.0)
    data_files(place)[0].unlink()
    with pytest.raises(NotReadableError, match="No such file"), open_copy(place):
        pass
    assert right(weights, versions)
    shutil.rmtree(data_files(place)[0].parent)
    assert right(weights, versions)
    assert right(copy.advance(versions.newest, patience=0.0), versions)


@pytest.mark.parametrize("torn", [False, True])
def test_a_copy_that_a_newcomer_disowned_is_proven_again(
    place: Path, copy: HostCopy, versions: Versions, torn: bool
) -> None:
    """It believes to be the first one, since the file was removed that all others hold locked."""
    weights = copy.advance(versions.newest, patience=0.0)
    if torn:
        state, publication = read_state(place), versions.next()
        assert state is not None
        target, uris = publication.content_hash, [publication.uri]
        begun = Advancing(base=state.content_hash, target=target, uris=uris, publication=publication)
        write_model(place / ADVANCING, begun)
    (place / USERS).unlink()
    newcomer = HostCopy(place, versions.store, lock_timeout=PATIENCE)
    with pytest.raises(NotReadableError, match="torn" if torn else "has not been hashed yet"), open_copy(place):
        pass
    with weights.reading() as publication:
        assert publication == versions.publications[0]
        assert same(weights.tensors(), versions.weights[0])
    assert right(newcomer.advance(versions.newest, patience=0.0), versions)
    for one in (copy, newcomer):
        one.close()
    assert not place.exists()


# ---- several hosts ------------------------------------------------------------------------------------------


def test_hosts_that_share_a_file_system_share_no_copy(
    tmp_path: Path, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where locks hold on one host only, another one's copy looks as if nobody used it."""

    def directory(host: str, job: str) -> Path:
        monkeypatch.setattr("weight_sync.host.users.boot_id", lambda: host)
        return copy_directory(str(tmp_path), job_id=job, run_dir="/runs", n_bytes=1)

    copy = HostCopy(directory("a", "job"), versions.store, lock_timeout=PATIENCE)
    weights = copy.advance(versions.newest, patience=0.0)
    assert directory("a", "job") == copy.directory, "all containers of a host come to the same place"
    assert copy._users is not None
    fcntl.flock(copy._users, fcntl.LOCK_UN)  # as host b sees it
    other = HostCopy(directory("b", "job"), versions.store, lock_timeout=PATIENCE)
    assert other.directory.parent == copy.directory.parent
    assert other.directory != copy.directory
    assert directory("b", "another") != other.directory
    other.close()
    assert right(weights, versions)
    directory("a", "another")  # what nobody of the own host uses is swept
    assert list(copy.directory.parent.iterdir()) == []
    copy.close()


def test_a_system_that_does_not_tell_its_hosts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weight_sync.host.users.boot_id", lambda: "")
    places = {copy_directory(str(tmp_path), job_id="job", run_dir="/runs", n_bytes=1) for _ in range(2)}
    assert len(places) == 1


# ---- changes that were begun --------------------------------------------------------------------------------


@pytest.mark.parametrize(("begun", "held"), combinations(["not", "in part", "all"], [0, 2]))
def test_a_change_that_was_begun_to_what_is_gone(
    place: Path, copy: HostCopy, versions: Versions, begun: str, held: int
) -> None:
    """Its version was taken back with all its files. What is asked for is readable, and nothing torn is kept; what
    others were told that is here is not stepped back from."""
    copy.advance(versions.newest, patience=0.0)
    for _ in range(held):
        copy.advance(versions.next(), patience=0.0)
    versions.next()
    state, gone = read_state(place), versions.next()
    assert state is not None
    uris = [publication.uri for publication in versions.publications[held + 1 :]]
    change = Advancing(base=state.content_hash, target=gone.content_hash, uris=uris, publication=gone)
    write_model(place / ADVANCING, change)
    if begun != "not":
        data = WritableTensors(place).of(state)
        tensor = versions.weights[-1]["big.weight"].view(torch.uint8).numpy().tobytes()
        n = len(tensor) // (2 if begun == "in part" else 1)
        data["big.weight"][:n] = tensor[:n]
    shutil.rmtree(versions.folder(gone.uri))
    asked = versions.publications[1]
    weights = copy.advance(asked, patience=0.0)
    expected = max(held, 1)
    with weights.reading() as publication:
        assert publication == versions.publications[expected]
        assert same(weights.tensors(), versions.weights[expected])


def test_a_change_that_was_begun_is_finished_first(place: Path, copy: HostCopy, versions: Versions) -> None:
    """Who asks for less gets what the dead one was on its way to."""
    copy.advance(versions.newest, patience=0.0)
    state, publication = read_state(place), versions.next()
    assert state is not None
    target, uris = publication.content_hash, [publication.uri]
    write_model(
        place / ADVANCING, Advancing(base=state.content_hash, target=target, uris=uris, publication=publication)
    )
    assert right(copy.advance(versions.publications[0], patience=0.0), versions)
