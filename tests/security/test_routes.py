"""Who may call what: every route there is, and what keeps everybody else from even looking."""

from __future__ import annotations

import hmac
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.routing import BaseRoute

from controller.api import auth
from controller.api.app import build
from controller.api.auth import MAX_HEAD_BYTES, MAX_HEADERS, OPEN, JobTokens
from controller.api.connections import MAX_HEAD as MOST_BEFORE_A_REQUEST
from controller.errors import ApiError
from schema.wire import messages as m
from tests.controller.api.test_auth import RULES
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.served import ServedController, served_controller
from tests.support.valkey import running_valkey
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    run_dir = make_run_dir(tmp_path_factory.mktemp("routes") / "run", make_config())
    with running_valkey() as valkey, served_controller(run_dir, valkey.url) as controller:
        yield controller


@pytest.fixture(scope="module")
def http(served: ServedController) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, trust_env=False, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="module")
def app(served: ServedController) -> FastAPI:
    return build(served.controller)


def bearer(role: str) -> dict[str, str]:
    return {"authorization": f"Bearer {TOKENS[role]}"}


def routes_of(routes: list[BaseRoute]) -> Iterator[APIRoute]:
    """All routes, those of included routers too, however this version of FastAPI keeps them."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            inner: Any = getattr(route, "routes", None) or getattr(
                getattr(route, "original_router", None), "routes", []
            )
            yield from routes_of(list(inner))


ROOT = Path(__file__).resolve().parents[2]


def test_the_documents_and_converters_name_routes_that_exist(app: FastAPI) -> None:
    """Every `GET /v1/…` of docs/ and of the texts of convert is a route, `{job}` and the like aside."""
    paths = app.openapi()["paths"]
    texts = [*ROOT.glob("docs/*.md"), *ROOT.glob("convert/**/*.py")]
    called = [
        (file.name, method, path)
        for file in texts
        for method, path in re.findall(r"\b(GET|POST|PUT|DELETE) (/[\w/{}.-]*[\w}])", file.read_text("utf-8"))
    ]
    assert len(called) > 20
    for name, method, path in called:
        asked = re.sub(r"\{[^}]*\}", "x", path)
        matching = [
            item[method.lower()]
            for there, item in paths.items()
            if method.lower() in item and re.fullmatch(re.sub(r"\{[^}]*\}", "[^/]+", there), asked)
        ]
        assert matching, f"{name}: {method} {path} is not a route"
        for choice in _choices(matching[0]) if "{" not in path else ():
            assert path.rpartition("/")[2] in choice, f"{name}: {method} {path}"


def _choices(operation: dict[str, Any]) -> Iterator[list[str]]:
    """The values of those parts of a route's path that are one of a few words."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path" and "enum" in parameter["schema"]:
            yield parameter["schema"]["enum"]


def test_every_route_is_in_the_table_of_roles(app: FastAPI) -> None:
    """A route that nobody listed in `RULES` (or that is open to all on purpose) fails here, by name."""
    there = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    assert len(there) >= 32

    def listed(method: str, template: str) -> bool:
        pattern = re.compile(re.sub(r"\\\{[^}]+\\\}", "[^/?]+", re.escape(template)) + r"(\?.*)?")
        return any(rule == method and pattern.fullmatch(path) for rule, path, _ in RULES)

    unlisted = [(method, path) for method, path in sorted(there) if path not in OPEN and not listed(method, path)]
    assert unlisted == [], "say in tests/controller/api/test_auth.py which roles may call these"


def test_no_route_hides_from_the_document(app: FastAPI) -> None:
    documented = set(app.openapi()["paths"])
    hidden = {route.path_format for route in routes_of(app.routes)} - documented
    assert hidden == set()


@pytest.mark.parametrize("path", ["/no/such/path", "/docs", "/openapi.json", "/v1/steps/no-number/batch", "/static/"])
def test_without_a_token_nobody_learns_which_paths_there_are(http: httpx.Client, path: str) -> None:
    for method in ("GET", "POST", "PUT", "PATCH", "OPTIONS", "TRACE", "HEAD"):
        answer = http.request(method, path)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "header",
    [
        b"", b"Bearer",  b"bearer", b"Bearer \xff\xfe", b"Bearer \xc3\xa9\xe2\x82\xac", b"Basic dTpw",
        b"Bearer Bearer", b"Digest x=1", b"\xff", b"Bearer " + b"a" * 20_000, b"Bearer a,b",
        b"Bearer None", b"Bearer null", TOKENS["user"].encode(), b"Bearer " + TOKENS["user"].encode() + b"x",
        b"Bearer " + TOKENS["user"].encode()[:-1], b"Basic " + TOKENS["user"].encode(),
        b"Bearer " + TOKENS["user"].upper().encode(),
    ],
)  # fmt: skip
def test_odd_headers_are_401(http: httpx.Client, header: bytes) -> None:
    answer = http.get("/v1/job", headers=[(b"authorization", header)])  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert m.Problem.model_validate_json(answer.content).code is m.ErrorCode.UNAUTHORIZED
    assert all(token not in answer.text for token in TOKENS.values())


