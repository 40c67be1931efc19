"""The loss is on what the assistant says and on nothing else, whatever the chat template does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from controller.data.errors import DataError
from controller.data.tokenizer import PromptTokenizer

from .conftest import GENERATION_TEMPLATE, PLAIN_TEMPLATE, REWRITING_TEMPLATE, save_tokenizer

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two plus two?"},
    {"role": "assistant", "content": "<think>2+2</think>Four."},
    {"role": "user", "content": "Four."},
    {"role": "assistant", "content": "<think>again</think>Four."},
]


def learnt(tokenizer: PromptTokenizer, messages: list[dict]) -> list[str]:
    """The runs of tokens with loss, as text."""
    [(ids, mask)] = tokenizer.conversations([messages])
    assert ids.dtype == np.int32
    assert len(ids) == len(mask)
    cuts = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer._tokenizer.decode(ids[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


@pytest.mark.parametrize(
    ("template", "first"),
    [
        (PLAIN_TEMPLATE, "<think>2+2</think>Four.<|im_end|>"),
        (GENERATION_TEMPLATE, "<think>2+2</think>Four.<|im_end|>"),
        (REWRITING_TEMPLATE, "Four.<|im_end|>"),
        (None, "<think>2+2</think>Four.<|im_end|>"),
    ],
    ids=["plain", "generation block", "rewrites history", "no template"],
)
def test_the_loss_is_on_what_the_assistant_says(tmp_path: Path, template: str | None, first: str):
    tokenizer = PromptTokenizer(str(save_tokenizer(tmp_path, template)))
    assert learnt(tokenizer, TALK) == [first, "<think>again</think>Four.<|im_end|>"]


def test_a_conversation_may_begin_with_the_assistant(tmp_path: Path):
    tokenizer = PromptTokenizer(str(save_tokenizer(tmp_path, PLAIN_TEMPLATE)))
    assert learnt(tokenizer, [{"role": "assistant", "content": "Hello."}, *TALK[3:4]]) == ["Hello.<|im_end|>"]
    assert learnt(tokenizer, TALK[:2]) == []


def test_a_template_without_a_generation_prompt(tmp_path: Path):
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    tokenizer = PromptTokenizer(str(save_tokenizer(tmp_path, template)))
    assert learnt(tokenizer, TALK[3:]) == ["<think>again</think>Four.<|im_end|>"]


def test_all_that_the_template_adds_to_a_turn_is_learnt(tmp_path: Path):
    for between in (" ", " [END] "):
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '" + between + "<|im_end|>' }}{% endfor %}"
        )
        tokenizer = PromptTokenizer(str(save_tokenizer(tmp_path, template)))
        assert learnt(tokenizer, [{"role": "assistant", "content": "Four."}]) == [f"Four.{between}<|im_end|>"]


def test_a_template_that_hides_the_assistant_is_an_error(tmp_path: Path):
    template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    tokenizer = PromptTokenizer(str(save_tokenizer(tmp_path, template)))
    with pytest.raises(DataError, match="does not show the assistant's turn 1"):
        tokenizer.conversations([TALK[3:]])


def test_what_a_template_refuses_is_an_error(tmp_path: Path):
    tokenizer = PromptTokenizer(str(save_tokenizer(tmp_path, "{{ raise_exception('no systems') }}")))
    with pytest.raises(DataError, match="no systems"):
        tokenizer.prompts(["Hello"])


def test_prompts_end_where_the_answer_begins(model_dir: Path, tmp_path: Path):
    tokenizer = PromptTokenizer(str(model_dir))
    text, messages = tokenizer.prompts(["Two?", [TALK[0], {"role": "user", "content": "Two?"}]])
    decode = tokenizer._tokenizer.decode
    assert decode(text) == "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    assert decode(messages).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nTwo?")
    plain = PromptTokenizer(str(save_tokenizer(tmp_path, None)))
    assert [plain._tokenizer.decode(ids) for ids in plain.prompts(["Two?"])] == ["Two?"]


def test_the_quick_way_gives_the_tokens_of_auto_tokenizer(model_dir: Path):
    from transformers import AutoTokenizer

    ours = PromptTokenizer(str(model_dir)).prompts([TALK[:2]])[0].tolist()
    auto = AutoTokenizer.from_pretrained(model_dir)
    theirs = auto.apply_chat_template(TALK[:2], add_generation_prompt=True, return_dict=False)
    assert ours == theirs


def test_a_model_without_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"policy\.model_name_or_path"):
        PromptTokenizer(str(tmp_path))
