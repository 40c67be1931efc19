"""Counting parameters without loading: from safetensors headers, from config.json, from the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from launcher.commands.tiny_model import write_tiny_model
from launcher.preflight.models import Shape, UnknownModelError, find_model

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 12, "vocab_size": 20,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPE = Shape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=4, intermediate=12, vocabulary=20)
LAYER = 8 * 16 * 2 + 8 * 8 * 2 + 3 * 8 * 12 + 2 * 8 + 2 * 4
"""By hand: q and o, k and v, the gated MLP, two norms, q and k norm."""


def model_of(directory: Path, config: dict[str, Any], **files: dict[str, tuple[int, ...]]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name, shapes in files.items():
        tensors = {key: np.zeros(shape, np.float16) for key, shape in shapes.items()}
        save_file(tensors, directory / f"{name}.safetensors")
    return directory


def test_headers_are_counted_over_all_files(tmp_path: Path) -> None:
    first = {"model.embed_tokens.weight": (20, 8), "model.layers.0.a": (3, 5), "model.layers.1.a": (3, 7)}
    path = model_of(tmp_path / "m", CONFIG, one=first, two={"model.layers.1.b": (2,), "model.norm.weight": (8,)})
    model = find_model(str(path), None, {})
    assert model.parameters == 160 + 15 + 21 + 2 + 8
    assert (model.layer, model.rest) == (23, 168)
    assert model.shape == SHAPE
    assert "safetensors" in model.source


def test_a_saved_alias_of_the_embeddings_counts_once(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": (20, 8), "lm_head.weight": (20, 8)}
    assert find_model(str(model_of(tmp_path / "tied", CONFIG, m=tensors)), None, {}).parameters == 160
    untied = {**CONFIG, "tie_word_embeddings": False}
    assert find_model(str(model_of(tmp_path / "untied", untied, m=tensors)), None, {}).parameters == 320


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({}, 20 * 8 + 8 + 2 * LAYER),
        ({"tie_word_embeddings": False}, 2 * 20 * 8 + 8 + 2 * LAYER),
        ({"model_type": "llama"}, 20 * 8 + 8 + 2 * (LAYER - 8)),
        ({"model_type": "qwen2"}, 20 * 8 + 8 + 2 * (LAYER - 8 + 16 + 2 * 8)),
    ],
)
def test_config_alone_is_enough_for_plain_decoders(tmp_path: Path, changes: dict[str, Any], parameters: int) -> None:
    model = find_model(str(model_of(tmp_path / "m", {**CONFIG, **changes})), None, {})
    assert model.parameters == parameters
    assert "config.json" in model.source


OF_EXPERTS = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "parameters", "experts"),
    [
        ("mixtral", {"num_local_experts": 4}, 12_240, 2 * 4 * 3 * 16 * 24),
        ("olmoe", {"num_experts": 4}, 12_288, 2 * 4 * 3 * 16 * 24),
        (
            "qwen2_moe",
            {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 20},
            8_112,
            2 * 4 * 3 * 16 * 8,
        ),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 6}, 6_888, 2 * 4 * 3 * 16 * 8),
    ],
)
def test_config_alone_is_enough_for_mixtures_of_them(
    tmp_path: Path, kind: str, changes: dict[str, Any], parameters: int, experts: int
) -> None:
    """Numbers of parameters as transformers makes these models."""
    model = find_model(str(model_of(tmp_path / "m", {**OF_EXPERTS, "model_type": kind, **changes})), None, {})
    assert (model.parameters, model.experts) == (parameters, experts)
    with pytest.raises(UnknownModelError, match="some of its layers have no experts"):
        find_model(
            str(model_of(tmp_path / "n", {**OF_EXPERTS, "model_type": kind, "mlp_only_layers": [0]})), None, {}
        )


def test_config_and_headers_of_a_real_model_agree(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    counted = find_model(str(tmp_path / "tiny"), None, {})
    (tmp_path / "tiny" / "model.safetensors").unlink()
    derived = find_model(str(tmp_path / "tiny"), None, {})
    assert (counted.parameters, counted.layer, counted.rest) == (329_472, 147_776, 33_920)
    assert (derived.parameters, derived.layer, derived.rest) == (329_472, 147_776, 33_920)


def test_models_of_the_hub_are_found_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--owner--name"
    model_of(folder / "snapshots" / "abc", CONFIG)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc\n")
    for env in ({"HF_HUB_CACHE": str(tmp_path / "hub")}, {"HF_HOME": str(tmp_path)}):
        assert find_model("owner/name", None, env).path == folder / "snapshots" / "abc"
        assert find_model("owner/name", "abc", env).shape == SHAPE
    with pytest.raises(UnknownModelError, match="is not on this machine"):
        find_model("owner/other", None, {"HF_HOME": str(tmp_path)})


def test_experts_are_counted_apart(tmp_path: Path) -> None:
    of_experts = {"moe_intermediate_size": 5, "num_experts_per_tok": 3, "num_experts": 4}
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": (4, 10, 8), "model.layers.0.mlp.gate.weight": (4, 8)}
    model = find_model(str(model_of(tmp_path / "m", {**CONFIG, **of_experts}, m=tensors)), None, {})
    assert (model.parameters, model.experts) == (352, 320)
    assert model.shape is not None
    assert model.shape.intermediate == 15, "those of one token"


def test_a_vision_model_has_its_text_part_below(tmp_path: Path) -> None:
    path = model_of(tmp_path / "m", {"model_type": "vl", "text_config": CONFIG}, m={"x": (3,)})
    assert find_model(str(path), None, {}).shape == SHAPE


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"[]", "config.json holds no JSON object"),
        ("m.safetensors", b"", "cannot be read"),
        ("m.safetensors", b"\xff" * 8, "is not a safetensors file"),
        ("m.safetensors", b"\x02\0\0\0\0\0\0\0{}", "no safetensors files"),
        ("m.safetensors", b'\x08\0\0\0\0\0\0\0{"a": 1}', "cannot be read"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    model_of(tmp_path / "m", {"model_type": "odd"})
    (tmp_path / "m" / name).write_bytes(content)
    with pytest.raises(UnknownModelError, match=message):
        find_model(str(tmp_path / "m"), None, {})
