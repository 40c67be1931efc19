"""Probes of the controller: what a real one, served over HTTP, grants, answers, keeps and gives up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from controller.api.limits import SMALL_BODY
from controller.autoscale.autoscaler import PastDecisions
from controller.autoscale.scaling import ReplicaScaling, Sight
from controller.client import Client, ControllerError
from controller.client import calls as api
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.server import ServerSettings, StartError, open_job
from controller.state.job_facts import ledger_params, scale_limits, validation_params
from controller.state.prompts import RowCounts
from controller.state.validation.rounds import Validation
from launcher.plan.credentials import environment
from launcher.plan.rundir import RunTokens
from launcher.plan.tls import check_encryption
from launcher.restarts import Role
from rollout_worker.groups.pushing import _Entry, shared_payloads
from schema.config import Config
from schema.scores.summary import estimates_of
from schema.wire import messages as m
from schema.wire import sample_file
from tests.controller.drivers import Rollout, Trainer, make_frame, make_header, train_step
from tests.liveness.probe import UNSET, Made, Place, With, changed, grpo, sft, under, watch
from tests.support.controller import TOKENS, make_run_dir
from tests.support.served import ServedController, served_controller
from tests.support.valkey import running_valkey
from tests.support.waiting import until

POLICY = "train.train_policy"
BUSY = {"train.train_batch_per_replica": 8, "rollout.n_generation": 4}  # two groups of four samples per step


# ---- the ledger -----------------------------------------------------------------------------------------------


def groups_granted_ahead(config: Config, place: Place) -> int:
    """How many groups are leased before anything is trained."""
    ledger = Ledger(GroupTable(ledger_params(config, RowCounts(100))))
    return len(ledger.lease("replica", "request", 0, 0, 100, 0.0).groups)


def steps_of_the_job(config: Config, place: Place) -> int:
    """How many steps a job of 24 prompts has."""
    return GroupTable(ledger_params(config, RowCounts(24))).total_steps


def leases_that_expire(config: Config, place: Place) -> int:
    """How many of two leases have expired after 60 seconds without a heartbeat."""
    ledger = Ledger(GroupTable(ledger_params(config, RowCounts(24))))
    ledger.lease("replica", "request", 0, 0, 2, 0.0)
    return ledger.expire(60.0)


def attempts_at_a_group(config: Config, place: Place) -> int:
    """How often a group is leased whose replica dies each time."""
    ledger = Ledger(GroupTable(ledger_params(config, RowCounts(24))))
    first, attempts = None, 0
    while attempts < 20:
        (group,) = ledger.lease("replica", f"request-{attempts}", 0, 0, 1, 0.0).groups
        first = first or group.id
        if group.id != first:
            break
        attempts += 1
        ledger.replica_gone("replica", failed=True)
    return attempts


sizes = {"train.train_batch_per_replica": (8, 16), "rollout.n_generation": (4, 2)}
ahead = under(POLICY, allowed_outdated_steps=(4, 2), on_policy=(False, True))
watch(groups_granted_ahead, changed(grpo, BUSY), sizes | ahead)
watch(groups_granted_ahead, changed(grpo, {"train.max_num_steps": 2}), {"controller.oversample": (1.0, 2.0)})
steps = under("train", epoch=(1, 2), max_num_steps=(3, 5), train_batch_per_replica=(8, 16))
watch(steps_of_the_job, changed(grpo, BUSY), steps)
watch(leases_that_expire, grpo, {"controller.lease_timeout": (120.0, 30.0)})
watch(attempts_at_a_group, grpo, {"controller.max_attempts": (5, 2)})


def number_of_replicas(config: Config, place: Place) -> list[tuple[float, int]]:
    """When the number of rollout replicas becomes which, in a job that needs three for ten minutes, and then one.

    A step takes 8 seconds of work on 6 groups; a replica makes 1 group in 4 seconds, later in 1.
    """
    limits, batch = scale_limits(config), 6
    scaling = ReplicaScaling(limits, config.autoscale.interval, PastDecisions(limits.minimum), 0.0)
    made, stock, left, changes, number = 0.0, 0.0, 0, [(0.0, limits.minimum)], limits.minimum
    scaling.trainer(0.0, "waits")
    for second in range(1, 2400):
        now, speed = float(second), 0.25 if second < 600 else 1.0
        grown = min(number * speed, 3 * batch - stock)
        made, stock, left = made + grown, stock + grown, left - 1
        if left == 0:
            scaling.committed(now, batch)
        if left <= 0:
            scaling.trainer(now, "works" if stock >= batch else "waits")
            stock, left = (stock - batch, 8) if stock >= batch else (stock, 0)
        asked = 4 * number if grown < number * speed else 0
        held = 4 * number - asked if asked == 0 else 1
        seen = Sight([f"rollout-{i}" for i in range(number)], held, asked, 0, int(made), 10 * int(made))
        decision = scaling.look(now, seen)
        if decision is not None and decision.desired != number:
            number = decision.desired
            changes.append((now, number))
    return changes


ELASTIC = {"autoscale.enable": True, "rollout.parallelism.n_init_replicas": 2, "autoscale.scale_down_delay": 100.0}
limits = under("autoscale", enable=(True, False), min_replicas=(1, 2), max_replicas=(8, 2))
pace = under("autoscale", interval=(30.0, 50.0), target_wait=(0.1, 0.9), scale_down_delay=(100.0, 300.0))
watch(number_of_replicas, changed(grpo, ELASTIC), limits | pace)

# ---- a controller ---------------------------------------------------------------------------------------------


@dataclass
class Stage:
    """A controller with a trainer that has published version 0, and a rollout replica that holds it."""

    served: ServedController
    trainer: Trainer
    rollout: Rollout
    user: Client

    def states(self) -> dict[str, int]:
        """Groups by state and by why they were dropped."""
        ledger = self.user.send(api.ledger())
        return {**ledger.states, **ledger.dropped}


@contextmanager
def staged(config: Config, place: Place, register: bool = True) -> Iterator[Stage]:
    """The stage of a job, ended with the block."""
    run_dir = make_run_dir(place.directory() / "run", config)
    with served_controller(run_dir, place.valkey.url) as served:
        clients = [served.client(role) for role in ("policy", "rollout", "user")]
        stage = Stage(served, Trainer(clients[0]), Rollout(clients[1]), clients[2])
        try:
            if register:
                stage.trainer.register()
                stage.trainer.publish(0)
                stage.rollout.register()
            yield stage
        finally:
            for client in clients:
                client.close()


def registration(config: Config, place: Place) -> dict[str, Any]:
    """The reply to a replica's registration."""
    with staged(config, place) as stage:
        reply = stage.rollout.reply
        shown = {"heartbeat_interval", "heartbeat_timeout", "job_seed", "mode"}
        store = reply.weight_store.removeprefix(reply.run_dir)
        return {**reply.model_dump(include=shown), "store": store, "rows": sorted(reply.rows_files)}


