"""What every store promises, asked of a directory and of a bucket."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schema.wire.store_url import S3Location, parse_url
from tests.support.fetched import fetch
from tests.support.objects import ObjectStore, running_objects
from tests.support.waiting import until
from tests.weight_sync.helpers import all_bits, put, small
from tests.weight_sync.stores.store_material import BUCKET, NAME, OTHER, bucket, pattern, put_file, use, write
from weight_sync import DirectoryStore, NotReadableError, Store, WeightError, collect, open_store
from weight_sync.stores import HEAD_BYTES

Again = Callable[[], Store]


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with running_objects(BUCKET) as store:
        yield store


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow)])
def again(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Again:
    """Opens one and the same store, as another process would."""
    if request.param == "directory":
        return lambda: DirectoryStore(tmp_path / "store")
    use(request.getfixturevalue("objects").environment, monkeypatch)
    return lambda: bucket(f"tests/{tmp_path.name}")


@pytest.fixture
def store(again: Again) -> Store:
    return again()


def test_a_version_becomes_visible_whole(store: Store) -> None:
    store.probe(writing=True)
    assert store.versions() == []
    with store.stage(NAME) as stage:
        put_file(stage, "00000.safetensors", b"data")
        put_file(stage, "manifest.json", b"manifest")
        assert store.versions() == []
        assert store.age(NAME) == float("inf")
        with pytest.raises(NotReadableError):
            store.read(f"{NAME}/manifest.json")
        stage.commit()
    assert store.versions() == [NAME]
    assert bytes(store.read(f"{NAME}/00000.safetensors")) == b"data"
    assert bytes(store.read(f"{NAME}/manifest.json")) == b"manifest"
    assert 0 <= store.age(NAME) < 3600
    assert store.trouble() == ""
    store.probe(writing=False)
    assert store.versions() == [NAME], "probes leave nothing behind"


def test_what_is_not_committed_is_thrown_away(store: Store) -> None:
    def fail_while_writing() -> None:
        with store.stage(NAME) as stage:
            put_file(stage, "00000.safetensors", pattern(HEAD_BYTES + 100))
            with stage.create("00001.safetensors") as stream:
                stream.write(pattern(HEAD_BYTES * 2))
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_writing()
    with store.stage(OTHER):
        pass
    assert store.versions() == []
    for version in (NAME, OTHER):
        assert store.delete(version) is False
        write(store, version, {"00000.safetensors": b"again"})
    assert store.versions() == [NAME, OTHER]


@pytest.mark.parametrize("first", ["leader", "follower"])
def test_several_write_one_version(again: Again, first: str) -> None:
    leader, follower = again(), again()
    if first == "follower":
        write(follower, NAME, {"r1-00000": b"one"}, leads=False)
    with leader.stage(NAME) as stage:
        put_file(stage, "r0-00000", b"zero")
        if first == "leader":
            write(follower, NAME, {"r1-00000": b"one"}, leads=False)
        assert follower.versions() == []
        put_file(stage, "manifest.json", b"{}")
        stage.commit()
    assert {bytes(again().read(f"{NAME}/r{rank}-00000")) for rank in (0, 1)} == {b"zero", b"one"}


def test_only_the_leader_commits_and_throws_away(again: Again) -> None:
    with again().stage(NAME) as stage:
        with again().stage(NAME, leads=False) as other:
            put_file(other, "r1-00000", b"one")
            with pytest.raises(WeightError, match="the process that leads"):
                other.commit()
        put_file(stage, "manifest.json", b"{}")
        stage.commit()
    assert bytes(again().read(f"{NAME}/r1-00000")) == b"one"


@pytest.mark.parametrize("n_bytes", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, 2 * HEAD_BYTES, 40_000_001])
def test_files_of_any_size_come_back(store: Store, tmp_path: Path, n_bytes: int) -> None:
    data = pattern(n_bytes)
    write(store, NAME, {"file": data})
    assert store.read(f"{NAME}/file") == data
    assert store.download(f"{NAME}/file", tmp_path / "here") == n_bytes
    assert (tmp_path / "here").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["here"]


def test_a_file_of_another_size_takes_no_room(store: Store, tmp_path: Path) -> None:
    data = pattern(HEAD_BYTES + 1)
    write(store, NAME, {"file": data})
    assert store.download(f"{NAME}/file", tmp_path / "here", len(data)) == len(data)
    for n_bytes in (0, len(data) - 1, len(data) + 1):
        with pytest.raises(NotReadableError, match=f"file has {len(data)} bytes instead of {n_bytes}"):
            store.download(f"{NAME}/file", tmp_path / "other", n_bytes)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["here"]


def test_a_header_is_written_last(store: Store) -> None:
    data = pattern(3 * HEAD_BYTES)
    with store.stage(NAME) as stage:
        with stage.create("file") as stream:
            stream.seek(1000)
            for start in range(1000, len(data), 7_000_000):
                stream.write(memoryview(data)[start : start + 7_000_000])
            stream.seek(0)
            stream.write(data[:1000])
            stream.seek(0, io.SEEK_END)
            stream.write(b"end")
        put_file(stage, "manifest.json", b"{}")
        stage.commit()
    assert store.read(f"{NAME}/file") == data + b"end"


def test_what_is_read_is_the_readers_own(store: Store) -> None:
    write(store, NAME, {"file": b"data"})
    view = store.read(f"{NAME}/file")
    view[:4] = b"mine"
    assert bytes(store.read(f"{NAME}/file")) == b"data"


def test_versions_are_never_overwritten(store: Store) -> None:
    write(store, NAME, {"file": b"first"})
    with pytest.raises(WeightError, match="never overwritten"):
        write(store, NAME, {"file": b"second"})
    assert bytes(store.read(f"{NAME}/file")) == b"first"


def test_delete(store: Store, tmp_path: Path) -> None:
    write(store, NAME, {"one": b"1", "two": b"2"})
    write(store, NAME + "0", {"one": b"another"})
    assert store.delete(NAME) is True
    assert store.delete(NAME) is False
    assert store.versions() == [NAME + "0"]
    for use_it in (store.read, lambda key: store.download(key, tmp_path / "here")):
        with pytest.raises(NotReadableError):
            use_it(f"{NAME}/one")
    assert not (tmp_path / "here").exists()
    assert bytes(store.read(f"{NAME}0/one")) == b"another"


@pytest.mark.parametrize(
    "key", ["../x/manifest.json", "a/b/c", "a", "", "/a", "a/", "a/../b", ".hidden/x", "a/.x", "a\0/b", "a/b\n"]
)
def test_no_key_leaves_the_store(store: Store, tmp_path: Path, key: str) -> None:
    for use_it in (store.read, lambda key: store.download(key, tmp_path / "here")):
        with pytest.raises(WeightError, match="not a key"):
            use_it(key)


@pytest.mark.parametrize("name", ["../x", "", ".", "..", "a/b", ".tmp-x", "a\n", "ä"])
def test_no_name_leaves_the_store(store: Store, name: str) -> None:
    for use_it in (store.delete, lambda name: store.stage(name).__enter__()):
        with pytest.raises(WeightError, match="cannot be the name of a version"):
            use_it(name)
    with store.stage(NAME) as stage, pytest.raises(WeightError, match="cannot be the name of a file"):
        stage.create(name).__enter__()


def test_sweeping_removes_what_the_dead_left_and_nothing_else(again: Again) -> None:
    store = again()
    write(store, OTHER, {"file": b"visible"})
    for version in (NAME, "jobber.t0-v00000001-0123456789abcdef"):
        write(store, version, {"left": b"by a follower whose leader died"}, leads=False)
    store.sweep(3600.0)
    write(store, NAME, {"more": b"..."}, leads=False)
    store.sweep(0.0, "job.")
    with store.stage(NAME) as stage:
        put_file(stage, "manifest.json", b"{}")
        stage.commit()
    for file in ("left", "more"):
        with pytest.raises(NotReadableError):
            store.read(f"{NAME}/{file}")
    assert bytes(store.read(f"{OTHER}/file")) == b"visible"
    jobber = "jobber.t0-v00000001-0123456789abcdef"
    write(store, jobber, {})
    assert bytes(store.read(f"{jobber}/left")) == b"by a follower whose leader died"


def test_age_is_measured_by_the_clock_of_the_store(store: Store) -> None:
    write(store, NAME, {})
    first = store.age(NAME)
    until(lambda: store.age(NAME) > first, "time to pass")


def test_weights_travel_through_it(store: Store) -> None:
    kept, gone = put(store, small(1), version=1, name="job"), put(store, small(2), version=2, name="job")
    others = put(store, small(3), version=3, name="jobs")
    for publication, seed in ((kept, 1), (gone, 2)):
        assert all_bits(fetch(store, publication, patience=0.0).tensors()) == all_bits(small(seed))
    assert collect(store, [kept.uri], name="job") == [gone.uri.split("/")[0]]
    assert len(store.versions()) == 2
    fetch(store, others, patience=0.0)


# ---- places ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "bucket_name", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://my.bucket-1/a/b_c/", "my.bucket-1", "a/b_c"),
    ],
)
def test_urls(url: str, bucket_name: str, prefix: str) -> None:
    place = parse_url(url)
    assert place == S3Location(bucket_name, prefix)
    assert parse_url(str(place)) == place


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///prefix", "s3://UPPER/x", "s3://b/x", "s3://bucket//x", "s3://bucket/a//b", "s3://bucket/../x",
     "s3://bucket/a/./b", "s3://user:secret@bucket/x", "s3://bucket:9000/x", "s3://bucket/a?b", "s3://bucket/a b",
     "http://bucket/x", "S3://bucket/x", "s3://bucket/x\n", "s3://bucket/" + "x" * 600],
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"write|is not a bucket name|too long|no credentials") as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)
    with pytest.raises(WeightError):
        open_store(url)


@given(st.text("ab./-_:@?%s3 \n\u00e4", max_size=30))
def test_no_url_leads_out_of_its_prefix(text: str) -> None:
    try:
        place = parse_url("s3://" + text)
    except ValueError:
        return
    assert parse_url(str(place)) == place
    assert not place.prefix.startswith("/")
    assert not place.prefix.endswith("/")
    assert {"", ".", ".."}.isdisjoint(place.prefix.split("/") if place.prefix else [])


def test_a_path_is_a_directory(tmp_path: Path) -> None:
    for place in (tmp_path, str(tmp_path)):
        store = open_store(place)
        assert isinstance(store, DirectoryStore)
        assert store.directory == tmp_path


def test_a_file_that_is_cut_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    write(store, NAME, {"file": b"data"})
    look = os.fstat

    def cut(descriptor: int) -> os.stat_result:
        found = look(descriptor)
        os.truncate(tmp_path / NAME / "file", 1)
        return found

    monkeypatch.setattr(os, "fstat", cut)
    with pytest.raises(NotReadableError, match="file was cut"):
        store.read(f"{NAME}/file")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightError, match=r"cannot be written: .*name another directory"):
        DirectoryStore(tmp_path / "file" / "store").probe(writing=True)
