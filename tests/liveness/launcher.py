"""Probes of the launcher: which processes with which devices, where the run is, how processes are kept alive."""

from __future__ import annotations

import asyncio
from typing import Any

from launcher.display.screen import Screen
from launcher.errors import LaunchError
from launcher.job.job import Job
from launcher.job.plan import JobPlan
from launcher.job.trackers import command as tracked_by
from launcher.nodes.announcement import HeadAddress
from launcher.nodes.head import NodeServer, Terms
from launcher.plan import nsight, redis_server
from launcher.plan.addresses import Site
from launcher.plan.machine import Machine
from launcher.plan.needs import PlacementError
from launcher.plan.placement import place as placed
from launcher.plan.rundir import RunDir, RunTokens, choose
from launcher.restarts import EndJob, Restart, Restarts, Role
from launcher.targets.kubernetes import cluster_job, render
from launcher.trackers.tables import AnswerTables
from schema.config import Config
from schema.config.rules.mesh import engines_have_such_a_mesh, stages_take_any_shape
from schema.wire import sample_file
from tests.liveness.probe import UNSET, Made, Place, Whole, With, changed, grpo, sft, under, vllm, watch
from tests.schema.wire.test_sample_file import record as sample

MACHINE = Machine(cores=8, gpus=("0", "1", "2", "3"))


def processes(config: Config, place: Place) -> list[tuple[Any, ...]] | str:
    """Every process of the job on a machine of four GPUs: its program and its environment."""
    try:
        replicas = placed(config, MACHINE)
    except PlacementError as error:
        return str(error)
    specs = [spec for replica in replicas for spec in replica.processes]
    return [(spec.name, spec.argv[-1], sorted(spec.env.items())) for spec in specs]


def command_lines(config: Config, place: Place) -> list[tuple[str, ...]]:
    """What is run for each worker."""
    specs = [spec for replica in placed(config, MACHINE) for spec in replica.processes]
    return [(*nsight.command(place.root, s.name), *s.argv) if s.profiled else s.argv for s in specs]


def answers_in_trackers(config: Config, place: Place) -> list[int]:
    """How many answers trackers get of a step and of a validation of four samples each."""
    run_dir, logging = place.directory(), config.logging
    kept = [sample(1, index, kind=kind) for index in range(4) for kind in ("train", "validation")]
    sample_file.Writer(sample_file.folder_of(run_dir), 1 << 20).append(kept)
    tables = AnswerTables(run_dir, logging.log_training_samples, logging.log_validation_samples)
    return [len(table.rows) for table in (tables.of_step(1), tables.of_validation(1)) if table]


def run_directory(config: Config, place: Place) -> tuple[str, bool]:
    """Where the run is kept, and whether it continues another one."""
    run, continued = choose(config, config.train.resume is True, 0.0)
    return str(run.path), continued


def _older_run(place: Place) -> str:
    path = place.root / "runs" / "older"
    (path / "logs").mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    return str(path.parent)


def restarts(config: Config, place: Place) -> tuple[list[float], float]:
    """When a process that always crashes is started again, and how long one may take to end."""
    setting = _job(config, place).supervisor.setting
    kept, delays = Restarts("policy-0", Role.POLICY, setting.budget), []
    while isinstance(verdict := kept.exited(0.0, 1, over=False, needed=True), Restart):
        delays.append(verdict.delay)
    assert isinstance(verdict, EndJob)
    return delays, setting.grace


def _job(config: Config, place: Place) -> Job:
    run = RunDir(place.directory())
    server = redis_server.RedisServer("unix:///nowhere")
    plan = JobPlan(
        config=config, run=run, tokens=RunTokens.fresh(), site=Site("127.0.0.1", 1, "http://127.0.0.1:1"),
        redis=server, workers=[], reuse_data=False, continued=False, env={},
    )  # fmt: skip

    async def make() -> Job:
        return Job(plan, Screen())

    return asyncio.run(make())


def nodes_awaited(config: Config, place: Place) -> list[int]:
    """The machines that the head waits for."""
    terms = Terms(config, RunDir(place.directory()), {}, ("127.0.0.1", 1))
    return list(NodeServer(HeadAddress("127.0.0.1", 1), terms, print).hosts)


def faults_of_stages(config: Config, place: Place) -> list[str]:
    """Keys that make stages wait for what they need not."""
    return [problem.key for problem in stages_take_any_shape(config)]


def faults_of_engines(config: Config, place: Place) -> list[str]:
    """Keys of a mesh that no inference engine has."""
    return [problem.key for problem in engines_have_such_a_mesh(config)]


def named_server(config: Config, place: Place) -> str:
    """The Redis server that the job uses; empty: its own."""
    server = redis_server.named(config.redis, {})
    return "" if server is None else server.url


