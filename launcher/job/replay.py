"""A replay: a run's trainer alone, on the batches that the run has recorded.

    config.toml, --set ─▶ steps, their files ─▶ ranks of policy_worker.replay ─ lines of JSON ─▶ here, for people

Nothing is written to the run but profiles, where `[profiler]` asks for them: configuration, logs and what the ranks
report are in a temporary directory.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from launcher.errors import LaunchError
from launcher.paths import leaves, resolved
from launcher.plan import nsight, placement
from launcher.plan.machine import find_machine
from launcher.plan.needs import PlacementError
from launcher.plan.placement import PlacedReplica
from launcher.plan.rundir import RunDir
from launcher.processes.host import Folders
from launcher.processes.share import until_left
from launcher.processes.signals import queued_signals
from launcher.processes.supervisor import ONCE, Always, Exit, Setting, Supervisor
from launcher.restarts import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, NO_RESTARTS, SIGNALLED
from schema.config import Config, ConfigError
from schema.config.loading.load import load
from schema.config.trained import READ, changes_numbers, settings_digest
from schema.util.atomic_file import write_text
from schema.util.text import visible
from schema.wire import batch_file
from schema.wire.batch_file import Facts
from schema.wire.frame import FrameError

POLL = 0.2
"""Seconds between looks at what the ranks report."""
KEY = "profiler.record_batches"
AROUND = ("profiler.", "placement.", "launcher.")
"""Keys that a trainer without controller and generators reads besides `schema.config.trained.READ`."""
ABANDONED = 3600.0
"""Seconds after which nobody fills a temporary file any more."""
SAYING = 5.0
"""Seconds for the supervisor to say what went wrong with itself; it takes none."""
Record = dict[str, Any]


@dataclass(frozen=True)
class ReplayOptions:
    """The steps to train again. first, count: None is from the oldest recorded step, and all that follow."""

    run: RunDir
    first: int | None
    count: int | None
    repeat: int
    overrides: Sequence[str]
    as_json: bool


@dataclass(frozen=True)
class ConfigChanges:
    """The keys that differ from the run's config.toml; `settings_digest` of the file, and with them."""

    keys: list[str]
    before: str
    now: str


def replay(options: ReplayOptions, env: Mapping[str, str]) -> int:
    """Train, show, and answer the exit code; an interrupt ends it. Logs of a failure stay.

    Raises ConfigError, LaunchError before anything starts, see `read_config`, `survey`, `placement.replay`.
    """
    run = options.run
    config, changes = read_config(run, options.overrides, env)
    recorded = survey(run, options.first, options.count)
    first = min(recorded)
    if run.is_alive():
        _complain(f"note: {run.path} is running: its batches are read as they are now, and it may remove them")
    sweep(run.profiles)
    directory = Path(tempfile.mkdtemp(prefix="cosmos-replay-"))
    code = EXIT_OK
    try:
        write_text(directory / "config.json", json.dumps(resolved(config)), mode=0o600)
        (directory / "output.jsonl").touch()
        arguments = {
            "config": directory / "config.json", "output": directory / "output.jsonl",
            "first-step": first, "steps": len(recorded), "repeat": options.repeat,
        }  # fmt: skip
        spelled = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        ranks = recorded[first].ranks
        try:
            replica = placement.replay(config, find_machine(env), ranks, [str(run.path), *spelled])
        except PlacementError as error:
            raise ConfigError([error.problem]) from None
        screen = ReplayScreen(str(run.path), recorded, changes, options.as_json)
        setting = Setting(
            Folders(directory, directory, run.profiles),
            nsight.grace(config),
            NO_RESTARTS,
            lambda process: process.environment(config, env),
        )
        code = asyncio.run(run_ranks(replica, directory / "output.jsonl", setting, screen.show))
        screen.end()
        return code
    finally:
        if code not in (EXIT_FAILED, EXIT_CONFIG):  # then there are logs to read
            shutil.rmtree(directory, ignore_errors=True)


# ---- what is replayed -----------------------------------------------------------------------------------------


