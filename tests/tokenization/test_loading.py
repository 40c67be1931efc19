"""Whatever class the files name, ids and texts are those of `tokenizer.json`, and what is replaced is said."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken

from tests.support.own_code import code_kept_in
from tests.tokenization.files import FAMILIES, SPECIAL, TEXT, of_file, save
from tokenization.loading import TokenizerError, load, write_plain

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LABELS = {
    "generic": "PreTrainedTokenizerFast", "Llama": "LlamaTokenizerFast", "GPT-2": "GPT2TokenizerFast",
    "Qwen": "Qwen2Tokenizer", "Gemma": "GemmaTokenizerFast", "T5": "T5TokenizerFast", "BERT": "BertTokenizerFast",
    "Mistral": "MistralCommonBackend", "unknown": "NoSuchTokenizer", "NeoX": "GPTNeoXTokenizerFast", "none": None,
}  # fmt: skip
TYPES = ("llama", "qwen2", "gpt2", "gemma", "t5", "bert", "deepseek_v3", "mistral", "no_such_model")
CASES = [
    *((family, label, "llama", NAMED) for family in FAMILIES for label in LABELS),
    *((family, "none", kind, {}) for family in FAMILIES for kind in TYPES),
    *((family, "generic", kind, NAMED) for family in ("byte_level", "metaspace") for kind in TYPES),
]


def read(tokenizer: Any, text: str) -> tuple[list[int], str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return list(ids), tokenizer.decode(ids)


@pytest.mark.parametrize(("family", "label", "kind", "settings"), CASES)
def test_ids_and_texts_are_the_files(
    family: str, label: str, kind: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save(tmp_path / "model", family, LABELS[label], kind, **settings)
    right = of_file(directory)
    ids = right.encode(TEXT).ids
    expected = (ids, right.decode(ids, skip_special_tokens=False))
    tokenizer = load(str(directory))
    assert read(tokenizer, TEXT) == expected
    assert len(tokenizer) == right.get_vocab_size(), "no token that the model was not trained with"
    assert [read(tokenizer, f"a{token} b")[0] for token in SPECIAL] == [
        right.encode(f"a{token} b").ids for token in SPECIAL
    ]
    assert {name: getattr(tokenizer, name) for name in settings} == settings
    assert write_plain(tokenizer, tmp_path / "plain")
    assert read(load(str(tmp_path / "plain")), TEXT) == expected
    if family == "byte_level" and label == "Llama":
        assert "LlamaTokenizer, which contradicts tokenizer.json: 'The answer is Yes.' comes back as" in caplog.text
    if family == "metaspace" and label == "Llama":
        assert not caplog.text, "nothing is lost, and the class agrees"
    loses = "loses text, and so do prompts and what rewards see: " in caplog.text
    assert loses == (family in ("word_piece", "unigram"))


def test_words_that_no_probe_text_has_are_the_files_too(tmp_path: Path) -> None:
    """As Llama 3: a word is one token although no merges lead to it, which the class of GPT-2 does not know."""
    directory = save(tmp_path / "model", "byte_level", LABELS["GPT-2"], **NAMED)
    path = directory / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["model"]["vocab"]["Ġzebra"] = len(whole["model"]["vocab"])
    whole["model"]["ignore_merges"] = True
    path.write_text(json.dumps(whole))
    assert load(str(directory)).encode("a zebra") == [*of_file(directory).encode("a").ids, 322]


ENDS: dict[str, tuple[str, dict[str, Any], list[int], list[int]]] = {
    # name: (what the file puts before a text, settings, what stands before it, what stands behind it)
    "neither": ("", {}, [], []),
    "the file": ("<s>", {}, [1], []),
    "settings": ("", {"add_bos_token": True}, [1], []),
    "both": ("<s>", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    "settings say no": ("<s>", {"add_bos_token": False}, [], []),
    "settings of the end alone": ("<s>", {"add_eos_token": True}, [1], [2]),
    "another token": ("<|user|>", {"add_bos_token": False}, [3], []),
    "one token for both": ("", {"add_bos_token": True, "bos_token": "</s>"}, [2], []),
    "no such token": ("", {"add_bos_token": True, "bos_token": None}, [], []),
}


@pytest.mark.parametrize("label", ["generic", "Llama", "NeoX"])
@pytest.mark.parametrize("case", ENDS)
def test_what_the_settings_put_around_a_text_acts(case: str, label: str, tmp_path: Path) -> None:
    before, settings, begins, ends = ENDS[case]
    directory = save(tmp_path / "model", "byte_level", LABELS[label], before=before, **NAMED | settings)
    tokenizer = load(str(directory))
    assert tokenizer.encode(TEXT) == [*begins, *of_file(directory).encode(TEXT, add_special_tokens=False).ids, *ends]


KEPT: dict[str, tuple[dict[str, Any], str, Any]] = {
    # name: (settings, attribute, its value)
    "template": ({"chat_template": "{{ messages }}"}, "chat_template", "{{ messages }}"),
    "end token": ({"eos_token": "<|user|>"}, "eos_token_id", 3),
    "end token that the class alone names": ({}, "eos_token_id", 2),
    "length": ({"model_max_length": 77}, "model_max_length", 77),
    "side": ({"padding_side": "left"}, "padding_side", "left"),
    "clean-up": ({"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces", True),
    "special tokens": ({"additional_special_tokens": ["<|call|>"]}, "added_tokens_encoder", {"<|call|>": 322}),
    "added tokens": (
        {"added_tokens_decoder": {"322": AddedToken("<think>", special=False).__getstate__()}},
        *("added_tokens_encoder", {"<think>": 322}),
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_the_settings_say_is_kept_where_the_class_is_not(case: str, tmp_path: Path) -> None:
    settings, name, value = KEPT[case]
    tokenizer = load(str(save(tmp_path / "model", "byte_level", LABELS["Llama"], **settings)))
    assert type(tokenizer).__name__ == "TokenizersBackend"
    kept = getattr(tokenizer, name)
    assert (kept | value if isinstance(value, dict) else value) == kept
    for token, number in value.items() if isinstance(value, dict) else ():
        assert tokenizer.encode(f"a{token}b")[1] == number


OWN = """
from transformers import PreTrainedTokenizerFast

