"""A replay: a run's trainer alone, on the batches that the run has recorded.

    config.toml, --set ─▶ steps, their files ─▶ ranks of policy_worker.replay ─ lines of JSON ─▶ here, for people

Nothing is written to the run but profiles, where `[profiler]` asks for them: configuration, logs and what the ranks
report are in a temporary directory.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from launcher.errors import LaunchError
from launcher.paths import resolved
from launcher.plan import nsight, placement
from launcher.plan.credentials import credentials_of
from launcher.plan.machine import find_machine
from launcher.plan.placement import PlacementError, Replica
from launcher.plan.rundir import RunDir, base_environment
from launcher.processes.signals import stop_signals
from launcher.processes.supervisor import Exit, Setting, Situation, Supervised, Supervisor
from launcher.restarts import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, SIGNALLED, Budget
from schema.config import Config, ConfigError
from schema.config.loading.load import load
from schema.util.atomic_file import write_text
from schema.util.text import visible
from schema.wire import batch_file
from schema.wire.frame import FrameError

POLL = 0.2
"""Seconds between looks at what the ranks report."""
KEY = "profiler.record_batches"
READ = ("train.", "policy.", "profiler.", "placement.", "launcher.", "rollout.sampling_config.temperature")
"""Keys that a trainer without controller and generators reads."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What to train again. first, count: None is from the oldest recorded step, and all that follow."""

    run: RunDir
    first: int | None
    count: int | None
    repeat: int
    overrides: Sequence[str]
    as_json: bool


def replay(wanted: Wanted, env: Mapping[str, str]) -> int:
    """Train, show, and answer the exit code; an interrupt ends it. The log of a failure stays.

    Raises:
        ConfigError, LaunchError: before anything starts, see `read_config`, `survey`, `placement.replay`.
    """
    run = wanted.run
    config, changed = read_config(run, wanted.overrides, env)
    steps, facts = survey(run, wanted.first, wanted.count)
    if run.is_alive():
        _complain(
            f"note: {run.path} is running: its batches are read as they are now, and it may remove them"
        )
    directory = Path(tempfile.mkdtemp(prefix="cosmos-replay-"))
    code = EXIT_OK
    try:
        write_text(directory / "config.json", json.dumps(resolved(config)), mode=0o600)
        (directory / "output.jsonl").touch()
        arguments = {
            "config": directory / "config.json", "output": directory / "output.jsonl",
            "first-step": steps[0], "steps": len(steps), "repeat": wanted.repeat,
        }  # fmt: skip
        spelled = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        replica = _placed(config, facts.ranks, [str(run.path), *spelled], env)
        screen = Screen(str(run.path), changed, wanted.as_json)
        setting = Setting(
            directory,
            directory,
            nsight.grace(config),
            Budget(0, 0.0, 0.0),
            lambda spec: {**credentials_of(spec.role, base_environment(env)), **spec.env},
            run.profiles,
        )
        code = asyncio.run(run_ranks(replica, directory / "output.jsonl", setting, screen.show))
        screen.end()
        return code
    finally:
        if code != EXIT_FAILED:  # then there is a log to read
            shutil.rmtree(directory, ignore_errors=True)


# ---- what is replayed -----------------------------------------------------------------------------------------


def read_config(run: RunDir, overrides: Sequence[str], env: Mapping[str, str]) -> tuple[Config, list[str]]:
    """The run's configuration with `--set` and the environment on top, and which keys these change.

    Raises:
        ConfigError: it is wrong, or was already. LaunchError: there is none, or a changed key would not be read.
    """
    if not run.config_toml.is_file():
        raise LaunchError(f"{run.path} holds no config.toml", "it is not the directory of a run any more")
    before = dict(_leaves(resolved(load([run.config_toml]).config)))
    config = load([run.config_toml], overrides, env).config
    if not config.is_grpo or config.is_evaluation:
        raise LaunchError(f"{run.path} is no run of reinforcement learning", "only such runs record batches")
    now = dict(_leaves(resolved(config)))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if problems := nsight.check_nsight(config):
        raise ConfigError(problems)
    if unread := [key for key in changed if not key.startswith(READ)]:
        raise LaunchError(
            f"{unread[0]} is not read by a replay: it trains recorded batches, and nothing else runs",
            "keys of [train], [policy], [profiler], [placement] and [launcher] may change",
        )
    return config, changed


