"""Whole jobs: the staleness bound holds, the ledger adds up, the model comes out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.held import go_on, hold
from tests.e2e.program import Program, check_ledger, command, write_config
from tests.support.nsys import with_nsys
from tests.support.nvtx import Noted, attached, noted

pytestmark = pytest.mark.e2e

PROFILED = """
[profiler]
enable_profiler = true
enable_nsys = true
record_batches = 3

[profiler.sub_profiler_config]
do_profile = true
wait_steps = 0
active_steps = 2
"""


@pytest.mark.parametrize(
    ("engine", "bound"),
    [
        ("transformers", 4),
        pytest.param("transformers", 0, marks=pytest.mark.soak),
        pytest.param("vllm", 4, marks=pytest.mark.soak),
        pytest.param("vllm", 0, marks=pytest.mark.soak),
    ],
)
def test_nothing_is_older_than_the_bound(tmp_path: Path, model: Path, engine: str, bound: int) -> None:
    """Nor does it change anything that a replica is killed at work: its successor takes its place."""
    config = hold(write_config(tmp_path, model, engine=engine, bound=bound, steps=8), step=bound + 2, rows=32)
    with Program(config) as program:
        program.until_step(2)
        program.kill("rollout_worker")
        go_on(config)
        summary = program.finish()
    assert "registered as rollout-0.2" in (program.run_dir / "logs" / "rollout-0.log").read_text()
    ledger = check_ledger(summary, bound, trained=8 * 4)
    assert sum(ledger.staleness.values()) == 8 * 16, "every sample was trained once"
    if bound == 0:
        assert ledger.staleness == {0: 8 * 16}
    versions = [record["version"] for record in summary["validations"]]
    assert versions == sorted(versions)
    assert (versions[0], versions[-1]) == (0, 8), "the middle one may be overtaken, these may not"
    assert all(record["samples"] == 8 for record in summary["validations"])
    first = summary["steps"][0]["metrics"]
    assert abs(first["behaviour_kl"]) < 1e-6, "on the first step trainer and engine agree"
    assert abs(first["ratio_max"] - 1.0) < 1e-3
    exported = AutoModelForCausalLM.from_pretrained(program.run_dir / "final")
    initial = AutoModelForCausalLM.from_pretrained(model)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(exported.state_dict()[name], initial.state_dict()[name])
    AutoTokenizer.from_pretrained(program.run_dir / "final")


def test_the_end_of_the_data_ends_a_job_whose_samples_travel_past_the_controller(tmp_path: Path, model: Path) -> None:
    """10 prompts, 4 groups per step: two full steps and a short one. Every sample goes through a shared directory and
    into the recorded batches, which give the trainer alone the same numbers when that directory is gone.

    The workers run under Nsight Systems (a stand-in for it), an NVTX tool is attached, and profiles are recorded.
    """
    config = write_config(tmp_path, model, steps=100, rows=10, validation=False)
    keys = '[controller]\npayload_store = "payloads"\npayload_bytes = 0\n'
    text = config.read_text().replace("[controller]\n", keys) + PROFILED
    (tmp_path / "rewards.py").write_text("def uneven(completion, row):\n    return len(completion) % 3 / 2\n")
    config.write_text(text.replace("{ boxed_math = 1.0, format = 0.2 }", f'"{tmp_path}/rewards.py:uneven"'))
    environment = {**attached(tmp_path / "nvtx"), "PATH": with_nsys(tmp_path / "bin")}
    with Program(config, environment=environment) as program:
        summary = program.finish()
    (job,) = (tmp_path / "payloads").iterdir()
    assert job.name == summary["status"]["job_id"], "made by the replica that wrote into it first"
    check_ledger(summary, 2, trained=10)
    assert [step["metrics"]["samples"] for step in summary["steps"]] == [16, 16, 8]
    trace, reports = "steps-00000001-00000002-rank0", ("nsys-policy-0-1", "nsys-rollout-0-1")
    files = {path.name for path in (program.run_dir / "profiles").iterdir()}
    assert (program.run_dir / "profiles").stat().st_mode & 0o77 == 0, "a report may hold a token"
    assert files == {f"{trace}.json.gz", f"{trace}.txt", *(f"{name}.nsys-rep" for name in reports)}
    check_ranges(noted(tmp_path / "nvtx"), groups=10, steps=3)

    shutil.rmtree(tmp_path / "payloads")
    kept = set(program.run_dir.rglob("*"))
    answer = command("replay", program.run_dir, "--json", "--set", "profiler.enable_nsys=false")
    assert answer.returncode == 0, answer.stderr
    begin, *steps, end = map(json.loads, answer.stdout.splitlines())
    assert begin["comparable"], begin
    for found, recorded in zip(steps, summary["steps"], strict=True):
        assert {"loss", "grad_norm", "reward_mean"} <= found["metrics"].keys()
        assert found["metrics"].items() <= recorded["metrics"].items()
        assert found["metrics"]["grad_norm"] > 0
    assert (end["steps"], end["median"].keys()) == (3, {"train_seconds", "tokens_per_s"})
    added = {path.name for path in set(program.run_dir.rglob("*")) - kept}
    assert added == {f"replay-{trace}.json.gz", f"replay-{trace}.txt"}


def check_ranges(processes: dict[int, Noted], groups: int, steps: int) -> None:
    """What trainer and replica say of themselves to an NVTX tool."""
    (trainer,) = [found for found in processes.values() if ("step",) in found.nested]
    (replica,) = [found for found in processes.values() if "generate" in found.counts]
    parts = ("fetch", "forward", "loss", "backward", "gradients", "optimizer")
    step = {("step", part) for part in parts}
    assert trainer.nested == {("wait",), ("step",), ("publish",), ("step", "fetch", "decode"), *step}
    assert replica.counts.keys() == {"generate", "score", "update"}
    assert replica.counts["generate"] >= groups, "a group that was leased twice is generated twice"
    assert replica.counts["score"] >= 4 * groups
    assert 1 <= replica.counts["update"] <= steps + 1
    assert (trainer.left, replica.left) == ([], [])
