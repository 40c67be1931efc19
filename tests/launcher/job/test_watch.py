"""When a living process counts as hung."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.restarts import POLICY_PATIENCE, ROLLOUT_PATIENCE, is_hung
from schema.wire.messages import ReplicaInfo

TIMEOUT = 15.0


def info(role: str = "rollout", state: str = "lost", silent: float = 1000.0) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "replica_id": "r.1", "role": role, "name": "r", "incarnation": 1, "state": state, "version": 0, "leases": 0,
        "last_seen_s": silent, "host": "h", "pid": 1, "engine": "", "status": "", "gauges": {},
    }  # fmt: skip
    return ReplicaInfo(**fields)


@pytest.mark.parametrize(("role", "patience"), [("rollout", ROLLOUT_PATIENCE), ("policy", POLICY_PATIENCE)])
def test_silence_beyond_all_patience(role: str, patience: float):
    assert not is_hung(info(role, silent=TIMEOUT + patience), 10_000.0, TIMEOUT)
    assert is_hung(info(role, silent=TIMEOUT + patience + 0.1), 10_000.0, TIMEOUT)


@pytest.mark.parametrize("state", ["live", "draining", "left"])
def test_who_is_not_lost_does_not_hang(state: str):
    assert not is_hung(info(state=state), 10_000.0, TIMEOUT)


def test_the_silence_of_an_earlier_process_is_not_that_of_this_one():
    """It was restarted and still imports: what the controller knows is of the process before."""
    assert not is_hung(info(silent=500.0), up_for=400.0, heartbeat_timeout=TIMEOUT)
