"""Starts the ranks of one replica as processes, as a launcher would, but forked from one that has imported PyTorch:
what a rank imports takes seconds of both cores, and the tests start more than a hundred of them. That the program
starts by its own command is shown by the tests of whole jobs.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

IMPORTED = ["policy_worker.worker", "tests.policy_worker.material"]


class Rank:
    """A running `python -m ARGUMENTS`."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        handle, name = tempfile.mkstemp(prefix="rank-", suffix=".log")
        os.close(handle)
        self._log = Path(name)
        context = get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._process = context.Process(target=_run, args=(list(arguments), environment, name), daemon=True)
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
        return self._log.read_text(errors="replace")

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
        """It is ended if it still runs; its output is gone."""
        if self.poll() is None:
            self._process.kill()
            self._process.join()
        self._log.unlink(missing_ok=True)


def _run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def start_ranks(world: int, arguments: Sequence[str], **environment: str) -> list[Rank]:
    port = str(free_port())
    return [
        Rank(
            arguments,
            {
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment,
            },
        )
        for rank in range(world)
    ]  # fmt: skip


def wait_ranks(ranks: Sequence[Rank], timeout: float = PATIENCE) -> list[tuple[int, str]]:
    """(exit code, output) of each; none is left behind."""
    try:
        return [(rank.wait(timeout), rank.output()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()
