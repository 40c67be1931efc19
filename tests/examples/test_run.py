"""The driver of the quickstart: which jobs it starts, and that it ends them when it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from run import foreground, jobs

from schema.config import load_config
from tests.support.waiting import PATIENCE, until

from .conftest import QUICKSTART


def options(**changes: object) -> Namespace:
    return Namespace(**{"plain": False, "engine": "transformers", "set": [], **changes})


@pytest.mark.parametrize(
    ("changes", "warm", "reinforcement", "backend", "steps", "phrasings"),
    [
        ({}, "sft.toml", "grpo.toml", "transformers", 100, 4),
        ({"plain": True}, "sft_plain.toml", "grpo_plain.toml", "transformers", 60, 1),
        ({"engine": "vllm"}, "sft.toml", "grpo_vllm.toml", "vllm", 100, 4),
        ({"engine": "vllm", "plain": True}, "sft_plain.toml", "grpo_vllm.toml", "vllm", 60, 1),
    ],
    ids=["default", "plain", "vllm", "plain vllm"],
)
def test_the_options_choose_the_jobs(
    tiny_model: Path, tmp_path: Path, changes: dict, warm: str, reinforcement: str, backend: str, steps: int,
    phrasings: int,
):  # fmt: skip
    for name in ("model", "sft/final"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tiny_model)
    first, second = jobs(options(**changes), tmp_path)
    assert (first.config, second.config) == (warm, reinforcement)
    sft = load_config(QUICKSTART / first.config, first.settings(tmp_path, 7))
    grpo = load_config(QUICKSTART / second.config, second.settings(tmp_path, 7))
    assert sft.train.train_policy.dataset.options["phrasings"] == phrasings
    assert grpo.train.train_policy.dataset.options["phrasings"] == phrasings
    assert grpo.validation.dataset.options["phrasings"] == phrasings
    assert grpo.train.max_num_steps == steps
    assert grpo.rollout.backend == backend
    assert {sft.train.seed, grpo.train.seed} == {7}
    assert grpo.policy.model_name_or_path == f"{tmp_path}/{sft.train.timestamp}/final"


def test_a_user_may_change_the_reinforcement(tiny_model: Path, tmp_path: Path):
    key = "train.train_policy.allowed_outdated_steps=0"
    warm, grpo = jobs(options(set=[key]), tmp_path)
    assert key in grpo.settings(tmp_path, 1)
    assert key not in warm.settings(tmp_path, 1)


def test_the_exit_code_of_a_job_is_answered():
    assert foreground([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_a_terminated_driver_ends_its_job():
    code = (
        "import signal, sys; import run; signal.signal(signal.SIGTERM, run.on_sigterm); "
        "sys.exit(run.foreground([sys.executable, '-c', 'import time; time.sleep(3600)']))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(QUICKSTART), str(QUICKSTART.parents[1])])}
    with subprocess.Popen([sys.executable, "-c", code], env=env) as driver:
        running = psutil.Process(driver.pid)
        (child,) = until(running.children, "the job")
        until(
            lambda: "foreground" not in str(child.cmdline()) and running.status() == psutil.STATUS_SLEEPING,
            "a driver that waits for its job",
        )
        try:
            driver.send_signal(signal.SIGTERM)
            assert driver.wait(PATIENCE) != 0
            assert not child.is_running()
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def test_a_used_directory_is_refused(tmp_path: Path):
    (tmp_path / "sft").mkdir()
    command = [sys.executable, str(QUICKSTART / "run.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert "holds a quickstart already" in done.stderr
