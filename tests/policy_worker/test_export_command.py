"""`cosmos-launch export`: a checkpoint of any number of ranks becomes a model that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from policy_worker.checkpoints.layout import hash_of_file, look, write_manifest
from policy_worker.export_command import main
from policy_worker.parallel.rank_group import RankGroup
from tests.policy_worker.material import make_config, tiny_lm
from tests.policy_worker.rank_program import train
from tests.policy_worker.ranks import start_ranks, wait_ranks
from tests.rollout_worker.tiny import tokenizer
from tests.support.waiting import PATIENCE

COMMAND = [sys.executable, "-P", "-m", "launcher.cli"]


@dataclass
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """The command's process, called in this one."""

    def run(*arguments: str | Path) -> Said:
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return run


@pytest.fixture(scope="module")
def run_without_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a model and a configuration."""
    path = tmp_path_factory.mktemp("run")
    tiny_lm().save_pretrained(path / "model")
    tokenizer().save_pretrained(path / "model")
    config = make_config().to_dict()
    config["policy"]["model_name_or_path"] = str(path / "model")
    (path / "config.json").write_text(json.dumps(config))
    (path / "checkpoints").mkdir()
    return path


@pytest.fixture(scope="module")
def run_dir(run_without_checkpoint: Path, group: RankGroup) -> Path:
    """A run with one checkpoint, written by one rank."""
    train(group, {"samples": {"n": 6}, "save": str(run_without_checkpoint / "checkpoints")})
    return run_without_checkpoint


@pytest.fixture(scope="module")
def run_of_two(run_without_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, written by two ranks; `tensors-0.safetensors` holds what they had."""
    path = Path(shutil.copytree(run_without_checkpoint, tmp_path_factory.mktemp("two") / "run"))
    shutil.rmtree(path / "checkpoints")
    (path / "checkpoints").mkdir()
    options = {"samples": {"n": 6}, "save": str(path / "checkpoints")}
    arguments = ["tests.policy_worker.rank_program", str(path), json.dumps(options)]
    for code, output in wait_ranks(start_ranks(2, arguments)):
        assert code == 0, output
    return path


@pytest.mark.slow
def test_two_ranks_become_one_model_without_a_network(run_of_two: Path, tmp_path: Path) -> None:
    """As a user gives it; a hub that is asked for anything would not answer."""
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "export", str(run_of_two), "-o", str(tmp_path / "model")]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "100 %" in done.stdout
    assert "Qwen3ForCausalLM after 0 steps" in done.stdout
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    trained = load_file(run_of_two / "tensors-0.safetensors")
    names = [name for name in lm.state_dict() if name in trained]
    assert len(names) > 10
    for name in names:
        assert torch.equal(lm.state_dict()[name], trained[name]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("1 + 1")["input_ids"]
    assert (tmp_path / "model" / "generation_config.json").exists()


def test_types_and_what_is_there_already(run_dir: Path, tmp_path: Path, export: Callable[..., Said]) -> None:
    assert export(run_dir, tmp_path / "model").code == 0
    again = export(run_dir, tmp_path / "model")
    assert (again.code, "--force" in again.err) == (2, True)
    assert export(run_dir, tmp_path / "model", "--force", "--dtype", "bfloat16").code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    told = export(run_dir, tmp_path / "model", "--force", "--json")
    found = json.loads(told.out)
    assert (found["model"], found["architecture"], found["step"]) == (str(tmp_path / "model"), "Qwen3ForCausalLM", 0)
    assert Path(found["checkpoint"]).parent == run_dir / "checkpoints"
    assert found["files"] == {path.name: path.stat().st_size for path in (tmp_path / "model").iterdir()}
    assert "100 %" in told.err


def copy_of(run_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "copy"))


def test_what_cannot_be_exported_is_said(run_dir: Path, tmp_path: Path, export: Callable[..., Said]) -> None:
    nothing = export(tmp_path, tmp_path / "out")
    assert (nothing.code, "is not a checkpoint" in nothing.err) == (2, True)
    missing = export(tmp_path / "nowhere", tmp_path / "out")
    assert (missing.code, "does not exist" in missing.err) == (2, True)
    copy = copy_of(run_dir, tmp_path)
    (checkpoint,) = (copy / "checkpoints").glob("step-*")
    moved = Path(shutil.copytree(checkpoint, tmp_path / "elsewhere" / "moved"))
    lost = export(moved, tmp_path / "out")
    assert (lost.code, "--config" in lost.err) == (2, True)
    named = export(moved, tmp_path / "out", "--config", copy / "config.json")
    assert named.code == 0, named.err
    for layers in (1, 3):
        tiny_lm(layers=layers).save_pretrained(tmp_path / "other")
        other = export(checkpoint, tmp_path / "other-out", "--model", tmp_path / "other")
        assert (other.code, "is not of this model" in other.err) == (2, True)
    (file,) = checkpoint.glob("model-00000*")
    file.write_bytes(file.read_bytes()[:-10])
    damaged = export(checkpoint, tmp_path / "damaged-out")
    assert (damaged.code, f"{file.name} has" in damaged.err) == (2, True)
    assert not (tmp_path / "damaged-out").exists()
    assert not list(tmp_path.glob(".*out*")), "nothing half-written stays"


def test_an_export_has_the_template_of_training(
    run_dir: Path, tmp_path: Path, export: Callable[..., Said], caplog: pytest.LogCaptureFixture
) -> None:
    copy, template = copy_of(run_dir, tmp_path), tmp_path / "own.jinja"
    (checkpoint,) = (copy / "checkpoints").glob("step-*")
    config = json.loads((copy / "config.json").read_text())
    config["rollout"]["multi_turn_config"]["custom_chat_template_path"] = str(template)
    (copy / "config.json").write_text(json.dumps(config))
    template.write_text("edited since")
    assert export(copy, tmp_path / "today").code == 0
    assert "has not kept its chat template" in caplog.text
    (checkpoint / "chat_template.jinja").write_text("as trained")
    manifest = look(checkpoint).manifest
    files = manifest.files | {"chat_template.jinja": hash_of_file(checkpoint / "chat_template.jinja")}
    write_manifest(checkpoint, manifest.model_copy(update={"files": files}))
    template.unlink()
    assert export(copy, tmp_path / "kept").code == 0
    shown = [(tmp_path / name / "chat_template.jinja").read_text() for name in ("today", "kept")]
    assert shown == ["edited since", "as trained"]


def test_help_teaches() -> None:
    done = subprocess.run([*COMMAND, "export", "--help"], check=True, capture_output=True, text=True)
    assert "cosmos-launch export outputs/" in done.stdout
