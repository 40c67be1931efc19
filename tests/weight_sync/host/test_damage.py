"""Whatever is damaged, missing or taken: fetched again, planned around, or an error with a name; never handed out."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from schema.wire.weights import Piece
from tests.support.effort import combinations
from tests.support.waiting import PATIENCE
from tests.weight_sync.host.advancer import right, vanish
from tests.weight_sync.versions import RemoteStore, Versions, stepped
from weight_sync.errors import StoppedError, WeightError
from weight_sync.host.advance import CacheFullError
from weight_sync.host.files import (
    ADVANCING,
    CONTENT,
    FETCHED,
    FETCHING,
    Advancing,
    CacheError,
    CopyState,
    WritableTensors,
    read_state,
    write_model,
)
from weight_sync.host.host_copy import HostCopy, whole_bytes
from weight_sync.host.locks import LockTimeoutError, locked
from weight_sync.host.receive import TRIES
from weight_sync.host.users import copy_directory

pytestmark = pytest.mark.slow

KINDS = ["missing", "torn", "flipped", "empty"]


def damage(path: Path, kind: str) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "flipped":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        os.truncate(path, path.stat().st_size // 2 if kind == "torn" else 0)


def file_of(versions: Versions, piece: Piece | None, what: str) -> Path:
    """The manifest, or the last data file, of a piece in the store."""
    assert piece is not None
    folder = versions.folder(piece.uri)
    return folder / "manifest.json" if what == "manifest" else max(folder.glob("*.safetensors"))


class FlakyStore(RemoteStore):
    """Each file comes damaged a number of times before it comes as it is."""

    def __init__(self, root: Path, notes: Path, times: int, kind: str) -> None:
        super().__init__(root, notes)
        self._times, self._kind = times, kind
        self._seen: Counter[str] = Counter()

    def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
        assert not to.exists(), "what came damaged takes no more room"
        size = super().download(key, to, n_bytes)
        self._seen[key] += 1
        if self._seen[key] <= self._times:
            damage(to, self._kind)
        return size


# ---- the store ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_damaged_is_fetched_again(tmp_path: Path, place: Path, versions: Versions, kind: str) -> None:
    store = FlakyStore(versions.root, tmp_path / "notes", TRIES - 1, kind)
    copy = HostCopy(place, store)
    for _ in range(3):
        assert right(copy.advance(versions.newest, patience=0.0), versions)
        versions.next()
    data = [key for key in store.accesses() if key.endswith(".safetensors")]
    assert set(Counter(data).values()) == {TRIES}
    copy.close()


def test_what_has_another_size_takes_no_room(tmp_path: Path, place: Path, versions: Versions) -> None:
    copy = HostCopy(place, RemoteStore(versions.root, tmp_path / "notes"))
    copy.advance(versions.newest, patience=0.0)
    versions.next()
    with file_of(versions, versions.links[1].delta, "data").open("ab") as file:
        file.write(bytes(1 << 20))
    with pytest.raises(WeightError, match=r"has 1\d+ bytes instead of \d+"):
        copy.advance(versions.newest, patience=0.0)
    copy.close()


@pytest.mark.parametrize(("kind", "what", "remote"), combinations(KINDS, ["manifest", "data"], [False, True]))
def test_a_broken_delta_is_planned_around(
    tmp_path: Path, place: Path, versions: Versions, kind: str, what: str, remote: bool
) -> None:
    """Version 3's delta is broken: nobody comes from 2 to 3, until there is the anchor of version 4."""
    store = RemoteStore(versions.root, tmp_path / "notes") if remote else versions.store
    copy = HostCopy(place, store)
    versions.next()
    two = versions.next()
    copy.advance(two, patience=0.0)
    damage(file_of(versions, versions.links[2].delta, "data"), kind)  # of no importance any more
    versions.next()
    damage(file_of(versions, versions.links[3].delta, what), kind)
    uri = versions.newest.uri.split("/")[0]
    with pytest.raises(WeightError, match=uri):
        copy.advance(versions.newest, patience=0.0)
    weights = copy.advance(two, patience=0.0)
    assert weights.publication == two, "what was there is still handed out"
    versions.next()
    tried = f"no way leads to publication 5 .*{uri}"
    with pytest.raises(WeightError, match=tried):
        copy.advance(versions.newest, patience=0.0)
    versions.next()  # its chain names the anchor of version 4
    assert right(copy.advance(versions.newest, patience=0.0), versions)
    copy.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_anchor_is_planned_around_too(place: Path, copy: HostCopy, versions: Versions, kind: str) -> None:
    for _ in range(9):
        versions.next()
    damage(file_of(versions, versions.links[8].full, "data"), kind)
    assert right(copy.advance(versions.newest, patience=0.0), versions)
    copy.close()
    for link in versions.links:
        if link.full is not None:
            shutil.rmtree(versions.folder(link.full.uri), ignore_errors=True)
    copy = HostCopy(place, versions.store)
    with pytest.raises(WeightError, match="no way leads to publication 10") as caught:
        copy.advance(versions.newest, patience=0.0)
    for link in versions.links:
        assert link.full is None or link.full.uri.split("/")[0] in str(caught.value)
    copy.close()


