"""The one HTTP client of the controller, synchronous and asynchronous; its errors are listed in `controller.client`.

`url` may be several addresses, separated by commas: those of controllers of one job of which one is in charge
while the others stand by. They are tried in turn, beginning with the one that answered last.

The certificate of an https:// controller is verified: against the authorities of `tls_ca`, else of the file that
COSMOS_TLS_CA names, else of the system. One at http:// proves on each new connection that it has this client's token,
before the first request (`controller.client.proof`).

`secret` is that of a rollout replica (see `schema.wire.secret`): it goes with every call.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from controller.client import proof
from controller.client.calls import Answer, Call
from schema.util.backoff import Backoff
from schema.util.tls import TlsFileError, client_context
from schema.wire.messages import ErrorCode, Problem
from schema.wire.secret import REPLICA_HEADER

T = TypeVar("T")
log = logging.getLogger(__name__)

CALL_TIMEOUT = 30.0
"""Seconds for one attempt beyond its long-poll: a 256 MiB push on a slow link takes about 20."""
BACKOFF = Backoff(0.05, 1.0)
"""A restarted controller is found within a second, a dead one is not flooded."""
KEEP_IDLE = 30.0
"""Seconds for which an idle connection is kept: longer than the pauses between two calls of a replica, so that a new
connection and its proof are rare; shorter than the controller keeps it."""
MAX_RETRY_AFTER = 5.0
"""Longest Retry-After in seconds that is obeyed: a controller that is busy says 1."""


class ControllerError(Exception):
    """Base of everything that a call to the controller raises."""


class ControllerLost(ControllerError):
    """The controller did not answer for the whole patience of this client."""


class NotServing(ControllerLost):
    """The controller answered for the whole patience that it cannot serve now; `detail` is its reason."""

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message)
        self.detail = detail


class Unusable(ControllerError, ValueError):
    """No address of a controller, or no token: nothing can be asked with it."""


class Untrusted(ControllerError):
    """The server that answers there cannot prove that it is the controller."""


class Refused(ControllerError):
    """The controller answered with a problem. `retry_after`: seconds to another answer; 0: not given."""

    def __init__(self, status: int, code: ErrorCode, detail: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{detail} ({code}, HTTP {status})")
        self.status, self.code, self.detail, self.retry_after = status, code, detail, retry_after


class Unauthorized(Refused):
    """The token is missing, wrong, or belongs to another role."""


class UnknownToken(Unauthorized):
    """A controller answers that does not have this token, which was not sent: token or address are of another job."""

    def __init__(self, detail: str) -> None:
        super().__init__(401, ErrorCode.UNAUTHORIZED, detail)
        self.args = (detail,)


class _Base(ABC):
    def __init__(self, url: str, token: str, patience: float, secret: str) -> None:
        self.urls = [_address(part.strip()) for part in url.split(",") if part.strip()]
        if not self.urls:
            raise Unusable("no address of a controller: expected http://host:port, or several with commas")
        if not token.isascii() or not token.isprintable() or " " in token:
            raise Unusable("the token holds characters other than printable ASCII without spaces")
        self.patience = patience
        self.trouble = "nothing has answered"
        """Why the newest attempt at a call got no answer; empty: it got one."""
        self._current = 0
        self._token = token
        self._headers = {"authorization": f"Bearer {token}"}
        if secret:
            self._headers[REPLICA_HEADER] = secret

    @property
    def url(self) -> str:
        """The address that is tried first."""
        return self.urls[self._current]

    def leave(self, url: str) -> None:
        """`url` did not serve: try the next one from now on, unless another call has moved on already."""
        if url == self.url:
            self._current = (self._current + 1) % len(self.urls)

    def _build(self, http: httpx.Client | httpx.AsyncClient, call: Call[T]) -> httpx.Request:
        return http.build_request(
            call.method,
            self.url + call.path,
            params=call.params,
            content=call.body,
            headers={"content-type": call.content_type, **(call.headers or {})},
            timeout=httpx.Timeout(CALL_TIMEOUT + call.wait_s, connect=10.0),
            extensions={} if self.url.startswith("https:") else {"trace": self._trace(self.url)},
        )

    @abstractmethod
    def _trace(self, url: str) -> Callable[[str, Mapping[str, Any]], object]:
        """Return what httpcore calls for each event of a request: it demands a proof of a new connection."""

    def _read(self, call: Call[T], response: httpx.Response) -> T:
        self.trouble = ""
        if response.is_success:
            try:
                return call.read(Answer(response.status_code, response.content))
            except ValidationError as error:
                raise ControllerError(
                    f"{call.method} {call.path}: the answer is not what this version expects "
                    f"(is the controller of another version?): {error}"
                ) from None
        raise _problem(call, response)


def _address(url: str) -> str:
    """One address, without a slash at its end. Raises Unusable."""
    parsed = urlsplit(url)
    try:
        known = parsed.scheme in ("http", "https") and parsed.hostname and parsed.port != 0
    except ValueError:  # a port that is none
        known = False
    if not known:
        raise Unusable(f"{url!r} is not the address of a controller: expected http://host:port")
    return url.rstrip("/")


PROVEN: set[bytes] = set()
"""Digests of tokens that a controller has proven in this process: where another one does not have them since, it is
not the token that is wrong."""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class _Attempts:
    """The attempts at one call: all addresses in turn, then a pause, until the patience is used up."""

    def __init__(self, client: _Base, call: Call[T]) -> None:
        self._client = client
        self._what = f"{call.method} {call.path}"
        self._made = 0
        self._wrong: dict[str, ControllerError] = {}
        """By address, what no further attempt would change."""
        self._began = time.monotonic()

    def unproven(self, url: str, error: proof.Unproven) -> float:
        """Do as `failed` where the proof is missing. Raises what is wrong with the token, or the way, where no
        address has ever proven it."""
        client = self._client
        cause = f"what listens at {url} does not prove that it knows the token of this job: {error}"
        if error.is_answer and _digest(client._token) not in PROVEN:
            self._wrong[url] = _wrong(url, error)
            if len(self._wrong) == len(set(client.urls)):
                raise self._wrong[url] from None
        return self.failed(url, cause)

    def failed(self, url: str, cause: str, retry_after: float = 0.0, reason: str = "") -> float:
        """Seconds to wait before the next attempt. Raises `ControllerLost` when there is none.

        reason: what a controller that answered said.
        """
        client = self._client
        client.trouble = cause
        client.leave(url)
        self._made += 1
        if self._made % len(client.urls):
            return 0.0
        waited = time.monotonic() - self._began
        if waited >= client.patience:
            if reason:
                raise NotServing(
                    f"the controller at {', '.join(client.urls)} cannot serve now: {reason} ({self._what})", reason
                )
            long = f" for {waited:.0f} s" if waited >= 1.0 else ""
            raise ControllerLost(
                f"no answer from the controller at {', '.join(client.urls)}{long} ({self._what}: {cause})"
            )
        pause = BACKOFF.after(self._made // len(client.urls), at_least=min(retry_after, MAX_RETRY_AFTER))
        log.debug("retrying %s in %.2f s: %s", self._what, pause, cause)
        return pause

    def refused(self, url: str, response: httpx.Response) -> float:
        """Do as `failed` for an answer that says: not now."""
        try:
            reason = Problem.model_validate_json(response.content).detail
        except ValidationError:
            reason = ""
        cause = f"HTTP {response.status_code} {reason or response.text[:200]}"
        return self.failed(url, cause, _retry_after(response), reason)


def _wrong(url: str, error: proof.Unproven) -> ControllerError:
    if isinstance(error, proof.WrongProof):
        return UnknownToken(
            f"{url} is a controller that does not know this token, which was not sent: the token is that of another "
            "job or of an earlier start (the present one is in RUN_DIR/.tokens), or the address is "
            "(RUN_DIR/controller.json)"
        )
    return Untrusted(f"{url}: {error}")


def _retry_after(response: httpx.Response) -> float:
    seconds = response.headers.get("retry-after", "")
    return float(seconds) if seconds.isdigit() else 0.0


def _problem(call: Call[T], response: httpx.Response) -> Refused:
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        text = " ".join(response.text[:300].split()) or response.reason_phrase
        what = f"{response.url.copy_with(path='/', query=None)} does not answer as a controller does"
        return Refused(response.status_code, ErrorCode.INTERNAL, f"{call.method} {call.path}: {what}: {text}")
    kind = Unauthorized if problem.status in (401, 403) else Refused
    detail = f"{call.method} {call.path}: {problem.detail}"
    return kind(problem.status, problem.code, detail, _retry_after(response))


@lru_cache(maxsize=8)
def _trusting(ca: str) -> ssl.SSLContext:
    return client_context(ca)  # takes up to 50 ms where the system has many authorities


@lru_cache(maxsize=1)
def _nobody_trusted() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # for http://, where it is never used: made in no time


def _context(url: str, tls_ca: str | None) -> ssl.SSLContext:
    if "https://" not in url:
        return _nobody_trusted()
    try:
        return _trusting(os.environ.get("COSMOS_TLS_CA", "") if tls_ca is None else tls_ca)
    except TlsFileError as error:
        raise Untrusted(f"{error}: COSMOS_TLS_CA or controller.tls_ca must name a file of authorities") from None


def _cause(url: str, error: httpx.TransportError) -> str:
    """Return what went wrong, for another attempt. Raises `Untrusted` where another one would meet the same."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise Untrusted(
                f"the certificate of {url} is not trusted ({cause.verify_message}): export COSMOS_TLS_CA "
                "with the PEM file of its authority (controller.tls_ca of the job)"
            ) from None
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _retryable(response: httpx.Response) -> bool:
    return response.status_code in (408, 502, 503, 504)


