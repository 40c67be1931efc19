"""Calls that are held open: they end when something changes, when their time is over, and at shutdown."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import httpx
import pytest

from controller.client import calls as api
from controller.services.lease_queue import UNEVEN
from schema.wire.messages import ErrorCode, LeaseStatus
from tests.controller.conftest import Stage, refused
from tests.support.controller import TOKENS
from tests.support.served import ServedController
from tests.support.waiting import PATIENCE, until

T = TypeVar("T")
LONG = 55.0
SOON = 45.0
"""Less than LONG: what comes when the time is over does not count."""


def held_open(served: ServedController, call: Callable[[], T]) -> Future[T]:
    """Start a call in a thread, and return when the controller waits inside of it."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    until(lambda: waiters(served) > 0 or future.done(), "a call that is held")
    assert not future.done()
    return future


def waiters(served: ServedController) -> int:
    job = served.job
    return sum(len(s._waiters) for s in (job.lease_signal, job.batch_signal, job.publication_signal))


def hang_up_in(served: ServedController, role: str, call: str, body: str = "") -> None:
    """Make a call and hang up while it is held; the controller notices."""
    head = f"{call} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKENS[role]}\r\ncontent-length: {len(body)}"
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port), PATIENCE) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        until(lambda: waiters(served) > 0, "a call that is held")
    until(lambda: waiters(served) == 0, "the end of the call", SOON)


