"""The part of publishing that runs in the background, on every rank: from a snapshot to an announced version.

    choose the form ─▶ write, all ranks ─▶ announce, rank 0 ─▶ buffers change places ─▶ an anchor, if one is due

A store that fails is tried again for `weight_sync.store_timeout` with the same snapshot. Anchors have a thread and a
process group of their own, so that the next version need not wait for one; one that fails is due again.

Invariant: the shadow moves, on all ranks, if and only if the controller has answered.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from controller.client import calls as api
from policy_worker.background import Background
from policy_worker.errors import PublishError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import ShutdownRequest
from policy_worker.session import Caller, Session
from policy_worker.weights.collective_write import Stored, StoreTroubleError, store_version
from policy_worker.weights.publication_record import PublicationRecord
from schema.util.backoff import Backoff
from schema.util.host import count_cores
from schema.wire import messages as m
from schema.wire.weights import TensorEntry, WeightManifest
from weight_sync.errors import StoppedError
from weight_sync.layout import content_hash, torch_dtype
from weight_sync.publishing.chain import Chain
from weight_sync.publishing.pinned_copy import PinnedCopy, Tensors
from weight_sync.publishing.writer import (
    DELTA_SHARE,
    DenseError,
    WrittenPart,
    after,
    assemble,
    changed_elements,
    write_delta,
    write_full,
)
from weight_sync.stores import Stage, Store, version_name
from weight_sync.transport import Sender

log = logging.getLogger(__name__)

BACKOFF = Backoff(0.5, 15.0)
"""Seconds between attempts at a store that fails."""
MOST_THREADS = 8
"""Threads that encode: few cores saturate what a store takes, and the others feed the training."""


def encoding_threads(cores: int, ranks_here: int) -> int:
    """Return how many threads of a rank encode. cores: of its machine, which `ranks_here` ranks share."""
    return max(1, min(MOST_THREADS, cores // ranks_here))


@dataclass(frozen=True)
class PublishTarget:
    """Where versions go. name: of the job, in front of each version's. timeline: of the job."""

    store: Store
    name: str
    timeline: int
    timeout: float


class PublishingLeader:
    """The knowledge that rank 0 alone has: the chain, the newest version's table, the record, the controller, and who
    hands versions out directly, if anybody."""

    def __init__(
        self, session: Session, caller: Caller, chain: Chain, record: PublicationRecord, sender: Sender | None
    ) -> None:
        self.session, self.caller, self.chain, self.record = session, caller, chain, record
        self.sender = sender
        self.table: dict[str, TensorEntry] | None = None
        self.metrics: dict[str, float] = {}
        """Metrics of the newest announced version, as the metrics of a step have them."""
        self.trouble = ""