def read_config(run: RunDir, overrides: Sequence[str], env: Mapping[str, str]) -> tuple[Config, ConfigChanges]:
    """The run's configuration with `--set` and the environment on top, and what these change.

    Raises ConfigError: it is wrong, or was already; LaunchError: there is none, or a changed key would not be read.
    """
    if not run.config_toml.is_file():
        raise LaunchError(f"{run.path} holds no config.toml", "it is not the directory of a run any more")
    written = load([run.config_toml]).config
    before = leaves(resolved(written))
    config = load([run.config_toml], overrides, env).config
    if not config.is_grpo or config.is_evaluation:
        raise LaunchError(f"{run.path} is not a run of reinforcement learning", "only such runs record batches")
    now = leaves(resolved(config))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if problems := nsight.check_nsight(config):
        raise ConfigError(problems)
    if unread := [key for key in changed if not key.startswith((*READ, *AROUND))]:
        raise LaunchError(
            f"{unread[0]} is not read by a replay: it trains recorded batches, and nothing else runs",
            "keys of [train], [policy], [profiler], [placement] and [launcher] may change",
        )
    return config, ConfigChanges(changed, settings_digest(written), settings_digest(config))


def survey(run: RunDir, first: int | None, count: int | None) -> dict[int, Facts]:
    """The steps to train again, in order: each has a whole file of this run, and what that says of the run then.

    Raises LaunchError: nothing is recorded, a step is missing, or a file is damaged or of another run.
    """
    folder = batch_file.folder_of(run.path)
    recorded = batch_file.recorded(folder)
    if not recorded:
        raise LaunchError(f"{run.path} has recorded no batches", _how_to_record(run))
    try:
        chosen = batch_file.choose(recorded, first, count)
        facts = {step: batch_file.read_facts(batch_file.path_of(folder, step)) for step in chosen}
    except batch_file.NotRecordedError as error:
        raise LaunchError(f"{folder}: {error}", "choose among these with --first-step and --steps") from None
    except FrameError as error:
        hint = "leave its step out with --first-step and --steps"
        raise LaunchError(str(error), hint, EXIT_FAILED) from None
    job, job_then = "", facts[chosen[0]].job_id
    with suppress(OSError):
        job = (run.path / "job_id").read_text().strip()
    for step, fact in facts.items():
        if fact.job_id != (job or job_then):
            path = batch_file.path_of(folder, step)
            actual = f"this run is {job}" if job else f"step {chosen[0]} is of {job_then}"
            raise LaunchError(f"{path} is of job {fact.job_id}, {actual}", "put it where it belongs")
    return facts


def _how_to_record(run: RunDir) -> str:
    if (run.summary() or {}).get("outcome") == "finished":
        return f"run it again: cosmos-launch --config {run.config_toml} --set {KEY}=8"
    first = f"cosmos-launch stop {run.path} --wait 60, then " if run.is_alive() else ""
    return f"{first}cosmos-launch --resume {run.path} --set {KEY}=8 keeps those of the newest 8 steps"


def sweep(profiles: Path) -> None:
    """Remove what killed replays have left next to their profiles: a run that has ended is never swept again."""
    for path in profiles.glob(".*replay-*"):
        if path.is_file() and time.time() - path.stat().st_mtime > ABANDONED:
            path.unlink(missing_ok=True)


# ---- its processes --------------------------------------------------------------------------------------------


@dataclass
class RecordFollower:
    """The records that are appended to a file, each once it is a whole line."""

    path: Path
    _offset: int = 0

    def new(self) -> Iterator[Record]:
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


async def run_ranks(replica: PlacedReplica, output: Path, setting: Setting, show: Callable[[Record], None]) -> int:
    """All ranks to their end, and what they report meanwhile; the exit code. Leaves no process behind.

    The first signal asks the ranks to leave, so that they write what they have recorded; the second one kills them.
    """
    supervisor, reported = Supervisor(setting, Always(ONCE)), RecordFollower(output)

    def show_new() -> None:
        for record in reported.new():
            show(record)

    def leave(number: int | None) -> None:
        if number == signal.SIGINT:
            _complain("leaving after this step, once profiles are written; Ctrl-C again leaves at once")

    with queued_signals() as interrupts:
        number = await until_left(supervisor, replica, interrupts, leave, show_new, POLL)
    if number is not None:
        return SIGNALLED + number
    if (last := supervisor.replicas[replica.name].last_exit) is None:
        # The task that cares for the ranks has failed, and says so in its very next turn.
        ending = await asyncio.wait_for(supervisor.ended, SAYING)
        _complain(f"error: the replay failed: {ending.verdict.reason}")
        return EXIT_FAILED
    return _code(last)


