"""Starts cosmos-launch as a user does, and looks at it through its REST API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from controller.client import Client, ControllerError
from controller.client import calls as api
from schema.wire.messages import JobStatus, LedgerStatus
from tests.chaos.traces import is_keeper
from tests.support.metric_names import undocumented
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Path(sys.executable).with_name("cosmos-launch")
T = TypeVar("T")
GROUPS = 4
"""Groups of a step of `write_config`'s jobs."""
LONG = 3 * PATIENCE
"""Seconds for what takes a minute at most on an idle machine: engines that start, a whole job."""

SMALL = """
[policy]
model_name_or_path = "{model}"
model_max_length = 128
model_gradient_checkpointing = false

[policy.parallelism]
tp_size = 1

[rollout]
backend = "{engine}"
dtype = "float32"
n_generation = 4
batch_size = 4
max_response_length = 16
max_concurrent_samples = 32
{rollout}

[rollout.parallelism]
tp_size = 1

[rollout.sampling_config]
temperature = 1.0

[train]
output_dir = "{out}"
timestamp = "run"
seed = 3
max_num_steps = {steps}
train_batch_per_replica = 16
param_dtype = "float32"
compile = false
optm_lr = 1e-3

[train.train_policy]
type = "grpo"
prompt_column_name = "prompt"
response_column_name = "answer"
reward_function = {{ boxed_math = 1.0, format = 0.2 }}
allowed_outdated_steps = {bound}

[train.train_policy.dataset]
name = "synthetic:addition"
options = {{ n = {rows}, digits = 2, phrasings = 1 }}

[validation]
enable = {validation}
freq = 4
temperature = 1.0
top_k = -1

[validation.dataset]
name = "synthetic:addition"
options = {{ n = 8, digits = 2, phrasings = 1, seed = 7 }}

[controller]
heartbeat_interval = 0.5
heartbeat_timeout = 60.0

[launcher]
cpu_threads = 1
restart_backoff = 0.2
shutdown_timeout = 20.0
"""

VLLM = "enforce_eager = true\nmax_model_len = 128\nmax_num_seqs = 32"


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`cosmos-launch` with these arguments, to its end."""
    line = [str(COMMAND), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=LONG, check=False, cwd=ROOT)


def write_config(
    folder: Path,
    model: Path,
    *,
    engine: str = "transformers",
    bound: int = 2,
    steps: int = 8,
    rows: int = 200,
    validation: bool = True,
) -> Path:
    """A small GRPO job below `folder`: batches of 4 groups of 4 samples."""
    text = SMALL.format(
        model=model,
        engine=engine,
        out=folder,
        rollout=VLLM if engine == "vllm" else "",
        bound=bound,
        steps=steps,
        rows=rows,
        validation=str(validation).lower(),
    )
    path = folder / "job.toml"
    path.write_text(text)
    return path


@dataclass
class Program:
    """One running `cosmos-launch --config …` in a session of its own."""

    config: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] = field(init=False)

    @property
    def run_dir(self) -> Path:
        return self.config.parent / "run"

    def __enter__(self) -> Program:
        log = (self.config.parent / "launcher.log").open("a")
        self.process = subprocess.Popen(
            [str(COMMAND), "--config", str(self.config), *self.arguments],
            cwd=self.config.parent,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log.close()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(PATIENCE)
        self.wait_no_orphans()

    # ---- looking ------------------------------------------------------------------------------------------

    def output(self) -> str:
        return (self.config.parent / "launcher.log").read_text()

    def processes(self) -> list[psutil.Process]:
        """All processes below the launcher now."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def wait(self) -> int:
        """The launcher's exit code."""
        return self.process.wait(PATIENCE)

    def wait_no_orphans(self, timeout: float = PATIENCE) -> None:
        """Wait until no process of this machine has the run directory open, whichever process started it."""
        give_up = time.monotonic() + timeout
        while left := [process for process in psutil.process_iter() if str(self.run_dir) in _traces(process)]:
            assert time.monotonic() < give_up, f"processes outlived the job: {left}"
            time.sleep(0.1)

    def client(self, role: str = "user", patience: float = 30.0) -> Client:
        url = json.loads((self.run_dir / "controller.json").read_text())["url"]
        token = (self.run_dir / ".tokens" / role).read_text().strip()
        return Client(url, token, patience=patience)

    def until(self, what: str, look: Callable[[Client], T | None], timeout: float = LONG) -> T:
        """Ask until `look` answers something true. The job must not end before."""
        give_up = time.monotonic() + timeout
        while time.monotonic() < give_up:
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.output()[-5000:]}"
            if (self.run_dir / "controller.json").exists():
                try:
                    with self.client(patience=0.0) as client:
                        found = look(client)
                    if found:
                        return found
                except (ControllerError, OSError, ValueError):
                    pass  # not there yet, or just being restarted: asked again until the time-out
            time.sleep(0.1)
        raise AssertionError(f"{what} did not happen within {timeout} s:\n{self.output()[-5000:]}")

    def until_step(self, step: int) -> JobStatus:
        def reached(client: Client) -> JobStatus | None:
            status = client.send(api.job())
            return status if status.step >= step else None

        return self.until(f"step {step}", reached)

    def pid_of(self, module: str) -> int:
        """The process that runs `python -m <module>`: not its keeper, nor a child of it."""

        def find(_: Client) -> int | None:
            for process in self.processes():
                try:
                    argv, above = process.cmdline(), process.parent()
                    kept = above is not None and is_keeper(tuple(above.cmdline()))
                except psutil.Error:
                    continue
                if kept and "-m" in argv[:-1] and argv[argv.index("-m") + 1] == module:
                    return process.pid
            return None

        return self.until(f"a process of {module}", find)

    def kill(self, module: str) -> None:
        """kill -9 of that very process."""
        os.kill(self.pid_of(module), signal.SIGKILL)

    def finish(self, timeout: float = LONG) -> dict[str, Any]:
        """Wait for the end; the summary. Fails with the output if the exit code is not 0."""
        give_up = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < give_up, f"the job does not end:\n{self.output()[-5000:]}"
            time.sleep(0.2)
        assert self.process.returncode == 0, self.output()[-8000:]
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        assert undocumented(name for step in summary["steps"] for name in step["metrics"]) == set()
        return summary


def _traces(process: psutil.Process) -> str:
    """Where a process belongs: its arguments, open files and directory; nothing of one that has ended."""
    try:
        files = [file.path for file in process.open_files()]
        return " ".join([*process.cmdline(), *files, process.cwd()])
    except psutil.Error:
        return ""


def check_ledger(summary: dict[str, Any], bound: int, trained: int | None = None) -> LedgerStatus:
    """The ledger of a finished job adds up and shows nothing beyond the bound."""
    ledger = LedgerStatus.model_validate(summary["ledger"])
    assert sum(ledger.states.values()) == ledger.created
    assert sum(ledger.dropped.values()) == ledger.states["dropped"]
    assert all(ledger.states[state] == 0 for state in ("leased", "ready", "batched"))
    assert ledger.bound == bound
    assert ledger.max_staleness <= bound
    assert ledger.over_bound == 0
    if trained is not None:
        assert ledger.states["trained"] + ledger.states["durable"] == trained
    return ledger
