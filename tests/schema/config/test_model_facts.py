"""What a config.json says of a model's shape: tolerant of what is unknown, clear about what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schema.config.model_facts import BrokenModelError, ModelFacts, config_file, read_facts
from tests.support.effort import examples

QWEN = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}


def model(directory: Path, config: Any) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(directory)


def facts(directory: Path, config: Any, **override: Any) -> ModelFacts:
    found = read_facts(model(directory, config), None, override)
    assert found is not None
    return found


def test_a_plain_decoder(tmp_path: Path) -> None:
    found = facts(tmp_path, QWEN)
    assert (found.heads, found.kv_heads, found.layers, found.vocabulary) == (16, 8, 28, 151936)
    assert (found.longest, found.length_key) == (40960, "max_position_embeddings")
    assert (found.experts, found.has_rope, found.kind) == (0, True, "qwen3")


def test_other_spellings(tmp_path: Path) -> None:
    gpt2 = facts(
        tmp_path, {"model_type": "gpt2", "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    )
    assert (gpt2.heads, gpt2.kv_heads, gpt2.layers, gpt2.longest, gpt2.has_rope) == (12, 12, 12, 1024, False)
    nested = facts(tmp_path, {"model_type": "some_vl", "text_config": QWEN, "vision_config": {"depth": 3}})
    assert (nested.heads, nested.layers, nested.kind) == (16, 28, "qwen3")


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts(tmp_path: Path, name: str) -> None:
    assert facts(tmp_path, QWEN | {name: 64}).experts == 64


MOE = QWEN | {"num_experts": 64, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    ("change", "mixtures"),
    [
        ({}, 28),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 5]}, 26),
        ({"first_k_dense_replace": 3, "moe_layer_freq": 1}, 25),
        ({"num_dense_layers": 1}, 27),
        ({"moe_layer_start_index": 1, "moe_layer_interval": 1}, 27),
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, 2),
        ({"mlp_layer_types": ["moe", "hash_moe"]}, None),
        ({"decoder_sparse_step": 2}, None),
        ({"moe_layer_freq": [0, 1]}, None),
        ({"mlp_only_layers": 3}, None),
        ({"num_hidden_layers": "many"}, None),
    ],
)
def test_layers_of_experts(tmp_path: Path, change: dict[str, Any], mixtures: int | None) -> None:
    found = facts(tmp_path, MOE | change)
    assert (found.mixtures, found.chosen) == (mixtures, 8)


@pytest.mark.parametrize("hint", [{"moe_layers": [1]}, {"experts": "some"}, {"num_attention_heads": None}])
def test_no_experts_is_said_only_where_it_is_sure(tmp_path: Path, hint: dict[str, Any]) -> None:
    assert facts(tmp_path, QWEN | hint).experts is None


@pytest.mark.parametrize(
    ("change", "longest"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 163840),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 81920),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, 81920),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 327680),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 40960),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 40960),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 40960),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 40960),
        ({"rope_scaling": {"type": "linear", "factor": None}}, 40960),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 40960),
        ({"seq_length": 2048}, 2048),
        ({"model_max_length": 100000}, 100000),
    ],
)
def test_the_longest_sequence(tmp_path: Path, change: dict[str, Any], longest: int) -> None:
    assert facts(tmp_path, QWEN | change).longest == longest


def test_what_is_not_known_is_none(tmp_path: Path) -> None:
    empty = facts(tmp_path, {})
    assert (empty.heads, empty.kv_heads, empty.layers, empty.experts, empty.longest) == (None,) * 5
    latent = facts(tmp_path, QWEN | {"kv_lora_rank": 512})
    assert (latent.heads, latent.kv_heads) == (16, None)
    assert facts(tmp_path, QWEN | {"num_attention_heads": [8, 16]}).heads is None


def test_overrides_stand_above_the_file(tmp_path: Path) -> None:
    assert facts(tmp_path, QWEN, max_position_embeddings=1024).longest == 1024


@pytest.mark.parametrize(("text", "why"), [("{", "is not JSON"), ("[1]", "no JSON object"), ("\xff", "is not JSON")])
def test_a_broken_file_is_an_error(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BrokenModelError, match=why):
        read_facts(str(tmp_path), None, {})


def test_a_model_that_is_not_here_has_no_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_facts("owner/name", None, {}) is None
    assert read_facts(str(tmp_path / "nothing"), None, {}) is None


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_of_the_hub_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    below = {"HF_HUB_CACHE": ".", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    folder = tmp_path / below / "models--owner--name"
    commit = "0123abcd"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    model(folder / "snapshots" / commit, QWEN)
    for revision in (None, "main", commit):
        found = read_facts("owner/name", revision, {})
        assert found is not None
        assert found.layers == 28
    assert config_file("owner/name", "other") is None
    assert config_file("owner/other", None) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**400) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["factor", "rope_type", "type"]), inner)
    ),
    max_leaves=4,
)
names = st.sampled_from(
    [
        *QWEN,
        "rope_scaling",
        "rope_parameters",
        "text_config",
        "num_experts",
        "n_positions",
        "seq_len",
        "moe_layer_freq",
    ]
)


@pytest.mark.scaled
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=st.dictionaries(names, values, max_size=4))
def test_whatever_is_in_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = facts(tmp_path, QWEN | changes)
    assert found.mixtures is None or found.mixtures >= 0
    for count in (found.heads, found.kv_heads, found.layers, found.vocabulary, found.longest, found.chosen):
        assert count is None or count > 0


@pytest.mark.parametrize(
    ("change", "carries"),
    [
        ({}, False),
        ({"model_type": "mamba"}, True),
        ({"model_type": "jamba", "attn_layer_period": 8}, True),
        ({"model_type": "falcon_h1"}, True),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, True),
        ({"model_type": "lfm2", "layer_types": ["full_attention", "full_attention"]}, False),
        ({"model_type": "qwen3_next"}, True),
        ({"model_type": "some_new", "layer_types": ["sliding_attention", "linear_attention"]}, True),
        ({"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"]}, True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, False),
        ({"layer_types": [1, None, {}]}, False),
    ],
)
def test_state_along_the_row(tmp_path: Path, change: dict[str, Any], carries: bool) -> None:
    assert facts(tmp_path, QWEN | change).carries_state is carries
    assert facts(tmp_path, {"text_config": QWEN | change}).carries_state is carries
