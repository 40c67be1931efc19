"""`python -m policy_worker` against a real controller; the test plays the rollout replica."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from controller.client import Client
from controller.client import calls as api
from schema.config import Config
from schema.config.rules import check_rules
from schema.config.trained import settings_digest
from schema.wire.batch_file import folder_of, path_of, read, recorded, write
from schema.wire.messages.steps import StepRecord
from tests.policy_worker.job import Job
from tests.policy_worker.material import make_config, sft_config, write_model
from tests.policy_worker.player import Player
from tests.policy_worker.ranks import replay_ranks, start_ranks, wait_ranks
from tests.policy_worker.training.test_profiles import events, inside, named
from tests.support.controller import TOKENS
from tests.support.hub import refused_worker, running_hub
from tests.support.objects import running_objects


def grpo_config(
    model: Path, steps: int, train: dict[str, Any] | None = None, keep: int = 4, **sections: Any
) -> Config:
    return make_config(
        {"allowed_outdated_steps": 1}, {"max_num_steps": steps, **(train or {})},
        policy={"model_name_or_path": str(model), "model_max_length": 64},
        controller={"heartbeat_interval": 0.2}, weight_sync={"keep": keep}, **sections,
    )  # fmt: skip


def check_replayed(lines: list[dict[str, Any]], records: Sequence[StepRecord]) -> None:
    """A replay began with the weights of the first step, and each number of each step is that of the run."""
    begin, *steps = lines
    assert begin["exact"], begin
    assert begin["steps"] == [step["step"] for step in steps]
    for step in steps:
        (record,) = [record for record in records if record.step == step["step"]]
        assert len(step["metrics"]) > 15
        assert step["metrics"].items() <= record.metrics.items()


def tree(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and time of everything in it."""
    found = {str(path.relative_to(directory)): path.lstat() for path in directory.rglob("*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def check_ledger(client: Client, steps: int, groups_per_step: int) -> None:
    ledger = client.send(api.ledger())
    assert sum(ledger.states.values()) == ledger.created
    assert ledger.states["trained"] + ledger.states["durable"] == steps * groups_per_step
    assert (ledger.over_bound, ledger.max_staleness <= ledger.bound) == (0, True)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_whole_job(tmp_path: Path, start: Any, world: int):
    model = write_model(tmp_path / "model")
    decaying = {"optm_lr": 1e-2, "optm_decay_ratio": 0.5, "optm_decay_type": "linear"}
    profiler = {"enable_profiler": True, "record_batches": 8}
    job = start(grpo_config(model, 4, decaying, keep=1, profiler=profiler))
    ranks = job.start_policy(world)
    job.ask_for_profile(first_step=1, steps=2, ranks=[world - 1])
    with Player(job.controller.url, TOKENS["rollout"]) as player, job.controller.client() as client:
        for code, output in wait_ranks(ranks):
            assert code == 0, output
        player.finish()
        status = client.send(api.job())
        steps = client.send(api.steps())
        profiles = [one.profile.state for one in client.send(api.replicas()) if one.profile is not None]
        check_ledger(client, 4, 2)
    assert profiles == ["written"], "the last thing that a trainer says"
    assert (status.phase, status.step, status.version) == ("finished", 4, 4)
    assert [record.step for record in steps] == [0, 1, 2, 3]
    for record in steps:
        assert record.metrics["samples"] == 8.0
        assert {"loss", "grad_norm", "lr", "reward_mean", "reward/right", "publish_seconds"} <= record.metrics.keys()
    assert player.versions == sorted(set(player.versions))
    assert player.versions[-1] == 4

    exported = AutoModelForCausalLM.from_pretrained(job.run_dir / "final")
    published = dict(player.weights)
    for name, tensor in job.final().items():  # the export is the last published version, bit for bit
        assert torch.equal(tensor, published.pop(name))
    assert not published
    before = AutoModelForCausalLM.from_pretrained(model)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), exported.parameters(), strict=True))
    stored = list((job.run_dir / "weights").iterdir())
    assert 1 <= len(stored) < 5  # of five versions, those that nobody needed are gone
    check_profile(job.run_dir / "profiles", f"steps-00000001-00000002-rank{world - 1}")

    before_replay = tree(job.run_dir)
    lines = replay_ranks(world, job.run_dir, tmp_path / "replay.jsonl")
    check_replayed(lines, steps)
    assert [line["ranks"] for line in lines[:1]] == [lines[0]["recorded_ranks"]] == [world]
    assert tree(job.run_dir) == before_replay
    config = Config.model_validate_json((job.run_dir / "config.json").read_bytes())
    facts = read(path_of(folder_of(job.run_dir), 0))[2]
    assert facts.settings == settings_digest(config), "as of the configuration that is written"
    if world == 2:
        check_ranks_that_read_different_batches(job.run_dir, tmp_path / "copy")


