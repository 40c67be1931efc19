"""The quickstart with the embedded engine, trainer and engine on one GPU: its warm start and 15 steps of GRPO.

These are too few to learn to add: that the job runs, and how fast, is what is asked. A rehearsal trains two steps
from the untrained model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import SOME_STEPS, Bench, reinforce
from benchmarks.harness import QUICKSTART
from benchmarks.jobs import make_model, run_command, speed_of, summary_of


def run(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if bench.tiny:
            small = ("rollout.max_response_length=12", "train.train_batch_per_replica=16")
            _report(bench, reinforce(bench, place, "grpo", "grpo_plain.toml", make_model(place), *small))
            return
        command = [sys.executable, str(QUICKSTART / "run.py"), "--plain", "--out", str(place / "out")]
        command += ["--set", f"train.max_num_steps={SOME_STEPS}"]
        seconds = run_command(command, place / "quickstart.log", place)
        bench.row("warm start", **speed_of(summary_of(place / "out" / "sft")))
        found = summary_of(place / "out" / "grpo")
        _report(bench, found, whole_s=seconds, steps=float(SOME_STEPS))


def _report(bench: Bench, summary: dict[str, Any], **more: float) -> None:
    bench.check("ends as finished", summary["outcome"] == "finished", **speed_of(summary), **more)
    bench.check("no replica was restarted", not any(summary["restarts"].values()))
