"""A rollout replica played by the test: it leases, invents answers, and pushes; weights it fetches and verifies."""

from __future__ import annotations

import tempfile
import threading
import uuid
from pathlib import Path

import numpy as np
import torch

from controller.client import Client
from controller.client import calls as api
from schema.wire import messages as m
from schema.wire.sample import encode_sample
from schema.wire.weights import Publication
from tests.policy_worker.material import VOCABULARY, make_sample
from tests.support.waiting import PATIENCE
from weight_sync import WeightError
from weight_sync.host.host_copy import HostCopy
from weight_sync.stores import open_store


class Player:
    """Runs in a thread until the controller says that the job is finished."""

    def __init__(self, url: str, token: str, groups: int | None = None) -> None:
        """groups: after so many it makes no more before `go_on`, and the trainer waits."""
        self._client = Client(url, token, patience=PATIENCE)
        self._limit = groups
        self._stop, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.error: BaseException | None = None
        self.versions: list[int] = []
        self.weights: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._go_on.set()
        self._thread.join(PATIENCE)
        self._client.close()

    def go_on(self) -> None:
        self._limit = None
        self._go_on.set()

    def finish(self) -> None:
        """Wait for the end of the job; raises what went wrong."""
        self._thread.join(PATIENCE)
        if self.error is not None:
            raise self.error
        assert not self._thread.is_alive(), "the job did not finish"

    def _run(self) -> None:
        try:
            self._play()
        except BaseException as error:
            self.error = error

    def _play(self) -> None:
        with tempfile.TemporaryDirectory(prefix="player-") as directory:
            self._play_with(Path(directory) / "copy")

    def _play_with(self, copy: Path) -> None:
        request = m.RegisterRequest(request_id=uuid.uuid4().hex, role="rollout", name="player")
        reply = self._client.send(api.register(request))
        self._copy = HostCopy(copy, open_store(reply.weight_store))
        publication, made = None, 0
        while publication is None and not self._stop.is_set():
            publication = self._update(None)
        while not self._stop.is_set():
            assert publication is not None
            limit = self._limit
            room = 4 if limit is None else min(4, limit - made)
            if not room:
                self._go_on.wait(PATIENCE)
                continue
            lease = self._client.send(
                api.lease(
                    m.LeaseRequest(
                        request_id=uuid.uuid4().hex, replica_id=reply.replica_id, incarnation=reply.incarnation,
                        version=publication.version, publication_id=publication.id,
                        max_groups=room, wait_s=0.5,
                    )
                )
            )  # fmt: skip
            for group in lease.groups:
                self._push(group, reply.replica_id, publication.version)
            made += len(lease.groups)
            publication = self._update(publication)
            if lease.status == m.LeaseStatus.FINISHED:
                return

    def _update(self, known: Publication | None) -> Publication | None:
        """Load what is newer than `known`; it may be gone as soon as there is something newer still."""
        newest = self._client.send(api.latest_publication(known.id if known else 0, wait_s=0.0 if known else 1.0))
        if newest is None:
            return known
        try:
            weights = self._copy.advance(newest, patience=0.0)
        except WeightError:
            if self._client.send(api.latest_publication(newest.id)) is None:
                raise
            return self._update(known)
        with weights.reading():
            self.weights = {name: tensor.clone() for name, tensor in weights.tensors()}
        self.versions.append(newest.version)
        return newest

    def _push(self, group: m.LeasedGroup, replica_id: str, version: int) -> None:
        pushes, frames = [], []
        for index in range(len(group.seeds)):
            chance = np.random.default_rng(group.seeds[index])
            response = chance.integers(3, VOCABULARY, chance.integers(1, 9)).tolist()
            score = float(chance.integers(0, 2))
            logprobs = [-4.0] * len(response)
            sample = make_sample(index, group.prompt_token_ids, response, logprobs, score, version)
            frames.append(encode_sample(sample))
            pushes.append(m.PushItem(group_id=group.group_id, lease_id=group.lease_id, index=index))
        self._client.send(api.push_many(m.PushList(replica_id=replica_id, pushes=pushes), frames))
