"""The bucket store behind a bad network: what passes is tried again, what does not says so, every wait ends."""

from __future__ import annotations

import multiprocessing
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.faulty_store import FaultyStore, faulty_store
from tests.support.fetched import fetch
from tests.support.objects import CREDENTIALS, ObjectStore, running_objects
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until
from tests.weight_sync.helpers import all_bits, put, small
from tests.weight_sync.stores.store_material import BUCKET, NAME, OTHER, bucket, pattern, use, write
from weight_sync import NotReadableError, WeightError, open_store
from weight_sync.errors import StoppedError, StoreError
from weight_sync.stores import HEAD_BYTES, s3
from weight_sync.stores.patience import Delays

pytestmark = pytest.mark.slow

LARGE = 4 * HEAD_BYTES + 12_345
BRIEF = Delays(give_up=0.3, first=0.01, most=0.05)


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with running_objects(BUCKET) as store:
        yield store


@pytest.fixture
def front(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    with faulty_store(objects) as found:
        use(found.environment, monkeypatch)
        yield found


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Of this test alone: the bucket is shared."""
    return f"tests/{tmp_path.name}"


# ---- what travels ---------------------------------------------------------------------------------------------


def test_large_files_travel_in_parts(front: FaultyStore, prefix: str, tmp_path: Path) -> None:
    store, data = bucket(prefix), pattern(LARGE)
    write(store, NAME, {"file": data})
    sent = {number for line in front.requests for number in re.findall(r"^PUT .*partNumber=(\d+)", line)}
    assert sent == {"1", "2", "3", "4", "5"}
    front.requests.clear()
    store.download(f"{NAME}/file", tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == data
    assert sum(line.startswith("GET") for line in front.requests) == 5
    front.requests.clear()
    write(store, OTHER, {"file": data[:HEAD_BYTES]})
    lines = [line for line in front.requests if line.startswith(("PUT", "POST"))]
    assert len(lines) == 2, "a small file and the manifest are one request each"
    assert lines[-1].endswith("manifest.json"), "last"


def test_a_thing_written_takes_the_memory_of_a_few_parts(front: FaultyStore, prefix: str) -> None:
    """While nothing gets through, a writer stops when the pool are full."""
    stop = threading.Event()
    store, written = bucket(prefix, stop=stop), []
    front.fail("503", "PUT", "partNumber", times=10**6)

    def fill() -> None:
        with suppress(StoppedError), store.stage(NAME) as stage, stage.create("file") as stream:
            for _ in range(40):
                stream.write(bytes(HEAD_BYTES))
                written.append(HEAD_BYTES)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    until(lambda: front.happened["503"] >= 12, "all pool to be tried again")
    assert len(written) <= 1 + s3.PARALLEL + 1, "the head, those in the pool, and one that is filled"
    assert "partNumber" not in store.trouble()
    assert re.search(r"writing part \d of .* has failed for .*(503|ServiceUnavailable)", store.trouble())
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_bytes_that_were_sent_cannot_be_written_again(front: FaultyStore, prefix: str) -> None:
    with bucket(prefix).stage(NAME) as stage, stage.create("file") as stream:
        stream.write(bytes(3 * HEAD_BYTES))
        stream.seek(HEAD_BYTES + 1)
        with pytest.raises(OSError, match="only the first"):
            stream.write(b"x")
        stream.seek(HEAD_BYTES - 1)
        stream.write(b"x")


# ---- faults that pass -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["500", "503", "SlowDown", "cut before", "cut after", "cut within", "short", "delayed"]
)
def test_requests_are_tried_again(front: FaultyStore, prefix: str, tmp_path: Path, kind: str) -> None:
    store, data = bucket(prefix), pattern(2 * HEAD_BYTES + 5)
    for method, containing in (
        ("POST", "?uploads"), ("PUT", "partNumber=2"), ("POST", "?uploadId"), ("PUT", "small"), ("PUT", "manifest"),
        ("GET", "file"), ("GET", "small"), ("GET", "list-type"), ("HEAD", "manifest"), ("DELETE", ""),
    ):  # fmt: skip
        front.fail(kind, method, containing, times=3)
    write(store, NAME, {"file": data, "small": b"small"})
    assert store.download(f"{NAME}/file", tmp_path / "here") == len(data)
    assert (tmp_path / "here").read_bytes() == data
    assert bytes(store.read(f"{NAME}/small")) == b"small"
    assert NAME in store.versions()
    assert store.age(NAME) < 3600
    assert store.delete(NAME)
    assert store.versions() == []
    assert front.happened[kind] >= 15
    assert store.trouble() == ""


def test_a_body_that_stalls_is_asked_for_again(front: FaultyStore, prefix: str) -> None:
    store, data = bucket(prefix, read_timeout=0.5), pattern(HEAD_BYTES * 2)
    write(bucket(prefix), NAME, {"file": data})
    front.fail("stalled", "GET", "file", times=3)
    assert store.read(f"{NAME}/file") == data
    assert front.happened["stalled"] == 3


def test_a_version_arrives_through_a_network_that_breaks_everything_at_random(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    with faulty_store(objects, seed=7, rate=0.3) as front:
        use(front.environment, monkeypatch)
        store = bucket(prefix)
        for version in range(10):
            publication = put(store, small(version), version=version, max_file_bytes=300)
            found = fetch(store, publication, patience=PATIENCE)
            assert all_bits(found.tensors()) == all_bits(small(version))
        assert sum(front.happened.values()) > 20


def test_an_object_that_changes_while_it_is_read(front: FaultyStore, objects: ObjectStore, prefix: str) -> None:
    store, data = bucket(prefix), pattern(2 * HEAD_BYTES)
    write(store, NAME, {"file": data})
    first = store._first(f"{NAME}/file")
    objects.client().put_object(Bucket=BUCKET, Key=f"{prefix}/{NAME}/file", Body=data[::-1])
    with pytest.raises(NotReadableError, match="changed or removed while"):
        store._rest(first, lambda *_: None)
    assert store.read(f"{NAME}/file") == data[::-1]


# ---- faults that do not ---------------------------------------------------------------------------------------


def test_a_store_that_stays_away_is_an_error_in_time(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    use({"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
         "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}, monkeypatch)  # fmt: skip
    store = bucket(prefix, delays=BRIEF)
    words = rf"has failed \d+ times in \d+ s: http://127.0.0.1:{port} does not answer .*check AWS_ENDPOINT_URL"
    for use_it in (store.versions, lambda: store.read(f"{NAME}/file"), lambda: write(store, NAME, {})):
        with pytest.raises(StoreError, match=words):
            use_it()
    with pytest.raises(StoreError, match=rf"s3://{BUCKET}/{prefix} cannot be written: .*{words}"):
        store.probe(writing=True)


def test_a_proxy_is_not_for_what_is_near_and_is_named_where_it_fails(
    front: FaultyStore, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    dead = f"http://me:secret@127.0.0.1:{free_port()}"
    use({**front.environment, "HTTP_PROXY": dead, "http_proxy": dead}, monkeypatch)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    bucket(prefix, delays=BRIEF).probe(writing=True)
    assert "is asked without the proxy 127.0.0.1:" in caplog.text
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example.com")
    with pytest.raises(
        StoreError, match=r"does not answer through the proxy 127\.0\.0\.1:\d+ of http_proxy"
    ) as raised:
        bucket(prefix, delays=BRIEF).versions()
    assert "secret" not in caplog.text + str(raised.value)


def test_a_part_that_never_arrives_is_an_error_in_time(front: FaultyStore, objects: ObjectStore, prefix: str) -> None:
    front.fail("503", "PUT", "partNumber=3", times=10**6)
    with pytest.raises(StoreError, match=r"writing part 3 of .*: ServiceUnavailable"):
        write(bucket(prefix, delays=BRIEF), NAME, {"one": b"1", "file": pattern(LARGE)})
    assert [key for key in objects.keys(BUCKET) if key.startswith(prefix)] == []
    uploads = objects.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    assert uploads.get("Uploads", []) == []


def test_what_waiting_does_not_mend_is_an_error_at_once(
    front: FaultyStore, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Delays(give_up=10 * PATIENCE, first=PATIENCE, most=PATIENCE)
    gone = bucket(prefix, name="no-such-bucket", delays=endless)
    for use_it in (gone.versions, lambda: gone.read(f"{NAME}/file"), lambda: gone.probe(writing=False)):
        with pytest.raises(StoreError, match=r"no such bucket: create it, or correct weight_sync\.store"):
            use_it()
    front.fail("denied", times=10**6)
    denied = bucket(prefix, delays=endless)
    for use_it in (denied.versions, lambda: denied.read(f"{NAME}/file"), lambda: denied.probe(writing=True)):
        with pytest.raises(StoreError, match=r"access is denied: .*s3:GetObject"):
            use_it()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="no credentials were found: set AWS_ACCESS_KEY_ID"):
        bucket(prefix, delays=endless).probe(writing=False)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match=r"AWS settings of the environment do not work: .*nobody.*AWS_PROFILE"):
        open_store(f"s3://{BUCKET}/{prefix}")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_PROFILE", "nobody"), ("AWS_ENDPOINT_URL", "127.0.0.1:9000"),
        ("AWS_ENDPOINT_URL", "http://user:secret@no host"), ("AWS_DEFAULT_REGION", "no region"),
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_client_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    use({**CREDENTIALS, variable: value}, monkeypatch)
    with pytest.raises(StoreError, match=variable) as caught:
        open_store(f"s3://{BUCKET}/x")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("forbidden", ["GET", "PUT", "DELETE"])
def test_a_probe_tells_each_missing_right(front: FaultyStore, prefix: str, forbidden: str) -> None:
    front.fail("denied", forbidden, ".probe-", times=10**6)
    store = bucket(prefix)
    with pytest.raises(WeightError, match="access is denied"):
        store.probe(writing=True)
    if forbidden != "GET":
        store.probe(writing=False)


def test_a_missing_object_is_not_waited_for(front: FaultyStore, prefix: str, tmp_path: Path) -> None:
    store = bucket(prefix)
    with pytest.raises(NotReadableError, match="no such object"):
        store.read(f"{NAME}/file")
    with pytest.raises(NotReadableError, match="no such object"):
        store.download(f"{NAME}/file", tmp_path / "here")
    assert list(tmp_path.iterdir()) == []
    assert len(front.requests) == 2


def test_a_disk_that_cannot_take_it(front: FaultyStore, prefix: str, tmp_path: Path) -> None:
    write(bucket(prefix), NAME, {"file": b"data"})
    with pytest.raises(OSError, match="No such file"):
        bucket(prefix).download(f"{NAME}/file", tmp_path / "missing" / "file")


# ---- leaving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["503", "stalled"])
def test_a_process_that_leaves_waits_for_nothing(front: FaultyStore, prefix: str, kind: str) -> None:
    write(bucket(prefix), NAME, {"file": b"data" * 100})
    front.fail(kind, "GET", "file", times=10**6)
    stop = threading.Event()
    store = bucket(prefix, stop=stop, delays=Delays(10 * PATIENCE, PATIENCE, PATIENCE), read_timeout=PATIENCE)
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(StoppedError):
            store.read(f"{NAME}/file")
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    until(lambda: front.happened[kind], "the request")
    stop.set()
    assert ended.wait(PATIENCE / 2)


def _leave_in_the_middle(prefix: str) -> None:
    store = bucket(prefix, delays=Delays(10 * PATIENCE, PATIENCE, PATIENCE), read_timeout=PATIENCE)
    threading.Thread(target=lambda: store.read(f"{NAME}/file"), daemon=True).start()
    time.sleep(0.5)


def test_requests_keep_no_process_alive(front: FaultyStore, prefix: str) -> None:
    write(bucket(prefix), NAME, {"file": b"data" * 100})
    front.fail("stalled", "GET", "file", times=10**6)
    process = multiprocessing.get_context("spawn").Process(target=_leave_in_the_middle, args=(prefix,))
    process.start()
    process.join(PATIENCE / 2)
    assert process.exitcode == 0


# ---- beside others --------------------------------------------------------------------------------------------


def test_prefixes_know_nothing_of_each_other(front: FaultyStore, objects: ObjectStore, prefix: str) -> None:
    one, two, inside = bucket(f"{prefix}/one"), bucket(f"{prefix}/one-two"), bucket(f"{prefix}/one/inside")
    for number, store in enumerate((one, two, inside)):
        write(store, NAME, {"file": b"%d" % number})
        write(store, OTHER, {"left": b"unfinished"}, leads=False)
    one.sweep(0.0)
    assert one.delete(NAME)
    assert one.versions() == []
    for number, store in enumerate((two, inside), start=1):
        assert store.versions() == [NAME]
        assert bytes(store.read(f"{NAME}/file")) == b"%d" % number
    left = [key for key in objects.keys(BUCKET) if key.startswith(prefix) and key.endswith("left")]
    assert len(left) == 2


def test_what_is_no_weight_version_is_never_touched(front: FaultyStore, objects: ObjectStore, prefix: str) -> None:
    client = objects.client()
    names = ("data/rows.parquet", "outputs/run/final/model.safetensors", "readme", f"{NAME}/deeper/file", "a b/c")
    keys = [f"{prefix}/{name}" for name in names]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"precious")
    large = {"Bucket": BUCKET, "Key": f"{prefix}/data/large.parquet"}
    upload = client.create_multipart_upload(**large)
    store = bucket(prefix)
    store.sweep(0.0)
    assert store.versions() == []
    for key in keys:
        assert objects.read(BUCKET, key) == b"precious"
    client.upload_part(**large, UploadId=upload["UploadId"], PartNumber=1, Body=b"x")


def test_uploads_of_the_dead_are_swept(front: FaultyStore, objects: ObjectStore, prefix: str) -> None:
    client = objects.client()
    for version in (NAME, "jobs.t0-v00000001-0123456789abcdef"):
        for number in range(3):
            client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{version}/file{number}")

    def uploads() -> list[str]:
        found = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
        return [upload["Key"].split("/")[-2] for upload in found]

    store = bucket(prefix)
    store.sweep(1e12)
    assert len(uploads()) == 6  # in moto all uploads began in 2010
    store.sweep(0.0, "job.")
    assert uploads() == ["jobs.t0-v00000001-0123456789abcdef"] * 3
    store.sweep(0.0)
    assert uploads() == []


def test_a_store_that_cannot_list_uploads(front: FaultyStore, prefix: str) -> None:
    front.fail("not implemented", "GET", "?uploads", times=10**6)
    store = bucket(prefix, delays=Delays(10 * PATIENCE, PATIENCE, PATIENCE))
    write(store, NAME, {"left": b"unfinished"}, leads=False)
    with pytest.raises(StoreError, match="NotImplemented"):
        store.sweep(0.0)
    write(store, NAME, {})
    with pytest.raises(NotReadableError):
        store.read(f"{NAME}/left")


def test_listings_of_many_pages(front: FaultyStore, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PAGE", 3)
    store = bucket(prefix)
    names = [f"job.t0-v{number:08d}-0123456789abcdef" for number in range(5)]
    for name in names:
        write(store, name, {"one": b"1", "two": b"2"})
    front.fail("503", "GET", "continuation-token", times=2)
    assert store.versions() == names
    assert sum("continuation-token" in line for line in front.requests) == 4 + 2
    assert store.delete(names[2])
    assert store.versions() == names[:2] + names[3:]


def test_a_version_goes_beginning_with_its_manifest(front: FaultyStore, prefix: str) -> None:
    store = bucket(prefix, delays=BRIEF)
    write(store, NAME, {"one": b"1", "two": b"2"})
    front.fail("503", "DELETE", "two", times=10**6)
    with pytest.raises(StoreError):
        store.delete(NAME)
    assert store.versions() == [], "nobody begins to read it"
    front.calm()
    store.sweep(0.0)
    with pytest.raises(NotReadableError):
        store.read(f"{NAME}/two")
    assert store.delete(NAME) is False