def check_ranks_that_read_different_batches(run_dir: Path, copy: Path) -> None:
    """A running job may replace files while a replay reads them: it ends, and does not hang."""
    shutil.copytree(run_dir, copy)
    table, frames, facts = read(path_of(folder_of(run_dir), 0))
    write(folder_of(copy), table.model_copy(update={"timeline": 7}), frames, facts, keep=8)
    ranks = start_ranks(2, lambda rank: ["policy_worker.replay", str(copy if rank else run_dir)])
    for code, output in wait_ranks(ranks):
        assert code == 1, output
        assert "rank 1 has read another batch of step 0 than rank 0" in output


def check_profile(folder: Path, name: str) -> None:
    """Two steps of one rank and no other, each step with what belongs to it."""
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.json.gz", f"{name}.txt"]
    trace = events(folder / f"{name}.json.gz")
    first, second = named(trace, "step")
    for step in (first, second):
        for part in ("fetch", "forward", "loss", "backward", "optimizer"):  # samples may be decoded ahead
            assert any(inside(found, step) for found in named(trace, part)), part
    waits = named(trace, "wait")
    assert min(wait["ts"] for wait in waits) < first["ts"], "the first step's own wait"
    assert max(wait["ts"] + wait["dur"] for wait in waits) <= second["ts"], "and none that was cut off"
    for between in ("wait", "publish"):
        assert [found for found in named(trace, between) if first["ts"] < found["ts"] < second["ts"]], between
        assert not any(inside(found, step) for found in named(trace, between) for step in (first, second))


@pytest.mark.slow
def test_asked_to_leave_while_it_waits(tmp_path: Path, start: Any):
    job = start(grpo_config(write_model(tmp_path / "model"), 4))
    ranks = job.start_policy()
    with job.controller.client() as client:
        job.wait_for_weights()
        ranks[0].send_signal(signal.SIGTERM)
        ((code, output),) = wait_ranks(ranks)
        assert code == 0, output
        (replica,) = client.send(api.replicas())
    assert (replica.state, replica.status) == ("left", "signal SIGTERM")
    assert not (job.run_dir / "final").exists()


@pytest.mark.slow
def test_without_a_checkpoint_a_restarted_trainer_says_that_it_cannot_go_on(tmp_path: Path, start: Any):
    job = start(grpo_config(write_model(tmp_path / "model"), 50, {"epoch": 5}))
    with Player(job.controller.url, TOKENS["rollout"], groups=8):
        ranks = job.start_policy()
        job.wait_for_step(2)
        ranks[0].kill()
        wait_ranks(ranks)
        ((code, output),) = wait_ranks(job.start_policy())
    assert code == 4
    assert "NoCheckpointError" in output
    assert "enable_checkpoint" in output


