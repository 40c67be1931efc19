"""Drivers of a controller over HTTP: a trainer and a rollout replica without models."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field

import numpy as np

from controller.client import Client
from controller.client import calls as api
from schema.wire import messages as m
from schema.wire.batch import StepTable, decode_batch
from schema.wire.sample import Sample, SampleHeader, encode_sample
from schema.wire.weights import Publication

_ids = itertools.count()


def request_id() -> str:
    return f"request-{next(_ids)}-{secrets.token_hex(4)}"


def make_header(index: int, version: int, *, tokens: int = 6, **changes: object) -> SampleHeader:
    """Header of a sample of `tokens` tokens, 3 of them prompt."""
    fields: dict[str, object] = {
        "index": index, "prompt_tokens": 3, "response_tokens": tokens - 3, "total_tokens": tokens,
        "oldest_version": version, "newest_version": version, "finish_reason": "stop",
        "rewards": {"right": float(index % 2)}, "score": float(index % 2),
    }  # fmt: skip
    return SampleHeader.model_validate({**fields, **changes})


def make_frame(header: SampleHeader, answer: str | None = None) -> bytes:
    """A frame whose tensors agree with the header; kept as text if there is an answer."""
    total = header.total_tokens
    mask = np.zeros(total, np.uint8)
    mask[header.prompt_tokens :] = 1
    sample = Sample(
        header=header,
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, -0.5, 0.0).astype(np.float32),
        version_starts=np.array([0, header.prompt_tokens], np.int32),
        version_values=np.array([-1, header.oldest_version], np.int32),
        kept=None if answer is None else make_text(header, answer),
    )
    return encode_sample(sample)


def make_text(header: SampleHeader, answer: str) -> str:
    """Its text, with a piece for each generated token."""
    n = header.response_tokens
    text = m.SampleText(
        prompt="what?", answer=answer, reference="42", pieces=["a"] * n, logprobs=[-0.5] * n,
        versions=[(0, header.oldest_version)], weights={"right": 1.0},
    )  # fmt: skip
    return text.model_dump_json()


@dataclass
class Trainer:
    """A policy replica that knows its registration."""

    client: Client
    name: str = "policy-0"
    reply: m.RegisterReply = field(init=False)

    def register(self, resume_step: int | None = 0, snapshot: m.LedgerSnapshot | None = None) -> m.RegisterReply:
        request = m.RegisterRequest(
            request_id=request_id(), role="policy", name=self.name, resume_step=resume_step, snapshot=snapshot
        )
        self.reply = self.client.send(api.register(request))
        return self.reply

    def _mine(self) -> dict[str, object]:
        return {
            "request_id": request_id(),
            "replica_id": self.reply.replica_id,
            "incarnation": self.reply.incarnation,
            "policy_epoch": self.reply.policy_epoch,
        }

    def publish_request(self, version: int) -> m.PublishRequest:
        values = {"uri": f"v{version}", "manifest_hash": "m", "content_hash": "c", "n_bytes": 1}
        return m.PublishRequest.model_validate({**self._mine(), **values, "version": version})

    def publish(self, version: int) -> m.PublishReply:
        return self.client.send(api.publish(self.publish_request(version)))

    def batch(self, step: int, wait_s: float = 0.0) -> tuple[StepTable, list[memoryview]] | None:
        data = self.client.send(api.step_batch(step, self.reply.policy_epoch, wait_s=wait_s))
        return None if data is None else decode_batch(data)

    def commit(self, step: int, kept: list[m.TrainedSample] | None = None, **metrics: float) -> m.CommitReply:
        values = {**self._mine(), "metrics": metrics, "samples": kept or []}
        request = m.CommitRequest.model_validate(values)
        return self.client.send(api.commit(step, request))

    def checkpoint(self, step: int) -> m.CheckpointReply:
        request = m.CheckpointRequest.model_validate({**self._mine(), "step": step, "path": f"ckpt-{step}"})
        return self.client.send(api.checkpoint(request))

    def leave(self, reason: str = "finished") -> None:
        self.client.send(api.deregister(self.reply.replica_id, self.reply.incarnation, reason))

    def beat(self, status: str = "") -> m.HeartbeatReply:
        request = m.HeartbeatRequest(incarnation=self.reply.incarnation, status=status)
        return self.client.send(api.heartbeat(self.reply.replica_id, request))


@dataclass
class Rollout:
    """A rollout replica that makes every sample in no time."""

    client: Client
    name: str = "rollout-0"
    reply: m.RegisterReply = field(init=False)
    version: int = -1
    publication_id: int = 0
    leases: set[str] = field(default_factory=set)

    def register(self, **fields: object) -> m.RegisterReply:
        values = {"request_id": request_id(), "role": "rollout", "name": self.name, **fields}
        self.reply = self.client.send(api.register(m.RegisterRequest.model_validate(values)))
        self.take(self.reply.publication)
        return self.reply

    def take(self, publication: Publication | None) -> None:
        """Load a publication."""
        if publication is not None:
            self.version, self.publication_id = publication.version, publication.id

    def update(self) -> None:
        self.take(self.client.send(api.latest_publication(self.publication_id)))

    def lease_request(self, max_groups: int = 1, wait_s: float = 0.0) -> m.LeaseRequest:
        return m.LeaseRequest(
            request_id=request_id(), replica_id=self.reply.replica_id, incarnation=self.reply.incarnation,
            version=max(self.version, 0), publication_id=self.publication_id, max_groups=max_groups,
            wait_s=wait_s,
        )  # fmt: skip

    def lease(self, max_groups: int = 1, wait_s: float = 0.0) -> m.LeaseReply:
        reply = self.client.send(api.lease(self.lease_request(max_groups, wait_s)))
        self.leases |= {group.lease_id for group in reply.groups}
        return reply

    def push(self, group: m.LeasedGroup, header: SampleHeader, frame: bytes | None = None) -> m.PushResult:
        body = make_frame(header) if frame is None else frame
        call = api.push(group.group_id, group.lease_id, header.index, body, self.reply.replica_id)
        return self.client.send(call).results[0]

    def bundle(self, groups: list[m.LeasedGroup], **changes: object) -> tuple[m.PushList, list[bytes]]:
        items, frames = [], []
        for group in groups:
            version = self.version if group.pinned_version is None else group.pinned_version
            for index in range(len(group.seeds)):
                if index not in group.done:
                    items.append(m.PushItem(group_id=group.group_id, lease_id=group.lease_id, index=index))
                    frames.append(make_frame(make_header(index, version, **changes)))  # type: ignore[arg-type]
        return m.PushList(replica_id=self.reply.replica_id, pushes=items), frames

    def finish(self, groups: list[m.LeasedGroup], **changes: object) -> m.PushReply:
        """Push all samples of these groups in one request."""
        reply = self.client.send(api.push_many(*self.bundle(groups, **changes)))
        self.leases -= {group.lease_id for group in groups}
        return reply

    def beat(self, leases: set[str] | None = None, **fields: object) -> m.HeartbeatReply:
        values = {
            "incarnation": self.reply.incarnation,
            "leases": sorted(self.leases if leases is None else leases),
            "version": self.version,
            **fields,
        }
        request = m.HeartbeatRequest.model_validate(values)
        return self.client.send(api.heartbeat(self.reply.replica_id, request))

    def leave(self) -> None:
        self.client.send(api.deregister(self.reply.replica_id, self.reply.incarnation, "done"))


def begin(policy: Client, rollout: Client) -> tuple[Trainer, Rollout]:
    """A trainer that has published version 0 and a rollout replica that holds it."""
    trainer, replica = Trainer(policy), Rollout(rollout)
    trainer.register()
    trainer.publish(0)
    replica.register()
    return trainer, replica


def train_step(trainer: Trainer, rollout: Rollout, step: int, size: int = 8) -> m.CommitReply:
    """One whole step: lease until the batch is there, train, commit, publish, update."""
    while (batch := trainer.batch(step)) is None:
        reply = rollout.lease(size)
        rollout.finish(reply.groups) if reply.groups else rollout.update()
    assert batch[0].n_samples == len(batch[1])
    committed = trainer.commit(step, samples=float(batch[0].n_samples))
    if committed.publish:
        trainer.publish(step + 1)
        rollout.update()
    return committed
