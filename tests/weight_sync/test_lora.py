"""Adapters are published as peft itself would merge or save them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from tests.weight_sync.helpers import all_bits, bits
from tests.weight_sync.test_hf_names import model_of
from weight_sync import HubNames, WeightError


def adapted(*, tie: bool = False, **settings: Any) -> Any:
    """A model whose adapters do something."""
    model = get_peft_model(model_of("Qwen3", tie_word_embeddings=tie), LoraConfig(r=4, lora_alpha=7, **settings))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(generator=generator)
    return model


CASES: dict[str, dict[str, Any]] = {
    "projections": {"target_modules": ["q_proj", "down_proj"]},
    "everything": {"target_modules": "all-linear"},
    "rank-stabilised": {"target_modules": ["v_proj"], "use_rslora": True},
    "decomposed": {"target_modules": "all-linear", "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "whole head": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_that_peft_merges(case: str) -> None:
    model = adapted(**CASES[case])
    before = all_bits(model.state_dict())
    found = dict(HubNames(model).tensors())
    assert all_bits(model.state_dict()) == before
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        assert tensor.dtype == merged[name].dtype
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)
    plain = dict(HubNames(model_of("Qwen3", tie_word_embeddings=False)).tensors())
    assert any(not torch.equal(plain[name], tensor) for name, tensor in found.items())


def test_merged_weights_are_rounded_once() -> None:
    model = adapted(target_modules=["q_proj"])
    exact = dict(HubNames(model).tensors())
    for name, tensor in HubNames(model).tensors(dtype=torch.bfloat16):
        assert bits(tensor) == bits(exact[name].to(torch.bfloat16))
    low = copy.deepcopy(model).to(torch.bfloat16)
    name = "model.layers.1.self_attn.q_proj.weight"
    layer = low.get_base_model().model.layers[1].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    expected = (layer.base_layer.weight.float() + (b @ a) * (7 / 4)).to(torch.bfloat16)
    assert bits(dict(HubNames(low).tensors())[name]) == bits(expected)


@pytest.mark.parametrize("case", CASES)
def test_the_adapter_alone_is_what_peft_saves(case: str) -> None:
    model = adapted(**CASES[case])
    found = dict(HubNames(model, lora="adapter").tensors())
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert all_bits(found) == all_bits(saved)


def test_only_active_adapters_count() -> None:
    model = adapted(target_modules=["q_proj"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    first = all_bits(HubNames(model).tensors())
    model.set_adapter("other")
    second = all_bits(HubNames(model).tensors())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert first.keys() == second.keys()
    assert first[name] != second[name]
    assert all(".other" not in name for name, _ in HubNames(model, lora="adapter").tensors())
    model.base_model.set_adapter(["default", "other"])
    both = dict(HubNames(model).tensors())
    assert bits(both[name]) not in (first[name], second[name])
    with pytest.raises(WeightError, match="only one can be published alone"):
        HubNames(model, lora="adapter")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["embed_tokens"], "use_dora": True}, "DoRA"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "more than the product"),
        ({"target_modules": ["embed_tokens"], "tie": True}, "is tied to"),
    ],
)
def test_what_would_be_merged_wrongly_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightError, match=message):
        HubNames(adapted(**settings))


def test_an_adapter_that_is_merged_in_memory_is_refused() -> None:
    model = adapted(target_modules=["q_proj"])
    model.merge_adapter()
    with pytest.raises(WeightError, match="are merged in memory"):
        HubNames(model)
