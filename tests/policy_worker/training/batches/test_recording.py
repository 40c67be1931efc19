"""Batches that are kept while training goes on, whatever the disk does, and read again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from policy_worker.errors import BadBatchError
from policy_worker.training.batches.recording import BatchRecorder, RecordedBatches
from policy_worker.training.replay import check_same
from schema.wire import payload_file
from schema.wire.batch_file import Facts, path_of, read, recorded, write
from schema.wire.payload_file import FileName
from schema.wire.sample import encode_sample
from tests.policy_worker.material import make_table, random_samples

FACTS = Facts(job_id="job", total_steps=10, ranks=1, settings="", began_from="")
SAMPLES = random_samples(4)
FRAMES = [encode_sample(sample) for sample in SAMPLES]


def test_a_disk_that_fails_is_a_trouble_until_it_works_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "batches"
    folder.touch()
    recorder = BatchRecorder(folder, 4, FACTS)
    with caplog.at_level(logging.INFO):
        for step in (0, 1):
            recorder.keep(make_table(SAMPLES, step=step), FRAMES)
            assert f"profiler.record_batches: the batch of step {step} could not be written" in recorder.trouble()
        assert [record.levelname for record in caplog.records] == ["WARNING"], "once, not with every step"
        folder.unlink()
        recorder.keep(make_table(SAMPLES, step=2), FRAMES)
    assert recorder.trouble() == ""
    assert "recorded again, from step 2" in caplog.text
    assert recorded(folder) == [2]


def test_large_samples_are_copied_out_of_the_files_that_they_lie_in(tmp_path: Path):
    payloads, folder = tmp_path / "payloads", tmp_path / "batches"
    stub = payload_file.write(payloads, FileName("e0-p0", "lease", 0), FRAMES[0])
    recorder = BatchRecorder(folder, 4, FACTS, payloads)
    recorder.keep(make_table(SAMPLES), [stub, *FRAMES[1:]])
    (payloads / "e0-p0.lease.0").unlink()
    assert [bytes(frame) for frame in read(path_of(folder, 0))[1]] == FRAMES
    recorder.keep(make_table(SAMPLES, step=1), [stub, *FRAMES[1:]])
    assert "e0-p0.lease.0 cannot be read" in recorder.trouble()


def test_batches_are_read_by_rows(tmp_path: Path):
    write(tmp_path, make_table(SAMPLES, step=3), FRAMES, FACTS, keep=4)
    batches = RecordedBatches(tmp_path, bound=3)
    table = batches.poll(3)
    assert table == make_table(SAMPLES, step=3)
    found = batches.payloads(table, [2, 0])
    for row in (0, 2):
        assert found[row].segments[0].token_ids.tolist() == SAMPLES[row].token_ids.tolist()


def test_ranks_that_have_read_different_batches_say_so():
    check_same(3, ["a", "a", "a"])
    with pytest.raises(BadBatchError, match="rank 2 has read another batch of step 3 than rank 0"):
        check_same(3, ["a", "a", "b"])


def test_files_that_cannot_be_trained_on_are_refused_by_name(tmp_path: Path):
    batches = RecordedBatches(tmp_path, bound=3)
    with pytest.raises(BadBatchError, match=r"step 7, .*step-00000007\.safetensors, cannot be read: No such file"):
        batches.poll(7)
    for step in (3, 4):
        write(tmp_path, make_table(SAMPLES, step=step), FRAMES, FACTS, keep=4)
    with pytest.raises(BadBatchError, match="is 4 steps old"):
        batches.poll(4)
    batches.poll(3)
    write(tmp_path, make_table(SAMPLES, step=3), FRAMES, FACTS.model_copy(update={"job_id": "other"}), keep=4)
    with pytest.raises(BadBatchError, match="is of job other, the batches before it are of job"):
        batches.poll(3)
    write(tmp_path, make_table(SAMPLES, step=2), FRAMES[1:], FACTS, keep=4)
    with pytest.raises(BadBatchError, match="has 3 samples, its table 4"):
        batches.poll(2)
    path_of(tmp_path, 1).write_bytes(b"torn")
    with pytest.raises(BadBatchError, match=r"step-00000001\.safetensors is not a recorded batch"):
        batches.poll(1)
