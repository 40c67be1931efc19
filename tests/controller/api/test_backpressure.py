"""Clients that push faster than Redis takes: the controller holds what it may, and says 503 to the rest."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from schema.wire.messages import PushItem, PushList
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import Rollout, make_frame, make_header, train_step
from tests.support.controller import TOKENS, ControllerProcess, make_config, running_controller
from tests.support.valkey import running_valkey
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

BUFFERED = 24 * 1024 * 1024
PUSHERS = 16
SLOW_SECONDS = 5.0
OTHERS = 40 * 1024 * 1024
"""What Python and its allocator keep beside the bodies: not of this test."""


def push_for_ever(process: ControllerProcess, body: bytes, over: threading.Event, seen: Counter[int]) -> None:
    with httpx.Client(headers={"authorization": f"Bearer {TOKENS['rollout']}"}, timeout=PATIENCE) as client:
        while not over.is_set():
            seen[client.post(process.url + "/v1/samples", content=body).status_code] += 1


def test_memory_is_bounded_while_redis_does_not_take_what_is_pushed(stage: Stage) -> None:
    config = make_config(
        controller={"max_buffered_bytes": BUFFERED, **PATIENT, "lock_timeout": 60.0},
        train={"train_policy": {"allowed_outdated_steps": 16}},
    )
    run_dir = stage.run_dir(config, rows=64)
    with running_valkey() as valkey, running_controller(run_dir, valkey.url) as process:
        trainer, rollout = stage.ready(process)
        bodies = [large_push(rollout) for _ in range(PUSHERS)]
        total = sum(map(len, bodies))
        assert total > 3 * BUFFERED
        controller = psutil.Process(process.address()["pid"])
        before = controller.memory_info().rss
        over, seen = threading.Event(), Counter[int]()
        valkey.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(PUSHERS) as pool:
            pushing = [pool.submit(push_for_ever, process, body, over, seen) for body in bodies]
            peaks, slow_until = [before], time.monotonic() + SLOW_SECONDS

            def slow_enough() -> bool:
                peaks.append(controller.memory_info().rss)
                return time.monotonic() > slow_until and seen[503] > 0

            try:
                until(slow_enough, "a push that is told to come back")
                valkey.send_signal(signal.SIGCONT)
                until(lambda: seen[200] > 0, "a push that is taken")
            finally:
                over.set()
            for future in pushing:
                future.result(PATIENCE)
        assert not seen.keys() - {200, 503}
        grown = max(peaks) - before
        assert grown < 4 * BUFFERED + OTHERS, f"grew by {grown >> 20} MiB for {total >> 20} MiB"
        train_step(trainer, rollout, 0)


def large_push(rollout: Rollout) -> bytes:
    """One group with samples of half a million tokens, as one body."""
    from controller.client import calls as api

    (group,) = rollout.lease(1).groups
    frames = [make_frame(make_header(index, 0, tokens=500_000)) for index in range(2)]
    items = [PushItem(group_id=group.group_id, lease_id=group.lease_id, index=index) for index in range(len(frames))]
    body = api.push_many(PushList(replica_id=rollout.reply.replica_id, pushes=items), frames).body
    assert body is not None
    return body
