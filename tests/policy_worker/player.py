"""A rollout replica played by the test: it leases, invents answers, and pushes; weights it fetches and verifies."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import numpy as np
import torch

from controller import api
from controller.client import Client
from schema.wire import messages as m
from schema.wire.sample import encode_sample
from schema.wire.weights import Publication
from tests.policy_worker.material import VOCABULARY, make_sample
from weight_sync import fetch


class Player:
    """Runs in a thread until the controller says that the job is finished."""

    def __init__(self, url: str, token: str) -> None:
        self._client = Client(url, token, patience=20.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._rng = np.random.default_rng(0)
        self.error: BaseException | None = None
        self.versions: list[int] = []
        self.weights: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)
        self._client.close()

    def finish(self, seconds: float = 60.0) -> None:
        """Wait for the end of the job; raises what went wrong."""
        self._thread.join(seconds)
        if self.error is not None:
            raise self.error
        assert not self._thread.is_alive(), "the job did not finish"

    def _run(self) -> None:
        try:
            self._play()
        except BaseException as error:
            self.error = error

    def _play(self) -> None:
        request = m.RegisterRequest(request_id=uuid.uuid4().hex, role="rollout", name="player")
        reply = self._client.send(api.register(request))
        publication = None
        while publication is None and not self._stop.is_set():
            publication = self._client.send(api.latest_publication(0, wait_s=1.0))
        assert publication is not None
        self._load(reply.weight_store, publication)
        while not self._stop.is_set():
            lease = self._client.send(
                api.lease(
                    m.LeaseRequest(
                        request_id=uuid.uuid4().hex, replica_id=reply.replica_id, incarnation=reply.incarnation,
                        version=publication.version, publication_id=publication.id, max_groups=4, wait_s=0.5,
                    )
                )
            )  # fmt: skip
            for group in lease.groups:
                self._push(group, reply.replica_id, publication.version)
            newest = self._client.send(api.latest_publication(publication.id))
            if newest is not None:
                publication = newest
                self._load(reply.weight_store, publication)
            if lease.status == m.LeaseStatus.FINISHED:
                return

    def _load(self, store: str, publication: Publication) -> None:
        self.weights = {name: tensor.clone() for name, tensor in fetch(Path(store), publication).tensors()}
        self.versions.append(publication.version)

    def _push(self, group: m.LeasedGroup, replica_id: str, version: int) -> None:
        pushes, frames = [], []
        for index in range(len(group.seeds)):
            response = self._rng.integers(3, VOCABULARY, self._rng.integers(1, 9)).tolist()
            score = float(self._rng.integers(0, 2))
            logprobs = [-4.0] * len(response)
            sample = make_sample(index, group.prompt_token_ids, response, logprobs, score, version)
            frames.append(encode_sample(sample))
            pushes.append(m.PushItem(group_id=group.group_id, lease_id=group.lease_id, index=index))
        self._client.send(api.push_many(m.PushList(replica_id=replica_id, pushes=pushes), frames))
