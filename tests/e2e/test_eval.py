"""`cosmos-launch eval` of two models: interrupted, gone on with, shown again, and its answers scored once more."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.make_model import make_model
from tests.e2e.program import COMMAND, command, write_config
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.e2e

REWARD = '''
import os
import time


def score(completion, row, folder):
    """1 where the reference is odd; from the sixth call on only once a file is there."""
    scored = os.path.join(folder, "scored")
    with open(scored, "a+") as file:
        file.seek(0)
        count = len(file.readlines())
    while count >= 5 and not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.02)
    with open(scored, "a") as file:
        file.write(row["key"] + "\\\\n")
    return {"score": float(int(row["answer"]) % 2), "answer": row["answer"]}
'''.replace("\\\\", "\\")
PROMPTS, SAMPLES = 8, 2
ONE_SET = """
[validation.dataset]
name = "synthetic:addition"
options = { n = 8, digits = 2, phrasings = 1, seed = 7 }
"""
SETS = """
[[validation.dataset.part]]
source = "greedy"
name = "synthetic:addition"
options = { n = 3, digits = 2, phrasings = 1, seed = 7 }
temperature = 0.0

[[validation.dataset.part]]
source = "sampled"
name = "synthetic:addition"
options = { n = 5, digits = 2, phrasings = 1, seed = 8 }
"""


def interrupted(log: Path, *arguments: object) -> int:
    """Start an evaluation, interrupt it where the reward waits, and answer its exit code."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(COMMAND), *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: "validated=5/16" in log.read_text(), "five samples")
        process.send_signal(signal.SIGINT)
        return process.wait(PATIENCE)
    finally:
        process.kill()


def test_two_models_side_by_side(tmp_path: Path, model: Path) -> None:
    other, out = tmp_path / "other", tmp_path / "compared"
    make_model(other, seed=2)
    (tmp_path / "reward.py").write_text(REWARD)
    config = write_config(tmp_path, model)
    parts = SETS + f'\n[reward]\ntimeout = 1000.0\n\n[custom]\nfolder = "{tmp_path}"\n'
    assert ONE_SET in config.read_text()
    config.write_text(config.read_text().replace(ONE_SET, "") + parts)
    reward = f'validation.reward_function={{ "{tmp_path}/reward.py:score" = 1.0 }}'
    options = ("--config", config, "--set", reward)
    line = ("eval", model, other, *options, "-n", SAMPLES, "-o", out)

    log = tmp_path / "eval.log"
    assert interrupted(log, *line) == 130
    assert f"cosmos-launch eval --resume {out} goes on from here" in log.read_text()
    assert [result["outcome"] for result in results(out)] == ["stopped", "not run"]
    (tmp_path / "go").touch()

    done = command(*line)  # the same command goes on
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = results(out)
    rows = [json.loads(text) for text in (out / "model.answers.jsonl").read_text().splitlines()]
    odd = sum(int(row["answer"]) % 2 for row in rows) / PROMPTS
    for result in (first, second):
        scores = result["scores"]["all"]
        assert (result["samples"], result["errors"], scores["answers"]) == (PROMPTS * SAMPLES, 0, PROMPTS * SAMPLES)
        named = scores["mean"], scores["majority"], scores["best"], *scores["passed"].values()
        assert {estimate["value"] for estimate in named} == {odd}
        assert scores["passed"].keys() == {"1", "2"}
        assert all(estimate["low"] <= odd <= estimate["high"] for estimate in named)
        assert list(result["scores"]) == ["all", "greedy", "sampled"]
        assert [result["scores"][name]["prompts"] for name in ("greedy", "sampled")] == [3, 5]
        assert result["metrics"]["validation/source/greedy/mean@2"] == result["scores"]["greedy"]["mean"]["value"]
        assert not (Path(result["run_dir"]) / "weights").exists()
    assert [len(row["responses"]) for row in rows] == [SAMPLES] * PROMPTS
    assert rows[0]["extracted"] == [rows[0]["answer"]] * SAMPLES
    assert {row["data_source"] for row in rows} == {"synthetic:addition"}
    assert all(len(set(row["responses"])) == 1 for row in rows if row["set"] == "greedy"), "drawn by keys of its own"
    assert any(len(set(row["responses"])) > 1 for row in rows if row["set"] == "sampled")
    others = [json.loads(text) for text in (out / "other.answers.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in others] == [row["prompt"] for row in rows]
    assert [row["responses"] for row in others] != [row["responses"] for row in rows]
    scored = (tmp_path / "scored").read_text().splitlines()
    assert len(scored) == 2 * PROMPTS * SAMPLES  # nothing was scored twice
    assert "mean@2" in done.stdout
    assert f"{odd:.4f} [" in done.stdout

    again = command("eval", "--resume", out)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("evaluated before") == 2
    refused = command(*line, "--temperature", 0.5)
    assert (refused.returncode, "of other models or settings" in refused.stderr) == (2, True)

    file = command("eval", "--answers", out / "model.answers.jsonl", *options)
    assert file.returncode == 0, file.stdout + file.stderr
    (report,) = (config.parent).glob("*/evaluation.json")
    assert json.loads(report.read_text())["scores"]["mean"] == first["scores"]["all"]["mean"]


def results(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "eval.json").read_text())["models"]
    return found
