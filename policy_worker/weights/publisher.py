"""Publishing: the weights after a commit, into the store and to the controller's attention, while training goes on.

    training     gather + cast + copy │ next step ····· next step │ gather + cast + copy
                       snapshot ──────┘                           └── only when the one before is through
    background         compare, compress, hash, write, commit, announce ─▶ (anchor)

Each rank gathers, copies and writes the tensors that it owns (`weight_sync.publishing.gather`). Training waits for
the snapshot alone: from a GPU what changed, where the GPU has a copy to compare with, else all of it. A version that
falls due while the one before is still on its way is skipped and *owed*, and published as soon as possible: between
steps, and while no batch is ready, so no replica waits in vain even if every step needs new weights.

Memory of a rank next to the model, with T the bytes of all tensors in `train.transfer_dtype`: T / ranks in host
memory for the snapshot, as much again for what was announced last (none of it with `weight_sync.encoding = "full"`);
on the training device the largest unit and one more tensor while gathering; with deltas, on a GPU, T / ranks once
more but at most a 16th of its memory, so that only changes cross (`weight_sync.publishing.device_copy`), and nothing
where engines share it; in the background what one tensor takes encoded, half of it at most, a few encoded blocks of
those that follow, and what the store buffers.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from controller.client import calls as api
from policy_worker.background import Background
from policy_worker.errors import PolicyError, SettingsError
from policy_worker.model.load import load_model
from policy_worker.model.model import DTYPES
from policy_worker.parallel.pipeline_stages import names_here
from policy_worker.replicas.base import Registration
from policy_worker.session import Session
from policy_worker.weights.nccl_sender import open_sender
from policy_worker.weights.publication_record import RECORD, PublicationRecord
from policy_worker.weights.release import PublishingLeader, PublishTarget, Release
from schema.config import Config
from schema.wire import messages as m
from weight_sync import WeightError
from weight_sync.errors import StoreError
from weight_sync.hf_names import hub_tensors
from weight_sync.publishing import writer
from weight_sync.publishing.chain import Chain
from weight_sync.publishing.device_copy import DeviceCopy, no_room
from weight_sync.publishing.pinned_copy import PinnedCopy
from weight_sync.stores import Store, open_store

log = logging.getLogger(__name__)

LOOK = 0.05
"""Seconds between two looks at the background, by all ranks together."""
LAST_WORD = 2.0
"""Seconds that a background that was asked to stop may take."""


class Publisher:
    """All ranks call alike, from the training's thread; `session` on rank 0 only."""

    def __init__(self, registration: Registration) -> None:
        """A collective. Raises `SettingsError` where weights cannot be written."""
        config, reply, trainer, session, shutdown = registration
        self._trainer, self._shutdown, self._session = trainer, shutdown, session
        settings = config.weight_sync
        self._dtype, self._lora = DTYPES[config.train.effective_transfer_dtype], settings.lora
        # Next to engines, memory of a device is worth more than the time that a copy there saves.
        on_device = DeviceCopy() if config.placement.share == "none" else DeviceCopy(no_room)
        self._shadow = PinnedCopy(keeps=settings.encoding == "delta", on_device=on_device)
        self._background = Background("publish")
        self._stop = threading.Event()
        self._store = _open(config, reply, self._stop)
        trainer.group.lead(lambda: prove(self._store, strict=reply.committed_steps == 0))
        self._leader: PublishingLeader | None = None
        name = _job_in_names(reply)
        if session is not None:
            record = PublicationRecord(Path(reply.run_dir) / RECORD, self._store, name)
            sender = open_sender(config, self._store, session.url)
            self._leader = PublishingLeader(
                session, session.another(), Chain(settings.anchor_interval), record, sender
            )
            session.troubles.append(self.trouble)
        # The ranks of the background wait for the one whose store fails, or for the controller.
        patience = max(settings.store_timeout, config.controller.controller_lost_timeout)
        group = trainer.group
        target = PublishTarget(self._store, name, reply.timeline, settings.store_timeout)
        self._release = Release(
            group.sibling(patience), group.sibling(patience), target, self._shadow, shutdown, self._leader
        )
        self.owed = False
        """Whether a version was deferred; the same on all ranks."""

    def publish(self, version: int) -> bool:
        """Begin to publish the current weights; returns as soon as training may change them. A collective.

        Returns False, and the version is owed, while the one before is still under way, and when that was given up
        because this replica leaves.

        Raises `PublishError`, `WeightError`, `PolicyError`, `Refused`, `ControllerLost`: the one before could not be
        published."""
        if not self._free():
            if not self.owed:
                log.warning("version %d is published later: the one before is still on its way", version)
            self.owed = True
            return False
        began = time.monotonic()
        names = names_here(self._trainer.model, lora=self._lora)
        self._shadow.take(self._trainer.group.gathering(names).tensors(self._dtype))
        seconds = time.monotonic() - began
        self.owed = False
        self._background.start(lambda: self._release.publish(version, seconds))
        return True

    def signals(self) -> tuple[float, float, float]:
        """Signal whether publishing has failed on this rank, is under way, and is asked for by replicas."""
        # In this order: what fails in between is seen as failed, never as neither.
        running = self._background.running or self._release.reads_taken
        failed = self._background.failed
        asked = self._session is not None and self._session.anchor_asked
        return float(failed), float(running), float(asked)

    def settle(self, patience: float) -> bool:
        """Wait until everything is published. A collective.

        patience: seconds to wait on once this replica was asked to leave. Returns False if they were not enough, or
        publishing has failed meanwhile.

        Raises: see `publish`."""
        give_up: float | None = None
        while True:
            asked = bool(self._shutdown)
            if asked and give_up is None:
                give_up = time.monotonic() + patience
            late = give_up is not None and time.monotonic() >= give_up
            running = self._background.running or self._release.anchoring
            failed = self._background.failed  # after `running`, as in `signals`
            flags = [float(failed), float(running), float(asked), float(late)]
            fails, runs, leaves, gives_up = self._trainer.group.all_reduce(flags, "max")
            if leaves and (fails or gives_up):
                log.warning("leaving while a version is still being published")
                return False
            if fails:
                self._raise()
            if not runs:
                self._background.wait()
                return True
            time.sleep(LOOK)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the newest version that is announced, on rank 0."""
        return {} if self._leader is None else dict(self._leader.metrics)

    def close(self) -> None:
        """On the way out, whatever the reason: what is still running is given up."""
        self._stop.set()
        try:
            self._background.wait(LAST_WORD)
        except Exception:
            log.exception("publishing has failed")
        if self._leader is not None:
            self._leader.caller.close()
            if self._leader.sender is not None:
                self._leader.sender.close()

    def _free(self) -> bool:
        """Whether the snapshot may be taken on all ranks. Raises what went wrong before.

        A replica that was asked to leave, which is what ends publishing where the store fails, still has to save."""
        flags = [*self.signals(), float(bool(self._shutdown))]
        failed, running, _, leaves = self._trainer.group.all_reduce(flags, "max")
        if failed and not leaves:
            self._raise()
        if failed or running:
            return False
        self._background.wait()
        return True

    def _raise(self) -> None:
        """Publishing has failed on some rank; the others learn of it in the background, and end there."""
        self._background.wait(LAST_WORD)
        raise PolicyError("another rank could not publish: its log says why")

    def trouble(self) -> str:
        """Describe what keeps a version from being published, for people; "": nothing does."""
        trouble = "" if self._leader is None else self._leader.trouble
        return trouble or self._store.trouble()


class NoPublisher:
    """In place of a `Publisher` where nothing is published: another replica leads, or no replica would fetch."""

    owed = False
    metrics: Mapping[str, float] = MappingProxyType({})

    def publish(self, version: int) -> bool:
        return False

    def signals(self) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0

    def settle(self, patience: float) -> bool:
        return True

    def close(self) -> None:
        pass


def _open(config: Config, reply: m.RegisterReply, stop: threading.Event) -> Store:
    try:
        return open_store(reply.weight_store, timeout=config.weight_sync.store_timeout, stop=stop)
    except StoreError as error:
        raise SettingsError(f"weight_sync.store: {error}") from error


def _job_in_names(reply: m.RegisterReply) -> str:
    """Return the job as names of versions have it."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", reply.job_id).lstrip("-_")


