"""The third stage of a start: its run directory, chosen, made and locked for as long as the start lasts.

choose ─▶ make, lock ─▶ wait for what an earlier start left, sweep ─▶ (the start) ─▶ sweep, unlock
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.display.screen import Screen, open_screen
from launcher.errors import LaunchError
from launcher.job.checked import Checked
from launcher.plan import nsight
from launcher.plan.rundir import RunDir, Tokens, already_running, newest
from schema.config import Config


class FinishedError(Exception):
    """A run that has reached its end: there is nothing to go on with."""

    def __init__(self, run: RunDir, summary: Mapping[str, Any]) -> None:
        super().__init__(str(run.path))
        self.run, self.summary = run, summary

    def render(self) -> str:
        """The message about it."""
        run, model = self.run, self.summary.get("final_model")
        steps = (self.summary.get("status") or {}).get("total_steps")
        known = f" its {steps} steps" if steps is not None else ""
        lines = [f"{run.path} has finished{known}: nothing to resume"]
        if model:
            lines += [
                f"its model is in {model}; to train it further, start a run of its own:",
                f"    cosmos-launch --config {run.config_toml} --set policy.model_name_or_path={model}",
            ]
        return "\n".join(lines)


def refuse_finished(run: RunDir) -> None:
    """Raises FinishedError: the run has reached its end."""
    summary = run.summary()
    if summary is not None and summary["outcome"] == "finished":
        raise FinishedError(run, summary)


@dataclass(frozen=True, slots=True)
class Start:
    """A start that has its run directory. goes_on: whether an earlier start made it."""

    checked: Checked
    run: RunDir
    goes_on: bool
    screen: Screen

    def write(self) -> tuple[Tokens, bool]:
        """Write the configuration, the origins of its keys, and tokens of this start.

        Returns the tokens, and whether the data that an earlier start prepared can be used again.
        """
        run, config = self.run, self.checked.config
        before = run.written_config()
        written = run.write_config(config)
        run.write_origins(self.checked.origins)
        tokens = Tokens.fresh()
        run.write_tokens(tokens, trainers=config.policy.parallelism.n_init_replicas > 1)
        return tokens, self.goes_on and _same_data(before, written, run)


@contextmanager
def opened(checked: Checked) -> Iterator[Start]:
    """Have the run directory to oneself. Raises LaunchError, and FinishedError, before anything is changed."""
    run, goes_on = _taken(checked)
    if goes_on:
        if run.is_alive():
            raise already_running(run)
        refuse_finished(run)
    run.make()
    run.lock()
    screen = open_screen()
    try:
        for warning in checked.warnings:
            screen.event("warning: " + warning.render().replace("\n    ", "; "))
        if checked.resumes and not goes_on:
            screen.event(f"nothing to resume in {checked.config.train.output_dir}: starting afresh")
        if goes_on:
            _wait_until_left(run, checked.config, screen)
            run.forget_earlier_end()
            run.sweep()
        screen.event(f"{'continuing' if goes_on else 'run directory'} {run.path}")
        yield Start(checked, run, goes_on, screen)
        run.sweep()
    finally:
        screen.close()
        run.unlock()


def choose(config: Config, resume: bool, now: float) -> tuple[RunDir, bool]:
    """The directory for this start, and whether it continues an earlier run.

    Resuming takes the directory of `train.timestamp`, else the newest run of `train.output_dir`; where there is
    none the run starts afresh. Raises LaunchError if a new run would mix with an old one.
    """
    root = Path(os.path.abspath(os.path.expanduser(config.train.output_dir)))
    name = config.train.timestamp
    if resume:
        found = RunDir(root / name) if name else newest(root)
        if found is not None and found.config_json.is_file():
            return found, True
    if name:
        run = RunDir(root / name)
        if run.is_alive():
            raise already_running(run)
        if run.config_json.exists():
            raise LaunchError(
                f"train.timestamp: {run.path} holds a run already",
                "continue it with --resume, or leave train.timestamp out to start another one",
            )
        return run, False
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))
    path, count = root / stamp, 1
    while path.exists():
        path, count = root / f"{stamp}-{count}", count + 1
    return RunDir(path), False


def _taken(checked: Checked) -> tuple[RunDir, bool]:
    """As `choose`. A directory without a name is taken at once: another launcher may begin in the same second."""
    while True:
        run, goes_on = choose(checked.config, checked.resumes, time.time())
        if goes_on or checked.config.train.timestamp or run.take():
            return run, goes_on


def _wait_until_left(run: RunDir, config: Config, screen: Screen) -> None:
    """Wait for processes of an earlier start. Raises LaunchError if they do not leave."""
    from launcher.job.trackers import CLOSE_SECONDS  # with asyncio, for which a dry run need not wait

    if leaving := run.leaving():
        screen.event(f"waiting for processes of an earlier start to leave ({', '.join(leaving)})")
    # Workers, controller and Redis leave one after the other, each within that time.
    run.wait_until_left(3 * nsight.grace(config) + CLOSE_SECONDS)


def _same_data(before: Mapping[str, Any] | None, now: Mapping[str, Any], run: RunDir) -> bool:
    """Whether the data that an earlier start prepared can be used again: nothing but the resumption differs."""
    if before is None or not (run.path / "data" / "train.safetensors").exists():
        return False

    def relevant(data: Mapping[str, Any]) -> dict[str, Any]:
        return {**data, "train": {**data["train"], "resume": None}, "controller": None, "launcher": None}

    return relevant(before) == relevant(now)