watch(
    processes,
    vllm,
    {
        "rollout.parallelism.n_init_replicas": (1, 2),
        "rollout.parallelism.tp_size": (1, 2),
        "rollout.parallelism.dp_shard_size": (1, 2),
        "rollout.parallelism.pp_size": (1, 2),
        "policy.parallelism.dp_shard_size": (1, 2),
        "policy.parallelism.dp_replicate_size": (1, 2),
        "policy.parallelism.cp_size": (1, 2),
        "policy.parallelism.tp_size": (1, 2),
        "policy.parallelism.pp_size": (1, 2),
        "launcher.cpu_threads": (1, 2),
        "train.train_policy.type": (Whole(grpo), Whole(sft)),
        "placement.policy": ([0], [1]),
        "placement.rollout": ([2], [3]),
    },
)
watch(
    processes, changed(vllm, {"train.ckpt.enable_checkpoint": True}), {"policy.parallelism.n_init_replicas": (1, 2)}
)
held_out = {"name": "synthetic:addition", "options": {"demonstrations": True}}
scored = {"validation.reward_function": "boxed_math"}
supervised = changed(sft, under("validation", enable=True, dataset=held_out))
watch(processes, supervised, {"validation.generate": (False, With(True, scored))})
watch(nodes_awaited, changed(vllm, {"train.output_dir": "/shared/runs"}), {"placement.nodes": (1, 3)})
watch(processes, changed(vllm, {"train.train_policy.kl_beta": 0.1}), {"placement.reference": ([2], [3])})
gae = {"train.train_policy.advantage_estimator": "gae", "critic.enable": True}
watch(processes, changed(vllm, gae), {"placement.critic": ([2], [3])})
validating = changed(vllm, {"validation.enable": True, "validation.dataset.name": "synthetic:addition"})
watch(processes, validating, {"validation.only": (False, True)})
watch(processes, changed(vllm, {"policy.parallelism.dp_shard_size": -1}), {"placement.gpus_per_node": (2, 4)})
watch(
    processes,
    changed(vllm, {"placement.policy": [0], "placement.rollout": [0]}),
    {"placement.share": ("memory", "none")},
    refused=True,
)
watch(
    faults_of_stages,
    changed(vllm, {"policy.parallelism.pp_size": 2}),
    {"policy.parallelism.pp_dynamic_shape": (True, False)},
    refused=True,
)
watch(
    faults_of_engines,
    vllm,
    {
        "rollout.parallelism.cp_size": (1, 2),
        "rollout.parallelism.dp_replicate_size": (1, 2),
        "rollout.parallelism.pp_dynamic_shape": (False, True),
        "rollout.parallelism.pp_micro_batch_size": (1, 2),
        "rollout.parallelism.pp_schedule": ("1F1B", "GPipe"),
        "rollout.parallelism.sequence_parallel": (False, True),
        "rollout.parallelism.virtual_pp_size": (1, 2),
    },
    refused=True,
)
watch(command_lines, vllm, {"profiler.enable_nsys": (False, True)})
watch(
    lambda config, place: tracked_by(config, place.root),
    changed(grpo, {"logging.logger": ["wandb"]}),
    {"logging.logger": (["wandb"], ["tensorboard"]), "logging.tracker_python": ("", "/opt/other/python")},
)
watch(answers_in_trackers, grpo, {"logging.log_validation_samples": (2, 0), "logging.log_training_samples": (1, 2)})
watch(run_directory, grpo, {"train.output_dir": ("first", "second"), "train.timestamp": ("first", "second")})
watch(run_directory, changed(grpo, {"train.output_dir": Made(_older_run)}), {"train.resume": (False, True)})
watch(
    restarts,
    grpo,
    {
        "launcher.max_restarts": (3, 5),
        "launcher.restart_backoff": (1.0, 2.0),
        "launcher.restart_backoff_max": (60.0, 1.5),
        "launcher.shutdown_timeout": (30.0, 20.0),
    },
)
watch(named_server, grpo, {"redis.url": (UNSET, "redis://named:6379")})
encrypted = changed(grpo, {"redis.url": "rediss://named:6380"})
shown = changed(encrypted, {"redis.tls_cert": "client.pem", "redis.tls_key": "client.key"})
watch(named_server, encrypted, {"redis.tls_ca": ("", "ca.pem")})
watch(
    named_server, shown, {"redis.tls_cert": ("client.pem", "other.pem"), "redis.tls_key": ("client.key", "other.key")}
)


def manifests(config: Config, place: Place) -> list[Any] | str:
    """All objects of the job on Kubernetes, but for what is drawn by lot."""
    try:
        files = render(cluster_job(config, {"tokens": {}}))
    except LaunchError as error:
        return str(error)
    return [objects for name, objects in files.items() if name not in ("secrets.yaml", "config.yaml")]


in_pods = changed(
    grpo,
    {
        "train.output_dir": "outputs",
        "kubernetes.image": "registry.example.com/cosmos-launch:1.0",
        "placement.gpus_per_node": 0,
    },
)
watch(
    manifests,
    in_pods,
    {
        "kubernetes.image": ("registry.example.com/cosmos-launch:1.0", "registry.example.com/cosmos-launch:1.1"),
        "kubernetes.controller_image": ("", "registry.example.com/controller:1.0"),
        "kubernetes.policy_image": ("", "registry.example.com/policy:1.0"),
        "kubernetes.rollout_image": ("", "registry.example.com/rollout:1.0"),
        "kubernetes.pull_secrets": ([], ["registry"]),
        "kubernetes.deletion_cost": (False, True),
        "kubernetes.metrics_namespace": ("", "monitoring"),
        "kubernetes.redis_image": ("valkey/valkey:9.0", "redis:8.2"),
        "kubernetes.namespace": ("default", "training"),
        "kubernetes.claim": ("", "shared-disk"),
        "kubernetes.storage_class": ("", "shared-files"),
        "kubernetes.storage_size": ("100Gi", "1Ti"),
        "kubernetes.volume_path": ("/cosmos", "/shared"),
        "kubernetes.environment_secret": ("", "hub"),
        "kubernetes.standby": (False, True),
        "kubernetes.policy_kind": ("jobset", "statefulset"),
        "kubernetes.pod_cpus": (8, 16),
        "kubernetes.pod_memory": ("64Gi", "128Gi"),
        "kubernetes.node_selector": ({}, {"gpu": "h100"}),
        "kubernetes.rollout_selector": ({}, {"spot": "true"}),
        "kubernetes.rollout_tolerations": ([], ["spot=true:NoSchedule"]),
        "kubernetes.topology_key": ("", "topology.kubernetes.io/zone"),
    },
)
watch(manifests, changed(in_pods, {"autoscale.enable": True}), {"kubernetes.scaler": ("keda", "command")})
