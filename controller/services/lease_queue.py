"""Lease requests that are held open: who waits, in which order, and when no request needs another look.

    request ─ refused for now ─▶ waits ─┬─ something changed, it is its turn ─▶ answered
                                        ├─ time is up, or the job closes ─────▶ its last refusal
                                        └─ asked again (same request id) ─────▶ its last refusal

One task serves all: a change wakes it, not a thousand requests. Requests that ask for the same (*kind*: weight
version and publication) are refused for the same reason, so after the first refusal the others of its kind need not
be asked, unless the answer depends on the replica too (`alike` says so, or the refusal is `UNEVEN`).
Who waits longest is served first; who holds more than others that ask is asked again a moment later, and need not
stand back then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from controller.errors import ApiError
from controller.notify import ChangeSignal
from controller.store import StoreUnavailable
from schema.wire.messages import LeaseReply, LeaseRequest, LeaseStatus

log = logging.getLogger(__name__)

HELD_OPEN = frozenset({LeaseStatus.THROTTLED, LeaseStatus.PAUSED})
UNEVEN = LeaseReply(status=LeaseStatus.THROTTLED, reason="other replicas that ask hold fewer groups")
"""The refusal of a replica that holds its share."""
PATIENCE_S = 1.0
"""How long it stands back: others may be loading weights, or have died."""
IDLE_SECONDS = 60.0
"""The serving task looks at least this often; a change wakes it at once."""

Kind = tuple[int, int, str]


@dataclass(slots=True, eq=False)
class _Waiter:
    request: LeaseRequest
    refusal: LeaseReply
    answer: asyncio.Future[LeaseReply]
    timer: asyncio.TimerHandle | None = None

    @property
    def kind(self) -> Kind:
        request = self.request
        return request.version, request.publication_id, request.manifest_hash


class LeaseQueue:
    """See the module's docstring.

    Args:
        changed: moves whenever an answer might be another one.
        decide: the answer to a request now, and whether it need not stand back; None: it waits no longer. Raises
            `ApiError`, `StoreUnavailable`.
        alike: whether all requests of a kind are refused together now.
        stage: hands over what `decide` has changed, before anything else may change.
        closing: whether everybody has to leave.
    """

    def __init__(
        self,
        changed: ChangeSignal,
        decide: Callable[[LeaseRequest, bool], LeaseReply | None],
        alike: Callable[[], bool],
        stage: Callable[[], None],
        closing: Callable[[], bool],
    ) -> None:
        self._changed, self._decide, self._alike = changed, decide, alike
        self._stage, self._closing = stage, closing
        self._waiting: dict[str, _Waiter] = {}
        self._kinds: dict[Kind, dict[str, _Waiter]] = {}
        self._served = -1
        self._server: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def throttled(self) -> dict[str, int]:
        """Replicas that wait because they were throttled, and the groups that each asks for."""
        return {
            waiter.request.replica_id: waiter.request.max_groups
            for waiter in self._waiting.values()
            if waiter.refusal.status is LeaseStatus.THROTTLED
        }

    def catch_up(self) -> None:
        """Serve the waiting requests before a new one, if anything has changed."""
        if self._waiting and self._served != self._changed.generation:
            self._serve()

    def withdraw(self, request_id: str) -> None:
        """The request was sent again: a grant in the answer to the earlier call would lie idle."""
        before = self._waiting.get(request_id)
        if before is not None:
            self._settle(before, before.refusal)
            self._leave(before)

    async def wait(self, request: LeaseRequest, refusal: LeaseReply, seconds: float) -> LeaseReply:
        """The answer to a request that was refused. Raises what `decide` raises."""
        waiter = _Waiter(request, refusal, asyncio.get_running_loop().create_future())
        self._enter(waiter)
        if self._ask(waiter):  # something has changed since it was refused
            self._stage()
        try:
            async with asyncio.timeout(seconds):
                return await waiter.answer
        except TimeoutError:
            return waiter.refusal
        finally:
            self._leave(waiter)

    def _enter(self, waiter: _Waiter) -> None:
        name = waiter.request.request_id
        self.withdraw(name)
        self._waiting[name] = waiter
        self._kinds.setdefault(waiter.kind, {})[name] = waiter
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve_changes(), name="lease-queue")

    def _leave(self, waiter: _Waiter) -> None:
        name, kind = waiter.request.request_id, waiter.kind
        if waiter.timer is not None:
            waiter.timer.cancel()
        if self._waiting.get(name) is waiter:
            del self._waiting[name]
            del self._kinds[kind][name]
            if not self._kinds[kind]:
                del self._kinds[kind]
        if not self._waiting and self._server is not None:
            self._server.cancel()
            self._server = None

    async def _serve_changes(self) -> None:
        while True:
            seen = self._changed.generation
            if self._served != seen:
                self._serve()
            await self._changed.wait(seen, IDLE_SECONDS)

    def _serve(self) -> None:
        self._served = self._changed.generation
        alike = self._alike()
        for waiters in list(self._kinds.values()):
            for waiter in list(waiters.values()):
                if self._ask(waiter) or waiter.refusal is UNEVEN:
                    continue
                if alike and not self._closing():
                    break
        self._stage()

    def _ask_again(self, waiter: _Waiter) -> None:
        """It has stood back long enough."""
        waiter.timer = None
        if waiter.refusal is UNEVEN and self._ask(waiter, patient=True):
            self._stage()

    def _ask(self, waiter: _Waiter, patient: bool = False) -> bool:
        """Whether there was an answer other than to wait on."""
        if waiter.answer.done():
            return True
        try:
            reply = self._decide(waiter.request, patient)
        except (ApiError, StoreUnavailable) as error:
            waiter.answer.set_exception(error)
            return True
        if reply is None:
            self._settle(waiter, waiter.refusal)
            return True
        waiter.refusal = reply
        if reply.status in HELD_OPEN and not self._closing():
            if reply is UNEVEN and waiter.timer is None:
                loop = asyncio.get_running_loop()
                waiter.timer = loop.call_later(PATIENCE_S, self._ask_again, waiter)
            return False
        self._settle(waiter, reply)
        return True

    @staticmethod
    def _settle(waiter: _Waiter, reply: LeaseReply) -> None:
        if not waiter.answer.done():
            waiter.answer.set_result(reply)