@pytest.mark.slow
def test_reinforcement_goes_on_from_its_newest_checkpoint(tmp_path: Path, start: Any):
    checkpoints = {"enable_checkpoint": True, "save_freq": 3, "max_keep": 2}
    job = start(
        grpo_config(write_model(tmp_path / "model"), 10, {"ckpt": checkpoints}, profiler={"record_batches": 3})
    )
    player = Player(job.controller.url, TOKENS["rollout"], groups=10)
    with player, job.controller.client() as client:
        ranks = job.start_policy()
        job.wait_for_step(4)
        job.wait_for_checkpoint("step-00000003")  # written beside the training
        ranks[0].kill()
        wait_ranks(ranks)
        player.go_on()
        ((code, output),) = wait_ranks(job.start_policy())
        assert code == 0, output
        player.finish()
        status, steps = client.send(api.job()), client.send(api.steps())
        check_ledger(client, 10, 2)
    assert "resumed from" in output
    assert status.timeline >= 1
    assert status.step == 10
    kept = sorted(path.name for path in (job.run_dir / "checkpoints").iterdir())
    assert kept == ["latest", "step-00000009", "step-00000010"]
    exported = job.run_dir / "checkpoints" / "step-00000010" / "export"
    for name, tensor in load_file(exported / "model.safetensors").items():
        assert torch.equal(tensor, job.final()[name])
    folder = folder_of(job.run_dir)
    assert recorded(folder) == [7, 8, 9], "the newest, and after the rewind those of the new timeline"
    assert {read(path_of(folder, step))[0].timeline for step in (7, 8, 9)} == {status.timeline}
    changed = json.loads((job.run_dir / "config.json").read_text())
    changed["train"]["optm_lr"] = 0.5
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    options = ("--first-step", "9", "--config", str(tmp_path / "changed.json"))
    warning, *lines = replay_ranks(1, job.run_dir, tmp_path / "exact.jsonl", *options)
    assert "0.001 in the checkpoint, 0.5 configured; the checkpoint's is used" in warning["text"]
    assert lines[0]["weights"].endswith("step-00000009")
    check_replayed(lines, steps)
    begin, *rest = replay_ranks(1, job.run_dir, tmp_path / "other.jsonl", "--repeat", "2")
    assert (begin["exact"], begin["weights_step"]) == (False, 0), "no earlier checkpoint exists"
    assert [(line["repeat"], line["step"]) for line in rest] == [(n, s) for n in (1, 2) for s in (7, 8, 9)]


@pytest.mark.slow
def test_training_goes_on_while_the_store_fails_and_then_catches_up(tmp_path: Path, start: Any):
    job = start(grpo_config(write_model(tmp_path / "model"), 6, profiler={"record_batches": 2}))
    store, batches = job.run_dir / "weights", folder_of(job.run_dir)
    batches.touch()
    with Player(job.controller.url, TOKENS["rollout"], groups=0) as player:
        ranks = job.start_policy()
        job.wait_for(lambda: player.versions == [0], "the first weights at the replica")
        store.rename(job.run_dir / "away")
        store.touch()
        player.go_on()
        job.wait_for_step(2)  # all that version 0 may be used for
        job.wait_for(lambda: "cannot be written" in (job.status().last_error or ""), "the trouble")
        assert job.status().version == 0
        job.wait_for(
            lambda: "record_batches: the batch of step 1" in (job.status().last_error or ""), "that trouble too"
        )
        batches.unlink()
        store.unlink()
        (job.run_dir / "away").rename(store)
        ((code, output),) = wait_ranks(ranks)
        assert code == 0, output
        player.finish()
    assert "version 2 is published later" in output
    assert recorded(batches) == [4, 5]
    assert player.versions == sorted(set(player.versions)), "one may be overtaken before it is looked at"
    assert player.versions[1] in (1, 2), "what was held up, or was owed meanwhile"
    with job.controller.client() as client:
        check_ledger(client, 6, 2)
    final = job.final()
    for name, tensor in player.weights.items():
        assert torch.equal(tensor, final[name]), name


