"""Uploads to S3 against moto's server: complete, checked, resumed where they stopped; failures say what to do."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from policy_worker.checkpoints.layout import Manifest, hash_of_file, write_manifest
from policy_worker.checkpoints.uploads.s3 import MARKER, S3Target
from policy_worker.checkpoints.uploads.uploader import Uploader, is_wanted
from policy_worker.errors import SettingsError, UploadFailedError
from tests.support.objects import CREDENTIALS, LEAST_PART, Gate, ObjectStore
from tests.support.ports import free_port
from tests.support.uploaded import check_uploaded
from tests.support.waiting import PATIENCE, until
from weight_sync.stores.patience import Delays

BUCKET = "cosmos-tests"
PART = 4 * LEAST_PART
HALF_WAY = 5 * PART + PART // 2
"""Bytes of a file of six parts, four of which travel at once: two or more have arrived whole, and not all."""
QUICK = Delays(give_up=1.0, first=0.05, most=0.2)
PATIENT = Delays(give_up=PATIENCE, first=0.05, most=0.2)


@pytest.fixture
def objects(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    use(object_store, monkeypatch)
    return object_store


@contextmanager
def half_way(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A door in front of the store in which an upload of six parts stops until it is shut and opened again."""
    gate = Gate(store.port, limit=HALF_WAY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
    gate.open()
    try:
        yield gate
    finally:
        gate.shut()


def use(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def checkpoint(run_dir: Path, step: int, size: int = PART + 1000) -> Path:
    """A directory like a checkpoint: a large file, a small one, one further down."""
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    (path / "export").mkdir(parents=True)
    block = hashlib.sha256(str(step).encode()).digest()
    (path / "state.safetensors").write_bytes((block * (size // 32 + 1))[:size])
    (path / "export" / "config.json").write_text("{}")
    seal(path, step)
    return path


def seal(path: Path, step: int) -> None:
    """Write the manifest of what is there now."""
    (path / "manifest.json").unlink(missing_ok=True)
    files = {str(file.relative_to(path)): hash_of_file(file) for file in path.rglob("*") if file.is_file()}
    facts = Manifest(
        step=step, timeline=0, lineage=[(0, 0)], world=1, written_at=1.0, architecture="Model", contents=["model"],
        exported=True, schedule=None, data=None, files=files,
    )  # fmt: skip
    write_manifest(path, facts)


def uploader(run_dir: Path, delays: Delays = QUICK, upload: str = "all") -> Uploader:
    stop = threading.Event()
    target = S3Target(BUCKET, "some/where", run_dir.name, stop, delays, PART)
    return Uploader([target], run_dir, stop, lambda _, final: is_wanted(upload, final))


def run_of(tmp_path: Path) -> Path:
    """A run of its own: the bucket is shared."""
    path = tmp_path / tmp_path.name
    path.mkdir()
    return path


def check_arrived(store: ObjectStore, run_dir: Path, path: Path) -> None:
    check_uploaded(store, BUCKET, f"some/where/{run_dir.name}/{path.name}", path)


def test_a_checkpoint_arrives_whole_and_only_once(
    objects: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 20)
    first = uploader(run_dir)
    first.probe(strict=True)
    assert f"s3://{BUCKET}/some/where/{run_dir.name}/" in caplog.text, "where uploads go"
    first.offer(path, 20, final=False)
    assert first.holds(path)
    first.finish(PATIENCE)
    assert not first.holds(path)
    assert first.trouble() == ""
    check_arrived(objects, run_dir, path)
    first.close()
    written = marker_time(objects, run_dir, path)
    second = uploader(run_dir)
    second.resume()
    second.offer(path, 20, final=False)
    second.finish(PATIENCE)
    second.close()
    assert marker_time(objects, run_dir, path) == written, "nothing is sent again"


def marker_time(store: ObjectStore, run_dir: Path, path: Path) -> Any:
    key = f"some/where/{run_dir.name}/{path.name}/{MARKER}"
    return store.client().head_object(Bucket=BUCKET, Key=key)["LastModified"]


def test_only_the_final_model_where_that_is_asked(objects: ObjectStore, tmp_path: Path) -> None:
    run_dir = run_of(tmp_path)
    final = run_dir / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    one = uploader(run_dir, upload="final")
    one.offer(checkpoint(run_dir, 5, 100), 5, final=False)
    one.offer(final, 5, final=True)
    one.resume()
    one.finish(PATIENCE)
    one.close()
    keys = [key for key in objects.keys(BUCKET) if f"/{run_dir.name}/" in key]
    assert keys == [f"some/where/{run_dir.name}/final/{name}" for name in (MARKER, "config.json")]


def test_a_checkpoint_of_another_timeline_replaces_the_old_one(objects: ObjectStore, tmp_path: Path) -> None:
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 20)
    one = uploader(run_dir)
    one.offer(path, 20, final=False)
    one.finish(PATIENCE)
    (path / "state.safetensors").write_bytes(b"new" * 40_000)
    seal(path, 20)
    one.offer(path, 20, final=False)
    one.finish(PATIENCE)
    one.close()
    check_arrived(objects, run_dir, path)


def test_a_checkpoint_that_nobody_could_offer_is_found(objects: ObjectStore, tmp_path: Path) -> None:
    """Killed between the rename and the offer."""
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 7, 1000)
    (path.parent / f"{path.name}.keep").mkdir()  # somebody's copy
    check_resumed(objects, run_dir, path)


def test_a_record_of_a_deleted_checkpoint_goes_and_half_a_record_begins_again(
    objects: ObjectStore, tmp_path: Path
) -> None:
    run_dir = run_of(tmp_path)
    records, path = run_dir / "uploads", checkpoint(run_dir, 4, 100)
    records.mkdir()
    for name in ("step-00000003", path.name):
        (records / f"{name}.s3.json").write_text("half a rec")
    check_resumed(objects, run_dir, path)
    assert [file.name for file in records.iterdir()] == [f"{path.name}.s3.json"]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_copied(objects: ObjectStore, tmp_path: Path) -> None:
    run_dir = run_of(tmp_path)
    damaged, path = checkpoint(run_dir, 3, 1000), checkpoint(run_dir, 4, 1000)
    with (damaged / "state.safetensors").open("r+b") as stream:
        stream.write(b"flipped")
    trouble = check_resumed(objects, run_dir, path)
    assert f"{damaged / 'state.safetensors'} was altered" in trouble
    assert [key for key in objects.keys(BUCKET) if f"{run_dir.name}/{damaged.name}/" in key] == []


@pytest.mark.slow
def test_a_checkpoint_that_is_replaced_under_way_is_never_called_complete(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fall-back to an older checkpoint came to the same step again while its first version was on its way."""
    run_dir = run_of(tmp_path)
    path, newer = checkpoint(run_dir, 20, 6 * PART), checkpoint(tmp_path / "newer", 20, 2 * PART)
    with half_way(objects, monkeypatch) as gate:
        one = uploader(run_dir, PATIENT)
        one.offer(path, 20, final=False)
        wait_for_parts(run_dir)
        path.rename(tmp_path / "old")
        newer.rename(path)
        one.offer(path, 20, final=False)
        gate.shut()
        gate.open()
        one.finish(PATIENCE)
        one.close()
    assert one.trouble() == ""
    check_arrived(objects, run_dir, path)


@pytest.mark.slow
def test_a_model_that_is_exported_again_is_not_sent_again(objects: ObjectStore, tmp_path: Path) -> None:
    """A run whose last upload failed comes to its end once more, with the same weights."""
    run_dir = run_of(tmp_path)
    final = run_dir / "final"
    for _ in range(2):
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        (final / "model.safetensors").write_bytes(b"weights" * 1000)
        one = uploader(run_dir, upload="final")
        one.offer(final, 20, final=True)
        one.finish(PATIENCE)
        one.close()
        marked = marker_time(objects, run_dir, final)
    check_arrived(objects, run_dir, final)
    (final / "model.safetensors").write_bytes(b"Weights" * 1000)
    again = uploader(run_dir, upload="final")
    again.offer(final, 20, final=True)
    again.finish(PATIENCE)
    again.close()
    assert marker_time(objects, run_dir, final) >= marked
    check_arrived(objects, run_dir, final)


GONE = b"<Error><Code>NoSuchUpload</Code><Message>It may have been completed.</Message></Error>"
REFUSAL = b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(GONE), GONE)


class Forgetful(Gate):
    """A way to a store that forgets an upload once it is complete; its first answer to that gets lost."""

    lost = False

    def _copy(self, source: socket.socket, sink: socket.socket, inwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not (inwards and data.startswith(b"POST ") and b"?uploadId=" in data):
                    sink.sendall(data)
                    continue
                while not is_whole(data):
                    data += source.recv(65536)
                if self.lost:
                    source.sendall(REFUSAL)
                    continue
                self.lost = b"</CompleteMultipartUploadResult>" in self._answer(data)
                source.shutdown(socket.SHUT_RDWR)
                return

    def _answer(self, request: bytes) -> bytes:
        """What the store says, to the end of the answer."""
        answer = b""
        with socket.create_connection(("127.0.0.1", self.target), timeout=PATIENCE) as store:
            store.sendall(request)
            while b"</CompleteMultipartUploadResult>" not in answer and (data := store.recv(65536)):
                answer += data
        return answer


def is_whole(request: bytes) -> bool:
    """Whether the body is as long as the head says."""
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    return length is not None and len(body) >= int(length[1])


def test_a_store_that_hangs_keeps_nobody_from_leaving(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 20, 6 * PART)
    with half_way(objects, monkeypatch) as gate:
        one = uploader(run_dir, PATIENT)
        one.offer(path, 20, final=True)
        until(lambda: gate.full, "half of the upload")
        names = ("uploads", "store-worker")
        uploading = [thread for thread in threading.enumerate() if thread.name in names]
        assert len(uploading) > 1
        assert all(thread.daemon for thread in uploading), "the interpreter would wait for them"
        gate.shut()
        one.close(PATIENCE)


@pytest.mark.slow
def test_an_answer_that_is_lost_costs_nothing(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Forgetful(objects.port)
    gate.open()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 20)
    one = uploader(run_dir, PATIENT)
    one.offer(path, 20, final=True)
    one.finish(PATIENCE)
    one.close()
    gate.shut()
    assert gate.lost, "the upload was complete, and nobody knew"
    check_arrived(objects, run_dir, path)


PROGRAM = """
import logging, sys
from pathlib import Path
from tests.policy_worker.checkpoints.uploads.test_s3 import uploader, PATIENCE, PATIENT
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
run_dir = Path(sys.argv[1])
one = uploader(run_dir, PATIENT)
one.offer(run_dir / "checkpoints" / "step-00000020", 20, final=False)
one.resume()
one.finish(PATIENCE)
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_sends_no_finished_part_again(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 20, 6 * PART)
    command = [sys.executable, "-c", PROGRAM, str(run_dir)]
    with half_way(objects, monkeypatch), subprocess.Popen(command, stderr=subprocess.DEVNULL) as killed:
        try:
            wait_for_parts(run_dir)
        finally:
            killed.send_signal(signal.SIGKILL)
    use(objects, monkeypatch)
    (upload,) = objects.client().list_multipart_uploads(Bucket=BUCKET, Prefix=f"some/where/{run_dir.name}")["Uploads"]
    prefix = f"some/where/{run_dir.name}/step-00000020"
    assert f"{prefix}/{MARKER}" not in objects.keys(BUCKET)
    listed = objects.client().list_parts(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])["Parts"]
    there = sum(part["Size"] == PART for part in listed)
    assert 2 <= there < 6
    sent = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    reported = re.search(r"state\.safetensors: (\d) of 6 parts are to be sent", sent.stderr)
    assert reported is not None
    assert int(reported[1]) <= 6 - there
    check_arrived(objects, run_dir, path)


def wait_for_parts(run_dir: Path) -> None:
    """Until two parts of a checkpoint's file have arrived, according to the uploader's record."""

    def arrived() -> bool:
        try:
            files = json.loads((run_dir / "uploads" / "step-00000020.s3.json").read_text())["files"]
        except (OSError, ValueError):
            return False
        return len(files.get("state.safetensors", {}).get("etags", {})) >= 2

    until(arrived, "two parts in the store")


@pytest.mark.slow
def test_a_store_that_is_away_is_waited_for(
    objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 20, 6 * PART)
    with half_way(objects, monkeypatch) as gate:
        one = uploader(run_dir, PATIENT)
        one.offer(path, 20, final=True)
        until(lambda: gate.full, "half of the upload")
        gate.shut()
        until(lambda: "does not answer" in caplog.text, "an attempt in vain")
        assert one.holds(path)
        gate.open()
        one.finish(PATIENCE)
        one.close()
    check_arrived(objects, run_dir, path)


@pytest.mark.slow
def test_a_store_that_was_killed_and_forgot_gets_all_of_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(free_port())
    use(store, monkeypatch)
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 20, 6 * PART)
    store.start()
    try:
        store.client().create_bucket(Bucket=BUCKET)
        with half_way(store, monkeypatch):
            one = uploader(run_dir)
            one.offer(path, 20, final=True)
            wait_for_parts(run_dir)
            store.kill()
        with pytest.raises(UploadFailedError, match="does not answer"):
            one.finish(PATIENCE)
        one.close()
        use(store, monkeypatch)
        store.start()
        store.client().create_bucket(Bucket=BUCKET)
        check_resumed(store, run_dir, path)
    finally:
        store.kill()


def check_resumed(store: ObjectStore, run_dir: Path, path: Path) -> str:
    """A new process sends what the one before did not. Its trouble."""
    again = uploader(run_dir)
    again.resume()
    again.finish(PATIENCE)
    again.close()
    check_arrived(store, run_dir, path)
    return again.trouble()


@pytest.mark.slow
def test_a_store_that_stays_away_fails_the_final_upload_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObjectStore(free_port())
    use(store, monkeypatch)
    run_dir = run_of(tmp_path)
    path = checkpoint(run_dir, 20, 100)
    one = uploader(run_dir)
    with pytest.raises(SettingsError, match=rf's3_bucket = "{BUCKET}": .*{store.port} does not answer.*AWS_ENDPOINT'):
        one.probe(strict=True)
    one.probe(strict=False)
    one.offer(path, 20, final=False)
    one.finish(PATIENCE)
    assert "step-00000020 to s3 failed" in one.trouble()
    one.offer(path, 20, final=True)
    with pytest.raises(UploadFailedError, match="--resume"):
        one.finish(PATIENCE)
    one.close()
    assert path.is_dir()
    store.start()
    try:
        store.client().create_bucket(Bucket=BUCKET)
        check_resumed(store, run_dir, path)
    finally:
        store.kill()
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in caplog.text


def test_finish_does_not_wait_for_ever_nor_for_one_who_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(ObjectStore(free_port()), monkeypatch)
    run_dir = run_of(tmp_path)
    one = uploader(run_dir, PATIENT)
    one.offer(checkpoint(run_dir, 1, 10), 1, final=True)
    assert not one.finish(PATIENCE, leaving=lambda: True)
    with pytest.raises(UploadFailedError, match="not uploaded within 0 s: step-00000001 to s3"):
        one.finish(0.2)
    one.close()


def test_a_probe_names_key_and_remedy(objects: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    missing = S3Target("no-such-bucket", "", "run", stop, QUICK)
    with pytest.raises(SettingsError, match=r'train\.ckpt\.s3_bucket = "no-such-bucket": .*no such bucket'):
        missing.probe()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(SettingsError, match="no credentials were found: set AWS_ACCESS_KEY_ID"):
        S3Target(BUCKET, "", "run", stop, QUICK).probe()
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(SettingsError, match="nobody"):
        S3Target(BUCKET, "", "run", stop, QUICK)


def test_nothing_to_upload_is_nothing_to_do(tmp_path: Path) -> None:
    none = Uploader([], tmp_path, threading.Event())
    none.probe(strict=True)
    none.offer(tmp_path, 1, final=True)
    none.resume()
    none.finish(0.0)
    none.close()
    assert not none.holds(tmp_path)
    assert list(tmp_path.iterdir()) == []
