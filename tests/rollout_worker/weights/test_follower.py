"""Replicas that follow published deltas through their host's copy: proven, reported, and going on whatever fails."""

from __future__ import annotations

import copy
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controller.client import Client
from controller.client import calls as api
from rollout_worker.engines.base import WeightMismatch
from rollout_worker.errors import WeightsUnreadableError
from schema.wire import messages as m
from schema.wire.sample import Sample
from tests.rollout_worker.stage import Publisher, Stage
from tests.rollout_worker.test_worker import check_sample
from tests.rollout_worker.versions import nudged
from tests.support.served import ServedController
from tests.support.waiting import PATIENCE, until
from tests.weight_sync.versions import Versions
from weight_sync import hub_tensors

pytestmark = pytest.mark.slow

PROMPTS = [f"question {i}?" for i in range(80)]
"""Enough for forty steps."""


@dataclass
class Deltas(Publisher):
    """A trainer whose steps change a few elements, published as deltas; every fourth one has an anchor beside it."""

    versions: Versions | None = None
    trained: list[Any] = field(default_factory=list)
    anchors: list[bool] = field(default_factory=list)
    broken: int = -1
    """Version whose delta is damaged in the store before it is announced."""

    def publish(self, version: int) -> m.PublishReply:
        model = copy.deepcopy(self.trained[-1] if self.trained else self.models.of(0))
        if self.trained:
            nudged(model, version)
        self.trained.append(model)
        tensors = {name: tensor.detach().clone() for name, tensor in hub_tensors(model)}
        if self.versions is None:
            self.versions = Versions(Path(self.reply.weight_store), weights=tensors)
        else:
            self.versions.next(tensors)
        publication = self.versions.newest
        if version == self.broken:
            for path in self.versions.folder(publication.uri).glob("*.safetensors"):
                path.unlink()
        fulls = [link.version + 1 for link in self.versions.links[:-1] if link.full is not None]
        fields = publication.model_dump(
            include={"uri", "manifest_hash", "content_hash", "n_bytes", "version", "kind"}
        )
        begins = None if publication.kind == "full" else fulls[-1]
        request = m.PublishRequest.model_validate({**self._mine(), **fields, "begins": begins})
        reply = self.client.send(api.publish(request))
        self.anchors.append(reply.anchor)
        return reply

    def of(self, version: int) -> Any:
        return self.trained[version]


def trainer_of(stage: Stage, served: ServedController, **options: Any) -> Deltas:
    return Deltas(stage.client(served, "policy"), models=stage.models, **options)


def updates(user: Client) -> dict[int, list[m.ReplicaUpdate]]:
    """What replicas have reported, by version."""
    return {info.publication.version: info.updates for info in user.send(api.publications())}


def check(samples: list[Sample], trainer: Deltas) -> None:
    for sample in samples:
        check_sample(sample, trainer)  # type: ignore[arg-type]  (it asks for the model of a version)


def test_two_replicas_of_a_host_follow_deltas(stage: Stage) -> None:
    """Every version is compared bit by bit; one of them fetches, both change in place."""
    cache = stage.directory / "cache"
    cache.mkdir()
    config = stage.config(
        train__max_num_steps=10, weight_sync__checksum_interval=1, weight_sync__host_cache=str(cache)
    )
    stage.prepare(config, PROMPTS)
    served = stage.serve()
    trainer, user = trainer_of(stage, served), stage.client(served, "user")
    trainer.begin()
    workers = [stage.worker(served.url)]
    until(lambda: updates(user)[0], "the first replica with the first weights")  # loading models takes turns
    workers.append(stage.worker(served.url, "rollout-1"))
    until(lambda: len(updates(user)[0]) == 2, "both replicas with the first weights")
    for t in range(9):
        check(trainer.step(t), trainer)
    until(lambda: len(updates(user)[9]) == 2, "both replicas with the newest weights")
    (copied,) = cache.rglob("state.json")
    trainer.step(9)
    trainer.leave()
    for worker in workers:
        worker.join()
    assert not copied.exists(), "the last one removes it"
    found = updates(user)
    for version, reports in found.items():
        assert sum(report.n_bytes > 0 for report in reports) <= 1
        for report in reports:
            assert (report.status, report.transport, report.checked) == ("applied", "store", True)
            assert report.mode == ("full" if version == 0 else "in_place")
            assert {"wait", "fetch", "verify", "advance", "prepare", "pause", "apply", "checksum"} <= set(
                report.seconds
            )


def test_a_late_replica_joins_at_version_30(stage: Stage) -> None:
    stage.prepare(stage.config(train__max_num_steps=40, train__train_policy__allowed_outdated_steps=0), PROMPTS)
    served = stage.serve()
    trainer, user = trainer_of(stage, served), stage.client(served, "user")
    trainer.begin()
    first = stage.worker(served.url)
    for t in range(30):
        trainer.step(t)
    stage.worker(served.url, "late")
    reports = until(lambda: len(found := updates(user)[30]) == 2 and found, "both with version 30")
    assert {report.checked for report in reports} == {None, True}  # of the late one it is the first
    first.stop()
    check(trainer.step(30), trainer)


