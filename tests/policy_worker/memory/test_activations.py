"""What is computed again, or kept in host memory, changes no gradient, and less stays on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from policy_worker.errors import SettingsError
from policy_worker.memory import activations
from policy_worker.model.load import kept_activations
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import prepare_model
from tests.policy_worker.material import make_config, tiny_family
from tests.support.devices import DEVICE

SHAPE = (2, 50)
WAYS: dict[str, dict[str, Any]] = {
    "full": {"recompute": True},
    "attention": {"recompute": True, "parts": ["attention"]},
    "experts": {"recompute": True, "parts": ["experts"]},
    "both": {"recompute": True, "parts": ["attention", "experts"]},
}


def gradients(model: PolicyModel, hooks: tuple[Callable[..., Any], Callable[..., Any]]) -> dict[str, Tensor]:
    ids = torch.arange(100, device=DEVICE).reshape(SHAPE) % 20 + 1
    with saved_tensors_hooks(*hooks):
        hidden = model._hidden(ids, torch.arange(SHAPE[1], device=DEVICE).expand(SHAPE))
    hidden.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run(family: str, **kept: Any) -> tuple[dict[str, Tensor], int]:
    """Gradients, and the bytes that the forward has kept on the device."""
    model = prepare_model(PolicyModel(tiny_family(family)), packed=False, **kept).to(DEVICE)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    return gradients(model, (pack, lambda tensor: tensor)), sum(storages.values())


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("family", "fewer"), [("qwen3", ["attention", "full"]), ("glm4_moe", [*WAYS])])
def test_what_is_computed_again_gives_the_same_gradients(family: str, fewer: list[str]):
    expected, everything = run(family, recompute=False)
    kept = {}
    for way in fewer:
        found, kept[way] = run(family, **WAYS[way])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), way
    assert all(kept["full"] < size < everything for way, size in kept.items() if way != "full")
    if family == "glm4_moe":
        assert kept["both"] < min(kept["attention"], kept["experts"])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("way", [None, "full", "attention"])
def test_what_is_kept_in_host_memory_gives_the_same_gradients(
    family: str, way: str | None, monkeypatch: pytest.MonkeyPatch
):
    kept = WAYS[way] if way else {"recompute": False}
    expected, _ = run(family, **kept)
    left: list[tuple[int, Tensor]] = []
    leave = activations._Lane.leave
    monkeypatch.setattr(
        activations._Lane, "leave", lambda lane, t: left.append((t.data_ptr(), leave(lane, t))) or left[-1][1]
    )
    found, _ = run(family, **kept, on_host=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(host.device.type == "cpu" and host.data_ptr() != source for source, host in left)
    states = SHAPE[0] * SHAPE[1] * 32 * 4  # [R, L, D] in float32
    sizes = [host.numel() for _, host in left]
    if way == "full":  # what enters each of two layers, and nothing else
        assert sizes == [states] * 2
    else:
        assert sizes.count(states) > 4


def test_host_memory_is_given_back_with_the_backward(monkeypatch: pytest.MonkeyPatch):
    layer, made = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), []
    original = activations._Stored.__init__

    def begun(self: activations._Stored, *arguments: Any) -> None:
        made.append(activations.ref(self))
        original(self, *arguments)

    monkeypatch.setattr(activations._Stored, "__init__", begun)
    activations.keep_on_host(layer)
    x = torch.randn(32, 64, requires_grad=True)
    out = layer(x)
    assert len(made) == 2  # what enters, once; what ReLU gives, which the last layer needs as well
    assert all(stored() is not None for stored in made)
    out.sum().backward()
    assert all(stored() is None for stored in made)
    assert x.grad is not None
    with torch.no_grad():
        layer(x)
    assert len(made) == 2


def test_keys_say_what_is_kept():
    def kept(**train: Any) -> dict[str, Any]:
        config = make_config(train=train, policy={"model_gradient_checkpointing": True})
        return kept_activations(config.policy, config.train)

    assert kept() == {"recompute": True, "parts": [], "on_host": False}
    assert kept(recompute_moe_layers=True)["parts"] == ["experts"]
    both = {"recompute_granularity": "selective", "recompute_moe_layers": True}
    assert kept(**both)["parts"] == ["attention", "experts"]
    assert kept(activation_offload=True)["on_host"]


def test_a_model_without_experts_cannot_recompute_them_alone():
    with pytest.raises(SettingsError, match="names no experts that could be recomputed alone"):
        prepare_model(PolicyModel(tiny_family("qwen3")), packed=False, recompute=True, parts=["experts"])
