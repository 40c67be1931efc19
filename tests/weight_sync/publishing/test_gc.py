"""Old versions go, those in use stay, and nothing of anybody else is touched."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support.fetched import fetch
from tests.support.waiting import PATIENCE, until
from tests.weight_sync.helpers import all_bits, put, small
from weight_sync import DirectoryStore, WeightError, collect, publish, remove
from weight_sync.publishing.gc import ABANDONED_AFTER


def test_only_what_is_kept_stays(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    publications = [put(store, small(i), version=i) for i in range(5)]
    gone = collect(store, [publications[1].uri, publications[4].uri])
    assert gone == [publications[i].uri.split("/")[0] for i in (0, 2, 3)]
    assert len(store.versions()) == 2
    for i in (1, 4):
        fetch(tmp_path, publications[i], patience=0.0)
    with pytest.raises(WeightError, match="No such file"):
        fetch(tmp_path, publications[0], patience=0.0)
    assert collect(store, [publications[1].uri, publications[4].uri]) == []
    assert not list(tmp_path.glob(".*"))


def test_a_version_that_is_being_read_stays_readable(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    weights = fetch(tmp_path, put(store, small(1)))
    assert len(collect(store, [])) == 1
    assert all_bits(weights.tensors()) == all_bits(small(1))


def test_other_jobs_and_other_things_are_left_alone(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    put(store, small(), name="job-a")
    mine = put(store, small(), name="job-b")
    put(store, small())
    (tmp_path / "notes.txt").touch()
    (tmp_path / "backup").mkdir()
    assert collect(store, [], name="job-b") == [mine.uri.split("/")[0]]
    assert len(collect(store, [], name="job")) == 0
    assert len(store.versions()) == 3
    assert (tmp_path / "notes.txt").exists()


def test_young_versions_can_be_spared(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    old, young = put(store, small(1)), put(store, small(2))
    past = time.time() - 100
    os.utime(tmp_path / old.uri.split("/")[0], (past, past))
    assert collect(store, [], min_age=50.0) == [old.uri.split("/")[0]]
    fetch(tmp_path, young, patience=0.0)


def test_what_dead_writers_left_is_swept_when_it_is_old(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for name in (".tmp-dead", ".trash-dead", ".tmp-alive", ".other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00000.safetensors").write_bytes(b"x" * 10)
    past = time.time() - ABANDONED_AFTER - 1
    for name in (".tmp-dead", ".trash-dead", ".other"):
        os.utime(tmp_path / name, (past, past))
    collect(store, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other", ".tmp-alive"]


def test_what_the_only_writer_of_a_name_left_is_swept_at_once(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for version in ("job.t0-v00000003", "jobber.t0-v00000003"):
        with store.stage(version) as stage:
            stage.committed = True  # as after kill -9: nobody cleans up
    collect(store, [], name="job")
    (left,) = tmp_path.iterdir()
    assert left.name == ".tmp-jobber.t0-v00000003"


def test_remove_by_uri(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    one, two = put(store, small(1)), put(store, small(2))
    assert remove(store, [one.uri]) == [one.uri.split("/")[0]]
    assert remove(store, [one.uri]) == []
    fetch(tmp_path, two, patience=0.0)


@pytest.mark.parametrize("uri", ["../x/manifest.json", "version", ".tmp-1/manifest.json"])
def test_uris_that_are_none(tmp_path: Path, uri: str) -> None:
    store = DirectoryStore(tmp_path)
    put(store, small())
    with pytest.raises(WeightError, match="not a key"):
        collect(store, [uri])
    with pytest.raises(WeightError, match="not a key"):
        remove(store, [uri])
    assert len(store.versions()) == 1


def test_an_empty_or_missing_store(tmp_path: Path) -> None:
    assert collect(DirectoryStore(tmp_path / "nothing"), []) == []


def test_rewound_timelines_never_meet(tmp_path: Path) -> None:
    """The same version is published again after a rewind, and twice by two attempts."""
    store = DirectoryStore(tmp_path)
    uris = {
        publish(store, version=7, timeline=timeline, tensors=small(i).items()).uri
        for i, timeline in enumerate([0, 0, 1])
    }
    assert len(uris) == 3
    assert [name.split("-")[0] for name in store.versions()] == ["t0", "t0", "t1"]


def test_publish_fetch_and_collect_at_the_same_time(tmp_path: Path) -> None:
    """Writers, readers and a collector in parallel: a reader gets exactly what was published, or a WeightError."""
    store = DirectoryStore(tmp_path)
    published: list[tuple[int, object]] = []
    lock, done = threading.Lock(), threading.Event()
    failures: list[BaseException] = []
    read = [0]

    def guarded(work: object) -> threading.Thread:
        def run() -> None:
            try:
                work()  # type: ignore[operator]
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write(start: int) -> None:
        for i in range(start, start + 25):
            publication = put(store, {"w": torch.full((500,), float(i)), "v": torch.tensor(i)}, version=i)
            with lock:
                published.append((i, publication))
                old = [one for _, one in published[-5:-4]]
            for one in old:  # its age is given to it: what was published a moment ago never has any
                os.utime(tmp_path / one.uri.split("/")[0], (0, 0))  # type: ignore[attr-defined]

    def reader() -> None:
        dice = random.Random(1)
        while not done.is_set():
            with lock:
                recent = published[-6:]
            if not recent:
                continue
            value, publication = dice.choice(recent)
            try:
                weights = fetch(store, publication, patience=0.0)  # type: ignore[arg-type]
            except WeightError:
                continue
            assert int(weights["v"]) == value
            assert bool((weights["w"] == value).all())
            read[0] += 1

    def collector() -> None:
        while not done.is_set():
            with lock:
                keep = [publication.uri for _, publication in published[-3:]]  # type: ignore[attr-defined]
            # What is published between the two lines is not in `keep`; its age protects it.
            collect(store, keep, min_age=3600.0)

    writers = [guarded(lambda s=s: write(s)) for s in (0, 100)]
    others = [guarded(reader), guarded(reader), guarded(collector)]
    for thread in writers:
        thread.join(PATIENCE)
    until(lambda: failures or (read[0] and len(store.versions()) < len(published)), "readers and the collector")
    done.set()
    for thread in others:
        thread.join(PATIENCE)
    assert failures == []
    newest = published[-1]
    assert int(fetch(store, newest[1])["v"]) == newest[0]  # type: ignore[arg-type]
