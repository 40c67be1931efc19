"""A job by Slurm on two machines with lost packets between them, its rollout replica as an array that joins: it goes
on when a rank of the trainer dies on the second machine, and when it is requeued."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from controller.client import Call, Client, ControllerError
from controller.client import calls as api
from tests.e2e.held import go_on, hold
from tests.e2e.program import COMMAND, check_ledger, write_config
from tests.e2e.test_nodes import LOST, NODES, shared  # noqa: F401 - a fixture
from tests.support.namespaces import Namespaces
from tests.support.slurm import SlurmCluster
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
T = TypeVar("T")


def ask(run: Path, call: Call[T]) -> T | None:
    """The answer of the job's controller; None while there is none."""
    try:
        url = json.loads((run / "controller.json").read_text())["url"]
        with Client(url, (run / ".tokens" / "user").read_text().strip()) as client:
            return client.send(call)
    except (OSError, ControllerError):
        return None


def kill_rank_one(run: Path) -> bool:
    """Kill the process of the policy's second rank; False if there is none."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mine = process.cmdline()[-1:] == ["policy_worker"] and process.environ().get("RANK") == "1"
            if mine and any(file.path.startswith(str(run)) for file in process.open_files()):
                process.kill()
                return True
    return False


def test_a_job_goes_on_when_a_rank_dies_and_when_it_is_requeued(shared: Path, model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = hold(write_config(shared, model, steps=10, validation=False), step=6, rows=60)
    text = config.read_text().replace('timestamp = "run"\n', "")
    text = text.replace("[policy.parallelism]", "[policy.parallelism]\ndp_shard_size = 2")
    config.write_text(text + NODES + "\n[train.ckpt]\nenable_checkpoint = true\nsave_freq = 50\n")
    with Namespaces(2) as machines, SlurmCluster(tmp_path / "cluster", machines) as cluster:
        machines.lose(LOST)
        line = [str(COMMAND), "--config", str(config), "--target", "slurm", "--apply", "--rollout-array"]
        submitted = subprocess.run(
            line, env=cluster.environment, capture_output=True, text=True, cwd=shared, check=False
        )
        assert submitted.returncode == 0, submitted.stderr
        job = submitted.stdout.partition("job ")[2].partition(",")[0]
        run = shared / f"slurm-{job}"

        def logs() -> str:
            return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(shared.glob("*.log")))

        def until_answer(what: str, call: Call[T], holds: Callable[[T], bool]) -> None:
            try:
                until(lambda: (answer := ask(run, call)) is not None and holds(answer), what)
            except AssertionError as error:
                raise AssertionError(f"{error}: {logs()}") from None

        until_answer("step 3", api.job(), lambda status: status.step >= 3)
        before = ask(run, api.replicas()) or []
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        until(lambda: list((run / "checkpoints").glob("step-*")), "a checkpoint, long before it is due")
        assert kill_rank_one(run)
        pids = [replica.pid for replica in before]
        until_answer("its successor", api.replicas(), lambda found: any(one.pid not in pids for one in found))
        assert "policy-0 ended (killed by SIGKILL)" in logs()
        cluster.run("scancel", "--batch", "--signal=USR2", job)
        cluster.until_state(job, "PENDING", told=logs)
        go_on(config)
        cluster.start_again(job)
        cluster.until_state(job, "COMPLETED", told=logs)
        listed = cluster.run("squeue", "-h", "-t", "all", "-r", "-o", "%i %j").splitlines()
        (task,) = [line.split()[0] for line in listed if line.endswith("-rollout")]
        cluster.until_state(task, "COMPLETED", told=logs)
        assert "leaving" in logs() or "waiting for" in logs()
        assert min(machines.lost(number) for number in range(2)) > 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["status"]["step"] == 10
    check_ledger(summary, bound=2)
    assert json.loads((run / "starts.json").read_text())["starts"] == 1, "before this one"
