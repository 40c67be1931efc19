"""`cosmos-launch profile` against a real controller; the test plays the trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controller.client import calls as api
from schema.wire import messages as m
from tests.controller.drivers import Trainer
from tests.launcher.cli import Answer, cosmos
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.served import ServedController, served_controller
from tests.support.valkey import ValkeyServer
from tests.support.waiting import PATIENCE

Play = Callable[[m.ProfileOrder], None]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyServer) -> Iterator[ServedController]:
    config = make_config(profiler={"enable_profiler": True}, controller={"heartbeat_timeout": 1000.0})
    run_dir = make_run_dir(tmp_path_factory.mktemp("job") / "run", config)
    with served_controller(run_dir, valkey.url) as controller:
        yield controller


@pytest.fixture
def trainer(served: ServedController) -> Iterator[Trainer]:
    with served.client("policy") as client:
        trainer = Trainer(client)
        trainer.register()
        yield trainer


def report(trainer: Trainer, order: m.ProfileOrder, state: m.ProfileState, **fields: object) -> None:
    status = m.ProfileStatus.model_validate({**order.model_dump(), "state": state, **fields})
    request = m.HeartbeatRequest(incarnation=trainer.reply.incarnation, profile=status)
    trainer.client.send(api.heartbeat(trainer.reply.replica_id, request))


def profiled(served: ServedController, trainer: Trainer, play: Play, *arguments: object) -> Answer:
    """What the command says while a trainer, in a thread, plays on the order that reaches it."""
    failures: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            while (order := trainer.beat().profile) is None:
                if over.wait(0.02):
                    return
            play(order)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    answer = cosmos("profile", served.url, *arguments, COSMOS_TOKEN=TOKENS["user"])
    over.set()
    thread.join(PATIENCE)
    assert failures == []
    assert not thread.is_alive()
    return answer


def test_it_names_the_traces_and_how_to_open_them(served: ServedController, trainer: Trainer):
    def play(order: m.ProfileOrder) -> None:
        assert (order.first_step, order.steps, order.warmup, order.ranks) == (3, 2, 0, [0])
        report(trainer, order, "recording", first_step=3)
        report(trainer, order, "written", directory="/there", files=["a.json.gz"], ranks=[0, 1])

    asked = ("--steps", 2, "--first-step", 3, "--warmup", 0, "--rank", 0, "--wait", PATIENCE)
    answer = profiled(served, trainer, play, *asked)
    answer.says(
        0, "a profile of 2 steps, from step 3 on", "/there/a.json.gz\nand those of 1 more ranks next", "perfetto"
    )


def test_what_came_of_it_is_an_error_by_name(served: ServedController, trainer: Trainer):
    def fails(order: m.ProfileOrder) -> None:
        report(trainer, order, "failed", detail="OSError: No space left on device")

    waiting = ("--wait", PATIENCE)
    profiled(served, trainer, fails, *waiting).complains(1, "no profile: OSError: No space left on device")
    started_again = profiled(served, trainer, lambda _: trainer.register() and None, *waiting)
    started_again.complains(1, "the trainer was started again")
    late = profiled(served, trainer, lambda order: report(trainer, order, "recording"), "--wait", 0.1)
    late.complains(1, "not there after 0.1 s")
    busy = cosmos("profile", served.url, COSMOS_TOKEN=TOKENS["user"])
    busy.complains(1, "is under way (recording; 1 step from the next step on)")


def test_a_trainer_that_is_away_and_a_rank_that_is_not_there(served: ServedController, trainer: Trainer):
    there = cosmos("profile", served.url, "--rank", 1, COSMOS_TOKEN=TOKENS["user"])
    there.complains(1, "policy-0 has no rank 1")
    huge = cosmos("profile", served.url, "--first-step", 10**30, COSMOS_TOKEN=TOKENS["user"])
    huge.complains(2, "--first-step")
    trainer.leave("test")
    away = cosmos("profile", served.url, COSMOS_TOKEN=TOKENS["user"])
    away.complains(1, "has no trainer at this moment", "shows when one has registered")


def test_traces_that_are_there_when_the_job_has_gone_are_named(tmp_path: Path):
    from launcher.commands.operate import _is_there

    status = m.ProfileStatus(
        profile_id="profile-1", first_step=1, steps=1, warmup=0, ranks=[0], state="writing",
        directory=str(tmp_path), files=["a.json.gz"],
    )  # fmt: skip
    assert not _is_there(status)
    (tmp_path / "a.json.gz").touch()
    assert _is_there(status)
