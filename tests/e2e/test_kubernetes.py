"""A job of rendered manifests, pod by pod: a replica is drained, the controller killed, and nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from controller.client import calls as api
from launcher.plan.addresses import free_port
from schema.wire.messages import Phase
from tests.drill.containers import Cluster, Container
from tests.e2e.program import GROUPS, check_ledger, command, write_config

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
STEPS = 10
LABELS = {
    "metadata.labels['jobset.sigs.k8s.io/job-index']": "0",
    "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "0",
    "metadata.labels['batch.kubernetes.io/controller-uid']": "e3f1",
}


def rendered(tmp_path: Path, model: Path, engine: str = "transformers", **more: str) -> Cluster:
    config = write_config(tmp_path, model, engine=engine, steps=STEPS, validation=False)
    own = {
        "kubernetes.image": '"registry.example.com/cosmos-launch:0.1.0"',
        "kubernetes.volume_path": f'"{tmp_path}"',
        "placement.gpus_per_node": "0",
        "controller.port": str(free_port("127.0.0.1")),
        "policy.parallelism.dp_shard_size": "1",
        **more,
    }
    written = [f"--set={key}={value}" for key, value in own.items()]
    answer = command("--config", config, *written, "--target", "kubernetes", "-o", tmp_path / "manifests")
    assert answer.returncode == 0, answer.stderr
    return Cluster(tmp_path, tmp_path / "manifests")


def test_pods_of_a_job_live_through_a_drain_and_the_death_of_the_controller(model: Path, tmp_path: Path) -> None:
    with rendered(tmp_path, model) as cluster:
        cluster.start_redis()
        policy = cluster.start("policy", **LABELS)
        first, second = cluster.start("rollout", 0), cluster.start("rollout", 1)
        controller = cluster.start("controller")
        cluster.until("step 2", api.job(), lambda job: job.step >= 2)
        controller.end(signal.SIGKILL)
        first.process.send_signal(signal.SIGTERM)
        cluster.start("controller")
        assert first.wait() == 0, cluster.said()
        assert policy.wait() == 0, cluster.said()
        status = cluster.until("the end", api.job(), lambda job: job.phase is Phase.FINISHED)
        assert status.step == STEPS
        ledger = cluster.until("the last leases", api.ledger(), lambda found: found.states["leased"] == 0)
        check_ledger({"ledger": ledger.model_dump()}, bound=2, trained=STEPS * GROUPS)
        assert second.process.poll() is None
        assert second.end() == 0
        assert policy.message == "the job is finished"
    assert (tmp_path / "run" / "final" / "config.json").exists()


@pytest.mark.soak
def test_an_engine_of_two_pods_is_made_anew_when_one_dies(model: Path, tmp_path: Path) -> None:
    """As LeaderWorkerSet does: all pods of a group, under their names, on an empty folder of their own."""
    group = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1", "COSMOS_NODE_ADDRESS": "127.0.0.1"}
    with rendered(tmp_path, model, "vllm", **{"rollout.parallelism.tp_size": "2"}) as cluster:

        def start() -> list[Container]:
            return [
                cluster.start("rollout", number, {**group, "LWS_WORKER_INDEX": index})
                for number, index in ((0, "0"), ("0-1", "1"))
            ]

        cluster.start_redis()
        policy = cluster.start("policy", **LABELS)
        first = start()
        cluster.start("controller")
        cluster.until("step 2", api.job(), lambda job: job.step >= 2)
        for process in psutil.Process(first[0].process.pid).children(recursive=True):
            process.kill()
        assert first[0].end(signal.SIGKILL) == -signal.SIGKILL
        assert first[1].wait() == 1, cluster.said()
        assert "node 0 of the engine is gone" in first[1].message
        cluster.containers.remove(first[1])
        (first[0].log.parent / "replica").unlink()
        second = start()
        assert policy.wait() == 0, cluster.said()
        status = cluster.until("the end", api.job(), lambda job: job.phase is Phase.FINISHED)
        assert status.step == STEPS
        ledger = cluster.until("the last leases", api.ledger(), lambda found: found.states["leased"] == 0)
        check_ledger({"ledger": ledger.model_dump()}, bound=2, trained=STEPS * GROUPS)
        assert [one.process.poll() for one in second] == [None, None], "they would be started again"
        assert [one.end() for one in second] == [0, 0]
    assert list((tmp_path / "run" / "engines").iterdir()) == []
