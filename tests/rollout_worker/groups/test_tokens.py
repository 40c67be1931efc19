"""The text of an answer, and the tokens that end it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout_worker.engines.base import EngineConfigError, Generation, SamplingSettings
from rollout_worker.groups.leasing import training_settings, validation_settings
from rollout_worker.groups.tokens import eos_token_ids, load_tokenizer, stop_tokens, texts, tokens_at
from schema.config import PolicyConfig
from schema.config.rules.engine import rewards_read_tags, stop_strings_are_whole, stop_strings_can_be_found
from tests.launcher.samples import config
from tests.rollout_worker.tiny import random_model, save_model, tokenizer


def answer(text: str, ended_by: int | str | None, *, eos: bool = False) -> Generation:
    ids = [*tokenizer()(text)["input_ids"], *([256] if eos else [])]
    return Generation(
        request_id="r",
        index=0,
        token_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.zeros(1, np.int32),
        finish_reason="length" if ended_by is None else "stop",
        stop_reason=ended_by,
    )


@pytest.mark.parametrize("include", [False, True])
def test_the_text_ends_where_the_answer_does(include: bool) -> None:
    stop = int(tokenizer()("!")["input_ids"][0])
    settings = SamplingSettings(
        max_tokens=9, stop=("END",), stop_token_ids=(stop,), include_stop_str_in_output=include
    )
    samples = [
        answer("cut off", None),
        answer("told", 256, eos=True),
        answer("done!", stop),
        answer("ok END", "END"),
        answer("END ok END.", "END"),
    ]
    found = texts(tokenizer(), samples, [settings] * 5)
    kept = ["done!", "ok END", "END ok END"] if include else ["done", "ok ", "END ok "]
    assert found == ["cut off", "told", *kept]


@pytest.mark.parametrize(
    ("strings", "ends", "searched"),
    [
        (["<|pad|>"], {257}, ()),  # special tokens: no text shows them
        (["<|end|>", "\n"], {256}, ("\n",)),
        (["<tool>"], set(), ("<tool>",)),  # an added token that decoding shows
        (["a", "<|pad"], set(), ("a", "<|pad")),
    ],
)
def test_stop_strings_that_are_special_tokens_end_answers(
    strings: list[str], ends: set[int], searched: tuple[str, ...], tmp_path: Path
) -> None:
    known = tokenizer()
    known.add_tokens("<tool>")
    settings = config(rollout={"sampling_config": {"stop": strings}})
    found = stop_tokens(settings, known)
    for how in (training_settings(settings, found), validation_settings(settings, found)):
        assert (how.ends({7}), how.stop) == ({7, *ends}, searched)
    for include in (False, True):
        how = replace(how, include_stop_str_in_output=include)
        shown = [texts(known, [replace(answer("a", end), token_ids=np.array([64, end]))], [how]) for end in ends]
        assert shown == [[f"a{known.decode([end]) if include else ''}"] for end in ends]


@pytest.mark.parametrize("string", ["\n<|pad|>", "<|end|><|pad|>", "<|pad|> "])
def test_a_stop_string_with_a_special_token_and_more_is_refused(string: str, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    settings = config(
        policy={"model_name_or_path": str(tmp_path)}, rollout={"sampling_config": {"stop": ["ok", string]}}
    )
    with pytest.raises(EngineConfigError, match="special token, which the text of an answer leaves out"):
        stop_tokens(settings, tokenizer())
    (problem,) = stop_strings_can_be_found(settings)
    assert (problem.key, problem.value) == ("rollout.sampling_config.stop", string)


PARTS = {"<|pa": "<|pad|>", "|>": "<|end|>", "\n<|p": "<|pad|>", "ad|>\n": "<|pad|>"}
WHOLE = ["<|pad|>", "pad", "<", "</answer>", "\n\n", "a|"]


def test_a_stop_string_that_is_a_part_of_a_special_token_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer().save_pretrained(tmp_path)
    sampling = {"sampling_config": {"stop": [*PARTS, *WHOLE]}}
    settings = config(policy={"model_name_or_path": str(tmp_path)}, rollout=sampling)
    stop_tokens(settings, tokenizer())
    warned = list(stop_strings_are_whole(settings))
    assert [problem.value for problem in warned] == [*PARTS]
    for problem, token in zip(warned, PARTS.values(), strict=True):
        assert token in problem.message
        assert problem.render() in caplog.text


TAGS = [
    (["<think>", "</think>", "<answer>", "</answer>"], ["answer", "think"]),
    (["<s>", "</s>", "<tool>", "<|x|>", "</|x|>", "<im age>", "</im age>"], []),  # ends of texts, no pair, no tags
]


@pytest.mark.parametrize(("special", "hidden"), TAGS)
def test_tags_that_are_special_tokens_are_said(
    special: list[str], hidden: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = tokenizer()
    known.add_special_tokens({"additional_special_tokens": special})
    known.save_pretrained(tmp_path)
    settings = config(policy={"model_name_or_path": str(tmp_path)})
    shown = load_tokenizer(settings.policy).decode(known.encode("".join(special)), skip_special_tokens=True)
    assert shown == ""
    warned = list(rewards_read_tags(settings))
    assert len(warned) == bool(hidden)
    for problem in warned:
        assert all(f"<{tag}>…</{tag}>" in problem.message for tag in hidden)
        assert problem.render() in caplog.text
    assert ("never show these tags" in caplog.text) == bool(hidden)


def test_characters_are_found_in_their_tokens() -> None:
    ids = [256, *tokenizer()("aé…z")["input_ids"], 256]  # one token for each byte, none of them for the special ones
    assert len(ids) == 1 + 1 + 2 + 3 + 1 + 1
    assert tokens_at(tokenizer(), ids, [3, 0, 9]) == [7, 1, 8]
    assert all(1 < token <= 6 for token in tokens_at(tokenizer(), ids, [1, 2]))


def test_answers_without_text() -> None:
    settings = SamplingSettings(max_tokens=9)
    assert texts(tokenizer(), [], []) == []
    assert texts(tokenizer(), [answer("", 256, eos=True)], [settings]) == [""]


def test_end_of_text_tokens_of_generation_config_and_tokenizer(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path, random_model(1)))
    policy = PolicyConfig(model_name_or_path=folder)
    known = load_tokenizer(policy)
    assert eos_token_ids(policy, known) == {256}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 9]}))
    assert eos_token_ids(policy, known) == {7, 9, 256}
    path.write_text("{")
    other = policy.model_copy(update={"override_config": {"eos_token_id": [8]}})
    assert eos_token_ids(other, known) == {8, 256}, "a file that cannot be read names none"
    path.unlink()
    assert eos_token_ids(policy, known) == {256}


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"policy\.model_name_or_path = .*its tokenizer cannot be loaded"):
        load_tokenizer(PolicyConfig(model_name_or_path=str(tmp_path)))
