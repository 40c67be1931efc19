"""Published weight versions: ids that only rise, and which of their files may go.

An id is never used for other content, also where the store has forgotten it: whoever has heard of an id says so
(`heard`), and the next one is higher than all of them. What was forgotten is declared again by the trainer that
published it, under the same ids (`declare`); a replica names its publication by id and hash (`valid`).

A publication is *valid* while its weights lie on the current timeline. A rewind to c committed steps invalidates
those of later versions: what they contain is no longer part of the run. Samples are only leased to engines that
hold a valid publication.

Kept are the newest `keep` valid ones and all that somebody still holds or is pinned to. Others are
*collectable*: each answer to the publisher lists them until it publishes again, which shows that it got the list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schema.wire.messages import ErrorCode, PublishRequest
from schema.wire.weights import Publication

FileState = Literal["kept", "listed", "collected"]

MAX_LEAP = 1_000_000
"""What is told of ids far above all that are known is a mistake, and not believed."""


class PublicationError(Exception):
    """A publication that contradicts those before it."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


@dataclass(slots=True)
class Entry:
    publication: Publication
    request_id: str
    valid: bool = True
    files: FileState = "kept"

    def to_record(self) -> dict[str, Any]:
        return {
            "publication": self.publication.model_dump(),
            "request_id": self.request_id,
            "valid": self.valid,
            "files": self.files,
        }


class Publications:
    """See the module's docstring."""

    def __init__(self, keep: int, records: Iterable[Mapping[str, Any]] = (), highest_id: int = 0) -> None:
        self._keep = keep
        entries = (
            Entry(
                Publication.model_validate(record["publication"]),
                record["request_id"],
                record["valid"],
                record["files"],
            )
            for record in records
        )
        self._entries = {
            entry.publication.id: entry for entry in sorted(entries, key=lambda entry: entry.publication.id)
        }
        self._dirty: dict[int, Entry] = {}
        self.highest_id = max(self._entries, default=0)
        self.heard(highest_id)

    def heard(self, publication_id: int) -> None:
        """Somebody knows this id: it is not handed out again."""
        if publication_id <= self.highest_id + MAX_LEAP:
            self.highest_id = max(self.highest_id, publication_id)

    @property
    def newest(self) -> Publication | None:
        """The newest valid publication whose files are there (after a rewind they may be gone)."""
        for entry in reversed(self._entries.values()):
            if entry.valid and entry.files == "kept":
                return entry.publication
        return None

    @property
    def newest_id(self) -> int:
        """Id of `newest`; 0: none."""
        newest = self.newest
        return 0 if newest is None else newest.id

    def knows(self, publication_id: int) -> bool:
        """Whether this id is of a publication that is not forgotten (0: of none)."""
        return publication_id <= 0 or publication_id in self._entries

    def valid(self, publication_id: int, manifest_hash: str = "") -> Publication | None:
        """The publication with this id (and hash) if its weights are part of the current timeline."""
        entry = self._entries.get(publication_id)
        if entry is None or not entry.valid:
            return None
        return entry.publication if manifest_hash in ("", entry.publication.manifest_hash) else None

    def publish(self, request: PublishRequest, timeline: int, committed: int) -> Publication:
        """Add a publication; the same request again gets the same one.

        Raises:
            PublicationError: a version of steps that are not committed, or older than the newest one.
        """
        for entry in reversed(self._entries.values()):
            if entry.request_id and entry.request_id == request.request_id:
                return entry.publication
        if request.version > committed:
            raise PublicationError(
                ErrorCode.FUTURE_VERSION,
                f"version {request.version} cannot be published: only {committed} steps are committed",
            )
        newest = self.newest
        if newest is not None and newest.timeline == timeline and request.version < newest.version:
            raise PublicationError(
                ErrorCode.CONFLICT,
                f"version {request.version} cannot be published after version {newest.version}",
            )
        for entry in self._entries.values():
            if entry.files == "listed":
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
        )
        self._mark(Entry(publication, request.request_id))
        return publication

    def declare(self, declared: Sequence[Publication], timeline: int) -> None:
        """What a trainer has published in this timeline, oldest first, as far as its files are still there.

        Publications forgotten are known again, under their ids; if another has got its id meanwhile, under a new one.
        Files of those not declared, but of its time, are gone.
        """
        mine = [publication for publication in declared if publication.timeline == timeline]
        for publication in mine:
            known = self._entries.get(publication.id)
            if known is not None and known.publication.manifest_hash == publication.manifest_hash:
                self._mark(known, valid=True)
                continue
            if known is not None or publication.id > self.highest_id + MAX_LEAP:
                publication = publication.model_copy(update={"id": self.highest_id + 1})  # noqa: PLW2901
            self._mark(Entry(publication, request_id=""))
        self._entries = dict(sorted(self._entries.items()))
        hashes = {publication.manifest_hash for publication in mine}
        first = min((publication.id for publication in mine), default=self.highest_id + 1)
        for entry in self._entries.values():
            publication = entry.publication
            of_its_time = publication.timeline == timeline and publication.id >= first
            if of_its_time and publication.manifest_hash not in hashes and entry.files != "collected":
                self._mark(entry, files="collected")

    def collect(self, held_ids: Collection[int], held_versions: Collection[int]) -> list[int]:
        """Ids whose files may go, given what live replicas and validation rounds hold."""
        valid = [entry.publication.id for entry in self._entries.values() if entry.valid]
        kept = set(valid[-self._keep :]) | set(held_ids)
        for entry in self._entries.values():
            publication = entry.publication
            if (
                entry.files == "kept"
                and publication.id not in kept
                and publication.version not in held_versions
            ):
                self._mark(entry, files="listed")
        return [entry.publication.id for entry in self._entries.values() if entry.files == "listed"]

    def rewind(self, step: int) -> None:
        """The run goes back to `step` committed steps: versions after it are no longer part of it."""
        for entry in self._entries.values():
            if entry.valid and entry.publication.version > step:
                self._mark(entry, valid=False)

    def take_changes(self) -> list[Entry]:
        changed, self._dirty = list(self._dirty.values()), {}
        return changed

    def _mark(self, entry: Entry, *, valid: bool | None = None, files: FileState | None = None) -> None:
        entry.valid = entry.valid if valid is None else valid
        entry.files = entry.files if files is None else files
        self._entries[entry.publication.id] = self._dirty[entry.publication.id] = entry
        self.highest_id = max(self.highest_id, entry.publication.id)
