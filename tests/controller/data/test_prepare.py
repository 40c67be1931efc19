"""Preparation from config to file, through the command that the launcher runs."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from controller.data import first_rows
from controller.data.errors import DataError
from controller.data.parts import held_out_rows
from controller.data.prepare import main, prepare
from controller.data.tokenizer import PromptTokenizer
from schema.config import Config
from schema.wire.prompts import PromptFile
from tests.controller.data.conftest import write
from tests.support.waiting import PATIENCE

NOT_JSON = {"raw": b"\x00", "nan": math.nan}
QUESTIONS = [{"question": f"{i} + 1?", "solution": {"value": str(i + 1)}, "level": i, **NOT_JSON} for i in range(20)]


def config(model_dir: Path, dataset: Path | str, policy: dict[str, Any], **sections: Any) -> Config:
    policy = {"type": "grpo", **policy, "dataset": {"name": str(dataset), **policy.get("dataset", {})}}
    return Config.model_validate(
        {
            "policy": {"model_name_or_path": str(model_dir), "model_max_length": 128},
            "rollout": {"max_response_length": 40},
            "train": {"train_policy": policy},
            **sections,
        }
    )


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "questions.parquet", QUESTIONS)


COLUMNS = {"prompt_column_name": "question", "response_column_name": "solution.value"}


def test_prompts_from_parquet(model_dir: Path, questions: Path, tmp_path: Path):
    assert prepare(config(model_dir, questions, COLUMNS), tmp_path) == {"train": 20}
    file = PromptFile(tmp_path / "data" / "train.safetensors")
    assert len(file) == 20
    assert file.row(3) == {
        "key": "train/3",
        "prompt": "3 + 1?",
        "answer": "4",
        "question": "3 + 1?",
        "level": 3,
        "solution": {"value": "4"},
        "raw": "AA==",
        "nan": "NaN",
    }, "all columns come along, what JSON lacks in another form"
    assert file.token_ids(3).tolist() == PromptTokenizer(str(model_dir)).prompts(["3 + 1?"])[0].tolist()
    assert not (tmp_path / "data" / "validation.safetensors").exists()


def test_rows_held_out_are_validated_and_never_trained(model_dir: Path, questions: Path, tmp_path: Path):
    cfg = config(model_dir, questions, {**COLUMNS, "dataset": {"test_size": 0.25}}, validation={"enable": True})
    assert prepare(cfg, tmp_path) == {"train": 15, "validation": 5}
    keys = {}
    for role in ("train", "validation"):
        file = PromptFile(tmp_path / "data" / f"{role}.safetensors")
        keys[role] = {file.row(i)["level"] for i in range(len(file))}
    assert keys["train"] | keys["validation"] == set(range(20))
    assert not keys["train"] & keys["validation"]


def test_the_first_rows_are_those_of_training(model_dir: Path, questions: Path, tmp_path: Path):
    changes: dict[str, Any] = {"dataset": {"test_size": 0.25}}
    cfg = config(model_dir, questions, {**COLUMNS, **changes}, reward={"prompt_forms": ["full_prompt"]})
    prepare(cfg, tmp_path)
    trained = PromptFile(tmp_path / "data" / "train.safetensors")
    first_rows.prepare(cfg, tmp_path, 4)
    found = [json.loads(line) for line in (tmp_path / "data" / "rows.jsonl").read_text().splitlines()]
    assert found == [trained.row(i) for i in range(4)]
    assert "full_prompt" in found[0]
    pq.write_table(pq.read_table(questions).slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="has no rows"):
        first_rows.prepare(config(model_dir, tmp_path / "none.parquet", COLUMNS), tmp_path, 4)


@pytest.mark.parametrize(("size", "rows"), [(None, 0), (0, 0), (0.0, 0), (3, 3), (0.25, 5), (0.01, 1)])
def test_test_size_is_a_share_or_a_number(size: float | int | None, rows: int):
    held = held_out_rows(20, size, 1)
    assert len(held) == rows
    assert held == held_out_rows(20, size, 1)
    assert rows < 3 or held != held_out_rows(20, size, 2)


@pytest.mark.parametrize("size", [20, 1.0])
def test_holding_everything_out_is_refused(size: float | int):
    with pytest.raises(DataError, match="none is left to train on"):
        held_out_rows(20, size, 1)


def test_the_synthetic_dataset_validates_on_its_held_out_pairs(model_dir: Path, tmp_path: Path):
    cfg = config(
        model_dir,
        "synthetic:addition",
        {"response_column_name": "answer", "dataset": {"options": {"n": 300}}},
        validation={"enable": True, "dataset": {"name": "synthetic:addition", "options": {"n": 50}}},
    )
    assert prepare(cfg, tmp_path) == {"train": 300, "validation": 50}
    row = PromptFile(tmp_path / "data" / "validation.safetensors").row(0)
    assert row["answer"] == str(row["a"] + row["b"])


def test_conversations_carry_the_loss_mask(model_dir: Path, tmp_path: Path):
    options = {"n": 30, "demonstrations": True}
    policy = {"type": "sft", "system_prompt": "Add.", "dataset": {"options": options}}
    assert prepare(config(model_dir, "synthetic:addition", policy), tmp_path) == {"train": 30}
    file = PromptFile(tmp_path / "data" / "train.safetensors")
    ids, mask = file.token_ids(0), file.loss_mask(0)
    decode = PromptTokenizer(str(model_dir))._tokenizer.decode
    assert decode(ids).startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nWhat is ")
    learnt = decode(ids[mask == 1])
    assert learnt.startswith(("<think>", "\\boxed{"))
    assert learnt.endswith("<|im_end|>")
    assert "What" not in learnt


def test_rows_too_long_are_left_out_counted_and_reported(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    texts = ["short", "x" * 70, "", "y" * 300]
    path = write(tmp_path / "rows.jsonl", [{"prompt": t, "conversations": _talk(t)} for t in texts])
    with caplog.at_level(logging.INFO):
        assert prepare(config(model_dir, path, {}), tmp_path) == {"train": 1}
    assert "2 left out, a prompt of more than 88 tokens (policy.model_max_length" in caplog.text
    assert "1 left out, an empty prompt: row 3" in caplog.text
    left_out = json.loads(PromptFile(tmp_path / "data" / "train.safetensors").metadata["left_out"])
    assert sum(left_out.values()) == 3
    with caplog.at_level(logging.INFO):
        assert prepare(config(model_dir, path, {"type": "sft"}), tmp_path) == {"train": 3}
    assert "1 left out, a conversation of more than 128 tokens (policy.model_max_length): row 4" in caplog.text
    lengths = PromptFile(tmp_path / "data" / "train.safetensors").lengths()
    assert max(lengths) <= 128


@pytest.mark.parametrize(("answer", "longest"), [(127, 1), (128, 127), (4096, 127)])
def test_an_answer_as_long_as_a_sequence_leaves_prompts_all_but_a_token(
    model_dir: Path, tmp_path: Path, answer: int, longest: int
):
    tokens = PromptTokenizer(str(model_dir))
    texts = ["x" * n for n in range(110, 128)]
    path = write(tmp_path / "rows.jsonl", [{"prompt": text} for text in texts])
    cfg = config(model_dir, path, {}, rollout={"max_response_length": answer})
    lengths = [len(ids) for ids in tokens.encode([tokens.text(text) for text in texts])]
    fitting = [length for length in lengths if length <= longest]
    assert len(fitting) < len(lengths)
    if not fitting:
        with pytest.raises(DataError, match=f"more than {longest} tokens"):
            prepare(cfg, tmp_path)
        return
    assert prepare(cfg, tmp_path) == {"train": len(fitting)}
    assert PromptFile(tmp_path / "data" / "train.safetensors").lengths().tolist() == fitting


def test_ids_that_the_model_has_no_embeddings_for_are_refused_by_row(
    model_dir: Path, questions: Path, tmp_path: Path
):
    model = shutil.copytree(model_dir, tmp_path / "model")
    largest = max(int(ids.max()) for ids in PromptTokenizer(str(model)).prompts(["7 + 1?", "8 + 1?"]))
    (model / "config.json").write_text(json.dumps({"vocab_size": largest + 1}))
    assert prepare(config(model, questions, COLUMNS), tmp_path) == {"train": 20}
    (model / "config.json").write_text(json.dumps({"vocab_size": largest}))
    words = rf"rows of the train data have token ids .*vocab_size = {largest}\): train/\d+ \({largest}\)"
    with pytest.raises(DataError, match=words):
        prepare(config(model, questions, COLUMNS), tmp_path)


def _talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]


@pytest.mark.parametrize(
    ("policy", "sections", "message"),
    [
        ({"prompt_column_name": "q"}, {}, "it has question, solution, level, raw, nan"),
        ({**COLUMNS, "response_column_name": "truth"}, {}, "train_policy.response_column_name = 'truth'"),
        ({**COLUMNS, "response_column_name": "solution.truth"}, {}, "row 1 has no `solution.truth`"),
        ({"type": "sft", "conversation_column_name": "talk"}, {}, "conversation_column_name = 'talk'"),
        (COLUMNS, {"validation": {"enable": True}}, "validation has no rows"),
        (COLUMNS, {"rollout": {"max_response_length": 127}}, "is left: 20 with a prompt of more than 1 tokens"),
        ({**COLUMNS, "prompt_column_name": "level"}, {}, "a list of messages or its JSON text, not int"),
    ],
)
def test_faults_of_config_and_data_are_named(
    model_dir: Path, questions: Path, tmp_path: Path, policy: dict, sections: dict, message: str
):
    with pytest.raises(DataError, match=message):
        prepare(config(model_dir, questions, policy, **sections), tmp_path)


def test_a_reference_that_is_missing_is_not_silence(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}])
    with pytest.raises(DataError, match="row 2: `answer` is empty"):
        prepare(config(model_dir, path, {"response_column_name": "answer"}), tmp_path)
    with caplog.at_level(logging.WARNING):
        prepare(config(model_dir, path, {}), tmp_path)
    assert "rewards get no reference answer" in caplog.text
    assert "answer" not in PromptFile(tmp_path / "data" / "train.safetensors").row(0)


def test_the_command_prepares_without_torch_and_answers_2_on_bad_data(
    model_dir: Path, questions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def configure(cfg: Config) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
        return ["--run-dir", str(tmp_path)]

    code = (
        "import sys; from controller.data.prepare import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *configure(config(model_dir, questions, COLUMNS))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    good = subprocess.run(command, capture_output=True, check=False, text=True, timeout=PATIENCE, env=env)
    assert good.returncode == 0, good.stderr
    assert "train: 20 rows" in good.stderr
    assert main(configure(config(model_dir, questions, {"prompt_column_name": "q"}))) == 2
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "it has question" in error.message
    assert error.exc_info is None, "one clear message and no traceback"


def test_a_run_directory_without_config_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert main(["--run-dir", str(tmp_path)]) == 2
    assert "config.json" in caplog.text


def test_conversations_are_held_out_too(model_dir: Path, tmp_path: Path):
    rows = [{"conversations": _talk(str(number))} for number in range(8)]
    path = write(tmp_path / "rows.jsonl", rows)
    policy: dict[str, Any] = {"type": "sft", "dataset": {"test_size": 0.25}}
    assert prepare(config(model_dir, path, policy, validation={"enable": True}), tmp_path) == {
        "train": 6,
        "validation": 2,
    }
    files = {role: PromptFile(tmp_path / "data" / f"{role}.safetensors") for role in ("train", "validation")}
    keys = {role: [file.row(i)["key"] for i in range(len(file))] for role, file in files.items()}
    numbers = [int(key.partition("/")[2]) for role in keys.values() for key in role]
    assert sorted(numbers) == list(range(8))
    assert all(key.startswith("validation/") for key in keys["validation"])
    assert files["validation"].loss_mask(0).any()
    apart = write(tmp_path / "apart.jsonl", [*rows[:3], {"conversations": _talk("1" * 300)}])
    cfg = config(model_dir, path, {"type": "sft"}, validation={"enable": True, "dataset": {"name": str(apart)}})
    assert prepare(cfg, tmp_path) == {"train": 8, "validation": 3}, "a long one is left out"
    cfg = config(
        model_dir,
        path,
        {"type": "sft"},
        validation={"enable": True, "dataset": {"name": str(apart), "overlong_prompts": "error"}},
    )
    with pytest.raises(DataError, match=r"validation\.dataset|a conversation may have"):
        prepare(cfg, tmp_path)
