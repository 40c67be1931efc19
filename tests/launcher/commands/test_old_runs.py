"""Views of runs that an older version left, or a killed one: usable, or a clear sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.commands.plot import PlottedCurves
from schema.wire import event_file, sample_file
from tests.launcher.cli import cosmos
from tests.launcher.display.test_summary import full, result
from tests.launcher.samples import write_job
from tests.schema.wire.test_event_file import step
from tests.schema.wire.test_sample_file import record


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has finished, with what the first version wrote: no events, no samples, no report of its data."""
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    write_job(tmp_path).rename(path / "config.toml")
    (path / "config.json").write_text("{}")
    summary = result(path, full()).summary()
    del summary["data"]
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_every_view_of_an_old_run_is_of_use(run_dir: Path, tmp_path: Path) -> None:
    assert "data" not in cosmos("status", run_dir).says(0, "outcome: finished", "steps: 60 of 60").stdout
    assert json.loads(cosmos("status", run_dir, "--json", "--why").stdout)["state"] == "finished"
    cosmos("samples", run_dir).says(1, "run has kept no samples")
    assert json.loads(cosmos("samples", run_dir, "--json").stdout) == []
    cosmos("validate", run_dir / "config.toml").says(0, "is valid")
    cosmos("plot", run_dir, "-o", tmp_path / "old.png").says(0, "old.png: run")
    assert PlottedCurves.read(run_dir).metric("reward_mean")[0] == list(range(9))
    other = {**json.loads((run_dir / "summary.json").read_text()), "steps": [{"at": 1}]}
    (run_dir / "summary.json").write_text(json.dumps(other))
    cosmos("plot", run_dir).complains(2, "has no step to draw")


def test_half_lines_and_junk_of_a_killed_run_are_passed_over(run_dir: Path) -> None:
    event_file.append(event_file.path_of(run_dir), [step(1, 0, reward_mean=0.5), step(2, 1)])
    sample_file.Writer(sample_file.folder_of(run_dir), 10**6).append([record(0), record(0, 1)])
    other = b'{"id": 9, "at": 1, "kind": "step", "text": "of another version", "data": {}}\n'
    for path in (event_file.path_of(run_dir), *sample_file.folder_of(run_dir).iterdir()):
        first, second = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"\0\xff\x80\n" + first + other + second[:-20])
    assert PlottedCurves.read(run_dir).metric("reward_mean") == ([0], [0.5])
    assert len(json.loads(cosmos("samples", run_dir, "--json").stdout)) == 1
    cosmos("status", run_dir, "--why").says(0, "outcome: finished")


def test_a_sample_of_a_hundred_thousand_tokens_and_of_bytes_that_are_no_text(run_dir: Path) -> None:
    junk = bytes(range(256)).decode("latin-1") + "\ud800"
    long = record(0, answer=sample_file.cut("token " * 100_000), score=1.0)
    binary = record(0, 1, answer=sample_file.cut(junk), prompt=sample_file.cut(junk), score=0.0)
    sample_file.Writer(sample_file.folder_of(run_dir), 10**7).append([long, binary])
    shown = cosmos("samples", run_dir).says(0, "characters, shown by --full").stdout
    assert len(shown) < 5000
    assert not {chr(code) for code in range(32)} - {"\n", "\t"} & set(shown)
    assert "\x7f" not in shown
    whole = json.loads(cosmos("samples", run_dir, "--json").stdout)
    assert [row["answer"] for row in whole] == [long.answer, binary.answer]
    assert " characters …" in long.answer
