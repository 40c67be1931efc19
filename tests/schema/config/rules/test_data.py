"""Rules of what the user brings: data, models, reward functions and places on a real disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from schema.config import Problem, check_config, local_path
from tests.schema.config_samples import GRPO, SFT, changed, only, problems, refused

P = "train.train_policy"
ROWS = [{"prompt": "1+1", "answer": "2", "reward_model": {"ground_truth": "2"}}]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def data(name: str, base: dict[str, Any] = GRPO, **values: Any) -> list[Problem]:
    return problems(base, train__train_policy__dataset={"name": name}, **values)


def write_rows(name: str, rows: list[dict[str, Any]]) -> str:
    """A dataset in the form that its name asks for."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows, indent=1))
    return name


@pytest.mark.parametrize("name", ["data.parquet", "data.jsonl", "data.json", "./d/data.jsonl", "d/e/train.parquet"])
def test_columns_of_every_kind_of_file(name: str) -> None:
    write_rows(name, ROWS)
    assert data(name) == []
    (problem,) = data(name, train__train_policy__prompt_column_name="promt")
    assert problem.key == f"{P}.prompt_column_name"
    assert problem.message == f"{name} does not have the column `promt`"
    assert problem.hint == f'write {P}.prompt_column_name = "prompt"'
    (problem,) = data(name, train__train_policy__response_column_name="zzz")
    assert problem.hint == "its columns: answer, prompt, reward_model"
    assert data(name, train__train_policy__response_column_name="reward_model.ground_truth") == []
    (problem,) = data(name, train__train_policy__curriculum={"column_name": "promt"})
    assert problem.key == f"{P}.curriculum.column_name"


def test_the_default_column_is_checked_too() -> None:
    (problem,) = data(write_rows("data.jsonl", [{"question": "?", "answer": "!"}]))
    assert "default column `prompt`" in problem.message


def test_lines_of_json_in_a_json_file() -> None:
    Path("data.json").write_text('{"prompt": 1, "answer": 2}\n{"prompt": 1, "answer": 2}\n')
    assert data("data.json") == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.jsonl", b"", "is empty"),
        ("data.jsonl", b"[ ]", "is empty"),
        ("data.jsonl", b"3\n", "does not begin with a JSON object"),
        ("data.json", b'[{"prompt": ', "does not begin with a JSON object"),
        ("data.json", b"[" * 9999, "does not begin with a JSON object"),
        ("data.parquet", b"", "is not a readable parquet file"),
        ("data.parquet", b"PAR1 but no more", "is not a readable parquet file"),
        ("./data.csv", b"prompt,answer\n", "has no rows"),
        ("./data.xlsx", b"PK", "is not a dataset"),
    ],
)
def test_data_that_cannot_be_used(name: str, content: bytes, message: str) -> None:
    Path(name).write_bytes(content)
    (problem,) = data(name)
    assert problem.key == f"{P}.dataset.name"
    assert message in problem.message


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.jsonl": "", "b.json": "[]", "c.jsonl": '{"prompt": 1, "answer": 2}'}, ""),
        ({"a.jsonl": '{"prompt": 1}\n{"answer": 2, "prompt": 1}\n'}, ""),
        ({"a.json": '[{"prompt": 1},\n {"prompt": 1, "answer": 2}]'}, ""),
        ({"a.json": '[{"prompt": 1},\n {"prompt": 1}]'}, "does not have the column `answer`"),
        ({"answer=3/a.jsonl": '{"prompt": 1}'}, ""),
        ({"a.jsonl": "", "b.json": "[]"}, "b.json is empty"),
    ],
)
def test_columns_of_all_first_rows(files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    found = data(".")
    assert message in "".join(problem.message for problem in found)
    assert bool(found) == bool(message)


def test_a_parquet_file_without_rows() -> None:
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("answer", pyarrow.string())])
    pyarrow.parquet.write_table(schema.empty_table(), "data.parquet")
    assert "has no rows" in data("data.parquet")[0].message


