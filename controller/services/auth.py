"""Who may call what: bearer tokens by role.

The launcher makes one token per role and hands each process its own. The user's token reads everything and
operates the job; the replicas' tokens reach the calls of their role.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Literal

from starlette.requests import Request

from controller.services.errors import ProblemError
from schema.wire.messages import ErrorCode
from schema.wire.secret import fault

Caller = Literal["user", "rollout", "policy"]
CALLERS: tuple[Caller, ...] = ("user", "rollout", "policy")
CALLER = "cosmos.caller"
"""Where the guard leaves, in the scope of a request, who makes it."""
ANYBODY = frozenset(CALLERS)
USER = frozenset({"user"})
ROLLOUT = frozenset({"rollout"})
POLICY = frozenset({"policy"})
REPLICAS = frozenset({"rollout", "policy"})


class Tokens:
    """The tokens of one job."""

    def __init__(self, tokens: Mapping[Caller, str]) -> None:
        if len(set(tokens.values())) != len(CALLERS) or not all(tokens.get(caller) for caller in CALLERS):
            raise ValueError("each of the roles user, rollout and policy needs a token of its own")
        for caller in CALLERS:
            _check_strength(caller, tokens[caller])
        self._tokens = {caller: tokens[caller].encode() for caller in CALLERS}

    def caller(self, authorization: str | None) -> Caller:
        """Whose token this header carries. Raises `ProblemError` (401).

        It is compared with every token, each time in full: how long that takes tells nothing.
        """
        scheme, _, given = (authorization or "").partition(" ")
        sent = given.strip().encode()
        found: Caller | None = None
        for caller, token in self._tokens.items():
            if hmac.compare_digest(token, sent):
                found = caller
        if scheme.lower() != "bearer":
            found = None
        if found is None:
            why = "the token is not valid for this job" if authorization else "no token was sent"
            detail = f"{why}: send `Authorization: Bearer <token>`"
            raise ProblemError(ErrorCode.UNAUTHORIZED, detail, {"www-authenticate": "Bearer"})
        return found

    def require(self, request: Request, allowed: frozenset[str]) -> Caller:
        """The caller of a request if it may make it. Raises `ProblemError` (401, 403)."""
        caller: Caller = request.scope.get(CALLER) or self.caller(request.headers.get("authorization"))
        if caller not in allowed:
            need = " or ".join(sorted(allowed))
            detail = (
                f"{request.method} {request.url.path} needs the token of {need}, this is that of {caller}"
            )
            raise ProblemError(ErrorCode.FORBIDDEN, detail)
        return caller


def _check_strength(caller: Caller, token: str) -> None:
    """Refuse what can be guessed, or cannot stand in a header. Never shows the token."""
    if why := fault(token):
        raise ValueError(f"the token of {caller} {why}")
