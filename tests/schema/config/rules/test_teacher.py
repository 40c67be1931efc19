"""What `[[teacher]]` refuses, and what it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schema.config import Config, check_rules, check_warnings
from tests.schema.config_samples import GRPO
from tests.schema.remedies import config_of

NEAR: dict[str, Any] = {"name": "near", "model": "Qwen/Qwen3-8B"}
FAR: dict[str, Any] = {"name": "far", "url": "https://teacher.example:8000"}


def job(*teachers: dict[str, Any], **keys: Any) -> Config:
    return config_of(GRPO, {"teacher": list(teachers), **{k.replace("__", "."): v for k, v in keys.items()}})


def said(config: Config) -> dict[str, str]:
    return {
        problem.key: problem.message
        for problem in check_rules(config)
        if any(key.startswith("teacher") for key in (problem.key, *problem.related))
    }


@pytest.mark.parametrize(
    ("teachers", "key", "words"),
    [
        ([NEAR, {**FAR, "name": "near"}], "teacher[1].name", '2 teachers are called "near"'),
        ([{"name": "a"}], "teacher[0]", "neither model nor url"),
        ([{**NEAR, "url": "http://a:1"}], "teacher[0]", "both model and url"),
        ([{**NEAR, "model": "./none"}], "teacher[0].model", "./none does not exist"),
        ([FAR, {**NEAR, "timeout": 3.0}], "teacher[1].timeout", "it belongs to url"),
        ([{**NEAR, "served_model": "x"}], "teacher[0].served_model", "it belongs to url"),
        ([{**FAR, "offload": True}], "teacher[0].offload", "true has no effect: it belongs to model"),
        ([{**FAR, "mini_batch": 2}], "teacher[0].mini_batch", "it belongs to model"),
        ([{**NEAR, "top_k": 5}], "teacher[0].top_k", '5 has no effect: teacher[0].loss = "reverse_kl_advantage"'),
        ([{**NEAR, "beta": 0.1}], "teacher[0].beta", "0.1 has no effect"),
        ([{**FAR, "loss": "reverse_kl_full"}], "teacher[0].loss", "needs the whole distribution"),
    ],
)  # fmt: skip
def test_faults(teachers: list[dict[str, Any]], key: str, words: str) -> None:
    found = said(job(*teachers))
    assert words in found[key]


def test_teachers_know_no_filters() -> None:
    filtered = {"rollout__sampling_config__top_k": 20}
    key = "rollout.sampling_config.sampling_correction"
    assert "teachers have none" in said(job(NEAR, **filtered))[key]
    raw = filtered | {"rollout__sampling_config__sampling_correction": "raw"}
    assert key not in said(job(NEAR, **raw))


def test_a_server_needs_temperature_1() -> None:
    assert said(job(NEAR, FAR)) == {}
    assert (
        "log-probs are of temperature 1"
        in said(job(NEAR, FAR, train__train_policy__temperature=0.7))["teacher[1].url"]
    )
    assert said(job(NEAR, train__train_policy__temperature=0.7)) == {}


def test_weights_of_0_are_taken_next_to_a_teacher() -> None:
    nothing = {"train__train_policy__reward_function": {"boxed_math": 0.0}}
    assert any("all weights are 0" in problem.message for problem in check_rules(job(**nothing)))
    assert not any("all weights are 0" in problem.message for problem in check_rules(job(NEAR, **nothing)))


def test_a_key_over_plain_http_is_a_warning() -> None:
    def warned(url: str) -> bool:
        found = check_warnings(job({"name": "far", "url": url, "key_variable": "KEY"}))
        return any("is sent unencrypted" in warning.message for warning in found)

    assert warned("http://teacher.example:8000")
    assert not warned("http://127.0.0.1:8000")
    assert not warned("https://teacher.example:8000")


def model(path: Path, tokens: dict[str, int], size: int, added: tuple[str, ...] = (), rows: bool = False) -> str:
    """A model's directory: its tokenizer's table, or its rows in order, and the number of its embeddings."""
    path.mkdir()
    table: Any = [[token, 0.0] for token in tokens] if rows else tokens
    extra = [{"content": token, "id": len(tokens) + i} for i, token in enumerate(added)]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": table}, "added_tokens": extra}))
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    return str(path)


def test_tokens_are_compared_where_both_are_here(tmp_path: Path) -> None:
    own = model(tmp_path / "own", {"a": 0, "b": 1}, 4, ("<end>",))
    cases = {
        model(tmp_path / "same", {"a": 0, "b": 1}, 4, ("<end>",), rows=True): "",
        model(tmp_path / "more", {"a": 0, "b": 1}, 4, ("<end>", "<think>")): "",
        model(tmp_path / "swapped", {"b": 0, "a": 1}, 4, ("<end>",)): "token 0 is 'a' here and 'b' there",
        model(tmp_path / "less", {"a": 0, "b": 1}, 4): "token 2 is '<end>' here and no token there",
    }  # fmt: skip
    for name, words in cases.items():
        found = said(job({**NEAR, "model": name}, policy__model_name_or_path=own))
        assert words in found.get("teacher[0].model", ""), name
        assert bool(found) == bool(words), found


@pytest.mark.parametrize(("size", "loss", "words"), [
    (3, "reverse_kl_advantage", "has 3 tokens, and the policy 4: it is of another vocabulary"),
    (5, "reverse_kl_advantage", ""),
    (5, "reverse_kl_full", '"reverse_kl_full" compares all of them'),
    (5, "top_k_jsd", '"top_k_jsd" compares all of them'),
])  # fmt: skip
def test_sizes_are_compared(tmp_path: Path, size: int, loss: str, words: str) -> None:
    tokens = {"a": 0, "b": 1}
    own, other = model(tmp_path / "own", tokens, 4), model(tmp_path / "other", tokens, size)
    found = said(job({**NEAR, "model": other, "loss": loss}, policy__model_name_or_path=own))
    assert words in found.get("teacher[0].model", "")
    assert bool(found) == bool(words)
