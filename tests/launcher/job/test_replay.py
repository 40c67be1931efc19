"""`cosmos-launch replay` up to its processes and around them; what they train is proven with the trainer's tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.job.replay import differences, medians, run_ranks, text_of
from launcher.plan.machine import Machine
from launcher.plan.placement import PlacementError, ProcessSpec, Replica, replay
from launcher.plan.rundir import RunDir
from launcher.processes.supervisor import Setting
from launcher.restarts import Budget, Role
from schema.config import load_config
from schema.wire import batch_file
from tests.launcher.cli import cosmos
from tests.launcher.samples import config, write_job
from tests.schema.wire.test_batch_file import FACTS, FRAMES, table


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was stopped."""
    run = RunDir(tmp_path / "out" / "mine")
    run.make()
    run.write_config(load_config(write_job(tmp_path)))
    (run.path / "job_id").write_text(FACTS.job_id)
    return run


def record(run: RunDir, *steps: int) -> Path:
    """Write batches; their directory."""
    folder = batch_file.folder_of(run.path)
    for step in steps:
        batch_file.write(folder, table(step), FRAMES, FACTS, keep=8)
    return folder


def test_a_run_without_batches_says_how_to_get_some(run: RunDir):
    how = f"cosmos-launch --resume {run.path} --set profiler.record_batches=8"
    cosmos("replay", run.path).complains(2, "has recorded no batches", how)
    run.lock()
    cosmos("replay", run.path).complains(2, f"cosmos-launch stop {run.path} --wait 60, then {how}")
    run.unlock()
    run.summary_json.write_text('{"outcome": "finished"}')
    cosmos("replay", run.path).complains(2, f"run it again: cosmos-launch --config {run.config_toml}")
    cosmos("replay", run.path / "nowhere").complains(2, "does not exist")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), ["step 7 is not recorded, there are 5 to 6 and 8", "--first-step and --steps"]),
        (("--first-step", "4"), ["step 4 is not recorded"]),
        (("--steps", "0"), ["--steps"]),
        (("--set", "train.optm_lrr=1"), ["unknown key", "optm_lr"]),
        (("--set", "rollout.n_generation=4"), ["rollout.n_generation is not read by a replay"]),
        (("--set", "placement.gpus_per_node=64", "--steps", "2"), ["64 GPUs are requested"]),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_starts(
    run: RunDir, options: tuple[str, ...], said: list[str]
):
    record(run, 5, 6, 8)
    cosmos("replay", run.path, *options).complains(2, *said)


def test_files_of_another_job_and_damaged_ones_are_named(run: RunDir):
    folder = record(run, 5, 6)
    run.lock()
    late = ("--set", "placement.gpus_per_node=64")  # refused after the files were looked at
    cosmos("replay", run.path, *late).complains(2, f"{run.path} is running", "64 GPUs are requested")
    run.unlock()
    path = batch_file.path_of(folder, 6)
    path.write_bytes(path.read_bytes()[:-1])
    cosmos("replay", run.path, *late).complains(1, f"{path} is not a recorded batch, or it is damaged")
    (run.path / "job_id").write_text("job-2")
    cosmos("replay", run.path, "--steps", "1").complains(2, "is of job job-1, this run is job-2")


# ---- where it runs --------------------------------------------------------------------------------------------


def environments(found: Replica, name: str) -> list[str]:
    return [process.env[name] for process in found.processes]


def test_a_replay_takes_the_trainers_devices_and_threads():
    mesh = {"parallelism": {"dp_shard_size": -1}}
    job = config(policy=mesh, rollout={"parallelism": {"n_init_replicas": 3}})
    found = replay(job, Machine(12), 2, ["RUN"])
    assert [process.argv[-3:] for process in found.processes] == [("-m", "policy_worker.replay", "RUN")] * 2
    assert environments(found, "COSMOS_CPU_THREADS") == ["2", "2"], "as next to three rollout replicas"
    assert environments(found, "RANK") == ["0", "1"]
    gpus = Machine(8, ("0", "1", "2", "3"))
    assert environments(replay(job, gpus, 2, []), "CUDA_VISIBLE_DEVICES") == ["0,1"] * 2
    sized = config(policy={"parallelism": {"dp_shard_size": 1}}, placement={"policy": [2], "rollout": [3]})
    assert environments(replay(sized, gpus, 2, []), "CUDA_VISIBLE_DEVICES") == ["2"], "as configured"
    with pytest.raises(PlacementError, match="needs 6 GPUs, this machine has 4"):
        replay(job, gpus, 6, [])
    with pytest.raises(PlacementError, match="names device 2"):
        replay(sized, Machine(8, ("0", "1")), 2, [])


