"""The part of one pod: which processes, who is refused by name, and what is left to read of its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path

import pytest

from controller.client import calls as api
from launcher.errors import LaunchError
from launcher.plan import pods
from launcher.plan.placement import ProcessSpec
from launcher.plan.rundir import RunDir
from launcher.pods import children, pod
from launcher.pods.children import EndedChildren
from launcher.restarts import SIGNALLED, Role
from schema.config import Config
from schema.wire.messages import Phase
from tests.launcher.cli import ROOT, cosmos
from tests.launcher.samples import config, job_status
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.served import served_controller
from tests.support.valkey import ValkeyServer
from tests.support.waiting import PATIENCE, until


def run(*scripts: str, hung: Coroutine[None, None, str] | None = None) -> EndedChildren:
    specs = [
        ProcessSpec(f"p{i}", Role.POLICY, (sys.executable, "-c", text), rank=i, node=1)
        for i, text in enumerate(scripts)
    ]
    return asyncio.run(children.run(tuple(specs), lambda spec: os.environ, hung))


# ---- the plan ------------------------------------------------------------------------------------------------


def test_ranks_are_dealt_over_the_pods_of_a_replica() -> None:
    whole = config(placement={"gpus_per_node": 8, "nodes": 3}, policy={"parallelism": {"dp_shard_size": 12}})
    assert pods.pods(whole) == pods.Pods(replicas=1, each=2, ranks=12, gpus=6, rollouts=1, rollout_gpus=1)
    second = pods.of_policy(whole, 0, 1)
    assert [spec.env["RANK"] for spec in second] == [str(rank) for rank in range(6, 12)]
    assert [spec.env["LOCAL_RANK"] for spec in second] == [str(rank) for rank in range(6)]
    assert {spec.env["WORLD_SIZE"] for spec in second} == {"12"}
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in second} == {"0,1,2,3,4,5"}
    with pytest.raises(LaunchError, match="policy-0 has no pod 2"):
        pods.of_policy(whole, 0, 2)


def test_of_several_policy_replicas_there_may_be_more() -> None:
    several = {"parallelism": {"n_init_replicas": 2, "dp_shard_size": 2}}
    whole = config(
        placement={"gpus_per_node": 2, "nodes": 3}, policy=several, train={"ckpt": {"enable_checkpoint": True}}
    )
    assert pods.pods(whole).replicas == 2
    for replica in (1, 7):
        names = [spec.name for spec in pods.of_policy(whole, replica, 0)]
        assert names == [f"policy-{replica}-rank0", f"policy-{replica}-rank1"]


def test_ranks_that_do_not_fill_pods_are_refused() -> None:
    odd = config(placement={"gpus_per_node": 4, "nodes": 4}, policy={"parallelism": {"dp_shard_size": 10}})
    with pytest.raises(LaunchError, match="10 ranks of the policy cannot be dealt evenly to 3 pods"):
        pods.pods(odd)
    with pytest.raises(LaunchError, match="gpus_per_node is unset"):
        pods.pods(config())


FILE = Path("/etc/cosmos/config.json")


def test_a_pod_finds_its_part_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = config(placement={"gpus_per_node": 2, "nodes": 3}, policy={"parallelism": {"dp_shard_size": 4}})
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert [spec.name for spec in pod._specs(Role.POLICY, whole, FILE)] == ["policy-0-rank2", "policy-0-rank3"]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "x")
    with pytest.raises(LaunchError, match="JOB_COMPLETION_INDEX = 'x'"):
        pod._specs(Role.POLICY, whole, FILE)
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    monkeypatch.setenv("COSMOS_POD", "run-policy-1")
    with pytest.raises(LaunchError, match="policy-1 has no pod 0"):
        pod._specs(Role.POLICY, whole, FILE)
    (rollout,) = pod._specs(Role.ROLLOUT, whole, FILE)
    assert (rollout.env["COSMOS_REPLICA_NAME"], rollout.env["OMP_NUM_THREADS"]) == ("run-policy-1", "8")


def test_a_pod_of_an_engine_knows_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = config(placement={"gpus_per_node": 0}, train={"output_dir": "/cosmos", "timestamp": "run"})
    for name, text in (("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "1"), ("COSMOS_POD", "run-rollout-3-1")):
        monkeypatch.setenv(name, text)
    with pytest.raises(LaunchError, match="LWS_LEADER_ADDRESS is not set"):
        pod._specs(Role.ROLLOUT, whole, FILE)
    monkeypatch.setenv("LWS_LEADER_ADDRESS", "run-rollout-3.run-rollout.default")
    (second,) = pod._specs(Role.ROLLOUT, whole, FILE)
    assert second.argv[-1] == "rollout_worker.engines.vllm.follower"
    assert (
        second.env.items()
        >= {
            "COSMOS_ENGINE_NODES": "2",
            "COSMOS_ENGINE_NODE": "1",
            "COSMOS_ENGINE_LEADER": "run-rollout-3.run-rollout.default",
            "COSMOS_ENGINE_FOLDER": "/cosmos/run/engines/run-rollout-3",
            "COSMOS_ENGINE_CONFIG": str(FILE),
        }.items()
    )
    for name, text in (
        ("LWS_WORKER_INDEX", "0"), ("COSMOS_POD", "run-rollout-3"), ("COSMOS_NODE_ADDRESS", "10.0.0.7")
    ):  # fmt: skip
        monkeypatch.setenv(name, text)
    (first,) = pod._specs(Role.ROLLOUT, whole, FILE)
    assert (first.argv[-1], first.env["COSMOS_REPLICA_NAME"]) == ("rollout_worker", "run-rollout-3")
    assert first.env["COSMOS_ENGINE_LEADER"] == "10.0.0.7"
    assert first.env["COSMOS_ENGINE_FOLDER"] == second.env["COSMOS_ENGINE_FOLDER"]


def test_ranks_of_one_start_meet_and_those_of_another_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_START", "5e1f")
    monkeypatch.setenv("COSMOS_ATTEMPT", "0")
    first = pod._rendezvous()
    assert pod._rendezvous() == first
    monkeypatch.setenv("COSMOS_ATTEMPT", "1")
    second = pod._rendezvous()
    monkeypatch.setenv("COSMOS_START", "77aa")
    assert len({first, second, pod._rendezvous()}) == 3


# ---- its processes -------------------------------------------------------------------------------------------


def test_the_first_that_fails_ends_the_others_and_is_the_reason() -> None:
    sleeper = "import time; time.sleep(1000)"
    ended = run(sleeper, "import sys; print('out of luck'); sys.exit(3)")
    assert ended == EndedChildren(3, "p1: exit code 3\nout of luck", 0)


def test_who_is_hung_is_killed_and_named() -> None:
    async def hung() -> str:
        await asyncio.sleep(0.3)
        return "rollout-0 is alive, but has sent nothing for 90 s"

    sleep = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    ended = run(sleep, sleep, hung=hung())
    assert ended.code == SIGNALLED + signal.SIGKILL
    assert "rollout-0 is alive, but has sent nothing for 90 s" in ended.reason


def test_signals_are_passed_on() -> None:
    polite = "import os, signal, sys; signal.signal(15, lambda *_: sys.exit(0)); os.kill({}, 15); signal.pause()"
    assert run(polite.format(os.getpid())) == EndedChildren(0, "ended in order", signal.SIGTERM)


def test_a_policy_has_succeeded_when_the_job_is_over() -> None:
    in_order, asked = EndedChildren(0, "ended in order"), EndedChildren(0, "ended in order", signal.SIGTERM)
    finished, training = job_status(phase=Phase.FINISHED), job_status(phase=Phase.TRAINING)
    failed = job_status(phase=Phase.FAILED, last_error="no replica came")
    assert pod._verdict(Role.POLICY, in_order, finished)[0] == 0
    assert pod._verdict(Role.POLICY, asked, finished)[0] == 0
    assert pod._verdict(Role.POLICY, asked, training) == (143, "left on SIGTERM")
    assert pod._verdict(Role.POLICY, in_order, training) == (1, "left before the job was over")
    assert pod._verdict(Role.POLICY, in_order, None)[0] == 1
    assert pod._verdict(Role.POLICY, in_order, failed) == (2, "the job has failed: no replica came")
    assert pod._verdict(Role.ROLLOUT, asked, training)[0] == 0
    assert pod._verdict(Role.POLICY, EndedChildren(4, "no checkpoint"), None) == (4, "no checkpoint")


# ---- with a controller ---------------------------------------------------------------------------------------


def written(path: Path, learning_rate: float = 1e-6, cpus: int = 8) -> Config:
    """A configuration as the ConfigMap holds it: its run is `run` next to `path`."""
    train = {"output_dir": str(path.parent), "timestamp": "run", "optm_lr": learning_rate}
    whole = make_config(train=train, kubernetes={"pod_cpus": cpus})
    path.write_text(whole.model_dump_json())
    return whole


def test_a_run_goes_on_with_the_configuration_that_it_began_with(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make()
    first = written(tmp_path / "config.json")
    pod._keep_config(run, first)
    pod._keep_config(run, written(tmp_path / "config.json", cpus=3))
    assert (run.written_config() or {})["kubernetes"]["pod_cpus"] == 3
    with pytest.raises(LaunchError, match=r"differs in train\.optm_lr"):
        pod._keep_config(run, written(tmp_path / "config.json", learning_rate=0.5))


def test_one_controller_at_a_time_prepares_a_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make()
    late = pytest.raises(LaunchError, match="another controller has prepared")
    with pod._alone(run, 1.0), late, pod._alone(run, 0.0):
        pass
    with pod._alone(run, 0.0):
        pass


def test_another_configuration_or_code_is_refused_by_name(tmp_path: Path, valkey: ValkeyServer) -> None:
    path, log = tmp_path / "config.json", tmp_path / "termination-log"
    run, agreement = make_run_dir(tmp_path / "run", written(path)), tmp_path / "run" / pod.AGREEMENT
    log.touch()
    with served_controller(run, valkey.url) as served:
        env = {
            "COSMOS_CONTROLLER_URL": served.url,
            "COSMOS_TOKEN": TOKENS["rollout"],
            "COSMOS_POD": "run-rollout-x",
            "COSMOS_TERMINATION_LOG": str(log),
        }
        cosmos("pod", "rollout", "--config", path, **env).complains(2, f"{agreement} is not there")
        agreement.write_text(json.dumps(pod._facts(written(path))))
        written(path, learning_rate=0.5)
        cosmos("pod", "rollout", "--config", path, **env).complains(2, "its configuration differs in train.optm_lr")
        agreement.write_text(json.dumps(pod._facts(written(path)) | {"code": "another"}))
        cosmos("pod", "rollout", "--config", path, **env).complains(2, "its code of cosmos-launch is another one")
        assert "its code of cosmos-launch is another one" in log.read_text()


def test_packages_of_another_roles_image_are_not_compared() -> None:
    theirs = {"code": "1", "torch": "absent", "pydantic": "2.12"}
    assert pod._both(theirs, {"code": "1", "torch": "2.13", "pydantic": "2.13"}) == (
        {"code": "1", "pydantic": "2.12"},
        {"code": "1", "pydantic": "2.13"},
    )


def test_a_rollout_pod_stays_when_the_job_is_over(tmp_path: Path, valkey: ValkeyServer) -> None:
    """A Deployment would start it again and again."""
    path, log = tmp_path / "config.json", tmp_path / "log"
    run = make_run_dir(tmp_path / "run", written(path))
    (run / pod.AGREEMENT).write_text(json.dumps(pod._facts(written(path))))
    with served_controller(run, valkey.url) as served:
        with served.client() as client:
            client.send(api.operate("stop"))
        env = {"COSMOS_CONTROLLER_URL": served.url, "COSMOS_TOKEN": TOKENS["rollout"], "COSMOS_POD": "run-rollout-x"}
        argv = [sys.executable, "-m", "launcher.cli", "pod", "rollout", "--config", str(path), "--stay"]
        with log.open("w") as out:
            process = subprocess.Popen(argv, env={**os.environ, **env}, cwd=ROOT, stdout=out, stderr=out)
        until(lambda: "nothing is left to do" in log.read_text() or process.poll() is not None, "the end of the job")
        assert process.poll() is None, log.read_text()
        process.terminate()
        assert process.wait(PATIENCE) == 0
