"""Payloads in a shared directory: they pass by the controller, are checked by who reads them, and do not pile up."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controller.store import StoreUnavailable
from controller.store.payload_files import GRACE, PayloadFiles, needed
from rollout_worker.groups.pushing import SharedPayloads, _Entry
from schema.wire import messages as m
from schema.wire import payload_file
from schema.wire.frame import FrameError, encode_frame, read_metadata
from schema.wire.payload_file import FileName, read_entry, resolve
from schema.wire.sample import decode_sample, read_sample_metadata
from tests.controller.conftest import Stage
from tests.controller.drivers import Rollout, make_frame, make_header
from tests.controller.ledger.test_ledger import fill_each, lease, make, train
from tests.support.controller import make_config
from tests.support.waiting import until

NAME = FileName("e0-p3", "lease-1_x", 1)


def test_a_stub_says_what_its_frame_says_and_stands_for_it(tmp_path: Path) -> None:
    frame = make_frame(make_header(1, 4))
    stub = payload_file.write(tmp_path / "job", NAME, frame)
    assert read_sample_metadata(stub)[0] == read_sample_metadata(frame)[0]
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["e0-p3.lease-1_x.1"]
    assert bytes(resolve(tmp_path / "job", stub)) == frame
    assert resolve(None, frame) is frame
    entry = read_entry(stub)
    assert entry is not None
    assert payload_file.is_there(tmp_path / "job", entry)


def test_a_damaged_missing_or_unexpected_file_is_an_error(tmp_path: Path) -> None:
    frame = make_frame(make_header(1, 4))
    stub = payload_file.write(tmp_path, NAME, frame)
    path = tmp_path / str(NAME)
    for damaged in (frame[:-1] + bytes([frame[-1] ^ 1]), frame[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(FrameError, match="damaged"):
            resolve(tmp_path, stub)
    entry = read_entry(stub)
    assert entry is not None
    assert not payload_file.is_there(tmp_path, entry)
    path.unlink()
    with pytest.raises(FrameError, match="cannot be read"):
        resolve(tmp_path, stub)
    with pytest.raises(FrameError, match="payload_store"):
        resolve(None, stub)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd", "/etc/passwd", "e0-p0.x.0/..", "e0-p0.x.0\n", "e0-p0.x.00", "e٣-p0.x.0", "e0-p0..0",
        ".e0-p0.x.0", "e0-p0.a/b.0", "e0-p0.x.-1", "", "v1-p0.x.0", "e0-p0.x.0\0",
    ],
)  # fmt: skip
def test_no_stub_points_outside_of_the_directory(tmp_path: Path, name: str) -> None:
    assert FileName.parse(name) is None
    assert FileName.parse("e0-p17-s2.lease.3") == FileName("e0-p17-s2", "lease", 3)
    text = payload_file.StubEntry(name=name, n_bytes=8, hash="0" * 32).model_dump_json()
    stub = encode_frame({}, {"sample": "{}", "file": text})
    with pytest.raises(FrameError):
        resolve(tmp_path, stub)


@pytest.mark.parametrize("text", ["", "[]", '{"name":"e0-p0.x.0"}', '{"name":"e0-p0.x.0","n_bytes":-1,"hash":""}'])
def test_a_malformed_stub_is_a_frame_error(text: str) -> None:
    with pytest.raises(FrameError):
        read_entry(encode_frame({}, {"file": text}))


@pytest.mark.parametrize("job_id", ["", ".", "..", "a/b", "../x", "a\0"])
def test_a_job_without_a_name_for_a_directory_has_none(job_id: str) -> None:
    with pytest.raises(ValueError, match="directory"):
        payload_file.directory("/shared", job_id)


def test_which_files_may_still_be_read() -> None:
    ledger = make(keep_recent=0)
    first, second, third = lease(ledger, 3)
    ids = {group.id: group.lease_id or "" for group in (first, second, third)}

    def kept(name: str, age: float = 0.0) -> bool:
        return needed(ledger.table, f"{name}.{ids.get(name, 'x')}.0", age)

    assert kept(first.id, 10 * GRACE), "leased: its stub may be on the way"
    fill_each(ledger, [first, second])
    assert kept(first.id, 10 * GRACE)
    assert not needed(ledger.table, f"{first.id}.another.0", 0.0), "of a lease that did not deliver"
    train(ledger)
    assert not kept(first.id)
    ledger.release(ids[third.id])
    assert kept(third.id)
    assert not kept(third.id, 2 * GRACE)
    assert kept("e0-p9"), "this ledger may have lost history"
    assert not kept("e0-p9", 2 * GRACE)
    assert needed(ledger.table, "somebody's.txt", 1e9), "what is none of ours stays"
    assert needed(ledger.table, ".half-written", 1.0)
    assert not needed(ledger.table, ".half-written", 2 * GRACE)


def test_a_sweep_removes_after_the_ledger_is_stored(tmp_path: Path) -> None:
    ledger = make(keep_recent=0)
    (group,) = lease(ledger, 1)
    (tmp_path / "e5-p0.x.0").write_bytes(b"old")
    (tmp_path / f"{group.id}.{group.lease_id}.0").write_bytes(b"new")
    seen: list[int] = []

    async def saved() -> None:
        seen.append(len(list(tmp_path.iterdir())))  # noqa: ASYNC240

    now = [0.0]
    files = PayloadFiles(tmp_path, clock=lambda: now[0])
    os.utime(tmp_path / "e5-p0.x.0", (0, 0))
    assert asyncio.run(files.sweep(ledger.table, saved)) == 0, "the clock of its writer says nothing"
    now[0] = 2 * GRACE
    assert asyncio.run(files.sweep(ledger.table, saved)) == 1
    assert seen == [2]
    assert [path.name for path in tmp_path.iterdir()] == [f"{group.id}.{group.lease_id}.0"]
    assert asyncio.run(PayloadFiles(tmp_path / "none").sweep(ledger.table, saved)) == 0


def test_a_file_that_vanishes_while_it_is_listed_keeps_no_other(tmp_path: Path) -> None:
    """Replicas write beside and rename all the time."""
    for number in range(3):
        path = tmp_path / f"e5-p{number}.x.0"
        path.write_bytes(b"old")
    now = [0.0]
    files = PayloadFiles(tmp_path, clock=lambda: now[0])
    files._list()
    now[0] = 2 * GRACE
    over = threading.Event()

    def write_and_rename() -> None:
        while not over.is_set():
            payload_file.write(tmp_path, FileName("e5-p9", "busy", 0), make_frame(make_header(0, 0)))

    async def saved() -> None:
        pass

    writer = threading.Thread(target=write_and_rename)
    writer.start()
    try:
        until((tmp_path / "e5-p9.busy.0").exists, "the first file")
        for _ in range(200):
            names = {name for name, _ in files._list()}
            assert names >= {f"e5-p{number}.x.0" for number in range(3)}
        assert asyncio.run(files.sweep(make().table, saved)) == 3
    finally:
        over.set()
        writer.join()


class SharingRollout(Rollout):
    """A replica whose samples go through the directory."""

    root: Path

    @classmethod
    def of(cls, plain: Rollout, root: Path) -> SharingRollout:
        """A registered replica from now on."""
        sharing = cls(plain.client)
        sharing.__dict__.update(plain.__dict__, root=root)
        return sharing

    def bundle(self, groups: list[m.LeasedGroup], **changes: object) -> tuple[m.PushList, list[bytes]]:
        listed, frames = super().bundle(groups, **changes)
        leases = {group.lease_id: group for group in groups}
        entries = [
            _Entry(leases[item.lease_id], item.index, frame)
            for item, frame in zip(listed.pushes, frames, strict=True)
        ]
        return listed, SharedPayloads(self.root, 0).put(entries)


def test_payloads_pass_by_the_controller(stage: Stage, tmp_path: Path) -> None:
    served, trainer, plain = stage.at_work(make_config(controller={"payload_store": str(tmp_path / "shared")}))
    rollout = SharingRollout.of(plain, tmp_path / "shared" / served.job.job_id)
    reply = rollout.finish(rollout.lease(2).groups)
    assert all(result.accepted for result in reply.results)
    batch = trainer.batch(0)
    assert batch is not None
    assert all(len(frame) < 1024 for frame in batch[1])
    samples = [decode_sample(resolve(rollout.root, frame)) for frame in batch[1]]
    assert [sample.header.index for sample in samples] == [0, 1, 0, 1]
    name = batch[0].group_ids[0]
    shown = stage.client(served)._http.get(f"/v1/samples/{name}/0").content
    assert decode_sample(shown).header.index == 0
    trainer.commit(0)

    def swept() -> bool:
        served.run(served.controller.reaper.tick())
        return not list(rollout.root.iterdir())

    until(swept, "the sweep of what was trained")


def test_a_file_that_has_gone_is_made_again(stage: Stage, tmp_path: Path) -> None:
    served, trainer, plain = stage.at_work(make_config(controller={"payload_store": str(tmp_path / "shared")}))
    rollout = SharingRollout.of(plain, tmp_path / "shared" / served.job.job_id)
    rollout.finish(rollout.lease(2).groups)
    next(rollout.root.iterdir()).unlink()
    assert trainer.batch(0) is None
    (again,) = rollout.lease(1).groups
    rollout.finish([again])
    assert trainer.batch(0) is not None


def test_stubs_that_cannot_be_are_refused(stage: Stage, tmp_path: Path) -> None:
    served, _, rollout = stage.at_work(make_config(controller={"payload_store": str(tmp_path / "shared")}))
    root = tmp_path / "shared" / served.job.job_id
    (group,) = rollout.lease(1).groups
    header = make_header(0, 0)
    name = FileName(group.group_id, group.lease_id, 0)
    stub = payload_file.write(root, name, make_frame(header))
    another = payload_file.write(root, FileName(group.group_id, "other", 0), make_frame(header))
    refused = rollout.push(group, header, another)
    assert (refused.code, "is not that of this sample" in refused.detail) == (m.ErrorCode.BAD_FRAME, True)
    (root / str(name)).unlink()
    refused = rollout.push(group, header, stub)
    assert (refused.code, "must be the same directory" in refused.detail) == (m.ErrorCode.BAD_FRAME, True)
    (root / str(name)).write_bytes(make_frame(header))
    assert rollout.push(group, header, stub).accepted


def test_without_a_directory_stubs_are_refused(stage: Stage, tmp_path: Path) -> None:
    _, rollout = stage.ready(stage.serve())
    (group,) = rollout.lease(1).groups
    name = FileName(group.group_id, group.lease_id, 0)
    stub = payload_file.write(tmp_path, name, make_frame(make_header(0, 0)))
    refused = rollout.push(group, make_header(0, 0), stub)
    assert (refused.code, "payload_store is empty" in refused.detail) == (m.ErrorCode.BAD_FRAME, True)


def test_a_directory_that_cannot_be_written_is_passed_by(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    frame = make_frame(make_header(0, 0))
    group = m.LeasedGroup.model_construct(group_id="e0-p0", lease_id="x", kind="train")
    assert SharedPayloads(tmp_path / "file", 0).put([_Entry(group, 0, frame)]) == [frame]
    assert SharedPayloads(tmp_path / "new", len(frame) + 1).put([_Entry(group, 0, frame)]) == [frame]
    (stub,) = SharedPayloads(tmp_path / "new", len(frame)).put([_Entry(group, 0, frame)])
    assert "file" in read_metadata(stub)


def test_a_directory_that_hangs_holds_up_neither_the_clock_nor_a_call_for_ever(stage: Stage, tmp_path: Path) -> None:
    served = stage.serve(make_config(controller={"payload_store": str(tmp_path / "shared")}))
    stage.ready(served)
    released = threading.Event()
    stage.stack.callback(released.set)
    files = PayloadFiles(tmp_path, look_seconds=0.05)
    stub = payload_file.write(tmp_path, NAME, make_frame(make_header(1, 0)))

    async def hang() -> None:
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(1)
        loop.set_default_executor(threads)
        threads.submit(released.wait)  # as a thread that asks a server which is gone
        entry = read_entry(stub)
        assert entry is not None
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await files.missing([entry])

    served.run(hang())
    for _ in range(3):
        served.skip(1.0)
