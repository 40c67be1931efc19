"""Publishing: the weights after a commit, into the store and to the controller's attention.

Gathering a sharded tensor is a collective, so every rank runs through all tensors; rank 0 writes them as they
come, one in memory at a time. The controller answers with the publications that nobody needs any more, and their
files are removed afterwards, off the path that rollout replicas wait on.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from controller import api
from policy_worker.learner import Learner
from policy_worker.model import DTYPES
from policy_worker.session import Session
from schema.config import Config
from schema.wire import messages as m
from schema.wire.weights import Publication
from weight_sync import DirectoryStore, WeightError, collect, hub_tensors, publish, remove

log = logging.getLogger(__name__)

RECORD = "publications.jsonl"
"""Publication id and URI, one line each: a restarted trainer still knows which files belong to which id."""


class Publisher:
    """Rank 0 has a session; the other ranks only take part in the gathering."""

    def __init__(
        self, config: Config, learner: Learner, session: Session | None, reply: m.RegisterReply
    ) -> None:
        self._learner, self._session = learner, session
        self._dtype = DTYPES[config.train.effective_transfer_dtype]
        self._store = DirectoryStore(reply.weight_store)
        self._name = re.sub(r"[^A-Za-z0-9_-]", "-", reply.job_id).lstrip("-_")
        self._record = Path(reply.run_dir) / RECORD
        self._uris = read_record(self._record) if session is not None else {}
        if session is not None:
            self._tidy(reply.publication)

    def _tidy(self, newest: Publication | None) -> None:
        """Remove what a trainer that was killed began to publish and nobody was told of.

        It may have been killed after the controller knew and before the record did: then it is the newest one.
        """
        if newest is not None and newest.id not in self._uris:
            self._remember(newest.id, newest.uri)
        try:
            collect(self._store, self._uris.values(), name=self._name)
        except (WeightError, OSError) as error:
            log.warning("the weight store %s could not be tidied up: %s", self._store, error)

    def publish(self, version: int) -> None:
        """Make the current weights the newest version of the job. A collective.

        Raises:
            WeightError: the store cannot be written.
            Refused, ControllerLost: see `controller.client`.
        """
        tensors = hub_tensors(self._learner.model.lm, dtype=self._dtype)
        if self._session is None:
            for _ in tensors:
                pass
            return
        timeline = self._session.reply.timeline
        stored = publish(self._store, version=version, timeline=timeline, tensors=tensors, name=self._name)
        request = m.PublishRequest(
            **self._session.identity(),
            version=version,
            uri=stored.uri,
            manifest_hash=stored.manifest_hash,
            content_hash=stored.content_hash,
            n_bytes=stored.n_bytes,
            newest_publication=max(self._session.history.newest_publication, max(self._uris, default=0)),
        )
        answer = self._session.call(api.publish(request))
        self._session.history.published(answer)
        self._session.version = version
        self._remember(answer.publication.id, stored.uri)
        self._collect(answer.collectable)

    def _remember(self, publication: int, uri: str) -> None:
        self._uris[publication] = uri
        line = json.dumps({"id": publication, "uri": uri}) + "\n"
        with self._record.open("a+b") as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                line = line if stream.read() == b"\n" else "\n" + line  # after a line that was cut off
            stream.write(line.encode())

    def _collect(self, publications: list[int]) -> None:
        uris = [self._uris.pop(number) for number in publications if number in self._uris]
        try:
            remove(self._store, uris)
        except (WeightError, OSError) as error:  # wasted space, and no reason to end a run
            log.warning("old weight versions could not be removed from %s: %s", self._store, error)


def read_record(path: Path) -> dict[int, str]:
    """Publication id to URI, as far as the file is readable."""
    if not path.exists():
        return {}
    uris: dict[int, str] = {}
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
            uris[int(entry["id"])] = str(entry["uri"])
        except (ValueError, KeyError, TypeError):  # the last line of a process that was killed
            log.warning("%s: a damaged line is passed over: %r", path, line)
    return uris
