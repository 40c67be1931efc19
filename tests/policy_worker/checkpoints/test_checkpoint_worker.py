"""`python -m policy_worker` and its checkpoints, against a real controller."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from controller.client import calls as api
from policy_worker.checkpoints.layout import look
from tests.policy_worker.job import Job
from tests.policy_worker.material import write_model
from tests.policy_worker.ranks import wait_ranks
from tests.policy_worker.test_worker import grpo_config, supervised

pytestmark = pytest.mark.slow

ASYNC = {"enable_checkpoint": True, "save_freq": 4, "save_mode": "async", "export_safetensors": False}


def losses(job: Job) -> list[float]:
    with job.controller.client() as client:
        return [record.metrics["loss"] for record in client.send(api.steps())]


def test_a_failed_save_beside_the_training_ends_it_by_name(tmp_path: Path, start: Any):
    """Then, with room on the disk again, the run goes on; its weights seed two others."""
    model = write_model(tmp_path / "model")
    job = start(supervised(model, ckpt=ASYNC, max_num_steps=16), "first")
    checkpoints = job.run_dir / "checkpoints"
    with job.stopped_before(7) as (ranks, proxy):
        job.wait_for_checkpoint("step-00000004")
        resource.prlimit(ranks[0].pid, resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        proxy.hold = None
        ((code, output),) = wait_ranks(ranks)
    assert code == 1, output
    assert "CheckpointSaveError: checkpoint of step" in output
    assert "File too large" in output
    assert "Nothing was deleted" in output
    assert (checkpoints / "latest").exists()
    assert not list(checkpoints.glob(".*"))
    ((code, output),) = wait_ranks(job.start_policy())
    assert code == 0, output
    assert "resumed from" in output
    last = look(checkpoints / "step-00000016")
    assert last.manifest.data is not None
    assert (last.manifest.data.position, last.manifest.epochs) == (128, 4)
    assert [timeline for timeline, _ in last.manifest.lineage] == sorted({t for t, _ in last.manifest.lineage})
    trained = losses(job)

    ckpt = {"load_contents": ["model"], "load_schedule": False}
    weights = start(supervised(model, ckpt=ckpt, max_num_steps=2, resume=str(last.path)), "weights")
    ((code, output),) = wait_ranks(weights.start_policy())
    assert code == 0, output
    assert "the optimizer begins anew" in output
    assert "steps and data are counted from 0" in output
    assert losses(weights)[0] < 0.7 * trained[0]  # step 0, with weights that have learned

    other = start(supervised(model, train_batch_per_replica=16, max_num_steps=10, resume=str(last.path)), "other")
    ((code, output),) = wait_ranks(other.start_policy())
    assert code == 2
    assert "CheckpointError" in output
    assert "rows of a step: 8 when it was saved, 16 now" in output


def test_signals_save(tmp_path: Path, start: Any):
    """SIGUSR1 saves and goes on, even while there is nothing to train on; SIGTERM saves and leaves."""
    config = grpo_config(write_model(tmp_path / "model"), 4, {"ckpt": {**ASYNC, "export_safetensors": True}})
    job = start(config)
    ranks = job.start_policy(2)
    checkpoints = job.run_dir / "checkpoints"
    job.wait_for_weights()
    ranks[1].send_signal(signal.SIGUSR1)  # any rank may be asked
    job.wait_for_checkpoint("latest")
    found = look(checkpoints / "step-00000000")
    assert (found.manifest.world, found.manifest.step) == (2, 0)
    exported = load_file(found.path / "export" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(exported[name], tensor), name
    ranks[0].send_signal(signal.SIGTERM)
    for code, output in wait_ranks(ranks):
        assert code == 0, output