def prove(store: Store, strict: bool) -> None:
    """Look, before training, whether the store takes what will come.

    strict: raise; else say so and go on, since a run that has trained for a day must not end because the store is
    away when it is restarted: publishing tries again for `weight_sync.store_timeout`.

    Raises `SettingsError`: naming key and remedy."""
    try:
        store.probe(writing=True)
    except WeightError as error:
        if strict:
            raise SettingsError(f"weight_sync.store: {error}") from error
        log.error("weights will not be published as things stand: %s", error)


def publish_once(config: Config, session: Session) -> str:
    """Publish a model that nobody trains as version 0, once, for a job that only validates it.

    One process reads it into the host's memory, in the type in which it is published, and needs no GPU. Its files
    stay in the store, so that it may leave at once: the reason to do so is returned. Registered again, by a start
    that goes on, it finds the publication there and has nothing to do.

    Raises `SettingsError`: the model or the store cannot be used; `WeightError`, `Refused`, `ControllerLost`."""
    reply = session.reply
    if reply.publication is not None:
        return "finished"
    session.say("reading the model")
    store = _open(config, reply, threading.Event())
    prove(store, strict=True)
    began, dtype = time.monotonic(), config.train.effective_transfer_dtype
    parallelism = type(config.policy.parallelism)()
    model = load_model(
        config.model_copy(
            update={
                "train": config.train.model_copy(update={"master_dtype": dtype}),
                "policy": config.policy.model_copy(update={"parallelism": parallelism}),
            }
        )
    ).read_weights(torch.device("cpu"))
    read = time.monotonic()
    session.say("publishing the model")
    name = _job_in_names(reply)
    tensors = hub_tensors(model.lm, dtype=DTYPES[dtype])
    published = writer.publish(store, version=0, timeline=reply.timeline, tensors=tensors, name=name)
    request = m.PublishRequest(
        **session.identity(),
        version=0,
        uri=published.uri,
        manifest_hash=published.manifest_hash,
        content_hash=published.content_hash,
        n_bytes=published.n_bytes,
        kind=published.kind,
        full_bytes=published.n_bytes,
        metrics={"write": time.monotonic() - read},
        newest_publication=session.history.newest_publication,
    )
    session.history.published(session.call(api.publish(request)))
    log.info(
        "the model is published: %s bytes of %s, read in %.1f s, written in %.1f s",
        f"{published.n_bytes:,}", dtype, read - began, time.monotonic() - read,
    )  # fmt: skip
    return "finished"
