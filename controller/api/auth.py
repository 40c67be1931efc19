"""The middleware decides who may call what: bearer tokens by role, checked before anything else is read.

    AuthMiddleware ─▶ LeaderGate ─▶ BodyLimit ─▶ routes (each requires the roles that it serves)

A browser that has traded the user's token for a session (`controller.dashboard.session`) is the user.

The launcher makes one token per role and hands each process its own. The user's token reads everything and
operates the job; the replicas' tokens reach the calls of their role. Behind the middleware there is always a caller
with a role, whatever the path, so a caller without a token never learns which paths, parameters or jobs
there are. Health is public, and so is the proof that this is the controller of the job (`/v1/proof`), which a client
asks for before it sends its token. Public paths take no body, so an unknown caller can fill no memory.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from controller.dashboard.session import SAFE, Sessions, is_own_page
from controller.errors import ApiError
from controller.services.errors import problem, refusal
from controller.services.proof import ProofService
from controller.state.replicas import Registry
from schema.wire.messages import ErrorCode
from schema.wire.messages.proof import PATH as PROOF
from schema.wire.secret import REPLICA_HEADER, fault

Caller = Literal["user", "rollout", "policy"]
CALLERS: tuple[Caller, ...] = ("user", "rollout", "policy")
CALLER = "cosmos.caller"
"""Where the middleware leaves, in the scope of a request, who makes it."""
SESSIONS = "cosmos.sessions"
"""Where it leaves the sessions of the dashboard."""
PROVER = "cosmos.prover"
"""Where it leaves what proves the tokens of the job."""
ANYBODY = frozenset(CALLERS)
USER = frozenset({"user"})
ROLLOUT = frozenset({"rollout"})
POLICY = frozenset({"policy"})
REPLICAS = frozenset({"rollout", "policy"})

OPEN = frozenset({"/healthz", "/readyz", PROOF})
MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 * 1024
"""All headers and the address together; the longest of ours names the rows of a batch one by one."""


class JobTokens:
    """The tokens of one job."""

    def __init__(self, tokens: Mapping[Caller, str]) -> None:
        if len(set(tokens.values())) != len(CALLERS) or not all(tokens.get(caller) for caller in CALLERS):
            raise ValueError("each of the roles user, rollout and policy needs a token of its own")
        for caller in CALLERS:
            if why := fault(tokens[caller]):
                raise ValueError(f"the token of {caller} {why}")
        self._tokens = {caller: tokens[caller].encode() for caller in CALLERS}

    @property
    def prover(self) -> ProofService:
        """Proves that this process has these tokens."""
        return ProofService(token.decode() for token in self._tokens.values())

    @property
    def user(self) -> str:
        return self._tokens["user"].decode()

    def caller(self, authorization: str | None) -> Caller:
        """Return whose token this header carries. Raises `ApiError` (401).

        It is compared with every token, each time in full: how long that takes reveals nothing.
        """
        scheme, _, given = (authorization or "").partition(" ")
        sent = given.strip().encode()
        match: Caller | None = None
        for caller, token in self._tokens.items():
            if hmac.compare_digest(token, sent):
                match = caller
        if scheme.lower() != "bearer":
            match = None
        if match is None:
            why = "the token is not valid for this job" if authorization else "no token was sent"
            detail = f"{why}: send `Authorization: Bearer <token>`"
            raise ApiError(ErrorCode.UNAUTHORIZED, detail)
        return match


class AuthMiddleware:
    """ASGI middleware: 431 for heads above the limits, 401 without a valid token, 413 for a body of an open call."""

    def __init__(self, app: ASGIApp, tokens: JobTokens) -> None:
        self._app, self._tokens, self._sessions = app, tokens, Sessions(tokens.user)
        self._prover = tokens.prover

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # only HTTP is served here: uvicorn closes the connection
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers) + len(scope.get("query_string", b""))
        if len(headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            detail = f"at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes of headers and address are read"
            await problem(ErrorCode.TOO_LARGE, detail, status=431)(scope, receive, send)
            return
        if scope["path"] in OPEN:
            if _has_body(headers):
                detail = f"{scope['path']} takes no body"
                closing = {"connection": "close"}
                await problem(ErrorCode.TOO_LARGE, detail, headers=closing)(scope, receive, send)
                return
            scope[PROVER] = self._prover
        else:
            try:
                scope[CALLER], scope[SESSIONS] = self._caller(scope), self._sessions
            except ApiError as error:
                await refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        """By the header, else by the session. Raises `ApiError` (401, 403)."""
        headers = Headers(scope=scope)
        given = headers.get("authorization")
        if given is not None or not self._sessions.holds(headers):
            return self._tokens.caller(given)
        if scope["method"] not in SAFE and not is_own_page(headers):
            detail = "a session changes something only from a page of this address: send a token instead"
            raise ApiError(ErrorCode.FORBIDDEN, detail)
        return "user"


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
        for name, value in headers
    )


def require(request: Request, allowed: frozenset[str]) -> Caller:
    """The caller of a request if its role may make it. Raises `ApiError` (403)."""
    caller: Caller = request.scope[CALLER]
    if caller not in allowed:
        need = " or ".join(sorted(allowed))
        detail = f"{request.method} {request.url.path} needs the token of {need}, this is that of {caller}"
        raise ApiError(ErrorCode.FORBIDDEN, detail)
    return caller


def require_own(request: Request, registry: Registry, replica_id: str) -> None:
    """A replica's token, with the secret of its registration, speaks for that replica alone.

    Raises `ApiError`.
    """
    caller: Caller = request.scope[CALLER]
    if caller == "user":
        return
    role = registry.find(replica_id).role
    if role != caller:
        detail = f"replica {replica_id} is a {role} replica, this is the token of {caller}"
        raise ApiError(ErrorCode.FORBIDDEN, detail)
    registry.prove(replica_id, request.headers.get(REPLICA_HEADER, ""))
