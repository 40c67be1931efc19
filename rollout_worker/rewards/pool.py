"""The pool of reward processes: one sample at a time for each, with a deadline; replacements for what dies.

    submit(task) ─▶ queue ─▶ a process takes one ─▶ its reply ─▶ the sample's future
                      ▲                    │
                      │                    │ deadline missed or process dead: the sample has failed,
                      │                    ▼ the process is replaced
                      └───── a sample that failed, again

A sample gets exactly one result: rewards, or an error with a name, that of its last attempt. It is scored again
`retries` times, which is cheap compared to generating it again: a sample that always hangs takes 1 + `retries`
time-outs, one after the other, each at the end of the queue. A message per sample costs 0.1 ms, so nothing is sent
ahead: no sample waits behind a slow one while another process is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

from rollout_worker.rewards.protocol import MessageDecoder, ProtocolError, encode
from rollout_worker.rewards.registry import RewardConfigError
from schema.config import RewardConfig
from schema.util.gpus import VISIBLE
from schema.util.memory_kills import RecentKills

log = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds in which a process must have imported the functions: a user's file may import large libraries."""
MAX_FAILED_STARTS = 3
STOP_TIMEOUT = 5.0
GRACE = 0.05
MAX_SAID = 1000
"""Bytes of what a process wrote to standard error before it died that its sample's error shows."""
OUTAGE_WAIT = 1.0
"""Seconds before a sample that failed by a time-out or connection error is scored again."""
PASSED_ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR",
    "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "COSMOS_PARENT_PID",
)  # fmt: skip
"""The variables that a reward process inherits besides `reward.environment`: no token or secret of this one is among
it. By COSMOS_PARENT_PID the launcher finds what functions have started, if the keeper above is killed."""


class RewardPoolError(Exception):
    """Reward processes cannot be started any more."""


