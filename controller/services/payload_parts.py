"""Samples as they arrive in one request, and how they are cut into the parts that the store keeps."""

from __future__ import annotations

from dataclasses import dataclass

from controller.store import PayloadKey
from controller.store.payloads import Payload
from schema.wire.messages import PushItem


@dataclass(frozen=True, slots=True)
class Push:
    """One sample as it arrived: its frame lies at `start` of the request's body."""

    item: PushItem
    frame: Payload
    start: int = 0


class Parts:
    """Cuts the accepted samples of a request into parts: one for each run of neighbours of one lease."""

    def __init__(self, body: Payload) -> None:
        self._body = memoryview(body)
        self._lease: tuple[str, str] | None = None
        self._first = self._start = self._end = 0
        self._done: dict[PayloadKey, Payload] = {}

    def place(self, push: Push) -> tuple[int, int]:
        """First index and offset under which a sample is stored if it is accepted."""
        if (push.item.group_id, push.item.lease_id) == self._lease and push.start == self._end:
            return self._first, push.start - self._start
        return push.item.index, 0

    def add(self, push: Push) -> None:
        """The sample was accepted."""
        first, offset = self.place(push)
        if not offset:
            self._close()
            self._lease = push.item.group_id, push.item.lease_id
            self._first, self._start = first, push.start
        self._end = push.start + len(push.frame)

    def _close(self) -> None:
        if self._lease is not None:
            group_id, lease_id = self._lease
            self._done[group_id, f"{lease_id}.{self._first}"] = self._body[self._start : self._end]

    def finish(self) -> dict[PayloadKey, Payload]:
        """All parts; the bytes are shared with the body."""
        self._close()
        self._lease = None
        return self._done