@pytest.mark.parametrize("name", ["nope.jsonl", "./nope", "/nope/nope", "a/b/c", "x" * 5000])
def test_data_that_does_not_exist(name: str) -> None:
    (problem,) = data(name)
    assert problem.message.endswith("does not exist")
    assert "relative to the current directory" in problem.hint


def test_a_home_directory_is_written_out() -> None:
    assert str(Path.home() / "nope.jsonl") in data("~/nope.jsonl")[0].hint
    assert "not expanded" in data("~nobody-of-this-name/nope.jsonl")[0].hint
    assert only(train__output_dir="~/runs").key == "train.output_dir"


@pytest.mark.parametrize("name", ["gsm8k", "openai/gsm8k", "HuggingFaceH4/MATH-500", "user.name/data_set-1.0"])
def test_names_on_the_hub_are_accepted(name: str) -> None:
    assert local_path(name) is None
    values = {"train__train_policy__dataset": {"name": name, "subset": "main", "revision": "abc", "split": "test"}}
    assert problems(**values) == []


@pytest.mark.parametrize("name", ["s3://bucket/rows", "gs://bucket/a.csv", "hdfs://node:8020/rows", "abfs://rows/a"])
def test_addresses_are_accepted_and_nothing_is_asked(name: str) -> None:
    assert problems(**{"train__train_policy__dataset": {"name": name, "split": "test"}}) == []
    assert problems(**{"train__train_policy__dataset": {"files": [name]}}) == []
    assert [
        problem.key for problem in problems(**{"train__train_policy__dataset": {"name": name, "revision": "x"}})
    ] == [f"{P}.dataset.revision"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("s3://", "s3://bucket/path"),
        ("s3://key:hidden@bucket/a", "AWS_ACCESS_KEY_ID"),
        ("oss://bucket/a", "ossutil cp -r oss://bucket/a DIR"),
        ("https://host/a.csv", "or at s3://bucket/path"),
    ],
)
def test_addresses_that_are_refused(name: str, hint: str) -> None:
    for keys in ({"name": name}, {"files": [name]}):
        (problem,) = problems(**{"train__train_policy__dataset": keys})
        assert hint in problem.hint
        assert "hidden" not in str(problem)


def test_an_existing_directory_hides_a_name_on_the_hub() -> None:
    write_rows("openai/gsm8k/train.jsonl", [{"question": 1}])
    assert local_path("openai/gsm8k") == Path("openai/gsm8k")
    assert data("openai/gsm8k")[0].key == f"{P}.prompt_column_name"


def test_directories_are_read_by_split() -> None:
    write_rows("data/test.jsonl", [{"question": "?"}])
    write_rows("data/deep/train-00000-of-00001.parquet", ROWS)
    assert data("data") == []
    values = {"train__train_policy__dataset": {"name": "data", "split": ["test"]}}
    assert {problem.key for problem in problems(**values)} == {f"{P}.prompt_column_name", f"{P}.response_column_name"}
    values["train__train_policy__dataset"]["split"] = "dev"
    assert "no data file of split 'dev'" in only(**values).message
    validation = {"validation__enable": True, "validation__dataset__name": "data"}
    assert {problem.key for problem in problems(**validation)} == {
        f"{P}.prompt_column_name",
        f"{P}.response_column_name",
    }
    Path("empty").mkdir()
    assert "holds no data file" in data("empty")[0].message


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"subset": "main"}, "subset"),
        ({"revision": "abc"}, "revision"),
        ({"split": "test"}, "split"),
        ({"options": {"n": 3}}, "options"),
        ({"split": "train"}, None),
    ],
)
def test_keys_that_a_local_file_does_not_have(values: dict[str, Any], key: str | None) -> None:
    write_rows("data.jsonl", ROWS)
    found = problems(train__train_policy__dataset={"name": "data.jsonl", **values})
    assert [problem.key for problem in found] == ([f"{P}.dataset.{key}"] if key else [])


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"n": 100, "digits": 3, "phrasings": 4, "held_out": 0.1, "seed": 1, "demonstrations": False}, None),
        ({"held_out": 0}, None),
        ({"phrasing": 4}, "did you mean `phrasings`?"),
        ({"zzz": 4}, "known here: n, digits"),
        ({"phrasings": 5}, "expected an integer from 1 to 4, got 5"),
        ({"digits": 2.0}, "expected an integer from 1 to 12, got 2.0"),
        ({"n": True}, "expected an integer"),
        ({"held_out": 1.5}, "expected a number from 0.0 to 0.99"),
        ({"demonstrations": 1}, "expected true or false"),
    ],
)
def test_options_of_the_generator(options: dict[str, Any], fault: str | None) -> None:
    found = problems(train__train_policy__dataset__options=options)
    assert len(found) == (fault is not None)
    if fault:
        assert fault in found[0].render()
        assert found[0].key == f"{P}.dataset.options.{next(iter(options))}"


