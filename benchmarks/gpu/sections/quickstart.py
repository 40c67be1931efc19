"""The quickstart with the embedded engine, trainer and engine on one GPU: it must learn to add.

A rehearsal trains two steps from the untrained model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench, reinforce
from benchmarks.harness import QUICKSTART
from benchmarks.jobs import make_model, run_command, speed_of, summary_of

LEARNED = 0.8
"""Held-out accuracy at the end; on a CPU it is 0.92 to 0.96."""


def run(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if bench.tiny:
            small = ("rollout.max_response_length=12", "train.train_batch_per_replica=16")
            _report(bench, reinforce(bench, place, "grpo", "grpo_plain.toml", make_model(place), *small))
            return
        command = [sys.executable, str(QUICKSTART / "run.py"), "--plain", "--out", str(place / "out")]
        seconds = run_command(command, place / "quickstart.log", place)
        bench.row("warm start", **speed_of(summary_of(place / "out" / "sft")))
        found = summary_of(place / "out" / "grpo")
        _report(bench, found, whole_s=seconds)
        accuracy = float(found["validations"][-1]["score_mean"] or 0.0)
        bench.check("it has learned to add", accuracy > LEARNED, accuracy=accuracy)


def _report(bench: Bench, summary: dict[str, Any], **more: float) -> None:
    bench.check("ends as finished", summary["outcome"] == "finished", **speed_of(summary), **more)
    bench.check("no replica was restarted", not any(summary["restarts"].values()))