def test_the_first_of_two_headers_counts(http: httpx.Client) -> None:
    good, bad = f"Bearer {TOKENS['user']}", "Bearer nonsense"
    for first, second, status in ((bad, good, 401), (good, bad, 200)):
        answer = http.get("/v1/job", headers=[("authorization", first), ("authorization", second)])
        assert answer.status_code == status


def test_every_token_is_compared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def watched(token: bytes, given: bytes) -> bool:
        compared.append(token)
        return hmac.compare_digest(token, given)

    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=watched))
    tokens = JobTokens(TOKENS)  # type: ignore[arg-type]
    for header in ("Bearer " + TOKENS["user"], "Bearer " + TOKENS["policy"], "Bearer no", "Basic x", None):
        compared.clear()
        with suppress(ApiError):
            tokens.caller(header)
        assert compared == [token.encode() for token in TOKENS.values()]


# ---- heads of absurd size -------------------------------------------------------------------------------------


def test_large_heads_are_431(http: httpx.Client) -> None:
    for extra in ({"x-large": "a" * MAX_HEAD_BYTES}, {f"x-{i}": "a" for i in range(MAX_HEADERS)}):
        answer = http.get("/v1/job", headers={**bearer("user"), **extra})
        assert answer.status_code == 431
        assert m.Problem.model_validate_json(answer.content).code is m.ErrorCode.TOO_LARGE
    answer = http.get("/v1/steps?x=" + "a" * (MAX_HEAD_BYTES - 1000), headers=bearer("user"))
    assert answer.status_code == 200, "the longest that httpx itself sends"
    assert http.get("/v1/job", headers=bearer("user")).status_code == 200


