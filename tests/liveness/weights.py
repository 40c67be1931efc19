"""Probes of how weight versions travel: a real publisher, a host's copy, and what engines do with a version."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from controller.client import calls as api
from policy_worker.process import Environment, ShutdownRequest
from policy_worker.replicas.base import Registration
from policy_worker.session import Session
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from policy_worker.weights.nccl_sender import open_sender
from policy_worker.weights.publisher import Publisher
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.weights.follower import WeightFollower
from rollout_worker.weights.host_weights import HostWeights
from schema.config import Config
from schema.wire.messages import RegisterReply
from schema.wire.weights import Publication
from tests.liveness.controller import staged
from tests.liveness.generation import embedded_settings
from tests.liveness.probe import Made, Place, changed, grpo, watch
from tests.policy_worker.material import tiny_model
from tests.support.controller import TOKENS
from weight_sync import lora
from weight_sync.stores import DirectoryStore


@contextmanager
def _publisher(config: Config, place: Place) -> Iterator[tuple[Publisher, Trainer, RegisterReply, Any]]:
    """The publisher of a trainer of one rank; its registration, and a user of the controller."""
    with staged(config, place, register=False) as stage:
        shutdown = ShutdownRequest()
        session = Session(Environment(stage.served.url, TOKENS["policy"], "policy-0", None, None), shutdown, 1)
        model = tiny_model()
        if config.policy.lora is not None:
            lora.inject(model.lm, config.policy.lora)
        trainer = Trainer(model, config, place.group, Schedule(10))
        reply = session.register(0)
        publisher = Publisher(Registration(config, reply, trainer, session, shutdown))
        try:
            yield publisher, trainer, reply, stage.user
        finally:
            publisher.close()
            shutdown.request("done")
            session.leave("done")


def _publish(publisher: Publisher, trainer: Trainer, n: int) -> None:
    """n versions; from one to the next one element of each parameter changes."""
    for _ in range(n):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.view(-1)[0] *= 1.25
        assert publisher.publish(0)
        assert publisher.settle(60.0)


def forms_of_four_versions(config: Config, place: Place) -> list[tuple[str, int]]:
    """Whether each is full or a delta, and where its chain begins."""
    with _publisher(config, place) as (publisher, trainer, _, user):
        _publish(publisher, trainer, 4)
        found = [shown.publication for shown in user.send(api.publications())]
        return [(publication.kind, publication.begins) for publication in found]


def bytes_of_a_version(config: Config, place: Place) -> int:
    """How much there is to fetch."""
    with _publisher(config, place) as (publisher, trainer, _, user):
        _publish(publisher, trainer, 1)
        newest = user.send(api.latest_publication())
        assert newest is not None
        return newest.n_bytes


def offered(config: Config, place: Place) -> bool:
    """Whether a publication says where the trainer hands it out itself."""
    with _publisher(config, place) as (publisher, trainer, _, user):
        _publish(publisher, trainer, 1)
        newest = user.send(api.latest_publication())
        assert newest is not None
        return newest.offer is not None


def patience_with_a_transfer(config: Config, place: Place) -> float:
    """Seconds after which a transfer is given up."""
    sender = open_sender(config, DirectoryStore(place.directory()), "http://127.0.0.1:1")
    assert sender is not None
    try:
        return sender._timeout
    finally:
        sender.close()


def copy_of_the_host(config: Config, place: Place) -> Path:
    """Below which directory a replica keeps the weights."""
    with _publisher(config, place) as (publisher, trainer, reply, user):
        _publish(publisher, trainer, 1)
        newest = user.send(api.latest_publication())
        assert newest is not None

        async def directory() -> Path:
            host = HostWeights(config, reply)
            try:
                return (await host.advance(newest)).weights.copy_directory.parents[1]
            finally:
                await host.close()

        return asyncio.run(directory())


def patience_with_a_bucket(config: Config, place: Place) -> float:
    """Seconds for which each request of a replica to its bucket is tried."""
    with staged(config, place) as stage:
        before = dict(os.environ)
        os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "nowhere"}
        try:
            store: Any = HostWeights(config, stage.rollout.reply)._store
        finally:
            os.environ.clear()
            os.environ |= before
        return float(store._patience._delays.give_up)


def compared_versions(config: Config, place: Place) -> list[int]:
    """Return at which of fifty versions the served weights are compared with the trainer's."""
    nothing: Any = None
    follower = WeightFollower(config.weight_sync, nothing, nothing, nothing, LeaseTable(), Metrics())
    compared = []
    for version in range(50):
        publication = Publication(
            id=version + 1, version=version, timeline=0, uri="v", manifest_hash="m", content_hash="c", n_bytes=1
        )
        if follower._check_is_due(publication):
            compared.append(version)
            follower._checked = publication
    return compared


watch(forms_of_four_versions, grpo, {"weight_sync.encoding": ("delta", "full")})
watch(forms_of_four_versions, grpo, {"weight_sync.anchor_interval": (20, 2)})
watch(bytes_of_a_version, changed(grpo, {"policy.lora.r": 2}), {"weight_sync.lora": ("merged", "adapter")})
watch(offered, grpo, {"weight_sync.transport": ("store", "collective")})
watch(
    patience_with_a_transfer,
    changed(grpo, {"weight_sync.transport": "collective"}),
    {"weight_sync.collective_timeout": (30.0, 5.0)},
)
watch(copy_of_the_host, grpo, {"weight_sync.host_cache": ("", Made(lambda place: str(place.model.parent)))})
watch(
    patience_with_a_bucket,
    changed(grpo, {"weight_sync.store": "s3://bucket/weights"}),
    {"weight_sync.store_timeout": (1800.0, 60.0)},
)
watch(compared_versions, grpo, {"weight_sync.checksum_interval": (20, 5)})
watch(embedded_settings, grpo, {"weight_sync.update_mode": ("recompute", "keep_kv")})
