"""Somebody dies in the middle of a job, by kill -9: the job goes on and the ledger adds up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from controller import api
from controller.client import Client
from schema.wire.messages import ReplicaInfo
from tests.e2e.program import ROOT, Program, check_ledger, write_config

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_killed_rollout_replica_is_survived(tmp_path: Path, model: Path, engine: str) -> None:
    config = write_config(tmp_path, model, engine=engine, steps=30)
    with Program(config) as program:
        program.until_step(3)
        program.kill("rollout_worker")
        summary = program.finish()
    check_ledger(summary, 2, trained=30 * 4)
    assert sum(count for name, count in summary["restarts"].items() if "rollout" in name) == 1


def test_a_killed_controller_comes_back_with_nothing_lost(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, steps=30)
    with Program(config) as program:
        program.until_step(3)
        program.kill("controller")
        program.until_step(12)
        program.kill("controller")
        summary = program.finish()
    ledger = check_ledger(summary, 2, trained=30 * 4)
    assert sum(ledger.staleness.values()) == 30 * 16
    assert [step["step"] for step in summary["steps"]] == list(range(30))


def test_losing_the_trainer_without_a_checkpoint_is_a_named_error(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, steps=500, rows=5000, validation=False)
    with Program(config) as program:
        program.until_step(3)
        program.kill("policy_worker")
        assert program.process.wait(120) == 1
    assert "checkpoint" in program.output()


def test_a_killed_trainer_goes_on_from_its_checkpoint(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, steps=24)
    text = config.read_text()
    config.write_text(text + '\n[train.ckpt]\nenable_checkpoint = true\nsave_freq = 5\nsave_mode = "sync"\n')
    with Program(config) as program:
        program.until_step(8)
        program.kill("policy_worker")
        summary = program.finish()
    check_ledger(summary, 2, trained=24 * 4)
    assert summary["status"]["timeline"] == 1, "training was rewound once"


def test_a_replica_joins_by_hand_works_and_drains(tmp_path: Path, model: Path) -> None:
    """Only a URL and a token: it gets config and weights from the job that runs."""
    config = write_config(tmp_path, model, steps=2000, rows=20_000, validation=False)
    with Program(config) as program:
        program.until_step(2)
        url = program.client().url
        token = (program.run_dir / ".tokens" / "rollout").read_text().strip()
        env = {key: value for key, value in os.environ.items() if not key.startswith("COSMOS_")}
        env |= {
            "COSMOS_CONTROLLER_URL": url,
            "COSMOS_TOKEN": token,
            "COSMOS_REPLICA_NAME": "by-hand",
            "COSMOS_CPU_THREADS": "1",
        }
        command = [sys.executable, "-m", "rollout_worker"]
        with subprocess.Popen(command, cwd=ROOT, env=env) as joined:
            try:

                def works(client: Client) -> ReplicaInfo | None:
                    found = [info for info in client.send(api.replicas()) if info.name == "by-hand"]
                    busy = found and found[0].gauges.get("samples_per_s", 0) > 0 and found[0].version > 0
                    return found[0] if busy else None

                info = program.until("the replica works", works)
                with program.client() as client:
                    assert client.send(api.drain(info.replica_id)).draining
                assert joined.wait(60) == 0

                def left(client: Client) -> bool:
                    found = [info for info in client.send(api.replicas()) if info.name == "by-hand"]
                    return all(info.state == "left" and info.leases == 0 for info in found)

                program.until("the replica has left", left)
            finally:
                if joined.poll() is None:
                    joined.kill()
        program.until_step(program.until_step(0).step + 2)
        with program.client() as client:
            client.send(api.operate("stop"))
        program.process.wait(60)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_ctrl_c_ends_in_order_and_leaves_nobody(tmp_path: Path, model: Path, engine: str) -> None:
    config = write_config(tmp_path, model, engine=engine, steps=2000, rows=20_000, validation=False)
    with Program(config) as program:
        program.until_step(2)
        program.note_processes()
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(60) == 130
        program.wait_no_orphans(timeout=1.0)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path, model: Path, engine: str) -> None:
    config = write_config(tmp_path, model, engine=engine, steps=2000, rows=20_000, validation=False)
    with Program(config) as program:
        program.until_step(2)
        program.note_processes()
        program.process.kill()
        program.process.wait(10)
        program.wait_no_orphans(timeout=40.0)


def test_a_crashing_replica_ends_the_job_when_its_budget_is_used_up(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, steps=2000, rows=20_000, validation=False)
    config.write_text(config.read_text().replace("cpu_threads = 1", "cpu_threads = 1\nmax_restarts = 1"))
    with Program(config) as program:
        program.until_step(2)
        first = program.pid_of("rollout_worker")
        os.kill(first, signal.SIGKILL)
        give_up = time.monotonic() + 60
        while (second := program.pid_of("rollout_worker")) == first or not psutil.pid_exists(second):
            assert time.monotonic() < give_up
            time.sleep(0.1)
        os.kill(second, signal.SIGKILL)
        assert program.process.wait(90) == 1
    assert "max_restarts" in program.output()


def test_data_that_cannot_be_prepared_is_a_clear_error(tmp_path: Path, model: Path) -> None:
    """A bad row is only found when all rows are read: exit code 2, the row by name, nobody left behind."""
    rows = [{"prompt": "1 + 1 = ?", "answer": "2"}] * 5 + [{"prompt": None, "answer": "2"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = write_config(tmp_path, model, validation=False)
    text = config.read_text().replace("synthetic:addition", str(tmp_path / "rows.jsonl"), 1)
    config.write_text(text.replace("options = { n = 200, digits = 2, phrasings = 1 }", "", 1))
    with Program(config) as program:
        assert program.process.wait(90) == 2
    output = program.output()
    assert "row 6" in output, "rows are counted from 1: " + output
    assert "`prompt`" in output
    assert "--resume" not in output
    assert "Task was destroyed" not in output
