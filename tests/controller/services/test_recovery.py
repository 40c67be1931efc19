"""Real Valkey, its file cut at random places, a real controller process: a trainer and replicas live on meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.client import AsyncClient, Client, Refused
from controller.client import calls as api
from policy_worker.errors import ReplacedError
from policy_worker.process import Environment, ShutdownRequest
from policy_worker.session import Session
from rollout_worker.groups.pushing import Pusher
from rollout_worker.lease_table import LeaseTable
from rollout_worker.session import Session as RolloutSession
from schema.config import Config
from schema.wire import messages as m
from schema.wire.batch import decode_batch
from schema.wire.messages import ErrorCode, Phase
from schema.wire.prompts import OTHER_ROWS
from schema.wire.sample import decode_sample
from tests.controller.conftest import PATIENT, Stage, refused
from tests.controller.drivers import Rollout, begin, make_frame, make_header, train_step
from tests.support.controller import TOKENS, ControllerProcess, make_config, make_run_dir, running_controller
from tests.support.valkey import ValkeyServer, running_valkey
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow


def session_of(url: str, name: str = "policy-0") -> Session:
    return Session(Environment(url, TOKENS["policy"], name, None, None), ShutdownRequest(), 1)


class LiveTrainer(threading.Thread):
    """A trainer without a model: the real session and its history, and the truth about what was trained."""

    def __init__(self, url: str, name: str = "policy-0") -> None:
        super().__init__(daemon=True)
        self.session = session_of(url, name)
        self.trained: list[list[str]] = []
        self.limit = sys.maxsize
        """Steps that it trains; then it waits for a higher limit."""
        self.error: BaseException | None = None

    @property
    def steps(self) -> int:
        return len(self.trained)

    def run(self) -> None:
        try:
            self._train()
            self.session.leave("finished")
        except BaseException as error:
            self.error = error
            self.session.leave("crashed")

    def _train(self) -> None:
        session = self.session
        reply = session.register()
        finished = False
        while not finished:
            self._publish()
            step = self.steps
            until(lambda step=step: step < self.limit, "a higher limit")
            data = None
            while data is None:
                data = session.call(api.step_batch(step, reply.policy_epoch, "all", wait_s=1.0))
            table, frames = decode_batch(data)
            assert len(frames) == table.n_samples
            if not table.group_ids:
                return
            assert all(step - oldest <= 1 for oldest in table.oldest_version)
            session.history.took(table)
            time.sleep(0.03)
            batch = session.history.applied(step, {"samples": float(table.n_samples)}, time.time())
            self.trained.append(table.group_ids)
            request = m.CommitRequest(**session.identity(), metrics={}, batch=batch)
            answer = session.call(api.commit(step, request))
            session.history.committed(answer)
            assert answer.committed_steps == step + 1
            finished = answer.finished
        self._publish()

    def _publish(self) -> None:
        uri = f"{id(self)}-v{self.steps}"
        request = m.PublishRequest(
            **self.session.identity(), version=self.steps, uri=uri, manifest_hash=uri, content_hash=uri,
            n_bytes=1, newest_publication=self.session.history.newest_publication,
        )  # fmt: skip
        self.session.history.published(self.session.call(api.publish(request)))


class LiveRollout(threading.Thread):
    """A rollout replica that makes samples in no time, and registers again where it is not known any more."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(daemon=True)
        self.client = Client(url, TOKENS["rollout"], patience=PATIENCE)
        self.driver = Rollout(self.client, name)
        self.ids: dict[int, str] = {}
        self.beat_at = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.driver.register()
            while self._once():
                time.sleep(0.005)
        except BaseException as error:
            self.error = error

    def _once(self) -> bool:
        driver = self.driver
        try:
            if time.monotonic() > self.beat_at:
                driver.beat(set())  # what it is said to hold it has pushed, or never heard of
                self.beat_at = time.monotonic() + 0.2
            publication = self.client.send(api.latest_publication(driver.publication_id))
            if publication is not None:
                known = self.ids.setdefault(publication.id, publication.manifest_hash)
                assert known == publication.manifest_hash, "an id was used for other content"
                driver.take(publication)
            reply = driver.lease(2, wait_s=0.2)
            if reply.groups:
                driver.finish(reply.groups)
            return reply.status is not m.LeaseStatus.FINISHED
        except Refused as error:
            if error.code is not ErrorCode.UNKNOWN_REPLICA:
                raise
            publication_id, version = driver.publication_id, driver.version
            driver.register(newest_publication=publication_id)
            driver.publication_id, driver.version = publication_id, version
            return True


