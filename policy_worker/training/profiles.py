"""Profiles of training steps: one that begins with the trainer, others on demand, written next to the training.

    order ─▶ waiting ─▶ warm-up ─▶ recording ─▶ writing ─▶ written | failed        `session.profile` says which
             (rank 0 spreads it at a step boundary: from there on all ranks decide alike)

A rank that is named records from one boundary to another, with everything in between: waiting, training, committing,
publishing. Then a thread writes `step-…-rank….json.gz`, a trace in Chrome's format, and a table of the costliest
operations next to it. Nothing here ends training: what fails is logged, and reported as trouble.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from policy_worker import ranges
from policy_worker.process import ShutdownRequest
from policy_worker.session import Session
from policy_worker.trained.trainer import Trainer
from schema.config.sections.profiler import ProfilerConfig, SubProfilerConfig
from schema.util.atomic_file import replacing, write_text
from schema.util.threads import in_daemon
from schema.wire import messages as m

log = logging.getLogger(__name__)

PATIENCE = 300.0
"""Seconds that the end of training waits for traces: a disk that hangs must not hold it up for ever."""
LOOK = 0.05
SHOWN = 60.0
"""Seconds for which heartbeats carry a trouble: one arrives, and other troubles are seen after it."""
ROWS = 40
"""Operations in the table."""

Phase = Literal["waiting", "warm-up", "recording", "over"]


# ---- which steps, on which ranks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfileWindow:
    """The steps that one profile records; the same on all ranks."""

    profile_id: str
    first: int
    steps: int
    warmup: int
    ranks: tuple[int, ...]

    @staticmethod
    def of_config(settings: SubProfilerConfig, step: int, world: int) -> ProfileWindow:
        """Make the window of a trainer that begins with this step."""
        first = step + settings.wait_steps + settings.warmup_steps
        ranks = tuple(sorted(set(settings.rank_filter))) or tuple(range(world))
        return ProfileWindow(uuid.uuid4().hex, first, settings.active_steps, settings.warmup_steps, ranks)

    @staticmethod
    def of_order(order: m.ProfileOrder, step: int) -> ProfileWindow:
        """Make the window of an order known before this step. A warm-up that would have begun before is shorter.

        Raises `ValueError`: its first step has begun before."""
        first = step + order.warmup if order.first_step is None else order.first_step
        if first < step:
            raise ValueError(f"step {first} had begun when the trainer heard of it: name a later one, or none")
        return ProfileWindow(
            order.profile_id, first, order.steps, min(order.warmup, first - step), tuple(order.ranks)
        )

    def phase(self, step: int) -> Phase:
        """Return what is due when this step is about to begin."""
        if step >= self.first + self.steps:
            return "over"
        if step >= self.first:
            return "recording"
        return "warm-up" if step >= self.first - self.warmup else "waiting"

    def name(self, rank: int) -> str:
        """The trace of a rank."""
        last = self.first + self.steps - 1
        steps = f"step-{self.first:08}" if last == self.first else f"steps-{self.first:08}-{last:08}"
        return f"{steps}-rank{rank}.json.gz"


# ---- recording and writing, on one rank -----------------------------------------------------------------------


class Recorder:
    """A torch profile of this thread, being warmed up from the first moment on."""

    def __init__(self, settings: SubProfilerConfig, model: nn.Module) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            record_shapes=settings.record_shape,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
            with_modules=settings.with_modules,
        )
        self._model = model if settings.with_modules else None
        self._modules: ModuleRanges | None = None
        self._started = False
        self._profile.prepare_trace()

    def start(self) -> None:
        """End the warm-up, if that has not been done."""
        if self._started:
            return
        self._started = True
        self._profile.start_trace()
        ranges.record(True)
        if self._model is not None:
            self._modules = ModuleRanges()
            self._modules.watch(self._model)

    def stop(self) -> profile:
        """End the profile; return what was recorded."""
        ranges.record(False)
        if self._modules is not None:
            self._modules.remove()
        if not self._started:  # the profiler knows no other way out of a warm-up
            self._profile.start_trace()
        self._profile.stop_trace()
        return self._profile


class ModuleRanges:
    """The name of each module as a range around its forward; torch itself names those of TorchScript alone."""

    def __init__(self) -> None:
        self._open = threading.local()  # the backward of a GPU recomputes in another thread
        self._hooks: list[RemovableHandle] = []

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name:
                self._hooks += (
                    module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True),
                    module.register_forward_hook(lambda *_: self._leave(), always_call=True),
                )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._stack.append(opened)

    def _leave(self) -> None:
        self._stack.pop().__exit__(None, None, None)

    @property
    def _stack(self) -> list[Any]:
        return self._open.__dict__.setdefault("stack", [])


def write(trace: profile, target: Path) -> None:
    """Write a trace, whole or not at all, after the table that lies next to it. Raises `OSError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sort = "self_cuda_time_total" if ProfilerActivity.CUDA in trace.activities else "self_cpu_time_total"
    table = trace.key_averages().table(sort_by=sort, row_limit=ROWS, max_name_column_width=80)
    write_text(table_of(target), table)
    with replacing(target) as packed:
        raw = packed.with_name(f".raw{packed.name}")
        try:
            trace.export_chrome_trace(str(raw))
            check_whole(raw)
            with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        finally:
            raw.unlink(missing_ok=True)


def table_of(trace: Path) -> Path:
    """The table next to a trace."""
    return trace.with_name(trace.name.removesuffix(".json.gz") + ".txt")


def check_whole(path: Path) -> None:
    """Raises `OSError` unless a file ends as JSON does: torch does not say that a disk is full."""
    with path.open("rb") as file:
        file.seek(max(0, os.path.getsize(path) - 16))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"{path.parent} did not take the whole trace: is its disk full?")


# ---- all ranks together ---------------------------------------------------------------------------------------


class Profiles:
    """See the module's docstring. All ranks call alike, from the training's thread; `session` on rank 0 only."""

    def __init__(
        self,
        config: ProfilerConfig,
        trainer: Trainer,
        directory: Path,
        session: Session | None,
        shutdown: ShutdownRequest,
        prefix: str = "",
    ) -> None:
        """prefix: of the names of traces."""
        self._config, self._trainer, self._directory, self._prefix = config, trainer, directory, prefix
        self._session, self._shutdown = session, shutdown
        self._window: ProfileWindow | None = None
        self._recorder: Recorder | None = None
        self._writing: Future[None] | None = None
        self._handed_over = False
        """Whether recording is over, so that only writing is waited for."""
        self._fault = ""
        """The fault of the present profile on this rank."""
        self._trouble, self._troubled_at = "", 0.0
        if session is not None:
            session.troubles.append(self.trouble)

    def begin(self, step: int) -> None:
        """Training begins with this step."""
        settings, world = self._config.sub_profiler_config, self._trainer.group.world
        if self._config.enable_profiler and settings.do_profile:
            self._set(ProfileWindow.of_config(settings, step, world))

    def signals(self) -> tuple[float, float, float]:
        """Signal whether this rank has an order to take and is writing a trace, and its number + 1 if it has
        failed."""
        session, writing = self._session, self._writing
        ordered = session is not None and session.profile_is_asked and self._window is None
        # In this order: what fails in between is seen as failed, never as neither.
        running = writing is not None and not writing.done()
        return float(ordered), float(running), float(self._trainer.group.rank + 1 if self._fault else 0)

    def reach(self, step: int, signals: Sequence[float]) -> None:
        """This step is about to begin; called as often as its batch is asked for.

        signals: the maximum over all ranks; a collective if they say that there is an order."""
        ordered, running, failed = signals
        if ordered:
            self._take(step)
        window = self._window
        if window is None:
            return
        if self._handed_over:
            if not running:
                self._end(window, int(failed))
            return
        phase = window.phase(step)
        if phase == "over":
            self._hand_over(window)
        elif phase != "waiting":
            self._record(window, phase)

    def stop(self, step: int) -> None:
        """Training has ended before this step: what was recorded until now is written."""
        window = self._window
        if window is None or self._handed_over:
            return
        done = step - window.first
        if done > 0:
            window = self._window = ProfileWindow(window.profile_id, window.first, done, window.warmup, window.ranks)
            return self._hand_over(window)
        if self._recorder is not None:
            self._try(self._recorder.stop)
        self._recorder, self._window = None, None
        detail = f"training ended before step {window.first} was trained"
        log.warning("no profile: %s", detail)
        self._say(window, "failed", detail)

    def settle(self, patience: float) -> None:
        """Wait for what is being written. A collective.

        patience: seconds to wait on once this replica was asked to leave."""
        group, window, give_up = self._trainer.group, self._window, time.monotonic() + PATIENCE
        while window is not None:
            if self._shutdown:
                give_up = min(give_up, time.monotonic() + patience)
            late = float(time.monotonic() >= give_up)
            _, running, failed, gives_up = group.all_reduce([*self.signals(), late], "max")
            if not running or gives_up:
                self._end(window, int(failed), late=bool(running))
                return
            time.sleep(LOOK)

    def trouble(self) -> str:
        """Describe what went wrong, for people; "": nothing, or it was said long enough."""
        return self._trouble if time.monotonic() < self._troubled_at + SHOWN else ""

    # ---- one profile --------------------------------------------------------------------------------------

    def _take(self, step: int) -> None:
        """All ranks learn of the order that rank 0 has."""
        session = self._session
        shared = self._trainer.group.lead(lambda: session.take_profile().model_dump() if session else None)
        order = m.ProfileOrder.model_validate(shared)
        try:
            self._set(ProfileWindow.of_order(order, step))
        except ValueError as error:
            log.warning("no profile: %s", error)
            if session is not None:
                session.profile = m.ProfileStatus(**order.model_dump(), state="failed", detail=str(error))

    def _set(self, window: ProfileWindow) -> None:
        self._window, self._handed_over, self._fault = window, False, ""
        self._say(window, "waiting")
        log.info("a profile of %d steps, from step %d on, of ranks %s", window.steps, window.first, window.ranks)

    def _record(self, window: ProfileWindow, phase: Phase) -> None:
        """Warm up or record, where this rank is one of those."""
        if phase == "recording":
            self._say(window, "recording")
        if self._trainer.group.rank not in window.ranks or self._fault:
            return
        if self._recorder is None:
            self._try(self._prepare)
        if phase == "recording" and self._recorder is not None:
            self._try(self._recorder.start)

    def _prepare(self) -> None:
        self._recorder = Recorder(self._config.sub_profiler_config, self._trainer.model)

    def _hand_over(self, window: ProfileWindow) -> None:
        """End recording; a thread writes the trace."""
        self._handed_over = True
        self._say(window, "writing")
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            target = self._directory / (self._prefix + window.name(self._trainer.group.rank))
            self._try(lambda: self._start_writing(recorder, target))

    def _start_writing(self, recorder: Recorder, target: Path) -> None:
        trace = recorder.stop()  # whatever went wrong before: else it would record to the end of the run
        if not self._fault:
            self._writing = in_daemon(lambda: self._try(lambda: write(trace, target)), "profile")

    def _end(self, window: ProfileWindow, failed: int, *, late: bool = False) -> None:
        """All ranks have written, or failed to, or are not waited for."""
        self._window, self._writing = None, None
        detail = f"training has ended while it was written to {self._directory}" if late else ""
        if failed:
            detail = self._fault or f"rank {failed - 1} wrote no trace, its log says why"
        if detail:
            self._trouble, self._troubled_at = f"profile: {detail}", time.monotonic()
        else:
            log.info("the profile is in %s", self._directory)
        self._say(window, "failed" if detail else "written", detail)

    def _try(self, work: Any) -> None:
        """Whatever a profiler or a disk raises, training goes on."""
        try:
            work()
        except Exception as error:
            self._fault = f"{type(error).__name__}: {error}"
            log.warning("training goes on without a trace: %s", self._fault)
            ranges.record(False)

    def _say(self, window: ProfileWindow, state: m.ProfileState, detail: str = "") -> None:
        if self._session is not None:
            self._session.profile = m.ProfileStatus(
                profile_id=window.profile_id, state=state, first_step=window.first, steps=window.steps,
                warmup=window.warmup, ranks=list(window.ranks), directory=str(self._directory),
                files=[self._prefix + window.name(rank) for rank in window.ranks[: m.MOST_FILES]],
                detail=detail[: m.MOST_DETAIL],
            )  # fmt: skip
