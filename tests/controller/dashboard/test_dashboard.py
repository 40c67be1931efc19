"""Sessions, pages and views of the dashboard."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.responses import Response

from controller.dashboard.scaling import ScaleSettings, thinned
from controller.dashboard.session import SECONDS, Sessions
from controller.dashboard.view import EventHistory, thin
from controller.state.step_log import StepLog
from schema.wire.messages import Event, EventKind
from schema.wire.messages.dashboard import Scaling
from tests.controller.conftest import Stage, asking
from tests.controller.drivers import train_step
from tests.support.controller import TOKENS, make_config
from tests.support.served import ServedController
from tests.support.waiting import PATIENCE, until


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


def test_a_number_by_hand_is_set_from_its_own_page_and_outlives_the_controller(stage: Stage) -> None:
    served, _, _ = stage.at_work(make_config(autoscale={"enable": True, "max_replicas": 4}))

    def scaling() -> Scaling:
        return Scaling.model_validate_json(client.get("/v1/scaling").content)

    with browser(served) as client:
        until(lambda: scaling().replicas != [], "the replica is in the file of events")
        before = scaling()
        assert (before.enabled, before.minimum, before.maximum, before.decisions) == (True, 1, 4, [])
        assert [count for _, count in before.desired] == [1]
        client.headers["origin"] = "https://elsewhere.example"
        assert client.post("/v1/autoscale", json={"replicas": 3}).status_code == 403
        client.headers["origin"] = served.url
        assert client.post("/v1/autoscale", json={"replicas": 5}).status_code == 422
        assert client.post("/v1/autoscale", json={"replicas": 3}).status_code == 200
        served.restart()
        until(lambda: scaling().made > 0, "the decision is in the file of events")
        found = scaling()
        assert [count for _, count in found.desired] == [1, 1, 3]
        assert [count for _, count in found.replicas] == [1]
        (made,) = found.decisions
        assert (made.before, made.desired, made.kind) == (1, 3, "manual")
        assert made.reason == "3 by request, until it is taken back"
        assert client.get("/v1/autoscale").json()["manual"]


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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300), st.integers(3, 60))
def test_thinned_levels_keep_their_extremes_and_what_holds_at_the_end(values: list[int], most: int) -> None:
    moments = [(float(at), value) for at, value in enumerate(values)]
    kept = thinned(moments, most)
    assert kept == sorted(set(kept) & set(moments))
    assert len(kept) <= most + 3
    assert kept[-1] == moments[-1]
    assert {min(values), max(values)} <= {value for _, value in kept}


def test_a_history_of_scaling_is_bounded_and_counts_who_is_there() -> None:
    history = EventHistory()
    for number in range(1, 12_001):
        desired, before = 2 + number // 2 % 2, 2 + (number - 1) // 2 % 2
        data = {"desired": desired, "before": before, "why": "more", "reason": "enough: so", "measures": None}
        history.add(Event(id=number, at=number, kind=EventKind.SCALE, text="2 stay", data=data))
    states = [("a", "live"), ("b", "live"), ("a", "draining"), ("a", "left"), ("b", "lost"), ("b", "live")]
    for number, (name, state) in enumerate(states, 20_000):
        data = {"name": name, "replica_id": f"{name}.1", "role": "rollout", "state": state}
        history.add(Event(id=number, at=number, kind=EventKind.REPLICA, text="so", data=data))
    settings = ScaleSettings.of({"autoscale": {"enable": True, "max_replicas": 3}}, Path("run"))
    found = history.scaling.answer(settings, history.began, history.ended, None)
    assert [(at - 20_000, count) for at, count in found.replicas] == [(0, 1), (1, 2), (3, 1), (4, 0), (5, 1)]
    assert 500 < len(found.desired) <= 1510
    assert {count for _, count in found.desired} == {2, 3}
    assert (len(found.decisions), found.made) == (200, 12_000)
    assert found.decisions[-1].reason == "enough: so"
    marks = history.timeline(StepLog(), None).marks
    assert {mark.at % 2 for mark in marks} == {0}, "the timeline has the changes alone"


@pytest.mark.parametrize(
    ("config", "note"),
    [({}, "autoscale.enable = false"), ({"autoscale": []}, "--resume run --set autoscale.enable=true"),
     ({"train": {"train_policy": {"type": "sft"}}}, "supervised"), ({"autoscale": {"enable": True}}, "")],
)  # fmt: skip
def test_a_job_that_does_not_scale_says_why(config: dict[str, object], note: str) -> None:
    found = ScaleSettings.of(config, Path("run")).note
    assert note in found
    assert bool(note) == bool(found)


def test_several_sets_have_curves_of_their_own_until_a_rewind() -> None:
    history = EventHistory()

    def validated(id_: int, version: int, *sources: str) -> Event:
        scores = {name: {"n": 4, "mean": {"value": version / 10}} for name in sources}
        data = {"version": version, "score_mean": 0.5, "sources": scores}
        return Event(id=id_, at=1.0, kind=EventKind.VALIDATION, text="validation", data=data)

    back = Event(id=4, at=1.0, kind=EventKind.REWIND, text="back", data={"step": 3, "timeline": 1})
    for event in (validated(1, 0, "math"), validated(2, 2, "math", "code"), validated(3, 4, "math", "code"), back):
        history.add(event)
    assert history.sources == {f"validation/source/{name}/mean@4": {2: 0.2} for name in ("math", "code")}


def test_a_history_is_bounded() -> None:
    history = EventHistory()
    for number in range(1, 9000):
        data = {"version": number} if number % 2 else {
            "name": f"r{number % 3}", "replica_id": "x", "role": "rollout", "state": "lost"
        }  # fmt: skip
        kind = "publication" if number % 2 else "replica"
        history.add(Event.model_validate({"id": number, "at": number, "kind": kind, "text": "t", "data": data}))
    assert sum(len(lane.spans) for lane in history._lanes.values()) <= 2000
    assert len(history._publications.kept) <= 2001
