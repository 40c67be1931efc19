"""Published weight versions: ids that only rise, and which of their files may go.

An id is never used for other content, also where the store has forgotten it: a process that has seen an id says so
(`heard`), and the next one is higher than all of them. What was forgotten is declared again by the trainer that
published it, under the same ids (`declare`); a replica names its publication by id and hash (`valid`).

A publication is *valid* while its weights lie on the current timeline. A rewind to c committed steps invalidates
those of later versions: what they contain is no longer part of the run. Samples are only leased to engines that
hold a valid publication.

The *chain* of a publication is what a replica without weights reads to come to it: the publications of its
timeline from the one that it begins with (`Publication.begins`) up to itself.

    begins = 3:   3 (full) ─ 4 ─ 5 ─ 6 ─▶ 7        `newest` is the newest valid one whose whole chain is there

Invariant: the chain of whatever a replica was given, and has not come back from, stays; so do the chains of what
replicas hold, of what validation pins, and of the newest `keep`. Others are *collectable*: each answer to the
publisher lists them until the same one publishes again, which shows that it got the list. With chains of at most L
publications, of which others hold, fetch, pin or were handed M, at most (keep + 1 + M) · L are kept; in a run
without rewinds whose replicas keep up, fewer than keep + L.

Of a long run the oldest are forgotten when all before them are collected and `REMEMBERED` came after: work and memory
do not grow with the number of versions. Their ids are still known to be of publications that are gone.

Numbers: a trainer knows what it published under the ids of the answers. Where `declare` had to give another id, the
entry keeps the trainer's as its `number`: `begins` and the list of collectables are in the trainer's numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any, Literal

from controller.errors import ApiError
from schema.wire.messages import ErrorCode, PublicationInfo, PublishRequest, ReplicaUpdate
from schema.wire.weights import Publication

FileState = Literal["kept", "listed", "collected"]

REMEMBERED = 1024
"""Newest publications that are listed to people, whatever became of their files."""
MAX_LEAP = 1_000_000
"""An id farther above all that are known is a mistake, and not believed."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a publication for its trainer. at: Unix time; seconds: by stage; 0 or empty where not reported."""

    at: float = 0.0
    full_bytes: int = 0
    changed: int = 0
    elements: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def density(self) -> float | None:
        """Elements that changed, of all."""
        return self.changed / self.elements if self.elements else None


