"""Whatever writes a file of a run: it follows the umask, or is private where the rule says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.job.launcher_log import LauncherLog
from launcher.plan.rundir import RunDir, RunTokens
from policy_worker.checkpoints.export import write_shards
from policy_worker.checkpoints.state import capture_rng, write_rng
from schema.util.atomic_file import replacing_directory, write_text
from schema.wire.prompts import write_prompts
from tests.security.modes import umask, wrong_modes
from tests.support.controller import make_config


def write_all(run: RunDir) -> None:
    run.make()
    run.write_config(make_config())
    run.write_tokens(RunTokens.fresh())
    run.lock()
    run.unlock()
    LauncherLog(run.launcher_json, run.logs / "launcher.log").write("starting", [])
    write_prompts(run.path / "data" / "train.safetensors", [[1]], [{}])
    with replacing_directory(run.checkpoints / "step-1") as beside:
        write_rng(beside, 0, capture_rng(torch.device("cpu")))
    with replacing_directory(run.path / "final") as beside:
        write_shards([("a", torch.zeros(2)), ("b", torch.zeros(2))], beside, shard_bytes=8)
    write_text(run.checkpoints / "latest", "step-1", durable=True)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_files_of_a_run_follow_the_umask_and_secrets_are_private(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        write_all(RunDir(tmp_path / "run"))
    assert len(list((tmp_path / "run").rglob("*"))) > 15
    assert wrong_modes(tmp_path / "run", mask) == {}
