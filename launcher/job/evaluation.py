"""An evaluation: answers from a file are scored by reward functions; nothing is generated or trained.

    read the answers (controller.data.evaluation) ─▶ score them (rollout_worker.evaluate) ─▶ evaluation.json, table

The run directory is made as for a job. Ctrl-C ends both steps at once: an evaluation has nothing to resume.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Mapping
from typing import Any

from launcher.display.screen import Screen
from launcher.display.summary import FORMAT
from launcher.evaluation import report
from launcher.job.directory import RunStart
from launcher.plan.placement import PlacedReplica, evaluation
from launcher.plan.rundir import RunDir, read_json
from launcher.processes.host import Folders
from launcher.processes.logs import tail
from launcher.processes.share import attended
from launcher.processes.signals import queued_signals
from launcher.processes.supervisor import ONCE, Always, Setting, Supervised, Supervisor
from launcher.restarts import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, NO_RESTARTS, SIGNALLED, Role
from schema.config import Config
from schema.util.atomic_file import write_text
from schema.wire import data_report
from schema.wire.messages import SourceScores


async def evaluate(config: Config, run: RunDir, env: Mapping[str, str], screen: Screen) -> int:
    """Run both steps; answers the exit code: 0, 1 if answers could not be scored, 2 for a fault of config or data."""
    setting = Setting(Folders.of_run(run), 1.0, NO_RESTARTS, lambda process: process.environment(config, env))
    supervisor = Supervisor(setting, Always(ONCE, screen.event))
    with queued_signals() as interrupts:
        try:
            for replica in evaluation(str(run.path)):
                code = await _step(supervisor, replica, interrupts, screen)
                if code != EXIT_OK and not (run.path / "evaluation.json").exists():
                    return code
                if replica.role is Role.DATA:
                    for text in data_report.of_run(run.path):
                        screen.event(f"data: {text}")
        finally:
            await supervisor.kill_all()
    scores = read_json(run.path / "evaluation.json")
    if scores is None:
        screen.event("failed: the scores were not written")
        return EXIT_FAILED
    screen.write(table(scores))
    screen.write(f"  scores of every answer: {run.path / 'scores.jsonl'}")
    return EXIT_FAILED if scores["errors"] else EXIT_OK


async def _step(
    supervisor: Supervisor, replica: PlacedReplica, interrupts: asyncio.Queue[int], screen: Screen
) -> int:
    """One process to its end, its last line shown whenever it changes."""
    supervised = supervisor.launch(replica)
    log_file = supervisor.setting.folders.logs / f"{replica.processes[0].name}.log"
    shown = ""

    def show() -> None:
        nonlocal shown
        last_line = " ".join(tail(log_file, 1))
        if last_line and last_line != shown:
            shown = last_line
            screen.event(last_line.partition(": ")[2] or last_line)

    number = await attended(supervised.done.wait(), interrupts, show)
    if number is not None:
        screen.event(f"stopping ({signal.Signals(number).name})")
        await supervisor.kill_all()
        return SIGNALLED + number
    return _code(supervised)


def _code(supervised: Supervised) -> int:
    code = supervised.last_exit.code if supervised.last_exit else EXIT_FAILED
    return code if code in (EXIT_OK, EXIT_CONFIG) else EXIT_FAILED


def table(scores: Mapping[str, Any]) -> str:
    """The scores as text: the estimates of each data source and of all, the single rewards, and what failed."""
    parts = {**scores["sources"], report.ALL: scores}
    columns = {"answers": {name: SourceScores.model_validate(part["scores"]) for name, part in parts.items()}}
    lines = [report.table(columns)]
    lines += [f"reward {name}: {value:.4f}" for name, value in scores["rewards"].items()]
    lines += ["not scored: " + error.splitlines()[0] for error in scores["error_examples"]]
    return "\n".join("  " + line for text in lines for line in text.splitlines())


def run_evaluation(start: RunStart) -> int:
    """Run an evaluation in its run directory; the exit code."""
    began, run, screen, config = time.monotonic(), start.run, start.screen, start.checked.config
    run.write_config(config)
    code = asyncio.run(evaluate(config, run, start.checked.request.env, screen))
    elapsed = time.monotonic() - began
    outcome = "stopped" if code > SIGNALLED else "finished" if code == EXIT_OK else "failed"
    reason = "" if code == EXIT_OK else f"exit code {code}"
    # What `cosmos-launch status` reads of any run that has ended.
    summary = {"outcome": outcome, "exit_code": code, "reason": reason, "elapsed_s": round(elapsed, 3)}
    write_text(run.summary_json, json.dumps({"format": FORMAT, "run_dir": str(run.path), **summary}) + "\n")
    screen.event(f"done in {elapsed:.1f} s, exit code {code}")
    return code
