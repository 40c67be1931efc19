"""What single keys of the data change in the prepared file: bounds, pairs, sources, forms, tokenizers, modules."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.data.errors import DataError
from controller.data.prepare import main, prepare
from controller.data.tokenizer import PromptTokenizer
from controller.state.prompts import Prompts
from schema.config import SOURCE_SCORERS, Config
from schema.config.chat_template import changed_since, kept_template
from schema.wire import data_report
from schema.wire.prompts import PromptFile
from tests.controller.data.conftest import PLAIN_TEMPLATE, save_tokenizer, write
from tests.controller.data.test_prepare import config
from tests.support.own_code import code_kept_in

LONG = "a" * 30
BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def prepared(cfg: Config, run_dir: Path, role: str = "train") -> PromptFile:
    prepare(cfg, run_dir)
    return PromptFile(run_dir / "data" / f"{role}.safetensors")


def rows_of(file: PromptFile) -> list[dict[str, Any]]:
    return [file.row(i) for i in range(len(file))]


def text(model_dir: Path, ids: Any) -> str:
    return str(PromptTokenizer(str(model_dir))._tokenizer.decode(ids))


def with_policy(cfg: Config, **keys: Any) -> Config:
    data = cfg.model_dump(mode="json")
    data["policy"] |= keys
    return Config.model_validate(data)


# ---- files and bounds -------------------------------------------------------------------------------------


def test_files_are_read_one_after_the_other(model_dir: Path, tmp_path: Path):
    names = [str(write(tmp_path / f"{name}.jsonl", [{"prompt": name}])) for name in "ba"]
    file = prepared(config(model_dir, "", {"dataset": {"files": names}}), tmp_path)
    assert [row["prompt"] for row in rows_of(file)] == ["b", "a"]
    assert [row["key"] for row in rows_of(file)] == ["train/0", "train/1"]


@pytest.mark.parametrize(
    ("rule", "kept"), [("left", LONG[:10] + AFTER), ("right", BEFORE + LONG[:10]), ("drop", None), ("error", None)]
)
def test_prompts_that_are_too_long(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, rule: str, kept: str | None
):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": LONG}])
    if kept is None:
        bound = len(PromptTokenizer(str(model_dir)).prompts(["a"])[0])
    else:
        bound = len(PromptTokenizer(str(model_dir)).encode([kept])[0])
        path.write_text(path.read_text().replace('"a"', '""'))
    cfg = config(model_dir, path, {"dataset": {"max_prompt_length": bound, "overlong_prompts": rule}})
    if rule == "error":
        message = (
            rf"rows\.jsonl, row 2: \d+ tokens, and a prompt may have {bound} "
            r"\(train\.train_policy\.dataset\.max_prompt_length\); .*overlong_prompts = \"drop\""
        )
        with pytest.raises(DataError, match=message):
            prepare(cfg, tmp_path)
        return
    with caplog.at_level(logging.INFO):
        file = prepared(cfg, tmp_path)
    if kept is None:
        assert [row["prompt"] for row in rows_of(file)] == ["a"]
        assert f"train: 1 left out, a prompt of more than {bound} tokens" in caplog.text
        assert list(json.loads(file.metadata["left_out"]).values()) == [1]
    else:
        assert text(model_dir, file.token_ids(0)) == kept
        assert file.row(0)["prompt"] == LONG, "the text stays whole"
        assert f"train: 1 cut on the {rule} to {bound} tokens" in caplog.text
        assert list(json.loads(file.metadata["cut"]).values()) == [1]


def test_held_out_rows_keep_the_rule_of_the_training_data(model_dir: Path, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": LONG}] * 4)
    held = {"dataset": {"test_size": 2, "max_prompt_length": 9, "overlong_prompts": "right"}}
    file = prepared(config(model_dir, path, held, validation={"enable": True}), tmp_path, "validation")
    assert file.lengths().tolist() == [9, 9]
    own = {"name": str(path), "max_prompt_length": 5, "overlong_prompts": "left"}
    both = config(model_dir, path, held, validation={"enable": True, "dataset": own})
    assert prepared(both, tmp_path, "validation").lengths().tolist() == [5] * 4
    assert PromptFile(tmp_path / "data" / "train.safetensors").lengths().tolist() == [9, 9]


def test_long_conversations_may_be_cut_too(model_dir: Path, tmp_path: Path):
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "x" * 200}]
    path = write(tmp_path / "rows.jsonl", [{"conversations": turns}])

    def file(rule: str) -> PromptFile:
        return prepared(config(model_dir, path, {"type": "sft", "dataset": {"overlong_prompts": rule}}), tmp_path)

    assert text(model_dir, file("right").token_ids(0)).startswith(BEFORE + "Hello")
    left = file("left")
    assert text(model_dir, left.token_ids(0)).endswith("xxx<|im_end|>\n")
    assert (len(left.token_ids(0)), len(left.loss_mask(0))) == (128, 128)
    with pytest.raises(DataError, match=r"row 1: \d+ tokens, and a conversation may have 128"):
        file("error")


# ---- columns ----------------------------------------------------------------------------------------------


def test_held_out_conversations_are_questions_too_where_answers_are_generated(model_dir: Path, tmp_path: Path):
    """Their last learnt turn is the reference, and the prompt ends where generation would begin."""
    talks = [
        [("user", "1+1?"), ("assistant", "2"), ("user", "And 1?"), ("assistant", "3")],
        [("user", "2+2?"), ("assistant", "4")],
        [("user", "2" * 85), ("assistant", "4")],
        [("user", "3+3?"), ("assistant", "6"), ("user", "Thanks!"), ("assistant", "Bye.")],
    ]
    rows = [{"conversations": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    rows[1] |= {"data_source": "gsm8k"}
    rows[3]["conversations"][-1]["weight"] = 0
    validation = {
        "enable": True, "generate": True, "reward_function": "boxed_math", "max_response_length": 30,
        "dataset": {"name": str(write(tmp_path / "held.jsonl", rows))},
    }  # fmt: skip
    given = config(model_dir, write(tmp_path / "rows.jsonl", rows[:1]), {"type": "sft"}, validation=validation)
    assert prepare(given, tmp_path) == {"train": 1, "validation": 3}
    path = tmp_path / "data" / "validation.safetensors"
    prompts = Prompts(path, seed=0, shuffle=False, to_start_of_answer=True)
    tokenizer = PromptTokenizer.of(given)
    for i, (talk, turns) in enumerate([(talks[0], 3), (talks[1], 1), (talks[3], 1)]):
        tokens, row = prompts.get(0, i)
        before = [{"role": role, "content": text} for role, text in talk[:turns]]
        assert tokens == tokenizer.encode([tokenizer.text(before)])[0].tolist()
        assert (row["prompt"], row["answer"]) == (before, talk[turns][1])
    report = json.loads((tmp_path / "data" / "report.json").read_text())["files"]["validation"]
    (reason,) = report["left_out"]
    assert reason == "a last turn that has not 1 to 98 tokens in front of it (validation.generate)"
    assert not [text for text in report["noted"] if "other tokens" in text]
    pairs = write(
        tmp_path / "pairs.jsonl", [{"q": "3-3?", "a": "It is 0.", "gold": 0}, {"q": "2+2?", "a": "4", "gold": 4}]
    )
    columns = {"prompt_column_name": "q", "response_column_name": "a", "system_prompt": "Add."}
    of_pairs = {**validation, "reference_column_name": "gold", "dataset": {"name": str(pairs)}}
    given = config(model_dir, pairs, {"type": "sft", **columns}, validation=of_pairs)
    assert prepare(given, tmp_path)["validation"] == 2
    rewarded = Prompts(path, seed=0, shuffle=False).get(0, 0)[1]
    assert rewarded == {
        "key": "validation/0",
        "prompt": "3-3?",
        "q": "3-3?",
        "a": "It is 0.",
        "gold": 0,
        "answer": 0,
    }, "as rewards of reinforcement get it"
    validation |= {"reference_column_name": "data_source"}
    given = config(model_dir, write(tmp_path / "rows.jsonl", rows[1:2]), {"type": "sft"}, validation=validation)
    with pytest.raises(DataError, match="row 1: `data_source` is empty"):
        prepare(given, tmp_path)


def test_pairs_are_learnt_like_conversations(model_dir: Path, tmp_path: Path):
    pair = {"q": {"text": "1+1?"}, "a": "2"}
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    system = {"type": "sft", "system_prompt": "Add."}
    written = prepared(config(model_dir, write(tmp_path / "talk.jsonl", [{"conversations": talk}]), system), tmp_path)
    columns = {"prompt_column_name": "q.text", "response_column_name": "a"}
    pairs = write(tmp_path / "pairs.jsonl", [pair])
    file = prepared(config(model_dir, pairs, {**system, **columns}), tmp_path)
    assert file.token_ids(0).tolist() == written.token_ids(0).tolist()
    assert file.loss_mask(0).tolist() == written.loss_mask(0).tolist()
    assert file.row(0) == {"key": "train/0", "q": {"text": "1+1?"}}
    turns = [{"role": "system", "content": "Add."}, talk[0]]
    chat = write(tmp_path / "pairs.jsonl", [{"q": turns, "a": "2"}])
    file = prepared(config(model_dir, chat, {"type": "sft", **columns, "prompt_column_name": "q"}), tmp_path)
    assert file.token_ids(0).tolist() == written.token_ids(0).tolist(), "a prompt may be messages"
    with pytest.raises(DataError, match=r"row 1: the response must be text, not int"):
        prepare(config(model_dir, write(pairs, [{**pair, "a": 2}]), {**system, **columns}), tmp_path)
    with pytest.raises(DataError, match=r"response_column_name = 'b'"):
        prepare(config(model_dir, pairs, {**system, **columns, "response_column_name": "b"}), tmp_path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_rows_as_verl_writes_them(model_dir: Path, tmp_path: Path, suffix: str):
    row = {
        "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1?"}], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0},
    }  # fmt: skip
    path = write(tmp_path / f"rows{suffix}", [row])
    columns = {"response_column_name": "reward_model.ground_truth", "reward_function": "by_source"}
    file = prepared(config(model_dir, path, columns), tmp_path)
    assert file.row(0) == {**row, "key": "train/0", "answer": "2"}
    assert text(model_dir, file.token_ids(0)) == f"{BEFORE}1+1?{AFTER}"


SOURCED = {"prompt": "1+1?", "answer": "2", "info": {"origin": "math_dapo"}, "data_source": "mine"}


def test_the_source_of_a_row_is_known_to_its_rewards(model_dir: Path, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [SOURCED])
    column = {"data_source_column_name": "info.origin"}
    assert prepared(config(model_dir, path, column), tmp_path).row(0)["data_source"] == "math_dapo"
    by_source = {**column, "reward_function": ["by_source"]}
    assert prepared(config(model_dir, path, by_source), tmp_path).row(0)["data_source"] == "math_dapo"
    with pytest.raises(DataError) as caught:
        prepare(config(model_dir, path, {"reward_function": "by_source"}), tmp_path)
    message = str(caught.value)
    assert f"{path}, row 1: no built-in reward function is known for the data source 'mine'" in message
    assert all(source in message for source in SOURCE_SCORERS)
    assert "path/to/file.py:function" in message
    with pytest.raises(DataError, match=r"data_source_column_name = 'nope': .* has no such column"):
        prepare(config(model_dir, path, {"data_source_column_name": "nope"}), tmp_path)
    with pytest.raises(DataError, match=r"row 1 has no `info\.nope`"):
        prepare(config(model_dir, path, {"data_source_column_name": "info.nope"}), tmp_path)


def test_the_source_is_checked_where_it_scores(model_dir: Path, tmp_path: Path):
    known = write(tmp_path / "known.jsonl", [{**SOURCED, "data_source": "gsm8k"}])
    mine = write(tmp_path / "mine.jsonl", [SOURCED])
    validation = {"enable": True, "dataset": {"name": str(known)}, "reward_function": "by_source"}
    assert prepare(config(model_dir, mine, {}, validation=validation), tmp_path)["validation"] == 1
    validation["dataset"] = {"name": str(mine)}
    with pytest.raises(DataError, match=r"mine\.jsonl, row 1: .* data source 'mine'"):
        prepare(config(model_dir, known, {}, validation=validation), tmp_path)


def test_generated_rows_can_be_scored_by_source(model_dir: Path, tmp_path: Path):
    policy = {"reward_function": "by_source", "dataset": {"options": {"n": 5}}}
    file = prepared(config(model_dir, "synthetic:addition", policy), tmp_path)
    assert {row["data_source"] for row in rows_of(file)} == {"synthetic:addition"}


def test_forms_of_the_prompt(model_dir: Path, tmp_path: Path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1?"}, {"prompt": turns}])

    def rows(forms: list[str]) -> list[dict[str, Any]]:
        dataset = {"dataset": {"max_prompt_length": 4, "overlong_prompts": "left"}}
        return rows_of(prepared(config(model_dir, path, dataset, reward={"prompt_forms": forms}), tmp_path))

    assert [row.keys() for row in rows([])] == [{"key", "prompt"}] * 2
    plain, chat = rows(["raw_prompt_ids", "full_prompt"])
    assert text(model_dir, plain["raw_prompt_ids"]) == "1+1?"
    assert text(model_dir, chat["raw_prompt_ids"]) == "Be brief.1+1?"
    assert plain["full_prompt"] == f"{BEFORE}1+1?{AFTER}"
    assert chat["full_prompt"] == f"<|im_start|>system\nBe brief.<|im_end|>\n{BEFORE}1+1?{AFTER}"
    assert chat["prompt"] == turns
    assert rows(["full_prompt"])[0].keys() == {"key", "prompt", "full_prompt"}


# ---- tokenizer and modules --------------------------------------------------------------------------------

OWN_CLASS = """
from transformers import PreTrainedTokenizerFast

