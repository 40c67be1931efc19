"""Rows that several processes prepare are those that one does, and a process that dies is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from controller.data import prepare as preparation
from controller.data.errors import DataError
from controller.data.prepare import prepare
from controller.data.rows import Prepared
from controller.data.supervised import ConversationChunks
from schema.config import Config
from schema.wire import data_report
from schema.wire.prompts import PromptFile
from tests.controller.data.conftest import write


def config(model_dir: Path, data: Path, workers: int, kind: str = "sft", **keys: Any) -> Config:
    dataset = {"name": str(data), "test_size": 50}
    policy = {"type": kind, "dataset": dataset, "dataloader_num_workers": workers, **keys}
    return Config.model_validate(
        {
            "policy": {"model_name_or_path": str(model_dir), "model_max_length": 60},
            "rollout": {"max_response_length": 20},
            "train": {"train_policy": policy},
        }
    )


def conversations(n: int) -> list[dict[str, Any]]:
    """Rows of which some are too long, and of which some have a reference."""
    return [
        {
            "conversations": [
                {"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * (i % 40)},
            ],
            "prompt": "p" * (i % 50 + 1), "kind": "xyz"[i % 3], "when": {"i": i},
        }
        for i in range(n)
    ]  # fmt: skip


def everything(run_dir: Path) -> tuple[Any, ...]:
    file = PromptFile(run_dir / "data" / "train.safetensors")
    rows = [(file.token_ids(i).tolist(), file.row(i)) for i in range(len(file))]
    masks = [file.loss_mask(i).tolist() for i in range(len(file))] if file.row(0).get("prompt") is None else []
    sources = {name: numbers.tolist() for name, numbers in file.rows_by_source().items()}
    return rows, masks, sources, file.metadata, data_report.read(run_dir)


@pytest.mark.parametrize(("kind", "form"), [("sft", "jsonl"), ("grpo", "parquet"), ("grpo", "json")])
def test_the_number_of_processes_changes_nothing(model_dir: Path, tmp_path: Path, kind: str, form: str) -> None:
    data = write(tmp_path / f"rows.{form}", conversations(1200))
    shares = {"domain_column_name": "kind", "domain_shares": {"x": 0.25, "z": 0.75}} if kind == "grpo" else {}
    prepare(config(model_dir, data, 0, kind, **shares), tmp_path)
    alone = everything(tmp_path)
    assert 0 < len(alone[0]) < 1200
    prepare(config(model_dir, data, 2, kind, **shares, dataloader_prefetch_factor=1), tmp_path)
    assert everything(tmp_path) == alone


def test_a_process_that_dies_is_named(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(ConversationChunks):
        def __call__(self, batch: list[tuple[int, dict[str, Any]]]) -> Prepared:
            if batch[0][0] >= 512:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch)

    data = write(tmp_path / "rows.jsonl", conversations(1200))
    monkeypatch.setattr(preparation, "ConversationChunks", Killed)
    with pytest.raises(DataError, match="a process that prepares rows ended by signal SIGKILL"):
        prepare(config(model_dir, data, 2), tmp_path)
    assert not list((tmp_path / "data").glob("*.safetensors"))


def test_an_error_of_a_process_is_that_of_the_preparation(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(ConversationChunks):
        def __call__(self, batch: list[tuple[int, dict[str, Any]]]) -> Prepared:
            if batch[0][0] >= 512:
                raise DataError("rows.jsonl is damaged: copy it again")
            return super().__call__(batch)

    data = write(tmp_path / "rows.jsonl", conversations(1200))
    monkeypatch.setattr(preparation, "ConversationChunks", Fails)
    with pytest.raises(DataError, match=r"rows\.jsonl is damaged: copy it again"):
        prepare(config(model_dir, data, 2), tmp_path)


def test_processes_end_with_a_preparation_that_is_killed(model_dir: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", conversations(40_000))
    job = config(model_dir, data, 3, dataloader_prefetch_factor=1)
    (tmp_path / "config.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "controller.data.prepare", "--run-dir", str(tmp_path)]
    with subprocess.Popen(command) as preparation_process:
        children: list[str] = []
        while len(children) < 3:
            time.sleep(0.1)
            pid = preparation_process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        preparation_process.kill()
    deadline = time.monotonic() + 20
    while alive := [pid for pid in children if Path("/proc", pid).exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
