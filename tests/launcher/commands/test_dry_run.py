"""The plan of a start: every process with its command, its memory summed by device, no secrets, nothing made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.commands import dry_run as dryrun
from launcher.commands.dry_run import HOST, Planned, plan, plan_lines
from launcher.commands.tiny_model import write_tiny_model
from launcher.errors import LaunchError
from launcher.job.checked import Checked
from launcher.job.request import LaunchRequest
from launcher.plan.machine import Machine, MachineMemory
from launcher.plan.rundir import RunDir
from launcher.preflight.memory import PROGRAM_BYTES
from tests.launcher.cli import cosmos
from tests.launcher.samples import config, write_job

N = 329_472
GIB = 2**30


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tiny_model(tmp_path / "tiny")
    return tmp_path


def planned(
    machine: Machine, capacity: MachineMemory, monkeypatch: pytest.MonkeyPatch, env: dict[str, str] | None = None,
    **sections: dict[str, Any],
) -> Planned:  # fmt: skip
    """The plan on a machine of our making: what there is is an input like any other."""
    monkeypatch.setattr(dryrun, "find_capacity", lambda gpus: capacity)
    policy = {"model_name_or_path": "tiny", "model_max_length": 100, **sections.pop("policy", {})}
    made = config(policy=policy, **sections)
    return plan(Checked(LaunchRequest([], [], env or {}), made, machine, []))


def test_processes_of_a_small_machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"COSMOS_REDIS_PASSWORD": "hunter2", "HOME": "/home/me"}
    found = planned(Machine(2), MachineMemory(GIB * 8, GIB * 4), monkeypatch, env, controller={"port": 1234})
    assert [process.name for process in found.processes] == [
        "redis", "data", "controller", "policy-0", "rollout-0",
    ]  # fmt: skip
    by_name = {process.name: process for process in found.processes}
    assert by_name["controller"].argv[-4:] == ("--host", "127.0.0.1", "--port", "1234")
    assert by_name["controller"].env["COSMOS_TOKEN_POLICY"] == "***"
    assert "COSMOS_REDIS_PASSWORD" not in by_name["controller"].env, "the embedded server has none"
    policy = by_name["policy-0"]
    assert policy.argv[-2:] == ("-m", "policy_worker")
    assert (policy.env["COSMOS_CONTROLLER_URL"], policy.env["COSMOS_TOKEN"]) == ("http://127.0.0.1:1234", "***")
    assert (policy.threads, policy.gpus, policy.device) == (1, (), HOST)
    assert found.run_dir.startswith(str(here / "outputs"))
    assert not found.continued
    assert sorted(path.name for path in here.iterdir()) == ["tiny"], "nothing was made"


def test_named_redis_is_not_started_and_its_password_not_shown(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"COSMOS_REDIS_PASSWORD": "hunter2"}
    redis = {"url": "redis://me:hunter2@10.0.0.1:6379/0"}
    found = planned(Machine(2), MachineMemory(GIB, GIB), monkeypatch, env, redis=redis)
    names = [process.name for process in found.processes]
    assert "redis" not in names
    service = found.processes[names.index("controller")]
    assert service.env["COSMOS_REDIS_URL"] == "redis://me:***@10.0.0.1:6379/0"
    assert service.env["COSMOS_REDIS_PASSWORD"] == "***"
    assert "hunter2" not in json.dumps(found.as_dict(), default=str) + "\n".join(plan_lines(found))


def test_memory_is_summed_by_device(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(Machine(2), MachineMemory(8 * GIB, 4 * GIB), monkeypatch, train={"param_dtype": "float32"})
    by_name = {process.name: sum(part.bytes for part in process.memory) for process in found.processes}
    policy = {part.name: part.bytes for part in found.processes[3].memory}
    assert policy["weights that are updated"] == policy["gradients"] == N * 4
    assert policy["optimizer (AdamW)"] == 2 * N * 4
    cache = found.processes[4].cache
    assert cache is not None
    assert cache.per_token == 2 * 2 * 2 * 32 * 4
    assert cache.tokens == GIB // cache.per_token, "a quarter of what is free"
    assert [part.bytes for part in found.shared] == [N * 4, 2 * N * 4], "the hosts' copy, the trainer's snapshots"
    programs = PROGRAM_BYTES["policy"] + PROGRAM_BYTES["rollout"] + PROGRAM_BYTES["controller"]
    assert found.used == {HOST: by_name["policy-0"] + by_name["rollout-0"] + 3 * N * 4 + programs}
    assert found.capacity[HOST] == 4 * GIB
    assert found.warnings == []


def test_devices_of_a_machine_with_gpus(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = ("0", "1", "GPU-x", "3")
    capacity = MachineMemory(64 * GIB, 32 * GIB, dict.fromkeys(gpus, 10 * GIB))
    found = planned(
        Machine(8, gpus), capacity, monkeypatch,
        policy={"parallelism": {"tp_size": 1, "dp_shard_size": 2}},
        rollout={"backend": "vllm", "gpu_memory_utilization": 0.5, "parallelism": {"tp_size": 2}},
    )  # fmt: skip
    devices = {process.name: (process.device, process.gpus) for process in found.processes}
    assert devices["policy-0-rank0"] == ("GPU 0", ("0", "1"))
    assert devices["policy-0-rank1"] == ("GPU 1", ("0", "1"))
    assert devices["rollout-0"] == ("GPU GPU-x", ("GPU-x", "3"))
    assert found.used["GPU 0"] == found.used["GPU 1"]
    assert found.used["GPU GPU-x"] == found.used["GPU 3"] == 5 * GIB, "vLLM takes its share, whatever it holds"
    weights = next(part.bytes for part in found.processes[3].memory if part.name.startswith("weights"))
    assert weights == N * 4 // 2
    assert found.capacity["GPU 3"] == 10 * GIB
    assert found.warnings == []


def test_a_reference_model_and_a_critic_are_counted_on_devices_of_their_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple("0123456")
    found = planned(
        Machine(8, gpus), MachineMemory(64 * GIB, 32 * GIB, dict.fromkeys(gpus, GIB) | {"3": 1, "4": 1}), monkeypatch,
        train={"param_dtype": "float32", "train_policy": {"kl_beta": 0.1, "advantage_estimator": "gae"}},
        policy={"parallelism": {"tp_size": 1, "dp_shard_size": 2}}, critic={"enable": True, "param_dtype": "float32"},
        placement={"policy": [0, 1], "reference": [3, 2], "critic": [4, 5], "rollout": [6]},
    )  # fmt: skip
    assert found.used["GPU 3"] == found.used["GPU 2"] == N * 4, "the reference model, whole on each"
    assert found.used["GPU 4"] == found.used["GPU 5"] >= 4 * N * 4 // 2, "weights, gradients and two moments"
    assert {problem.key for problem in found.warnings} == {"placement.reference", "placement.critic"}
    assert "GPU 3" in next(one.message for one in found.warnings if one.key == "placement.reference")


def test_what_does_not_fit_is_a_warning(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(Machine(2), MachineMemory(GIB, GIB // 2), monkeypatch)
    (warning,) = found.warnings
    assert "needed on host, 512 MiB are free" in warning.message
    assert "mini_batch" in warning.hint
    tiny = MachineMemory(64 * GIB, 32 * GIB, {"0": 10 * GIB, "1": 1_400_000})
    rollout = {"backend": "vllm", "gpu_memory_utilization": 0.5, "parallelism": {"tp_size": 1}}
    found = planned(Machine(8, ("0", "1")), tiny, monkeypatch, rollout=rollout)
    assert [warning.key for warning in found.warnings] == ["rollout.gpu_memory_utilization"]
    assert "less than one sequence of 100" in found.warnings[0].message


def test_a_shared_gpu_is_summed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = MachineMemory(64 * GIB, 32 * GIB, {"0": 100 * 2**20})
    rollout = {"backend": "vllm", "gpu_memory_utilization": 0.9}
    found = planned(
        Machine(8, ("0",)), capacity, monkeypatch, rollout=rollout, placement={"share": "memory"},
        train={"train_policy": {"mini_batch": 16}},
    )  # fmt: skip
    assert [warning.key for warning in found.warnings] == ["policy.model_name_or_path"]
    assert "on GPU 0" in found.warnings[0].message


def test_in_turns_a_gpu_holds_the_larger_of_both(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity, used = MachineMemory(64 * GIB, 32 * GIB, {"0": GIB}), {}
    for share in ("memory", "time"):
        rollout = {"backend": "vllm", "gpu_memory_utilization": 0.5}
        found = planned(Machine(8, ("0",)), capacity, monkeypatch, rollout=rollout, placement={"share": share})
        parts = {process.role: sum(part.bytes for part in process.memory) for process in found.processes}
        used[share] = found.used
    trainer, engine = parts["policy"], parts["rollout"]
    assert used["memory"]["GPU 0"] == trainer + engine
    assert used["time"]["GPU 0"] == max(trainer, engine)
    assert used["time"]["host"] == used["memory"]["host"] + trainer, "between its turns it is there"


def test_a_model_that_is_elsewhere_has_no_estimate(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {"model_name_or_path": "owner/elsewhere"}
    found = planned(Machine(2), MachineMemory(GIB, 1), monkeypatch, {"HF_HOME": str(here)}, policy=policy)
    assert found.model is None
    assert found.warnings == []
    text = "\n".join(plan_lines(found))
    assert "no memory estimate: owner/elsewhere is not on this machine" in text
    assert "policy-0: trains" in text


def test_supervised_training_has_no_rollouts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(Machine(2), MachineMemory(GIB * 8, GIB * 4), monkeypatch, train={"train_policy": {"type": "sft"}})
    assert [process.role for process in found.processes] == ["redis", "data", "controller", "policy"]
    assert found.shared == ()


def test_the_text_names_everything(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(Machine(2), MachineMemory(GIB * 8, GIB * 4), monkeypatch)
    text = "\n".join(plan_lines(found))
    for part in (
        "2 cores, no GPU, 4 GiB of host memory free", "329,472 parameters", "-m policy_worker", "-m controller",
        "valkey-server", "COSMOS_CPU_THREADS=1", "KV cache", "sum on host", "nothing was started",
        "steps     1 pass over the data", "policy    1 replica of one rank (one device), on the CPU",
    ):  # fmt: skip
        assert part in text, part
    data = json.loads(json.dumps(found.as_dict(), default=str))
    assert data["model"]["parameters"] == N
    assert data["processes"][4]["cache"]["tokens"] > 0
    assert data["processes"][3]["memory_bytes"] == sum(part["bytes"] for part in data["processes"][3]["memory"])


def test_a_start_that_would_be_refused_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(here / "outputs" / "mine")
    run.make()
    run.write_config(config())
    with pytest.raises(LaunchError, match="holds a run already"):
        planned(Machine(2), MachineMemory(GIB, GIB), monkeypatch, train={"timestamp": "mine"})
    again = config(train={"timestamp": "mine"}, policy={"model_name_or_path": "tiny"})
    assert plan(Checked(LaunchRequest([], [], {}, resume=""), again, Machine(2), [])).continued
    evaluation = config(train={"resume": True}, evaluation={"dataset": {"name": "answers.jsonl"}})
    assert not plan(Checked(LaunchRequest([], [], {}), evaluation, Machine(2), [])).continued, "it starts afresh"


def test_the_command_shows_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    run = cosmos("--config", path, "--dry-run", CUDA_VISIBLE_DEVICES="")
    run.says(0, "policy-0: trains, CPU threads", "rollout-0: generates", "-m rollout_worker")
    run = cosmos("--config", path, "--dry-run", "--json", CUDA_VISIBLE_DEVICES="")
    found = json.loads(run.says(0).stdout)
    names = [process["name"] for process in found["processes"]]
    assert names == ["redis", "data", "controller", "policy-0", "rollout-0"]
    assert found["run_dir"].startswith(str(tmp_path / "out"))
    assert found["model"] is None
    assert "no safetensors files" in found["no_model"]
    assert not (tmp_path / "out").exists()


def test_a_laptop_plans_for_a_machine_that_is_described(tmp_path: Path) -> None:
    """What is missing here is a warning, what does not fit there is one too, and no GPU is opened."""
    path, model = write_job(tmp_path), tmp_path / "tiny"
    write_tiny_model(model)
    job = ["--config", path, "--dry-run", "--set", f'policy.model_name_or_path="{model}"']
    machine = ["--gpus", "8", "--gpu-memory", "80", "--cores", "96", "--host-memory", "1024"]
    run = cosmos(*job, *machine).says(0, "machine   96 cores, 8 GPUs, 1 TiB of host memory free (as described)")
    run.says(0, "policy-0: trains, GPU 0, CPU threads 48", "sum on GPU 1", "of 80 GiB")
    large = ["--set", "train.train_policy.mini_batch=16"]
    small = cosmos(*job, *large, "--gpus", "2", "--gpu-memory", "0.1", "--json").says(0)
    found = json.loads(small.stdout)
    assert (found["machine"]["gpus"], found["machine"]["is_here"]) == (["0", "1"], False)
    assert found["capacity"] == {"host": 0, "GPU 0": 2**30 // 10, "GPU 1": 2**30 // 10}
    assert any("GPU 0" in warning["message"] for warning in found["warnings"]), "more than it has"
    cosmos(*job, "--set", "policy.parallelism.dp_shard_size=8", "--gpus", "2").complains(2, "the job needs 9 GPUs")
    cosmos(*job, "--gpu-memory", "80").complains(2, "--gpu-memory needs --dry-run --gpus")
    cosmos(*job[:2], "--gpus", "8").complains(2, "--gpus needs --dry-run")


def test_a_configuration_is_validated_for_another_machine(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    wide = ["validate", path, "--set", "policy.parallelism.dp_shard_size=6"]
    assert "would share" in cosmos(*wide).says(0).stderr
    assert "would share" not in cosmos(*wide, "--gpus", "8").says(0).stderr
    assert "the job needs 7 GPUs" in cosmos(*wide, "--gpus", "2").says(0).stderr


def test_the_summary_says_what_is_trained_by_whom(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(
        Machine(8, ("0", "1")), MachineMemory(GIB * 8, GIB * 8, {"0": GIB * 80, "1": GIB * 80}), monkeypatch,
        placement={"nodes": 2}, policy={"parallelism": {"dp_shard_size": 3}},
        rollout={"n_generation": 4}, train={"train_batch_per_replica": 32, "max_num_steps": 7},
    )  # fmt: skip
    assert dict(found.summary) == {
        "steps": "7 steps at most, 1 pass over the data",
        "batch": "32 samples a step: 8 groups of 4",
        "in flight": "40 groups at most (a staleness of 4 steps), 160 samples of up to 100 tokens: 16,000",
        "policy": "1 replica of 3 ranks (dp_shard_size 3), 3 GPUs, nodes 0, 1",
        "rollout": "1 replica (one device), 1 GPU, nodes 1",
    }
    assert found.used.keys() == found.capacity.keys()
    assert {"node 0 GPU 0", "node 1 GPU 0", "node 1 GPU 1", "node 1 host"} <= found.used.keys()
    first, last = (found.used[f"node {node} GPU 0"] for node in range(2))
    assert first == last, "the same rank's share on each"
    assert "rollout-0 on node 1 GPU 1" in "\n".join(plan_lines(found))
