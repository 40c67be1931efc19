"""Models cut into stages: together they have each parameter under its name, and compute what the whole does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.model.load import load_model
from policy_worker.model.model import Backbone, PolicyModel
from policy_worker.model.stages import parts_of
from policy_worker.parallel.pipeline_stages import cut
from tests.policy_worker.material import TINY, VOCABULARY, make_config, tiny_critic, tiny_lm


def test_layers_are_dealt_evenly():
    assert parts_of(5, 3) == [range(0, 2), range(2, 4), range(4, 5)]
    assert parts_of(4, 4) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]


def tiny_of(kind: str, **shape: Any) -> PreTrainedModel:
    """A model of another architecture, in the usual size. shape: entries of its configuration."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=VOCABULARY, **(TINY | shape)))


def cuts(make: Any, ranks: int, chunks: int = 1) -> Iterator[Backbone]:
    for rank in range(ranks):
        model = make()
        cut(model, rank, ranks, chunks)
        yield model


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": False}),
    ("qwen3", {}),
    ("gemma2", {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    ("gemma3_text", {"sliding_window": 4}),
    ("phi3", {}),
    ("granite", {"embedding_multiplier": 3.0}),
    ("lfm2", {}),
    ("qwen3_moe", {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("kind", "shape"), SHAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_stages_have_every_parameter_once_under_its_name(kind: str, shape: dict[str, Any], chunks: int):
    def make() -> PolicyModel:
        return PolicyModel(tiny_of(kind, num_hidden_layers=6, **shape))

    whole = make().state_dict()
    found: dict[str, torch.Tensor] = {}
    for model in cuts(make, 3, chunks):
        stages = model.stages
        assert stages is not None
        own = {name: tensor for name, tensor in model.state_dict().items() if not stages.has_elsewhere(name)}
        assert not own.keys() & found.keys()
        assert model.state_dict().keys() - own.keys() == ({stages.tied} if stages.tied and stages.has_last else set())
        found |= own
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_a_critic_is_cut_and_its_head_is_last():
    first, last = cuts(tiny_critic, 2)
    assert (first.value_head, last.stages.width) == (None, 32)
    assert "value_head" in last.state_dict()


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(SettingsError, match=r"2 layers, too few for 4 stages: write .*pp_size = 1 or less"):
        cut(PolicyModel(tiny_lm()), 0, 2, 2)


@pytest.mark.parametrize(
    ("kind", "reason"), [("gpt2", "wpe.weight is neither of its layers"), ("opt", "not one row of layers")]
)
def test_an_architecture_that_has_no_such_stages_is_refused(kind: str, reason: str):
    with pytest.raises(SettingsError, match=f"cannot be cut into stages: .*{reason}.*pp_size = 1"):
        cut(PolicyModel(tiny_of(kind)), 0, 2)


def test_a_model_without_weights_is_proven_on_a_copy_by_one_rank(tmp_path: Path):
    shared = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0}
    kinds = ["sliding_attention", "full_attention"] * 3
    for kind, shape in (("gemma4_text", shared | {"layer_types": kinds}), ("qwen3", {})):
        tiny_of(kind, num_hidden_layers=6, **shape).save_pretrained(tmp_path / kind)

    def load(kind: str) -> PolicyModel:
        policy = {"model_name_or_path": str(tmp_path / kind), "model_gradient_checkpointing": True}
        return load_model(make_config(policy=policy))

    with pytest.raises(SettingsError, match="does not go through its layers alone"):
        cut(load("gemma4_text"), 0, 2)
    cut(load("gemma4_text"), 0, 2, lead=lambda _: 32)
    cut(model := load("qwen3"), 0, 2)
    assert model.stages.width == 32
    assert all(parameter.is_meta for parameter in model.parameters())


class Shared(nn.Module):
    """A layer that leaves something for the next one, or uses it."""

    left = torch.zeros(1)

    def __init__(self, layer: nn.Module, *, leaves: bool) -> None:
        super().__init__()
        self.layer, self.leaves = layer, leaves

    def forward(self, states: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        found: torch.Tensor = self.layer(states if self.leaves else states + Shared.left, *rest, **more)
        if self.leaves:
            Shared.left = found.mean()
        return found


@pytest.mark.parametrize("leaves", [0, 1])
def test_layers_that_share_state_across_stages_are_refused(leaves: int):
    lm = tiny_lm(layers=4)
    lm._no_split_modules = ["Qwen3DecoderLayer", "Shared"]
    for number in (leaves, leaves + 1):
        lm.model.layers[number] = Shared(lm.model.layers[number], leaves=number == leaves)
    if leaves == 0:  # both in the first stage
        cut(PolicyModel(lm), 0, 2)
        return
    with pytest.raises(SettingsError, match=r"compute something else than the whole model \(off by"):
        cut(PolicyModel(lm), 0, 2)