def cut(directory: Path, keep: Callable[[int], int]) -> None:
    """Cut the newest append-only file, as a power cut would that lost its end."""
    (newest,) = sorted((directory / "appendonlydir").glob("*.incr.aof"))[-1:]
    size = newest.stat().st_size
    with newest.open("r+b") as file:
        file.truncate(keep(size))


def lose(valkey: ValkeyServer, process: ControllerProcess, keep: Callable[[int], int]) -> None:
    """Controller and Redis die at once, Redis loses the end of its file, and both come back."""
    process.stop(signal.SIGKILL)
    valkey.stop(signal.SIGKILL)
    cut(valkey._directory, keep)
    valkey.start()
    process.start()


@contextmanager
def job(run_dir: Path) -> Iterator[tuple[ValkeyServer, ControllerProcess]]:
    with running_valkey() as valkey, running_controller(run_dir, valkey.url) as process:
        yield valkey, process


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_the_file_is_cut_at_random_places_while_everybody_works(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    config = make_config(
        controller={**PATIENT, "heartbeat_interval": 0.2}, validation={"enable": seed == 2, "freq": 5}
    )
    with job(make_run_dir(tmp_path / "run", config, rows=40)) as (valkey, process):
        trainer = LiveTrainer(process.url)
        trainer.limit = 19  # of 20 steps: nothing is lost once the job is over
        rollouts = [LiveRollout(process.url, f"rollout-{i}") for i in range(2)]
        for thread in (trainer, *rollouts):
            thread.start()
        for loss in range(3):
            target = (loss + 1) * 5
            until(lambda target=target: trainer.steps >= target or not trainer.is_alive(), f"step {target}")
            assert trainer.error is None
            share = 0.0 if seed == 2 and loss == 2 else 1 - chance.random() ** 2
            lose(valkey, process, lambda size, share=share: int(size * share))
        trainer.limit = sys.maxsize
        trainer.join(PATIENCE)
        for rollout in rollouts:
            rollout.join(PATIENCE)
            assert rollout.error is None
        assert not trainer.is_alive()
        assert trainer.error is None
        with process.client() as user:
            ledger, status = user.send(api.ledger()), user.send(api.job())
            steps = user.send(api.steps())
            groups = {
                group["epoch"] * 40 + group["position"]: group["step"]
                for group in user._http.get("/v1/groups", params={"limit": 1000}).json()
            }
    truth = {name: step for step, names in enumerate(trainer.trained) for name in names}
    assert len(truth) == sum(map(len, trainer.trained)) == 40, "each position exactly once"
    assert {f"e0-p{position}": step for position, step in groups.items()} == truth
    assert (ledger.created, ledger.states["trained"] + ledger.states["durable"]) == (40, 40)
    assert sum(ledger.staleness.values()) == 80
    assert (ledger.over_bound, ledger.max_staleness <= 1) == (0, True)
    assert (status.phase, status.step, status.timeline) == (Phase.FINISHED, 20, 0)
    assert [record.step for record in steps] == list(range(20))


def test_a_trainer_that_was_replaced_in_lost_history_is_refused(tmp_path: Path) -> None:
    """The newer registration is forgotten; its trainer declares itself, and the older one may not go on."""
    with (
        job(make_run_dir(tmp_path / "run", make_config(controller=PATIENT), rows=12)) as (valkey, process),
        process.client("rollout") as client,
        process.client("policy") as policy,
        process.client() as user,
    ):
        old, rollout = begin(policy, client)
        train_step(old, rollout, 0)
        kept = next((valkey._directory / "appendonlydir").glob("*.incr.aof")).stat().st_size
        session = session_of(process.url)
        newer = session.register(resume_step=0)
        assert newer.timeline == 1
        lose(valkey, process, lambda size: min(size, kept))
        session.call(api.step_batch(0, newer.policy_epoch, "none"))  # refused at first: it declares itself
        assert session.mends == 1
        assert refused(old.commit, 1).code is ErrorCode.STALE_EPOCH
        status, ledger = user.send(api.job()), user.send(api.ledger())
        assert (status.timeline, status.step, ledger.states["trained"]) == (1, 0, 0)
        again = session_of(process.url)
        again.register(resume_step=0)
        with pytest.raises(ReplacedError):
            session.call(api.step_batch(0, newer.policy_epoch, "none"))
        for one in (session, again):
            one.leave("done")


def test_leases_that_the_store_lost_are_taken_back_also_from_others(stage: Stage) -> None:
    """One replica holds two groups that the store forgot; another one asks for work, and gets them, meanwhile."""
    served, trainer, other = stage.at_work(make_config(controller=PATIENT))
    name = served.job.publications.newest
    assert name is not None

    async def run() -> tuple[list[m.LeasedGroup], list[str], list[m.LeasedGroup]]:
        leases = LeaseTable()
        async with AsyncClient(served.url, TOKENS["rollout"], patience=PATIENCE) as client:
            session = RolloutSession(client, "rollout-1", leases)
            await session.register()
            with stage.history_lost(served):
                request = m.LeaseRequest(
                    request_id="of-what-is-lost", replica_id=session.replica_id, incarnation=session.incarnation,
                    version=0, publication_id=name.id, manifest_hash=name.manifest_hash, max_groups=2,
                )  # fmt: skip
                granted = (await client.send(api.lease(request))).groups
            for group in granted:
                leases.add(group, name)
            taken = (await asyncio.to_thread(other.lease, 8)).groups
            pusher = Pusher(session, leases, 1 << 20)
            pushing = asyncio.create_task(pusher.run())
            for group in granted:
                for index in range(2):
                    pusher.add(group, decode_sample(make_frame(make_header(index, 0))))
            await pusher.flush()
            pushing.cancel()
            beat = m.HeartbeatRequest(incarnation=session.incarnation, leases=leases.lease_ids)
            await session.call(lambda session: api.heartbeat(session.replica_id, beat))
        return granted, leases.lease_ids, taken

    granted, left, taken = asyncio.run(run())
    assert left == [], "all was pushed"
    mine = {group.group_id for group in granted}
    assert mine < {group.group_id for group in taken}, "they were given to another one meanwhile"
    assert [served.job.require_group(name).state for name in sorted(mine)] == ["ready", "ready"]
    assert set(other.beat().lost_leases) == {group.lease_id for group in taken if group.group_id in mine}
    other.finish([group for group in taken if group.group_id not in mine])
    assert trainer.batch(0) is not None


def test_an_empty_store_goes_on_from_the_checkpoint_alone(stage: Stage) -> None:
    config = make_config(train={"ckpt": {"enable_checkpoint": True}})
    first = stage.serve(config)
    trainer, rollout = stage.ready(first)
    for step in range(3):
        train_step(trainer, rollout, step)
    snapshot = trainer.client.send(api.ledger_snapshot(3))
    second = stage.serve(config)  # another run directory: another job, with nothing in Redis
    resumed = stage.trainer(second)
    reply = resumed.register(resume_step=3, snapshot=snapshot)
    assert (reply.committed_steps, reply.timeline, reply.timeline_began) == (3, 1, 3)
    others = stage.serve(config)
    stage.trainer(others).register(resume_step=3, snapshot=snapshot.model_copy(update={"data": "of other rows"}))
    said = [[event.text for event in served.job.events.after(0)] for served in (second, others)]
    assert [OTHER_ROWS in texts for texts in said] == [False, True]
    rollout = stage.rollout(second)
    resumed.publish(3)
    rollout.register()
    for step in range(3, 6):
        last = train_step(resumed, rollout, step)
    assert last.finished
    ledger = stage.client(second).send(api.ledger())
    assert (ledger.created, ledger.states["trained"] + ledger.states["durable"]) == (12, 12)


def test_a_hostile_snapshot_is_a_clear_error_and_registers_nobody(stage: Stage) -> None:
    served = stage.serve()
    for changes, says in (
        ({"n_positions": 13}, "13 prepared rows"), ({"frontier": 10**9}, "positions were handed out"),
        ({"committed_steps": 4}, "different checkpoints"),
    ):  # fmt: skip
        fields = {"committed_steps": 3, "timeline": 0, "frontier": 6, "untrained": [], "n_positions": 12, **changes}
        with pytest.raises(Refused, match=says):
            stage.trainer(served).register(resume_step=3, snapshot=m.LedgerSnapshot.model_validate(fields))
        assert served.job.registry.by_name("policy-0") is None
        assert served.job.progress.committed == 0


def test_supervised_steps_are_replayed_and_resumed(stage: Stage) -> None:
    train = {"train_policy": {"type": "sft"}, "train_batch_per_replica": 4}
    config = Config.model_validate({"train": train})
    served = stage.serve(config, rows=24)
    session = session_of(served.url)
    session.register()
    for step in range(3):
        session.history.applied(step, {"samples": 4.0}, time.time())
    commit = session.call(api.commit(2, m.CommitRequest(**session.identity(), metrics={})))
    assert commit.committed_steps == 3, "the first two were replayed"
    session.leave("done")
    user = stage.client(served)
    assert [record.metrics for record in user.send(api.steps())] == [{"samples": 4.0}] * 3
    snapshot = stage.client(served, "policy").send(api.ledger_snapshot(3))
    reply = stage.trainer(stage.serve(config, rows=24)).register(resume_step=3, snapshot=snapshot)
    assert (reply.committed_steps, reply.timeline, reply.total_steps) == (3, 1, 6)
    with pytest.raises(Refused, match="24 prepared rows"):
        stage.trainer(stage.serve(config, rows=25)).register(resume_step=3, snapshot=snapshot)


def loss_of(version: int, loss: float) -> m.HeldOutLoss:
    return m.HeldOutLoss(version=version, at=1.0, samples=2, loss=loss, accuracy=0.5, response_tokens_mean=3.0)


def test_validations_of_supervised_training_travel_with_its_steps(stage: Stage) -> None:
    """Each counts once, survives controller and store, and says which checkpoint is the best."""
    train = {"train_policy": {"type": "sft"}, "train_batch_per_replica": 4}
    config = Config.model_validate({"train": train})
    served = stage.serve(config, rows=24)
    session = session_of(served.url)
    session.register()

    def commit(step: int, *records: m.HeldOutLoss) -> None:
        request = m.CommitRequest(**session.identity(), metrics={}, validations=list(records))
        session.call(api.commit(step, request))

    session.history.applied(0, {}, time.time(), [loss_of(0, 3.0), loss_of(1, 2.0)])
    session.history.applied(1, {}, time.time())
    session.history.applied(2, {}, time.time(), [loss_of(3, 1.5)])
    commit(2, loss_of(3, 1.5))  # the controller asks for the others, which it has never seen
    commit(2, loss_of(3, 9.0))  # the answer was lost: sent again
    user = stage.client(served)
    records = user.send(api.validations())
    assert [(record.version, record.loss) for record in records] == [(0, 3.0), (1, 2.0), (3, 1.5)]
    assert user.send(api.job()).validation == records[-1]
    told = [event.text for event in served.job.events.after(0) if event.kind == m.EventKind.VALIDATION]
    assert told[-1] == "validation of version 3: loss 1.5000 over 2 samples"
    assert len(told) == 3
    with pytest.raises(Refused, match="validates another version"):
        commit(3, loss_of(3, 1.0))
    request = m.CheckpointRequest(**session.identity(), step=3, path="somewhere")
    assert session.call(api.checkpoint(request)).scores == {0: -3.0, 1: -2.0, 3: -1.5}, "less loss is better"
    session.leave("done")
    served.restart()
    assert user.send(api.validations()) == records
    stage.trainer(served).register(resume_step=1)
    assert user.send(api.validations()) == records[:2], "training went back: version 3 is made again"
