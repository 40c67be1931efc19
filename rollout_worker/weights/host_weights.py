"""This replica's share in the host's copy of the weights, brought forward in a thread while generation goes on.

    transport = "store"        weight_store ─▶ host's copy
    transport = "collective"   trainer, and weight_store for what it does not send ─▶ host's copy

The thread is a daemon: a store that hangs cannot keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout_worker.engines.vllm.nccl import nccl_receiver
from rollout_worker.errors import StoreSettingsError
from schema.config import Config
from schema.util.threads import in_daemon
from schema.wire.messages import RegisterReply, Transport
from schema.wire.weights import Publication
from weight_sync.errors import StoreError, WeightError
from weight_sync.host.host_copy import CopiedWeights, HostCopy, whole_bytes
from weight_sync.host.users import copy_directory
from weight_sync.stores import ReadableStore, open_store
from weight_sync.transport import DirectStore

T = TypeVar("T")
log = logging.getLogger(__name__)

PATIENCE = 10.0
"""Seconds for which a file that is missing or wrong is tried again: attribute caches of NFS live 3 to 60 s by
default, longer than this is a broken store."""
CLOSE_S = 5.0
"""Seconds for a fetch that was asked to stop; what it holds then goes with the process."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Weights that are on this host, and how they came."""

    weights: CopiedWeights
    transport: Transport
    detail: str
    """Why the transport is not the one that was asked for; "" where it is."""


class HostWeights:
    """The copy is opened with the first publication, which tells how large it is.

    Raises `StoreSettingsError` when the store is not a place this build knows, or the environment opens none.
    """

    def __init__(self, config: Config, reply: RegisterReply, folder: str = "") -> None:
        """folder: instead of `weight_sync.host_cache`, where the engine runs on several hosts, which all see it."""
        self._folder = folder or config.weight_sync.host_cache
        self._config, self._reply = config.weight_sync, reply
        self._stop = threading.Event()
        try:
            self._store: ReadableStore = open_store(
                reply.weight_store, timeout=config.weight_sync.store_timeout, stop=self._stop
            )
        except StoreError as error:
            raise StoreSettingsError(f"weight_sync.store: {error}") from error
        self._direct: DirectStore | None = None
        if config.weight_sync.transport == "collective":
            self._store = self._direct = DirectStore(
                self._store, config.weight_sync.collective_timeout, nccl_receiver(config)
            )
        self._copy: HostCopy | None = None
        self._running: Future[Any] | None = None

    @property
    def trouble(self) -> str:
        """Return what the store is trying again at this moment; "" when nothing."""
        return self._store.trouble()

    async def prove(self) -> None:
        """Look, before the engine starts, whether the store can be read.

        Raises `StoreSettingsError` at the beginning of a run. Later it is only said: a store that was there may be
        away for a while, and fetching tries again for `weight_sync.store_timeout`.
        """
        try:
            await self._in_thread(lambda: self._store.probe(writing=False))
        except WeightError as error:
            if self._reply.publication is None:
                raise StoreSettingsError(f"weight_sync.store: {error}") from error
            log.error("weights cannot be fetched as things stand: %s", error)

    async def advance(self, publication: Publication) -> Arrival:
        """The weights of a publication or a newer one, proven. One caller at a time. Raises `WeightError`."""
        return await self._in_thread(lambda: self._advance(publication))

    def _advance(self, publication: Publication) -> Arrival:
        if self._direct is not None:
            self._direct.expect(publication)
        if self._copy is None:
            directory = copy_directory(
                self._folder,
                job_id=self._reply.job_id,
                run_dir=self._reply.run_dir,
                n_bytes=whole_bytes(self._store, publication, patience=PATIENCE, stop=self._stop),
            )
            log.info("the host's copy of the weights lies in %s", directory)
            self._copy = HostCopy(directory, self._store, lock_timeout=self._config.store_timeout, stop=self._stop)
        weights = self._copy.advance(publication, patience=PATIENCE)
        if self._direct is None:
            return Arrival(weights, "store", "")
        fallback = self._direct.outcome().fallback
        return Arrival(weights, "collective" if fallback is None else "store", fallback or "")

    async def close(self) -> None:
        """End a fetch under way, and give the share back. After the engine has closed."""
        self._stop.set()
        if self._running is not None:
            _, late = await asyncio.to_thread(wait, [self._running], CLOSE_S)
            if late:
                log.warning("a fetch of weights does not end: it ends with the process")
                return
        if self._copy is not None:
            await asyncio.to_thread(self._copy.close)
            self._copy = None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        running = self._running = in_daemon(work, "weights")
        return await asyncio.wrap_future(running)
