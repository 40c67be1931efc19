"""The process that feeds trackers, with the real libraries: what they stored is what the run's course is."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schema.wire import event_file, sample_file
from schema.wire.messages import Event
from tests.schema.wire.test_event_file import rewind, step, validation
from tests.schema.wire.test_sample_file import record as sample
from tests.support.waiting import PATIENCE, until

HEADER, FULL, LAST = 7, 1, 4
TABLES = {"log_validation_samples": 2, "log_training_samples": 1}
CONFIG = {"logging": {"project_name": "mine", "experiment_name": "try", **TABLES}, "train": {"seed": 1}}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "job_id").write_text("run-1")
    return tmp_path


def feeding(run_dir: Path, *names: str) -> subprocess.Popen[str]:
    """The process, started as the launcher does."""
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.trackers", str(run_dir), *names],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(run_dir / "trackers.log").open("ab"), text=True,
        env={**os.environ, "WANDB_MODE": "offline"},
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> str:
    """End it as the launcher does; what it said."""
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    return said


def add(run_dir: Path, *events: Event) -> None:
    event_file.append(event_file.path_of(run_dir), events)


def in_tensorboard(run_dir: Path) -> dict[str, dict[int, Any]]:
    """Scalars and tables by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    return {
        tag: {event.step: make_ndarray(event.tensor_proto)[()] for event in found.Tensors(tag)}
        for tag in found.Tags()["tensors"]
    }


def in_wandb(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """Rows of all offline runs, each with the id of its run, in the order of their writing."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        run_id = ""
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                run_id = record.run.run_id
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                rows.append((run_id, row))
    return rows


def records(data: bytes) -> Iterator[bytes]:
    """Records of a log of LevelDB: pieces with headers of seven bytes in blocks of 32 KiB; W&B's file is one."""
    at, block, whole = HEADER, 1 << 15, b""
    while at + HEADER <= len(data):
        if block - at % block < HEADER:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        at += HEADER
        if not kind:
            return
        whole += data[at : at + length]
        at += length
        if kind in (FULL, LAST):
            yield whole
            whole = b""


def test_tensorboard_and_wandb_have_the_course_of_the_run(run_dir: Path) -> None:
    said = [sample(1, rewards={"length": 2.0}), sample(0, kind="validation", group="v1-p0", score=None)]
    sample_file.Writer(sample_file.folder_of(run_dir), 10**6).append(said)
    add(run_dir, validation(1, 0), step(2, 0, loss=0.5), step(3, 1, loss=0.25))
    first = feeding(run_dir, "tensorboard", "wandb")
    states = [run_dir / "trackers" / f"{name}.json" for name in ("tensorboard", "wandb")]

    def sent(event: int) -> bool:
        return all(path.exists() and json.loads(path.read_text())["event"] >= event for path in states)

    until(lambda: sent(3), "the first steps are sent")
    add(run_dir, step(4, 2, loss=9.0), rewind(5, 1), step(6, 1, loss=0.125))
    assert end(first) == ""
    second = feeding(run_dir, "tensorboard", "wandb")  # a run that is resumed
    add(run_dir, step(7, 2, loss=0.0625))
    assert end(second) == ""
    course = event_file.course(event_file.read(event_file.path_of(run_dir)))
    losses = {record.step: record.metrics["loss"] for record in course.steps}
    assert losses == {0: 0.5, 1: 0.125, 2: 0.0625}
    tensorboard = in_tensorboard(run_dir)
    assert tensorboard["loss"] == losses
    assert tensorboard["validation/score"] == {0: 0.5}
    columns, row = tensorboard["train/samples"][1]
    values = dict(zip(columns.tolist(), row.tolist(), strict=True))
    assert (values[b"answer"], values[b"reward/length"]) == (b"    answer 1", b"    2.0")
    assert tensorboard["validation/samples"][0][1:, -1].tolist() == [b"    ValueError: no"]
    rows = [(run_id, row["step"], row["loss"]) for run_id, row in in_wandb(run_dir) if "loss" in row]
    assert rows[:2] == [("run-1", 0, 0.5), ("run-1", 1, 0.25)]
    tables = [(run, row["step"]) for run, row in in_wandb(run_dir) if "train/samples/_type" in row]
    assert tables == [("run-1", 1), ("run-1-1", 1)], "a run that begins anew gets the tables of steps that count"
    anew = [(run, at, loss) for run, at, loss in rows if run != "run-1"]
    assert anew == [("run-1-1", at, loss) for at, loss in losses.items()]


def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(run_dir: Path) -> None:
    add(run_dir, step(1, 0, loss=0.5))
    process = feeding(run_dir, "tensorboard", "trackio")
    until((run_dir / "trackers" / "tensorboard.json").exists, "tensorboard has the step")
    said = end(process)
    assert said.startswith("tracker trackio does not take metrics: ModuleNotFoundError")
    assert said.count("\n") == 1
    assert in_tensorboard(run_dir)["loss"] == {0: 0.5}
