"""The pool of reward processes: many samples per message, a deadline for each, replacements for what dies.

    submit(task) ─▶ queue ─▶ a process takes up to BATCH ─▶ replies, one per sample ─▶ the sample's future
                      ▲                                        │ deadline missed or process dead:
                      └──────── samples behind it ◀────────────┴ its sample is an error, the process replaced

A sample gets exactly one result: rewards, or an error with a name. Only the sample that a process was busy with
is charged when the process hangs or dies; those behind it in the message are done by another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_worker.rewards.protocol import Decoder, ProtocolError, encode
from rollout_worker.rewards.registry import RewardConfigError

log = logging.getLogger(__name__)

BATCH = 64
"""Samples per message: enough that messages cost nothing, few enough to spread over the processes."""
START_TIMEOUT = 120.0
"""Seconds in which a process must have imported the functions: a user's file may import large libraries."""
MAX_FAILED_STARTS = 3
STOP_TIMEOUT = 5.0
GRACE = 0.05
PASSED_ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH",
)  # fmt: skip
"""Everything a reward process inherits: no token or secret of this one is among it."""


class RewardPoolError(Exception):
    """Reward processes cannot be started any more."""


@dataclass(frozen=True, slots=True)
class Task:
    """One sample to score with some of the pool's functions."""

    completion: str
    row: dict[str, Any]
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """Rewards by function; with an error, only of those functions that worked."""

    rewards: dict[str, float]
    error: str | None = None


@dataclass(slots=True)
class _Job:
    task: Task
    future: asyncio.Future[Result]


class RewardPool:
    """Reward processes for a set of functions. Belongs to one event loop."""

    def __init__(
        self, functions: Sequence[str], custom: Mapping[str, Any], *, timeout: float, processes: int = 1
    ) -> None:
        """timeout: seconds that all functions together may take for one sample."""
        self._setup = {"functions": list(functions), "custom": dict(custom)}
        self._timeout, self._processes = timeout, processes
        self._jobs: deque[_Job] = deque()
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: RewardPoolError | None = None

    async def start(self) -> None:
        """Start the processes. Raises `RewardConfigError` when a function cannot be had."""
        first = [await _Process.start(self._setup)]
        try:
            for _ in range(self._processes - 1):
                first.append(await _Process.start(self._setup))
        except BaseException:
            for process in first:
                await process.stop()
            raise
        self._tasks = [asyncio.create_task(self._serve(process)) for process in first]

    def submit(self, task: Task) -> asyncio.Future[Result]:
        """Queue one sample. The future raises `RewardPoolError` when no process can be started any more."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
        else:
            self._jobs.append(_Job(task, future))
            self._work.set()
        return future

    async def watch(self) -> None:
        """Returns never; raises `RewardPoolError` when processes cannot be started any more."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """End all processes; samples that are not done are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        while self._jobs:
            self._jobs.popleft().future.cancel()

    async def _serve(self, process: _Process) -> None:
        """Feed one process for ever, replacing it whenever a sample hangs or kills it."""
        try:
            while True:
                batch = await self._take()
                try:
                    await self._score(process, batch)
                except _Lost as lost:
                    log.warning("a reward process is replaced: %s", lost)
                    await process.stop()
                    process = await self._replace()
        except RewardPoolError as failure:
            self._fail(failure)
            raise
        finally:
            await process.stop()

    async def _take(self) -> deque[_Job]:
        while not self._jobs:
            self._work.clear()
            await self._work.wait()
        share = -(-len(self._jobs) // len(self._tasks))
        return deque(self._jobs.popleft() for _ in range(min(share, BATCH)))

    async def _score(self, process: _Process, batch: deque[_Job]) -> None:
        """Score a batch. When the process is lost, its sample is settled and the rest is queued again."""
        try:
            await process.score(batch, self._timeout)
        except _Lost as lost:
            _settle(batch.popleft(), Result({}, str(lost)))
            raise
        finally:
            self._jobs.extendleft(reversed(batch))
            if batch:
                self._work.set()

    async def _replace(self) -> _Process:
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            try:
                return await _Process.start(self._setup)
            except (RewardConfigError, OSError, TimeoutError) as error:
                log.warning(
                    "a reward process did not start (%d of %d): %s", attempt, MAX_FAILED_STARTS, error
                )
                cause = error
        raise RewardPoolError(f"reward processes do not start any more: {cause}")

    def _fail(self, failure: RewardPoolError) -> None:
        self._failure = failure
        while self._jobs:
            job = self._jobs.popleft()
            if not job.future.done():
                job.future.set_exception(failure)


class _Lost(Exception):
    """The process hung or died; the text is the error of the sample it was busy with."""


class _Process:
    """One running reward process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._decoder = process, Decoder()
        self._replies: deque[dict[str, Any]] = deque()

    @classmethod
    async def start(cls, setup: dict[str, Any]) -> _Process:
        """Raises `RewardConfigError`, `OSError`, or `TimeoutError` when it does not get ready."""
        environment = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        process = cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the current directory is not a place to import from
                "-m",
                "rollout_worker.rewards.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
            )
        )
        try:
            await process._send(setup)
            reply = await process._reply(START_TIMEOUT)
        except (_Lost, TimeoutError) as error:
            await process.stop()
            raise RewardConfigError(f"the reward process did not start: {error}") from error
        except BaseException:
            await process.stop()
            raise
        if "fatal" in reply:
            await process.stop()
            raise RewardConfigError(reply["fatal"])
        return process

    async def score(self, jobs: deque[_Job], timeout: float) -> None:
        """Settle the jobs in order, taking each out of `jobs` when it is done. Raises `_Lost` at the first."""
        samples = [[job.task.completion, job.task.row, job.task.functions] for job in jobs]
        sending = asyncio.create_task(self._send({"samples": samples}))
        try:
            while jobs:
                try:
                    reply = await self._reply(timeout)
                except TimeoutError:
                    raise _Lost(f"RewardTimeout: the sample took longer than {timeout:g} s") from None
                job = jobs.popleft()
                _settle(job, Result(reply["rewards"], reply["error"]))
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, _Lost):
                await sending

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(message))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise _Lost("RewardCrash: the reward process closed its input") from None

    async def _reply(self, timeout: float) -> dict[str, Any]:
        """The next message; `timeout` counts from now, which is when the process begins with it."""
        try:
            await self._read_until_reply(timeout)
        except TimeoutError:
            # If this loop itself was held up, the reply may be there and only the clock was looked at first.
            await self._read_until_reply(GRACE)
        return self._replies.popleft()

    async def _read_until_reply(self, timeout: float) -> None:
        async with asyncio.timeout(timeout):
            while not self._replies:
                await self._read()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        data = await self._process.stdout.read(1 << 20)
        if not data:
            code = await self._process.wait()
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise _Lost(f"RewardCrash: the reward process died ({cause})")
        try:
            self._replies.extend(self._decoder.feed(data))
        except ProtocolError as error:
            raise _Lost(f"RewardCrash: the reward process sent nonsense: {error}") from None

    async def stop(self) -> None:
        """Kill it: a process in the middle of a function does not listen."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT)
        if self._process.stdin is not None:
            self._process.stdin.close()


def _settle(job: _Job, result: Result) -> None:
    if not job.future.done():
        job.future.set_result(result)