def _code(exit_: Exit) -> int:
    """The exit code of ranks that have ended by themselves; says why where they failed."""
    if exit_.code == EXIT_OK:
        return EXIT_OK
    code = EXIT_CONFIG if exit_.code == EXIT_CONFIG else EXIT_FAILED
    lines = [f"error: the replay failed ({exit_.how}); the last lines of {exit_.process}:"]
    lines += [f"  │ {line}" for line in exit_.lines]
    _complain("\n".join([*lines, f"  all of them: {exit_.log_file}"]))
    return code


def _complain(text: str) -> None:
    typer.echo(visible(text), err=True)


# ---- what is shown --------------------------------------------------------------------------------------------


@dataclass
class ReplayScreen:
    """Shows what the ranks report. recorded: of each step, what its file says of the run then."""

    run: str
    recorded: Mapping[int, Facts]
    changes: ConfigChanges
    as_json: bool
    _steps: list[Record] = field(default_factory=list)

    def show(self, record: Record) -> None:
        """One record, see `policy_worker.training.replay.Report`."""
        if record["event"] == "begin":
            record |= {"run": self.run, "changed": self.changes.keys}
            reasons = differences(record, self.recorded, self.changes)
            record |= {"comparable": not reasons, "differs": reasons}
        if record["event"] == "step":
            self._steps.append(record)
        self._say(record)

    def end(self) -> None:
        """The medians of all steps."""
        if self._steps:
            self._say({"event": "end", "steps": len(self._steps), "median": medians(self._steps)})

    def _say(self, record: Record) -> None:
        if self.as_json:
            typer.echo(json.dumps(record))
        else:
            typer.echo(visible(text_of(record)), err=record["event"] == "warning")


def differences(begin: Mapping[str, Any], recorded: Mapping[int, Facts], changes: ConfigChanges) -> list[str]:
    """Why the numbers of a replay are not those of the run; empty: they are.

    recorded: of each step. One that was trained after a resume may have been trained otherwise.
    """

    def first(differs: Callable[[Facts], bool]) -> int | None:
        return next((step for step, facts in recorded.items() if differs(facts)), None)

    reasons, start = [], min(recorded)
    total = recorded[start].total_steps
    if not begin["exact"]:
        reasons.append(f"the weights are not exactly those of step {start}")
    if (step := first(lambda facts: facts.ranks != begin["ranks"])) is not None:
        reasons.append(f"step {step} was trained on {_ranks(recorded[step].ranks)}")
    if (step := first(lambda facts: facts.total_steps != total)) is not None:
        of_step = recorded[step].total_steps
        reasons.append(f"the schedule had {total} steps at step {start}, {of_step} at step {step}")
    same = first(lambda facts: facts.settings != changes.now) is None
    step = first(lambda facts: facts.settings != changes.before)
    if not same and step is not None:
        reasons.append(f"step {step} was trained with settings other than those of config.toml")
    if changed := [
        key
        for key in changes.keys
        if key.startswith(("placement.", "launcher.")) or (changes_numbers(key) and not same)
    ]:
        reasons.append(f"{', '.join(changed)} changed")
    return reasons


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def medians(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the medians of seconds and of tokens a second: the first steps warm up."""
    return {name: statistics.median(step[name] for step in steps) for name in ("train_seconds", "tokens_per_s")}


def text_of(record: Mapping[str, Any]) -> str:
    """A record for people."""
    if record["event"] == "begin":
        steps = record["steps"]
        steps_text = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        whole = f"{record['run']}: {steps_text} on {_ranks(record['ranks'])}, from {record['weights']}"
        if record["comparable"]:
            return f"{whole}\nnumbers can be compared with those of the run"
        return f"{whole}\nnumbers cannot be compared with those of the run: {'; '.join(record['differs'])}"
    if record["event"] == "step":
        named = (("loss", "loss"), ("reward", "reward_mean"), ("grad norm", "grad_norm"))
        parts = [f"{words} {_number(record['metrics'].get(name))}" for words, name in named]
        return f"step {record['step']}  {'  '.join(parts)}  {_speed(record)}"
    if record["event"] == "end":
        count = record["steps"]
        return f"median of {count} step{'s' if count > 1 else ''}: {_speed(record['median'])}"
    return f"warning: {record['text']}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def _speed(speeds: Mapping[str, Any]) -> str:
    return f"{speeds['train_seconds']:.3f} s  {speeds['tokens_per_s']:.0f} tokens/s"
