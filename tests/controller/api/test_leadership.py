"""Two real controllers of one job: one serves, the other stands by, and one that was stopped can do no harm."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.client import Client, ControllerLost, NotServing
from controller.client import calls as api
from schema.config import Config
from schema.wire.messages import LeaseRequest
from tests.controller.conftest import PATIENT, Stage
from tests.controller.drivers import Rollout, Trainer, begin, make_frame, make_header, train_step
from tests.support.controller import TOKENS, ControllerProcess, make_config, make_run_dir, running_controller
from tests.support.ports import free_port
from tests.support.valkey import ValkeyServer, running_valkey
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

FOREVER = 1000.0
SHORT = 5.0
"""Longer than a busy machine keeps whoever is in charge from renewing the lock."""


def config(lock: float) -> Config:
    return make_config(controller={**PATIENT, "lock_timeout": lock})


@contextmanager
def standing_by(first: ControllerProcess, redis_url: str) -> Iterator[ControllerProcess]:
    """A second controller of the same job, which stands by when the block begins."""
    second = ControllerProcess(first.run_dir, redis_url, log="standby.log")
    second.launch(free_port())
    try:
        until(lambda: asked(second, "/readyz").get("code") == "standby", "one that stands by")
        until(lambda: first.url in asked(second, "/readyz").get("detail", ""), "the name of the other one")
        yield second
    finally:
        second.send_signal(signal.SIGCONT)
        second.stop()


def asked(process: ControllerProcess, path: str) -> dict[str, Any]:
    """The answer of a process that may not be up yet."""
    try:
        answer = httpx.get(process.url + path, timeout=PATIENCE)
    except httpx.TransportError:
        return {}
    return answer.json() if answer.status_code == 503 else {"text": answer.text}


def move(driver: Trainer | Rollout, process: ControllerProcess) -> None:
    """Let a driver talk to another controller."""
    driver.client = Client(
        process.url, TOKENS["policy" if isinstance(driver, Trainer) else "rollout"], patience=PATIENCE
    )


def test_one_serves_and_the_other_takes_over_when_it_leaves(stage: Stage) -> None:
    """The lock lives for ever here: it changes hands because it was given back, or its holder is dead."""
    first = stage.process(config(FOREVER))
    trainer, rollout = stage.ready(first)
    with standing_by(first, stage.valkey.url) as second:
        assert asked(second, "/healthz") == {"text": "ok\n"}
        answer = httpx.post(second.url + "/v1/leases", content=b"{}")
        assert (answer.status_code, answer.json()["code"]) == (503, "standby")
        assert int(answer.headers["retry-after"]) >= 1
        with second.client(patience=0.0) as asking, pytest.raises(NotServing):  # it has proven itself
            asking.send(api.job())
        both = Client(f"{second.url}, {first.url}/", TOKENS["user"], patience=PATIENCE)
        assert both.send(api.job()).step == 0
        assert both.url == first.url
        train_step(trainer, rollout, 0)
        assert first.stop(signal.SIGTERM) == 0
        assert both.send(api.job()).step == 1
        assert both.url == second.url
        move(trainer, second), move(rollout, second)
        train_step(trainer, rollout, 1)
        with standing_by(second, stage.valkey.url) as third:
            second.stop(signal.SIGKILL)
            move(trainer, third), move(rollout, third)
            train_step(trainer, rollout, 2)
            assert "which is dead" in third.log()
            assert third.address()["url"] == third.url


def test_two_that_start_at_once_serve_one_job(tmp_path: Path, shared_valkey: ValkeyServer) -> None:
    run_dir = make_run_dir(tmp_path / "run", config(FOREVER))
    both = [ControllerProcess(run_dir, shared_valkey.url, log=f"{i}.log") for i in range(2)]
    try:
        for process in both:
            process.launch(free_port())

        def settled() -> bool:
            said = [asked(process, "/readyz") for process in both]
            standing_by = ["is in charge" in one.get("detail", "") for one in said]
            return sorted("text" in one for one in said) == sorted(standing_by) == [False, True]

        until(settled, "one that serves and one that stands by")
    finally:
        for process in both:
            process.stop()


def test_an_unknown_host_keeps_the_lock_until_it_runs_out_or_is_replaced(stage: Stage) -> None:
    first = stage.process(config(FOREVER))
    key = f"cosmos:{first.address()['job_id']}:lock"
    first.stop(signal.SIGKILL)
    with stage.valkey.client() as client:
        held: Any = client.get(key)
        client.set(key, json.dumps({**json.loads(held), "host": "elsewhere", "boot": "another"}))
    first.launch()
    until(lambda: "elsewhere" in asked(first, "/readyz").get("detail", ""), "one that stands by")
    with stage.valkey.client() as client:
        client.pexpire(key, 100)
    until(lambda: "text" in asked(first, "/readyz"), "the takeover")
    with stage.valkey.client() as client:
        client.set(key, held)  # as if the lock were another's again: nobody renews it for this one
    with running_controller(first.run_dir, stage.valkey.url, "--replace", log="replacing.log") as second:
        assert first.wait() == 3
        assert "text" in asked(second, "/readyz")


def picture(valkey: ValkeyServer, job_id: str) -> dict[bytes, Any]:
    """Everything of a job in Redis, but for what the one in charge renews all the time."""
    prefix = f"cosmos:{job_id}:"
    renewed = {f"{prefix}{name}".encode() for name in ("lock", "alive", "seq")}
    with valkey.client() as client:
        keys = [key for key in client.scan_iter(f"{prefix}*", count=1000) if key not in renewed]
        return {key: client.dump(key) for key in keys}


class Raw:
    """A request whose answer is awaited later, if ever."""

    def __init__(
        self, process: ControllerProcess, role: str, method: str, path: str, body: bytes = b"", **headers: str
    ) -> None:
        host, port = process.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), PATIENCE)
        lines = [
            f"{method} {path} HTTP/1.1", f"host: {host}", f"authorization: Bearer {TOKENS[role]}",
            f"content-length: {len(body)}", "connection: close",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()), "", "",
        ]  # fmt: skip
        self._socket.sendall("\r\n".join(lines).encode() + body)

    def status(self) -> int | None:
        """The answer's status; None if the connection was closed without one."""
        with self._socket:
            try:
                data = self._socket.recv(65536)
            except ConnectionError:
                return None
            return int(data.split(b" ")[1]) if data else None


