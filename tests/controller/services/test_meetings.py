"""Ranks ask for the address of their rank 0, in any order, and get that of their own start."""

from __future__ import annotations

import threading

from controller.client import calls as api
from controller.services.replicas import MOST_MEETINGS
from schema.wire.messages import Meeting
from tests.controller.conftest import Stage

HERE = Meeting(address="10.0.0.1", port=4711, host="one")


def test_who_waits_hears_of_rank_0_when_it_comes(stage: Stage) -> None:
    served, found = stage.serve(), []
    policy = stage.client(served, "policy")
    assert policy.send(api.find_meeting("first")) is None

    def wait() -> None:
        found.append(stage.client(served, "policy").send(api.find_meeting("first", 30.0)))

    waiting = threading.Thread(target=wait)
    waiting.start()
    policy.send(api.announce("second", HERE))
    policy.send(api.announce("first", HERE.model_copy(update={"port": 1})))
    waiting.join(30.0)
    assert [meeting.port for meeting in found] == [1]
    assert policy.send(api.find_meeting("second")) == HERE


def test_the_oldest_starts_are_forgotten(stage: Stage) -> None:
    policy = stage.client(stage.serve(), "policy")
    for number in range(MOST_MEETINGS + 1):
        policy.send(api.announce(str(number), HERE))
    assert policy.send(api.find_meeting("0")) is None
    assert policy.send(api.find_meeting("1")) == HERE