def test_generation_goes_on_past_a_version_that_cannot_be_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported, the trainer is asked for an anchor, and the chain that begins there is followed."""
    monkeypatch.setattr("rollout_worker.weights.host_weights.PATIENCE", 0.1)
    stage.prepare(stage.config(train__max_num_steps=12, train__train_policy__allowed_outdated_steps=8), PROMPTS)
    served = stage.serve()
    trainer, user = trainer_of(stage, served, broken=2), stage.client(served, "user")
    trainer.begin()
    worker = stage.worker(served.url)
    trainer.step(0)
    until(lambda: updates(user)[1], "version 1 in use")
    check(trainer.step(1), trainer)
    (report,) = until(lambda: updates(user)[2], "a report about version 2")
    assert (report.status, report.checked) == ("unreadable", None)
    assert "no way leads to publication 3 (version 2)" in report.detail
    assert "cannot be used" in str(until(lambda: user.send(api.job()).last_error, "an error that people see"))
    check(trainer.step(2), trainer)
    assert trainer.anchors[3]
    check(trainer.step(3), trainer)
    check(trainer.step(4), trainer)  # version 5: its chain names the anchor of version 4
    reports = until(lambda: updates(user)[5], "version 5 in use")
    assert reports[0].status == "applied"
    assert worker.error is None
    check([sample for t in range(5, 12) for sample in trainer.step(t)], trainer)


def test_a_trainer_that_is_faster_than_failing_hears_of_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a newer publication whenever one has failed, and none of them can be read."""
    monkeypatch.setattr("rollout_worker.weights.host_weights.PATIENCE", 0.5)
    stage.prepare(stage.config(train__train_policy__allowed_outdated_steps=8), PROMPTS)
    served = stage.serve()
    trainer, user = trainer_of(stage, served, broken=1), stage.client(served, "user")
    trainer.begin()
    worker = stage.worker(served.url)
    until(lambda: updates(user)[0], "version 0 in use")
    trainer.step(0)
    assert trainer.versions is not None
    fields = trainer.versions.newest.model_dump(
        include={"uri", "manifest_hash", "content_hash", "n_bytes", "version", "kind"}
    )

    def asked() -> bool:
        request = m.PublishRequest.model_validate({**trainer._mine(), **fields, "begins": 1})
        return trainer.client.send(api.publish(request)).anchor

    until(asked, "a wish for an anchor")
    assert worker.error is None


def test_a_replica_without_weights_gives_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_worker.weights.host_weights.PATIENCE", 0.0)
    monkeypatch.setattr("rollout_worker.weights.follower.RETRY_S", 0.01)
    stage.prepare(stage.config(), PROMPTS)
    served = stage.serve()
    trainer = trainer_of(stage, served, broken=0)
    trainer.begin()
    worker = stage.worker(served.url)
    with pytest.raises(WeightsUnreadableError, match=r"no way leads to publication 1 .*No such file.*tried 5 times"):
        worker.join()


def test_wrong_weights_end_the_replica(stage: Stage) -> None:
    """A bit that flips in the engine is found by the next comparison."""
    stage.prepare(stage.config(weight_sync__checksum_interval=1), PROMPTS)
    served = stage.serve()
    trainer, user = trainer_of(stage, served), stage.client(served, "user")
    trainer.begin()
    worker = stage.worker(served.url)
    until(lambda: updates(user)[0], "the first weights")
    engine: Any = worker.worker._heartbeat.engine
    parameter = next(engine._booted.model.parameters())
    parameter.data.view(-1)[7] += 1.0
    trainer.step(0)
    with pytest.raises(WeightMismatch, match=r"content hash is .*, the trainer's is"):
        worker.join()
    (report,) = until(lambda: updates(user)[1], "a report")
    assert report.checked is False
    assert "serves weights that are not those of version 1" in str(user.send(api.job()).last_error)


def test_sigterm_ends_a_replica_whose_store_hangs(stage: Stage) -> None:
    """The store takes connections and never answers."""
    config = stage.config(weight_sync__store="s3://bucket/weights", launcher__shutdown_timeout=10 * PATIENCE)
    stage.prepare(config, PROMPTS)
    served = stage.serve()
    trainer = trainer_of(stage, served)
    trainer.register()
    values = {"uri": "t0-v00000000-0123456789abcdef/manifest.json", "manifest_hash": "m", "content_hash": "c"}
    request = m.PublishRequest.model_validate({**trainer._mine(), **values, "n_bytes": 1, "version": 0})
    trainer.client.send(api.publish(request))
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        worker = stage.worker_process(
            served.url,
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{hanging.getsockname()[1]}",
            AWS_ACCESS_KEY_ID="id",
            AWS_SECRET_ACCESS_KEY="secret",
            AWS_DEFAULT_REGION="us-east-1",
        )
        hanging.settimeout(PATIENCE)
        connection, _ = hanging.accept()
        with connection:
            assert worker.stop(signal.SIGTERM) == 0