def test_other_generators_and_splits() -> None:
    assert only(train__train_policy__dataset__name="synthetic:chess").key == f"{P}.dataset.name"
    assert problems(train__train_policy__dataset__split=["train", "held_out"]) == []
    assert only(train__train_policy__dataset__split="test").key == f"{P}.dataset.split"
    assert only(train__train_policy__dataset__subset="main").key == f"{P}.dataset.subset"


def test_supervised_training_needs_conversations() -> None:
    problem = only(SFT, train__train_policy__dataset__options={})
    assert problem.key == f"{P}.conversation_column_name"
    assert problem.hint == f"write {P}.dataset.options.demonstrations = true"
    write_rows("chat.jsonl", [{"messages": []}])
    (problem,) = data("chat.jsonl", SFT)
    assert problem.hint == "its columns: messages"
    assert data("chat.jsonl", SFT, train__train_policy__conversation_column_name="messages") == []


def test_a_dataset_is_named() -> None:
    problem = only(train__train_policy__dataset__name="")
    assert problem.key == f"{P}.dataset.name"
    assert "synthetic:addition" in problem.hint


def test_validation_has_something_to_validate_on() -> None:
    on = {"validation__enable": True}
    assert "held-out pairs" in only(**on).hint
    assert problems(**on, validation__dataset__name="synthetic:addition") == []
    assert problems(**on, train__train_policy__dataset__test_size=0.1) == []
    assert problems(**on, train__train_policy__dataset__test_size=10) == []
    write_rows("data.jsonl", ROWS)
    (problem,) = data("data.jsonl", **on)
    assert (problem.key, "heldout.parquet" in problem.hint) == ("validation.dataset.name", True)
    assert only(**on, validation__dataset__name="nope.json").key == "validation.dataset.name"
    assert problems(validation__dataset__name="nope.json") == []


def test_supervised_training_validates_on_conversations() -> None:
    write_rows("talk.jsonl", [{"conversations": []}])
    on = {"validation__enable": True}
    (problem,) = data("talk.jsonl", SFT, **on)
    assert (problem.key, "heldout.parquet" in problem.hint) == ("validation.dataset.name", True)
    assert data("talk.jsonl", SFT, **on, validation__dataset__name="talk.jsonl", validation__freq=5) == []
    assert data("talk.jsonl", SFT, **on, train__train_policy__dataset__test_size=0.1) == []
    (problem,) = data("talk.jsonl", SFT, **on, validation__dataset={"name": "talk.jsonl", "max_prompt_length": 5})
    assert problem.key == "validation.dataset.max_prompt_length"
    (problem,) = data(
        "talk.jsonl",
        SFT,
        **on,
        train__train_policy__dataset__test_size=1,
        validation__dataset__overlong_prompts="left",
    )
    assert problem.key == "validation.dataset.overlong_prompts"


def test_test_size_is_a_share_or_a_number_of_rows() -> None:
    assert only(train__train_policy__dataset__test_size=1.0).key == f"{P}.dataset.test_size"
    assert problems(train__train_policy__dataset__test_size=1) == []
    assert only(validation__dataset__test_size=0.1).key == "validation.dataset.test_size"


