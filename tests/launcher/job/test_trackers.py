"""The process that feeds trackers, as a job keeps it: with a real one, which is killed."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from launcher.job import trackers
from launcher.job.trackers import Trackers
from schema.util.backoff import Backoff
from schema.wire import event_file
from tests.launcher.samples import config
from tests.launcher.trackers.test_process import in_tensorboard
from tests.schema.wire.test_event_file import step
from tests.support.waiting import until


def test_a_process_that_was_killed_is_named_and_its_successor_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "BACKOFF", Backoff(0.1, 0.1))
    (tmp_path / "logs").mkdir()
    (tmp_path / "job_id").write_text("run-1")
    (tmp_path / "config.json").write_text(json.dumps({"logging": {"project_name": "mine", "experiment_name": "try"}}))
    file, state = event_file.path_of(tmp_path), tmp_path / "trackers" / "tensorboard.json"
    said: list[str] = []

    async def sent(event: int) -> None:
        def is_sent() -> bool:
            return state.exists() and json.loads(state.read_text())["event"] >= event

        await asyncio.to_thread(until, is_sent, f"event {event} is sent")

    async def run() -> None:
        fed = Trackers(config(logging={"logger": ["tensorboard"]}), tmp_path, os.environ, said.append)
        try:
            event_file.append(file, [step(1, 0, loss=0.5)])
            fed.start()
            await sent(1)
            assert fed._process is not None
            fed._process.kill()
            event_file.append(file, [step(2, 1, loss=0.25)])
            await sent(2)
            event_file.append(file, [step(3, 2, loss=0.125)])
            await fed.finish()
        finally:
            fed.kill()

    asyncio.run(run())
    assert [text.partition(" and")[0] for text in said] == ["trackers ended (killed by SIGKILL)"]
    assert in_tensorboard(tmp_path)["loss"] == {0: 0.5, 1: 0.25, 2: 0.125}


def test_a_process_that_cannot_be_started_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    said: list[str] = []

    async def run() -> None:
        logging = {"logger": ["tensorboard"], "tracker_python": str(tmp_path / "python")}
        fed = Trackers(config(logging=logging), tmp_path, os.environ, said.append)
        fed.start()
        await fed.finish()

    asyncio.run(run())
    assert said[-1].startswith("trackers ended (not started: ")