@pytest.mark.slow
def test_a_trainer_leaves_in_time_while_its_store_hangs(tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch):
    config = grpo_config(write_model(tmp_path / "model"), 60)
    bucket = config.weight_sync.model_copy(update={"store": "s3://weights/job"})
    with running_objects("weights") as objects:
        for name, value in objects.environment.items():
            monkeypatch.setenv(name, value)
        job = start(config.model_copy(update={"weight_sync": bucket}))
        with Player(job.controller.url, TOKENS["rollout"], groups=0) as player:
            ranks = job.start_policy(2)
            job.wait_for(lambda: player.versions == [0], "the first weights at the replica")
            assert objects.process is not None
            objects.process.send_signal(signal.SIGSTOP)  # it takes connections and never answers
            player.go_on()
            job.wait_for_step(2)  # all that version 0 may be used for
            ranks[0].send_signal(signal.SIGTERM)
            for code, output in wait_ranks(ranks):
                assert code == 0, output
            objects.process.send_signal(signal.SIGCONT)
    assert "while a version is still being published" in output


@pytest.mark.slow
def test_a_killed_controller_is_waited_for(tmp_path: Path, start: Any):
    job = start(grpo_config(write_model(tmp_path / "model"), 12))
    with Player(job.controller.url, TOKENS["rollout"], groups=12) as player:
        ranks = job.start_policy()
        job.wait_for_step(2)
        job.controller.stop(signal.SIGKILL)
        player.go_on()
        job.controller.start()
        ((code, output),) = wait_ranks(ranks)
        assert code == 0, output
        player.finish()
    with job.controller.client() as client:
        check_ledger(client, 12, 2)


@pytest.mark.slow
def test_a_checkpoint_on_command_a_drain_and_a_return(tmp_path: Path, start: Any):
    job = start(grpo_config(write_model(tmp_path / "model"), 60, {"epoch": 5}))
    player = Player(job.controller.url, TOKENS["rollout"], groups=60)
    with player, job.controller.client() as client:
        ranks = job.start_policy()
        job.wait_for_step(2)
        client.send(api.operate("checkpoint"))
        job.wait_for_checkpoint("latest")
        (policy,) = [r for r in client.send(api.replicas()) if r.role == "policy"]
        client.send(api.drain(policy.replica_id))
        ((code, output),) = wait_ranks(ranks)
        assert code == 0, output
        (policy,) = [r for r in client.send(api.replicas()) if r.role == "policy"]
        assert (policy.state, policy.status) == ("left", "command drain")
        assert client.send(api.job()).step < 60
        player.go_on()
        ((code, output),) = wait_ranks(job.start_policy())
        assert code == 0, output
        assert "resumed from" in output
        player.finish()
        check_ledger(client, 60, 2)


def supervised(model: Path, validation: dict[str, Any] | None = None, **train: Any) -> Config:
    settings = {"optm_lr": 5e-3, "train_batch_per_replica": 8, "epoch": 5, "max_num_steps": 18, **train}
    policy = {"model_name_or_path": str(model), "model_max_length": 64}
    return sft_config({"mini_batch": 8}, settings, policy=policy, validation=validation or {})


def validations_of(job: Job) -> list[dict[str, Any]]:
    """The records of a job's validations, but for their times."""
    with job.controller.client() as client:
        return [record.model_dump(exclude={"at"}) for record in client.send(api.validations())]


