"""What run directories alone say of their runs, be they killed, damaged or of another version."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from controller.dashboard.__main__ import RunFiles, names
from schema.wire import event_file
from schema.wire.messages import Event


def killed(run: Path, *events: tuple[str, dict[str, Any]]) -> RunFiles:
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    lines = [{"id": i, "at": i, "kind": kind, "text": "t", "data": data} for i, (kind, data) in enumerate(events, 1)]
    event_file.append(event_file.path_of(run), map(Event.model_validate, lines))
    return RunFiles(run)


def overview(run: RunFiles) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found: dict[str, Any] = json.loads(asyncio.run(run.overview()), parse_constant=refuse)
    return found


def replica(name: str, state: str) -> tuple[str, dict[str, Any]]:
    return "replica", {"name": name, "replica_id": f"{name}.1", "role": "rollout", "state": state}


def step(number: int, **metrics: float | None) -> tuple[str, dict[str, Any]]:
    return "step", {"step": number, "at": number, "metrics": metrics, "samples": 4, "tokens": 40, "timeline": 0}


def test_of_a_killed_run_its_events_say_what_they_can(tmp_path: Path) -> None:
    run = killed(
        tmp_path / "run",
        replica("r1", "live"), replica("r0", "live"), replica("r1", "lost"),
        *(("publication", {"version": version}) for version in range(2)),
        step(0, staleness_max=2.0), step(1, staleness_max=1.0),
        ("drop", {"reason": "failed", "count": 3}), ("drop", {"reason": "failed", "count": 2}),
        ("reward", {"failure": "right: KeyError", "error": "Traceback"}),
    )  # fmt: skip
    found = overview(run)
    assert [(r["name"], r["state"]) for r in found["replicas"]] == [("r0", "live"), ("r1", "lost")]
    job = found["job"]
    assert (job["version"], job["max_staleness"], job["step"]) == (1, 2.0, 2)
    assert job["faults"] == {"groups dropped: failed": "5", "reward: right: KeyError": "at least 1"}
    assert "in each state" in job["unknown"]


def test_held_out_losses_are_a_curve_of_their_own(tmp_path: Path) -> None:
    records = [{"version": v, "score_mean": None, "loss": 3.0 / (v + 1)} for v in (0, 2)]
    run = killed(tmp_path / "run", step(0, loss=1.0), *(("validation", record) for record in records))
    assert overview(run)["job"]["validation"] == {"version": 2, "loss": 1.0}
    curves = asyncio.run(run.curves(["validation", "validation_loss"], 10)).curves
    assert {name: (found.steps, found.values) for name, found in curves.items()} == {
        "validation_loss": ([0, 2], [3.0, 1.0])
    }


def test_what_another_version_wrote_is_passed_over(tmp_path: Path) -> None:
    run = killed(
        tmp_path / "run",
        step(0, loss=1.0),
        ("step", {"step": 1}), ("drop", {}), ("replica", {"name": "r0", "state": "live"}), ("alarm", {"on": True}),
        ("publication", {"version": "newest"}), ("validation", {"version": 1, "score_mean": "good"}),
        ("rewind", {"step": "back"}), ("step", {"step": 0, "at": 1, "metrics": {"loss": "low"}}),
        ("step", {"step": 0, "at": 1, "metrics": []}), ("step", {"step": 0, "at": 1, "metrics": {}, "samples": "4x"}),
        step(2, loss=None, entropy=float("nan")),
    )  # fmt: skip
    assert overview(run)["job"]["step"] == 3
    curve = asyncio.run(run.curves(["loss", "validation"], 10)).curves
    assert {name: (found.steps, found.values) for name, found in curve.items()} == {"loss": ([0, 2], [1.0, None])}
    timeline = asyncio.run(run.timeline())
    assert (timeline.lanes, timeline.now) == ([], None)


@pytest.mark.parametrize(
    ("summary", "sentence"),
    [
        ('{"reason": "killed"}', "the run is over: killed"),
        ('{"status": 7, "ledger": [], "replicas": {"a": 1}}', "no summary was written"),
        ('{"status": {"sentence": "done", "reward": NaN}}', "done"),
    ],
)
def test_a_damaged_summary_is_shown_as_far_as_it_goes(tmp_path: Path, summary: str, sentence: str) -> None:
    run = killed(tmp_path / "run")
    (run.run_dir / "config.json").write_text('{"logging": []}')
    (run.run_dir / "summary.json").write_text(summary)
    assert overview(run)["job"]["sentence"].startswith(sentence)


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = [killed(tmp_path / name / "0101") for name in ("a", "b", "c")]
    assert names(runs) == ["0101 (a/0101)", "0101 (b/0101)", "0101 (c/0101)"]
    for run, name in zip(runs, ("one", "two", "two"), strict=True):
        (run.run_dir / "config.json").write_text(json.dumps({"logging": {"experiment_name": name}}))
    assert names(runs) == ["one", "two (b/0101)", "two (c/0101)"]
