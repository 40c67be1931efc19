"""Starting the program as a user does, from a source tree, and reading what a job left behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import QUICKSTART

LAST_LINES = 40
LONGEST = 1200.0
"""Seconds of one command: ten times what it takes on two cores. A GPU run gives its section less."""
LEAVE = 20.0
"""Seconds for a job that is ended with its section."""


class JobFailedError(Exception):
    """A command failed; the text has its last lines."""


def run_command(command: Sequence[str | Path], log: Path, cwd: Path, env: Mapping[str, str] | None = None) -> float:
    """Run a command to its end; its seconds. What it and its processes logged is printed if that is not a good one.

    Raises `JobFailedError`, and `TimeoutExpired`.
    """
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, cwd=cwd, env=env)
    code: int | None = None
    try:
        code = process.wait(LONGEST)
    finally:
        if code is None:  # it takes too long, or this program is ended by a signal that the command has got, too
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


def make_model(place: Path, seed: int = 1, experts: int = 0) -> Path:
    """The quickstart's model, untrained. experts: in each layer."""
    model = place / ("experts" if experts else "model")
    command: list[str | Path] = [sys.executable, QUICKSTART / "make_model.py", "--out", model, "--seed", str(seed)]
    run_command([*command, "--experts", str(experts)], place / "make_model.log", place)
    return model


def launch(config: str, model: Path, place: Path, name: str, settings: Mapping[str, Any], *more: str) -> Path:
    """Run a job of a configuration of the quickstart to its end; the run directory `place / name`.

    settings: by key. more: `KEY=VALUE` each. Raises `JobFailedError`.
    """
    places = {"policy.model_name_or_path": str(model), "train.output_dir": str(place), "train.timestamp": name}
    given = [f"{key}={json.dumps(value)}" for key, value in {**places, **settings}.items()]
    command = [sys.executable, "-P", "-m", "cosmos_launch", "--config", str(QUICKSTART / config)]
    command += [part for setting in (*given, *more) for part in ("--set", setting)]
    run_command(command, place / f"{name}.log", place)
    return place / name


def warm_model(place: Path, seed: int = 1, experts: int = 0) -> Path:
    """The quickstart's model after its plain warm start. experts: of a mixture in each layer; 0: there are none."""
    model = make_model(place, seed, experts)
    return launch("sft_plain.toml", model, place, "sft", {"train.seed": seed}) / "final"


def summary_of(run: Path) -> dict[str, Any]:
    """The `summary.json` of a run directory."""
    summary = json.loads((run / "summary.json").read_text())
    assert isinstance(summary, dict)
    return summary


def speed_of(summary: dict[str, Any]) -> dict[str, float]:
    """Speed of the whole job, and the idle fractions of trainer and generator."""
    status = summary["status"]
    idle = {f"{role}_idle": share for role, share in status["idle"].items()}
    return {"samples_s": status["samples_per_s"], "tokens_s": status["tokens_per_s"], **idle}
