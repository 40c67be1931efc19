"""validate, show, explain, schema, and what a start refuses: exit code 2 and one clear message per mistake.

No run directory is made by any of them.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from launcher.plan import redis_server
from tests.controller.data.conftest import PLAIN_TEMPLATE, save_tokenizer, write
from tests.launcher.cli import cosmos
from tests.launcher.samples import write_job


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


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
        run = cosmos(*arguments).complains(2, *expected, "run.toml:")
        assert run.stderr.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_all_mistakes_at_once_and_for_programs_with_their_places(tmp_path: Path):
    path = write_job(tmp_path)
    found = json.loads(cosmos("validate", path, "--json").stdout)
    assert (found["valid"], found["problems"]) == (True, [])
    replace(path, "compile = false", "compile = false\nepochs = 3")
    run = cosmos("validate", path, "--json")
    found = json.loads(run.stdout)
    assert (run.returncode, found["valid"]) == (2, False)
    (problem,) = found["problems"]
    assert (problem["key"], problem["line"]) == ("train.epochs", 5)
    replace(path, "n_generation = 8", 'n_generation = "8"')
    run = cosmos("--config", path)
    assert (run.returncode, run.stderr.count("error:")) == (2, 2)


def test_what_this_machine_lacks_ends_a_start_and_is_a_warning_of_validate(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        path = write_job(tmp_path, f"[controller]\nport = {port}\n")
        run, checked = cosmos("--config", path), cosmos("validate", path)
    words = f"controller.port: port {port} on 127.0.0.1 is in use"
    run.complains(2, words, "run.toml:")
    assert checked.complains(0, f": {words}").stderr.startswith("warning")
    assert not (tmp_path / "out").exists()


def test_a_redis_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_server, "CONNECT_TIMEOUT", 0.1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{probe.getsockname()[1]}"
    cosmos("--config", write_job(tmp_path), "--set", f'redis.url="{url}"').complains(
        2, f"redis.url: {url} cannot be reached"
    )
    assert not (tmp_path / "out").exists()


def test_a_variable_with_one_underscore_is_a_warning(tmp_path: Path):
    for arguments in (["validate", write_job(tmp_path)], ["--config", tmp_path / "run.toml", "--dry-run"]):
        cosmos(*arguments, COSMOS_TRAIN_EPOCH="3", CUDA_VISIBLE_DEVICES="").complains(0, "write COSMOS_TRAIN__EPOCH")


def test_explain():
    for key, *parts in (
        ("train.optm_betas", "Betas of Adam", "exactly 2 items", "[0.9, 0.999]", "Betas of the optimizer. (number)",
         "COSMOS_TRAIN__OPTM_BETAS"),
        ("train.train_batch_per_replica", "cosmos-rl's default is 8"),
        ("policy.lora.r", "Rank.", "[policy.lora]"),
        ("train.ckpt", "save_freq"),
        ("", "[rollout]"),
    ):  # fmt: skip
        cosmos("explain", *filter(None, [key])).says(0, *parts)
    assert cosmos("explain", "train.ckpt.*").stdout.count("train.ckpt.") >= 10
    data = json.loads(cosmos("explain", "train.optm_lr", "--json").stdout)
    assert data["keys"][0]["default"] == 1e-6
    cosmos("explain", "train.optm_lrr").complains(2, "did you mean `train.optm_lr`?")


def test_every_key_and_section_can_be_printed():
    from launcher.commands.explain import lines
    from schema.config.keys import leaf_keys, section_keys
    from schema.config.reference.lookup import look_up

    for key in ("", "*", *leaf_keys(), *section_keys()):
        printed = lines(look_up(key))
        assert printed
        assert all(line == line.rstrip() for line in printed), key


def test_schema(tmp_path: Path):
    run = cosmos("schema")
    assert run.returncode == 0
    assert "properties" in json.loads(run.stdout)
    assert cosmos("schema", "-o", tmp_path / "s.json").returncode == 0
    assert (tmp_path / "s.json").read_text() == run.stdout
    cosmos("schema", "-o", tmp_path / "none" / "s.json").complains(2, "cannot be written")


def test_the_data_is_read_and_reported_on_request(tmp_path: Path):
    path = write_job(tmp_path)
    save_tokenizer(tmp_path / "model", PLAIN_TEMPLATE)
    rows = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(20)]
    data = write(tmp_path / "data.jsonl", [*rows, {"prompt": "", "answer": "2"}, {"prompt": "?", "answer": ""}])
    said = cosmos("validate", "--data", path).says(
        0,
        f"train: 22 rows of {data}, 21 kept, 1 left out, 1 without a reference; tokens of a prompt: ",
        "train: 1 left out, an empty prompt: row 21",
        "train, as the model reads it:\n<|im_start|>user\n0 + 1 = ?<|im_end|>",
        "is valid",
    )
    assert "error" not in said.stderr
    write(tmp_path / "data.jsonl", [rows[0], {"prompt": 3, "answer": "2"}, {"prompt": None, "answer": "2"}])
    found = json.loads(cosmos("validate", "--data", "--json", path).complains(2).stdout)
    assert (found["valid"], found["more_problems"]) == (False, 0)
    assert found["data"]["error"].startswith("2 rows cannot be used; the first: ")
    first, second = found["data"]["files"]["train"]["bad"]["first"]
    assert ("row 2: " in first, "row 3: " in second) == (True, True)
    assert [problem["message"] for problem in found["problems"]] == [first, second]
    said = cosmos("validate", "--data", path).complains(2, "row 2", "row 3", "the data cannot be used")
    assert "is valid" not in said.stdout
    assert not (tmp_path / "out").exists()


def test_the_data_of_a_configuration_at_fault_is_not_read(tmp_path: Path):
    path = write_job(tmp_path)
    replace(path, "compile = false", "compile = false\nepochs = 3")
    cosmos("validate", "--data", path).complains(2, "1 mistake; the data was not read")
    assert "data" not in json.loads(cosmos("validate", "--data", "--json", path).stdout)
    (tmp_path / "answers.jsonl").write_text('{"prompt": "?", "responses": "4", "data_source": "gsm8k"}\n')
    (tmp_path / "eval.toml").write_text(f'[evaluation]\ndataset = {{ name = "{tmp_path}/answers.jsonl" }}\n')
    cosmos("validate", "--data", tmp_path / "eval.toml").says(0, "evaluation: 1 rows of ", ", 1 kept")
