"""How a job ends when it cannot go on; see test_kills for what it survives, and test_job for Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.program import Program, write_config

pytestmark = pytest.mark.e2e


def test_data_that_cannot_be_prepared_is_a_clear_error(tmp_path: Path, model: Path) -> None:
    """A bad row is only found when all rows are read: exit code 2, the row by name, nobody left behind."""
    rows = [{"prompt": "1 + 1 = ?", "answer": "2"}] * 5 + [{"prompt": None, "answer": "2"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = write_config(tmp_path, model, validation=False)
    text = config.read_text().replace("synthetic:addition", str(tmp_path / "rows.jsonl"), 1)
    config.write_text(text.replace("options = { n = 200, digits = 2, phrasings = 1 }", "", 1))
    with Program(config) as program:
        assert program.wait() == 2
    output = program.output()
    assert "row 6" in output, "rows are counted from 1: " + output
    assert "`prompt`" in output
    assert "--resume" not in output
    assert "Task was destroyed" not in output


def test_a_reward_that_fails_everywhere_stops_the_run_by_name(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completion, row):\n    return row['reference']\n")
    config = write_config(tmp_path, model, steps=500, rows=5000, validation=False)
    own = f'"{tmp_path}/mine.py:score"'
    config.write_text(config.read_text().replace("{ boxed_math = 1.0, format = 0.2 }", own, 1))
    with Program(config) as program:
        assert program.wait() == 1
    output = program.output()
    assert "not one prompt was scored" in output
    assert "KeyError: 'reference'" in output
    assert output.count("Traceback (most recent call last)") == 1, output
    assert " error: not one prompt" not in output, "the outcome says it in the next line"
    summary = json.loads((program.run_dir / "summary.json").read_text())
    assert summary["status"]["phase"] == summary["outcome"] == "failed"
    assert "not one prompt was scored" in summary["reason"]
    assert summary["final_model"] is None
    assert not (program.run_dir / "final").exists()
