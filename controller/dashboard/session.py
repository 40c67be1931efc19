"""A browser's session: the user's token traded for a cookie, which says nothing of the token.

The cookie holds when it ends and, as proof, an HMAC of that under a key made from the token: no session is stored, so
a controller that takes over knows it, and a new token ends all sessions. Its name differs from job to job, since
browsers send cookies to every port of a host. SameSite=Strict keeps it off requests that other sites cause; calls
that change something also need to come from a page of this very address, whatever the browser makes of SameSite.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

SECONDS = 7 * 24 * 3600
SAFE = frozenset({"GET", "HEAD"})


class Sessions:
    """Cookies for one token. clock: Unix time."""

    def __init__(self, token: str, clock: Callable[[], float] = time.time) -> None:
        self._key, self._clock = hmac.digest(token.encode(), b"dashboard session", "sha256"), clock
        self.name = "cosmos-" + hmac.digest(self._key, b"name of the cookie", "sha256").hex()[:12]

    def open(self, response: Response, scope: Scope) -> None:
        """Hand a session out."""
        ends = str(int(self._clock()) + SECONDS)
        self._set(response, scope, f"{ends}.{self._proof(ends)}", SECONDS)

    def close(self, response: Response, scope: Scope) -> None:
        """Have the browser forget it."""
        self._set(response, scope, "", 0)

    def _set(self, response: Response, scope: Scope, value: str, seconds: int) -> None:
        response.set_cookie(
            self.name,
            value,
            max_age=seconds,
            path="/",
            secure=scope.get("scheme") == "https",
            httponly=True,
            samesite="strict",
        )

    def _proof(self, ends: str) -> str:
        return hmac.digest(self._key, ends.encode(), "sha256").hex()

    def holds(self, headers: Headers) -> bool:
        """Whether a request carries a session that has not ended; the proof is compared in constant time."""
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.name)
        except CookieError:
            return False
        ends, _, proof = ("" if morsel is None else morsel.value).partition(".")
        if not (ends.isascii() and ends.isdecimal() and len(ends) < 16):
            return False
        return hmac.compare_digest(proof.encode(), self._proof(ends).encode()) and int(ends) > self._clock()


def is_own_page(headers: Headers) -> bool:
    """Whether a page of this address makes a request: by `Origin`, which no page can change."""
    origin = urlsplit(headers.get("origin", ""))
    return bool(origin.netloc) and origin.netloc == headers.get("host", "")