def test_a_throttled_lease_is_granted_when_a_step_is_committed(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    rollout.finish(rollout.lease(4).groups)
    assert trainer.batch(0) is not None
    refused = rollout.lease()
    assert refused.status is LeaseStatus.THROTTLED
    assert refused.reason
    waiting = held_open(served, lambda: rollout.lease(1, LONG))
    trainer.commit(0)
    trainer.publish(1)
    assert waiting.result(SOON).status is LeaseStatus.UPDATE


def test_what_a_step_sets_free_is_dealt_evenly(stage: Stage) -> None:
    served, trainer, greedy = stage.at_work(rows=40)
    other = stage.joined(served, "rollout-1")
    held = greedy.lease(8).groups
    assert other.lease(8).status is LeaseStatus.THROTTLED
    greedy.finish(held[:2])
    assert trainer.batch(0) is not None
    trainer.commit(0)
    trainer.publish(1)
    for replica in (greedy, other):
        replica.update()
    refused = greedy.lease(8)
    assert (refused.status, refused.reason) == (UNEVEN.status, UNEVEN.reason)
    assert len(greedy.lease(8, LONG).groups) == 1, "nothing lies idle while the other does not ask"
    assert len(other.lease(8).groups) == 1


def test_a_batch_is_there_when_its_last_sample_arrives(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    assert trainer.batch(0) is None
    waiting = held_open(served, lambda: trainer.batch(0, LONG))
    rollout.finish(rollout.lease(2).groups)
    batch = waiting.result(SOON)
    assert batch is not None
    assert batch[0].n_samples == 4


def test_a_publication_is_announced(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    assert rollout.client.send(api.latest_publication(1)) is None
    waiting = held_open(served, lambda: rollout.client.send(api.latest_publication(1, LONG)))
    trainer.publish(0)
    publication = waiting.result(SOON)
    assert publication is not None
    assert publication.id == 2


def test_a_poll_of_a_process_that_was_replaced_is_refused(stage: Stage) -> None:
    """Its connection still stands; what it were handed would be noted for the one that came after it."""
    served, trainer, rollout = stage.at_work()
    mine = rollout.reply.replica_id, rollout.reply.incarnation
    waiting = held_open(served, lambda: rollout.client.send(api.latest_publication(1, LONG, *mine)))
    stage.joined(served, rollout.name)
    trainer.publish(0)
    assert refused(waiting.result, SOON).code in (ErrorCode.STALE_INCARNATION, ErrorCode.UNKNOWN_REPLICA)


def test_a_dead_replicas_groups_reach_a_waiting_one(stage: Stage) -> None:
    served, _, first = stage.at_work()
    second = stage.joined(served, "rollout-1")
    taken = {group.group_id for group in first.lease(4).groups}
    waiting = held_open(served, lambda: second.lease(4, LONG))
    stage.client(served).send(api.replica_exited("rollout-0", "killed"))
    assert {group.group_id for group in waiting.result(SOON).groups} == taken


def test_a_lease_request_that_was_withdrawn_is_granted_nothing(stage: Stage) -> None:
    """A replica withdraws its question when it has loaded new weights: what it got then would lie idle."""
    served, _, first = stage.at_work()
    second = stage.joined(served, "rollout-1")
    first.lease(4)
    hang_up_in(served, "rollout", "POST /v1/leases", second.lease_request(4, LONG).model_dump_json())
    stage.client(served).send(api.replica_exited("rollout-0", "killed"))
    assert second.beat().lost_leases == []
    (_, info) = sorted(stage.client(served).send(api.replicas()), key=lambda info: info.name)[1:]
    assert (info.name, info.leases) == ("rollout-1", 0)


def test_a_replica_that_is_lost_while_it_waits_is_granted_nothing(stage: Stage) -> None:
    """Its machine may have lost its power, with the connection still open."""
    served, _, first = stage.at_work()
    second = stage.joined(served, "rollout-1")
    first.lease(4)
    waiting = held_open(served, lambda: second.lease(4, LONG))
    for name in ("rollout-1", "rollout-0"):
        stage.client(served).send(api.replica_exited(name, "killed"))
    assert waiting.result(SOON).status is LeaseStatus.THROTTLED
    states = stage.states(served)
    assert (states["rollout-0"], states["rollout-1"]) == ("lost", "lost")
    assert second.lease(4).status is LeaseStatus.GRANTED, "who asks again is there again"


@pytest.mark.parametrize(
    "path", ["/v1/steps/0/batch?policy_epoch={}&wait_s=60", "/v1/publications/latest?newer_than=1&wait_s=60"]
)
def test_nothing_is_kept_of_a_caller_that_hung_up(stage: Stage, path: str) -> None:
    """So no more calls are held open than there are connections."""
    served, trainer, _ = stage.at_work()
    hang_up_in(served, "policy", f"GET {path.format(trainer.reply.policy_epoch)}")


def test_a_request_that_is_sent_again_ends_its_predecessor(stage: Stage) -> None:
    served, _, first = stage.at_work()
    second = stage.joined(served, "rollout-1")
    first.lease(4)
    request = second.lease_request(4, LONG)
    held = held_open(served, lambda: second.client.send(api.lease(request)))
    with served.client("rollout") as again:
        quick = request.model_copy(update={"wait_s": 0.0})
        assert again.send(api.lease(quick)).status is LeaseStatus.THROTTLED
    stage.client(served).send(api.replica_exited("rollout-0", "killed"))
    assert held.result(SOON).status is LeaseStatus.THROTTLED
    assert second.lease(4).status is LeaseStatus.GRANTED


def test_pause_and_resume(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    user = stage.client(served)
    group, other = rollout.lease(2).groups
    assert user.send(api.operate("pause")).phase == "paused"
    assert rollout.lease().status is LeaseStatus.PAUSED
    rollout.finish([group, other])
    assert trainer.batch(0) is None
    waiting = held_open(served, lambda: trainer.batch(0, LONG))
    user.send(api.operate("resume"))
    assert waiting.result(SOON) is not None
    assert rollout.lease().status is LeaseStatus.GRANTED


def test_waits_end_by_themselves(stage: Stage) -> None:
    _, trainer, rollout = stage.at_work()
    rollout.lease(4)
    assert rollout.lease(1, 0.01).status is LeaseStatus.THROTTLED
    assert trainer.batch(0, 0.01) is None
    assert rollout.client.send(api.latest_publication(1, 0.01)) is None


@pytest.mark.parametrize("call", ["lease", "batch", "publication"])
def test_waits_end_at_shutdown(stage: Stage, call: str) -> None:
    served, trainer, rollout = stage.at_work()
    rollout.lease(4)
    calls: dict[str, Callable[[], object]] = {
        "lease": lambda: rollout.lease(1, LONG).groups,
        "batch": lambda: trainer.batch(0, LONG),
        "publication": lambda: rollout.client.send(api.latest_publication(1, LONG)),
    }
    waiting = held_open(served, calls[call])
    served.stop()
    assert not waiting.result(SOON)


def test_stop_ends_the_job_for_everybody(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    user = stage.client(served)
    rollout.lease(4)
    waiting = held_open(served, lambda: rollout.lease(1, LONG))
    assert user.send(api.operate("stop")).phase == "stopped"
    assert waiting.result(SOON).status is LeaseStatus.FINISHED
    assert trainer.beat().commands == rollout.beat().commands == ["stop"]
    assert trainer.batch(0) is None
    assert user.send(api.operate("stop")).phase == "stopped"


def test_fail_ends_the_job_with_its_reason(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    waiting = held_open(served, lambda: trainer.batch(0, LONG))
    user = stage.client(served)
    status = user.send(api.fail("policy-0 died 4 times"))
    assert (status.phase, status.last_error) == ("failed", "policy-0 died 4 times")
    with pytest.raises(Exception, match="policy-0 died 4 times"):
        waiting.result(SOON)
    assert rollout.lease().status is LeaseStatus.FINISHED
    with pytest.raises(Exception, match="job_failed"):
        trainer.register()
    with pytest.raises(Exception, match="cannot pause"):
        user.send(api.operate("pause"))


def test_the_checkpoint_command_reaches_the_trainer_once(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    stage.client(served).send(api.operate("checkpoint"))
    assert rollout.beat().commands == []
    assert trainer.beat().commands == ["checkpoint"]
    assert trainer.beat().commands == []
