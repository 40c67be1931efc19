"""Models that the trainer can load as text models, and tokenizers whose ids they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from schema.config.rules.loadable import (
    classes_are_those_of_the_kind,
    generation_settings_are_read,
    models_are_of_text,
    tokens_have_rows,
    unused_tokens_without_rows,
)
from schema.config.rules.named import model_is_there
from schema.config.vocabulary import numbered
from tests.schema.config.test_model_facts import QWEN
from tests.schema.config_samples import GRPO
from tests.schema.remedies import config_of

KINDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model_type": "qwen3"}, {}, ""),
    ({"model_type": "gpt2"}, {}, ""),
    ({"model_type": "gemma3", "text_config": QWEN, "vision_config": {"x": 1}}, {}, ""),
    ({"model_type": "qwen3_5", "text_config": QWEN, "vision_config": {"x": 1}}, {}, ""),
    ({}, {}, "names no model_type, by which transformers chooses a class"),
    ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, {"policy.trust_remote_code": True}, ""),
    ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}}, {}, "images or sound are not built yet"),
    ({"model_type": "qwen3_vl", "text_config": QWEN, "vision_config": {"depth": 1}}, {}, "images or sound are not"),
    ({"model_type": "llava", "vision_config": {}}, {}, "does not load"),
    ({"model_type": "qwen2_audio", "audio_config": {"x": 1}}, {}, "images or sound are not built yet"),
    ({"model_type": "llama4", "text_config": QWEN, "vision_config": {"x": 1}}, {}, "cannot take apart"),
    ({"model_type": "t5", "is_encoder_decoder": True}, {}, "reads an encoder"),
    ({"model_type": "bart", "is_encoder_decoder": True}, {}, "reads an encoder"),
    ({"model_type": "whisper"}, {}, "answers to images or sound"),
    ({"model_type": "own"}, {}, "which AutoModelForCausalLM of the installed transformers"),
    ({"model_type": "own"}, {"policy.external_modules": ["json"]}, ""),
    ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}}, {}, "policy.trust_remote_code = true"),
    (
        {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}},
        {"policy.trust_remote_code": True},
        "",
    ),
    ({"model_type": "own", "auto_map": {"AutoModel": "m.M"}}, {"policy.trust_remote_code": True}, "does not load"),
]  # fmt: skip
"""config.json, further values, and words of the refusal: "" where there is none."""


def model_at(path: Path, config: Mapping[str, Any], **files: Any) -> str:
    """A directory with this config.json and further files of JSON, by their stems."""
    path.mkdir(exist_ok=True)
    for stem, data in {"config": config, **files}.items():
        (path / f"{stem}.json").write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize(("config", "values", "words"), KINDS)
def test_models_that_do_not_load_as_text_models_are_refused(
    tmp_path: Path, config: dict[str, Any], values: dict[str, Any], words: str
) -> None:
    name = model_at(tmp_path / "m", config)
    problems = list(models_are_of_text(config_of(GRPO, values | {"policy.model_name_or_path": name})))
    assert [problem.key for problem in problems] == ["policy.model_name_or_path"] * bool(words)
    for problem in problems:
        assert words in problem.render()
        assert f'model_type = "{config.get("model_type")}"' in problem.message or "model_type" not in config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"do_sample": false, "top_p": 0.95}', ""),
        ('{"eos_token_id": 1,', "is not JSON"),
        ("[1]", "holds no JSON object"),
    ],
)
def test_a_generation_config_that_no_export_can_carry_is_refused(tmp_path: Path, text: str, words: str) -> None:
    name = model_at(tmp_path / "m", {"model_type": "qwen3"})
    (tmp_path / "m/generation_config.json").write_text(text)
    problems = generation_settings_are_read(config_of(GRPO, {"policy.model_name_or_path": name}))
    assert [words in problem.message for problem in problems] == [True] * bool(words)


CLASSES: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"architectures": ["Qwen3ForCausalLM"]}, ""),
    ({"architectures": None}, ""),
    ({"architectures": ["LlamaForCausalLM"]}, "the class LlamaForCausalLM; training loads Qwen3ForCausalLM, by"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "the class Qwen3ForSequenceClassification; training"),
    ({"architectures": ["X"], "auto_map": {"AutoModelForCausalLM": "m.M"}}, ""),
    ({"architectures": ["X"], "model_type": "own"}, ""),
]


@pytest.mark.parametrize(("config", "words"), CLASSES)
def test_a_class_that_is_not_trained_is_said(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    name = model_at(tmp_path / "m", {"model_type": "qwen3", **config})
    said = [w.message for w in classes_are_those_of_the_kind(config_of(GRPO, {"policy.model_name_or_path": name}))]
    assert len(said) == bool(words)
    assert all(words in message for message in said)


def test_a_directory_with_adapters_is_refused(tmp_path: Path) -> None:
    name = model_at(tmp_path / "m", {"model_type": "qwen3"}, adapter_config={})
    (problem,) = model_is_there(config_of(GRPO, {"policy.model_name_or_path": name}))
    assert "holds adapters" in problem.message


def test_each_model_that_a_trainer_loads_is_asked(tmp_path: Path) -> None:
    image, text = model_at(tmp_path / "vl", {"model_type": "qwen2_vl"}), model_at(tmp_path / "m", QWEN)
    values = {
        "policy.model_name_or_path": text, "reference.model_name_or_path": image, "critic.enable": True,
        "critic.model_name_or_path": image, "train.train_policy.advantage_estimator": "gae",
        "train.train_policy.kl_beta": 0.1, "teacher": [{"name": "t", "model": image}],
    }  # fmt: skip
    problems = list(models_are_of_text(config_of(GRPO, values)))
    wanted = ["reference.model_name_or_path", "critic.model_name_or_path", "teacher[0].model"]
    assert [problem.key for problem in problems] == wanted


# ---- tokenizers ------------------------------------------------------------------------------------------------

BASE = {f"w{i}": i for i in range(10)}


def tokenizer_json(*added: str, special: bool = True) -> dict[str, Any]:
    """A tokenizer of ten words, and these tokens behind them."""
    tokens = [
        {"id": 10 + i, "content": token, "special": special, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, token in enumerate(added)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": BASE, "unk_token": "w0"},
    }  # fmt: skip


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}
ADDED = {"10": {"content": "<a>", "special": True}, "12": {"content": "<b>", "special": False}}
TOKENIZERS: dict[str, tuple[dict[str, Any], int, str]] = {
    "plain": ({"tokenizer": tokenizer_json(), "tokenizer_config": GENERIC}, 9, ""),
    "of the file": ({"tokenizer": tokenizer_json("<a>"), "tokenizer_config": GENERIC}, 10, "warned"),
    "ordinary": (
        {"tokenizer": tokenizer_json("<a>", special=False), "tokenizer_config": GENERIC}, 10, "refused",
    ),
    "end": ({"tokenizer": tokenizer_json("<a>"), "tokenizer_config": GENERIC | {"eos_token": "<a>"}}, 10, "refused"),
    "in the template": (
        {"tokenizer": tokenizer_json("<a>"), "tokenizer_config": GENERIC | {"chat_template": "<a>"}}, 10, "refused",
    ),
    "of the settings": (
        {"tokenizer": tokenizer_json(), "tokenizer_config": GENERIC | {"added_tokens_decoder": ADDED}}, 11, "refused",
    ),
    "named, and nowhere else": (
        {"tokenizer": tokenizer_json("<a>"), "tokenizer_config": GENERIC | {"pad_token": "<pad>"}}, 11, "warned",
    ),
    "a list of further ones": (
        {"tokenizer": tokenizer_json(), "tokenizer_config": GENERIC | {"extra_special_tokens": ["<x>", "<y>"]}},
        11, "warned",
    ),
    "older file": (
        {"tokenizer": tokenizer_json(), "tokenizer_config": GENERIC,
         "special_tokens_map": {"eos_token": {"content": "<e>", "lstrip": False, "rstrip": False,
                                              "normalized": False, "single_word": False}}},
        10, "refused",
    ),
}  # fmt: skip
"""Files of a tokenizer, its largest id, and what is said of it next to a model of ten tokens."""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_beyond_the_models_vocabulary(tmp_path: Path, name: str) -> None:
    files, largest, said = TOKENIZERS[name]
    path = model_at(tmp_path / "m", QWEN | {"vocab_size": 10}, **files)
    vocabulary = numbered(path, None)
    assert vocabulary is not None
    loaded = AutoTokenizer.from_pretrained(path)
    assert dict(vocabulary.ids) == loaded.get_vocab()
    assert max(vocabulary.ids.values()) == largest
    config = config_of(GRPO, {"policy.model_name_or_path": path})
    refused, warned = list(tokens_have_rows(config)), list(unused_tokens_without_rows(config))
    assert (bool(refused), bool(warned)) == (said == "refused", said == "warned")
    for problem in [*refused, *warned]:
        assert problem.key == "policy.model_name_or_path"
        assert f"ids up to {largest}" in problem.message
        assert "10 rows" in problem.message
    wide = config_of(GRPO, {"policy.model_name_or_path": model_at(tmp_path / "m", QWEN | {"vocab_size": 13})})
    assert [*tokens_have_rows(wide), *unused_tokens_without_rows(wide)] == []


def test_a_tokenizer_of_its_own_and_the_jobs_template(tmp_path: Path) -> None:
    model = model_at(tmp_path / "m", QWEN | {"vocab_size": 10})
    other = model_at(tmp_path / "t", {}, tokenizer=tokenizer_json("<a>"), tokenizer_config=GENERIC)
    values = {"policy.model_name_or_path": model, "policy.tokenizer_name_or_path": other}
    assert list(tokens_have_rows(config_of(GRPO, values))) == []
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}<a>")
    values["rollout.multi_turn_config.custom_chat_template_path"] = str(tmp_path / "own.jinja")
    (problem,) = tokens_have_rows(config_of(GRPO, values))
    assert problem.key == "policy.tokenizer_name_or_path"
    assert "10 ('<a>')" in problem.message
