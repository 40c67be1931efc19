"""Which process gets what: a pure function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.machine import Machine, visible_gpus
from launcher.placement import PlacementError, controller, needs, place
from launcher.restarts import Role
from tests.launcher.samples import config


def gpus(count: int) -> tuple[str, ...]:
    return tuple(str(i) for i in range(count))


def test_on_cpu_one_rank_and_one_replica_share_the_cores():
    replicas = place(config(), Machine(cores=2))
    assert [replica.name for replica in replicas] == ["policy-0", "rollout-0"]
    policy, rollout = (replica.processes[0] for replica in replicas)
    assert policy.argv[-2:] == ("-m", "policy_worker")
    assert rollout.argv[-2:] == ("-m", "rollout_worker")
    assert policy.env["WORLD_SIZE"] == "1"
    assert policy.env["RANK"] == "0"
    assert policy.env["COSMOS_REPLICA_NAME"] == "policy-0"
    for spec in (policy, rollout):
        assert spec.env["COSMOS_CPU_THREADS"] == spec.env["OMP_NUM_THREADS"] == "1"
        assert spec.env["CUDA_VISIBLE_DEVICES"] == ""
        assert not any("TOKEN" in key for key in spec.env)
    assert replicas[0].rendezvous
    assert not replicas[1].rendezvous


def test_threads_are_cores_per_worker_process_unless_written():
    assert place(config(), Machine(cores=16))[0].processes[0].env["OMP_NUM_THREADS"] == "8"
    written = place(config(launcher={"cpu_threads": 3}), Machine(cores=16))
    assert {replica.processes[0].env["COSMOS_CPU_THREADS"] for replica in written} == {"3"}


def test_minus_one_takes_the_gpus_that_rollouts_leave():
    job = config(
        policy={"parallelism": {"dp_shard_size": -1}}, rollout={"parallelism": {"n_init_replicas": 2}}
    )
    replicas = place(job, Machine(cores=64, gpus=gpus(8)))
    ranks = replicas[0].processes
    assert [spec.name for spec in ranks] == [f"policy-0-rank{i}" for i in range(6)]
    assert [spec.env["LOCAL_RANK"] for spec in ranks] == list("012345")
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in ranks} == {"0,1,2,3,4,5"}
    assert [replica.processes[0].env["CUDA_VISIBLE_DEVICES"] for replica in replicas[1:]] == ["6", "7"]


def test_minus_one_is_one_rank_on_cpu():
    job = config(policy={"parallelism": {"dp_shard_size": -1}})
    assert needs(job, 0).policy_ranks == 1


def test_several_ranks_run_on_cpu_too():
    job = config(policy={"parallelism": {"dp_shard_size": 2}})
    ranks = place(job, Machine(cores=2))[0].processes
    assert [spec.env["RANK"] for spec in ranks] == ["0", "1"]
    assert {spec.env["WORLD_SIZE"] for spec in ranks} == {"2"}


def test_the_only_gpu_is_shared():
    replicas = place(config(), Machine(cores=8, gpus=("0",)))
    assert {replica.processes[0].env["CUDA_VISIBLE_DEVICES"] for replica in replicas} == {"0"}


def test_too_few_gpus_are_refused_with_numbers():
    job = config(policy={"parallelism": {"dp_shard_size": 4}})
    with pytest.raises(PlacementError, match=r"needs 5 GPUs .* this machine has 2"):
        place(job, Machine(cores=8, gpus=gpus(2)))


def test_supervised_training_has_no_rollout_replicas():
    job = config(train={"train_policy": {"type": "sft"}})
    assert [replica.role for replica in place(job, Machine(cores=2))] == [Role.POLICY]


@given(
    policies=st.integers(1, 3),
    shards=st.integers(1, 4),
    tp=st.integers(1, 2),
    rollouts=st.integers(1, 4),
    engine=st.integers(1, 3),
    spare=st.integers(0, 3),
)
def test_no_gpu_is_given_to_two_replicas(
    policies: int, shards: int, tp: int, rollouts: int, engine: int, spare: int
):
    job = config(
        policy={"parallelism": {"n_init_replicas": policies, "dp_shard_size": shards, "tp_size": tp}},
        rollout={"parallelism": {"n_init_replicas": rollouts, "tp_size": engine}},
    )
    total = policies * shards * tp + rollouts * engine
    replicas = place(job, Machine(cores=1, gpus=gpus(total + spare)))
    seen: list[str] = []
    for replica in replicas:
        mine = replica.processes[0].env["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(mine) == (shards * tp if replica.role is Role.POLICY else engine)
        assert len(replica.processes) == (len(mine) if replica.role is Role.POLICY else 1)
        seen += mine
    assert len(seen) == len(set(seen)) == total


def test_names_of_processes_are_unique_so_are_their_logs():
    job = config(policy={"parallelism": {"n_init_replicas": 2, "dp_shard_size": 2}})
    names = [spec.name for replica in place(job, Machine(cores=2)) for spec in replica.processes]
    assert len(names) == len(set(names)) == 5


def test_the_controller_gets_its_directory_and_address():
    spec = controller("/runs/1", "0.0.0.0", 8000).processes[0]
    assert spec.argv[-6:] == ("--run-dir", "/runs/1", "--host", "0.0.0.0", "--port", "8000")


@pytest.mark.parametrize(
    ("count", "visible", "expected"),
    [
        (2, None, ("0", "1")),
        (2, "", ()),
        (4, "3, 1", ("3", "1")),
        (2, "0,5,1", ("0",)),
        (1, "GPU-8f2a", ("GPU-8f2a",)),
        (2, "-1", ()),
        (0, "0", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_does(count: int, visible: str | None, expected: tuple[str, ...]):
    assert visible_gpus(count, visible) == expected
