"""Data in buckets: the same rows as from a directory, copied once; what fails says so and loses nothing."""

from __future__ import annotations

import gzip
import io
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.data.errors import DataError
from controller.data.reading import cache, filesystems, remote
from controller.data.reading.filesystems import RemoteStore
from controller.data.reading.sources import RowSource, coverage_of, files_of, open_source
from schema.config import DatasetConfig
from schema.config.sections.dataset import CacheSettings
from schema.storage.address import parse_address
from schema.util.backoff import Backoff
from tests.support.gcs import running_cloud_storage
from tests.support.objects import CREDENTIALS, Gate, ObjectStore, running_objects

Put = Callable[[str, bytes], None]


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectStore]:
    with running_objects("data") as store:
        yield store


@pytest.fixture(scope="module")
def cloud() -> Iterator[Any]:
    with running_cloud_storage("data") as server:
        yield server


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of the test's own, and quick pauses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("AWS_PROFILE", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache, "SETTLED_S", -3600.0)  # files of the last second count as older ones
    monkeypatch.setattr(remote, "LIST_S", 0.3)
    monkeypatch.setattr(remote, "GIVE_UP_S", 0.3)
    monkeypatch.setattr(remote, "PAUSES", Backoff(first=0.05, most=0.1))


@pytest.fixture
def put(objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Writes objects of the bucket data of S3."""
    for name, value in objects.environment.items():
        monkeypatch.setenv(name, value)
    client = objects.client()
    return lambda key, content: client.put_object(Bucket="data", Key=key, Body=content)


@pytest.fixture
def put_gs(cloud: Any, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Writes objects of the bucket data of Google Cloud Storage."""
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    return lambda key, content: cloud.put("data", key, content)


def opened(name: str = "", role: str = "train", gib: float = 1.0, **keys: Any) -> RowSource:
    """A dataset as a process opens it that has asked for nothing yet."""
    remote.located.cache_clear()
    cache.FileCache._verified.clear()
    dataset = DatasetConfig(name=name, **keys)
    dataset.keep_in(CacheSettings(gib=gib))
    return open_source(dataset, role, 0)  # type: ignore[arg-type]


def rows(*arguments: Any, **keys: Any) -> list[Any]:
    return list(opened(*arguments, **keys).rows())


def parquet(values: list[int]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"p": values}), file)
    return file.getvalue()


