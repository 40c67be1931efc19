"""`make gpu`, rehearsed without a GPU: tiny sizes, on the PyTorch and Python of a machine made for GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.run import SECTIONS
from benchmarks.gpu.sections import routing
from benchmarks.gpu.sections.vllm import TWO_GPUS
from tests.e2e.program import ROOT

pytestmark = pytest.mark.e2e

LIKE_A_GPU_MACHINE = ROOT / ".venv-gpu" / "env" / "bin" / "python"


def rehearse(python: Path | str, out: Path, *arguments: str) -> dict[str, Any]:
    command = [str(python), "-m", "benchmarks.gpu.run", "--device", "cpu", "--tiny", "--minutes", "14"]
    command += ["--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:] + (out / "gpu.log").read_text()[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


EVERY = [section.name for section in SECTIONS if section.name != "vllm"]
"""All but vLLM, which a machine made for PyTorch lacks."""
USUAL = ["importing", "training", "logprobs", "publication", "transport", "deltas"]
"""The sections of every run: the first ones, a process with models, and one without."""


@pytest.mark.parametrize("names", [USUAL, pytest.param(EVERY, marks=pytest.mark.soak)], ids=["usual", "every"])
def test_sections_work_where_a_gpu_would_be(tmp_path: Path, names: list[str]) -> None:
    """They are started by nothing but the interpreter and the wheels."""
    there = LIKE_A_GPU_MACHINE.exists()
    wheels = ["--from-wheels", str(ROOT / ".venv-gpu" / "wheels")] if there else []
    found = rehearse(LIKE_A_GPU_MACHINE if there else sys.executable, tmp_path, *wheels, "--only", ",".join(names))
    if there:
        assert found["machine"]["torch"].startswith("2.11.")
        assert found["machine"]["python"].startswith("3.12.")
    assert list(found["sections"]) == names
    odd = [row for rows in found["sections"].values() for row in rows if row["status"] != "ok"]
    assert odd == [], "nothing is skipped"
    cases = {name: len(rows) for name, rows in found["sections"].items()}
    assert min(cases.values()) > 1, "each section says more than how long it took"
    report = (tmp_path / "gpu.md").read_text()
    assert all(f"(`{name}`, " in report for name in names)
    machine, *rows = (json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines())
    assert machine["section"] == "machine"
    assert len(rows) == sum(cases.values())


@pytest.mark.soak
def test_the_vllm_section_works_with_vllm_for_cpus(tmp_path: Path) -> None:
    found = rehearse(sys.executable, tmp_path, "--only", "vllm")["sections"]["vllm"]
    by_case = {row["case"]: row["status"] for row in found}
    skipped = dict.fromkeys((routing.CASE, *TWO_GPUS), "skipped")
    assert by_case == {"model runner": "ok", "collective": "ok", **skipped, "whole section": "ok"}
