"""Which process gets what: a pure function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.machine import GpuFacts, Machine, parse_driver, visible_gpus
from launcher.plan.needs import PlacementError, needs
from launcher.plan.placement import controller, joined, place, place_elastic
from launcher.restarts import Role
from schema.config import Config, Problem
from schema.util.gpus import VARIABLE
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
        assert VARIABLE not in spec.env, "a job for the CPU may run on a machine with GPUs"
        assert not any("TOKEN" in key for key in spec.env)
    assert replicas[0].rendezvous
    assert not replicas[1].rendezvous


def test_threads_are_cores_per_worker_process_unless_written():
    assert place(config(), Machine(cores=16))[0].processes[0].env["OMP_NUM_THREADS"] == "8"
    written = place(config(launcher={"cpu_threads": 3}), Machine(cores=16))
    assert {replica.processes[0].env["COSMOS_CPU_THREADS"] for replica in written} == {"3"}


def test_minus_one_takes_the_gpus_that_rollouts_leave():
    job = config(policy={"parallelism": {"dp_shard_size": -1}}, rollout={"parallelism": {"n_init_replicas": 2}})
    replicas = place(job, Machine(cores=64, gpus=gpus(8)))
    ranks = replicas[0].processes
    assert [spec.name for spec in ranks] == [f"policy-0-rank{i}" for i in range(6)]
    assert [spec.env["LOCAL_RANK"] for spec in ranks] == list("012345")
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in ranks} == {"0,1,2,3,4,5"}
    assert {spec.env[VARIABLE] for spec in ranks} == {"6"}
    assert [replica.processes[0].env["CUDA_VISIBLE_DEVICES"] for replica in replicas[1:]] == ["6", "7"]


ELASTIC = {"enable": True, "max_replicas": 5}


def test_further_replicas_take_devices_that_the_start_leaves() -> None:
    job = config(
        policy={"parallelism": {"dp_shard_size": 2}}, rollout={"parallelism": {"tp_size": 2}}, autoscale=ELASTIC
    )
    first, reserve = place_elastic(job, Machine(cores=8, gpus=gpus(8)))
    assert [(one.name, one.devices) for one in first] == [("policy-0", (0, 1)), ("rollout-0", (2, 3))]
    assert [(one.name, one.devices) for one in reserve] == [("rollout-1", (4, 5)), ("rollout-2", (6, 7))]
    first, reserve = place_elastic(job, Machine(cores=8))
    assert [one.name for one in (*first, *reserve)] == ["policy-0", *(f"rollout-{i}" for i in range(5))]


def test_nothing_is_kept_for_further_replicas_where_none_can_come() -> None:
    machine, greedy = Machine(cores=8, gpus=gpus(8)), {"parallelism": {"dp_shard_size": -1}}
    for job, rollouts in (
        (config(policy=greedy, autoscale=ELASTIC), True),
        (config(autoscale={"enable": False, "max_replicas": 5}), True),
        (config(autoscale=ELASTIC), False),
    ):
        first, reserve = place_elastic(job, machine, rollouts=rollouts)
        assert first == place(job, machine, rollouts=rollouts)
        assert reserve == []


def test_minus_one_is_one_rank_on_cpu():
    job = config(policy={"parallelism": {"dp_shard_size": -1}})
    assert needs(job, 0).policy_ranks == 1


def shown(job: Config, count: int) -> dict[str, tuple[int, ...]]:
    return {replica.name: replica.devices for replica in place(job, Machine(cores=8, gpus=gpus(count)))}


def refusal(job: Config, count: int) -> Problem:
    with pytest.raises(PlacementError) as caught:
        place(job, Machine(cores=8, gpus=gpus(count)))
    assert str(caught.value) == caught.value.problem.message
    return caught.value.problem


def test_the_only_gpu_is_shared_when_that_is_asked_for():
    replicas = place(config(placement={"share": "memory"}), Machine(cores=8, gpus=("0",)))
    assert {replica.processes[0].env["CUDA_VISIBLE_DEVICES"] for replica in replicas} == {"0"}
    assert {replica.devices for replica in replicas} == {(0,)}


def test_the_only_gpu_is_not_shared_in_silence():
    problem = refusal(config(rollout={"backend": "vllm"}), 1)
    assert problem.key == "placement.share"
    assert "needs 2 GPUs" in problem.message
    assert "has 1, and none is shared" in problem.message
    assert problem.hint.startswith('write placement.share = "memory": both stay in the memory of the same GPUs')
    assert "vLLM takes 80% of it (write rollout.gpu_memory_utilization = 0.5)" in problem.hint


def test_several_gpus_can_be_shared_too():
    job = config(
        policy={"parallelism": {"dp_shard_size": -1}},
        rollout={"parallelism": {"n_init_replicas": 3}},
        placement={"share": "memory"},
    )
    assert shown(job, 4) == {"policy-0": (0, 1, 2, 3), "rollout-0": (0,), "rollout-1": (1,), "rollout-2": (2,)}
    assert "needs 3 GPUs" in refusal(job, 2).message


def test_lists_are_dealt_in_order():
    job = config(
        policy={"parallelism": {"n_init_replicas": 2, "dp_shard_size": -1}},
        rollout={"parallelism": {"n_init_replicas": 2}},
        placement={"policy": [5, 4, 1, 0], "rollout": [2, 3]},
    )
    assert shown(job, 6) == {"policy-0": (5, 4), "policy-1": (1, 0), "rollout-0": (2,), "rollout-1": (3,)}
    first = place(job, Machine(cores=8, gpus=("7", "GPU-b", "2", "3", "5", "6")))[0]
    assert first.processes[0].env["CUDA_VISIBLE_DEVICES"] == "6,5"
    assert [spec.env["WORLD_SIZE"] for spec in first.processes] == ["2", "2"]


def test_a_list_of_lists_names_the_devices_of_each_replica():
    job = config(
        rollout={"parallelism": {"n_init_replicas": 2, "tp_size": 2}},
        placement={"policy": [[4]], "rollout": [[0, 2], [1, 3]]},
    )
    assert shown(job, 5) == {"policy-0": (4,), "rollout-0": (0, 2), "rollout-1": (1, 3)}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"policy": [1]}, {"policy-0": (1,), "rollout-0": (0,)}),
        ({"rollout": [0]}, {"policy-0": (1, 2), "rollout-0": (0,)}),
        ({"rollout": [2], "share": "memory"}, {"policy-0": (2, 0, 1), "rollout-0": (2,)}),
        ({"gpus_per_node": 2}, {"policy-0": (0,), "rollout-0": (1,)}),
    ],
)
def test_the_rest_goes_to_the_other_role(placement: dict, expected: dict):
    job = config(policy={"parallelism": {"dp_shard_size": -1}}, placement=placement)
    assert shown(job, 3) == expected


def test_a_list_that_leaves_too_little_is_named():
    job = config(rollout={"parallelism": {"n_init_replicas": 2}}, placement={"policy": [0]})
    problem = refusal(job, 2)
    assert "placement.policy leaves 1" in problem.message


KL = {"train_policy": {"kl_beta": 0.1}}


def test_a_reference_model_has_one_device_for_each_rank_of_the_policy():
    job = config(train=KL, policy={"parallelism": {"dp_shard_size": -1}}, placement={"reference": [1, 3]})
    ranks = place(job, Machine(cores=8, gpus=("a", "b", "c", "d", "e")))[0].processes
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in ranks] == ["a,c,b,d"] * 2
    assert shown(job, 5) == {"policy-0": (0, 2, 1, 3), "rollout-0": (4,)}
    same = config(train=KL, placement={"policy": [1], "reference": [1]})
    assert shown(same, 2) == {"policy-0": (1,), "rollout-0": (0,)}
    shared = config(train=KL, placement={"share": "memory", "rollout": [1], "reference": [1], "gpus_per_node": 2})
    assert shown(shared, 2) == {"policy-0": (0, 1), "rollout-0": (1,)}


def test_a_critics_devices_come_after_those_of_a_reference_model():
    gae = {"train_policy": {"kl_beta": 0.1, "advantage_estimator": "gae"}}
    places = {"policy": [0, 1], "critic": [2, 3], "reference": [5, 4]}
    two = {"parallelism": {"dp_shard_size": 2}}
    job = config(train=gae, policy=two, critic={"enable": True}, placement=places)
    assert shown(job, 7) == {"policy-0": (0, 1, 5, 4, 2, 3), "rollout-0": (6,)}
    places["critic"] = [2]
    open_size = {"parallelism": {"dp_shard_size": -1}}
    problem = refusal(config(train=gae, policy=open_size, critic={"enable": True}, placement=places), 7)
    assert problem.key == "placement.critic"


def test_a_reference_model_and_a_critic_are_on_the_machines_of_their_ranks():
    gae = {"train_policy": {"kl_beta": 0.1, "advantage_estimator": "gae"}}
    places = {"nodes": 2, "gpus_per_node": 4, "policy": [0, 4], "reference": [3, 7], "critic": [2, 5]}
    machines = [Machine(8, gpus(4))] * 2

    def placed(**other: list[int]) -> list[tuple[int, str]]:
        policy = {"parallelism": {"dp_shard_size": 2, "tp_size": 1}}
        job = config(train=gae, policy=policy, critic={"enable": True}, placement=places | other)
        return [(spec.node, spec.env["CUDA_VISIBLE_DEVICES"]) for spec in place(job, *machines)[0].processes]

    assert placed() == [(0, "0,3,2"), (1, "0,3,1")]
    for other, words in (
        ({"reference": [7, 3]}, r"\[7, 3\] gives rank 0 .* device 7 on machine 1, and the rank is on machine 0"),
        ({"critic": [2, 1]}, "gives rank 1 of the policy device 1 on machine 0, and .* machine 1, of 4 GPUs"),
        ({"policy": [4, 0]}, "gives rank 0 of the policy device 3 on machine 0, and .* machine 1"),
    ):
        with pytest.raises(PlacementError, match=words) as caught:
            placed(**other)
        assert caught.value.problem.hint.startswith("name devices machine by machine in placement.policy")


def test_a_reference_model_with_too_few_or_absent_devices_is_refused():
    job = config(train=KL, policy={"parallelism": {"dp_shard_size": -1}}, placement={"reference": [1]})
    problem = refusal(job, 4)
    assert problem.key == "placement.reference"
    assert problem.message.startswith("names 1 devices, and policy.parallelism.dp_shard_size = -1 makes 2 data ranks")
    assert problem.hint.endswith("or write policy.parallelism.dp_shard_size = 1")
    assert refusal(config(train=KL, placement={"reference": [4]}), 4).message.startswith("names device 4, and")
    assert "has no GPU" in refusal(config(train=KL, placement={"reference": [2]}), 0).message


def test_devices_that_are_not_there_are_named():
    job = config(placement={"policy": [0], "rollout": [5]})
    problem = refusal(job, 2)
    assert (problem.key, problem.value) == ("placement.rollout", [5])
    assert "names device 5, and this machine has 2 GPUs for this job (0 to 1)" in problem.message
    problem = refusal(job, 0)
    assert problem.key == "placement.policy"
    assert "no GPU that the installed torch can use" in problem.message


@pytest.mark.parametrize(("found", "words"), [(2, "this machine has 2 GPUs"), (0, "this machine has no GPU")])
def test_more_gpus_than_there_are_is_refused(found: int, words: str):
    problem = refusal(config(placement={"gpus_per_node": 8}), found)
    assert problem.key == "placement.gpus_per_node"
    assert "8 GPUs are requested" in problem.message
    assert words in problem.message


def test_no_gpus_per_node_means_the_cpu():
    assert shown(config(placement={"gpus_per_node": 0}), 4) == {"policy-0": (), "rollout-0": ()}
    processes = [r.processes[0] for r in place(config(placement={"gpus_per_node": 0}), Machine(8, gpus(4)))]
    assert {process.env["CUDA_VISIBLE_DEVICES"] for process in processes} == {""}


def test_what_the_rules_refuse_is_not_placed():
    assert refusal(config(placement={"policy": [0, 0], "rollout": [1]}), 2).key == "placement.policy"


def test_too_few_gpus_are_refused_with_numbers():
    job = config(policy={"parallelism": {"dp_shard_size": 4}})
    with pytest.raises(PlacementError, match=r"needs 5 GPUs .* this machine has 2"):
        place(job, Machine(cores=8, gpus=gpus(2)))


@given(
    policies=st.integers(1, 3),
    shards=st.integers(1, 4),
    tp=st.integers(1, 2),
    rollouts=st.integers(1, 4),
    engine=st.integers(1, 3),
    spare=st.integers(0, 3),
)
def test_no_gpu_is_given_to_two_replicas(policies: int, shards: int, tp: int, rollouts: int, engine: int, spare: int):
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


numbers = st.lists(st.integers(0, 5), max_size=4) | st.lists(st.lists(st.integers(0, 5), max_size=2), max_size=2)


@given(
    policy=numbers,
    rollout=numbers,
    shards=st.sampled_from([-1, 1, 2]),
    rollouts=st.integers(1, 3),
    count=st.integers(0, 6),
    share=st.sampled_from(["none", "memory"]),
)
def test_whatever_is_listed_no_device_has_two_owners(
    policy: list, rollout: list, shards: int, rollouts: int, count: int, share: str
):
    job = config(
        policy={"parallelism": {"dp_shard_size": shards}},
        rollout={"parallelism": {"n_init_replicas": rollouts}},
        placement={"policy": policy, "rollout": rollout, "share": share},
    )
    try:
        replicas = place(job, Machine(cores=1, gpus=gpus(count)))
    except PlacementError as refused:
        error = refused
    else:
        error = None
    if error is not None:
        assert error.problem.key
        assert error.problem.hint
        return
    owned = {role: [d for r in replicas if r.role is role for d in r.devices] for role in (Role.POLICY, Role.ROLLOUT)}
    for devices in owned.values():
        assert len(devices) == len(set(devices))
        assert all(device < count for device in devices)
    if share == "none":
        assert not set(owned[Role.POLICY]) & set(owned[Role.ROLLOUT])
    if count:
        assert len(owned[Role.ROLLOUT]) == rollouts
        assert len(owned[Role.POLICY]) == len(replicas[0].processes)
    for role, listed in ((Role.POLICY, policy), (Role.ROLLOUT, rollout)):
        flat = [d for item in listed for d in (item if isinstance(item, list) else [item])]
        assert owned[role] == flat or not flat


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


def test_the_driver_tells_the_generation():
    table = "0, GPU-8f2a, 9.0\n1, GPU-77c1, [N/A]\nNo devices were found\n"
    assert parse_driver(table) == [GpuFacts("0", "GPU-8f2a", (9, 0)), GpuFacts("1", "GPU-77c1", None)]
    assert parse_driver("") == []


# ---- several machines -------------------------------------------------------------------------------------


def on_nodes(job: Config, *machines: Machine) -> list[tuple[str, int, str, str, str]]:
    """Name, node, visible GPUs, local rank and ranks there of each process."""
    return [
        (
            spec.name, spec.node, spec.env["CUDA_VISIBLE_DEVICES"],
            spec.env.get("LOCAL_RANK", ""), spec.env.get("LOCAL_WORLD_SIZE", ""),
        )
        for replica in place(job, *machines)
        for spec in replica.processes
    ]  # fmt: skip


def test_devices_are_numbered_over_the_nodes():
    job = config(
        placement={"nodes": 2, "gpus_per_node": 2},
        policy={"parallelism": {"dp_shard_size": 3}},
        rollout={"parallelism": {"n_init_replicas": 1}},
    )
    assert on_nodes(job, Machine(8, ("4", "5", "6")), Machine(8, ("GPU-a", "GPU-b"))) == [
        ("policy-0-rank0", 0, "4,5", "0", "2"),
        ("policy-0-rank1", 0, "4,5", "1", "2"),
        ("policy-0-rank2", 1, "GPU-a", "0", "1"),
        ("rollout-0", 1, "GPU-b", "", ""),
    ]


def test_without_gpus_ranks_fill_the_nodes_and_rollouts_the_emptiest():
    job = config(
        placement={"nodes": 2},
        policy={"parallelism": {"dp_shard_size": 2}},
        rollout={"parallelism": {"n_init_replicas": 3}},
    )
    found = on_nodes(job, Machine(4), Machine(2))
    assert [(name, node) for name, node, *_ in found] == [
        ("policy-0-rank0", 0), ("policy-0-rank1", 1), ("rollout-0", 1), ("rollout-1", 0), ("rollout-2", 1),
    ]  # fmt: skip
    threads = [replica.processes[0].env["OMP_NUM_THREADS"] for replica in place(job, Machine(4), Machine(6))]
    assert threads == ["2", "2", "2", "2"], "4 cores for two workers, 6 for three"
    alone = on_nodes(config(placement={"nodes": 2}), Machine(4), Machine(4))
    assert [(name, node) for name, node, *_ in alone] == [("policy-0", 0), ("rollout-0", 1)]


def test_an_engine_stays_on_one_machine():
    job = config(placement={"nodes": 2, "gpus_per_node": 3}, rollout={"parallelism": {"tp_size": 4}})
    with pytest.raises(
        PlacementError, match="rollout-0 would have devices 1, 2, 3, 4, which are on several machines"
    ):
        place(job, *[Machine(8, gpus(3))] * 2)


def test_nodes_have_as_many_gpus():
    job = config(placement={"nodes": 2})
    with pytest.raises(PlacementError, match="node 0 has 4 GPUs and node 1 has 2"):
        place(job, Machine(8, gpus(4)), Machine(8, gpus(2)))
    stated = config(placement={"nodes": 2, "gpus_per_node": 4})
    with pytest.raises(PlacementError, match="4 GPUs are requested, node 1 has 2 GPUs"):
        place(stated, Machine(8, gpus(4)), Machine(8, gpus(2)))


def test_rollouts_that_join_from_elsewhere_take_no_device():
    job = config(policy={"parallelism": {"dp_shard_size": -1}}, rollout={"parallelism": {"n_init_replicas": 2}})
    replicas = place(job, Machine(8, gpus(4)), rollouts=False)
    assert [replica.name for replica in replicas] == ["policy-0"]
    assert len(replicas[0].processes) == 4
    without, with_two = (joined(job, "rollout-7", count).processes[0].env for count in (0, 2))
    assert without["COSMOS_REPLICA_NAME"] == with_two["COSMOS_REPLICA_NAME"] == "rollout-7"
    assert VARIABLE not in without
    assert with_two[VARIABLE] == "2"


@pytest.mark.parametrize("count", [0, 2])
def test_a_job_that_only_validates_leaves_all_gpus_to_its_engines(count: int) -> None:
    only = {"enable": True, "only": True, "dataset": {"name": "synthetic:addition"}}
    job = config(
        validation=only,
        policy={"parallelism": {"dp_shard_size": -1}},
        rollout={"parallelism": {"n_init_replicas": 2}},
    )
    publisher, *engines = place(job, Machine(cores=4, gpus=gpus(count)))
    assert (publisher.name, len(publisher.processes), publisher.devices) == ("policy-0", 1, ())
    assert publisher.processes[0].env["CUDA_VISIBLE_DEVICES"] == ""
    assert [engine.devices for engine in engines] == [(0,), (1,)][:count] + [(), ()][count:]