def supervised_registration(config: Config, place: Place) -> tuple[str, int]:
    """The reply to a supervised trainer's registration."""
    with staged(config, place, register=False) as stage:
        reply = stage.trainer.register()
        return reply.mode, reply.total_steps


def status(config: Config, place: Place) -> tuple[str, str]:
    """Under which names the job is shown."""
    with staged(config, place, register=False) as stage:
        shown = stage.user.send(api.job())
        return shown.project, shown.name


def lost_after_a_silence(config: Config, place: Place) -> list[str]:
    """States of the replicas after ten seconds without a heartbeat."""
    with staged(config, place) as stage:
        stage.served.skip(10.0)
        return [replica.state for replica in stage.user.send(api.replicas())]


def life_of_the_lock(config: Config, place: Place) -> bool:
    """Whether the controller's lock would still be there half a minute from now."""
    with staged(config, place, register=False) as stage, place.valkey.client() as client:
        left: Any = client.pttl(f"cosmos:{stage.served.job.job_id}:lock")
        return int(left) > 30_000


def phase_without_replicas(config: Config, place: Place) -> m.Phase:
    """The phase of a job to which nobody has come for a minute."""
    with staged(config, place, register=False) as stage:
        stage.served.skip(60.0)
        return stage.user.send(api.job()).phase


