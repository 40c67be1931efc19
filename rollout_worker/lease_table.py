"""The table lists what this replica holds: groups under lease, and which of their samples are where. Pure
bookkeeping.

    leased ─▶ generating ─▶ scoring ─▶ pushing ─▶ done
              (in the engine)

A group leaves when its last sample is done, when its lease is lost, or when it is given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from schema.wire.messages import HeldLease, LeasedGroup
from schema.wire.weights import Publication


@dataclass(slots=True)
class HeldGroup:
    """One group under lease."""

    lease: LeasedGroup
    open: set[int]
    """Samples that are not done."""
    weights: Publication | None = None
    """The weights that the engine held when the lease was asked for."""
    requests: set[str] = field(default_factory=set)
    """Engine requests made for it."""


class LeaseTable:
    """All groups under lease, by lease id, and the engine requests made for them."""

    def __init__(self) -> None:
        self._groups: dict[str, HeldGroup] = {}
        self._requests: dict[str, tuple[HeldGroup, tuple[int, ...]]] = {}
        self._unfinished: dict[str, tuple[float, set[int]]] = {}
        """By request: when it was made, and which of its samples are not generated yet."""
        self._asleep_since: float | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, lease: LeasedGroup, weights: Publication | None = None) -> HeldGroup | None:
        """Take a leased group in; None if it is held already (a repeated answer) or has nothing left to do.

        weights: what the engine held when it was asked for.
        """
        missing = set(range(len(lease.seeds))) - set(lease.done)
        if lease.lease_id in self._groups or not missing:
            return None
        group = HeldGroup(lease, missing, weights)
        self._groups[lease.lease_id] = group
        return group

    def get(self, lease_id: str) -> HeldGroup | None:
        return self._groups.get(lease_id)

    def ask(self, request_id: str, group: HeldGroup, indices: Sequence[int], now: float = 0.0) -> None:
        """An engine request is made for these samples of a group, in this order."""
        self._requests[request_id] = (group, tuple(indices))
        self._unfinished[request_id] = now, set(indices)
        group.requests.add(request_id)

    def request(self, request_id: str) -> tuple[HeldGroup, tuple[int, ...]] | None:
        """Group and sample indices of an engine request; None when its result is no longer needed."""
        return self._requests.get(request_id)

    def generated(self, request_id: str, index: int) -> None:
        """A sample of the group was generated."""
        self._unfinished[request_id][1].discard(index)

    def overdue(self, before: float) -> list[tuple[str, HeldGroup, list[int]]]:
        """Requests made before a time, with the samples that are open and not generated yet: these are given up.

        None while the engine sleeps."""
        if self._asleep_since is not None:
            return []
        late = [name for name, (began, left) in self._unfinished.items() if began < before and left]
        requests = []
        for name in late:
            group, _ = self._requests[name]
            requests.append((name, group, sorted(self._unfinished[name][1] & group.open)))
            self._unfinished[name] = self._unfinished[name][0], set()
        return requests

    def sleep(self, now: float) -> None:
        """Nothing is generated from now on."""
        self._asleep_since = now

    def wake(self, now: float) -> None:
        """The engine goes on: its sleep does not count as time of any request."""
        since, self._asleep_since = self._asleep_since, None
        if since is not None:
            for name, (began, left) in self._unfinished.items():
                self._unfinished[name] = began + now - max(began, since), left

    @property
    def requests(self) -> list[str]:
        """Engine requests of all groups that are held."""
        return list(self._requests)

    def done(self, lease_id: str, index: int) -> None:
        """A sample is pushed, or will never be."""
        group = self._groups.get(lease_id)
        if group is not None:
            group.open.discard(index)
            if not group.open:
                self.drop([lease_id])

    def drop(self, lease_ids: Iterable[str]) -> set[str]:
        """Forget groups; returns the engine requests that were made for them."""
        gone = [group for lease_id in lease_ids if (group := self._groups.pop(lease_id, None)) is not None]
        requests = {request for group in gone for request in group.requests}
        for request in requests:
            del self._requests[request], self._unfinished[request]
        return requests

    @property
    def lease_ids(self) -> list[str]:
        return list(self._groups)

    def declared(self, lease_ids: Iterable[str] | None = None) -> list[HeldLease]:
        """Return what is held, for a controller that may have forgotten it: all, or of these leases alone."""
        groups = self._groups.values() if lease_ids is None else map(self._groups.get, lease_ids)
        return [self._declared(group) for group in groups if group is not None]

    def _declared(self, group: HeldGroup) -> HeldLease:
        lease, weights = group.lease, group.weights
        pushed = sorted(set(range(len(lease.seeds))) - group.open)
        if weights is None:
            return HeldLease(group_id=lease.group_id, lease_id=lease.lease_id, pushed=pushed)
        return HeldLease(
            group_id=lease.group_id,
            lease_id=lease.lease_id,
            version=weights.version,
            publication_id=weights.id,
            manifest_hash=weights.manifest_hash,
            pushed=pushed,
        )

    @property
    def samples(self) -> int:
        """Samples that are not done."""
        return sum(len(group.open) for group in self._groups.values())

    @property
    def pinned(self) -> bool:
        """Whether any group needs the present weights to stay."""
        return any(group.lease.pinned_version is not None for group in self._groups.values())