@dataclass(slots=True)
class PublicationEntry:
    publication: Publication
    request_id: str
    valid: bool = True
    files: FileState = "kept"
    number: int = 0
    """Its id as its trainer knows it."""
    asked: int = 0
    """The policy epoch of the trainer that was asked to remove its files."""
    cost: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        self.number = self.number or self.publication.id

    @property
    def begins(self) -> int:
        """Number of the publication that its chain begins with."""
        return self.publication.begins or self.number

    @property
    def ratio(self) -> float | None:
        """Bytes stored, of those of all tensors."""
        return self.publication.n_bytes / self.cost.full_bytes if self.cost.full_bytes else None

    def to_record(self) -> dict[str, Any]:
        return {
            "publication": self.publication.model_dump(),
            "request_id": self.request_id,
            "valid": self.valid,
            "files": self.files,
            "number": self.number,
            "told": self.asked,
            "cost": asdict(self.cost),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PublicationEntry:
        return cls(
            Publication.model_validate(record["publication"]),
            record["request_id"],
            record["valid"],
            record["files"],
            record.get("number", 0),
            record.get("told", 0),
            Cost(**record.get("cost", {})),
        )

    def info(self, updates: Sequence[ReplicaUpdate]) -> PublicationInfo:
        """For people; an offer is a secret of those who may fetch."""
        return PublicationInfo(
            publication=self.publication.model_copy(update={"offer": None}),
            at=self.cost.at,
            valid=self.valid,
            files=self.files,
            full_bytes=self.cost.full_bytes,
            ratio=self.ratio,
            density=self.cost.density,
            seconds=self.cost.seconds,
            updates=list(updates),
        )


class Publications:
    """See the module's docstring."""

    def __init__(
        self, keep: int, records: Iterable[Mapping[str, Any]] = (), highest_id: int = 0, remembered: int = REMEMBERED
    ) -> None:
        self._keep, self._remembered = keep, remembered
        self._entries: dict[int, PublicationEntry] = {}
        self._numbers: dict[int, list[tuple[int, int]]] = {}
        """By timeline: (number, id) of its publications, in order."""
        self._dirty: dict[int, PublicationEntry] = {}
        self._forgotten: list[int] = []
        self._newest: PublicationEntry | None = None
        self._sought = False
        self._policy_epoch = 0
        self.highest_id = 0
        for entry in sorted(map(PublicationEntry.from_record, records), key=lambda entry: entry.publication.id):
            self._mark(entry)
        self._dirty.clear()
        self._known_from = next(iter(self._entries), 1)
        """Publications with lower ids are forgotten."""
        self.heard(highest_id)

    def heard(self, publication_id: int) -> None:
        """A process knows this id: it is not handed out again."""
        if publication_id <= self.highest_id + MAX_LEAP:
            self.highest_id = max(self.highest_id, publication_id)

    # ---- what there is ------------------------------------------------------------------------------------

    @property
    def newest(self) -> Publication | None:
        """The newest valid publication that can be fetched (after a rewind files may be gone)."""
        return None if (entry := self.newest_entry) is None else entry.publication

    @property
    def newest_entry(self) -> PublicationEntry | None:
        """The entry of `newest`."""
        if not self._sought:
            self._newest = next(self._fetchable(), None)
            self._sought = True
        return self._newest

    @property
    def newest_id(self) -> int:
        """Id of `newest`; 0: none."""
        newest = self.newest
        return 0 if newest is None else newest.id

    def knows(self, publication_id: int) -> bool:
        """Whether this id is of a publication that is there or was collected (0: of none)."""
        return publication_id < self._known_from or publication_id in self._entries

    def valid(self, publication_id: int, manifest_hash: str = "") -> Publication | None:
        """The publication with this id (and hash) if its weights are part of the current timeline."""
        entry = self._entries.get(publication_id)
        if entry is None or not entry.valid:
            return None
        return entry.publication if manifest_hash in ("", entry.publication.manifest_hash) else None

    def find(self, publication_id: int) -> Publication | None:
        """The publication with this id, of whatever timeline."""
        entry = self._entries.get(publication_id)
        return None if entry is None else entry.publication

    def recent(self, n: int) -> list[PublicationEntry]:
        """The `n` newest entries, oldest first."""
        return list(islice(reversed(self._entries.values()), n))[::-1]

    def by_request(self, request_id: str) -> Publication | None:
        """Return the publication of this request."""
        entries = (entry for entry in reversed(self._entries.values()) if entry.request_id)
        return next((entry.publication for entry in entries if entry.request_id == request_id), None)

    def asked(self, policy_epoch: int) -> list[int]:
        """Numbers of those that the trainer of this epoch was asked to remove, and has not shown that it knows."""
        return list(dict.fromkeys(entry.number for entry in self._listed() if entry.asked == policy_epoch))

    def can_be_fetched(self, publication_id: int) -> bool:
        """Whether the whole chain of a publication is there."""
        entry = self._entries.get(publication_id)
        return entry is not None and self._is_whole(entry)

    def begins_after(self, publication_id: int) -> bool:
        """Whether the chain of the newest publication begins later than this one."""
        entry, other = self.newest_entry, self._entries.get(publication_id)
        return entry is not None and entry.begins > (publication_id if other is None else other.number)

    def _fetchable(self) -> Iterator[PublicationEntry]:
        """Valid publications whose chain is there, newest first."""
        return (entry for entry in reversed(self._entries.values()) if entry.valid and self._is_whole(entry))

    def _is_whole(self, entry: PublicationEntry) -> bool:
        if entry.files != "kept":
            return False
        members = list(self._chain(entry))
        if entry.begins < self._known_from and all(member.number != entry.begins for member in members):
            return False
        return all(member.files == "kept" for member in members)

    def _numbered(self, number: int, timeline: int) -> PublicationEntry | None:
        """Return the entry that a trainer of this timeline has for a version: its declaration before another's id."""
        numbers = self._numbers.get(timeline, [])
        last = bisect_left(numbers, (number + 1, 0)) - 1
        return self._entries[numbers[last][1]] if last >= 0 and numbers[last][0] == number else None

    def _chain(self, entry: PublicationEntry) -> Iterator[PublicationEntry]:
        """The publications of its chain that are known, itself included."""
        if entry.begins == entry.number:
            return iter((entry,))
        numbers = self._numbers[entry.publication.timeline]
        first, last = bisect_left(numbers, (entry.begins, 0)), bisect_left(numbers, (entry.number, 0))
        members = dict(numbers[first:last])  # of two with one number the later one: it was declared
        return chain((self._entries[member] for member in members.values()), (entry,))

    # ---- what happens -------------------------------------------------------------------------------------

    def publish(self, request: PublishRequest, timeline: int, committed: int, now: float = 0.0) -> Publication:
        """Add a publication; the same request again gets the same one. now: Unix time.

        Raises:
            ApiError: a version of steps that are not committed, or older than the newest one.
        """
        known = self.by_request(request.request_id)
        if known is not None:
            return known
        if request.version > committed:
            raise ApiError(
                ErrorCode.FUTURE_VERSION,
                f"version {request.version} cannot be published: only {committed} steps are committed",
            )
        newest = self.newest
        if newest is not None and newest.timeline == timeline and request.version < newest.version:
            raise ApiError(
                ErrorCode.CONFLICT, f"version {request.version} cannot be published after version {newest.version}"
            )
        self._policy_epoch = request.policy_epoch
        for entry in self._entries.values():
            if entry.files == "listed" and entry.asked == self._policy_epoch:
                self._mark(entry, files="collected")
        self.heard(request.newest_publication)
        publication = Publication(
            id=self.highest_id + 1,
            version=request.version,
            timeline=timeline,
            uri=request.uri,
            manifest_hash=request.manifest_hash,
            content_hash=request.content_hash,
            n_bytes=request.n_bytes,
            kind=request.kind,
            begins=request.begins or 0,
            offer=request.offer,
        )
        cost = Cost(now, request.full_bytes, request.changed, request.elements, dict(request.metrics))
        self._mark(PublicationEntry(publication, request.request_id, cost=cost))
        self._forget()
        return publication

    def declare(self, declared: Sequence[Publication], timeline: int) -> None:
        """Take over what a trainer published in this timeline, oldest first, as far as its files are still there.

        Publications forgotten are known again, under their ids; if another has got its id meanwhile, under a new one.
        Files of those not declared, but of its time, are gone.
        """
        of_timeline = [publication for publication in declared if publication.timeline == timeline]
        hashes = {publication.manifest_hash for publication in of_timeline}
        for publication in of_timeline:
            number = publication.id
            known = self._numbered(number, timeline)
            if known is not None and known.publication.manifest_hash == publication.manifest_hash:
                self._mark(known, valid=True)
                continue
            if number in self._entries or number > self.highest_id + MAX_LEAP:
                publication = publication.model_copy(update={"id": self.highest_id + 1})  # noqa: PLW2901
            self._mark(PublicationEntry(publication, request_id="", number=number))
        self._entries = dict(sorted(self._entries.items()))
        first = min((publication.id for publication in of_timeline), default=self.highest_id + 1)
        for entry in self._entries.values():
            publication = entry.publication
            of_its_time = publication.timeline == timeline and publication.id >= first
            if of_its_time and publication.manifest_hash not in hashes and entry.files != "collected":
                self._mark(entry, files="collected")

    def collect(self, held: Collection[int]) -> list[int]:
        """Numbers of those whose files may go. held: ids that replicas hold, fetch or were handed, or pinned."""
        ids = set(held)
        wanted = [entry for entry in self._entries.values() if entry.publication.id in ids or entry.number in ids]
        wanted += islice(self._fetchable(), self._keep)
        latest = next((entry for entry in reversed(self._entries.values()) if entry.valid), None)
        wanted += [] if latest is None else [latest]  # the next one may begin with it
        needed = {member.publication.id for entry in wanted for member in self._chain(entry)}
        for entry in self._entries.values():
            if entry.files == "kept" and entry.publication.id not in needed:
                self._mark(entry, files="listed")
        listed = self._listed()
        for entry in listed:
            if entry.asked != self._policy_epoch:
                entry.asked = self._policy_epoch
                self._mark(entry)
        return list(dict.fromkeys(entry.number for entry in listed))

    def _listed(self) -> list[PublicationEntry]:
        """Return the publications whose files may be deleted, unless another one of their number stays."""
        kept = {entry.number for entry in self._entries.values() if entry.files == "kept"}
        return [e for e in self._entries.values() if e.files == "listed" and e.number not in kept]

    def rewind(self, step: int) -> None:
        """The run goes back to `step` committed steps: versions after it are no longer part of it."""
        for entry in self._entries.values():
            if entry.valid and entry.publication.version > step:
                self._mark(entry, valid=False)

    def take_changes(self) -> list[PublicationEntry]:
        changed, self._dirty = list(self._dirty.values()), {}
        return changed

    def take_forgotten(self) -> list[int]:
        """Ids of those whose rows may go."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def _forget(self) -> None:
        for entry in list(islice(self._entries.values(), max(0, len(self._entries) - self._remembered))):
            if entry.files != "collected":
                break
            publication = entry.publication
            del self._entries[publication.id]
            self._dirty.pop(publication.id, None)
            self._numbers[publication.timeline].remove((entry.number, publication.id))
            self._forgotten.append(publication.id)
            self._known_from = max(self._known_from, publication.id + 1)

    def _mark(self, entry: PublicationEntry, *, valid: bool | None = None, files: FileState | None = None) -> None:
        publication = entry.publication
        entry.valid = entry.valid if valid is None else valid
        entry.files = entry.files if files is None else files
        if publication.id not in self._entries:
            insort(self._numbers.setdefault(publication.timeline, []), (entry.number, publication.id))
        self._entries[publication.id] = self._dirty[publication.id] = entry
        self.highest_id = max(self.highest_id, publication.id)
        self._sought = False
