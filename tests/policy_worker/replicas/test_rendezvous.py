"""Ranks find each other through a real controller, and say what is in between where they do not."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controller.client import Client
from controller.client import calls as api
from policy_worker.errors import RendezvousError
from policy_worker.process import Environment, RankEnvironment, ShutdownRequest
from policy_worker.replicas import rendezvous
from policy_worker.replicas.rendezvous import interface_of, meet
from policy_worker.session import LeaveRequestedError
from schema.wire.messages import Meeting
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.ports import free_port
from tests.support.served import ServedController, served_controller
from tests.support.valkey import running_valkey


@pytest.fixture
def served(tmp_path: Path):
    with (
        running_valkey() as valkey,
        served_controller(make_run_dir(tmp_path / "run", make_config(), 4, 1), valkey.url) as it,
    ):
        yield it


def environment(served: ServedController) -> Environment:
    return Environment(served.url, TOKENS["policy"], "policy-0", None, None)


def ranks(world: int, meeting: str = "first") -> list[RankEnvironment]:
    return [RankEnvironment(rank, world, rank, world, meeting) for rank in range(world)]


def test_three_ranks_meet_whoever_is_first(served: ServedController) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(meet, rank, environment(served), ShutdownRequest()) for rank in reversed(ranks(3))]
        stores = [future.result(60.0) for future in found]
    stores[0].set("said", "by rank 2")
    assert [store.get("said") for store in stores] == [b"by rank 2"] * 3
    with Client(served.url, TOKENS["policy"]) as client:
        meeting = client.send(api.find_meeting("first"))
    assert meeting is not None
    assert (meeting.address, meeting.host) == ("127.0.0.1", socket.gethostname())
    with pytest.raises(ConnectionRefusedError):  # torch's store lets anybody in who reaches it
        socket.create_connection(("127.0.0.2", meeting.port), 5.0)


def test_a_rank_0_that_cannot_be_reached_is_named(served: ServedController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "REACH", 0.1)
    port = free_port()
    with Client(served.url, TOKENS["policy"]) as client:
        client.send(api.announce("first", Meeting(address="127.0.0.1", port=port, host="node-0")))
    with pytest.raises(RendezvousError, match=f"cannot reach rank 0 on node-0 at 127.0.0.1:{port}.*open the ports"):
        meet(ranks(2)[1], environment(served), ShutdownRequest())


def test_ranks_that_do_not_come_are_counted(served: ServedController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.1)
    monkeypatch.setattr(rendezvous, "POLL", 0.1)
    with pytest.raises(RendezvousError, match="1 of 2 ranks came"):
        meet(ranks(2)[0], environment(served), ShutdownRequest())
    with pytest.raises(RendezvousError, match="rank 0 did not come"):
        meet(ranks(2, "second")[1], environment(served), ShutdownRequest())


def test_a_request_to_leave_ends_the_wait(served: ServedController) -> None:
    shutdown = ShutdownRequest()
    shutdown.request("signal SIGTERM")
    for rank in ranks(2):
        with pytest.raises(LeaveRequestedError, match="SIGTERM"):
            meet(rank, environment(served), shutdown)


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("::1") in ("lo", None), "None without IPv6"