def queued(process: ControllerProcess, trainer: Trainer, request: LeaseRequest) -> list[Raw]:
    """Calls that a stopped controller finds in its sockets when it wakes, reads and writes."""
    epoch = trainer.reply.policy_epoch
    commit = json.dumps({**trainer._mine(), "metrics": {}}).encode()
    return [
        Raw(process, "rollout", "GET", "/v1/publications/latest?newer_than=0"),
        Raw(process, "rollout", "POST", "/v1/leases", request.model_dump_json().encode()),
        Raw(process, "policy", "GET", f"/v1/steps/0/batch?policy_epoch={epoch}"),
        Raw(process, "policy", "POST", "/v1/steps/0/commit", commit),
        Raw(process, "user", "GET", "/v1/ledger"),
        Raw(process, "user", "GET", "/v1/job"),
        Raw(process, "user", "POST", "/v1/job/stop"),
    ]


@pytest.mark.parametrize("in_a_transaction", [False, True])
def test_one_that_was_stopped_and_wakes_writes_nothing_and_tells_nothing(
    in_a_transaction: bool, tmp_path: Path
) -> None:
    run_dir = make_run_dir(tmp_path / "run", config(SHORT))
    with running_valkey() as valkey, running_controller(run_dir, valkey.url) as first:
        trainer, rollout = begin(first.client("policy"), first.client("rollout"))
        groups = rollout.lease(2).groups
        asking = rollout.lease_request(2)
        with standing_by(first, valkey.url) as second:
            waiting = []
            if in_a_transaction:
                frame = make_frame(make_header(0, 0, tokens=1_000_000))
                # It gets a part of the transaction, the process has the rest.
                valkey.send_signal(signal.SIGSTOP)
                path = f"/v1/groups/{groups[0].group_id}/samples/0"
                ids = {"x_lease_id": groups[0].lease_id, "x_replica_id": rollout.reply.replica_id}
                waiting.append(Raw(first, "rollout", "POST", path, frame, **ids))
                time.sleep(0.5)
            first.send_signal(signal.SIGSTOP)
            if in_a_transaction:
                valkey.send_signal(signal.SIGCONT)
            waiting += queued(first, trainer, asking)
            until(lambda: "text" in asked(second, "/readyz"), "the takeover")
            move(trainer, second), move(rollout, second)
            rollout.finish(groups)
            train_step(trainer, rollout, 0)
            held = rollout.lease(2).groups
            before = picture(valkey, first.address()["job_id"])
            first.send_signal(signal.SIGCONT)
            assert first.wait() == 3
            assert {raw.status() for raw in waiting} <= {503, None}
            assert picture(valkey, second.address()["job_id"]) == before
            assert all(result.accepted for result in rollout.finish(held).results)
            train_step(trainer, rollout, 1)


def test_one_that_was_stopped_goes_on_if_nobody_took_over(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path / "run", config(SHORT))
    with running_valkey() as valkey, running_controller(run_dir, valkey.url) as process:
        trainer, rollout = begin(process.client("policy"), process.client("rollout"))
        rollout.finish(rollout.lease(2).groups)
        process.send_signal(signal.SIGSTOP)
        with valkey.client() as redis:
            key = f"cosmos:{process.address()['job_id']}:lock"
            until(lambda: not redis.exists(key), "the end of the lock")
        valkey.send_signal(signal.SIGSTOP)  # or it might renew before it reads the question
        early = Raw(process, "user", "GET", "/v1/job")
        process.send_signal(signal.SIGCONT)
        assert early.status() == 503
        with (
            process.client("user", patience=1.0) as user,
            pytest.raises(NotServing, match="renew its lock in Redis") as told,
        ):
            user.send(api.job())
        assert told.value.detail in str(told.value)
        valkey.send_signal(signal.SIGCONT)
        train_step(trainer, rollout, 0)
        until(lambda: "extended by it" in process.log(), "forgiveness for the downtime")


def test_a_client_without_patience_tries_each_address_once() -> None:
    nowhere = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with Client(",".join(nowhere), "token") as client:
        with pytest.raises(ControllerLost) as lost:
            client.send(api.ready())
        assert all(url in str(lost.value) for url in nowhere)
        assert " s (" not in str(lost.value), "nobody waited"
        assert client.url == nowhere[0]
    with pytest.raises(ValueError, match="no address"):
        Client(" , ", "token")