@dataclass(frozen=True, slots=True)
class Task:
    """One sample to score with some of the pool's functions."""

    completion: str
    row: dict[str, Any]
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Rewards by function; with an error, only of those functions that worked. Of the last attempt."""

    rewards: dict[str, float]
    error: str | None = None
    outage: bool = False
    """Whether the error is a time-out or a connection error (see `process.is_outage`)."""
    parts: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By function: at which characters of the answer parts of its reward were earned, in order."""
    answer: str | None = None
    """The answer that was extracted of the completion; None: no function has extracted any."""
    seconds: float = field(default=0.0, compare=False)
    """Spent on this sample by the process that scored it, without waiting for that process."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """They say what a pool has in hand, and what it has done since it was made."""

    pending: int = 0
    """Samples without a result: queued or being scored."""
    oldest_s: float = 0.0
    """Seconds since the oldest of them was submitted; 0 without one."""
    attempts: int = 0
    """Samples that a process was busy with, each as often as it was."""
    seconds: float = 0.0
    """Spent on them: n busy processes spend n seconds per second."""
    failed: int = 0
    """Samples whose result is an error."""
    retried: int = 0
    """Attempts that failed and were followed by another."""


@dataclass(slots=True, eq=False)
class _Job:
    task: Task
    future: asyncio.Future[RewardResult]
    submitted: float
    """Time of the monotonic clock."""
    retries: int
    """How often it may be scored again."""


class RewardPool:
    """Reward processes for a set of functions. Belongs to one event loop."""

    def __init__(self, functions: Iterable[str], custom: Mapping[str, Any], settings: RewardConfig) -> None:
        self._setup = {"functions": sorted(functions), "custom": dict(custom)}
        self._settings = settings
        self._jobs: deque[_Job] = deque()
        self._open: dict[_Job, None] = {}
        """Queued and in work, the oldest first."""
        self._attempts, self._seconds, self._failed, self._retried = 0, 0.0, 0, 0
        self._work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: RewardPoolError | None = None

    async def start(self) -> None:
        """Start the processes. Raises `RewardConfigError` when a function or a variable cannot be had,
        `RewardPoolError`."""
        for name in self._settings.environment:
            if name not in os.environ and name != VISIBLE:
                raise RewardConfigError(
                    f"reward.environment: {name} is not set in the environment of this process; "
                    f"export {name}=… where it is started, or leave the name out"
                )
        starts = [asyncio.create_task(self._started(_UnreadyError)) for _ in range(self._settings.num_workers)]
        try:
            first = await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            for process in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(process, _Process):
                    await process.stop()
            raise
        self._tasks = [asyncio.create_task(self._serve(process)) for process in first]
        await asyncio.sleep(0)  # a task that is cancelled before it begins would not stop its process

    def submit(self, task: Task) -> asyncio.Future[RewardResult]:
        """Queue one sample. The future raises `RewardPoolError` when no process can be started any more."""
        future: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
        else:
            job = _Job(task, future, time.monotonic(), self._settings.retries)
            self._open[job] = None
            self._queue(job)
        return future

    def stats(self) -> PoolStats:
        """The numbers of this moment."""
        oldest = next(iter(self._open), None)
        age = time.monotonic() - oldest.submitted if oldest else 0.0
        done = self._attempts, self._seconds, self._failed, self._retried
        return PoolStats(len(self._open), age, *done)

    async def watch(self) -> None:
        """Returns never; raises `RewardPoolError` when processes cannot be started any more."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """End all processes; samples that are not done are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._jobs.clear()
        for job in self._open:
            job.future.cancel()
        self._open.clear()

    async def _serve(self, process: _Process) -> None:
        """Feed one process for ever, replacing it whenever a sample hangs or kills it."""
        try:
            while True:
                job, began = await self._take(), time.monotonic()
                try:
                    self._settle(job, await process.score(job.task, self._settings.timeout))
                except _Lost as lost:
                    late, seconds = isinstance(lost, _Overdue), time.monotonic() - began
                    self._settle(job, RewardResult({}, str(lost), late, seconds=seconds))
                    log.warning("a reward process is replaced: %s", lost)
                    await process.stop()
                    # In the place of one that was lost: once the functions were there, nothing is final.
                    process = await self._started(_UnreadyError, RewardConfigError, OSError)
        except RewardPoolError as failure:
            self._fail(failure)
            raise
        finally:
            await process.stop()

    async def _take(self) -> _Job:
        while not self._jobs:
            self._work.clear()
            await self._work.wait()
        return self._jobs.popleft()

    def _settle(self, job: _Job, result: RewardResult) -> None:
        self._attempts += 1
        self._seconds += result.seconds
        if result.error is not None and job.retries:
            job.retries -= 1
            self._retried += 1
            wait = OUTAGE_WAIT if result.outage else 0.0
            asyncio.get_running_loop().call_later(wait, self._queue, job)
            return
        self._failed += result.error is not None
        self._open.pop(job, None)
        if not job.future.done():
            job.future.set_result(result)

    def _queue(self, job: _Job) -> None:
        self._jobs.append(job)
        self._work.set()

    async def _started(self, *passing: type[Exception]) -> _Process:
        """A new process; failures of the `passing` kinds may pass and are tried again."""
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            try:
                return await _Process.start(self._setup, self._settings.environment)
            except passing as error:
                log.warning("a reward process did not start (%d of %d): %s", attempt, MAX_FAILED_STARTS, error)
                cause = error
        raise RewardPoolError(f"reward processes do not start any more: {cause}")

    def _fail(self, failure: RewardPoolError) -> None:
        self._failure = failure
        self._jobs.clear()
        for job in self._open:
            if not job.future.done():
                job.future.set_exception(failure)
        self._open.clear()


class _Lost(Exception):
    """The process hung or died; the text is the error of the sample it was busy with."""


class _Overdue(_Lost):
    """The process missed the deadline of a sample."""


class _UnreadyError(Exception):
    """A process was killed before it was ready, or took too long: not the fault of the functions."""


