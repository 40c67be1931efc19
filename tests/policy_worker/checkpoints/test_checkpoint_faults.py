"""Deaths, full disks and forbidden directories, with real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices import WITHOUT_GPU
from tests.support.waiting import PATIENCE

SEEDS = 8


def run(what: str, root: Path, seeds: int = 1) -> list[dict[str, Any]]:
    arguments = [what, str(root), *map(str, range(seeds))]
    process = subprocess.run(
        [sys.executable, "-m", "tests.policy_worker.save_program", *arguments],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**os.environ, **WITHOUT_GPU},  # it forks, and a GPU cannot be used in a fork
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_a_whole_checkpoint(tmp_path: Path):
    results = run("kill", tmp_path, SEEDS)
    for seed, found in enumerate(results):
        assert found["damage"] == found["faults"] == [], (seed, found)
        assert found["step"] >= found["reported"], (seed, found)  # what was reported as saved is there
        assert found["value"] == found["step"], (seed, found)
        rest = [name for name in found["cleaned"] if not name.startswith("step-")]
        assert rest == ["latest"], (seed, found)
        assert set(found["whole"]) <= set(found["cleaned"]), (seed, found)
    assert any(len(found["left"]) > len(found["cleaned"]) for found in results), "no moment hit a save"


@pytest.mark.slow
def test_a_full_disk_is_named_and_costs_nothing_older(tmp_path: Path):
    (found,) = run("full", tmp_path)
    assert "checkpoint of step 2 could not be written" in found["error"]
    assert re.search(r"rank 0: \S+/\.step-00000002\.\w+/\S+\.safetensors: File too large", found["error"])
    assert "Nothing was deleted" in found["error"]
    assert found["left"] == ["latest", "step-00000001"]
    assert found["after"] == ["latest", "step-00000001", "step-00000003"]


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_named_before_training(tmp_path: Path):
    (found,) = run("forbidden", tmp_path)
    assert f"checkpoints cannot be written to {tmp_path / '0' / 'checkpoints'}: Permission denied" in found["error"]
