"""Sessions, pages and views of the dashboard."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.responses import Response

from controller.dashboard.session import SECONDS, Sessions
from controller.dashboard.view import History, thin
from schema.wire.messages import Event
from tests.controller.conftest import Stage, asking
from tests.controller.drivers import train_step
from tests.support.controller import TOKENS
from tests.support.served import ServedController
from tests.support.waiting import PATIENCE


def browser(served: ServedController) -> httpx.Client:
    """A client with a session and no token."""
    answer = httpx.post(
        f"{served.url}/v1/session", headers={"authorization": f"Bearer {TOKENS['user']}"}, trust_env=False
    )
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKENS["user"] not in cookie
    return httpx.Client(base_url=served.url, trust_env=False, timeout=PATIENCE, cookies=answer.cookies)


def test_a_session_reads_everything_and_changes_something_only_from_its_own_page(stage: Stage) -> None:
    served, trainer, rollout = stage.at_work()
    train_step(trainer, rollout, 0)
    with browser(served) as client:
        found = client.get("/v1/overview").json()
        assert found["job"]["step"] == 1
        assert sum(found["ledger"]["states"].values()) == found["ledger"]["created"]
        curves = client.get("/v1/curves", params={"metric": ["samples", "none"]}).json()
        assert curves["curves"] == {"samples": {"steps": [0], "values": [4.0]}}
        timeline = client.get("/v1/timeline").json()
        assert timeline["now"] is not None
        assert {lane["name"] for lane in timeline["lanes"]} == {"policy-0", "rollout-0"}
        for origin in (None, "https://elsewhere.example", "null", f"{served.url}.example"):
            headers = {} if origin is None else {"origin": origin}
            assert client.post("/v1/job/pause", headers=headers).status_code == 403
        assert not served.job.facts.paused
        assert client.post("/v1/job/pause", headers={"origin": served.url}).status_code == 200
        assert served.job.facts.paused
        assert client.delete("/v1/session", headers={"origin": served.url}).status_code == 204
        assert client.get("/v1/overview").status_code == 401


@pytest.mark.parametrize("changed", ["", "{}", "9{}", "{}0", "x.{}", "²{}"])
def test_a_cookie_that_was_not_handed_out_is_none(changed: str) -> None:
    now = [1000.0]
    sessions = Sessions("a-token", lambda: now[0])
    response = Response()
    sessions.open(response, {"scheme": "https"})
    cookie = response.headers["set-cookie"]
    assert "Secure" in cookie
    value = cookie.partition("=")[2].partition(";")[0]
    raw = f"{sessions.name}={changed.format(value)}".encode()
    headers = Headers(raw=[(b"cookie", raw)])
    assert sessions.holds(headers) == (changed == "{}")
    assert not Sessions("another-token", lambda: now[0]).holds(headers)
    now[0] += SECONDS
    assert not sessions.holds(headers)


def test_pages_need_no_token_and_let_nothing_foreign_run(idle: ServedController) -> None:
    with httpx.Client(base_url=idle.url, trust_env=False, timeout=PATIENCE) as client:
        for path, kind in (
            ("/", "text/html"),
            ("/static/app.js", "text/javascript"),
            ("/static/plotly.min.js", "text/"),
        ):
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self';" in policy
            assert "unsafe" not in policy
            again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        plain = client.get("/static/app.js", headers={"accept-encoding": "identity"})
        assert plain.text == client.get("/static/app.js").text
        assert client.post("/").status_code == 401


def test_logs_are_those_of_the_run_and_no_other_file(stage: Stage) -> None:
    served = stage.serve()
    logs = served.job.run_dir / "logs"
    logs.mkdir()
    (logs / "policy-0.log").write_text("first\nsecond \x1b[31mred\x1b[0m\n")
    (logs / "link").symlink_to(served.job.run_dir / "config.json")
    with asking(served.url) as client:
        assert [log["name"] for log in client.get("/v1/logs").json()] == ["policy-0.log"]
        assert client.get("/v1/logs/policy-0.log").json()["text"] == "first\nsecond red\n"
        assert client.get("/v1/logs/policy-0.log", params={"tail": 16}).json()["text"] == ""
        for name in ("..%2fconfig.json", "link", "none", "..", "%2e%2e%2fjob_id"):
            assert client.get(f"/v1/logs/{name}").status_code in (401, 404)


@given(st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.integers(2, 50))
def test_thinned_curves_keep_their_ends_and_peaks(values: list[float | None], most: int) -> None:
    points = list(enumerate(values))
    curve = thin(points, most)
    assert curve.steps == sorted(set(curve.steps))
    assert len(curve.steps) <= max(most, 1) + 2
    finite = [value for value in values if value is not None and abs(value) < float("inf")]
    kept = [value for value in curve.values if value is not None]
    assert (min(kept, default=None), max(kept, default=None)) == (
        min(finite, default=None),
        max(finite, default=None),
    )
    assert not values or curve.steps[-1] == len(values) - 1


def test_a_history_is_bounded() -> None:
    history = History()
    for number in range(1, 9000):
        data = {"version": number} if number % 2 else {
            "name": f"r{number % 3}", "replica_id": "x", "role": "rollout", "state": "lost"
        }  # fmt: skip
        kind = "publication" if number % 2 else "replica"
        history.add(
            Event.model_validate({"id": number, "at": number, "kind": kind, "text": "t", "data": data})
        )
    assert sum(len(lane.spans) for lane in history._lanes.values()) <= 2000
    assert len(history._publications.kept) <= 2001