@pytest.mark.parametrize("scheme", ["s3", "gs", "gcs"])
def test_a_bucket_is_read_as_a_directory_is(scheme: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    write: Put = request.getfixturevalue("put" if scheme == "s3" else "put_gs")
    base = f"{scheme}-rows"
    write(f"{base}/train-00000-of-00003.parquet", parquet([1, 2]))
    write(f"{base}/train-00001-of-00003.parquet", parquet([3]))
    write(f"{base}/level=2/test.jsonl.gz", gzip.compress(b'{"p": 4}\nbroken\n'))
    write(f"{base}/images/a.png", b"\x89PNG" * 1000)
    address = f"{scheme}://data/{base}"
    source = opened(f"{address}/")
    assert list(source.rows()) == [{"p": 1}, {"p": 2}, {"p": 3}]
    assert source.where(2) == f"{address}/train-00001-of-00003.parquet, row 1"
    report = coverage_of(source)
    assert report.unread == {"of the split test": [f"{address}/level=2/test.jsonl.gz"]}
    assert f"2 of 3 files of a set are read: {address}/train-00002-of-00003.parquet is" in report.remarks[0]
    good, bad = rows(address, "validation")
    assert good == {"p": 4, "level": "2"}
    assert bad.fault.startswith(f"{address}/level=2/test.jsonl.gz, line 2 is not valid JSON")
    assert rows(f"{address}/train-00001-of-00003.parquet") == [{"p": 3}]
    assert len(rows(files=[f"{address}/train-0000{n}-of-00003.parquet" for n in (1, 0)])) == 3
    fetched = [path for path in (tmp_path / "cache").rglob("copies/*") if path.suffix == "" and path.stat().st_size]
    assert len(fetched) == 3, "neither twice nor what is not read"
    with pytest.raises(DataError, match=rf"{address}/none: nothing is there"):
        opened(f"{address}/none")
    missing = "no such bucket" if scheme == "s3" else "nothing is there"
    with pytest.raises(DataError, match=rf"{scheme}://elsewhere/x: {missing}"):
        opened(f"{scheme}://elsewhere/x")
    with pytest.raises(DataError, match=f"{address} holds no data file of split 'x'"):
        opened(address, split="x")


def test_training_leaves_out_what_validation_reads(put: Put) -> None:
    put("apart/a.csv", b"p\n1\n")
    put("apart/b.csv", b"p\n2\n")
    held_out = DatasetConfig(files=["s3://data/apart/b.csv"])
    remote.located.cache_clear()
    source = open_source(DatasetConfig(name="s3://data/apart"), "train", 0, files_of(held_out, "validation"))
    assert list(source.rows()) == [{"p": "1"}]


def test_copies_are_read_again_and_damaged_or_old_ones_are_not(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("copies/a.csv", b"p\n1\n")
    reads: list[str] = []
    read = RemoteStore.read
    monkeypatch.setattr(RemoteStore, "read", lambda *args: reads.append(args[1].path) or read(*args))
    assert rows("s3://data/copies") == rows("s3://data/copies/a.csv") == [{"p": "1"}]
    assert reads == ["a.csv"]
    view = remote.located("s3://data/copies/a.csv", CacheSettings(gib=1.0)).path
    view.write_bytes(b"p\n9\n")
    assert rows("s3://data/copies") == [{"p": "1"}]
    assert reads == ["a.csv"] * 2
    monkeypatch.setattr(cache, "SETTLED_S", 3600.0)
    put("copies/a.csv", b"p\n2\n")  # of the same second and size, as the store dates it
    assert rows("s3://data/copies") == [{"p": "2"}]


def test_without_a_connection_copies_are_read_with_a_warning(
    put: Put, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put("offline/train.csv", b"p\n1\n")
    monkeypatch.setattr(cache, "SETTLED_S", 3600.0)
    put("offline/test.csv", b"p\n2\n")
    assert rows("s3://data/offline") == [{"p": "1"}]
    for name, value in (("HF_HUB_OFFLINE", "1"), ("AWS_ENDPOINT_URL", "http://127.0.0.1:9")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            caplog.clear()
            assert rows("s3://data/offline") == [{"p": "1"}]
            assert "s3://data/offline is read from copies of an earlier time" in caplog.text
            with pytest.raises(DataError, match=r"since .* lacks test.csv; .* fills the cache; without one, copy"):
                opened("s3://data/offline", "validation")
            with pytest.raises(DataError, match=r"the cache .* lacks all of it; .*dataset_cache_dir; docs/"):
                opened("s3://data/other")


def test_a_bucket_that_goes_away_is_waited_for_and_gone_on_with(
    put: Put, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "_BLOCK", 16 * 1024)
    content = b"p\n" + b"".join(b"%d\n" % n for n in range(100_000))
    put("away/train.csv", content)
    put("away/train-2.csv", b"p\nlast\n")
    gate = Gate(objects.port)
    gate.open()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
    offsets: list[int] = []
    read = RemoteStore.read

    def cut(store: RemoteStore, file: Any, offset: int, n: int) -> bytes:
        offsets.append(offset)
        if len(offsets) == 5:
            gate.shut()
            if remote.GIVE_UP_S > 1:  # a short absence passes
                threading.Timer(0.3, gate.open).start()
        return read(store, file, offset, n)

    monkeypatch.setattr(RemoteStore, "read", cut)
    with pytest.raises(DataError, match=r"s3://data/away: .* does not answer .* 1 of 2 files .* goes on there"):
        rows("s3://data/away")
    (partial,) = (tmp_path / "cache").rglob("partial/*")
    kept = partial.stat().st_size
    assert 64 * 1024 <= kept < len(content)
    offsets.clear()
    gate.open()
    monkeypatch.setattr(remote, "GIVE_UP_S", 30.0)
    whole = rows("s3://data/away")
    gate.shut()
    assert (whole[0], whole[-1], len(whole)) == ({"p": "last"}, {"p": "99999"}, 100_001)
    assert min(offsets) == kept


def test_a_file_that_changes_while_it_is_fetched_is_no_mixture(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_BLOCK", 1024)
    put("mixed/a.csv", b"p\n" + b"1\n" * 5000)
    read = RemoteStore.read

    def changing(store: RemoteStore, file: Any, offset: int, n: int) -> bytes:
        if offset == 4096:
            put("mixed/a.csv", b"p\n" + b"2\n" * 5000)
        return read(store, file, offset, n)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "read", changing)
        with pytest.raises(DataError, match=r"s3://data/mixed/a.csv has changed while it was fetched"):
            opened("s3://data/mixed")
    assert rows("s3://data/mixed") == [{"p": "2"}] * 5000


def test_several_processes_fetch_once(put: Put, tmp_path: Path) -> None:
    put("shared/a.parquet", parquet(list(range(200_000))))
    code = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from controller.data.reading import cache\n"
        "from controller.data.reading.sources import open_source\n"
        "from schema.config import DatasetConfig\n"
        "cache.SETTLED_S = -3600.0\n"
        "print(sum(1 for _ in open_source(DatasetConfig(name='s3://data/shared'), 'train', 0).rows()))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ended = [process.communicate(timeout=100) for process in processes]
    assert [out.strip() for out, _ in ended] == ["200000"] * 3, ended
    assert sum("fetching 1 files" in err for _, err in ended) == 1
    assert not list((tmp_path / "cache").rglob("partial/*"))


def test_old_copies_make_room_and_those_in_use_stay(
    put: Put, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to("disk")  # as directories of clusters are
    for name in "abc":
        put(f"room/{name}.csv", b"p\n" + b"1\n" * 400)
    code = (
        "from controller.data.reading.sources import open_source; from schema.config import DatasetConfig\n"
        "open_source(DatasetConfig(name='s3://data/room/a.csv'), 'train', 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    gib = 1000 / 2**30

    def sizes() -> list[int]:
        copies = (tmp_path / "cache").rglob("copies/*")
        return [size for path in copies if path.suffix == "" and (size := path.stat().st_size)]

    assert sizes() == [802]
    opened("s3://data/room/b.csv", gib=gib)
    assert sizes() == [802], "the process that has read a.csv has ended"
    assert not caplog.records or "running jobs" not in caplog.text
    opened("s3://data/room/c.csv", gib=gib)
    assert sizes() == [802, 802]
    assert "since running jobs use what is in it" in caplog.text
    (folder,) = (tmp_path / "disk").glob("*/rows")
    left = folder / "0f.train"  # of a process that was killed before it wrote the record
    left.touch()
    os.utime(left, (0, 0))
    cache.FileCache(folder.parent, 1).make_room(1)
    assert not left.exists()
    assert len(rows("s3://data/room/b.csv")) == 400


@pytest.fixture
def answering() -> Iterator[Any]:
    """A server that answers every request alike, and keeps what it was asked."""

    class Answers(BaseHTTPRequestHandler):
        status, body = 403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
        asked: list[str] = []  # noqa: RUF012

        def do_GET(self) -> None:
            self.asked.append(self.path)
            self.send_response(self.status)
            self.send_header("content-length", str(len(self.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(self.body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.answers = Answers  # type: ignore[attr-defined]
    yield server
    server.shutdown()
    server.server_close()


def test_refusals_are_errors_at_once_and_name_no_secret(
    answering: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{answering.server_port}"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="s3://data/x: access is denied: check AWS_ACCESS_KEY_ID") as error:
        opened("s3://data/x")
    assert "test-secret" not in str(error.value) + caplog.text
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(DataError, match="no credentials were found: set AWS_ACCESS_KEY_ID"):
        opened("s3://data/x")
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(DataError, match="correct AWS_PROFILE"):
        opened("s3://data/x")


def test_the_proxy_rule_is_that_of_weights(answering: Any, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put("proxied/a.csv", b"p\n1\n")
    monkeypatch.setenv("HTTP_PROXY", f"http://me:hidden@127.0.0.1:{answering.server_port}")
    assert rows("s3://data/proxied/a.csv") == [{"p": "1"}], "loopback goes straight"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example:9000")
    with pytest.raises(DataError, match="access is denied"):
        opened("s3://data/proxied")
    assert answering.answers.asked[-1].startswith("http://store.example:9000/data")
    answering.answers.status = 503
    with pytest.raises(DataError, match=r"does not answer through the proxy 127.0.0.1:\d+ of HTTP_PROXY") as error:
        opened("s3://data/proxied/b.csv")
    assert "hidden" not in str(error.value)
    n_asked = len(answering.answers.asked)
    monkeypatch.setenv("NO_PROXY", "store.example")
    with pytest.raises(DataError, match=r"http://store.example:9000 does not answer \("):
        opened("s3://data/proxied/b.csv")
    assert len(answering.answers.asked) == n_asked


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["odd/x/../../../evil/e.csv"], "has an empty part, or one of dots"),
        (["odd/a", "odd/a/b.csv"], "'a' is a file and, for others, a folder"),
    ],
)
def test_names_that_no_file_here_can_have_are_refused(put: Put, tmp_path: Path, keys: list[str], words: str) -> None:
    for key in keys:
        put(key, b"p\n1\n")
    with pytest.raises(DataError, match=words):
        opened("s3://data/odd")


@pytest.mark.parametrize(
    ("host", "cloud"),
    [("", "core.windows.net"), ("acct.dfs.core.windows.net", "core.windows.net"),
     ("acct.blob.core.chinacloudapi.cn", "core.chinacloudapi.cn")],
)  # fmt: skip
def test_an_address_of_azure_names_its_cloud(host: str, cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "a2V5")
    made: Any = filesystems._azure(parse_address(f"abfs://rows{f'@{host}' if host else ''}/a.csv"))
    arguments = str(made.__reduce__())
    assert all(text in arguments for text in ("acct", f".blob.{cloud}", f".dfs.{cloud}")), arguments


def test_hdfs_and_azure_say_what_they_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(
        DataError, match=r"hdfs://nn:8020/rows: libhdfs was not found: set JAVA_HOME, .*hdfs dfs -get"
    ):
        opened("hdfs://nn:8020/rows")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    with pytest.raises(DataError, match="names no account: set AZURE_STORAGE_ACCOUNT"):
        opened("abfs://container/rows")
    with pytest.raises(DataError, match="holds no credentials; remove the part before the `@`") as error:
        opened("s3://key:hidden@data/rows")
    assert "hidden" not in str(error.value)
