"""The loop around an algorithm: wait for a batch, train, commit, publish, save, and the orderly end.

    publish version t ─▶ ┌ wait ─▶ train t ─▶ commit t ─▶ publish version t + 1 ─▶ checkpoint ┐ ─▶ export ─▶ leave
                         └────────────────── until the controller says finished ──────────────┘

Where several policy replicas train together, the first of them leads: it commits, publishes, saves and exports; the
next one does so after its death (`policy_worker.replicas`).

A step counts when it is committed: whatever happens before is done again from the last commit. Publishing comes
right after the commit, since rollout replicas wait for it; all of it but a copy of the weights runs in parallel with
the next step. Without rollout replicas (supervised training) nothing is published, and commits travel while the next
step is trained.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

from controller.client import calls as api
from policy_worker.checkpoints.export import export_model
from policy_worker.checkpoints.save import Checkpointer
from policy_worker.errors import LeftBehindError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from policy_worker.replicas.base import Alone, BatchChanged, Registration, Replicas
from policy_worker.session import Session
from policy_worker.training.batches.source import DataEnded
from policy_worker.training.metrics import Metrics
from policy_worker.training.profiles import Profiles
from policy_worker.training.time_share import TimeShare
from policy_worker.weights.publisher import NoPublisher, Publisher
from schema.wire import messages as m

log = logging.getLogger(__name__)

LEAVING_SHARE = 0.3
"""Share of the grace in which a replica leaves: for a publication that is on its way."""
POLL = 2.0
"""Seconds that one question for a batch may wait: so often a request to leave is looked at."""
POLL_OWED = 0.2
"""The same while a publication is deferred: a replica may be waiting for it."""
GAUGES = ("idle_fraction", "step_seconds")
"""Metrics that heartbeats carry for the display."""


class StepEnd(Enum):
    """Why there was no step. SHUTDOWN: this replica was asked to leave. NO_DATA: no step follows, the data has ended
    early. SAVE: no batch is ready, and a checkpoint was asked for: save, then ask again. PUBLISH: likewise, a
    version has to be published, or publishing has failed."""

    SHUTDOWN = auto()
    NO_DATA = auto()
    SAVE = auto()
    PUBLISH = auto()


class Algorithm(Protocol):
    """An algorithm: what differs between reinforcement learning and supervised training. All ranks call alike."""

    def poll(self, step: int, wait_s: float) -> Any | None:
        """The batch of a step; None: it is not ready after `wait_s` seconds. Raises `DataEnded`."""

    @property
    def kept(self) -> list[m.TrainedSample]:
        """The facts that are to be shown of the samples of the last step; on rank 0."""

    @property
    def validations(self) -> list[m.HeldOutLoss]:
        """Losses of the version after the last step, and of version 0 with the first, where the trainer validates."""

    def train_on(self, batch: Any) -> Metrics | None:
        """One training step; its metrics, the same on each rank. None: the batch is gone, and is polled for again."""


class Loop:
    """See the module's docstring. `session` on rank 0 only."""

    _waited_before = 0.0
    """Seconds of waits for the batch of the step that is next which ended without it."""

    def __init__(
        self,
        registration: Registration,
        checkpointer: Checkpointer,
        time_share: TimeShare | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """replicas: this one and others; None: it trains alone."""
        self._registration, self._checkpointer, self._time_share = registration, checkpointer, time_share
        config, reply, trainer, session, shutdown = registration
        self._config, self._reply, self._trainer = config, reply, trainer
        self._session, self._shutdown = session, shutdown
        self._replicas = replicas or Alone()
        self.publisher: Publisher | NoPublisher = NoPublisher()
        self._leads = False
        self._commits = Commits(trainer.group, session)
        traces = Path(reply.run_dir) / "profiles"
        prefix = self._replicas.prefix
        self._profiles = Profiles(config.profiler, trainer, traces, session, shutdown, prefix=prefix)
        self._overlaps = not config.generates and self._replicas.parts == 1
        self._clock = None if reply.mode == "sft" else WaitClock()
        self._published = -1
        self._publish_seconds = 0.0
        """Publications before the step that is next."""

    def run(self, algorithm: Algorithm, step: int) -> str:
        """Train from `step` committed steps to the end; why this replica leaves ("finished", a signal, …).

        Raises `PolicyError`, `ControllerError`, `WeightError`: training cannot go on."""
        self._lead(step)
        self._profiles.begin(step)
        finished = step >= self._reply.total_steps
        while not finished:
            self._checkpointer.check()
            if not self._begin(step):
                return self._leave_early(step)
            self._say(f"training step {step}")
            began = time.monotonic() - self._waited_before
            metrics = self.train_step(algorithm, step)
            if metrics is StepEnd.PUBLISH:
                self._publish(step)
                continue
            if isinstance(metrics, StepEnd):
                self._commits.wait()
                if metrics is StepEnd.SHUTDOWN:
                    return self._leave_early(step)
                if metrics is StepEnd.NO_DATA:
                    break
                self._save(step)
                continue
            self._report(step, metrics, algorithm, time.monotonic() - began)
            step += 1
            counted = self._count(step)
            if counted is None:
                return self._leave_early(step)
            finished, saves = counted
            if saves:
                self._save(step)
        if self._checkpointer.enabled:  # once: the data may have ended after the last commit
            self._save(step)
        if self._published != step and self._settle():
            self._publish(step)
        return self._finish(step)

    def _report(self, step: int, metrics: Metrics, algorithm: Algorithm, seconds: float) -> None:
        """A step is trained; it took so many seconds."""
        metrics |= self.publisher.metrics
        metrics["publish_seconds"] = self._publish_seconds
        metrics["step_seconds"] = seconds + self._publish_seconds
        self._publish_seconds = self._waited_before = 0.0  # they are parts of one step
        self._commits.prepare(step, metrics, algorithm.kept, algorithm.validations)
        if self._overlaps:
            self._commits.send()
        log.info("step %d trained: %s", step, " ".join(f"{k}={v:.4g}" for k, v in metrics.items()))

    def _count(self, step: int) -> tuple[bool, bool] | None:
        """Whether the job is finished with `step` steps, and whether to save; None: this replica was asked to leave
        before that is known."""
        last, saves = step >= self._reply.total_steps, False
        if self._overlaps:
            saves = self._checkpointer.due(step, last=last)
            if not last and not saves:
                return False, False
        reply = self._after_commit(step)
        if reply is None:
            return None
        if not self._overlaps:
            # Of a supervised job the controller does not count the rows.
            passes = None if self._reply.mode == "sft" else reply.epochs
            saves = self._checkpointer.due(step, last=reply.finished or last, data_passes=passes)
        return reply.finished, saves

    def _begin(self, step: int) -> bool:
        """Take part in a step, with the others that there are; False: this replica was asked to leave."""

        def save() -> None:
            self._lead(step)
            self._save(step, durably=True)

        if not self._replicas.begin(step, save):
            return False
        self._lead(step)
        return True

    def _lead(self, step: int) -> None:
        """Begin to publish and to save, if this replica leads since a moment ago. A collective.

        Raises LeftBehindError: another one has led meanwhile, which a store without its last writes did not show."""
        if self._leads and not self._replicas.leads:
            raise LeftBehindError("another policy replica leads by now: this one has to begin anew")
        if self._replicas.leads and not self._leads:
            self._leads = True
            self._checkpointer.lead()
            if self._config.generates:  # else no replica would fetch
                self.publisher = Publisher(self._registration)
            self._publish(step)

    def train_step(self, algorithm: Algorithm, step: int) -> Metrics | StepEnd:
        """Wait for the batch of a step and train on it; the step's metrics, or why there was no step."""
        waiting_since, metrics = time.monotonic(), None
        while metrics is None:
            batch = self._wait(algorithm, step)
            if isinstance(batch, StepEnd):
                self._waited_before += time.monotonic() - waiting_since
                return batch
            began = time.monotonic()
            with span("step"), suppress(BatchChanged):
                metrics = algorithm.train_on(batch)
        if self._clock is not None:
            metrics |= self._clock.metrics(waiting_since - self._waited_before, began, time.monotonic())
        if self._time_share is not None:
            metrics |= self._time_share.metrics
        return metrics | self._replicas.metrics

    def _wait(self, algorithm: Algorithm, step: int) -> Any:
        """The batch of a step, or the `StepEnd` that comes first. Where devices are taken in turns, they are those of
        rollout replicas meanwhile. A collective."""
        if self._time_share is None:
            return self._next(algorithm, step)
        self._time_share.give()
        batch = self._next(algorithm, step)
        self._time_share.take()
        return batch

    def _next(self, algorithm: Algorithm, step: int) -> Any:
        """Do as `_wait`; profiles begin and end here."""
        shutdown = self._shutdown
        while True:
            self._replicas.look()
            self._lead(step)
            flags = [float(bool(shutdown)), float(shutdown.checkpoint_asked), *self.publisher.signals()]
            flags += self._profiles.signals()
            leaves, saves, failed, publishes, wanted, *profile = self._trainer.group.all_reduce(flags, "max")
            self._profiles.reach(step, profile)
            if leaves or saves:
                return StepEnd.SHUTDOWN if leaves else StepEnd.SAVE
            owed = self.publisher.owed
            if failed or ((owed or wanted) and not publishes):
                return StepEnd.PUBLISH
            try:
                with span("wait"):  # after `reach`, so that a profile begins and ends outside of it
                    batch = algorithm.poll(step, POLL_OWED if owed else POLL)
            except DataEnded:
                return StepEnd.NO_DATA
            if batch is not None:
                return batch

    def _save(self, step: int, *, durably: bool = False) -> None:
        """durably: come back when it is written."""
        if self._leads:
            self._say(f"saving checkpoint {step}")
            self._checkpointer.save(step)
            if durably:
                self._checkpointer.wait()
        else:
            self._shutdown.checkpoint_asked = False  # the one that leads is asked by the controller

    def _after_commit(self, step: int) -> m.CommitReply | None:
        """Wait until step `step` − 1 counts, and publish if it is due; None: see `_count`."""
        reply = self._replicas.trained(step - 1, self._commit)
        if reply is None:
            return None
        self._lead(step)
        assert reply.committed_steps == step
        if reply.publish and self._published != step:
            self._publish(step)
        return reply

    def _commit(self) -> m.CommitReply:
        self._commits.send()
        reply = self._commits.wait()
        assert reply is not None
        return reply

    def _publish(self, version: int) -> None:
        """Publish, or owe it while the version before is on its way."""
        began = time.monotonic()
        with span("publish"):
            begun = self.publisher.publish(version)
        if begun:
            self._published = version
        self._publish_seconds += time.monotonic() - began

    def _settle(self) -> bool:
        """Wait for what is being published; False if this replica was asked to leave meanwhile."""
        return self.publisher.settle(LEAVING_SHARE * self._shutdown.grace)

    def _finish(self, step: int) -> str:
        self._profiles.stop(step)
        if self._config.launcher.export_final and self._leads:
            self._say("exporting the model")
            final = Path(self._reply.run_dir) / "final"
            files = self._checkpointer.export_files
            export_model(self._trainer, self._config, final, files)
            if self._trainer.ema is not None:
                averaged = final.with_name("final_ema")
                export_model(self._trainer, self._config, averaged, files, average=True)
            self._checkpointer.offer_final(final, step)
        self._say("waiting for publications, checkpoints and uploads")
        published = self._settle()
        whole = self._checkpointer.finish()
        self._profiles.settle(LEAVING_SHARE * self._shutdown.grace)
        return "finished" if whole and published else self._shutdown.reason

    def _leave_early(self, step: int) -> str:
        self._profiles.stop(step)
        if self._checkpointer.enabled:
            self._save(step)
        self._settle()
        self._profiles.settle(LEAVING_SHARE * self._shutdown.grace)
        self._checkpointer.finish()
        return self._shutdown.reason or "asked to leave on another rank"

    def _say(self, status: str) -> None:
        if self._session is not None:
            self._session.say(status)


class WaitClock:
    """How long training waited for batches; the idle fraction leaves out the first wait, in which replicas start."""

    def __init__(self) -> None:
        self._first_batch_at: float | None = None
        self._waited = 0.0

    def metrics(self, waiting_since: float, began: float, now: float) -> Metrics:
        """Return the metrics of a step whose batch was there at `began`, by the monotonic clock."""
        if self._first_batch_at is None:
            self._first_batch_at = began
        else:
            self._waited += began - waiting_since
        return {
            "wait_seconds": began - waiting_since,
            "train_seconds": now - began,
            "idle_fraction": self._waited / max(now - self._first_batch_at, 1e-9),
        }


class Commits:
    """Reports to the controller that a step is trained. All ranks call alike; `session` on rank 0 only.

    A job that generates waits for the answer: the next batch and the publication depend on it. Another one needs
    neither, so there a commit is on its way while the next step is trained; commits stay in order, one at a time, and
    each is awaited before the next is sent, so a crash loses at most the step whose commit had not been answered."""

    def __init__(self, group: RankGroup, session: Session | None) -> None:
        self._group, self._session = group, session
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._sent: Future[m.CommitReply] | None = None
        self._prepared: tuple[int, m.CommitRequest] | None = None

    def prepare(
        self,
        step: int,
        metrics: Mapping[str, float],
        kept: list[m.TrainedSample],
        validations: Sequence[m.HeldOutLoss] = (),
    ) -> None:
        """Prepare the report of a step. Metrics that are not finite stay here: they cannot travel.

        Raises:
            Whatever the commit before has raised, if it was not awaited.
        """
        self.wait()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        session = self._session
        if session is not None:
            session.gauges = {name: finite[name] for name in GAUGES if name in finite}
            batch = session.history.applied(step, finite, time.time(), validations)
            request = m.CommitRequest(
                **session.identity(), metrics=finite, batch=batch, samples=kept, validations=list(validations)
            )
            self._prepared = step, request

    def send(self) -> None:
        """Commit the step that was prepared, once, without waiting for the answer."""
        prepared, self._prepared = self._prepared, None
        if self._session is not None and prepared is not None:
            self._sent = self._pool.submit(_commit, self._session, *prepared)

    def wait(self) -> m.CommitReply | None:
        """The answer to the last commit; None if it was had before. A collective.

        Raises `LeaveRequestedError`, `ReplacedError`, `Refused`, `ControllerLost`: see `Session.call`."""
        sent, self._sent = self._sent, None
        answer = self._group.lead(lambda: None if sent is None else sent.result().model_dump())
        return None if answer is None else m.CommitReply.model_validate(answer)


def _commit(session: Session, step: int, request: m.CommitRequest) -> m.CommitReply:
    reply = session.call(api.commit(step, request))
    session.history.committed(reply)
    return reply
