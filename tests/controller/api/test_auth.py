"""Tokens by role: who may call what."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import httpx
import pytest

from controller.api.auth import JobTokens
from controller.client import Unauthorized
from controller.client import calls as api
from schema.wire import messages as m
from tests.controller.conftest import Stage
from tests.controller.drivers import request_id
from tests.support.controller import TOKENS
from tests.support.waiting import PATIENCE

USER, ROLLOUT, POLICY, ALL = {"user"}, {"rollout"}, {"policy"}, {"user", "rollout", "policy"}

RULES: list[tuple[str, str, set[str]]] = [
    ("POST", "/v1/replicas", ROLLOUT | POLICY),
    ("GET", "/v1/replicas", ALL),
    ("POST", "/v1/replicas/by-name/x/exited", USER),
    ("POST", "/v1/replicas/rollout-0.1/heartbeat", ROLLOUT),
    ("POST", "/v1/replicas/policy-0.1/declare", POLICY),
    ("POST", "/v1/steps/0/replay", POLICY),
    ("POST", "/v1/replicas/rollout-0.1/leases", ROLLOUT),
    ("POST", "/v1/replicas/rollout-0.1/drain", USER | ROLLOUT),
    ("POST", "/v1/replicas/policy-0.1/profile", USER),
    ("DELETE", "/v1/replicas/rollout-0.1?incarnation=9", ROLLOUT),
    ("POST", "/v1/replicas/rollout-0.1/turn", ROLLOUT),
    ("POST", "/v1/replicas/policy-0.1/member", POLICY),
    ("GET", "/v1/autoscale", USER | ROLLOUT | POLICY),
    ("POST", "/v1/autoscale", USER),
    ("POST", "/v1/leases", ROLLOUT),
    ("DELETE", "/v1/leases/x", ROLLOUT),
    ("POST", "/v1/groups/e0-p0/samples/0", ROLLOUT),
    ("POST", "/v1/samples", ROLLOUT),
    ("GET", "/v1/samples", USER),
    ("GET", "/v1/samples/e0-p0/0", USER),
    ("GET", "/v1/publications/latest", ALL),
    ("GET", "/v1/publications", USER),
    ("POST", "/v1/publications", POLICY),
    ("POST", "/v1/publications/1/reports", ROLLOUT),
    ("GET", "/v1/steps/0/batch?policy_epoch=1", POLICY),
    ("POST", "/v1/steps/0/commit", POLICY),
    ("GET", "/v1/steps", USER),
    ("POST", "/v1/checkpoints", POLICY),
    ("GET", "/v1/checkpoints/0/ledger", POLICY),
    ("POST", "/v1/replicas/meetings/x", POLICY),
    ("GET", "/v1/replicas/meetings/x", POLICY),
    ("GET", "/v1/job", ALL),
    ("POST", "/v1/job/pause", USER),
    ("POST", "/v1/job/resume", USER),
    ("POST", "/v1/job/checkpoint", USER),
    ("GET", "/v1/validations", USER),
    ("GET", "/v1/ledger", USER),
    ("GET", "/v1/groups", USER),
    ("GET", "/v1/events?follow=false", USER),
    ("GET", "/docs", USER),
    ("POST", "/v1/session", USER),
    ("GET", "/v1/session", USER),
    ("DELETE", "/v1/session", USER),
    ("GET", "/v1/overview", USER),
    ("GET", "/v1/curves", USER),
    ("GET", "/v1/timeline", USER),
    ("GET", "/v1/scaling", USER),
    ("GET", "/v1/samples/steps", USER),
    ("GET", "/v1/logs", USER),
    ("GET", "/v1/logs/controller.log", USER),
    ("GET", "/v1/config/origins", USER),
    ("GET", "/v1/groups/e0-p0", USER),
    ("GET", "/v1/config", USER),
    ("GET", "/v1/config/schema", USER),
    ("POST", "/v1/config/validate", USER),
    ("GET", "/metrics", ALL),
    ("POST", "/v1/job/fail", USER),
    ("GET", "/v1/openapi.json", USER),
    ("POST", "/v1/job/stop", USER),
]


@pytest.fixture(scope="module")
def door(shared: Stage) -> Iterator[httpx.Client]:
    """Plain requests to a controller at work, without a token."""
    served, _, _ = shared.at_work()
    with httpx.Client(base_url=served.url, trust_env=False, timeout=PATIENCE) as http:
        yield http


def test_every_route_answers_its_callers_and_nobody_else(stage: Stage) -> None:
    served, _, _ = stage.at_work()
    with httpx.Client(base_url=served.url, trust_env=False, timeout=PATIENCE) as http:
        for (method, path, allowed), (role, token) in product(RULES, TOKENS.items()):
            answer = http.request(method, path, headers={"authorization": f"Bearer {token}"})
            refused = answer.status_code == 403
            assert refused == (role not in allowed), f"{method} {path} by {role}: {answer.text}"
            if refused:
                assert m.Problem.model_validate_json(answer.content).code is m.ErrorCode.FORBIDDEN
                detail = answer.json()["detail"]
                assert path.partition("?")[0] in detail or "rollout replica" in detail


def test_without_a_token_everything_is_shut(door: httpx.Client) -> None:
    for method, path, _ in RULES:
        answer = door.request(method, path)
        assert answer.status_code == 401, f"{method} {path}: {answer.text}"
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert m.Problem.model_validate_json(answer.content).code is m.ErrorCode.UNAUTHORIZED


def test_health_needs_no_token(door: httpx.Client) -> None:
    assert door.get("/healthz").status_code == 200
    assert door.get("/readyz").status_code == 200


def test_a_role_registers_for_itself_only(stage: Stage) -> None:
    served = stage.serve()
    request = m.RegisterRequest(request_id=request_id(), role="policy", name="p")
    with pytest.raises(Unauthorized) as refused:
        stage.client(served, "rollout").send(api.register(request))
    assert refused.value.code is m.ErrorCode.FORBIDDEN


def test_each_role_needs_a_token_of_its_own() -> None:
    with pytest.raises(ValueError, match="token of its own"):
        JobTokens({"user": "a", "rollout": "a", "policy": "b"})
    with pytest.raises(ValueError, match="token of its own"):
        JobTokens({"user": "a", "rollout": "b", "policy": ""})


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("short", "can be guessed"), ("a" * 64, "can be guessed"), ("ababab" * 10, "can be guessed"),
        ("two words and some more letters", "printable ASCII"),
        ("naïve-token-with-letters-enough", "printable ASCII"),
        ("a-line-that-ends-in-the-middle\n-of-it", "printable ASCII"),
    ],
)  # fmt: skip
def test_a_token_that_can_be_guessed_or_not_be_sent_is_refused_and_not_shown(token: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        JobTokens({**TOKENS, "rollout": token})
    assert "rollout" in str(caught.value)
    assert token not in str(caught.value)
