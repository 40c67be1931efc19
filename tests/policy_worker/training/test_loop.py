"""What the wait for a batch gives way to, and the clock of waiting."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.replicas.base import Alone
from policy_worker.training.batches.source import DataEnded
from policy_worker.training.loop import POLL, POLL_OWED, Loop, StepEnd, WaitClock
from policy_worker.training.profiles import Profiles
from policy_worker.weights.publisher import NoPublisher
from schema.config.sections.profiler import ProfilerConfig


class Scripted:
    """An algorithm whose polls are answered from a list; the last answer stays."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.waits = list(answers), list[float]()

    def poll(self, step: int, wait_s: float) -> Any | None:
        self.waits.append(wait_s)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is DataEnded:
            raise DataEnded
        return answer

    def train_on(self, batch: Any) -> dict[str, float] | None:
        return None if batch == "gone" else {"trained": 1.0}


class Publishing:
    def __init__(self, owed: bool = False, **signals: float) -> None:
        self.owed, self._signals = owed, {"failed": 0.0, "running": 0.0, "asked": 0.0, **signals}

    def signals(self) -> tuple[float, ...]:
        return tuple(self._signals.values())


@pytest.fixture
def loop(group: RankGroup) -> Loop:
    loop = Loop.__new__(Loop)  # only what a wait reads
    loop._replicas, loop._leads = Alone(), True
    loop._trainer = SimpleNamespace(group=group)  # type: ignore[assignment]
    loop._shutdown, loop.publisher, loop._clock, loop._time_share = ShutdownRequest(), NoPublisher(), None, None
    loop._profiles = Profiles(ProfilerConfig(), loop._trainer, Path(), None, loop._shutdown)
    return loop


def test_a_batch_is_waited_for_and_asked_for_again_when_its_payloads_are_gone(loop: Loop):
    algorithm = Scripted(None, "gone", None, "batch")
    assert loop.train_step(algorithm, 3) == {"trained": 1.0}
    assert algorithm.waits == [POLL] * 4
    assert loop.train_step(Scripted(DataEnded), 3) is StepEnd.NO_DATA


def test_a_shutdown_comes_before_a_checkpoint_and_both_before_the_batch(loop: Loop):
    loop._shutdown.checkpoint_asked = True
    assert loop.train_step(Scripted("batch"), 0) is StepEnd.SAVE
    loop._shutdown.request("test")
    assert loop.train_step(Scripted("batch"), 0) is StepEnd.SHUTDOWN


@pytest.mark.parametrize(
    ("publisher", "publishes"),
    [
        (Publishing(), False),
        (Publishing(failed=1.0, running=1.0), True),
        (Publishing(owed=True), True),
        (Publishing(asked=1.0), True),
        (Publishing(asked=1.0, running=1.0), False),
        (Publishing(owed=True, running=1.0), False),
    ],
)
def test_a_deferred_version_is_published_as_soon_as_the_one_before_is_through(
    loop: Loop, publisher: Any, publishes: bool
):
    loop.publisher, algorithm = publisher, Scripted("batch")
    assert (loop.train_step(algorithm, 0) is StepEnd.PUBLISH) == publishes
    assert algorithm.waits == ([] if publishes else [POLL_OWED if publisher.owed else POLL])


def test_a_wait_that_a_publication_ends_is_a_part_of_the_steps_wait(loop: Loop, monkeypatch: pytest.MonkeyPatch):
    """The clock ticks once for each question, so a wait takes as many seconds as there were questions meanwhile."""
    ticks = itertools.count()
    monkeypatch.setattr("policy_worker.training.loop.time.monotonic", lambda: float(next(ticks)))
    loop._clock, loop.publisher = WaitClock(), Publishing(owed=True)
    assert loop.train_step(Scripted("batch"), 0) is StepEnd.PUBLISH  # asked for at 0, given up at 1
    loop.publisher = NoPublisher()
    metrics = loop.train_step(Scripted("batch"), 0)  # asked for at 2, there at 3, trained at 4
    assert metrics == {"trained": 1.0, "wait_seconds": 2.0, "train_seconds": 1.0, "idle_fraction": 0.0}


def test_the_idle_fraction_leaves_out_the_first_wait():
    clock = WaitClock()
    assert clock.metrics(0.0, 5.0, 6.0) == {"wait_seconds": 5.0, "train_seconds": 1.0, "idle_fraction": 0.0}
    assert clock.metrics(6.0, 8.0, 10.0) == {"wait_seconds": 2.0, "train_seconds": 2.0, "idle_fraction": 0.4}
