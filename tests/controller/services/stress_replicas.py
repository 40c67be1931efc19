"""The trainer and the rollout replicas of the simulation: what the real ones ask, in the order they ask it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from controller.errors import ApiError
from controller.services.controller import Controller
from schema.wire import messages as m
from schema.wire.messages import ErrorCode, LeaseStatus
from schema.wire.weights import Publication
from tests.controller.services.stress import Died, Lost, Refused, World, bundle, push, table_of

RESTART = frozenset(
    {ErrorCode.STALE_INCARNATION, ErrorCode.UNKNOWN_REPLICA, ErrorCode.STALE_EPOCH, ErrorCode.LEASE_LOST}
)
"""Refusals after which a replica begins anew."""


# ---- trainer --------------------------------------------------------------------------------------------------


async def trainers(world: World) -> None:
    """One after the other until the job is finished; sometimes the one before goes on, cut off or forgotten."""
    forgotten: list[asyncio.Future[bool]] = []
    try:
        while True:
            trainer = asyncio.ensure_future(_life(world))
            while not trainer.done():
                await asyncio.wait([trainer], timeout=world.random.uniform(5, 20))
                if not trainer.done() and world.happens("trainer replaced while it lives", 0.05):
                    forgotten.append(trainer)
                    break
            if trainer.done() and trainer.result():
                return
            await world.pause(4.0)
    finally:
        for trainer in forgotten:
            trainer.cancel()
        for outcome in await asyncio.gather(*forgotten, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


async def _life(world: World) -> bool:
    """One trainer from its start to its end; whether it trained the job to its end."""
    trainer = _Trainer(world)
    try:
        await trainer.run()
    except Died:
        return False
    except Refused as error:
        if error.code is ErrorCode.JOB_FINISHED:
            return True
        if error.code not in RESTART:
            raise
        return False
    return True


class _Trainer:
    def __init__(self, world: World) -> None:
        self.world = world
        self.reply: m.RegisterReply
        self.weights: list[frozenset[str]] = []

    def mine(self) -> dict[str, object]:
        return {
            "request_id": self.world.new_id(),
            "replica_id": self.reply.replica_id,
            "incarnation": self.reply.incarnation,
            "policy_epoch": self.reply.policy_epoch,
        }

    async def run(self) -> None:
        world = self.world
        step = max(world.saved)
        self.weights = list(world.saved[step])
        request = m.RegisterRequest(
            request_id=world.new_id(), role="policy", name="policy-0", resume_step=step, pid=step + 1
        )
        self.reply = await world.insist(lambda c: _register(world, c, request))
        world.trainer = self
        # What the one before saved while this one registered is of a timeline that has ended.
        world.saved = {saved: weights for saved, weights in world.saved.items() if saved <= step}
        beats = asyncio.ensure_future(self.beat())
        try:
            await self.publish(step)
            while not await self.step(step):
                step += 1
            await self.publish(len(self.weights))
            reply = self.reply
            world.weights = self.weights  # if it may leave as the one that finished, these are the job's
            await world.insist(lambda c: c.replicas.leave(reply.replica_id, reply.incarnation, "finished"))
        finally:
            beats.cancel()

    async def step(self, step: int) -> bool:
        """Train one step; whether it was the last."""
        world = self.world
        epoch = self.reply.policy_epoch
        while True:
            data = await world.insist(lambda c: c.steps.batch(step, epoch, None, 5.0), timeout=20.0)
            found = table_of(data)
            if found is not None:
                break
        table, frames = found
        if not table.group_ids:
            return True
        groups = frozenset(table.group_ids)
        trained = {name for done in self.weights for name in done}
        assert not groups & trained, f"step {step} repeats {sorted(groups & trained)}"
        assert len(frames) == table.n_samples
        oldest = min(int(version) for version in table.oldest_version)
        assert step - oldest <= world.config.staleness_bound
        if world.happens("trainer killed before its commit", 0.03):
            raise Died
        await world.pause(2.0)
        again = table_of(await world.insist(lambda c: c.steps.batch(step, epoch, [], 0.0)))
        assert again is not None
        assert frozenset(again[0].group_ids) == groups, "another batch of the same step"
        self.weights.append(groups)
        request = m.CommitRequest.model_validate({**self.mine(), "metrics": {}, "batch": table.digest})
        reply = await world.insist(lambda c: c.steps.commit(step, request))
        assert reply.committed_steps == step + 1
        if world.happens("trainer killed after its commit", 0.03):
            raise Died
        if reply.publish and not reply.finished:
            await self.publish(step + 1)
        if world.random.random() < 0.4:
            await self.save(step + 1)
        return reply.finished

    async def publish(self, version: int) -> None:
        world, mine = self.world, self.mine()
        values = {"uri": str(mine["request_id"]), "manifest_hash": "m", "content_hash": "c", "n_bytes": 1}
        request = m.PublishRequest.model_validate({**mine, **values, "version": version})

        async def ask(controller: Controller) -> m.PublishReply:
            reply = await controller.publications.publish(request)
            world.always(request.request_id, reply.publication)
            world.heard(reply.publication)
            return reply

        if world.happens("trainer killed while it publishes", 0.03):
            world.forget(ask)
            raise Died
        reply = await world.insist(ask)
        assert reply.publication.version == version

    async def save(self, step: int) -> None:
        """A checkpoint counts when it is complete, whether or not the controller hears of it."""
        world = self.world
        if world.trainer is not self:
            return  # the directory is its successor's
        world.saved[step] = list(self.weights)
        if world.happens("trainer killed after its checkpoint", 0.03):
            raise Died
        request = m.CheckpointRequest.model_validate({**self.mine(), "step": step, "path": f"c{step}"})
        await world.insist(lambda c: c.steps.checkpoint(request))

    async def beat(self) -> None:
        request = m.HeartbeatRequest(incarnation=self.reply.incarnation)
        while True:
            await self.world.pause(2.0)
            try:
                await self.world.call(lambda c: c.replicas.heartbeat(self.reply.replica_id, request))
            except (Lost, Refused):
                continue


async def _register(world: World, controller: Controller, request: m.RegisterRequest) -> m.RegisterReply:
    try:
        reply = await controller.replicas.register(request)
    except ApiError:
        newest = controller.job.registry.by_name(request.name)
        repeated = newest is not None and newest.request_ids[-1] == request.request_id
        assert not repeated or newest.state == "left", "a registration that is repeated is refused"
        raise
    world.always(request.request_id, (reply.replica_id, reply.incarnation))
    return reply


# ---- rollout --------------------------------------------------------------------------------------------------


async def rollout_process(world: World, name: str) -> None:
    """Restarted for ever."""
    while True:
        replica = _Rollout(world, name)
        try:
            await replica.run()
            return
        except Died:
            if world.random.random() < 0.5:
                await world.insist(lambda c: c.replicas.exited(name, "killed", crashed=False))
        except Refused as error:
            if error.code not in RESTART:
                raise
        await world.pause(6.0)


@dataclass
class _Rollout:
    world: World
    name: str
    version: int = -1
    publication: int = 0
    held: dict[str, m.LeasedGroup] = field(default_factory=dict)

    async def run(self) -> None:
        world = self.world
        request = m.RegisterRequest(request_id=world.new_id(), role="rollout", name=self.name)
        try:
            self.reply = await world.insist(lambda c: _register(world, c, request))
        except Refused as error:
            if error.code is ErrorCode.JOB_FAILED:
                return
            raise
        self.take(self.reply.publication)
        parts = [asyncio.ensure_future(part) for part in (self.beat(), self.work(), self.fate())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    def take(self, publication: Publication | None) -> None:
        self.world.heard(publication)
        if publication is not None:
            self.version, self.publication = publication.version, publication.id

    async def fate(self) -> None:
        """It may be killed, or leave in order and come back."""
        world = self.world
        while True:
            await world.pause(10.0)
            if world.happens("rollout killed", 0.08):
                raise Died
            if world.happens("rollout drained", 0.05):
                await world.insist(lambda c: c.replicas.drain(self.reply.replica_id))
                await world.pause(3.0)
                for group in list(self.held.values()):
                    await world.insist(lambda c, lease=group.lease_id: c.leases.release(lease))
                await self.leave()

    async def leave(self) -> None:
        reply = self.reply
        await self.world.insist(lambda c: c.replicas.leave(reply.replica_id, reply.incarnation, "drained"))
        raise Died

    async def beat(self) -> None:
        while True:
            await self.world.pause(2.0)
            request = m.HeartbeatRequest(
                incarnation=self.reply.incarnation, leases=sorted(self.held), version=self.version
            )
            try:
                reply = await self.world.call(lambda c, r=request: c.replicas.heartbeat(self.reply.replica_id, r))
            except Lost:
                continue
            for lease in reply.lost_leases:
                self.held.pop(lease, None)

    async def work(self) -> None:
        world = self.world
        generating: set[asyncio.Future[None]] = set()
        try:
            while True:
                for task in [task for task in generating if task.done()]:
                    generating.discard(task)
                    task.result()
                if len(generating) >= 4:
                    await asyncio.wait(generating, return_when=asyncio.FIRST_COMPLETED)
                    continue
                for group in await self.lease():
                    generating.add(asyncio.ensure_future(self.generate(group)))
                await world.pause(0.5)
        finally:
            for task in generating:
                task.cancel()

    async def lease(self) -> list[m.LeasedGroup]:
        world = self.world
        request = m.LeaseRequest(
            request_id=world.new_id(), replica_id=self.reply.replica_id, incarnation=self.reply.incarnation,
            version=max(self.version, 0), publication_id=self.publication,
            max_groups=world.random.randint(1, 3), wait_s=world.random.choice([0.0, 2.0]),
        )  # fmt: skip

        async def ask(controller: Controller) -> m.LeaseReply:
            reply = await controller.leases.lease(request)
            granted = {group.lease_id for group in reply.groups}
            if granted:
                key = controller.job.store.holder.epoch, request.request_id  # it remembers while it lives
                first = world.granted.setdefault(key, granted)
                assert granted <= first, "a request that is repeated gets other groups"
            return reply

        reply = await world.insist(ask)
        if reply.status is LeaseStatus.DRAINING:
            await self.leave()
        if reply.status is LeaseStatus.UPDATE or world.random.random() < 0.3:
            newer, mine = self.publication, (self.reply.replica_id, self.reply.incarnation)
            self.take(await world.insist(lambda c: c.publications.latest(newer, 1.0, *mine)))
        fresh = [group for group in reply.groups if group.lease_id not in self.held]
        self.held |= {group.lease_id: group for group in fresh}
        return fresh

    async def generate(self, group: m.LeasedGroup) -> None:
        """Push the samples one by one or in bundles; what the controller refuses is dropped."""
        world = self.world
        oldest = self.version
        await world.pause(world.random.choice([1.0, 1.0, 8.0]))
        missing = [index for index in range(len(group.seeds)) if index not in group.done]
        world.random.shuffle(missing)
        while missing and group.lease_id in self.held:
            size = world.random.randint(1, len(missing))
            part, missing = missing[:size], missing[size:]
            version = world.random.choice([oldest, max(oldest, self.version)])
            body = bundle(self.reply.replica_id, group, part, version)
            reply = await world.insist(lambda c, b=body: push(c, b))
            if not all(result.accepted for result in reply.results):
                break
            await world.pause(0.5)
        self.held.pop(group.lease_id, None)
