"""Training again on recorded batches, without controller and generators: for profiling and debugging.

    weights before the first step ─▶ step ─▶ step ─▶ … ─▶ a line of JSON each

Nothing is published, committed or saved, and nothing but profiles is written into the run's directory. With the
weights of exactly the first step, the same configuration and as many ranks, each number is that of the run.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from policy_worker.checkpoints.find import Resumption, before_step
from policy_worker.checkpoints.load import CheckpointParts, parts_of
from policy_worker.errors import BadBatchError, SettingsError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.ranges import span
from policy_worker.training.grpo import Grpo
from policy_worker.training.profiles import Profiles
from schema.config import Config
from schema.wire import batch_file
from schema.wire.batch_file import Facts, NotRecordedError
from schema.wire.frame import FrameError

log = logging.getLogger(__name__)

PROFILE_SHARE = 0.6
"""Share of the time for leaving, for a trace that is being written then: nothing else is left to do."""
EVERYTHING = CheckpointParts("state", optimizer=True, extra=True)


@dataclass(frozen=True)
class ReplayStart:
    """The beginning of a replay. resumption: None is the configured model. facts: of the first step's file."""

    steps: list[int]
    facts: Facts
    resumption: Resumption | None
    exact: bool

    @property
    def weights(self) -> str:
        """Which weights these are, for people."""
        if self.resumption is not None:
            return f"checkpoint {self.resumption.path}"
        if not self.facts.began_from:
            return "the model as it was at step 0"
        return f"the configured model: no checkpoint that led to step {self.steps[0]} is left"

    @property
    def weights_step(self) -> int:
        """The steps that they contain."""
        return 0 if self.resumption is None else self.resumption.step


def begin(group: RankGroup, config: Config, run_dir: Path, first: int | None, count: int | None) -> ReplayStart:
    """Choose steps and weights. A collective.

    Raises:
        SettingsError: such steps are not recorded.
        BadBatchError: the file of the first cannot be read.
        CheckpointError: see `before_step`.
    """
    folder = batch_file.folder_of(run_dir)

    def chosen() -> dict[str, Any]:
        try:
            steps = batch_file.choose(batch_file.recorded(folder), first, count)
            table, _, facts = batch_file.read(batch_file.path_of(folder, steps[0]))
        except NotRecordedError as error:
            raise SettingsError(f"{folder}: {error}") from error
        except (FrameError, OSError) as error:
            raise BadBatchError(str(error)) from error
        return {"steps": steps, "timeline": table.timeline, "facts": facts.model_dump()}

    choice = group.lead(chosen)
    steps, facts = choice["steps"], Facts.model_validate(choice["facts"])
    resumption = before_step(group, config, run_dir, steps[0], choice["timeline"], facts.began_from)
    if resumption is None:
        exact = steps[0] == 0 and not facts.began_from
    else:
        exact = resumption.step == steps[0]
        exact &= not resumption.own or parts_of(resumption, config) == EVERYTHING
    return ReplayStart(steps, facts, resumption, exact)


def check_same(step: int, digests: Sequence[str]) -> None:
    """Raises `BadBatchError` unless all ranks have read the same batch: they would wait for each other in vain."""
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise BadBatchError(
            f"rank {other} has read another batch of step {step} than rank 0: its file was replaced meanwhile; "
            f"replay it again once the run has ended, or has gone on past this step"
        )


class Report(logging.Handler):
    """Writes results, and warnings of the log, as lines of JSON to a stream, if there is one."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__(logging.WARNING)
        self._stream = stream

    def line(self, event: str, **facts: Any) -> None:
        """One line. event: begin, step or warning."""
        if self._stream is not None:
            self._stream.write(json.dumps({"event": event, **facts}) + "\n")
            self._stream.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """A warning of the log."""
        self.line("warning", text=record.getMessage())


class Replay:
    """Trains recorded steps in order; `profiles` records those that `[profiler]` asks for."""

    def __init__(
        self, algorithm: Grpo, group: RankGroup, shutdown: ShutdownRequest, report: Report, profiles: Profiles
    ) -> None:
        self._algorithm, self._group, self._profiles = algorithm, group, profiles
        self._shutdown, self._report = shutdown, report

    def run(self, steps: Sequence[int], repeat: int) -> None:
        """Train them all, `repeat` times, each time from the weights of the time before; until asked to leave.

        To a profile the repeated steps are further ones: it counts on.

        Raises `PolicyError`: a batch cannot be read or is not the same on all ranks, or training fails on it."""
        group, profiles, count = self._group, self._profiles, steps[0]
        profiles.begin(count)
        for number, step in itertools.product(range(1, repeat + 1), steps):
            flags = [*profiles.signals(), float(bool(self._shutdown))]
            ordered, running, failed, leaves = group.all_reduce(flags, "max")
            if leaves:
                break
            profiles.reach(count, (ordered, running, failed))
            self._train(step, number)
            count += 1
        profiles.stop(count)
        profiles.settle(PROFILE_SHARE * self._shutdown.grace)
        if trouble := profiles.trouble():
            log.warning("%s", trouble)

    def _train(self, step: int, number: int) -> None:
        table = self._algorithm.poll(step, 0.0)
        assert table is not None
        check_same(step, self._group.gather(table.digest))
        began = time.monotonic()
        with span("step"):
            metrics = self._algorithm.train_on(table)
        seconds = time.monotonic() - began
        assert metrics is not None
        self._report.line(
            "step",
            step=step,
            repeat=number,
            train_seconds=seconds,
            tokens_per_s=metrics["tokens"] / max(seconds, 1e-9),
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        )