watch(
    registration,
    grpo,
    {
        "controller.heartbeat_interval": (2.0, 1.0),
        "controller.heartbeat_timeout": (15.0, 20.0),
        "train.seed": (1, 2),
        "train.local_dataset": (True, False),
        "weight_sync.store": ("", Made(lambda place: str(place.root / "weights"))),
    },
)
watch(supervised_registration, changed(sft, {"train.max_num_steps": 2}), {"train.max_num_steps": (1, 2)})
watch(supervised_registration, sft, {"train.epoch": (1, 2), "train.train_batch_per_replica": (8, 4)})
watch(status, grpo, {"logging.project_name": ("cosmos_rl", "mine"), "logging.experiment_name": ("first", "second")})
watch(lost_after_a_silence, grpo, {"controller.heartbeat_timeout": (15.0, 5.0)})
watch(life_of_the_lock, grpo, {"controller.lock_timeout": (10.0, 60.0)})
watch(phase_without_replicas, grpo, {"controller.start_timeout": (600.0, 30.0)})

# ---- leases ---------------------------------------------------------------------------------------------------


def leased_groups(config: Config, place: Place) -> list[tuple[str, list[int]]]:
    """Which rows are leased first, and with which seeds for their samples."""
    with staged(config, place) as stage:
        return [(group.row["prompt"], group.seeds) for group in stage.rollout.lease(4).groups]


def leased_to_old_weights(config: Config, place: Place) -> int:
    """How many groups a replica gets that still holds version 0 when there is version 1."""
    with staged(config, place) as stage:
        _make_batch(stage, 0)
        stage.trainer.commit(0)
        stage.trainer.publish(1)
        return len(stage.rollout.lease(4).groups)


def published_after(config: Config, place: Place) -> list[bool]:
    """After which of two commits the trainer has to publish."""
    with staged(config, place) as stage:
        return [train_step(stage.trainer, stage.rollout, step).publish for step in range(2)]


def after_a_failed_reward(config: Config, place: Place) -> dict[str, int]:
    """States of the groups when a sample of the only one came with an error."""
    with staged(config, place) as stage:
        (group,) = stage.rollout.lease(1).groups
        for index in range(len(group.seeds)):
            failed = {"score": None, "error": "TimeoutError: too slow", "rewards": {}} if index == 0 else {}
            stage.rollout.push(group, make_header(index, 0, **failed))
        return stage.states()


def files_of_samples(config: Config, place: Place) -> list[str]:
    """Files of samples after two steps in each of which the text of a failed one came."""
    with staged(config, place) as stage:
        fits = config.logging.sample_bytes > 10
        folder = sample_file.folder_of(stage.served.job.run_dir)
        for step in range(2):
            stage.rollout.update()
            (group,) = stage.rollout.lease(1).groups
            header = make_header(0, step, score=None, error="ValueError: no", rewards={})
            stage.rollout.push(group, header, make_frame(header, "no"))
            until(lambda: not fits or sample_file.find(folder, step=step), "the sample is filed")  # noqa: B023
            stage.rollout.client.send(api.release(group.lease_id))
            _make_batch(stage, step)
            stage.trainer.commit(step)
            stage.trainer.publish(step + 1)
        return [path.name for path in sorted(folder.glob("*"))]


def files_of_answers(config: Config, place: Place) -> int:
    """Files of answers after a step."""
    with staged(config, place) as stage:
        _make_batch(stage, 0)
        stage.trainer.commit(0)
        directory = config.logging.samples_dir
        return len(list(Path(directory).glob("*/train/*"))) if directory else 0


