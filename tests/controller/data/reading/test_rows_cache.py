"""Prepared rows that jobs keep for each other: used again, made anew where they are damaged, removed, two at once."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.data import prepare as preparation
from controller.data.prepare import parts_of, prepare, tokenizer_of
from controller.data.reading import rows_cache
from controller.data.reading.rows_cache import key_of
from schema.config import Config
from schema.wire import data_report
from tests.controller.data.conftest import GENERATION_TEMPLATE, PLAIN_TEMPLATE, save_tokenizer, write

OWN = """
class Rows:
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": str(i)}]}
"""
ROWS = [
    {
        "prompt": f"question {i}", "answer": "1",
        "conversations": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * i}],
    }
    for i in range(40)
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, model_dir: Path) -> Path:
    write(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


def job(place: Path, model: Path, kind: str = "sft", **keys: Any) -> Config:
    policy = {"type": kind, "enable_dataset_cache": True, "dataset_cache_dir": str(place / "cache")}
    policy["dataset"] = {"name": str(place / "rows.jsonl"), "test_size": 4}
    return Config.model_validate(
        {
            "policy": {"model_name_or_path": str(model), "model_max_length": 60},
            "rollout": {"max_response_length": 20},
            "validation": {"enable": True},
            "train": {"train_policy": policy | keys},
        }
    )


def files_of(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / "data").glob("*.safetensors")}


def report_of(run_dir: Path) -> data_report.DataReport:
    report = data_report.read(run_dir)
    assert report is not None
    return report


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_rows_are_used_again(
    place: Path, model_dir: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(job(place, model_dir, kind), place / "first")
    assert report_of(place / "first").cached == ""
    monkeypatch.setattr(preparation._Files, "read", None)  # nothing is prepared from here on
    with caplog.at_level(logging.INFO):
        assert prepare(job(place, model_dir, kind), place / "second") == first
    report = report_of(place / "second")
    assert report.files == report_of(place / "first").files
    assert f"rows of an earlier preparation are used: {report.cached}" in caplog.text
    assert files_of(place / "second") == files_of(place / "first")
    assert all(path.stat().st_nlink == 1 for path in (place / "cache" / "rows").iterdir()), "a run has its own"
    prepare(job(place, model_dir, kind), place / "third", report_only=True)
    assert (files_of(place / "third"), report_of(place / "third")) == ({}, report)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, change, Path.unlink])
@pytest.mark.parametrize("name", ["train", "validation", "json"])
def test_damage_is_seen(place: Path, model_dir: Path, harm: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    prepare(job(place, model_dir), place / "first")
    (path,) = (place / "cache" / "rows").glob(f"*.{name}")
    harm(path)
    prepare(job(place, model_dir), place / "second")
    assert ("cannot be used and are made anew" in caplog.text) == ((harm, name) != (Path.unlink, "json"))
    assert files_of(place / "second") == files_of(place / "first")
    prepare(job(place, model_dir), place / "third")
    report = report_of(place / "third")
    assert (report.cached != "", report.warnings) == (True, []), "the entry was mended"


def test_the_oldest_make_room(place: Path, model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = place / "cache" / "rows"
    prepare(job(place, model_dir), place / "first")
    (old,) = folder.glob("*.json")
    os.utime(old, (1, 1))
    size = sum(path.stat().st_size for path in folder.iterdir())
    prepare(job(place, model_dir, "grpo", dataset_cache_size=1.5 * size / 2**30), place / "second")
    (new,) = folder.glob("*.json")
    assert new != old
    assert not list(folder.glob(f"{old.stem}.*"))
    prepare(job(place, model_dir, dataset_cache_size=10 / 2**30), place / "third")
    assert "are not kept" in caplog.text
    assert list(folder.glob("*.json")) == [new]


def test_two_jobs_at_once(place: Path, model_dir: Path) -> None:
    started = []
    for name in ("first", "second"):
        (place / name).mkdir()
        (place / name / "config.json").write_text(job(place, model_dir).model_dump_json())
        command = [sys.executable, "-m", "controller.data.prepare", "--run-dir", str(place / name)]
        started.append(subprocess.Popen(command))
    assert [process.wait() for process in started] == [0, 0]
    prepare(job(place, model_dir), place / "third")
    assert report_of(place / "third").cached
    assert files_of(place / "first") == files_of(place / "second") == files_of(place / "third")


def test_what_a_key_is_of(place: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the keys of the configuration, which `tests/liveness` has."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    model = save_tokenizer(tmp_path / "model", PLAIN_TEMPLATE)

    def key(data: dict[str, Any]) -> str:
        cfg = job(place, model, dataset=data)
        return key_of(cfg, parts_of(cfg, place / "run"), tokenizer_of(cfg), 300, {})

    plain, classed = {"name": str(place / "rows.jsonl"), "test_size": 4}, {"custom_class": f"{own}:Rows"}
    classed |= {"test_size": 1}
    keys = [key(plain), key(classed)]
    assert [key(plain), key(classed)] == keys
    own.write_text(OWN + "# changed\n")
    keys.append(key(classed))
    write(place / "rows.jsonl", [*ROWS[:-1], ROWS[0]])
    keys.append(key(plain))
    write(place / "rows.jsonl", ROWS)
    save_tokenizer(model, GENERATION_TEMPLATE)
    keys.append(key(plain))
    settings = json.loads((model / "tokenizer.json").read_text())
    settings["added_tokens"][0]["lstrip"] = True
    (model / "tokenizer.json").write_text(json.dumps(settings))
    keys.append(key(plain))
    save_tokenizer(model, PLAIN_TEMPLATE)
    monkeypatch.setattr(rows_cache, "_code", lambda: "another version")
    keys.append(key(plain))
    assert len(set(keys)) == len(keys)