# ---- its processes --------------------------------------------------------------------------------------------

REPORT = """
import sys, time
def report(text):
    with open(sys.argv[1], "a") as file:
        file.write(text)
"""


def play(directory: Path, *programs: str, show: Any) -> int:
    """Ranks that do as these programs say; the exit code."""
    output = directory / "output.jsonl"
    output.touch()
    argvs = [(sys.executable, "-I", "-S", "-c", REPORT + program, str(output)) for program in programs]
    ranks = tuple(ProcessSpec(f"replay-{n}", Role.POLICY, argv) for n, argv in enumerate(argvs))
    setting = Setting(directory, directory, 1.0, Budget(0, 0.0, 0.0), lambda spec: {**os.environ, **spec.env})
    return asyncio.run(
        run_ranks(Replica("replay", Role.POLICY, ranks), directory / "output.jsonl", setting, show)
    )


def alive(directory: Path) -> list[list[str]]:
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if any(str(directory) in part for part in line)]


def test_what_is_reported_is_shown_and_an_interrupt_leaves_no_process(tmp_path: Path):
    shown: list[dict[str, Any]] = []

    def show(record: dict[str, Any]) -> None:
        shown.append(record)
        if record["n"] == 1:
            assert alive(tmp_path)
            os.kill(os.getpid(), signal.SIGINT)

    program = """
report('{"n": 0}\\n{"n":'); time.sleep(0.5); report(' 1}\\n{"n": 2'); time.sleep(1000)
"""
    assert play(tmp_path, program, "time.sleep(1000)", show=show) == 130
    assert [record["n"] for record in shown] == [0, 1], "whole lines, each once"
    assert alive(tmp_path) == []


@pytest.mark.parametrize(("code", "said"), [(0, None), (2, 2), (1, 1), (9, 1)])
def test_a_rank_that_fails_takes_the_others_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, said: int | None
):
    shown: list[dict[str, Any]] = []
    others = ["time.sleep(1000)"] if code else []
    program = f"report('{{\"n\": 0}}\\n'); print('why'); sys.exit({code})"
    assert play(tmp_path, program, *others, show=shown.append) == (said or 0)
    assert shown == [{"n": 0}], "also what came right before the end"
    assert alive(tmp_path) == []
    complaint = capsys.readouterr().err
    assert ("why" in complaint) == bool(code)
    assert (str(tmp_path / "replay-0.log") in complaint) == (said == 1), "a crash has a log to read"


# ---- what is shown --------------------------------------------------------------------------------------------

BEGIN = {
    "event": "begin", "run": "RUN", "steps": [4, 5], "ranks": 1, "recorded_ranks": 1, "weights": "checkpoint C",
    "weights_step": 4, "exact": True, "changed": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        ({}, []),
        ({"exact": False}, ["the weights are not exactly those of step 4"]),
        ({"ranks": 2, "changed": ["train.seed"]}, ["it had 1 rank", "train.seed changed"]),
    ],
)
def test_it_says_whether_numbers_can_be_compared(facts: dict[str, Any], reasons: list[str]):
    begin = {**BEGIN, **facts}
    found = differences(begin)
    assert found == reasons
    text = text_of({**begin, "comparable": not found, "differs": found})
    assert f"RUN: steps 4 to 5 on {begin['ranks']} rank" in text
    assert "from checkpoint C" in text
    assert ("can be compared" in text) == (not reasons)
    assert all(reason in text for reason in reasons)


def test_steps_and_their_medians_are_a_line_each():
    steps = [
        {
            "event": "step", "step": n, "train_seconds": seconds, "tokens_per_s": 100.0 / seconds,
            "metrics": {"loss": 0.1234567, "grad_norm": 2.0},
        }
        for n, seconds in enumerate((9.0, 2.0, 1.0))
    ]  # fmt: skip
    assert text_of(steps[1]) == "step 1  loss 0.123457  reward –  grad norm 2  2.000 s  50 tokens/s"
    assert medians(steps) == {"train_seconds": 2.0, "tokens_per_s": 50.0}
    end = {"event": "end", "steps": 3, "median": medians(steps)}
    assert text_of(end) == "median of 3 steps: 2.000 s  50 tokens/s"