def phase_after_an_outage_of_rewards(config: Config, place: Place) -> m.Phase:
    """The phase of a job whose rewards have not been reached for a minute."""
    with staged(config, place) as stage:
        groups = stage.rollout.lease(3).groups
        for group, seconds in zip(groups, (0.0, 0.0, 60.0), strict=True):
            stage.served.skip(seconds)
            stage.rollout.finish([group], score=None, rewards={}, error="TimeoutError: too slow", outage=True)
        return stage.user.send(api.job()).phase


def after_equal_rewards(config: Config, place: Place) -> dict[str, int]:
    """States of the groups when all samples of the only one were worth the same."""
    with staged(config, place) as stage:
        (group,) = stage.rollout.lease(1).groups
        stage.rollout.finish([group], score=1.0, rewards={"boxed_math": 1.0})
        return stage.states()


def phase_after_equal_rewards(config: Config, place: Place) -> m.Phase:
    """Phase of the job when three groups were dropped and there is none for a step of two."""
    with staged(config, place) as stage:
        for _ in range(3):
            stage.rollout.finish(stage.rollout.lease(1).groups, score=1.0, rewards={"boxed_math": 1.0})
        return stage.user.send(api.job()).phase


def after_waiting_for_a_late_group(config: Config, place: Place) -> dict[str, int]:
    """States of the groups when one of the two of a step has not come for a minute."""
    with staged(config, place) as stage:
        groups = stage.rollout.lease(2).groups
        stage.rollout.finish(groups[:1])
        stage.trainer.batch(0)
        stage.served.call(partial(setattr, stage.served, "_skipped", 60.0))
        stage.trainer.beat()
        stage.rollout.beat()
        stage.trainer.batch(0)
        return stage.states()


watch(
    leased_groups,
    grpo,
    {
        "train.seed": (1, 2),
        "rollout.seed": (1, 2),
        "rollout.sampling_config.seed": (1, 2),
        "rollout.n_generation": (4, 2),
        f"{POLICY}.dataloader_shuffle": (True, False),
    },
)
watch(leased_to_old_weights, changed(grpo, BUSY), {f"{POLICY}.outdated_rollout_fetch_batch_size": (2, 1)})
watch(published_after, grpo, {"train.sync_weight_interval": (1, 2)})
watch(after_a_failed_reward, grpo, {"reward.on_error": ("mask", "drop")})
unhurried = changed(grpo, BUSY | under("controller", heartbeat_timeout=300.0, lease_timeout=300.0))
watch(phase_after_an_outage_of_rewards, unhurried, {"reward.outage_timeout": (1800.0, 30.0)})
watch(files_of_samples, grpo, {"logging.sample_bytes": (1_000_000, 10)})
watch(files_of_answers, grpo, {"logging.samples_dir": ("", Made(lambda place: str(place.directory())))})
watch(after_equal_rewards, grpo, {f"{POLICY}.filter_reward_metric": ([], ["boxed_math"])})
filtering = changed(grpo, BUSY | under(POLICY, filter_reward_metric=["boxed_math"]))
watch(phase_after_equal_rewards, filtering, under(POLICY, max_retry_for_on_policy=(2, 1)))
patient = changed(unhurried, under(POLICY, on_policy=True))
dropping = With("drop", {"controller.straggler_timeout": 30.0})
watch(after_waiting_for_a_late_group, patient, under("controller", on_stale=("wait", dropping)))
impatient = changed(patient, under("controller", on_stale="drop", straggler_timeout=90.0))
watch(after_waiting_for_a_late_group, impatient, under("controller", straggler_timeout=(90.0, 30.0)))

# ---- weights and validation -----------------------------------------------------------------------------------


def publications_that_may_go(config: Config, place: Place) -> list[int]:
    """Which of five publications the trainer may remove."""
    with staged(config, place) as stage:
        gone: set[int] = set()
        for step in range(4):
            _make_batch(stage, step)
            stage.trainer.commit(step)
            gone |= set(stage.trainer.publish(step + 1).collectable)
            stage.rollout.update()
        return sorted(gone)


def _make_batch(stage: Stage, step: int) -> None:
    while stage.trainer.batch(step) is None:
        groups = stage.rollout.lease(2).groups
        stage.rollout.finish(groups) if groups else stage.rollout.update()