def test_deltas_that_do_not_lead_where_they_say(copy: HostCopy, versions: Versions) -> None:
    """Files that are whole and manifests that are vouched for, but of other weights."""
    copy.advance(versions.newest, patience=0.0)
    other = Versions(versions.root, weights=stepped(versions.weights[0], 77))
    other.next()
    versions.next()
    swapped = versions.newest.model_copy(
        update={"uri": other.newest.uri, "manifest_hash": other.newest.manifest_hash, "n_bytes": other.newest.n_bytes}
    )
    with pytest.raises(WeightError, match="published was"):
        copy.advance(swapped, patience=0.0)
    assert right(copy.advance(versions.newest, patience=0.0), versions)


# ---- the copy itself ----------------------------------------------------------------------------------------


def flip(place: Path, name: str) -> None:
    """Change a byte in the middle of a tensor of the copy."""
    state = read_state(place)
    assert state is not None
    path = place / state.folder / state.tensors[name].file
    content = bytearray(path.read_bytes())
    content[-len(content) // 4] ^= 1
    path.write_bytes(content)


def test_a_rotten_copy_is_replaced_when_it_shows(place: Path, copy: HostCopy, versions: Versions) -> None:
    copy.advance(versions.newest, patience=0.0)
    flip(place, "big.weight")
    versions.next()
    weights = copy.advance(versions.newest, patience=0.0)
    assert right(weights, versions)
    assert weights.n_bytes > versions.publications[0].n_bytes


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("name", [None, "frozen", "big.weight"])
def test_what_the_dead_left_is_proven_before_it_is_used(
    place: Path, copy: HostCopy, versions: Versions, name: str | None, newer: bool
) -> None:
    copy.advance(versions.newest, patience=0.0)
    vanish(copy)
    if name is not None:
        flip(place, name)
    if newer:
        versions.next()
    copy = HostCopy(place, versions.store)
    weights = copy.advance(versions.newest, patience=0.0)
    assert right(weights, versions)
    assert (weights.n_bytes < versions.publications[0].n_bytes) == (name is None)
    copy.close()


def test_an_earlier_life_of_the_job_had_higher_ids(place: Path, copy: HostCopy, versions: Versions) -> None:
    for _ in range(3):
        versions.next()
    copy.advance(versions.newest, patience=0.0)
    vanish(copy)
    again = Versions(versions.root, weights=stepped(versions.weights[0], 5))
    copy = HostCopy(place, versions.store)
    assert right(copy.advance(again.newest, patience=0.0), again)
    copy.close()


def test_a_change_that_an_earlier_life_of_the_job_began(place: Path, copy: HostCopy, versions: Versions) -> None:
    """It is not what this life asks for, however high the id of what it was to lead to."""
    for _ in range(3):
        versions.next()
    copy.advance(versions.newest, patience=0.0)
    state, publication = read_state(place), versions.next()
    assert state is not None
    begun = Advancing(
        base=state.content_hash, target=publication.content_hash, uris=[publication.uri], publication=publication
    )
    write_model(place / ADVANCING, begun)
    vanish(copy)
    again = Versions(versions.root, weights=stepped(versions.weights[0], 5))
    copy = HostCopy(place, versions.store)
    assert right(copy.advance(again.newest, patience=0.0), again)
    copy.close()


def test_an_id_that_was_given_twice(copy: HostCopy, versions: Versions) -> None:
    """By a controller that has lost its history: what it says now counts."""
    other = Versions(versions.root, weights=stepped(versions.weights[0], 5))
    copy.advance(versions.newest, patience=0.0)
    assert right(copy.advance(other.newest, patience=0.0), other)


def test_a_directory_that_was_removed_is_made_anew(tmp_path: Path, versions: Versions) -> None:
    place = copy_directory(str(tmp_path), job_id="job", run_dir="/runs", n_bytes=1)
    copies = [HostCopy(place, versions.store) for _ in range(2)]
    weights = [copy.advance(versions.newest, patience=0.0) for copy in copies]
    shutil.rmtree(place.parent)
    assert right(weights[0], versions)
    versions.next()
    assert all(right(copy.advance(versions.newest, patience=0.0), versions) for copy in copies)
    copies[0].close()
    assert place.exists()
    copies[1].close()
    assert not place.exists()


def test_replaced_files_are_let_go(place: Path, versions: Versions) -> None:
    """Also by who did not replace them: in shared memory they are memory as long as they are mapped."""
    copies = [HostCopy(place, versions.store) for _ in range(2)]
    copies[0].advance(versions.newest, patience=0.0)
    before = read_state(place)
    versions.next(full=True)
    for copy in reversed(copies):
        assert right(copy.advance(versions.newest, patience=0.0), versions)
    assert before is not None
    assert before.folder not in Path("/proc/self/maps").read_text()
    for copy in copies:
        copy.close()


def test_fetched_deltas_that_are_damaged_here(tmp_path: Path, place: Path, versions: Versions) -> None:
    """A delta that is kept for who lags is fetched again where it is needed, and not trusted by who reads it."""
    store = RemoteStore(versions.root, tmp_path / "notes")
    copy = HostCopy(place, store)
    first = copy.advance(versions.newest, patience=0.0)
    versions.next()
    weights = copy.advance(versions.newest, patience=0.0)
    (kept,) = (place / FETCHED).iterdir()
    assert weights.changes_since(first.publication.content_hash) is not None
    shutil.rmtree(kept)
    assert weights.changes_since(first.publication.content_hash) is None
    assert right(weights, versions)
    copy.close()


def test_old_deltas_go_when_they_are_many(tmp_path: Path, place: Path, versions: Versions) -> None:
    store = RemoteStore(versions.root, tmp_path / "notes")
    copy = HostCopy(place, store)
    first = copy.advance(versions.newest, patience=0.0)
    for _ in range(8):
        versions.next(stepped(versions.weights[-1], len(versions.weights), 0.04))
        weights = copy.advance(versions.newest, patience=0.0)
        kept = sum(path.stat().st_size for path in (place / FETCHED).rglob("*.safetensors"))
        assert kept < first.n_bytes / 4
    assert weights.changes_since(first.publication.content_hash) is None
    assert weights.changes_since(versions.publications[-2].content_hash) is not None
    assert right(weights, versions)
    copy.close()


# ---- room, locks, ends --------------------------------------------------------------------------------------


def test_no_room(copy: HostCopy, versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    with pytest.raises(CacheFullError, match=r"1000 are free.*weight_sync\.host_cache"):
        copy.advance(versions.newest, patience=0.0)
    monkeypatch.undo()
    assert right(copy.advance(versions.newest, patience=0.0), versions)


def test_the_disk_fills_up_meanwhile(tmp_path: Path, place: Path, versions: Versions) -> None:
    class FullStore(RemoteStore):
        def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
            super().download(key, to, n_bytes)
            raise OSError(errno.ENOSPC, "No space left on device")

    copy = HostCopy(place, FullStore(versions.root, tmp_path / "notes"))
    with pytest.raises(CacheFullError, match=r"No space left.*weight_sync\.host_cache"):
        copy.advance(versions.newest, patience=0.0)
    copy.close()


def test_files_that_cannot_be_mapped(copy: HostCopy, versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on file systems without shared mappings: fetching again does not help."""
    real = mmap.mmap

    def refusing(descriptor: int, size: int, *, access: int) -> mmap.mmap:
        if access == mmap.ACCESS_WRITE:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return real(descriptor, size, access=access)

    monkeypatch.setattr(mmap, "mmap", refusing)
    with pytest.raises(CacheError, match=r"cannot be mapped.*No such device.*weight_sync\.host_cache"):
        copy.advance(versions.newest, patience=0.0)
    monkeypatch.undo()
    assert right(copy.advance(versions.newest, patience=0.0), versions)


def test_a_copy_that_never_stays_is_given_up(
    place: Path, copy: HostCopy, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are gone whenever they were fetched and proven."""
    real = WritableTensors.of

    def gone(self: WritableTensors, state: CopyState) -> dict[str, memoryview]:
        shutil.rmtree(place / state.folder)
        return real(self, state)

    monkeypatch.setattr(WritableTensors, "of", gone)
    with pytest.raises(WeightError, match=r"no way leads to publication 1 .*No such file"):
        copy.advance(versions.newest, patience=0.0)


def test_a_file_that_goes_while_it_is_read_is_read_again(
    copy: HostCopy, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, when another machine removes it."""
    real, left = os.read, [2]

    def stale(descriptor: int, size: int) -> bytes:
        if left[0] and size == 1 << 20:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, size)

    monkeypatch.setattr(os, "read", stale)
    weights = copy.advance(versions.newest, patience=0.0)
    monkeypatch.undo()
    assert left == [0]
    assert right(weights, versions)


def test_who_holds_a_lock_is_named(place: Path, versions: Versions) -> None:
    copy = HostCopy(place, versions.store, lock_timeout=0.1)
    copy.advance(versions.newest, patience=0.0)
    with (
        locked(place / CONTENT, exclusive=False, timeout=0.0),
        pytest.raises(LockTimeoutError, match=rf"content\.lock was not free.*held by pid {os.getpid()} \("),
    ):
        copy.advance(versions.next(), patience=0.0)
    assert right(copy.advance(versions.newest, patience=0.0), versions)
    copy.close()


@pytest.mark.parametrize("where", ["a pause", "a lock"])
def test_waiting_ends_when_the_process_is_to_end(place: Path, versions: Versions, where: str) -> None:
    stop = threading.Event()
    copy = HostCopy(place, versions.store, stop=stop)
    copy.advance(versions.newest, patience=0.0)
    versions.next()
    damage(file_of(versions, versions.links[1].delta, "data"), "missing")
    found: list[BaseException] = []

    def work() -> None:
        try:
            copy.advance(versions.newest, patience=100 * PATIENCE)
        except BaseException as error:
            found.append(error)

    with ExitStack() as stack:
        if where == "a lock":
            stack.enter_context(locked(place / FETCHING, exclusive=True, timeout=0.0))
        thread = threading.Thread(target=work)
        thread.start()
        stop.set()
        thread.join(PATIENCE)
    assert isinstance(found[0], StoppedError)
    copy.close()


# ---- where it lies ------------------------------------------------------------------------------------------


def test_where_the_copy_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("weight_sync.host.users.SHARED_MEMORY", shared)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    small = copy_directory("", job_id="job/1", run_dir="/runs/a", n_bytes=1000)
    assert small.parent.parent == shared
    assert small.parent.name == f"cosmos-weights-{os.getuid()}"
    assert small.name.startswith("job-1-")
    assert small.parent.stat().st_mode & 0o777 == 0o700
    assert copy_directory("", job_id="job/1", run_dir="/runs/b", n_bytes=1000) != small
    large = copy_directory("", job_id="job/1", run_dir="/runs/a", n_bytes=1 << 60)
    assert large.parent.parent == temporary
    large.mkdir()  # who comes later goes where the others are
    assert copy_directory("", job_id="job/1", run_dir="/runs/a", n_bytes=1000) == large
    own = copy_directory(str(tmp_path), job_id="job/1", run_dir="/runs/a", n_bytes=1 << 60)
    assert own.parent.parent == tmp_path
    with pytest.raises(WeightError, match=r"weight_sync\.host_cache"):
        copy_directory(str(tmp_path / "nowhere"), job_id="job", run_dir="/runs/a", n_bytes=1)


def test_directories_of_others_are_refused(tmp_path: Path, versions: Versions) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for name in ("link", "open"):
        with pytest.raises(WeightError, match="must be a directory that only user"):
            HostCopy(tmp_path / name, versions.store)
    (tmp_path / "linked").mkdir(mode=0o700)
    (tmp_path / "linked" / "users.lock").symlink_to(tmp_path / "elsewhere" / "file")
    with pytest.raises(WeightError, match="cannot lie in"):
        HostCopy(tmp_path / "linked", versions.store)


def test_what_other_jobs_left_is_swept(tmp_path: Path, versions: Versions) -> None:
    def directory(job: str) -> Path:
        return copy_directory(str(tmp_path), job_id=job, run_dir="/runs", n_bytes=1)

    dead, live = HostCopy(directory("dead"), versions.store), HostCopy(directory("live"), versions.store)
    for copy in (dead, live):
        copy.advance(versions.newest, patience=0.0)
    vanish(dead)
    mine = directory("mine")
    assert [path.name for path in mine.parent.iterdir()] == [live.directory.name]
    live.close()
    assert list(mine.parent.iterdir()) == []


def test_the_whole_is_known_before_anything_is_fetched(versions: Versions) -> None:
    full = versions.newest.n_bytes
    assert whole_bytes(versions.store, versions.newest, patience=0.0) == full
    versions.next()
    assert whole_bytes(versions.store, versions.newest, patience=0.0) == full
