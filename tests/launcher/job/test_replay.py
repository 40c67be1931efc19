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

from launcher.job.replay import ConfigChanges, differences, medians, read_config, run_ranks, sweep, text_of
from launcher.plan.machine import Machine
from launcher.plan.needs import PlacementError
from launcher.plan.placement import PlacedReplica, ProcessSpec, place, replay
from launcher.plan.rundir import RunDir
from launcher.processes.host import Folders
from launcher.processes.supervisor import Setting
from launcher.restarts import RestartBudget, Role
from schema.config import load_config
from schema.config.trained import settings_digest
from schema.wire import batch_file
from tests.launcher.cli import cosmos
from tests.launcher.samples import config, write_job
from tests.schema.wire.test_batch_file import FACTS, FRAMES, table
from tests.support.waiting import PATIENCE


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


def environments(found: PlacedReplica, name: str) -> list[str]:
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
    listed = config(policy=mesh, placement={"rollout": [0, 1]}, rollout={"parallelism": {"n_init_replicas": 2}})
    (policy, *_) = place(listed, gpus)
    assert environments(replay(listed, gpus, 2, []), "CUDA_VISIBLE_DEVICES") == ["2,3"] * 2
    assert environments(policy, "CUDA_VISIBLE_DEVICES") == ["2,3"] * 2, "as in the job"
    with pytest.raises(PlacementError, match=r"needs 3 GPUs, .* has 4, and placement\.rollout leaves 2"):
        replay(listed, gpus, 3, [])
    with pytest.raises(PlacementError, match=r"needs 2 GPUs, placement\.policy names 1"):
        replay(config(policy=mesh, placement={"policy": [2]}), gpus, 2, [])
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


def play(directory: Path, *programs: str, show: Any, grace: float = 1.0) -> int:
    """Ranks that do as these programs say; the exit code."""
    output = directory / "output.jsonl"
    output.touch()
    argvs = [(sys.executable, "-I", "-S", "-c", REPORT + program, str(output)) for program in programs]
    ranks = tuple(ProcessSpec(f"replay-{n}", Role.POLICY, argv) for n, argv in enumerate(argvs))
    setting = Setting(
        Folders(directory, directory), grace, RestartBudget(0, 0.0, 0.0), lambda spec: {**os.environ, **spec.env}
    )
    return asyncio.run(
        run_ranks(PlacedReplica("replay", Role.POLICY, ranks), directory / "output.jsonl", setting, show)
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


LEAVES = """
import signal
def leave(number, frame):
    report('{"n": 1}\\n'); time.sleep(0.5); report('{"n": 2}\\n'); sys.exit(0)
signal.signal(signal.SIGTERM, leave); report('{"n": 0}\\n'); time.sleep(1000)
"""


@pytest.mark.parametrize(("interrupts", "said"), [([0], [0, 1, 2]), ([0, 1], [0, 1])])
def test_an_interrupt_lets_the_ranks_write_what_they_have_and_the_second_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupts: list[int], said: list[int]
):
    shown: list[int] = []

    def show(record: dict[str, Any]) -> None:
        shown.append(record["n"])
        if record["n"] in interrupts:
            os.kill(os.getpid(), signal.SIGINT)

    program = LEAVES.replace("0.5", "15") if len(interrupts) > 1 else LEAVES
    assert play(tmp_path, program, show=show, grace=PATIENCE) == 130
    assert shown == said
    assert "Ctrl-C again leaves at once" in capsys.readouterr().err
    assert alive(tmp_path) == []


def test_a_rank_that_cannot_be_started_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "replay-1.log").mkdir()
    assert play(tmp_path, "time.sleep(1000)", "", show=print) == 1
    assert "the launcher could not keep replay: IsADirectoryError" in capsys.readouterr().err
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
    assert (str(tmp_path / "replay-0.log") in complaint) == bool(code), "there is a log to read"


def test_only_what_killed_replays_have_left_is_removed(tmp_path: Path):
    old = [".replay-step-00000004-rank0.json.gz.1a2b", ".raw.replay-step-00000004-rank0.json.gz.1a2b"]
    others = [".step-00000004-rank0.json.gz.1a2b", "replay-step-00000004-rank0.json.gz"]
    for name in (*old, *others):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    written_now = ".replay-step-00000005-rank0.json.gz.1a2b"
    (tmp_path / written_now).touch()
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*others, written_now}
    sweep(tmp_path / "nowhere")


# ---- what is shown --------------------------------------------------------------------------------------------

BEGIN = {
    "event": "begin", "run": "RUN", "steps": [4, 5], "ranks": 2, "weights": "checkpoint C", "weights_step": 4,
    "exact": True,
}  # fmt: skip
SAME = ConfigChanges([], "", "")


@pytest.mark.parametrize(
    ("facts", "later", "changes", "reasons"),
    [
        ({}, {}, SAME, []),
        ({"exact": False}, {}, SAME, ["the weights are not exactly those of step 4"]),
        (
            {"ranks": 1}, {}, ConfigChanges(["train.seed"], "", "b"),
            ["step 4 was trained on 2 ranks", "train.seed changed"],
        ),
        ({}, {}, ConfigChanges(["profiler.enable_profiler", "train.output_dir"], "", ""), []),
        ({}, {}, ConfigChanges(["placement.policy"], "", ""), ["placement.policy changed"]),
        (
            {}, {"ranks": 1, "total_steps": 80}, SAME,
            ["step 5 was trained on 1 rank", "the schedule had 60 steps at step 4, 80 at step 5"],
        ),
        ({}, {"settings": "b"}, SAME, ["step 5 was trained with settings other than those of config.toml"]),
        ({}, {"settings": "b"}, ConfigChanges(["train.seed"], "b", ""),
            ["step 4 was trained with settings other than those of config.toml", "train.seed changed"]),
    ],
)  # fmt: skip
def test_it_says_whether_numbers_can_be_compared(
    facts: dict[str, Any], later: dict[str, Any], changes: ConfigChanges, reasons: list[str]
):
    begin = {**BEGIN, **facts}
    found = differences(begin, {4: FACTS, 5: FACTS.model_copy(update=later)}, changes)
    assert found == reasons
    text = text_of({**begin, "comparable": not found, "differs": found})
    assert f"RUN: steps 4 to 5 on {begin['ranks']} rank" in text
    assert "from checkpoint C" in text
    assert ("can be compared" in text) == (not reasons)
    assert all(reason in text for reason in reasons)


def test_batches_from_before_a_resume_with_other_settings_cannot_be_compared(run: RunDir, tmp_path: Path):
    facts = FACTS.model_copy(update={"settings": settings_digest(load_config(run.config_toml))})

    def reasons(*overrides: str) -> list[str]:
        return differences(BEGIN, {4: facts}, read_config(run, overrides, {})[1])

    assert reasons() == []
    assert reasons("train.epsilon=1e-3") == ["train.epsilon changed"]
    resumed = ["train.epsilon=1e-3", "train.ckpt.max_keep=3"]
    run.write_config(load_config(tmp_path / "run.toml", resumed))
    assert reasons() == ["step 4 was trained with settings other than those of config.toml"]
    assert reasons(f"train.epsilon={load_config(tmp_path / 'run.toml').train.epsilon}") == [], "as it was then"


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