def validated_versions(config: Config, place: Place) -> list[int]:
    """Which of the first three versions are scored."""
    with staged(config, place) as stage:
        for step in range(2):
            _make_batch(stage, step)
            stage.trainer.commit(step)
            stage.trainer.publish(step + 1)
            stage.rollout.update()
        return [record.version for record in stage.user.send(api.validations())]


def validation_leases(config: Config, place: Place) -> list[tuple[int, list[int]]]:
    """Validation groups that each of two replicas gets, with the samples of each."""
    with staged(config, place) as stage:
        other = Rollout(stage.rollout.client, "rollout-1")
        other.register()
        leases = [replica.lease(3).groups for replica in (stage.rollout, other)]
        scored = [[group for group in groups if group.kind == "validation"] for groups in leases]
        return [(len(groups), [len(group.seeds) for group in groups]) for groups in scored]


def passed(config: Config, place: Place) -> list[float]:
    """pass@1 of a validation in which all samples have a score of 0.5."""
    with staged(config, place) as stage:
        stage.rollout.finish(stage.rollout.lease(64).groups, score=0.5)
        return [record.scores.passed[1].value for record in stage.user.send(api.validations()) if record.scores]


def round_of_a_set(config: Config, place: Place) -> dict[str, float]:
    """Estimates of one of several sets, whose samples all have a score of 0.5."""
    validation = Validation(validation_params(config, 1, ["a"]))
    validation.published(0, final=False)
    (group,) = validation.lease("a", "request", 0, 1, 1, 0.0)
    for index in range(validation.params.samples_of(0)):
        validation.push(
            validation.group_name(group), group.lease_id or "", index, make_header(index, 0, score=0.5), 1.0
        )
    return {name: estimate.value for name, estimate in estimates_of(validation.records[0].sources["a"]).items()}


watch(publications_that_may_go, grpo, {"weight_sync.keep": (1, 3)})
validating = changed(grpo, {"validation.enable": True, "validation.dataset.name": "synthetic:addition"})
watch(validated_versions, validating, under("validation", freq=(20, 1), before=(True, False), enable=(True, False)))
watch(passed, validating, under("validation", pass_score=(1.0, 0.5)))
two = changed(validating, {"validation.batch_size": 1, "rollout.parallelism.n_init_replicas": 2})
sets = {"validation.enable": True, "validation.dataset": {"part": [{"name": "synthetic:addition", "source": "a"}]}}
of_a_set = changed(grpo, sets)
watch(round_of_a_set, of_a_set, under("validation.dataset.part", pass_score=(UNSET, 0.5), n_generation=(UNSET, 2)))
watch(validation_leases, two, under("validation", batch_size=(1, 2), n_generation=(1, 2), max_replicas=(1, 2)))

# ---- the process ----------------------------------------------------------------------------------------------


def large_request(config: Config, place: Place) -> str:
    """What becomes of a sample of four thousand tokens."""
    with staged(config, place) as stage:
        (group,) = stage.rollout.lease(1).groups
        try:
            header = {"prompt_tokens": 3, "response_tokens": 60, "total_tokens": 63}
            stage.rollout.finish([group], tokens=63, **header)
        except ControllerError as error:
            return type(error).__name__
        return "taken"


def request_beside_a_slow_one(config: Config, place: Place) -> int:
    """Status of a request of 128 KiB while another one has sent most of its 128 KiB."""
    with staged(config, place) as stage:
        host, port = stage.served.url.removeprefix("http://").split(":")
        size = 2 * SMALL_BODY
        head = f"POST /v1/samples HTTP/1.1\r\nhost: {host}\r\ncontent-length: {size}\r\n"
        authorization = f"authorization: Bearer {TOKENS['rollout']}\r\n\r\n"
        with socket.create_connection((host, int(port)), 10) as slow:
            slow.sendall((head + authorization).encode() + b"x" * (size - 1))
            until(lambda: stage.served.body_limit.budget.used > 0, "the slow one")
            return _post(stage, b"x" * size)


