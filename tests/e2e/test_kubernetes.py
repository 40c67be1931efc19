"""A job of rendered manifests, pod by pod: a replica is drained, the controller killed, and nothing is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from controller.client import calls as api
from launcher.processes.supervisor import free_port
from schema.wire.messages import Phase
from tests.e2e.cluster import Cluster
from tests.e2e.program import GROUPS, check_ledger, command, write_config

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
STEPS = 10
LABELS = {
    "metadata.labels['jobset.sigs.k8s.io/job-index']": "0",
    "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "0",
    "metadata.labels['batch.kubernetes.io/controller-uid']": "e3f1",
}


def test_pods_of_a_job_live_through_a_drain_and_the_death_of_the_controller(
    model: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, model, steps=STEPS, validation=False)
    own = {
        "kubernetes.image": '"registry.example.com/cosmos-launch:0.1.0"',
        "kubernetes.volume_path": f'"{tmp_path}"',
        "placement.gpus_per_node": "0",
        "controller.port": str(free_port("127.0.0.1")),
        "policy.parallelism.dp_shard_size": "1",
    }
    written = [f"--set={key}={value}" for key, value in own.items()]
    answer = command("--config", config, *written, "--target", "kubernetes", "-o", tmp_path / "manifests")
    assert answer.returncode == 0, answer.stderr
    with Cluster(tmp_path, tmp_path / "manifests") as cluster:
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
