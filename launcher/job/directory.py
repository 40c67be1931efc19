"""The third stage of a start: its run directory, chosen, made and locked for as long as the start lasts.

choose ─▶ make, lock ─▶ wait for what an earlier start left, sweep ─▶ (the start) ─▶ sweep, unlock
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from launcher.display.screen import Screen, open_screen
from launcher.job.checked import Checked
from launcher.plan import nsight
from launcher.plan.rundir import RunDir, already_running, claim


class FinishedError(Exception):
    """A run that has reached its end: there is nothing to go on with."""

    def __init__(self, run: RunDir, summary: Mapping[str, Any]) -> None:
        super().__init__(str(run.path))
        self.run, self.summary = run, summary

    def render(self) -> str:
        """The message about it."""
        run, model = self.run, self.summary.get("final_model")
        steps = (self.summary.get("status") or {}).get("total_steps")
        length = f" its {steps} steps" if steps is not None else ""
        lines = [f"{run.path} has finished{length}: nothing to resume"]
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
class RunStart:
    """A start that has its run directory. goes_on: whether an earlier start made it."""

    checked: Checked
    run: RunDir
    goes_on: bool
    screen: Screen


@contextmanager
def opened(checked: Checked) -> Iterator[RunStart]:
    """Choose and lock the run directory. Raises LaunchError, and FinishedError before anything is changed."""
    config, resumes = checked.config, checked.resumes
    run, goes_on = claim(config, resumes)
    if goes_on:
        if run.is_alive():
            raise already_running(run)
        refuse_finished(run)
    with run.locked():
        screen = open_screen()
        try:
            for warning in checked.warnings:
                screen.event("warning: " + warning.render().replace("\n    ", "; "))
            if goes_on:
                from launcher.job.trackers import CLOSE_SECONDS  # with asyncio

                # Workers, controller and Redis leave one after the other, each within that time.
                run.take_over(3 * nsight.grace(config) + CLOSE_SECONDS, screen.event)
            elif resumes:
                screen.event(f"nothing to resume in {config.train.output_dir}: starting afresh")
            screen.event(f"{'continuing' if goes_on else 'run directory'} {run.path}")
            yield RunStart(checked, run, goes_on, screen)
            run.sweep()
        finally:
            screen.close()
