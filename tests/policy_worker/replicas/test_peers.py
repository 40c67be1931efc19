"""Policy replicas that train together, die and come back: the weights are those of one replica, bit for bit."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from controller.client import Refused
from controller.client import calls as api
from schema.config import Config
from schema.wire.messages import JobStatus
from tests.policy_worker.job import Job
from tests.policy_worker.material import make_config, sft_config, write_model
from tests.policy_worker.player import Player
from tests.policy_worker.ranks import start_ranks
from tests.policy_worker.test_worker import check_ledger
from tests.support.controller import TOKENS
from tests.support.effort import examples
from tests.support.forked import Forked
from tests.support.waiting import PATIENCE

STEPS = 60
PIPELINE = {"pp_size": 2, "pp_micro_batch_size": 2, "dp_shard_size": 1}


def several(
    model: Path,
    replicas: int = 2,
    steps: int = STEPS,
    exchange: str = "collective",
    profiler: dict[str, Any] | None = None,
    **mesh: int,
) -> Config:
    """Supervised training: nothing but the trainers, and steps of some milliseconds."""
    ckpt = {"enable_checkpoint": True, "save_freq": 7, "save_mode": "sync", "export_safetensors": False}
    train = {
        "optm_lr": 5e-3, "train_batch_per_replica": 8 // replicas, "epoch": 200, "max_num_steps": steps, "ckpt": ckpt,
    }  # fmt: skip
    policy = {
        "model_name_or_path": str(model), "model_max_length": 64, "exchange": exchange,
        "parallelism": {"n_init_replicas": replicas, "tp_size": 1, "dp_shard_size": -1, **mesh},
    }  # fmt: skip
    controller = {"heartbeat_interval": 0.2, "heartbeat_timeout": 10.0}
    return sft_config({"mini_batch": 2}, train, policy=policy, controller=controller, profiler=profiler or {})


class Crew:
    """The policy replicas of a job; the test is the launcher that starts them, and says who has ended."""

    def __init__(self, job: Job, world: int = 1) -> None:
        self.job, self._world = job, world
        self.ranks: dict[str, list[Forked]] = {}
        self.outputs: list[str] = []
        self._started: list[Forked] = []

    def start(self, name: str, *program: str, **environment: str) -> None:
        self.ranks[name] = start_ranks(
            self._world, program or ["policy_worker"], COSMOS_CONTROLLER_URL=self.job.controller.url,
            COSMOS_TOKEN=TOKENS["policy"], COSMOS_REPLICA_NAME=name, COSMOS_CPU_THREADS="1", **environment,
        )  # fmt: skip
        self._started += self.ranks[name]

    def kill(self, name: str) -> None:
        for rank in self.ranks[name]:
            with suppress(ProcessLookupError):
                rank.kill()
        self.ended(name)

    def ended(self, name: str) -> None:
        """Say that the processes of a replica are gone."""
        for rank in self.ranks.pop(name):
            rank.wait(PATIENCE)
            self.outputs.append(rank.output())
        with self.job.controller.client() as client, suppress(Refused):  # it may not have registered yet
            client.send(api.replica_exited(name, "killed", crashed=False))

    def look(self) -> None:
        """Start again who has ended by itself, and not in order."""
        for name, ranks in list(self.ranks.items()):
            codes = [rank.poll() for rank in ranks]
            if all(code is not None for code in codes) and any(codes):
                self.ended(name)
                self.start(name)

    def finish(self) -> JobStatus:
        give_up = time.monotonic() + PATIENCE
        while any(rank.poll() is None for ranks in self.ranks.values() for rank in ranks):
            self.look()
            assert time.monotonic() < give_up, self.text()
            time.sleep(0.02)
        assert all(rank.poll() == 0 for ranks in self.ranks.values() for rank in ranks), self.text()
        status = self.job.status()
        assert status.phase == "finished", self.text()
        return status

    def text(self) -> str:
        return "\n".join([*self.outputs, *(rank.output() for ranks in self.ranks.values() for rank in ranks)])

    def close(self) -> None:
        for rank in self._started:
            rank.close()


@pytest.fixture
def crews(start: Any) -> Any:
    made: list[Crew] = []

    def crew(config: Config, name: str, world: int = 1) -> Crew:
        made.append(Crew(start(config, name), world))
        return made[-1]

    yield crew
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("peers") / "model")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def disturb(crew: Crew, kills: int, seed: int, names: tuple[str, ...] = ("policy-0", "policy-1")) -> int:
    """Kill one after the other at random moments, and start it again; how many there were."""
    chance = random.Random(seed)
    for done in range(kills):
        give_up = time.monotonic() + chance.uniform(0.0, 1.0)
        before = crew.job.status().step
        while time.monotonic() < give_up or crew.job.status().step <= before:
            crew.look()
            time.sleep(0.005)
            if crew.job.status().step >= crew.job.status().total_steps - 2:
                return done
        name = chance.choice(names)
        crew.kill(name)
        crew.start(name)
    return kills


@pytest.mark.scaled
def test_whoever_dies_the_weights_are_those_of_one_replica(tmp_path: Path, crews: Any, model: Path) -> None:
    """Both transports; one has parts of its own, then all parts, then loads the weights of the other."""
    steps = 400 if examples(1) > 1 else STEPS
    alone = crews(several(model, steps=steps), "alone")
    alone.start("policy-0")
    alone.finish()
    assert "members=1 own_parts=2" in alone.text()
    traced = {"enable_profiler": True, "sub_profiler_config": {"do_profile": True, "wait_steps": 0}}
    for exchange, profiler in (("collective", None), ("store", traced)):
        crew = crews(several(model, steps=steps, exchange=exchange, profiler=profiler), exchange)
        crew.start("policy-0")
        crew.start("policy-1")
        assert disturb(crew, examples(1), seed=1) >= 1
        assert crew.finish().step == steps
        assert "members=2 own_parts=1" in crew.text()
        assert same(alone.job.final(), crew.job.final()), exchange
        left = [path.name for path in (crew.job.run_dir / "weights").glob("*gradients*")]
        assert left == []
    traces = {path.name.partition("-step-")[0] for path in (crew.job.run_dir / "profiles").glob("*.json.gz")}
    assert traces
    assert traces <= {"policy-0", "policy-1"}, "each has names of its own"


def test_who_is_of_another_kind_or_computes_other_numbers_is_out_and_the_job_goes_on(
    tmp_path: Path, crews: Any, model: Path
) -> None:
    """The first one is right; the next one's weights change by a bit, and it comes back with those of the first one;
    a third one is of other code; a fourth one joins late. No part is lost or computed by the wrong one."""
    steps = 150
    alone = crews(several(model, replicas=4, steps=steps), "alone")
    alone.start("policy-0")
    alone.finish()
    crew = crews(several(model, replicas=4, steps=steps), "crew")
    crew.start("policy-0")
    crew.job.wait_for(lambda: crew.job.status().step >= 2, "two steps")
    crew.start("policy-1", "tests.policy_worker.odd_program", "bit")
    crew.start("policy-2", "tests.policy_worker.odd_program", "code")
    (other,) = crew.ranks.pop("policy-2")
    assert other.wait(PATIENCE) == 6, "a restart would not help it"
    assert "cannot train with policy-0.2, it is of another kind: code: of another build, not" in other.output()
    crew.start("policy-3")
    status = crew.finish()
    assert status.step == steps
    text = crew.text()
    assert "this replica's weights are not those of the others before step" in text
    assert "members=3" in text, "the one that was out is back, next to the one that came late"
    assert same(alone.job.final(), crew.job.final())
    found = [json.loads(line) for line in (crew.job.run_dir / "events.jsonl").read_text().splitlines()]
    epochs = [list(event["data"]["members"].values()) for event in found if event["kind"] == "members"]
    assert epochs[0] == [4]
    assert [2, 2] in epochs
    assert any(len(shares) == 3 and sum(shares) == 4 for shares in epochs), "dealt by how fast each is"


@pytest.mark.soak
@pytest.mark.parametrize(
    "mesh", [{}, {"tp_size": 2, "dp_shard_size": 1}, {"cp_size": 2, "dp_shard_size": 1}, PIPELINE], ids=str
)
def test_replicas_of_two_ranks_share_parts_as_those_of_one(
    tmp_path: Path, crews: Any, model: Path, mesh: dict[str, int]
) -> None:
    """Shards, tensors, sequences or layers are cut over two processes; whole replicas die."""
    steps = 60
    alone = crews(several(model, steps=steps, **mesh), "alone", 2)
    alone.start("policy-0")
    alone.finish()
    crew = crews(several(model, steps=steps, **mesh), "crew", 2)
    crew.start("policy-0")
    crew.start("policy-1")
    assert disturb(crew, 4, seed=2) >= 1
    assert crew.finish().step == steps
    assert "members=2 own_parts=1" in crew.text()
    assert same(alone.job.final(), crew.job.final())


REINFORCED: dict[str, dict[str, Any]] = {
    "rejection": {
        "kl_beta": 0.05,
        "whiten_advantages": True,
        "rollout_correction": {"weights": "token", "reject": "token", "reject_above": 5.0},
    },
    "critic": {"advantage_estimator": "gae", "kl_in_reward": {"beta": 0.05, "type": "full"}},
}


def reinforced(model: Path, kind: str, steps: int) -> Config:
    """Two replicas that learn from the answers of a `Player`."""
    ckpt = {"enable_checkpoint": True, "save_freq": 4, "save_mode": "sync", "export_safetensors": False}
    return make_config(
        {"allowed_outdated_steps": 0, "batch_size_per_optimize": 4, **REINFORCED[kind]},
        {"max_num_steps": steps, "train_batch_per_replica": 8, "ckpt": ckpt},
        policy={
            "model_name_or_path": str(model),
            "model_max_length": 64,
            "parallelism": {"n_init_replicas": 2, "tp_size": 1, "dp_shard_size": -1},
        },
        controller={"heartbeat_interval": 0.2, "heartbeat_timeout": 10.0},
        logging={"sample_groups": 4},
    )


@pytest.mark.parametrize("kind", ["critic", pytest.param("rejection", marks=pytest.mark.soak)])
def test_the_leader_of_reinforcement_dies_and_the_next_one_publishes(
    tmp_path: Path, crews: Any, model: Path, kind: str
) -> None:
    """Log-probs of π_old and of the reference, values, and sums over all samples are known to all, whoever computed
    them; the steps are those of one replica alone, to the last bit."""
    steps = 10
    config = reinforced(model, kind, steps)
    alone = crews(config, "alone")
    alone.start("policy-0")
    with Player(alone.job.controller.url, TOKENS["rollout"]) as player:
        alone.finish()
        player.finish()
    crew = crews(config, "grpo")
    crew.start("policy-0")
    with Player(crew.job.controller.url, TOKENS["rollout"], groups=24) as player:
        crew.job.wait_for(lambda: crew.job.status().step >= 1, "a step")
        crew.start("policy-1")
        crew.job.wait_for(lambda: "members=2" in crew.text(), "a step of both")
        crew.kill("policy-0")
        player.go_on()
        crew.job.wait_for(lambda: "members=1" in crew.ranks["policy-1"][0].output(), "a step of the other one")
        crew.start("policy-0")
        status = crew.finish()
        player.finish()
    assert (status.step, status.version) == (steps, steps)
    assert player.versions == sorted(player.versions)
    published, exported = dict(player.weights), crew.job.final()
    assert all(torch.equal(tensor, published[name]) for name, tensor in exported.items())
    with crew.job.controller.client() as client:
        check_ledger(client, steps, 4)
        records = client.send(api.steps())
    with alone.job.controller.client() as client:
        expected = client.send(api.steps())
    assert same(alone.job.final(), exported)
    for one, other in zip(records, expected, strict=True):
        assert one.metrics["grad_norm"] == other.metrics["grad_norm"]
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"])
    assert [record.step for record in records] == list(range(steps))
    assert {record.metrics["optimizer_steps"] for record in records} == {4.0}
    wanted = {"critic": "critic/explained_variance", "rejection": "reference_kl"}[kind]
    assert all(record.metrics["samples"] == 16.0 and wanted in record.metrics for record in records)