class Shouting(PreTrainedTokenizerFast):
    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus(
            [part.upper() for part in text] if isinstance(text, list) else text.upper(), *args, **kwargs
        )
"""


@pytest.fixture
def shouting(tmp_path: Path) -> Iterator[Path]:
    """A tokenizer whose class comes with it."""
    directory = save_tokenizer(tmp_path / "shouting", None)
    (directory / "shouting.py").write_text(OWN_CLASS)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Shouting", "auto_map": {"AutoTokenizer": [None, "shouting.Shouting"]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with code_kept_in(tmp_path / "modules"):
        yield directory


def test_a_tokenizer_of_its_own(model_dir: Path, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1?"}])
    plain = save_tokenizer(tmp_path / "plain", None)
    cfg = config(Path("nowhere/no-model"), path, {})
    cfg = with_policy(cfg, tokenizer_name_or_path=str(plain))
    assert text(model_dir, prepared(cfg, tmp_path).token_ids(0)) == "1+1?"
    with pytest.raises(DataError, match=r"policy\.tokenizer_name_or_path = .*nope"):
        prepare(with_policy(cfg, tokenizer_name_or_path=str(tmp_path / "nope")), tmp_path)


def test_code_of_a_tokenizer_runs_only_where_it_is_trusted(
    shouting: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "hello"}])
    cfg = config(shouting, path, {})
    with pytest.raises(DataError, match=r"if you trust that code, write policy\.trust_remote_code = true"):
        prepare(cfg, tmp_path)
    with caplog.at_level(logging.WARNING):
        file = prepared(with_policy(cfg, trust_remote_code=True), tmp_path)
    assert "policy.trust_remote_code = true" in caplog.text
    plain = PromptTokenizer(str(save_tokenizer(tmp_path / "plain", None)))
    assert plain._tokenizer.decode(file.token_ids(0)) == "HELLO"


def test_external_modules_are_imported_first(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "hello"}])
    (tmp_path / "cosmos_test_noisy.py").write_text("print('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def run(module: str) -> int:
        cfg = with_policy(config(model_dir, path, {}), external_modules=[module])
        (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
        return main(["--run-dir", str(tmp_path)])

    assert run("cosmos_test_noisy") == 0
    assert capsys.readouterr().out == "imported\n"
    assert run("cosmos_test_missing") == 2
    assert "policy.external_modules: `cosmos_test_missing` cannot be imported" in caplog.text


# ---- templates --------------------------------------------------------------------------------------------


THINKING_TEMPLATE = PLAIN_TEMPLATE.replace(
    "assistant\\n' }}{% endif %}", "assistant\\n' + ('' if enable_thinking else '<think></think>') }}{% endif %}"
)


def rendered(cfg: Config, run_dir: Path, role: str = "train") -> list[str]:
    file = prepared(cfg, run_dir, role)
    tokenizer = PromptTokenizer.of(cfg)
    return [tokenizer.decode(file.token_ids(i)) for i in range(len(file))]


def test_a_system_prompt_is_put_before_prompts_that_have_none(model_dir: Path, tmp_path: Path):
    own = [{"role": "developer", "content": "Mine."}, {"role": "user", "content": "1+1?"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1?"}, {"prompt": own[1:]}, {"prompt": own}])
    validation = {"enable": True, "dataset": {"name": str(path)}}
    cfg = config(model_dir, path, {"system_prompt": "Add."}, validation=validation)
    asked = BEFORE + "1+1?" + AFTER
    systems = ["system\nAdd.", "system\nAdd.", "developer\nMine."]
    for role in ("train", "validation"):
        assert rendered(cfg, tmp_path, role) == [f"<|im_start|>{s}<|im_end|>\n{asked}" for s in systems]
    file = PromptFile(tmp_path / "data" / "train.safetensors")
    assert [file.row(i)["prompt"] for i in range(2)] == ["1+1?", own[1:]], "rewards get what the row holds"
    report = data_report.read(tmp_path)
    assert report is not None
    assert report.files["train"].own_system.first == [f"{path}, row 3"]


def test_a_system_message_of_a_conversation_is_kept(model_dir: Path, tmp_path: Path):
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    path = write(
        tmp_path / "rows.jsonl",
        [{"conversations": talk}, {"conversations": [{"role": "system", "content": "Mine."}, *talk]}],
    )
    texts = rendered(config(model_dir, path, {"type": "sft", "system_prompt": "Add."}), tmp_path)
    assert [text.partition("<|im_end|>")[0] for text in texts] == [
        "<|im_start|>system\nAdd.", "<|im_start|>system\nMine.",
    ]  # fmt: skip


def test_a_template_of_ones_own_and_its_thinking(model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1?"}])
    template = tmp_path / "own.jinja"
    template.write_text(THINKING_TEMPLATE)

    def text_with(**turns: Any) -> str:
        rollout = {"max_response_length": 40, "multi_turn_config": turns}
        (found,) = rendered(config(model_dir, path, {}, rollout=rollout), tmp_path)
        return found

    plain = BEFORE + "1+1?" + AFTER
    own = str(template)
    assert text_with(custom_chat_template_path=own) == plain + "<think></think>"
    assert text_with(custom_chat_template_path=own, enable_thinking=True) == plain
    assert caplog.text == ""
    assert text_with(enable_thinking=True) == plain
    assert "enable_thinking = true has no effect: the chat template ignores it" in caplog.text


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (b"\xff", "", "own.jinja cannot be read: .*can't decode"),
        (b"{% if %}", "", "own.jinja': the chat template refuses .*; mend it, it gets messages"),
        (b"{{ missing.thing }}", "", "own.jinja': the chat template refuses .* undefined; mend it"),
        (b"Hello!", "", "own.jinja': the chat template leaves the prompt out"),
        (b"{{ messages[-1]['content'] }}", "Add.", "system_prompt: the chat template of .* leaves it out"),
        (b"{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}", "Add.",
         "no system role; mend it.*or leave train.train_policy.system_prompt out"),
    ],
)  # fmt: skip
def test_a_template_is_proven_before_any_row(
    model_dir: Path, tmp_path: Path, template: bytes, system: str, message: str
):
    (tmp_path / "own.jinja").write_bytes(template)
    turns = {"custom_chat_template_path": str(tmp_path / "own.jinja")}
    rollout = {"max_response_length": 40, "multi_turn_config": turns}
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1?"}])
    cfg = config(model_dir, path, {"system_prompt": system}, rollout=rollout)
    with pytest.raises(DataError, match=message):
        prepare(cfg, tmp_path)


def test_a_template_names_each_row_that_it_refuses(model_dir: Path, tmp_path: Path):
    template = tmp_path / "own.jinja"
    refuses = "{% if m['content'] == 'no' %}{{ raise_exception('never') }}{% endif %}"
    template.write_text(PLAIN_TEMPLATE.replace("{% for m in messages %}", "{% for m in messages %}" + refuses))
    path = write(tmp_path / "rows.jsonl", [{"prompt": text} for text in ("a", "no", "b", "no")])
    turns = {"custom_chat_template_path": str(template)}
    rollout = {"max_response_length": 40, "multi_turn_config": turns}
    with pytest.raises(DataError, match=r"2 rows cannot be used; the first: .*row 2: the chat template refuses"):
        prepare(config(model_dir, path, {}, rollout=rollout), tmp_path)


def test_a_run_keeps_the_template_that_its_data_were_prepared_with(model_dir: Path, tmp_path: Path):
    template = tmp_path / "own.jinja"
    template.write_text(PLAIN_TEMPLATE)
    path = write(tmp_path / "rows.jsonl", [{"prompt": "1+1?"}])
    rollout = {"max_response_length": 40, "multi_turn_config": {"custom_chat_template_path": str(template)}}
    cfg = config(model_dir, path, {}, rollout=rollout)
    prepare(cfg, tmp_path)
    assert (kept_template(tmp_path), changed_since(cfg, tmp_path)) == (PLAIN_TEMPLATE, "")
    for text, words in ((PLAIN_TEMPLATE + " ", "has changed since"), (None, "cannot be read any more")):
        template.write_text(text) if text else template.unlink()
        assert words in changed_since(cfg, tmp_path)
    prepare(config(model_dir, path, {}, rollout={"max_response_length": 40}), tmp_path)
    report = data_report.read(tmp_path)
    assert kept_template(tmp_path) is None
    assert report is not None
    assert any("trained with another chat template" in text for text in report.warnings)


QUERIES: list[tuple[dict[str, Any], str]] = [
    ({"input": "2"}, "Double it.\n2"),
    ({"input": ""}, "Double it."),
    ({"input": None}, "Double it."),
]


@pytest.mark.parametrize(("row", "question"), QUERIES)
def test_a_second_text_follows_the_question(
    model_dir: Path, tmp_path: Path, row: dict[str, Any], question: str
) -> None:
    path = write(tmp_path / "rows.jsonl", [{"instruction": "Double it.", "output": "4", **row}])
    columns = {"prompt_column_name": "instruction", "query_column_name": "input", "response_column_name": "output"}
    prepare(config(model_dir, path, {"type": "sft", **columns}), tmp_path)
    report = data_report.read(tmp_path)
    assert report is not None
    (sample,) = report.files["train"].samples
    assert sample.startswith(f"<|im_start|>user\n{question}<|im_end|>")
