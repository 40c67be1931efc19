"""Rules of files, struct columns, prompt lengths, pairs, sources, tokenizers and modules, on a real disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from schema.config import Config, Problem, check_config, check_warnings
from schema.config.modules import ExternalModuleError, import_external
from tests.schema.config.rules.test_data import P, data, in_a_directory_of_its_own, write_rows
from tests.schema.config_samples import GRPO, SFT, changed, only, problems

__all__ = ["in_a_directory_of_its_own"]
ROWS = [{"prompt": "1+1", "answer": "2"}]
SOURCED = [{**ROWS[0], "data_source": "openai/gsm8k", "extra": {"origin": "math_dapo", "n": 1}}]


def files(*names: str, base: dict[str, Any] = GRPO, **values: Any) -> list[Problem]:
    dataset = {"name": "", "files": list(names), **values.pop("dataset", {})}
    return problems(base, train__train_policy__dataset=dataset, **values)


# ---- files ------------------------------------------------------------------------------------------------


def test_columns_of_every_file_are_checked() -> None:
    write_rows("a.jsonl", ROWS)
    write_rows("b.parquet", ROWS)
    assert files("a.jsonl", "./b.parquet") == files("a.jsonl", "a.jsonl") == []
    write_rows("c.json", [{"prompt": "?", "solution": "2"}])
    (problem,) = files("a.jsonl", "c.json")
    assert problem.key == f"{P}.response_column_name"
    assert problem.message == "c.json does not have the column `answer`"


def test_files_that_cannot_be_read_are_named() -> None:
    write_rows("a.jsonl", ROWS)
    Path("folder").mkdir()
    found = files("a.jsonl", "nope.jsonl", "folder", "a.csv")
    assert [(problem.key, problem.value) for problem in found] == [
        (f"{P}.dataset.files", name) for name in ("nope.jsonl", "folder", "a.csv")
    ]
    assert found[0].message == "nope.jsonl does not exist"
    assert f'{P}.dataset.name = "folder"' in found[1].hint


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", "owner/name"), ("split", "train"), ("subset", "main"), ("revision", "v1"), ("options", {"n": 3})],
)
def test_files_stand_alone(name: str, value: Any) -> None:
    write_rows("a.jsonl", ROWS)
    (problem,) = files("a.jsonl", dataset={name: value})
    assert (problem.key, problem.hint) == (f"{P}.dataset.{name}", "leave it out")


def test_validation_may_have_files_too() -> None:
    write_rows("a.jsonl", ROWS)
    on = {"validation__enable": True}
    assert problems(**on, validation__dataset__files=["a.jsonl"]) == []
    assert only(**on, validation__dataset__files=["b.jsonl"]).key == "validation.dataset.files"
    assert files("a.jsonl", **on, dataset={"test_size": 1}) == []


# ---- columns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.json"])
def test_fields_of_structs_are_columns(name: str) -> None:
    row = {"data": {"prompt": "1+1", "deep": {"truth": "2"}}, "text": '{"truth": "2"}', "source": "x"}
    write_rows(name, [row])

    def found(response: str, prompt: str = "data.prompt") -> list[Problem]:
        columns = {"prompt_column_name": prompt, "response_column_name": response}
        return data(name, **{f"train__train_policy__{key}": value for key, value in columns.items()})

    assert found("data.deep.truth") == found("text.truth") == found("data.deep") == []
    (problem,) = found("data.deep.truht")
    assert problem.hint == f'write {P}.response_column_name = "data.deep.truth"'
    assert {problem.key for problem in found("data.z", "data.x")} == {
        f"{P}.prompt_column_name",
        f"{P}.response_column_name",
    }


def test_json_text_is_looked_into_where_the_first_row_shows_it() -> None:
    write_rows("rows.jsonl", [{"prompt": "x", "answer": '{"truth": 1}', "later": None, "word": "x"}])
    key = "train__train_policy__response_column_name"
    assert data("rows.jsonl", **{key: "answer.truth"}) == data("rows.jsonl", **{key: "later.truth"}) == []
    for column in ("answer.lie", "word.truth"):
        assert data("rows.jsonl", **{key: column})[0].key == f"{P}.response_column_name"


# ---- pairs ------------------------------------------------------------------------------------------------

PAIRS = {"train__train_policy__prompt_column_name": "q", "train__train_policy__response_column_name": "a"}


def test_supervised_rows_may_be_pairs() -> None:
    write_rows("pairs.jsonl", [{"q": "1+1", "a": "2"}])
    assert data("pairs.jsonl", SFT, **PAIRS) == []
    (problem,) = data("pairs.jsonl", SFT, **{**PAIRS, "train__train_policy__response_column_name": "b"})
    assert problem.message == "pairs.jsonl does not have the column `b`"
    for left_out, key in zip(PAIRS, ("response_column_name", "prompt_column_name"), strict=True):
        half = {name: value for name, value in PAIRS.items() if name != left_out}
        assert f"{P}.{key}" in {problem.key for problem in data("pairs.jsonl", SFT, **half)}


def test_pairs_and_a_written_conversation_contradict() -> None:
    write_rows("pairs.jsonl", [{"q": "1+1", "a": "2"}])
    for name in ("conversations", "talk"):
        written = {"train__train_policy__conversation_column_name": name}
        (problem,) = data("pairs.jsonl", SFT, **PAIRS, **written)
        assert problem.key == f"{P}.conversation_column_name"
    config = Config.model_validate(changed(SFT, **PAIRS, train__train_policy__dataset={"name": "pairs.jsonl"}))
    assert check_config(config.to_dict()).sft.has_pairs, "the resolved configuration is sound"


# ---- lengths ----------------------------------------------------------------------------------------------


def test_the_longest_prompt_and_answer_fit() -> None:
    limits = {"policy__model_max_length": 100, "rollout__max_response_length": 60}
    longest = "train__train_policy__dataset__max_prompt_length"
    assert problems(**limits, **{longest: 40}) == []
    problem = only(**limits, **{longest: 41})
    assert problem.key == f"{P}.dataset.max_prompt_length"
    assert (
        problem.message == "41 tokens and rollout.max_response_length = 60 are more than "
        "policy.model_max_length = 100"
    )
    assert problem.hint == f"write {P}.dataset.max_prompt_length = 40, or policy.model_max_length = 101"
    assert "rollout.max_model_len = 90" in only(**limits, rollout__max_model_len=90, **{longest: 31}).message
    whole = {"policy__model_max_length": 100, "rollout__max_response_length": 100}
    assert problems(**whole, **{longest: 99}) == [], "the answer takes what the prompt leaves"
    problem = only(**whole, **{longest: 100})
    assert problem.hint == f"write {P}.dataset.max_prompt_length = 99, or policy.model_max_length = 200"


def test_the_longest_prompt_of_validation() -> None:
    limits = {
        "policy__model_max_length": 100,
        "rollout__max_response_length": 60,
        "validation__enable": True,
        "validation__max_response_length": 80,
    }
    own = {"validation__dataset__name": "synthetic:addition", "validation__dataset__max_prompt_length": 21}
    assert only(**limits, **own).key == "validation.dataset.max_prompt_length"
    assert problems(**{**limits, **own, "validation__dataset__max_prompt_length": 20}) == []
    held = {"train__train_policy__dataset__test_size": 5}
    longest = {"train__train_policy__dataset__max_prompt_length": 30}
    assert only(**limits, **held, **longest).key == f"{P}.dataset.max_prompt_length"
    for name, value in (("max_prompt_length", 5), ("overlong_prompts", "error"), ("split", "test")):
        problem = only(**limits, **held, **{f"validation__dataset__{name}": value})
        assert problem.key == f"validation.dataset.{name}"


def test_supervised_training_has_no_prompts_to_bound() -> None:
    problem = only(SFT, train__train_policy__dataset__max_prompt_length=5)
    assert problem.key == f"{P}.dataset.max_prompt_length"
    assert "policy.model_max_length" in problem.hint
    assert problems(SFT, train__train_policy__dataset__overlong_prompts="error") == []
    assert only(SFT, reward__prompt_forms=["full_prompt"]).key == "reward.prompt_forms"


# ---- by_source --------------------------------------------------------------------------------------------


def sourced(**values: Any) -> list[Problem]:
    return data("rows.jsonl", **{f"train__train_policy__{key}": value for key, value in values.items()})


def test_scores_by_source_need_its_column() -> None:
    write_rows("rows.jsonl", SOURCED)
    assert sourced(reward_function="by_source") == []
    for column in ("extra.origin", "prompt"):
        assert sourced(reward_function="by_source", data_source_column_name=column) == []
    (problem,) = sourced(data_source_column_name="data_sourc")
    assert problem.hint == f'write {P}.data_source_column_name = "data_source"'
    write_rows("rows.jsonl", ROWS)
    assert sourced() == []
    (problem,) = sourced(reward_function={"by_source": 1.0, "format": 0.1})
    assert problem.key == f"{P}.data_source_column_name"
    assert problem.message == "rows.jsonl does not have the default column `data_source`"
    assert problems(train__train_policy__reward_function="by_source") == [], "generated rows have one"


def test_rewards_of_validation_need_it_where_they_score() -> None:
    write_rows("rows.jsonl", ROWS)
    write_rows("sourced.jsonl", SOURCED)
    on = {"validation__enable": True, "validation__reward_function": "by_source"}
    assert data("rows.jsonl", **on, validation__dataset__name="sourced.jsonl") == []
    (problem,) = data("sourced.jsonl", **on, validation__dataset__name="rows.jsonl")
    assert problem.message == "rows.jsonl does not have the default column `data_source`"
    held = {"train__train_policy__dataset": {"name": "rows.jsonl", "test_size": 1}}
    assert only(**on, **held).key == f"{P}.data_source_column_name", "held-out rows are scored so too"


# ---- tokenizer and modules --------------------------------------------------------------------------------


def test_local_tokenizers() -> None:
    key = "policy.tokenizer_name_or_path"
    assert problems(policy__tokenizer_name_or_path="Qwen/Qwen3-0.6B") == []
    problem = only(policy__tokenizer_name_or_path="./nope")
    assert (problem.key, problem.message) == (key, "./nope does not exist")
    Path("words").mkdir()
    assert "has no tokenizer_config.json" in only(policy__tokenizer_name_or_path="words").message
    Path("words/tokenizer.json").write_text("{}")
    assert problems(policy__tokenizer_name_or_path="words") == []
    assert "is a file" in only(policy__tokenizer_name_or_path="words/tokenizer.json").message


def test_trusted_code_is_shown() -> None:
    def warned(**values: Any) -> set[str]:
        return {problem.key for problem in check_warnings(Config.model_validate(changed(GRPO, **values)))}

    assert warned(policy__trust_remote_code=True) - warned() == {"policy.trust_remote_code"}


def test_external_modules_are_found_without_being_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cosmos_test_external").mkdir()
    Path("cosmos_test_external/__init__.py").write_text("raise SystemExit('must not run')\n")
    names = ["cosmos_test_external.models"]
    assert "PYTHONPATH" in only(policy__external_modules=names).hint
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert problems(policy__external_modules=[*names, "json"]) == []
    for name in ("a/b.py", "..relative"):
        assert "is not the name of a module" in only(policy__external_modules=[name]).message


def test_modules_are_imported_in_order_and_a_failure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("cosmos_test_good.py").write_text("value = 3\n")
    Path("cosmos_test_bad.py").write_text("import cosmos_test_good\nimport cosmos_test_missing\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    with pytest.raises(ExternalModuleError, match=r"`cosmos_test_bad` .*No module named 'cosmos_test_missing'"):
        import_external(["cosmos_test_bad"])
    assert sys.modules["cosmos_test_good"].value == 3


# ---- variables of rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("JUDGE_KEY=hunter2", "is not the name of a variable"),
        ("$JUDGE_KEY", "is not the name of a variable"),
        ("COSMOS_TOKEN", "belongs to the job"),
        ("COSMOS_REDIS_PASSWORD", "belongs to the job"),
    ],
)
def test_variables_of_rewards_are_names_and_none_of_the_job(name: str, words: str) -> None:
    problem = only(reward__environment=["JUDGE_KEY", name])
    assert problem.key == "reward.environment[1]"
    assert words in problem.message
    assert "hunter2" not in f"{problem.message} {problem.value} {problem.hint}"


# ---- the chat template ------------------------------------------------------------------------------------


def test_the_file_of_a_chat_template_can_be_read() -> None:
    key = "rollout.multi_turn_config.custom_chat_template_path"

    def found(name: str | None, base: dict[str, Any] = GRPO) -> list[Problem]:
        return problems(base, rollout__multi_turn_config__custom_chat_template_path=name)

    Path("chat.jinja").write_text("{{ messages }}")
    Path("binary.jinja").write_bytes(b"\xff")
    Path("huge.jinja").write_bytes(b" " * (1024 * 1024 + 1))
    assert found("chat.jinja") == found("") == []
    for name, why in [
        ("nope.jinja", "No such file"),
        (".", "Is a directory"),
        ("binary.jinja", "can't decode"),
        ("huge.jinja", "larger than"),
        ("~/chat.jinja", "No such file"),
    ]:
        (problem,) = found(name)
        assert (problem.key, problem.value) == (key, name)
        assert why in problem.message
        assert ("`~` is not expanded" if "~" in name else "name a text file") in problem.hint
