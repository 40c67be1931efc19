"""Rows that a replica reads itself are those of the lease, with which they come where its file is another one."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from controller.data.prepare import prepare
from controller.services.leases import row_of
from controller.state.job_facts import rows_files
from controller.state.prompts import Prompts
from rollout_worker.groups.local_rows import LocalRows
from schema.config import Config
from schema.wire.messages import RegisterReply
from schema.wire.prompts import PromptFileError
from tests.controller.data.conftest import model_dir, write
from tests.rollout_worker.test_bookkeeping import lease

__all__ = ["model_dir"]
ROWS = [
    {
        "prompt": f"question {i}",
        "answer": str(i),
        "who": f"You are {i}.",
        "tools": [],
        "kind": "ab"[i % 2],
        "n": {"i": i},
    }
    for i in range(12)
]


@pytest.fixture
def registered(tmp_path: Path, model_dir: Path) -> tuple[Prompts, RegisterReply]:
    """A run with prepared rows of two sources, and what a replica of it is answered."""
    data = write(tmp_path / "rows.jsonl", ROWS)
    policy = {
        "type": "grpo", "dataset": {"name": str(data), "test_size": 3}, "response_column_name": "answer",
        "system_prompt_column_name": "who", "domain_column_name": "kind", "domain_shares": {"a": 0.25, "b": 0.75},
    }  # fmt: skip
    config = Config.model_validate(
        {
            "policy": {"model_name_or_path": str(model_dir), "model_max_length": 100},
            "rollout": {"max_response_length": 20},
            "validation": {"enable": True},
            "train": {"train_policy": policy},
        }
    )
    run_dir = tmp_path / "run"
    prepare(config, run_dir)
    prompts = Prompts(run_dir / "data" / "train.safetensors", seed=7, shuffle=True, shares=config.shares)
    held_out = Prompts(run_dir / "data" / "validation.safetensors", seed=0, shuffle=False)
    files = rows_files(config, run_dir, prompts, held_out)
    assert files.keys() == {"train", "validation"}
    return prompts, RegisterReply.model_construct(run_dir=str(run_dir), rows_files=files)


def test_rows_are_those_of_the_lease(registered: tuple[Prompts, RegisterReply]) -> None:
    prompts, reply = registered
    rows = LocalRows.of(reply, Path(reply.run_dir))
    sizes = [source.rows for source in prompts.sources]
    places = [(data_pass, at, k) for data_pass in (0, 1) for k in (0, 1) for at in range(sizes[k])]
    for place in places:
        whole, named = (row_of(prompts, reads, *place) for reads in ((), rows.digests.values()))
        assert (named["prompt_token_ids"], named["row"]) == ([], {})
        filled = rows.fill(lease(**named))
        assert (filled.prompt_token_ids, filled.row) == (whole["prompt_token_ids"], whole["row"])
    assert row_of(prompts, ["0" * 64], 0, 0)["row"], "a replica that reads another file gets the row"
    with pytest.raises(PromptFileError):
        rows.fill(lease(row_index=1000))
    assert rows.digests == {}, "none is asked for by its number again"


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    shutil.move(path, path.parents[2] / path.name)
    path.symlink_to(path.parents[2] / path.name)


def other(path: Path) -> None:
    shutil.copy(path.with_name("validation.safetensors"), path)


FAULTS: dict[str, Callable[[Path], object]] = {
    "No such file": os.unlink,
    "has another hash": change,
    "does not lie in the run directory": link,
    "another hash": other,
}


@pytest.mark.parametrize("words", FAULTS)
def test_another_file_is_not_read(
    registered: tuple[Prompts, RegisterReply], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, reply = registered
    FAULTS[words](Path(reply.rows_files["train"].path))
    with caplog.at_level(logging.INFO):
        assert LocalRows.of(reply, Path(reply.run_dir)).digests == {}
    (record,) = caplog.records
    assert "prepared rows come with each lease" in record.getMessage()
    assert words in record.getMessage()
