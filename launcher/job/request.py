"""`cosmos-launch --resume`: which run goes on, and with which configuration.

    --resume                      the newest run below ./outputs, with the configuration it was started with
    --resume DIR                  that run, or the newest one below DIR, with its own configuration
    --config FILE --resume        the newest run of the file's train.output_dir, with the file
    --config FILE --resume DIR    that run, with the file

`--set` and the environment count as in any start. A run that is alive is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import LaunchError
from launcher.job.remote import DEFAULT_OUTPUT, run_below
from launcher.plan.rundir import RunDir, already_running


@dataclass(frozen=True, slots=True)
class Continued:
    """What a start that resumes reads. `run` is None where the configuration says which one it is."""

    configs: list[Path]
    overrides: list[str]
    run: RunDir | None


def continued(resume: str, configs: Sequence[Path], overrides: Sequence[str]) -> Continued:
    """Find the run. Raises LaunchError: there is none, it is alive, or its configuration is missing."""
    if configs and not resume:
        return Continued(list(configs), list(overrides), None)
    run = run_below(Path(resume or DEFAULT_OUTPUT), named=bool(resume))
    if run.is_alive():
        raise already_running(run)
    if not configs and not run.config_toml.is_file():
        raise LaunchError(
            f"{run.path} holds no config.toml",
            "name the configuration: cosmos-launch --config run.toml --resume",
        )
    place = {"train.output_dir": str(run.path.parent), "train.timestamp": run.path.name}
    where = [f"{key}={json.dumps(value)}" for key, value in place.items()]
    return Continued(list(configs) or [run.config_toml], [*overrides, *where], run)


def finished(run: RunDir) -> dict[str, Any] | None:
    """The summary of a run that has reached its end: there is nothing to go on with."""
    summary = run.summary()
    return summary if summary is not None and summary["outcome"] == "finished" else None


def finished_lines(run: RunDir, summary: Mapping[str, Any]) -> list[str]:
    """The message about it."""
    steps = (summary.get("status") or {}).get("total_steps")
    model = summary.get("final_model")
    lines = [
        f"{run.path} has finished"
        + (f" its {steps} steps" if steps is not None else "")
        + ": nothing to resume"
    ]
    if model:
        lines += [
            f"its model is in {model}; to train it further, start a run of its own:",
            f"    cosmos-launch --config {run.config_toml} --set policy.model_name_or_path={model}",
        ]
    return lines