def _leaves(data: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def survey(run: RunDir, first: int | None, count: int | None) -> tuple[list[int], batch_file.Facts]:
    """The steps to train again, each with a whole file of this run; and what the first one's says of the run.

    Raises:
        LaunchError: nothing is recorded, a step is missing, or a file is damaged or of another run.
    """
    folder = batch_file.folder_of(run.path)
    recorded = batch_file.recorded(folder)
    if not recorded:
        raise LaunchError(f"{run.path} has recorded no batches", _how_to_record(run))
    try:
        chosen = batch_file.choose(recorded, first, count)
        facts = [batch_file.read_facts(batch_file.path_of(folder, step)) for step in chosen]
    except batch_file.NotRecordedError as error:
        raise LaunchError(f"{folder}: {error}", "choose among these with --first-step and --steps") from None
    except FrameError as error:
        hint = "leave its step out with --first-step and --steps"
        raise LaunchError(str(error), hint, EXIT_FAILED) from None
    job = _job_of(run)
    for step, found in zip(chosen, facts, strict=True):
        if found.job_id != (job or facts[0].job_id):
            path = batch_file.path_of(folder, step)
            other = f"this run is {job}" if job else f"step {chosen[0]} is of {facts[0].job_id}"
            raise LaunchError(f"{path} is of job {found.job_id}, {other}", "put it where it belongs")
    return chosen, facts[0]


def _job_of(run: RunDir) -> str:
    try:
        return (run.path / "job_id").read_text().strip()
    except OSError:
        return ""


def _how_to_record(run: RunDir) -> str:
    if (run.summary() or {}).get("outcome") == "finished":
        return f"run it again: cosmos-launch --config {run.config_toml} --set {KEY}=8"
    first = f"cosmos-launch stop {run.path} --wait 60, then " if run.is_alive() else ""
    return f"{first}cosmos-launch --resume {run.path} --set {KEY}=8 keeps those of the newest 8 steps"


def _placed(config: Config, ranks: int, arguments: Sequence[str], env: Mapping[str, str]) -> Replica:
    try:
        return placement.replay(config, find_machine(env), ranks, arguments)
    except PlacementError as error:
        raise ConfigError([error.problem]) from None


# ---- its processes --------------------------------------------------------------------------------------------


class Once:
    """What the supervisor asks: nothing is started again."""

    async def exited(self, exit_: Exit) -> Situation:
        return Situation(over=True, needed=False)

    def event(self, text: str) -> None:
        """There is nothing to say."""


@dataclass
class Follower:
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


async def run_ranks(replica: Replica, output: Path, setting: Setting, show: Callable[[Record], None]) -> int:
    """All ranks to their end, and what they report meanwhile; the exit code. Leaves no process behind."""
    supervisor, reported = Supervisor(setting, Once()), Follower(output)
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[int] = loop.create_future()
    signals = stop_signals()

    def interrupt(number: int) -> None:
        if not interrupted.done():
            interrupted.set_result(number)

    for number in signals:
        loop.add_signal_handler(number, interrupt, int(number))
    supervised = supervisor.launch(replica)
    done = asyncio.create_task(supervised.done.wait())
    waits: set[asyncio.Future[Any]] = {done, interrupted}
    try:
        while not done.done() and not interrupted.done():
            await asyncio.wait(waits, timeout=POLL)
            for record in reported.new():
                show(record)
    finally:
        done.cancel()
        await supervisor.kill_all()
        for number in signals:
            loop.remove_signal_handler(number)
    return SIGNALLED + interrupted.result() if interrupted.done() else _code(supervised)


def _code(supervised: Supervised) -> int:
    """The exit code of ranks that have ended by themselves; says why where they failed."""
    exit_ = supervised.last_exit
    if exit_ is not None and exit_.code == EXIT_OK:
        return EXIT_OK
    if exit_ is None:
        return EXIT_FAILED
    code = EXIT_CONFIG if exit_.code == EXIT_CONFIG else EXIT_FAILED
    lines = [f"error: the replay failed ({exit_.how}); the last lines of {exit_.process}:"]
    lines += [f"  │ {line}" for line in exit_.lines]
    lines += [f"  all of them: {exit_.log_file}"] if code == EXIT_FAILED else []
    _complain("\n".join(lines))
    return code


def _complain(text: str) -> None:
    typer.echo(visible(text), err=True)


# ---- what is shown --------------------------------------------------------------------------------------------


@dataclass
class Screen:
    """Shows what the ranks report. changed: keys that are not as in the run."""

    run: str
    changed: Sequence[str]
    as_json: bool
    _steps: list[Record] = field(default_factory=list)

    def show(self, record: Record) -> None:
        """One record, see `policy_worker.training.replay.Report`."""
        if record["event"] == "begin":
            record |= {"run": self.run, "changed": list(self.changed)}
            reasons = differences(record)
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


def differences(begin: Mapping[str, Any]) -> list[str]:
    """Why the numbers of a replay are not those of the run; empty: they are."""
    reasons = []
    if not begin["exact"]:
        reasons.append(f"the weights are not exactly those of step {begin['steps'][0]}")
    if begin["ranks"] != begin["recorded_ranks"]:
        reasons.append(f"it had {begin['recorded_ranks']} rank{'s' if begin['recorded_ranks'] > 1 else ''}")
    if changed := [key for key in begin["changed"] if not key.startswith("profiler.")]:
        reasons.append(f"{', '.join(changed)} changed")
    return reasons


def medians(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of seconds and of tokens a second: the first steps warm up."""
    return {
        name: statistics.median(step[name] for step in steps) for name in ("train_seconds", "tokens_per_s")
    }


def text_of(record: Mapping[str, Any]) -> str:
    """A record for people."""
    if record["event"] == "begin":
        steps, ranks = record["steps"], record["ranks"]
        what = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        whole = f"{record['run']}: {what} on {ranks} rank{'s' if ranks > 1 else ''}, from {record['weights']}"
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


def _speed(found: Mapping[str, Any]) -> str:
    return f"{found['train_seconds']:.3f} s  {found['tokens_per_s']:.0f} tokens/s"
