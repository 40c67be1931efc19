"""The summary file and the final table."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

from rich.console import Console

from launcher.display.summary import Collected, RunResult, learning, out_of_data, rows, table
from schema.wire.data_report import DataReport, FileReport, Rows
from schema.wire.messages import LedgerStatus, Phase, StepRecord
from tests.launcher.samples import held_out_loss, job_status, validation


def result(tmp_path: Path, collected: Collected, outcome: str = "finished", reason: str = "") -> RunResult:
    return RunResult(0, outcome, reason, tmp_path, 95.4, collected, {"policy-0": 0, "rollout-0": 2})


def full() -> Collected:
    ledger = LedgerStatus(
        created=30, states={"durable": 0, "trained": 26, "dropped": 4}, dropped={"surplus": 4},
        staleness={0: 100, 3: 4}, max_staleness=3, bound=4,
    )  # fmt: skip
    steps = [StepRecord(step=i, at=float(i), metrics={"reward_mean": i / 10, "loss": 1.0}) for i in range(9)]
    status = job_status(phase=Phase.FINISHED, step=60)
    return Collected(status, ledger, steps, [validation(0, 0.31), validation(60, 0.95)], [])


def test_the_table_says_what_changed_and_where_things_are(tmp_path: Path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    found = dict(rows(result(tmp_path, full()).summary()))
    assert found["outcome"] == "finished"
    assert found["steps"] == "60 of 60"
    assert found["reward"] == "0.050 → 0.750 (mean of the first and last 2 steps)"
    assert found["held-out"] == "0.310 → 0.950 (version 0 → 60, 200 samples)"
    assert found["speed"] == "351.2 samples/s, 9121 tokens/s"
    assert found["idle"] == "policy 3.1%, rollout 8.4%"
    assert found["staleness"] == "mean 1.25, max 3, bound 4"
    assert found["groups"] == "30 created: trained 26, dropped 4"
    assert found["restarts"] == "rollout-0 2"
    assert found["model"] == str(tmp_path / "final")
    assert found["logs"] == str(tmp_path / "logs")
    assert "loss" not in found, "reward says more, and both would be two answers to one question"


def test_what_became_of_the_data_is_one_line(tmp_path: Path):
    left_out = {"an empty prompt": Rows(count=1_200, first=["a.jsonl, row 3"])}
    train = FileReport(source="a.jsonl", read=9_000, kept=7_800, left_out=left_out, samples=["long " * 100])
    DataReport(files={"train": train, "validation": FileReport(source="b.jsonl", read=5, kept=5)}).write(tmp_path)
    summary = result(tmp_path, full()).summary()
    expected = "train: 9,000 rows of a.jsonl, 7,800 kept, 1,200 left out; validation: 5 rows of b.jsonl, 5 kept"
    assert dict(rows(summary))["data"] == expected
    assert "long" not in json.dumps(summary["data"])
    for other in (None, {"format": 2}, []):  # of an older version, of a newer one
        assert "data" not in dict(rows({**summary, "data": other}))


def test_a_reason_says_itself_how_the_run_ended(tmp_path: Path):
    reason = "finished after 25 of 60 steps: the data ran out; dropped: zero_variance 900"
    assert dict(rows(result(tmp_path, full(), reason=reason).summary()))["outcome"] == reason


def test_a_run_that_dropped_all_its_prompts_is_not_to_be_resumed(tmp_path: Path):
    waiting, dropped, fresh = (
        LedgerStatus(created=sum(states.values()), states=states, dropped={}, staleness={}, max_staleness=0, bound=2)
        for states in ({"waiting": 1, "dropped": 23}, {"waiting": 0, "dropped": 24}, {"waiting": 0, "dropped": 0})
    )
    found = [
        out_of_data(result(tmp_path, Collected(ledger=ledger), outcome).summary())
        for ledger in (waiting, dropped, fresh, None)
        for outcome in ("failed", "stopped")
    ]
    assert found == [False, False, True, False, False, False, False, False]
    assert dict(rows(result(tmp_path, Collected(job_status(), fresh)).summary()))["groups"] == "0 created"


def test_the_model_of_an_earlier_start_is_not_that_of_a_run_that_went_on(tmp_path: Path):
    (tmp_path / "final").mkdir()
    config = tmp_path / "final" / "config.json"
    config.write_text("{}")
    assert result(tmp_path, full(), "stopped").final_model == tmp_path / "final", "exported before it left"
    before = time.time() - 1000.0
    os.utime(config, (before, before))
    assert result(tmp_path, full(), "stopped").final_model is None
    assert result(tmp_path, full(), "finished").final_model == tmp_path / "final", "finished before, too"


def test_a_run_that_never_got_a_controller_has_a_table_too(tmp_path: Path):
    found = dict(rows(result(tmp_path, Collected(), "failed", "data: no such column").summary()))
    assert found["outcome"] == "failed: data: no such column"
    assert "steps" not in found
    assert "model" not in found


def test_a_summary_of_supervised_training_has_the_held_out_loss():
    records = [held_out_loss(0, 3.5).model_dump(), held_out_loss(60, 1.25).model_dump()]
    assert dict(learning([], records))["held-out"] == "loss 3.500 → 1.250 (version 0 → 60, 20 samples)"
    older = [{name: value for name, value in validation(0, 0.5).model_dump().items() if name != "loss"}]
    assert dict(learning([], older))["held-out"] == "0.500 (version 0 → 0, 200 samples)"


def test_the_summary_is_written_as_json_and_read_back(tmp_path: Path):
    written = result(tmp_path, full())
    written.write()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads(json.dumps(written.summary()))
    assert summary["status"]["phase"] == "finished"
    assert summary["ledger"]["created"] == 30
    assert [record["score_mean"] for record in summary["validations"]] == [0.31, 0.95]
    assert len(summary["steps"]) == 9
    assert rows(summary) == rows(written.summary())


def test_the_table_for_the_terminal_takes_any_text(tmp_path: Path):
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(table(result(tmp_path, full(), "failed", "[red]odd[/red]").summary()))
    assert "[red]odd[/red]" in console.file.getvalue()  # type: ignore[attr-defined]