@pytest.mark.slow
def test_supervised_training_learns_and_resumes_bit_for_bit(tmp_path: Path, start: Any):
    """So do its validations: none is lost, none counts twice, and the least loss is the best checkpoint's."""
    ckpt = {"enable_checkpoint": True, "save_freq": 5, "save_mode": "sync", "export_safetensors": False}
    config = supervised(write_model(tmp_path / "model"), {"enable": True, "freq": 5}, ckpt=ckpt)
    straight, broken = start(config, "straight"), start(config, "broken")
    for code, output in wait_ranks(straight.start_policy()):
        assert code == 0, output
    with straight.controller.client() as client:
        steps = client.send(api.steps())
    losses = [record.metrics["loss"] for record in steps]
    assert len(losses) == 18
    assert losses[-1] < 0.5 * losses[0]
    assert steps[-1].metrics["accuracy"] > steps[0].metrics["accuracy"]
    AutoModelForCausalLM.from_pretrained(straight.run_dir / "final")
    held_out = {record["version"]: record["loss"] for record in validations_of(straight)}
    assert list(held_out) == [0, 5, 10, 15, 18]
    assert held_out[18] < 0.5 * held_out[0]
    best = [
        json.loads((job.run_dir / "checkpoints" / "best.json").read_text()) for job in (straight, start_again(broken))
    ]
    loss, version = min((loss, version) for version, loss in held_out.items() if version)
    assert [(-one["score"], one["name"]) for one in best] == [(loss, f"step-{version:08d}")] * 2
    assert validations_of(broken) == validations_of(straight)
    for name, tensor in straight.final().items():
        assert torch.equal(tensor, broken.final()[name]), name


def start_again(job: Job) -> Job:
    """Kill the trainer before it commits step 8; another one trains to the end."""
    with job.stopped_before(8) as (ranks, _):
        ranks[0].kill()
        wait_ranks(ranks)
    for code, output in wait_ranks(job.start_policy()):
        assert code == 0, output
        assert "resumed from" in output
    return job


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        ({}, {"COSMOS_TOKEN": "wrong"}, "a controller that does not know this token"),
        ({"policy": {"model_name_or_path": "/nowhere"}}, {}, "policy.model_name_or_path"),
        ({"policy": {"parallelism": {"tp_size": 1, "dp_shard_size": 3}}}, {}, "dp_shard_size = 3"),
    ],
    ids=["token", "model", "mesh"],
)
def test_settings_that_cannot_work_exit_with_two(start: Any, config: Any, environment: Any, message: str):
    job = start(make_config(**config))
    ((code, output),) = wait_ranks(job.start_policy(**environment))
    assert code == 2, output
    assert message in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_model_that_only_the_trainer_can_read_is_judged_before_its_weights_are_loaded(tmp_path: Path, start: Any):
    mesh = {"tp_size": 4, "cp_size": 3, "ep_size": 3}
    policy = {"model_name_or_path": "owner/tiny", "model_revision": "v1", "parallelism": mesh}
    config = make_config(policy=policy, rollout={"backend": "vllm", "parallelism": {"tp_size": 8}})
    assert "owner/tiny" not in "".join(problem.message for problem in check_rules(config))
    with running_hub() as hub:
        hub.models["owner/tiny"] = write_model(tmp_path / "model")
        job = {"COSMOS_CONTROLLER_URL": start(config).controller.url, "COSMOS_TOKEN": TOKENS["policy"]}
        output = refused_worker(hub, "policy_worker", tmp_path / "cache", COSMOS_REPLICA_NAME="policy-0", **job)
    for fault in (
        "policy.parallelism.tp_size: 4 does not divide the 2 key/value heads of policy.model_name_or_path = owner",
        "    write policy.parallelism.tp_size = 1 or 2\n",
        "policy.parallelism.cp_size: 3 * policy.parallelism.tp_size = 4 does not divide the 4 attention heads",
        "policy.parallelism.ep_size: 3 is for experts, and policy.model_name_or_path = owner/tiny has none",
        "policy.parallelism.ep_size: this build cannot do 3 yet next to policy.parallelism.tp_size = 4",
        "rollout.parallelism.tp_size: 8 does not divide the 4 attention heads",
    ):
        assert fault in output


def test_an_incomplete_environment_exits_with_two_at_once():
    ((code, output),) = wait_ranks(start_ranks(1, ["policy_worker"]))
    assert code == 2
    assert "COSMOS_CONTROLLER_URL and COSMOS_TOKEN" in output
