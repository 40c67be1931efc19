"""`try-reward`: real rows through real reward processes, without a model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.commands.try_reward import examples, lines, read_answers
from launcher.errors import LaunchError
from tests.launcher.cli import ROOT, cosmos
from tests.launcher.samples import write_job
from tests.support.waiting import until

REWARD = r"""
import os

def last(completion, row, word):
    print("looking at", row["key"])
    assert completion != "\u2028", "\u2029"
    return float(completion.split()[-1] == row["answer"]) if os.environ["JUDGE"] == word else 0.5
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job whose model is not there, with a reward of its own beside the built-in one."""
    path = write_job(tmp_path, '[custom]\nword = "strict"\n[reward]\nenvironment = ["JUDGE"]')
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    text = path.read_text().replace('"boxed_math"', f'{{ "{tmp_path}/reward.py:last" = 2.0, boxed_math = 1.0 }}')
    path.write_text(text)
    return path


def test_the_reference_and_an_empty_answer_are_scored_and_what_fails_is_shown(job: Path) -> None:
    shown = cosmos("try-reward", job, cwd=job.parent, JUDGE="strict").says(
        1, "train/0: 1 + 1 = ?", "the row has key, prompt, answer", "last × 2", "boxed_math × 1",
        "printed by the functions:\n  looking at train/0", "error 1: IndexError: list index out of range",
        "in reward function", "1 of 4 answers could not be scored",
    )  # fmt: skip
    cells = [line.split() for line in shown.stdout.splitlines() if line.startswith("  ")]
    assert [row[-4:-1] for row in cells if row[0] == "reference"] == [["1", "0", "2"]]
    assert [row[-4:-1] for row in cells if row[0] == "boxed"] == [["0", "1", "1"]]


def test_answers_of_the_user_for_a_program(job: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 +\u2028 1", "answer": "2"}\n' * 2)
    file.write_text('{"completion": "it\x85is 2"}\n"\u2028"\n')  # all of them are new lines to str.splitlines
    found: dict[str, Any] = json.loads(
        cosmos("try-reward", job, "--answers", file, "--json", JUDGE="strict").says(1).stdout
    )
    answer, failed = found["answers"]
    assert "AssertionError: \u2029" in failed["error"]
    assert (answer["row"], answer["kind"], answer["completion"]) == ("train/0", "given", "it\x85is 2")
    assert answer["score"] == sum(weight * answer["rewards"][name] for name, weight in found["functions"].items())
    assert (answer["score"], answer["error"], answer["seconds"] >= 0) == (2.0, None, True)
    assert found["printed"] == ["looking at train/0", "looking at train/1"]


def test_what_cannot_be_tried_is_named(job: Path, tmp_path: Path) -> None:
    cosmos("try-reward", job).complains(2, "reward.environment[0]: JUDGE is not set", "export JUDGE=")
    both = ("--completion", "x", "--answers", "y.jsonl")
    cosmos("try-reward", job, *both).complains(2, "exclude each other")
    file = tmp_path / "answers.jsonl"
    for text, words in (
        ("", "holds no answer"),
        ("{", "line 1 is not JSON"),
        ('"a"\n{"text": "b"}', "line 2 holds no answer"),
    ):
        file.write_text(text)
        cosmos("try-reward", job, "--answers", file).complains(2, words)
    for text in ('"\\ud800"', "9" * 6000, "[" * 100_000):
        file.write_text(text)
        with pytest.raises(LaunchError, match="line 1 is not JSON"):
            list(read_answers(file))
    cosmos("init", "sft", "--gpus", 0, "-o", tmp_path / "sft.toml").says(0)
    cosmos("try-reward", tmp_path / "sft.toml").complains(2, "trains on conversations, without rewards")


def test_a_signal_ends_the_step_and_leaves_nothing(job: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "import os, time\n"
        "def last(completion, row):\n"
        '    open("pids.new", "w").write(f"{os.getppid()} {os.getpid()}")\n'
        '    os.replace("pids.new", "pids")\n'
        "    time.sleep(10)\n"
    )
    (tmp_path / "temporary").mkdir()
    env = {**os.environ, "JUDGE": "", "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "launcher.cli", "try-reward", str(job)]
    with subprocess.Popen(command, cwd=tmp_path, env=env) as trying:
        pids = until((tmp_path / "pids").exists, "the reward") and (tmp_path / "pids").read_text().split()
        assert list((tmp_path / "temporary").iterdir())
        trying.terminate()
    assert trying.returncode == 128 + signal.SIGTERM
    assert list((tmp_path / "temporary").iterdir()) == []
    until(lambda: not any(Path("/proc", pid).exists() for pid in pids), "the end of the step's processes")


def test_a_fault_of_data_or_function_is_that_of_its_process(job: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("1 / 0\ndef last(completion, row): ...\n")
    cosmos("try-reward", job, JUDGE="").complains(2, "reward.py cannot be loaded: ZeroDivisionError")
    (tmp_path / "answers.jsonl").write_text('"a"\n"b"\n')
    cosmos("try-reward", job, "--answers", tmp_path / "answers.jsonl", JUDGE="").complains(2, "has 2 answers, and")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1 + 1 = ?", "answer": null}\n')
    cosmos("try-reward", job, JUDGE="").complains(2, "data.jsonl, row 1: `answer` is empty")


def test_examples_show_the_forms_in_which_an_answer_may_be_given() -> None:
    assert examples({"answer": "6 * 7 = 42\n#### 42"}) == {
        "reference": "6 * 7 = 42\n#### 42",
        "boxed": "<think>…</think>\\boxed{42}",
        "####": "#### 42",
        "empty": "",
    }
    assert examples({"answer": None}) == examples({}) == {"empty": ""}


def test_an_error_that_is_the_same_is_written_once() -> None:
    answer = {"row": "train/0", "kind": "given", "completion": "x" * 99, "rewards": {"f": 1.0}, "score": None}
    failed = [{**answer, "seconds": 0.5, "error": error} for error in ("no", "no", "never")]
    row = {"key": "train/0", "prompt": [{"role": "user", "content": "why?"}]}
    text = list(lines({"f": 1.0, "g": 0.5}, [row], failed, []))
    assert text[0] == "train/0: why?"
    assert [line.split()[-1] for line in text if line.startswith("  given")] == ["1", "1", "2"]
    assert [line for line in text if line.startswith("error")] == ["error 1: no", "error 2: never"]
    assert text[-1] == "3 of 3 answers could not be scored"
