"""Starting the program as a user does, from a source tree, and reading what a job left behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.harness import QUICKSTART

FEW_STEPS = 2
LAST_LINES = 40
LONGEST = 600.0
"""Seconds of one command; a run gives its section less."""
LEAVE = 20.0
"""Seconds for a job that is ended with its section."""


class JobFailedError(Exception):
    """A command failed; the text has its last lines."""


def run_command(command: Sequence[str], log: Path, cwd: Path) -> float:
    """Run a command to its end; its seconds. What it and its processes logged is printed if that is not a good one.

    Raises `JobFailedError`.
    """
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, cwd=cwd)
    code: int | None = None
    try:
        code = process.wait(LONGEST)
    finally:
        if (
            code is None
        ):  # it takes too long, or this section is ended, by a signal that the command has got, too
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEAVE)
        if code != 0:
            for file in (log, *sorted(cwd.glob("**/logs/*.log"))):
                lines = file.read_text(errors="replace").splitlines()[-LAST_LINES:]
                print(f"---- {file.relative_to(cwd)}", *lines, sep="\n", flush=True)
    if code:
        raise JobFailedError(f"{command[-1]}: exit code {code}")
    return time.monotonic() - began


def make_model(place: Path, experts: int = 0) -> Path:
    """The quickstart's model, untrained. experts: in each layer."""
    model = place / ("experts" if experts else "model")
    command = [
        sys.executable,
        str(QUICKSTART / "make_model.py"),
        "--out",
        str(model),
        "--experts",
        str(experts),
    ]
    run_command(command, place / "make_model.log", place)
    return model


def reinforce(
    bench: Bench, place: Path, name: str, config: str, model: Path, *settings: str
) -> dict[str, Any]:
    """A few steps of one of the quickstart's GRPO jobs; its summary. Raises `JobFailedError`."""
    given = (
        f"policy.model_name_or_path={json.dumps(str(model))}",
        f"train.output_dir={json.dumps(str(place))}",
        f"train.timestamp={json.dumps(name)}",
        f"train.max_num_steps={FEW_STEPS if bench.tiny else 20}",
        "validation.enable=false",
        "train.ckpt.enable_checkpoint=false",
        "launcher.export_final=false",
        *settings,
    )
    command = [sys.executable, "-P", "-m", "cosmos_launch", "--config", str(QUICKSTART / config)]
    command += [part for setting in given for part in ("--set", setting)]
    run_command(command, place / f"{name}.log", place)
    return summary_of(place / name)


def summary_of(run: Path) -> dict[str, Any]:
    found = json.loads((run / "summary.json").read_text())
    assert isinstance(found, dict)
    return found


def speed_of(summary: dict[str, Any]) -> dict[str, float]:
    """Speed of the whole job, and the idle fractions of trainer and generator."""
    status = summary["status"]
    idle = {f"{role}_idle": share for role, share in status["idle"].items()}
    return {"samples_s": status["samples_per_s"], "tokens_s": status["tokens_per_s"], **idle}
