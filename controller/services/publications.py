"""Weight versions between trainer and replicas: published, handed out, reported on.

A replica that names itself when it asks is remembered with what it was handed, in the store: nothing of that chain
is collected before it asks again or is lost.

A *full snapshot* (on the wire: anchor) is requested when a replica cannot read a chain that the newest publication
still has, or when a chain is known to have gaps. The request is stored; the trainer gets it in the answer to its next
publication, attaches a full version to the one after that, and it is met by the first chain that begins later than
all that was published when it arose. A trainer that does not attach one is asked again.
"""

from __future__ import annotations

import asyncio
import logging

from controller.errors import ApiError
from controller.services.trainers.steps import StepService
from controller.state.job import JobState
from controller.state.replicas import Replica
from controller.state.update_reports import is_equal
from schema.wire import messages as m
from schema.wire.messages import ErrorCode, EventKind
from schema.wire.weights import Publication

log = logging.getLogger(__name__)

SHOWN = 64
"""Publications that people are shown."""


class PublicationService:
    """The calls about publications. `steps` knows which trainer may act."""

    def __init__(self, job: JobState, steps: StepService) -> None:
        self._job, self._steps = job, steps

    # ---- trainer ------------------------------------------------------------------------------------------

    async def publish(self, request: m.PublishRequest) -> m.PublishReply:
        """Make a weight version known. Raises `ApiError`.

        The same request again gets the same answer, however late it comes, and changes nothing.
        """
        job = self._job
        self._steps.check(request.replica_id, request.incarnation, request.policy_epoch)
        known = job.publications.by_request(request.request_id)
        if known is not None:
            await job.save()  # the first one may still be on its way to the store
            asked = job.facts.anchor_wanted > 0 and known.id == job.facts.anchor_told
            listed = job.publications.asked(request.policy_epoch)
            return m.PublishReply(publication=known, collectable=listed, anchor=asked)
        publication = job.publications.publish(request, job.progress.timeline, job.progress.committed, job.wall())
        job.updates.publish(request)
        job.published_at = job.clock()
        job.events.add(
            EventKind.PUBLICATION,
            f"version {publication.version} is published ({publication.kind})",
            id=publication.id,
            version=publication.version,
            kind=publication.kind,
            n_bytes=publication.n_bytes,
            timeline=publication.timeline,
        )
        final = job.progress.finished and publication.version == job.progress.committed
        job.validation.published(publication.version, final=final)
        if not job.publications.can_be_fetched(publication.id):
            log.warning("publication %d builds on files that are gone: a full snapshot is requested", publication.id)
            self._want_anchor()
        reply = m.PublishReply(
            publication=publication, collectable=self._collect(), anchor=self._tell_anchor(publication)
        )
        job.wake_all()
        await job.save()
        return reply

    def _collect(self) -> list[int]:
        job = self._job
        held = {job.validation.pinned_publication or 0} - {0}
        held.update(*(replica.publications for replica in job.registry.present("rollout")))
        return job.publications.collect(held)

    def _want_anchor(self) -> None:
        facts, highest = self._job.facts, self._job.publications.highest_id
        if not facts.anchor_wanted:
            facts.anchor_wanted = highest
            self._job.updates.anchors_wanted += 1

    def _tell_anchor(self, publication: Publication) -> bool:
        """Whether the answer to this publication asks for a full version with the next one."""
        facts = self._job.facts
        if not facts.anchor_wanted:
            return False
        if (publication.begins or publication.id) > facts.anchor_wanted:
            facts.anchor_wanted = facts.anchor_told = 0
            return False
        if publication.id == facts.anchor_told + 1:
            return False  # this one has it, and the next one will begin with it
        facts.anchor_told = publication.id
        return True

    # ---- replicas -----------------------------------------------------------------------------------------

    async def latest(
        self, newer_than: int, wait_s: float, replica_id: str = "", incarnation: int = 0
    ) -> Publication | None:
        """The newest publication with an id above `newer_than`, or None when the wait is over.

        What a replica is handed stays until it asks again. Raises `ApiError`, `StoreUnavailable`.
        """
        job, loop = self._job, asyncio.get_running_loop()
        give_up = loop.time() + wait_s
        replica = self._asking(replica_id, incarnation)
        while True:
            job.store.require()
            seen = job.publication_signal.generation
            newest = job.publications.newest
            if newest is not None and newest.id > newer_than:
                if replica is not None:
                    job.registry.check(replica_id, incarnation, "rollout")  # another may have come meanwhile
                    job.registry.hand_out(replica, newest.id)
                await job.save()  # no replica may load what a successor of this controller would not know
                return newest
            left = give_up - loop.time()
            if left <= 0 or job.closing:
                return None
            await job.publication_signal.wait(seen, left)

    def _asking(self, replica_id: str, incarnation: int) -> Replica | None:
        job = self._job
        if not replica_id:
            return None
        replica = job.acting(replica_id, incarnation, "rollout")
        job.registry.asks(replica)
        return replica

    async def report(self, publication_id: int, report: m.UpdateReport) -> None:
        """Take what a replica says of a publication. Raises `ApiError`."""
        job = self._job
        job.acting(report.replica_id, report.incarnation, "rollout")
        publication = job.publications.find(publication_id)
        if publication is None:
            raise ApiError(ErrorCode.NOT_FOUND, f"publication {publication_id} does not exist")
        wanted = job.config.weight_sync.transport
        if job.updates.report(publication, report, wanted, job.wall()):
            self._look_at(publication, report)
        await job.save()

    def _look_at(self, publication: Publication, report: m.UpdateReport) -> None:
        job, who = self._job, f"replica {report.replica_id}"
        if report.status == "unreadable":
            log.warning("%s cannot read publication %d: %s", who, publication.id, report.detail)
            if not job.publications.begins_after(publication.id):
                self._want_anchor()
        if is_equal(publication, report) is False:
            hashes = f"their hash is {report.served_hash}, the trainer's is {publication.content_hash}"
            if report.served_hash in ("", publication.content_hash):
                hashes = "a comparison found other tensors"
            job.facts.last_error = (
                f"{who} serves weights that are not those of version {publication.version}: {hashes}"
            )
            log.error("%s", job.facts.last_error)

    # ---- people -------------------------------------------------------------------------------------------

    def recent(self) -> list[m.PublicationInfo]:
        """The newest publications and what replicas reported of them, oldest first."""
        job = self._job
        return [entry.info(job.updates.of(entry.publication.id)) for entry in job.publications.recent(SHOWN)]