class Shouting(PreTrainedTokenizerFast):
    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus(text.upper() if isinstance(text, str) else text, *args, **kwargs)
"""


def test_own_code_counts_where_it_is_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = {"auto_map": {"AutoTokenizer": [None, "shouting.Shouting"]}, **NAMED}
    directory = save(tmp_path / "model", "byte_level", "Shouting", **own)
    (directory / "shouting.py").write_text(OWN)
    with code_kept_in(tmp_path / "modules"):
        with pytest.raises(TokenizerError, match=r"if you trust that code, write policy\.trust_remote_code = true"):
            load(str(directory))
        tokenizer = load(str(directory), trust_remote_code=True)
    assert tokenizer.decode(tokenizer.encode("hello")) == "HELLO"
    assert "own code, Shouting, counts, which differs from tokenizer.json: 'The answer is Yes.' comes" in caplog.text
    assert not write_plain(tokenizer, tmp_path / "plain")


def test_warnings_come_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = save(tmp_path / "model", "byte_level", LABELS["Llama"])
    load(str(directory))
    load(str(directory))
    assert [record.levelno for record in caplog.records if "contradicts" in record.message] == [logging.WARNING]


def without_file(directory: Path, family: str, label: str) -> Path:
    """A tokenizer as its vocabulary and merges alone, as GPT-2's; or of words, as BERT's."""
    save(directory, family, label, **NAMED)
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model.get("merges", ())))
    (directory / "vocab.txt").write_text("\n".join(sorted(model["vocab"], key=model["vocab"].get)))
    return directory


def test_without_the_file_words_and_indentation_must_survive(tmp_path: Path) -> None:
    tokenizer = load(str(without_file(tmp_path / "gpt2", "byte_level", "GPT2Tokenizer")))
    assert read(tokenizer, TEXT)[1] == TEXT
    with pytest.raises(TokenizerError, match="to compare it with, and BertTokenizer loses text: "):
        load(str(without_file(tmp_path / "bert", "word_piece", "BertTokenizer")))


PLAIN = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 420}
PLAIN |= {"remove_extra_whitespaces": False}
LLAMA = "LlamaTokenizer"
PIECES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: (how the model is made, settings, why it is refused)
    "the family's class": ({}, {"tokenizer_class": LLAMA}, ""),
    "a class that puts no blank before a text": ({}, {}, r"ids .* at token 0 instead.*LlamaTokenizer\.from_"),
    "a class that puts one": ({"add_dummy_prefix": False}, {"tokenizer_class": LLAMA}, "ids .* at token 0 instead"),
    "a model without": ({"add_dummy_prefix": False}, {}, ""),
    "settings without": ({}, {"tokenizer_class": LLAMA, "add_prefix_space": False}, ""),
    "symbols": ({"user_defined_symbols": ["[INST]"]}, {"tokenizer_class": LLAMA}, ""),
    "symbols of blanks": ({"user_defined_symbols": ["    "]}, {"tokenizer_class": LLAMA}, "ids .* instead"),
    "composed characters": ({"normalization_rule_name": "nmt_nfkc"}, {"tokenizer_class": LLAMA}, "ids .* instead"),
    "no bytes": ({"byte_fallback": False, "vocab_size": 90}, {"tokenizer_class": LLAMA}, "loses text: .*indentation"),
}


@pytest.mark.parametrize("case", PIECES)
def test_ids_without_the_file_are_those_of_the_sentencepiece_model(case: str, tmp_path: Path) -> None:
    made, settings, refused = PIECES[case]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    label = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED, **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(label))
    corpus = iter(["The answer is 18 [INST] def f(x): return x", "isn't it? 0123456789 + 24    if"] * 99)
    model = {"model_prefix": str(tmp_path / "tokenizer"), "minloglevel": 2, "hard_vocab_limit": False}
    SentencePieceTrainer.train(sentence_iterator=corpus, **model | PLAIN | made)
    if refused:
        with pytest.raises(TokenizerError, match=refused):
            load(str(tmp_path))
        return
    tokenizer, whole = (load(str(tmp_path)), SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")))
    for text in ("The answer is 18.", "a [INST] b", "if x:\n    é"):
        ids = whole.encode(f"a{text}")[1:] if "add_prefix_space" in settings else whole.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids


BROKEN = {
    "tokenizer_config.json": ("{", r"tokenizer_config\.json is not JSON"),
    "tokenizer.json": ("{", r"tokenizer\.json cannot be read .*download it again"),
    "an empty directory": ("", r"none of the files .* or name a tokenizer in policy\.tokenizer_name_or_path"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_files_are_named_errors(case: str, tmp_path: Path) -> None:
    text, message = BROKEN[case]
    directory = save(tmp_path / "model", "byte_level", "GPT2Tokenizer", **NAMED)
    if text:
        (directory / case).write_text(text)
    else:
        for path in directory.iterdir():
            path.unlink()
    with pytest.raises(TokenizerError, match=message):
        load(str(directory))
