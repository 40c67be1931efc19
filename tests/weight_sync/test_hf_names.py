"""Published names, shapes and values are those that `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.devices import DEVICE
from tests.support.fetched import fetch
from tests.weight_sync.helpers import bits, put
from weight_sync import DirectoryStore, hub_tensors


def config(kind: str, **changes: Any) -> Any:
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        **changes,
    }  # fmt: skip
    return getattr(transformers, f"{kind}Config")(**fields)


def model_of(kind: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config(kind, **changes))


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "untied": ("Qwen3", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "biases": ("Qwen2", {"tie_word_embeddings": True}),
    "experts": ("Qwen3Moe", {"tie_word_embeddings": False, **EXPERTS}),
    "fused projections": ("Phi3", {"tie_word_embeddings": False, "pad_token_id": 0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loaded", [False, True])
def test_equals_what_save_pretrained_writes(case: str, loaded: bool, tmp_path: Path) -> None:
    import transformers

    kind, changes = CASES[case]
    model = model_of(kind, **changes)
    model.save_pretrained(tmp_path / "model")
    if loaded:  # a loaded model remembers how its weights were converted
        model = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    publication = put(DirectoryStore(tmp_path / "store"), hub_tensors(model.to(DEVICE)))
    found = dict(fetch(tmp_path / "store", publication).tensors())
    assert found.keys() == saved.keys()
    assert {n: (t.shape, bits(t)) for n, t in found.items()} == {n: (t.shape, bits(t)) for n, t in saved.items()}
    assert ("lm_head.weight" in found) == (not model.config.tie_word_embeddings)


def test_experts_are_turned_back_layer_by_layer() -> None:
    """No more than one layer is gathered before its tensors are handed on."""
    model = model_of("Qwen3Moe", **EXPERTS)
    gathered: list[str] = []

    def gather(name: str, tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(name)
        return tensor

    names = hub_tensors(model, gather)
    first = next(name for name, _ in names if "layers.0." in name)
    assert "experts" in first or "layers.0." in first
    assert not any("layers.1." in name for name in gathered)
    assert any("layers.1.mlp.experts.3.down_proj.weight" in name for name, _ in names)


def test_values_are_gathered_once_each_in_one_order() -> None:
    model, calls = model_of("Qwen3", tie_word_embeddings=True), []

    def gather(name: str, tensor: torch.Tensor) -> torch.Tensor:
        calls.append(name)
        return tensor

    names = [name for name, _ in hub_tensors(model, gather)]
    assert calls == names == [n for n in model.state_dict() if n != "lm_head.weight"]


def test_an_untied_alias_is_published() -> None:
    """A model that says it ties, but whose output layer has weights of its own: dropping it would lose them."""
    model = model_of("Qwen3", tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(torch.ones(64, 32))
    assert "lm_head.weight" in dict(hub_tensors(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_transfer_dtype(dtype: torch.dtype | None) -> None:
    model = model_of("Qwen3").to(DEVICE)
    for name, tensor in hub_tensors(model, dtype=dtype):
        expected = model.state_dict()[name]
        assert bits(tensor) == bits(expected.to(dtype) if dtype else expected)


def test_only_floating_point_values_are_cast() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.tensor([1, 2]))
            self.register_buffer("eighth", torch.ones(2).to(torch.float8_e4m3fn))
            self.register_buffer("scratch", torch.ones(2), persistent=False)
            self.weight = torch.nn.Parameter(torch.ones(2))

    found = {n: t.dtype for n, t in hub_tensors(Module(), dtype=torch.bfloat16)}
    assert found == {"weight": torch.bfloat16, "steps": torch.int64, "eighth": torch.float8_e4m3fn}
