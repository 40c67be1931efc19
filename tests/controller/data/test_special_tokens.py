"""Prompts begin as the tokenizer begins a text, once, and never end it; answers end once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from controller.data.prepare import main
from controller.data.tokenizer import PromptTokenizer
from schema.wire.prompts import PromptFile

from .conftest import write
from .test_prepare import config

SPECIAL = ("<s>", "</s>", "[CLS]", "[SEP]", "<unk>")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"


def save(directory: Path, added: str = "", *, words: bool = False, **settings: Any) -> Path:
    """Save a tokenizer of bytes (or of three words, without an unknown one) that adds what `added` says."""
    alphabet = ["hi", "you", "a"] if words else sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    backend = Tokenizer(models.WordLevel(vocabulary) if words else models.BPE(vocabulary, merges=[]))
    split = pre_tokenizers.WhitespaceSplit() if words else pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer, backend.decoder = split, decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if added:
        known = list(zip(SPECIAL, range(len(SPECIAL)), strict=True))
        backend.post_processor = processors.TemplateProcessing(single=added, special_tokens=known)
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | settings
    PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(directory)
    return directory


def tokens(tokenizer: PromptTokenizer, ids: Any) -> list[str]:
    return list(tokenizer._tokenizer.convert_ids_to_tokens(ids))


KINDS = {
    "none": ("", {}, []),
    "BOS": ("<s> $A", {}, ["<s>"]),
    "EOS, as T5": ("$A </s>", {}, []),
    "both": ("<s> $A </s>", {}, ["<s>"]),
    "both by settings, as Llama": ("", {"add_bos_token": True, "add_eos_token": True}, ["<s>"]),
    "CLS and SEP": ("[CLS] $A [SEP]", {"eos_token": None, "cls_token": "[CLS]"}, ["[CLS]"]),
    "two of each": ("[CLS] <s> $A [SEP] </s>", {}, ["[CLS]", "<s>"]),
    "words": ("<s> $A </s>", {"words": True}, ["<s>"]),
    "words, of which the first is special": ("<s> $A </s>", {"words": True, "unk_token": "hi"}, ["<s>"]),
}
ENDS = {"CLS and SEP": ["[SEP]"]}


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_template(tmp_path: Path, kind: str):
    added, settings, before = KINDS[kind]
    tokenizer, end = PromptTokenizer(str(save(tmp_path, added, **settings))), ENDS.get(kind, ["</s>"])
    # A text may well end with the end token, or begin with the tokens that begin one: its writer wants them there.
    texts = ["a", "a</s>", "".join([*before, "a"])]
    wanted = [[*before, "a"], [*before, "a", "</s>"], [*before, "a"]]
    assert [tokens(tokenizer, ids) for ids in tokenizer.prompts(texts)] == wanted
    assert tokenizer.raw_ids(["a"]) == [tokenizer._tokenizer.convert_tokens_to_ids(["a"])]
    user, assistant = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
    talks = [[user, assistant, user, assistant], [assistant], [user, {**assistant, "content": "a" + end[0]}]]
    answer, [asked] = ["a", *end], [tokens(tokenizer, ids) for ids in tokenizer.prompts([[user]])]
    learnt = tokenizer.conversations(talks)
    assert [tokens(tokenizer, ids) for ids, _ in learnt] == [
        [*asked, *answer, "a", *answer],
        [*before, *answer],
        [*asked, *answer],
    ]
    assert [[tokens(tokenizer, ids[mask == 1]), tokens(tokenizer, ids[mask == 0])] for ids, mask in learnt] == [
        [answer * 2, [*asked, "a"]],
        [answer, before],
        [answer, asked],
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writes", [True, False], ids=["writes BOS", "writes none"])
def test_a_template_alone_says_how_a_prompt_begins(tmp_path: Path, kind: str, writes: bool):
    added, settings, before = KINDS[kind]
    begin = "".join(before) if writes else ""
    shown = f"{{{{ '{begin}' }}}}" + TEMPLATE if not settings.get("words") else begin + " a {{ '' }} a"
    tokenizer = PromptTokenizer(str(save(tmp_path, added, chat_template=shown, **settings)))
    [ids] = tokenizer.prompts(["a"])
    [(whole, _)] = tokenizer.conversations([[{"role": "user", "content": "a"}]])
    for words in (tokens(tokenizer, ids), tokens(tokenizer, whole)):
        assert [token for token in words if token in SPECIAL] == (before if writes else [])
        assert words[: len(before)] == before or not writes


def test_data_files_and_what_is_said_of_a_template_without_bos(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    data = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])

    def prepared(model: Path) -> list[str]:
        cfg = config(model, data, {}, validation={"enable": True, "dataset": {"name": str(data)}})
        (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
        with caplog.at_level(logging.WARNING):
            assert main(["--run-dir", str(tmp_path)]) == 0
        files = [PromptFile(tmp_path / "data" / f"{role}.safetensors") for role in ("train", "validation")]
        return [PromptTokenizer(str(model)).decode(file.token_ids(0)) for file in files]

    assert prepared(save(tmp_path / "plain", "<s> $A </s>")) == ["<s>a"] * 2
    assert "begins plain text" not in caplog.text
    assert prepared(save(tmp_path / "bos", "<s> $A", chat_template="<s>" + TEMPLATE)) == ["<s>user: a\n"] * 2
    assert "begins plain text" not in caplog.text
    assert prepared(save(tmp_path / "chat", "<s> $A", chat_template=TEMPLATE)) == ["user: a\n"] * 2
    assert "the tokenizer begins plain text with <s>, the chat template does not" in caplog.text
