"""The one HTTP client of the controller, for workers, launcher, tests and users' scripts.

    client = AsyncClient(url, token)
    reply = await client.send(api.lease(LeaseRequest(...)))

Every call has a time-out. Lost connections, time-outs and 503 are retried with jittered back-off for up to
`patience` seconds (all calls are idempotent, see `controller.api`), since a controller that died comes back.
Everything else raises:

    ControllerError
    ├── ControllerLost      no answer for `patience` seconds
    ├── Unauthorized        the token is missing, wrong, or of another role
    └── Refused             any other problem answer; `.code` says which, `.detail` what to do
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import ValidationError

from controller.api import Answer, Call
from schema.wire.messages import ErrorCode, Problem

T = TypeVar("T")
log = logging.getLogger(__name__)

CALL_TIMEOUT = 30.0
"""Seconds for one attempt beyond its long-poll: a 256 MiB push on a slow link takes about 20."""
FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0
"""Back-off bounds: a restarted controller is found within a second, a dead one is not flooded."""


class ControllerError(Exception):
    """Base of everything that a call to the controller raises."""


class ControllerLost(ControllerError):
    """The controller did not answer for the whole patience of this client."""


class Refused(ControllerError):
    """The controller answered with a problem."""

    def __init__(self, status: int, code: ErrorCode, detail: str) -> None:
        super().__init__(f"{detail} ({code}, HTTP {status})")
        self.status, self.code, self.detail = status, code, detail


class Unauthorized(Refused):
    """The token is missing, wrong, or belongs to another role."""


class _Base:
    def __init__(self, url: str, token: str, *, patience: float = 0.0) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        self._headers = {"authorization": f"Bearer {token}"}

    def _timeout(self, call: Call[T]) -> httpx.Timeout:
        return httpx.Timeout(CALL_TIMEOUT + call.wait_s, connect=10.0)

    def _build(self, http: httpx.Client | httpx.AsyncClient, call: Call[T]) -> httpx.Request:
        return http.build_request(
            call.method,
            call.path,
            params=call.params,
            content=call.body,
            headers={"content-type": call.content_type, **(call.headers or {})},
            timeout=self._timeout(call),
        )

    def _read(self, call: Call[T], response: httpx.Response) -> T:
        if response.is_success:
            try:
                return call.read(Answer(response.status_code, response.content))
            except ValidationError as error:
                raise ControllerError(
                    f"{call.method} {call.path}: the answer is not what this version expects "
                    f"(is the controller of another version?): {error}"
                ) from None
        raise _problem(call, response)

    def _pauses(self) -> Iterator[float]:
        """Seconds to sleep before each further attempt, until the patience is used up."""
        give_up, pause = time.monotonic() + self.patience, FIRST_PAUSE
        while time.monotonic() < give_up:
            yield pause * random.uniform(0.5, 1.0)
            pause = min(pause * 2, MAX_PAUSE)


def _problem(call: Call[T], response: httpx.Response) -> Refused:
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        text = response.text[:300] or response.reason_phrase
        return Refused(response.status_code, ErrorCode.INTERNAL, f"{call.method} {call.path}: {text}")
    kind = Unauthorized if problem.status in (401, 403) else Refused
    return kind(problem.status, problem.code, f"{call.method} {call.path}: {problem.detail}")


def _lost(client: _Base, call: Call[T], cause: str) -> ControllerLost:
    return ControllerLost(
        f"no answer from the controller at {client.url} for {client.patience:.0f} s "
        f"({call.method} {call.path}: {cause})"
    )


def _retryable(response: httpx.Response) -> bool:
    return response.status_code in (502, 503, 504)


class Client(_Base):
    """Synchronous client; one connection pool, safe to use from one thread."""

    def __init__(self, url: str, token: str, *, patience: float = 0.0) -> None:
        super().__init__(url, token, patience=patience)
        self._http = httpx.Client(base_url=self.url, headers=self._headers, trust_env=False)

    def send(self, call: Call[T]) -> T:
        """Send one call. Raises `ControllerError` as described in the module's docstring."""
        pauses = self._pauses()
        while True:
            try:
                response = self._http.send(self._build(self._http, call))
                if not _retryable(response):
                    return self._read(call, response)
                cause = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                cause = f"{type(error).__name__}: {error}"
            pause = next(pauses, None)
            if pause is None:
                raise _lost(self, call, cause)
            log.debug("retrying %s %s in %.2f s: %s", call.method, call.path, pause, cause)
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

    def __init__(self, url: str, token: str, *, patience: float = 0.0) -> None:
        super().__init__(url, token, patience=patience)
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=self._headers, limits=limits, trust_env=False
        )

    async def send(self, call: Call[T]) -> T:
        """Send one call. Raises `ControllerError` as described in the module's docstring."""
        pauses = self._pauses()
        while True:
            try:
                response = await self._http.send(self._build(self._http, call))
                if not _retryable(response):
                    return self._read(call, response)
                cause = f"HTTP {response.status_code}"
            except httpx.TransportError as error:
                cause = f"{type(error).__name__}: {error}"
            pause = next(pauses, None)
            if pause is None:
                raise _lost(self, call, cause)
            log.debug("retrying %s %s in %.2f s: %s", call.method, call.path, pause, cause)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