def test_local_models() -> None:
    key = "policy.model_name_or_path"
    problem = only(policy__model_name_or_path="./nope")
    assert (problem.key, problem.message) == (key, "./nope does not exist")
    Path("model").mkdir()
    assert "no config.json" in only(policy__model_name_or_path="model").message
    Path("model/config.json").write_text('{"model_type": "qwen3"}')
    assert problems(policy__model_name_or_path="model") == []
    assert "is a file" in only(policy__model_name_or_path="model/config.json").message
    revised = only(policy__model_name_or_path="./model", policy__model_revision="v1")
    assert revised.key == "policy.model_revision"
    assert problems(policy__model_revision="v1") == []
    assert str(Path.home()) in only(policy__model_name_or_path="~/nope").hint


def reward(spec: Any, **values: Any) -> list[Problem]:
    return problems(train__train_policy__reward_function=spec, **values)


def test_reward_functions_are_known() -> None:
    assert reward("gsm8k") == reward(["format", "single_choice"]) == reward({"boxed_math": 1, "format": 0.2}) == []
    (problem,) = reward("boxd_math")
    assert (problem.key, problem.hint) == (f"{P}.reward_function", "did you mean `boxed_math`?")
    assert 'your own: "path/to/file.py:function"' in reward("zzz")[0].hint
    assert "no reward function" in reward([])[0].message
    assert "all weights are 0" in reward({"format": 0.0})[0].message
    assert only(validation__reward_function=["fromat"]).key == "validation.reward_function"


def test_reward_functions_of_the_user_are_found_without_being_run() -> None:
    Path("mine.py").write_text(
        "raise SystemExit('this module must not run')\n"
        "from elsewhere import imported\nassigned = 3\ndef slow(x, row): ...\ndef score(x, row): ...\n"
        "class C:\n    def hidden(self): ...\n"
    )
    assert reward({"mine.py:score": 1.0, "./mine.py:slow": 1.0, "mine.py:imported": 1.0}) == []
    (problem,) = reward("mine.py:scores")
    assert problem.hint == "did you mean `mine.py:score`?"
    assert reward("mine.py:hidden")[0].hint == "it defines: slow, score"
    assert "cannot be read: No such file" in reward("yours.py:score")[0].message
    Path("broken.py").write_text("def score(:\n")
    assert "is not valid Python at line 1" in reward("broken.py:score")[0].message


def test_reward_functions_take_an_answer_and_its_row() -> None:
    Path("mine.py").write_text("def score(completion, row, bonus): ...\n\nclass Judge: ...\n")
    assert reward("mine.py:score", custom={"bonus": 1}) == []
    for problem in (*reward("mine.py:score"), only(validation__reward_function=["mine.py:score"])):
        assert problem.message == "`score` of mine.py requires `bonus`, which nothing passes"
        assert 'row["bonus"]' in problem.hint
    assert "is a class" in reward("mine.py:Judge")[0].message


def test_filter_metrics_are_among_the_rewards() -> None:
    assert problems(train__train_policy__filter_reward_metric="boxed_math") == []
    problem = only(train__train_policy__filter_reward_metric=["boxed_math", "format"])
    assert problem.key == f"{P}.filter_reward_metric"


def test_places_to_write_and_to_resume_from() -> None:
    Path("file").write_text("")
    assert only(train__output_dir="file").key == "train.output_dir"
    assert problems(train__output_dir="new/dir") == []
    assert only(train__resume="nope").key == "train.resume"
    assert only(train__resume="").key == "train.resume"
    Path("checkpoint").mkdir()
    assert problems(train__resume="checkpoint") == problems(train__resume=True) == []


def test_files_that_may_not_be_read() -> None:
    """Root reads everything, so a directory in place of the file stands for what cannot be read."""
    os.mkdir("rewards.py")
    assert "cannot be read: Is a directory" in reward("rewards.py:f")[0].message


def test_problems_of_data_come_with_all_others() -> None:
    found = refused(check_config, changed(GRPO, train__epoch=0, train__train_policy__dataset__name="nope.jsonl"))
    assert [problem.key for problem in found] == ["train.epoch", f"{P}.dataset.name"]
