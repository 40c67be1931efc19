"""Bodies that hold memory: what has arrived counts, and the calls that keep a job going are let past."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from controller.api.limits import SMALL_BODY
from controller.client import ControllerLost
from tests.controller.conftest import PATIENT, Stage, asking
from tests.controller.drivers import make_frame, make_header, train_step
from tests.support.controller import TOKENS, make_config
from tests.support.served import ServedController
from tests.support.waiting import PATIENCE, until

SHARE = 3 * SMALL_BODY
"""Of rollout replicas, where max_buffered_bytes is four thirds of it."""


@contextmanager
def unfinished(served: ServedController, role: str, announced: int, sent: int) -> Iterator[socket.socket]:
    """A call with a body of which not all comes."""
    url = httpx.URL(served.url)
    head = (
        f"POST /v1/samples HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKENS[role]}\r\n"
        f"content-length: {announced}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + b"x" * sent)
        yield connection


def status(served: ServedController, role: str, size: int) -> int:
    path = "/v1/samples" if role == "rollout" else "/v1/publications"
    with asking(served.url, role) as http:
        return http.post(path, content=b"x" * size).status_code


def test_bodies_that_are_announced_and_do_not_come_cost_nobody_anything(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work(make_config(controller=PATIENT))
    most = served.job.config.controller.max_request_bytes
    with ExitStack() as held:
        drips = [held.enter_context(unfinished(served, "rollout", most, 10)) for _ in range(4)]
        for step in range(2):
            train_step(trainer, rollout, step)
            trainer.beat()
            rollout.beat()
            for drip in drips:
                drip.sendall(b"x")
        assert status(served, "rollout", 8 * SMALL_BODY) == 422, "read, and found to be no bundle"


def test_rollout_replicas_that_fill_their_share_stop_neither_the_trainer_nor_small_calls(stage: Stage) -> None:
    config = make_config(controller={**PATIENT, "max_buffered_bytes": SHARE // 3 * 4})
    served, trainer, rollout = stage.at_work(config)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(unfinished(served, "rollout", 2 * SMALL_BODY, 2 * SMALL_BODY - 1000))
        until(lambda: served.body_limit.budget.used == SHARE - 3000, "bodies that fill their share")
        assert status(served, "rollout", 2 * SMALL_BODY) == 503
        assert status(served, "policy", 2 * SMALL_BODY) == 422
        train_step(trainer, rollout, 0)
        trainer.beat()
        rollout.beat()
    until(lambda: not served.body_limit.budget.used, "their end")
    assert status(served, "rollout", 2 * SMALL_BODY) == 422


def test_a_slow_redis_stops_pushes_of_every_size_and_nothing_else(stage: Stage) -> None:
    """Payloads wait for Redis: they are handed to the store as by calls that were given up."""
    config = make_config(controller={**PATIENT, "max_buffered_bytes": SHARE, "lock_timeout": 3600.0})
    served, trainer, rollout = stage.at_work(config)
    (group,) = rollout.lease(1).groups
    store = served.job.store

    def wait_for_redis() -> None:
        served.call(lambda: store.enqueue({}, {("e9-p9", "lease.0"): b"x" * (SHARE + 1)}))

    for size in (100, 8 * SMALL_BODY):
        wait_for_redis()
        with pytest.raises(ControllerLost, match="wait for Redis"):
            rollout.push(group, make_header(0, 0), make_frame(make_header(0, 0)).ljust(size))
        assert store.backlog_bytes > SHARE
    for call in (trainer.beat, rollout.beat, lambda: trainer.publish(0), lambda: rollout.lease(1)):
        wait_for_redis()
        call()
        assert store.backlog_bytes <= SHARE, "written with what the call changed"
    assert rollout.push(group, make_header(0, 0)).accepted