class _Process:
    """One running reward process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process, errors: FileIO) -> None:
        """errors: the readable end, not blocking, of what is its standard error."""
        self._process, self._decoder, self._errors = process, MessageDecoder(), errors
        self._replies: deque[dict[str, Any]] = deque()
        self._kills = RecentKills()
        self._function, self._said = "", b""
        asyncio.get_running_loop().add_reader(errors, self._hear)

    @classmethod
    async def start(cls, setup: dict[str, Any], variables: Sequence[str]) -> _Process:
        """variables: what it gets of the environment besides `PASSED_ENVIRONMENT`.

        Raises `RewardConfigError`, `_UnreadyError`, or `OSError` when it does not get ready.
        """
        passed = [name for name in (*PASSED_ENVIRONMENT, *variables) if name in os.environ]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        if VISIBLE not in variables:  # the GPUs are the engine's, to the last byte of their memory
            environment[VISIBLE] = ""
        environment |= {name: os.environ[name] for name in passed}
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        errors = FileIO(reading)
        try:
            started = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # the current directory is not a place to import from
                "-m",
                "rollout_worker.rewards.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=writing,
                env=environment,
                start_new_session=True,  # so that `stop` gets what the functions have started
            )
        except BaseException:
            errors.close()
            raise
        finally:
            os.close(writing)
        process = cls(started, errors)
        try:
            await process._send(setup)
            reply = await process._reply(START_TIMEOUT)
        except TimeoutError:
            await process.stop()
            raise _UnreadyError(f"it was not ready after {START_TIMEOUT:g} s") from None
        except _Lost as lost:
            killed = await process.was_killed()
            await process.stop()
            raise (_UnreadyError if killed else RewardConfigError)(
                f"the reward process did not start: {lost}"
            ) from lost
        except BaseException:
            await process.stop()
            raise
        if "fatal" in reply:
            await process.stop()
            raise RewardConfigError(reply["fatal"])
        return process

    async def score(self, task: Task, timeout: float) -> RewardResult:
        """The result of one sample. Raises `_Lost`, with the error of the sample, when the process is lost."""
        self._kills.look()
        self._function, self._said = task.functions[0], b""
        try:
            async with asyncio.timeout(timeout):
                await self._send({"sample": [task.completion, task.row, task.functions]})
            return RewardResult(**await self._reply(timeout))
        except TimeoutError:
            raise _Overdue(f"RewardTimeout: the sample took longer than {timeout:g} s{self._where()}") from None

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(message))
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError, RuntimeError):  # the last is uvloop's
            raise _Lost(f"RewardCrash: the reward process closed its input{self._where()}") from None

    async def _reply(self, timeout: float) -> dict[str, Any]:
        """The next message; `timeout` counts from now, which is when the process begins with it."""
        for wait in (timeout, GRACE):
            # If this loop itself was held up, the reply may be there and only the clock was looked at first.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    while not self._replies:
                        await self._read()
                return self._replies.popleft()
        raise TimeoutError

    async def _read(self) -> None:
        assert self._process.stdout is not None
        data = await self._process.stdout.read(1 << 20)
        if not data:
            code = await self._process.wait()
            memory = self._kills.cause() if code == -signal.SIGKILL else ""
            cause = memory or (f"signal {-code}" if code < 0 else f"exit code {code}")
            self._hear()
            said = self._said.decode(errors="replace").strip()
            raise _Lost(f"RewardCrash: the reward process died ({cause}){self._where()}\n{said}".rstrip())
        try:
            for message in self._decoder.feed(data):
                if "at" in message:
                    self._function = message["at"]
                else:
                    self._replies.append(message)
        except ProtocolError as error:
            raise _Lost(f"RewardCrash: the reward process sent nonsense: {error}{self._where()}") from None

    def _where(self) -> str:
        """The function that it is busy with, as an error tells it."""
        return f"\nin reward function {self._function}" if self._function else ""

    def _hear(self) -> None:
        """Pass on what it wrote to standard error, and keep the end of it."""
        if data := self._errors.read(1 << 16):
            self._said = (self._said + data)[-MAX_SAID:]
            with contextlib.suppress(OSError):
                os.write(2, data)
        elif data is not None:
            asyncio.get_running_loop().remove_reader(self._errors)

    async def was_killed(self) -> bool:
        """Whether a signal ended it, or was about to: its pipes are closed before its end is known."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                return await self._process.wait() < 0
        except TimeoutError:
            return False

    async def stop(self) -> None:
        """Kill it and its children: a process in the middle of a function does not listen."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if not self._errors.closed:
            self._hear()
            asyncio.get_running_loop().remove_reader(self._errors)
            self._errors.close()
