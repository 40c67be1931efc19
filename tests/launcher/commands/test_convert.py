"""`cosmos-launch convert`: what it writes where, its exit codes, and its words for wrong input."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from schema.config import load_config
from tests.launcher.cli import ROOT, Answer, cosmos

ROLL, SFT = (ROOT / "tests/convert/examples" / name for name in ("roll_megatron.yaml", "cosmos_sft.toml"))


def convert(*arguments: object, **env: str) -> Answer:
    return cosmos("convert", *arguments, cwd=ROOT, **env)


def test_toml_on_standard_output_and_an_account_on_standard_error() -> None:
    run = convert("examples/roll_grpo.yaml")
    assert run.returncode == 0
    assert tomllib.loads(run.stdout)["rollout"]["n_generation"] == 8
    assert "67 keys: " in run.stderr
    assert "logging_dir" in run.stderr
    assert "pretrain" not in run.stderr  # simply mapped: it is written next to its value
    assert run.stderr.endswith("the result is valid\n")
    assert convert("examples/roll_grpo.yaml", "-o", "-").stdout == run.stdout


def test_the_account_is_short_unless_all_of_it_is_asked_for() -> None:
    short, full = convert(ROLL), convert(ROLL, "--full")
    assert short.stdout == full.stdout
    assert "--full accounts for every key" in short.stderr
    assert "--full" not in full.stderr
    account = short.stderr.partition("--full accounts")[0]
    assert "implicit:" not in account
    assert "added:" not in account
    assert len(account.splitlines()) < 60
    for heading in ("none:", "implicit:", "mapped:", "added:"):
        assert f"\n{heading}\n" in full.stderr
    assert set(account.splitlines()) <= set(full.stderr.splitlines())


def test_a_file_that_validate_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run.toml"
    run = convert("examples/roll_grpo.yaml", "-o", target, "--strict")
    assert (run.returncode, run.stdout) == (0, "")
    assert f"{target} is valid" in run.stderr
    monkeypatch.chdir(ROOT)
    assert load_config(target).rollout.n_generation == 8


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    target = tmp_path / "run.toml"
    target.write_text("mine")
    convert("examples/roll_grpo.yaml", "-o", target).complains(2, "already exists", "--force")
    assert target.read_text() == "mine"
    assert convert("examples/roll_grpo.yaml", "-o", target, "--force").returncode == 0
    assert tomllib.loads(target.read_text())


def test_what_validate_says_has_its_place_in_the_result(tmp_path: Path) -> None:
    target = tmp_path / "run.toml"
    run = convert(ROLL, "-o", target)
    assert run.returncode == 0
    line = next(
        line for line in run.stderr.splitlines() if "dataset.files: data/geometry_train.jsonl does not" in line
    )
    number = int(line.split(":")[2])
    assert target.read_text().splitlines()[number - 1].startswith("files")
    assert "needs" in run.stderr.splitlines()[-1]


def test_strict_is_for_what_falls_short_and_says_what_does(tmp_path: Path) -> None:
    assert convert(ROLL).returncode == 0
    source = tmp_path / "ppo.yaml"  # nothing of it is lost
    source.write_text("actor_rollout_ref: {model: {path: org/model}}\nalgorithm: {adv_estimator: grpo}\n")
    run = convert(ROLL, "--strict")
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("error: --strict: unsupported: ")
    assert convert(source, "--strict").returncode == 0


def test_a_batch_that_ends_within_a_group_is_rounded_and_named(tmp_path: Path) -> None:
    source, target = tmp_path / "cosmos.toml", tmp_path / "run.toml"
    text = (ROOT / "tests/convert/examples/cosmos_newer.toml").read_text()
    assert "train_batch_per_replica" not in text
    source.write_text(text.replace("[train]\n", "[train]\ntrain_batch_per_replica = 20\n", 1))
    run = convert(source, "-o", target)
    assert run.returncode == 0
    assert "! train.train_batch_per_replica is 24 instead of 20" in run.stderr
    assert "rollout.n_generation = 8" in run.stderr
    assert tomllib.loads(target.read_text())["train"]["train_batch_per_replica"] == 24
    run = convert(source, "--strict")
    assert run.returncode == 2
    assert "nearest values: train.train_batch_per_replica" in run.stderr


def test_a_lost_method_is_refused_by_every_command(tmp_path: Path) -> None:
    source, target = tmp_path / "agents.yaml", tmp_path / "run.toml"
    source.write_text((ROOT / "examples/roll_grpo.yaml").read_text() + "use_topr_loss: true\n")
    run = convert(source, "-o", target, "--strict")
    assert run.returncode == 2
    report = run.stderr.splitlines()
    first = report.index(next(line for line in report if line.startswith("unsupported:")))
    assert "use_topr_loss = true" in report[first + 1]
    assert first < report.index("none:")
    assert run.stderr.count("use_topr_loss = true") == 1  # not once more among the problems of the result
    assert "\n\n\n" not in run.stderr
    for arguments in (
        ["validate", target],
        ["validate", target, "--set", "unsupported={}"],
        ["validate", target, "--set", "unsupported.use_topr_loss=false"],
        ["--config", target, "--dry-run"],
        ["--config", target],
    ):
        cosmos(*arguments).complains(2, "unsupported")
    line = target.read_text().splitlines().index("use_topr_loss = true") + 1
    assert f"{target}:{line}:1: unsupported.use_topr_loss" in cosmos("validate", target).stderr
    target.write_text(target.read_text().replace("[unsupported]\n", "").replace("use_topr_loss = true\n", ""))
    assert cosmos("validate", target).returncode == 0


def test_keys_that_are_not_understood_are_refused_or_accepted_by_name(tmp_path: Path) -> None:
    source, target = tmp_path / "fork.yaml", tmp_path / "run.toml"
    source.write_text((ROOT / "examples/roll_grpo.yaml").read_text() + "sft_loss_coef: 0.1\nmixing: 2\n")
    run = convert(source, "-o", target)
    assert run.returncode == 0
    assert "sft_loss_coef = 0.1: not a key of ROLL" in run.stderr
    cosmos("validate", target).complains(2, "unsupported.sft_loss_coef", "unsupported.mixing")
    convert(source, "--strict").complains(2, "--strict: unsupported: sft_loss_coef, mixing")
    convert(source, "--allow-unknown", "sft_loss_coeff").complains(2, "no such key", "`sft_loss_coef`?")
    names = ("--allow-unknown", "sft_loss_coef", "--allow-unknown", "mixing")
    assert convert(source, "-o", target, "--force", "--strict", *names).returncode == 0
    assert "sft_loss_coef = 0.1" in target.read_text()
    assert cosmos("validate", target).returncode == 0


def test_files_of_other_systems_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("algorithm: {adv_estimator: grpo}\nworker: {actor: {global_batch_size: 8}}\n")
    convert(file).complains(2, "looks like a file of EasyR1", "cosmos-launch init")
    file.write_text("set -x\npython3 -m openrlhf.cli.train_ppo_ray --pretrain x --save_path y\n")
    convert(file).complains(2, "a command line of OpenRLHF")


def test_json_is_the_whole_account() -> None:
    run = convert(ROLL, "--json")
    found = json.loads(run.stdout)
    assert run.stderr == ""
    assert (found["system"], found["kind"], found["valid"]) == ("roll", "rlvr", False)
    assert sum(found["counts"].values()) == len(found["entries"]) == 149
    assert tomllib.loads(found["toml"]) == found["config"]
    assert found["problems"]


def test_the_environment_is_read(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text("rollout_batch_size: 8\npretrain: ${oc.env:MY_MODEL}\n")
    run = convert(file, MY_MODEL="org/mine")
    assert tomllib.loads(run.stdout)["policy"]["model_name_or_path"] == "org/mine"
    convert(file).complains(2, f"{file}:2: pretrain: the environment has no MY_MODEL")


def test_wrong_usage(tmp_path: Path) -> None:
    convert(tmp_path / "no.yaml").complains(2, "no such file")
    convert(ROLL, "--system", "trl").complains(2, "verl, roll, cosmos-rl")
    assert json.loads(convert(SFT, "--system", "cosmos", "--json").stdout)["kind"] == "sft"
    convert("examples/roll_grpo.yaml", "-o", tmp_path / "no" / "run.toml").complains(2, "cannot be written")
