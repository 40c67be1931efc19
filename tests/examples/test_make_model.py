"""The model made on the spot is what transformers expects and what the task needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_model import END, WHOLE_TOKENS, make_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller.data.reading.synthetic import AdditionOptions, AdditionSource
from controller.data.tokenizer import PromptTokenizer


def test_it_loads_and_is_tiny(tiny_model: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 0.3e6 < sum(p.numel() for p in model.parameters()) < 0.4e6
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_weights_are_drawn_wide_enough_to_learn(tiny_model: Path):
    for name, weight in load_file(tiny_model / "model.safetensors").items():
        if weight.dim() == 2 and "embed" not in name:
            assert weight.std().item() == pytest.approx(0.06, rel=0.05), name


def test_the_seed_decides_the_weights(tiny_model: Path, tmp_path: Path):
    same, other = tmp_path / "same", tmp_path / "other"
    make_model(same, seed=1)
    make_model(other, seed=2)
    first, again, different = (load_file(d / "model.safetensors") for d in (tiny_model, same, other))
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.embed_tokens.weight"
    assert not torch.equal(first[name], different[name])


def test_the_words_of_the_task_are_single_tokens_and_survive_decoding(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for word in WHOLE_TOKENS:
        assert len(tokenizer.encode(word)) == 1
    text = "<think>7+6=13, 4+8+1=13</think>\\boxed{633} ünï\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert len(tokenizer.encode("7+6=13")) == 6, "every character is a token"


def test_a_demonstration_is_learnt_from_where_the_model_begins(tiny_model: Path):
    tokenizer = PromptTokenizer(str(tiny_model))
    row = next(AdditionSource(AdditionOptions(n=1, demonstrations=True), "train", 1).rows())
    [(ids, mask)] = tokenizer.conversations([row["conversations"]])
    [prompt] = tokenizer.prompts([row["prompt"]])
    decode = AutoTokenizer.from_pretrained(tiny_model).decode
    assert ids[: len(prompt)].tolist() == prompt.tolist()
    assert not mask[: len(prompt)].any()
    assert decode(ids[mask == 1]) == row["conversations"][1]["content"] + END


def test_the_longest_answer_fits_the_response_length(tiny_model: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    source = AdditionSource(AdditionOptions(n=500, demonstrations=True), "train", 1)
    longest = max(len(tokenizer.encode(row["conversations"][1]["content"])) for row in source.rows())
    assert longest + 1 <= 44