def _post(stage: Stage, body: bytes) -> int:
    return stage.rollout.client._http.post("/v1/samples", content=body).status_code


def keys_in_redis(config: Config, place: Place) -> set[str]:
    """How the names of the job's keys begin."""
    with staged(config, place) as stage, place.valkey.client() as client:
        job = stage.trainer.reply.job_id
        return {key.decode().partition(job)[0] for key in client.keys(f"*{job}*")}


def encryption(config: Config, place: Place) -> list[str]:
    """Whom a process that calls the controller trusts, and what is wrong with the files of the controller."""
    given = environment(Role.POLICY, RunTokens("u", "r", "p"), "", "", "", config.controller.tls_ca)
    return [given.get("COSMOS_TLS_CA", ""), *(problem.message for problem in check_encryption(config)[0])]


def settings(config: Config, place: Place) -> tuple[str, int, str]:
    """Where the process listens, and which server it uses."""
    found = ServerSettings.read(make_run_dir(place.directory() / "run", config), None, None, _tokens(config))
    return found.host, found.port, found.redis_url


def _tokens(config: Config) -> dict[str, str]:
    named = {} if config.redis.url else {"COSMOS_REDIS_URL": "unix:///nowhere"}
    return named | {f"COSMOS_TOKEN_{role.upper()}": token for role, token in TOKENS.items()}


def a_server_without_a_file(config: Config, place: Place) -> str:
    """What the process says of a Redis server that keeps nothing."""
    with running_valkey("--appendonly", "no") as server:
        environ = {**_tokens(config), "COSMOS_REDIS_URL": server.url}
        found = ServerSettings.read(make_run_dir(place.directory() / "run", config), None, None, environ)

        async def outcome() -> str:
            try:
                job = await open_job(found)
            except StartError:
                return "refused"
            await job.store.close()
            return "taken"

        return asyncio.run(outcome())


def file_of_a_payload(config: Config, place: Place) -> tuple[str, int]:
    """What becomes of a sample of a kilobyte that a replica pushes, and how many files it leaves."""
    with staged(config, place) as stage:
        (group,) = stage.rollout.lease(1).groups
        shared = shared_payloads(config, stage.rollout.reply.job_id)
        frame = make_frame(make_header(0, 0, tokens=63))
        pushed = frame
        if shared is not None:
            entry = _Entry(group, 0, frame)
            (pushed,) = shared.put([entry])
        result = stage.rollout.push(group, make_header(0, 0, tokens=63), pushed)
        return result.detail, 0 if shared is None else len(list(shared.root.glob("e*")))


def a_directory(name: str) -> Made:
    return Made(lambda place: str(place.root / name))


watch(large_request, grpo, {"controller.max_request_bytes": (1 << 20, 1024)})
payloads = a_directory("payloads")
any_size = changed(grpo, under("controller", payload_bytes=0))
watch(file_of_a_payload, any_size, under("controller", payload_store=("", payloads)))
filed = changed(grpo, under("controller", payload_store=payloads))
watch(file_of_a_payload, filed, under("controller", payload_bytes=(0, 1 << 20)))
watch(request_beside_a_slow_one, grpo, {"controller.max_buffered_bytes": (1 << 20, 5000)})
watch(keys_in_redis, grpo, {"redis.key_prefix": ("cosmos", "mine")})
watch(settings, grpo, under("controller", host=("127.0.0.1", "0.0.0.0"), port=(0, 7777)))
watch(settings, grpo, under("redis", url=("redis://first:6379", "redis://second:6379")))
watch(a_server_without_a_file, grpo, {"controller.require_durable_redis": (False, True)})
certified = changed(grpo, {"controller.tls_cert": "server.pem", "controller.tls_key": "server.key"})
certificates = under("controller", tls_ca=("", "ca.pem"), tls_cert=("server.pem", "other.pem"))
watch(encryption, certified, certificates)
broken = changed(certified, under("controller", tls_cert=Made(lambda place: str(place.file("server.pem", "no PEM")))))
watch(encryption, broken, under("controller", tls_key=("server.key", "other.key")))