class Client(_Base):
    """Synchronous client; one connection pool, safe to use from one thread."""

    def __init__(
        self, url: str, token: str, *, patience: float = 0.0, tls_ca: str | None = None, secret: str = ""
    ) -> None:
        super().__init__(url, token, patience, secret)
        self._http = httpx.Client(
            base_url=self.url,
            headers=self._headers,
            limits=httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=KEEP_IDLE),
            trust_env=False,
            verify=_context(url, tls_ca),
        )

    def _trace(self, url: str) -> Callable[[str, Mapping[str, Any]], None]:
        def trace(event: str, info: Mapping[str, Any]) -> None:
            if event == proof.CONNECTED:
                proof.ask(info["return_value"], url, self._token)
                PROVEN.add(_digest(self._token))

        return trace

    def send(self, call: Call[T]) -> T:
        """Send one call. Raises `ControllerError` as described in the module's docstring."""
        attempts = _Attempts(self, call)
        while True:
            url = self.url
            try:
                response = self._http.send(self._build(self._http, call))
                if not _retryable(response):
                    return self._read(call, response)
                pause = attempts.refused(url, response)
            except proof.Unproven as error:
                pause = attempts.unproven(url, error)
            except httpx.TransportError as error:
                pause = attempts.failed(url, _cause(url, error))
            time.sleep(pause)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Base):
    """Asynchronous client; one connection pool, for one event loop."""

    def __init__(
        self, url: str, token: str, *, patience: float = 0.0, tls_ca: str | None = None, secret: str = ""
    ) -> None:
        super().__init__(url, token, patience, secret)
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=32, keepalive_expiry=KEEP_IDLE)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=self._headers, limits=limits, trust_env=False, verify=_context(url, tls_ca)
        )

    def _trace(self, url: str) -> Callable[[str, Mapping[str, Any]], Coroutine[Any, Any, None]]:
        async def trace(event: str, info: Mapping[str, Any]) -> None:
            if event == proof.CONNECTED:
                await proof.ask_async(info["return_value"], url, self._token)
                PROVEN.add(_digest(self._token))

        return trace

    async def send(self, call: Call[T]) -> T:
        """Send one call. Raises `ControllerError` as described in the module's docstring."""
        attempts = _Attempts(self, call)
        while True:
            url = self.url
            try:
                response = await self._http.send(self._build(self._http, call))
                if not _retryable(response):
                    return self._read(call, response)
                pause = attempts.refused(url, response)
            except proof.Unproven as error:
                pause = attempts.unproven(url, error)
            except httpx.TransportError as error:
                pause = attempts.failed(url, _cause(url, error))
            await asyncio.sleep(pause)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
