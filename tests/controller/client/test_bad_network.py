"""A real controller, real clients, and a network between them that cuts, delays, duplicates and drips."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from controller.client import Client, Refused
from controller.client import calls as api
from schema.wire.messages import LeaseStatus
from tests.controller.conftest import Stage
from tests.controller.drivers import Rollout, Trainer
from tests.support.controller import TOKENS, ControllerProcess, make_config
from tests.support.proxy import FaultyProxy, faulty_proxy
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow

ROWS, REPLICAS = 40, 3


def rollout(proxy: FaultyProxy, name: str, over: threading.Event) -> None:
    """A replica that leases, pushes, beats and updates until the job is over; begins anew when it must."""
    with Client(proxy.url, TOKENS["rollout"], patience=PATIENCE) as client:
        while not over.is_set():
            replica = Rollout(client, name)
            try:
                replica.register()
                _work(replica, over)
            except Refused as error:
                if error.code not in ("stale_incarnation", "unknown_replica"):
                    raise


def _work(replica: Rollout, over: threading.Event) -> None:
    while not over.is_set():
        reply = replica.lease(2, wait_s=0.5)
        if reply.status is LeaseStatus.FINISHED:
            return
        if reply.groups:
            replica.finish(reply.groups)
        else:
            replica.update()
        replica.beat()


def train(proxy: FaultyProxy) -> list[frozenset[str]]:
    """All steps of the job; what each was made of."""
    with Client(proxy.url, TOKENS["policy"], patience=PATIENCE) as client:
        trainer = Trainer(client)
        trainer.register()
        trainer.publish(0)
        steps: list[frozenset[str]] = []
        while True:
            found = trainer.batch(len(steps), wait_s=1.0)
            if found is None:
                trainer.beat()
                continue
            table, frames = found
            assert len(frames) == table.n_samples
            steps.append(frozenset(table.group_ids))
            reply = trainer.commit(len(steps) - 1)
            if reply.publish:
                trainer.publish(len(steps))
            if reply.finished:
                trainer.leave()
                return steps


def disturb(process: ControllerProcess, over: threading.Event) -> None:
    """Kill the controller twice while they work."""
    for _ in range(2):
        if over.wait(3.0):
            return
        process.stop(signal.SIGKILL)
        process.start()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_job_over_a_bad_network_adds_up(stage: Stage, seed: int) -> None:
    config = make_config(train={"train_policy": {"allowed_outdated_steps": 2}})
    process = stage.process(config, rows=ROWS)
    over = threading.Event()
    with faulty_proxy(process.url, seed, rate=0.3) as proxy, ThreadPoolExecutor(REPLICAS + 2) as pool:
        try:
            replicas = [pool.submit(rollout, proxy, f"rollout-{i}", over) for i in range(REPLICAS)]
            disturbing = pool.submit(disturb, process, over)
            steps = pool.submit(train, proxy).result(3 * PATIENCE)
        finally:
            over.set()
            proxy.calm()
        disturbing.result(PATIENCE)
        for replica in replicas:
            replica.result(PATIENCE)
    user = stage.client(process)
    ledger = user.send(api.ledger())
    trained = [name for step in steps for name in step]
    assert len(set(trained)) == len(trained) == ledger.states["trained"]
    assert ledger.created == sum(ledger.states.values()) == ROWS
    assert ledger.states["trained"] + ledger.states["dropped"] == ROWS
    assert ledger.max_staleness <= 2
    assert user.send(api.job()).phase == "finished"
    assert sum(proxy.faults.values()) > 20


def test_what_arrives_late_changes_nothing(stage: Stage) -> None:
    """Old registrations, beats, leases, drains, publications and commits, sent again after their time."""
    process = stage.process()
    trainer, first = stage.ready(process)
    old = first.reply
    beat = {"incarnation": old.incarnation, "sequence": 1}
    lease = first.lease_request(1)
    granted = first.client.send(api.lease(lease)).groups
    first.finish(granted)
    publish = trainer.publish_request(0)
    published = trainer.client.send(api.publish(publish))
    held = first.lease(1).groups
    for _ in range(3):  # late beats do not list what was leased since
        answer = first.client._http.post(f"/v1/replicas/{old.replica_id}/heartbeat", json=beat)
        assert answer.status_code == 200
    assert first.beat().lost_leases == []
    again = first.client.send(api.lease(lease))
    assert (again.status, again.groups) == (LeaseStatus.THROTTLED, [])
    assert trainer.client.send(api.publish(publish)).publication == published.publication
    assert first.finish(held).results[0].accepted
    second = stage.joined(process)
    for call in (api.drain(old.replica_id), api.deregister(old.replica_id, old.incarnation)):
        with pytest.raises(Refused, match="stale_incarnation"):
            second.client.send(call)
    assert second.lease(1).status is LeaseStatus.GRANTED