def test_a_head_in_many_pieces_and_a_long_body_are_fine(served: ServedController) -> None:
    """Only what comes before a request counts: not its body, not the requests before it."""
    port = int(served.url.rpartition(":")[2])
    body = b'{"train": {"x": "' + b"a" * (4 * MOST_BEFORE_A_REQUEST) + b'"}}'
    head = (
        f"POST /v1/config/validate HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKENS['user']}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        for _ in range(3):
            for i in range(0, len(head), 7):
                connection.sendall(head[i : i + 7])
            connection.sendall(body)
            answer = b""
            while b'"valid":false' not in answer:
                received = connection.recv(65536)
                assert received, answer
                answer += received


# ---- bodies of absurd shape -----------------------------------------------------------------------------------

DEEP = 50_000


def test_deep_nesting_is_422(http: httpx.Client) -> None:
    """Every route with the deepest body, every depth and opening with one route: one parser reads them all."""
    openings, depths = (b"[", b'{"a":', b'{"train":{"a":'), (150, 300, 990, DEEP)
    routes = [
        ("/v1/config/validate", "user"), ("/v1/replicas", "rollout"), ("/v1/leases", "rollout"),
        ("/v1/steps/0/commit", "policy"), ("/v1/publications", "policy"), ("/v1/checkpoints", "policy"),
    ]  # fmt: skip
    tried = [(*routes[0], depth, opening) for depth in depths for opening in openings]
    tried += [(*route, DEEP, openings[index % 3]) for index, route in enumerate(routes[1:])]
    for path, role, depth, opening in tried:
        closing = (b"]" if opening == b"[" else b"}" * opening.count(b"{")) * depth
        for body in (opening * depth, opening * depth + b"1" + closing):
            answer = http.post(path, content=body, headers=bearer(role))
            assert answer.status_code in (422, 200), (path, depth, answer.text[:200])
            assert answer.status_code == 422 or answer.json()["valid"] is False


@pytest.mark.parametrize(
    "number", ["1e400", "-1e400", "NaN", "Infinity", "9" * 5000, "1" * 400, "-0", "1.0", "true", '"1"', "9e307"]
)
def test_odd_numbers_are_refused_by_name(http: httpx.Client, number: str) -> None:
    body = (
        '{"request_id": "12345678", "replica_id": "r", "incarnation": 1, "version": ' + number +
        ', "publication_id": 0, "max_groups": 1}'
    )  # fmt: skip
    answer = http.post("/v1/leases", content=body, headers=bearer("rollout"))
    assert answer.status_code < 500, answer.text
    if number not in ("-0", "1.0", "true", '"1"'):
        assert answer.status_code == 422, answer.text
        assert len(answer.content) < 2000, "the answer does not repeat what it refuses"


def test_numbers_in_addresses_are_refused_too(http: httpx.Client) -> None:
    for number in ("9" * 5000, "-1", "1e9", "0x1", "NaN", "%00", "１", " 1"):
        for path in (f"/v1/steps/{number}/batch?policy_epoch=1", f"/v1/checkpoints/{number}/ledger"):
            assert http.get(path, headers=bearer("policy")).status_code in (404, 409, 422)
        assert http.get("/v1/steps", params={"since": number}, headers=bearer("user")).status_code in (200, 422)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a" * 129), ("name", ""), ("name", "../x"), ("name", "a/b"), ("name", "a\nb"), ("name", "a\0b"),
        ("host", "h" * 257), ("engine", "e" * 257), ("pid", -1), ("world_size", 0), ("world_size", 2**40),
        ("request_id", "short"), ("request_id", "r" * 65), ("role", "user"), ("unknown", 1),
        ("held_leases", [{"group_id": "g", "lease_id": "l"}] * (m.MOST_LEASES + 1)),
        ("held_leases", [{"group_id": "g" * 100, "lease_id": "l"}]),
    ],
)  # fmt: skip
def test_fields_of_a_registration_have_bounds(http: httpx.Client, field: str, value: object) -> None:
    body = {"request_id": "12345678", "role": "rollout", "name": "r", field: value}
    answer = http.post("/v1/replicas", json=body, headers=bearer("rollout"))
    assert answer.status_code == 422
    assert field in answer.json()["detail"]


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        (m.HeartbeatRequest, "gauges", {f"g{i}": 1.0 for i in range(m.MOST_GAUGES + 1)}),
        (m.HeartbeatRequest, "gauges", {"g" * 129: 1.0}),
        (m.HeartbeatRequest, "leases", ["l"] * (m.MOST_LEASES + 1)),
        (m.HeartbeatRequest, "leases", ["l" * 257]), (m.HeartbeatRequest, "status", "s" * 257),
        (m.CommitRequest, "metrics", {f"m{i}": 1.0 for i in range(m.MOST_METRICS + 1)}),
        (m.CommitRequest, "metrics", {"": 1.0}), (m.CommitRequest, "metrics", {"loss": float("nan")}),
        (m.PublishRequest, "uri", "../../etc/passwd"),
        (m.PublishRequest, "uri", "/etc/passwd"), (m.PublishRequest, "uri", "a/../b"),
        (m.PublishRequest, "uri", "a/b/c"), (m.PublishRequest, "uri", "a" * 513),
        (m.PublishRequest, "n_bytes", 2**53), (m.CheckpointRequest, "path", "/a\n/b"),
        (m.CheckpointRequest, "path", "/" * 4097), (m.PushList, "pushes", []),
        (m.PushList, "pushes", [{"group_id": "g", "lease_id": "l", "index": 0}] * 4097),
        (m.PushItem, "index", -1), (m.PushItem, "group_id", "g" * 257), (m.LeaseRequest, "max_groups", 10**9),
        (m.LeaseRequest, "wait_s", 1e9),
    ],
)  # fmt: skip
def test_fields_of_messages_have_bounds(message: type[m.Message], field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refused:
        message.model_validate({field: value})
    assert field in {error["loc"][0] for error in refused.value.errors()}, "others are missing in any case"


def test_of_a_long_list_the_first_fault_is_told(http: httpx.Client) -> None:
    """A message of megabytes, all wrong, costs the controller next to nothing."""
    snapshot = {"committed_steps": 0, "timeline": 0, "frontier": 0, "untrained": ["a"] * 200_000}
    body = {"request_id": "12345678", "role": "rollout", "name": "r", "snapshot": snapshot}
    with pytest.raises(ValidationError) as refused:
        m.RegisterRequest.model_validate(body)
    assert refused.value.error_count() == 1
    answer = http.post("/v1/replicas", json=body, headers=bearer("rollout"))
    assert answer.status_code == 422
    assert "snapshot.untrained.0" in answer.json()["detail"]
    for content in (b"x" * 1_000_000, b"", b"{", b"[]", b"\xff\xfe"):
        answer = http.post("/v1/replicas", content=content, headers=bearer("rollout"))
        assert (answer.status_code, answer.json()["code"]) == (422, m.ErrorCode.BAD_REQUEST)
        assert len(answer.content) < 1000


def test_every_text_list_and_table_of_a_request_is_bounded() -> None:
    """A field that somebody adds without a bound fails here, by name."""
    sent = ("Request", "PushList", "HeldLease", "DeclareLeases", "UpdateReport")
    requests = [kind for name, kind in vars(m).items() if name.endswith(sent)]
    assert len(requests) >= 10
    unbounded = []
    for kind in requests:
        schema = kind.model_json_schema()
        parts = [(kind.__name__, schema), *schema.get("$defs", {}).items()]
        for title, part in parts:
            for name, field in part.get("properties", {}).items():
                if not all(_bounded(branch) for branch in field.get("anyOf", [field])):
                    unbounded.append(f"{title}.{name}")
    assert unbounded == []


def _bounded(field: dict[str, Any]) -> bool:
    kind = field.get("type")
    if kind == "string":
        return "maxLength" in field or "enum" in field or "const" in field
    if kind == "array":
        return "maxItems" in field and _bounded(field["items"])
    if kind == "object":
        return "maxProperties" in field
    return True