class Release:
    """All ranks call alike, from the background's thread. `leader` on rank 0 only.

    group: of the background alone. anchors: likewise, of the anchors'."""

    def __init__(
        self,
        group: RankGroup,
        anchors: RankGroup,
        target: PublishTarget,
        shadow: PinnedCopy,
        shutdown: ShutdownRequest,
        leader: PublishingLeader | None,
    ) -> None:
        self._group, self._anchor_group = group, anchors
        self._target, self._shadow, self._shutdown, self._leader = target, shadow, shutdown, leader
        self._prefix = f"r{group.rank:03d}-"
        self._anchoring = Background("anchor")
        self._anchored: Tensors | None = None
        self._begins: int | None = None
        self._full_asked = False
        self._collecting = Background("collect")
        self._tidied = False
        threads = encoding_threads(count_cores(), group.ranks_here)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode") if threads > 1 else None

    # ---- for the training's thread --------------------------------------------------------------------------

    @property
    def reads_taken(self) -> bool:
        """Whether an anchor is being written from the buffers that the next snapshot goes to."""
        return self._anchoring.running and self._anchored is self._shadow.taken

    @property
    def anchoring(self) -> bool:
        """Whether an anchor is being written."""
        return self._anchoring.running

    # ---- one version ----------------------------------------------------------------------------------------

    def publish(self, version: int, gathering: float) -> None:
        """Publish the snapshot that the shadow has taken. gathering: seconds that it took.

        Raises `PublishError`: the store failed for too long; `WeightError`, `PolicyError`, `Refused`,
        `ControllerLost`: it cannot be published at all."""
        leader = self._leader
        if leader is not None and not self._tidied:
            leader.record.tidy(leader.session.reply.publication)
            self._tidied = True
        if self._group.lead(lambda: leader is not None and leader.chain.waits_for_anchor):
            self._anchoring.wait(self._target.timeout)
        copied = sum(self._group.gather(self._shadow.copied_bytes))
        stored = self._with_patience(version)
        began = time.monotonic()
        due = self._group.lead(lambda: self._announce(version, stored, gathering, copied))
        self._shadow.announce()
        if leader is not None:
            leader.metrics["publish_announce_seconds"] = time.monotonic() - began
        if due and not self._group.any(self._anchoring.running):
            self._start_anchor(version, due)
        if leader is not None:
            self._collect(leader.record)

    def _with_patience(self, version: int) -> Stored | None:
        give_up = time.monotonic() + self._target.timeout
        attempt = 0
        while True:
            attempt += 1
            try:
                stored = self._store(version)
                self._say("")
                return stored
            except StoreTroubleError as error:
                trouble = f"version {version} cannot be written to {self._target.store!r}: {error}"
                verdict = self._group.lead(lambda: self._verdict(give_up))
                if verdict == "late":
                    raise PublishError(
                        f"{trouble}. This was tried for {self._target.timeout:.0f} s (weight_sync.store_timeout); "
                        f"mend the store, then resume"
                    ) from error
                if verdict == "leave":
                    raise StoppedError(trouble) from error
                pause = BACKOFF.after(attempt)
                log.warning("%s; trying again in %.1f s", trouble, pause)
                self._say(trouble)
            self._shutdown.wait(pause)

    def _verdict(self, give_up: float) -> str:
        if self._shutdown:
            return "leave"
        return "late" if time.monotonic() >= give_up else ""

    def _say(self, trouble: str) -> None:
        if self._leader is not None:
            self._leader.trouble = trouble

    def _store(self, version: int) -> Stored | None:
        """Write the snapshot once: as a delta where there is a base, and it is not dense."""
        target, full = self._group.lead(lambda: self._choose(version))
        if not full:
            bytes_here = sum(tensor.nbytes for tensor in self._shadow.taken.values())
            most = int(DELTA_SHARE * sum(self._group.gather(bytes_here)))
            try:
                return self._store_delta(version, target, most)
            except DenseError as error:
                log.info("version %d is published full: %s", version, error)
                if self._leader is not None:
                    self._leader.chain.dense()
                target = self._group.lead(lambda: self._new_name(version))
        return store_version(
            self._group,
            self._target.store,
            target,
            lambda stage: self._write(lambda: write_full(stage, self._shadow.taken.items(), self._prefix)),
            lambda parts: assemble(parts, version=version, timeline=self._target.timeline),
        )

    def _choose(self, version: int) -> tuple[str, bool]:
        """Rank 0: a name, and whether the version is full."""
        assert self._leader is not None
        asked = self._leader.session.take_anchor_request()
        self._full_asked = self._full_asked or asked
        full = self._shadow.announced is None or self._full_asked or self._leader.chain.next_is_full
        return self._new_name(version), full

    def _new_name(self, version: int) -> str:
        return version_name(self._target.timeline, version, self._target.name)

    def _store_delta(self, version: int, target: str, most: int) -> Stored | None:
        def write(stage: Stage) -> WrittenPart:
            pairs, positions = self._shadow.pairs(), self._shadow.positions
            return write_delta(stage, pairs, self._prefix, positions=positions, most_bytes=most, pool=self._pool)

        def make(parts: Sequence[WrittenPart]) -> WeightManifest:
            assert self._leader is not None
            n_bytes = sum(part.data_bytes for part in parts)
            if n_bytes > most:
                raise DenseError(f"the changes take {n_bytes} bytes, more than {most}")
            links, self._begins = self._leader.chain.named()
            return assemble(
                parts, version=version, timeline=self._target.timeline, base=self._leader.table, chain=links
            )

        return store_version(
            self._group, self._target.store, target, lambda stage: self._write(lambda: write(stage)), make
        )

    def _write(self, write: Callable[[], WrittenPart]) -> WrittenPart:
        """Write this rank's part of the snapshot, which is made whole before, as a part of encoding."""
        began = time.monotonic()
        self._shadow.complete(self._pool)
        seconds = time.monotonic() - began
        part = write()
        part.seconds["encode"] += seconds
        return part

    # ---- rank 0 -----------------------------------------------------------------------------------------------

    def _announce(self, version: int, stored: Stored | None, gathering: float, copied: int) -> int:
        """Announce it to the controller; the publication that should get an anchor now, 0 if none."""
        leader = self._leader
        assert leader is not None
        assert stored is not None
        published, delta = stored.published, stored.published.kind == "delta"
        table = after(leader.table if delta else None, stored.manifest.tensors)
        elements, full_bytes = _size(table)
        changed = changed_elements(stored.manifest.tensors.values())
        seconds = {"gather": gathering, **stored.seconds}
        history = leader.session.history
        request = m.PublishRequest(
            **leader.session.identity(),
            version=version,
            uri=published.uri,
            manifest_hash=published.manifest_hash,
            content_hash=published.content_hash,
            n_bytes=published.n_bytes,
            kind=published.kind,
            begins=self._begins if delta else None,
            full_bytes=full_bytes,
            changed=changed if delta else 0,
            elements=elements if delta else 0,
            metrics=seconds,
            offer=None if leader.sender is None else leader.sender.offer(published.piece),
            newest_publication=max(history.newest_publication, leader.record.newest),
        )
        answer = leader.caller.call(api.publish(request))
        number = answer.publication.id
        history.published(answer)
        leader.session.version = version
        leader.record.remember(number, published.uri)
        leader.table = table
        leader.chain.published(number, version, published)
        leader.chain.collected(answer.collectable)
        if answer.anchor:
            leader.chain.asked()
        self._full_asked = False
        leader.session.take_anchor_request()  # of before this publication: who still waits asks again
        leader.record.release(answer.collectable)
        leader.metrics = {
            **{f"publish_{stage}_seconds": value for stage, value in seconds.items()},
            "publish_bytes": float(published.n_bytes),
            "publish_copied_bytes": float(copied),
            "publish_ratio": published.n_bytes / max(1, full_bytes),
        }
        if delta:
            leader.metrics["publish_density"] = changed / max(1, elements)
        if leader.sender is not None:  # totals, since nobody waits for what is being sent
            served = leader.sender.served
            leader.metrics["publish_sent_files"] = float(served.files)
            leader.metrics["publish_sent_bytes"] = float(served.n_bytes)
            leader.metrics["publish_sends_failed"] = float(served.failed)
        return number if leader.chain.anchor_due else 0

    def _collect(self, record: PublicationRecord) -> None:
        """Remove files in the background; what comes while this is under way goes with the next version's."""
        if not self._collecting.running:
            self._collecting.wait()
            self._collecting.start(record.remove)

    # ---- anchors ----------------------------------------------------------------------------------------------

    def _start_anchor(self, version: int, publication: int) -> None:
        self._anchoring.wait(0)
        tensors = self._anchored = self._shadow.announced
        assert tensors is not None
        expected = None if self._leader is None else content_hash(self._leader.table or {})
        self._anchoring.start(lambda: self._anchor(version, publication, tensors, expected))

    def _anchor(self, version: int, publication: int, tensors: Tensors, expected: str | None) -> None:
        def make(parts: Sequence[WrittenPart]) -> WeightManifest:
            manifest = assemble(parts, version=version, timeline=self._target.timeline)
            assert manifest.content_hash == expected, "the shadow is not what was announced"
            return manifest

        group, leader = self._anchor_group, self._leader
        try:
            target = group.lead(lambda: self._new_name(version))
            stored = store_version(
                group,
                self._target.store,
                target,
                lambda stage: write_full(stage, tensors.items(), self._prefix),
                make,
            )
        except Exception as error:  # whatever it is: the version is announced, and a full form is due again
            what = f"{type(error).__name__}: {error}"
            log.warning("the full form of version %d could not be written: %s", version, what)
            if leader is not None:
                leader.chain.anchor_failed()
            return
        if leader is not None and stored is not None:
            leader.record.attach(publication, stored.published.uri)
            leader.chain.anchored(publication, stored.published.piece)


def _size(table: Mapping[str, TensorEntry]) -> tuple[int, int]:
    """Elements and bytes of all tensors."""
    counts = [(math.prod(entry.shape), torch_dtype(entry.dtype, name).itemsize) for name, entry in table.items()]
    return sum(count for count, _ in counts), sum(count * size for count, size in counts)
