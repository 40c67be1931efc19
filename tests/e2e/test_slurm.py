"""A job by Slurm: two nodes, and its rollout replica as an array that joins. It goes on when it is requeued."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from controller.client import Client, ControllerError
from controller.client import calls as api
from tests.e2e.held import go_on, hold
from tests.e2e.program import COMMAND, check_ledger, write_config
from tests.e2e.test_nodes import NODES, shared  # noqa: F401 - a fixture
from tests.support.slurm import SlurmCluster
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def step_of(run: Path) -> int:
    try:
        url = json.loads((run / "controller.json").read_text())["url"]
        with Client(url, (run / ".tokens" / "user").read_text().strip()) as client:
            return client.send(api.job()).step
    except (OSError, ControllerError):
        return -1


def test_a_requeued_job_goes_on_and_its_array_joins_again(shared: Path, model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = hold(write_config(shared, model, steps=10, validation=False), step=6, rows=60)
    text = config.read_text().replace('timestamp = "run"\n', "")
    text = text.replace("[policy.parallelism]", "[policy.parallelism]\ndp_shard_size = 2")
    config.write_text(text + NODES + "\n[train.ckpt]\nenable_checkpoint = true\nsave_freq = 50\n")
    with SlurmCluster(tmp_path / "cluster", 2) as cluster:
        line = [str(COMMAND), "--config", str(config), "--target", "slurm", "--apply", "--rollout-array"]
        submitted = subprocess.run(
            line, env=cluster.environment, capture_output=True, text=True, cwd=shared, check=False
        )
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.partition("job ")[2].partition(",")[0]
        run = shared / f"slurm-{job}"

        def logs() -> str:
            return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(shared.glob("*.log")))

        try:
            until(lambda: step_of(run) >= 3, "step 3")
        except AssertionError as error:
            raise AssertionError(f"{error}: {logs()}") from None
        cluster.run("scancel", "--batch", "--signal=USR2", job)
        cluster.until_state(job, "PENDING", told=logs)
        assert list((run / "checkpoints").glob("step-*")), "one was saved, long before it was due"
        go_on(config)
        cluster.start_again(job)
        cluster.until_state(job, "COMPLETED", told=logs)
        listed = cluster.run("squeue", "-h", "-t", "all", "-r", "-o", "%i %j").splitlines()
        (task,) = [line.split()[0] for line in listed if line.endswith("-rollout")]
        cluster.until_state(task, "COMPLETED", told=logs)
        assert "leaving" in logs() or "waiting for" in logs()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["status"]["step"] == 10
    check_ledger(summary, bound=2)
    assert json.loads((run / "starts.json").read_text())["starts"] == 1, "before this one"
