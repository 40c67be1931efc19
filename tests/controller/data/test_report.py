"""The report of the data: what became of every row, lengths, bad rows at once, and the same in words."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from controller.data.errors import DataError
from controller.data.evaluation import main as read_answers
from controller.data.evaluation import prepare as read_all
from controller.data.prepare import main, prepare
from schema.config import Config
from schema.wire import data_report
from schema.wire.data_report import LISTED, NAMED, DataReport, FileReport, Rows, brief, lines
from tests.controller.data.conftest import write
from tests.controller.data.test_prepare import config

TALK = {"conversations": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}


def report_of(run_dir: Path) -> DataReport:
    found = data_report.read(run_dir)
    assert found is not None
    return found


def test_every_row_is_accounted_for(model_dir: Path, tmp_path: Path):
    texts = [*("q" * n for n in range(1, 9)), "", *(["x" * 500] * 7)]
    rows = [{"prompt": t, "answer": " " if i == 2 else "7"} for i, t in enumerate(texts)]
    path = write(tmp_path / "rows.jsonl", rows)
    cfg = config(model_dir, path, {"response_column_name": "answer"})
    assert prepare(cfg, tmp_path) == {"train": 8}
    report = report_of(tmp_path)
    found = report.files["train"]
    assert (report.error, report.warnings, report.bad) == ("", [], Rows())
    assert (found.source, found.read, found.kept) == (str(path), 16, 8)
    empty, long = found.left_out.values()
    assert empty == Rows(count=1, first=[f"{path}, row 9"])
    assert long == Rows(count=7, first=[f"{path}, row {n}" for n in range(10, 10 + NAMED)])
    assert found.empty_references == Rows(count=1, first=[f"{path}, row 3"])
    rendered = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert found.samples == [rendered.format("q" * n) for n in (1, 5, 8)], "the first, the middle, the last"
    assert found.lengths is not None
    around = len(rendered) - 2 - len("<|im_start|>" * 2) - len("<|im_end|>") + 3  # each special token is one
    assert (found.lengths.p50, found.lengths.p99, found.lengths.longest) == (around + 8, *[around + 500] * 2)
    assert (found.lengths.limit, found.lengths.reason[:23]) == (88, "policy.model_max_length")
    said = lines(report)
    assert said[0].startswith(f"train: 16 rows of {path}, 8 kept, 8 left out, 1 without a reference; tokens of")
    assert "train: 1 left out, an empty prompt: row 9" in said
    assert any(text.endswith("row 10, row 11, row 12, row 13, row 14, …") for text in said)
    assert brief(report) == (
        f"train: 16 rows of {path}, 8 kept, 8 left out, 1 without a reference, "
        f"the longest prompt {around + 500} of 88 tokens"
    )
    assert lines(report, samples=True)[-1] == "train, as the model reads it:\n" + found.samples[-1]


def test_only_the_report_is_written_on_request(model_dir: Path, tmp_path: Path):
    cfg = config(model_dir, write(tmp_path / "rows.jsonl", [TALK]), {"type": "sft"})
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    assert main(["--run-dir", str(tmp_path), "--report-only"]) == 0
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["report.json"]
    assert report_of(tmp_path).files["train"].kept == 1


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_all_bad_rows_are_named_at_once(model_dir: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture):
    good = {"prompt": "1+1?", "answer": "2", **TALK}
    bad = [
        {**good, "prompt": 5, "conversations": 5},
        {**good, "answer": None, "conversations": [{"role": "judge", "content": ""}]},
        {**good, "prompt": None, "conversations": None},
    ]
    path = write(tmp_path / "rows.jsonl", [good, *bad, good, *([bad[2]] * LISTED)])
    policy = {"type": "sft"} if kind == "sft" else {"response_column_name": "answer"}
    with pytest.raises(DataError, match=r"23 rows cannot be used \(20 of them .*; the first: .*rows.jsonl, row 2: "):
        prepare(config(model_dir, path, policy), tmp_path)
    assert sorted((tmp_path / "data").iterdir()) == [tmp_path / "data" / "report.json"]
    report = report_of(tmp_path)
    assert (report.bad.count, len(report.bad.first)) == (3 + LISTED, LISTED)
    for n in (2, 4):
        assert any(text.startswith(f"{path}, row {n}: ") for text in report.bad.first)
    assert report.error.startswith("23 rows cannot be used")
    named = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(named) == LISTED


def test_lines_that_cannot_be_read_are_bad_rows(model_dir: Path, tmp_path: Path):
    path, good = tmp_path / "rows.jsonl", b'\xef\xbb\xbf{"prompt": "1+1?", "responses": "\\ud83d\\ude00"}'
    wrong = {
        b'{"prompt": ': "Expecting value", b'{"prompt": "\xff"}': "can't decode byte 0xff",
        b'{"prompt": %s}' % (b"9" * 6000): "4300 digits", b"[" * 100_000: "recursion",
        b'{"prompt": "a", "other": "\\ud800"}': "surrogates", b"3": "not an object of columns but int",
    }  # fmt: skip
    path.write_bytes(b"\n".join([good, *wrong]))
    evaluation = {"dataset": {"name": str(path)}, "reward_function": "format"}
    for work, cfg in (
        (prepare, config(model_dir, path, {})),
        (read_all, Config.model_validate({"evaluation": evaluation})),
    ):
        with pytest.raises(DataError, match="6 rows cannot be used"):
            work(cfg, tmp_path)
        report = report_of(tmp_path)
        for n, (text, words) in enumerate(zip(report.bad.first, wrong.values(), strict=True), 2):
            assert text.startswith(f"{path}, line {n} is not ")
            assert words in text


def test_bad_answers_are_named_at_once(tmp_path: Path):
    rows = [{"prompt": "?", "responses": "1", "answer": "1"}, {"prompt": "?", "responses": 1}, {"responses": ""}]
    path = write(tmp_path / "rows.jsonl", rows)
    cfg = Config.model_validate({"evaluation": {"dataset": {"name": str(path)}, "reward_function": "format"}})
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    assert read_answers(["--run-dir", str(tmp_path)]) == 2
    report = report_of(tmp_path)
    assert [text.split()[2] for text in (t.replace(":", "") for t in report.bad.first)] == ["2", "3"]
    assert not (tmp_path / "data" / "evaluation.jsonl").exists()
    write(path, rows[:1])
    assert read_answers(["--run-dir", str(tmp_path), "--report-only"]) == 0
    assert not (tmp_path / "data" / "evaluation.jsonl").exists()
    assert read_answers(["--run-dir", str(tmp_path)]) == 0
    assert (tmp_path / "data" / "evaluation.jsonl").exists()


def test_what_ends_the_preparation_is_in_the_report(model_dir: Path, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": ""}])
    with pytest.raises(DataError):
        prepare(config(model_dir, path, {}), tmp_path)
    report = report_of(tmp_path)
    assert report.error == f"train: no row of {path} is left: 1 with an empty prompt"
    assert lines(report)[0].startswith(f"train: 1 rows of {path}, 0 kept, 1 left out")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format": 2}'])
def test_a_report_that_cannot_be_read_is_none(tmp_path: Path, text: str | None):
    if text is not None:
        DataReport(files={"train": FileReport(source="x")}).write(tmp_path)
        assert report_of(tmp_path).files["train"].source == "x"
        data_report.path_of(tmp_path).write_text(text)
    assert data_report.read(tmp_path) is None
