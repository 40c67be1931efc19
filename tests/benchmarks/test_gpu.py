"""What `make gpu` does when things go wrong; that its sections work is tests/e2e/test_gpu_kit.py's."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu.report import goals, markdown
from benchmarks.gpu.run import MINUTES, ROOT, SECTIONS, Run, Section, _rows
from tests.support.waiting import PATIENCE, until

HERE = {"torch": "2.11.0", "gpu": "a GPU", "gpus": 1, "python": "3.12.3", "cores": 16, "date": "2026-11-23"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    options = argparse.Namespace(device="cpu", tiny=True, out=tmp_path)
    return Run(options, {**os.environ, "PYTHONPATH": str(ROOT)}, time.monotonic() + 600)


def test_a_section_that_takes_too_long_is_ended_and_named(run: Run) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        run.section(Section("staging", 0.5, 0.0, (), "imports torch, which takes longer"))
        assert other.poll() is None, "it is none of the section's"
        other.communicate()
    found = {row["case"]: row["status"] for row in run.rows["staging"]}
    assert found == {"the rest": "timed out", "whole section": "ok"}
    mine = psutil.Process()
    assert not [child for child in mine.children() if "benchmarks.gpu.sections" in child.cmdline()]
    written = [json.loads(line) for line in (run.out / "gpu.jsonl").read_text().splitlines()]
    assert written == run.rows["staging"], "a run that is cut short has written what it knows"


ENDLESS = """
import sys, time
print("said", flush=True)
with open(sys.argv[1], "a") as stream:
    stream.write('{"section": "staging", "case": "known", "status": "ok"}\\n{"section": "sta')
time.sleep(600)
"""


class Endless(Run):
    """Its section reports a row, begins another one, and never ends."""

    def _command(self, name: str) -> list[str]:
        return [sys.executable, "-c", ENDLESS, str(self._lines)]


def test_a_run_that_is_killed_leaves_what_its_section_has_reported(run: Run) -> None:
    child = os.fork()
    if not child:
        Endless(run._options, run._env, time.monotonic() + 600).section(Section("staging", 600.0, 0.0, (), ""))
        os._exit(0)
    lines = run.out / "gpu.jsonl"
    until(lambda: lines.exists() and "sta" in lines.read_text().partition("\n")[2], "the second row")
    section = psutil.Process(child).children()[0]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    section.kill()
    assert "said" in (run.out / "gpu.log").read_text()
    assert [row["case"] for row in _rows(lines, 0)] == ["known"]
    assert lines.read_text().endswith("\n"), "the cut row is off, so that the next one has a line of its own"


def test_a_section_that_fails_is_reported_with_its_last_words(run: Run) -> None:
    run.section(Section("no_such_section", 60.0, 0.0, (), "fails at once"))
    (failed, _) = run.rows["no_such_section"]
    assert failed["status"] == "failed"
    assert "No module named 'benchmarks.gpu.sections.no_such_section'" in failed["why"]
    assert failed["why"].splitlines()[-1] in (run.out / "gpu.log").read_text()


def test_what_is_missing_is_named_and_costs_no_time(run: Run) -> None:
    run.section(Section("staging", 60.0, 0.0, ("json", "no_such_module"), "needs what is not there"))
    (skipped, _) = run.rows["staging"]
    assert (skipped["status"], skipped["why"]) == ("not installed", "no_such_module")
    assert not (run.out / "gpu.log").exists(), "no process was started"


def test_no_section_begins_when_the_time_is_over(tmp_path: Path) -> None:
    late = Run(argparse.Namespace(device="cpu", tiny=True, out=tmp_path), dict(os.environ), time.monotonic() + 6)
    late.section(Section("staging", 60.0, 0.0, (), "would take longer"))
    assert late.rows["staging"][0]["why"] == "no time is left"


def test_every_section_is_sure_of_its_time_and_what_matters_is_first() -> None:
    first = SECTIONS[:5]
    names = [section.name for section in first]
    assert names == ["importing", "mixed_precision", "training", "logprobs", "publication"]
    assert sum(section.sure for section in first) <= 60 * 5
    sure = sum(section.sure for section in SECTIONS)
    assert sure + 50 < 60 * MINUTES, "torch is imported, wheels are installed, and the report is written"
    assert all(section.sure <= section.limit for section in SECTIONS)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "trainning"], "--only trainning: no such section; there are importing, mixed_precision,"),
        (["--device", "cuda"], "no GPU that PyTorch can use is here; --device cpu --tiny rehearses without one"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(tmp_path: Path, arguments: list[str], text: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--out", str(tmp_path / "out"), *arguments]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=env, cwd=ROOT)
    assert done.returncode == 2
    assert text in done.stderr
    assert not (tmp_path / "out").exists()


FUSED = "width 1536, fused"
TITLES = {section.name: section.title for section in SECTIONS}


def rows(section: str, *found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    cases = [{"section": section, "case": f"case {i}", "status": "ok", **row} for i, row in enumerate(found)]
    return {section: [*cases, {"section": section, "case": "whole section", "status": "ok", "seconds_s": 12.3}]}


def test_goals_take_the_last_case_and_of_training_the_best() -> None:
    found = goals(
        rows("training", {"mfu": 0.3}, {"mfu": 0.5}, {"tokens_s": 9.0})
        | rows("logprobs", {"case": "width 3584, fused", "memory_ratio": 0.2, "time_ratio": 1.3}, {"time_ratio": 9.0})
        | rows("publication", {"pause_ms": 900.0, "encode_s": 3.0}, {"pause_ms": 61.0, "encode_s": 0.4})
    )
    assert [(goal["found"], goal["reached"]) for goal in found] == [
        (0.5, True), (None, None), (None, None), (0.2, False), (1.3, True), (61.0, False), (0.4, True)
    ]  # fmt: skip
    assert [(goal["found"], goal["reached"]) for goal in goals({})] == [(None, None)] * 7


def test_the_report_has_a_table_for_each_set_of_figures() -> None:
    found = rows(
        "logprobs", {"case": FUSED, "time_ratio": 1.25, "gb": 0.123456}, {}, {"status": "wrong", "why": "a\nb"}
    )
    text = markdown(HERE, "python -m benchmarks.gpu.run", TITLES, found, goals(found))
    assert text.splitlines()[0] == (
        "`python -m benchmarks.gpu.run`, 2026-11-23, a GPU, 16 cores, Python 3.12.3, PyTorch 2.11.0"
    )
    assert "| log-probs and loss of width 1536 in at most 1.35 times the time | 1.25 | yes |" in text
    assert "| a delta of 1.5B encoded in at most 0.4 s |  | not measured |" in text
    assert f"| {FUSED} | ok | 1.25 | 0.1235 |" in text
    assert "Right: case 1" in text
    assert "(`logprobs`, 12 s)" in text
    assert "| case 2 | wrong | a |" in text
