"""Processes of `python -m …`, forked from one that has imported PyTorch and the workers: what those import takes
seconds of both cores, and the tests start more than a hundred of them. That the programs start by their own commands
is shown by the tests of whole jobs.

With a GPU each is started anew: a fork of a process that has asked the driver for anything cannot use it, and what
the imports ask is theirs to say.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

IMPORTED = [
    "policy_worker.worker",
    "rollout_worker.worker",
    "rollout_worker.engines.transformers.engine",
    "tests.policy_worker.material",
]


class Forked:
    """A running `python -m ARGUMENTS`. log: gets what it writes, at its end; None: a file of its own."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: Path | None = None) -> None:
        self._own_log = log is None
        if log is None:
            handle, name = tempfile.mkstemp(prefix="forked-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        self._process = _context().Process(target=_run, args=(list(arguments), environment, str(log)))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended it; None: it runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def output(self) -> str:
        """Everything it has written."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Its exit code.

        Raises:
            TimeoutError: it still runs; the message is what it has written.
        """
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"it did not end within {timeout} s:\n{self.output()}")
        return code

    def close(self) -> None:
        """It is ended if it still runs; its own log is gone."""
        if self.poll() is None:
            self._process.kill()
            self._process.join()
        if self._own_log:
            self.log.unlink(missing_ok=True)


def _context() -> ForkServerContext | SpawnContext:
    from tests.support.devices import GPUS  # not in the process that is started: it looks for GPUs, too

    if GPUS:
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
