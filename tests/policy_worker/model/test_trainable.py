"""What is frozen stays bit by bit, and names that cannot be meant are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, MixtralConfig, PreTrainedModel

from policy_worker.errors import CheckpointError, SettingsError
from policy_worker.model.load import load_critic, load_model
from policy_worker.model.trainable import freeze, routers_of
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from tests.policy_worker.checkpoint_material import load_state, save_state
from tests.policy_worker.material import (
    encode_step,
    make_config,
    make_trainer,
    random_samples,
    tiny_experts,
    tiny_lm,
    train_step,
)
from weight_sync import hub_tensors

LAYER = "model.layers.0"


def grpo_of(
    group: RankGroup, directory: Path, lm: PreTrainedModel, policy: dict[str, Any], **train: Any
) -> tuple[Grpo, dict[str, Tensor]]:
    """The algorithm that trains the saved model with these keys of its section; the weights that it begins with."""
    lm.save_pretrained(directory)
    config = make_config(train=train, policy={"model_name_or_path": str(directory), **policy})
    trainer = make_trainer(config, group, load_model(config))
    samples = random_samples()
    source = BatchSource(
        group, lambda call: encode_step(samples, step=int(call.path.split("/")[3])), 1, config.staleness_bound
    )
    return Grpo(config, trainer, source), weights(trainer)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in hub_tensors(trainer.model.lm)}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


@pytest.mark.parametrize(
    "train",
    [{}, {"optm_name": "Muon"}, {"optm_name": "SGD"}, {"ema_decay": 0.5}, {"param_dtype": "bfloat16"}],
    ids=["adamw", "muon", "sgd", "ema", "sharded"],
)
def test_frozen_parameters_stay_and_others_move(tmp_path: Path, group: RankGroup, train: dict[str, Any]):
    chosen = {LAYER: False, f"{LAYER}.mlp": True, f"{LAYER}.mlp.up_proj.weight": False, "lm_head": False}
    grpo, before = grpo_of(group, tmp_path / "model", tiny_lm(), {"trainable_map": chosen}, **train)
    trainer = grpo._trainer
    for step in range(2):
        assert train_step(grpo, step)["grad_norm"] > 0
    expected = {
        name
        for name in before
        if name in (f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.down_proj.weight", "model.norm.weight")
        or name.startswith("model.layers.1.")
    }
    after = weights(trainer)
    assert moved(before, after) == expected, "the longest name decides, and what no name matches trains"
    assert {f"lm.{name}" for name in expected} == {
        name for name, p in trainer.model.named_parameters() if p in set(trainer.optimizer.parameters)
    }
    if trainer.ema is not None:
        assert trainer.ema.average.keys() == {f"lm.{name}" for name in expected}


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, group: RankGroup):
    policy = {"trainable_map": {LAYER: False}}
    grpo, _ = grpo_of(group, tmp_path / "model", tiny_lm(), policy)
    train_step(grpo, 0)
    found = save_state(grpo._trainer, tmp_path / "saved", 1)
    assert found is not None
    train_step(grpo, 1)
    again, _ = grpo_of(group, tmp_path / "model", tiny_lm(), policy)
    load_state(again._trainer, found.path, make_config())
    train_step(again, 1)
    assert not moved(weights(grpo._trainer), weights(again._trainer))
    other, _ = grpo_of(group, tmp_path / "model", tiny_lm(), {})
    with pytest.raises(CheckpointError, match=r"keep policy\.freeze_moe_router and policy\.trainable_map"):
        load_state(other._trainer, found.path, make_config())


def test_routers_stay_as_they_are(tmp_path: Path, group: RankGroup):
    policy = {"freeze_moe_router": True, "trainable_map": {"model.embed_tokens": False}}
    grpo, before = grpo_of(group, tmp_path / "model", tiny_experts(), policy)
    for step in range(2):
        train_step(grpo, step)
    stayed = before.keys() - moved(before, weights(grpo._trainer))
    routers = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}
    assert stayed == routers | {"model.embed_tokens.weight"}


def test_routers_of_a_critic_stay_as_they_are(tmp_path: Path):
    tiny_experts().save_pretrained(tmp_path)
    config = make_config(
        {"advantage_estimator": "gae"},
        policy={"model_name_or_path": str(tmp_path)},
        critic={"freeze_moe_router": True},
    )
    policy = load_model(config)
    assert all(p.requires_grad for p in policy.parameters())
    frozen = {n for n, p in load_critic(config, policy).named_parameters() if not p.requires_grad}
    assert frozen == {f"lm.layers.{layer}.mlp.gate.weight" for layer in range(2)}


SHAPE = {
    "vocab_size": 53, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (MixtralConfig(**SHAPE), "model.layers.0.mlp.gate"),
        (GptOssConfig(**SHAPE), "model.layers.0.mlp.router"),
        (
            AutoConfig.for_model(
                "deepseek_v3", **SHAPE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=0,
                q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
                moe_intermediate_size=8,
            ),
            "model.layers.0.mlp.gate",
        ),
    ],
    ids=["mixtral", "gpt-oss", "deepseek-v3"],
)  # fmt: skip
def test_routers_of_other_families_are_found(config: Any, name: str):
    assert [found for found, _ in routers_of(AutoModelForCausalLM.from_config(config))] == [name]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({f"{LAYER}.mlp.downproj": False}, (f"'{LAYER}.mlp.downproj'", f"nearest: {LAYER}.mlp.down_proj")),
        ({"model.layers.7": False}, ("'model.layers.7'", "model.layers.1")),
        ({"": False}, ("''", "nearest: ")),
        ({"model.rotary_emb": False}, ("no module with parameters named 'model.rotary_emb'",)),
        ({"model": False}, ("policy.trainable_map", "freeze all parameters")),
        ({"model": False, "lm_head": True}, ("one tied parameter", "'lm_head'", "'model'", "give both one value")),
    ],
    ids=["misspelt", "no such layer", "empty", "nothing in it", "all", "tied"],
)  # fmt: skip
def test_names_that_cannot_be_meant_are_refused(chosen: dict[str, bool], words: tuple[str, ...]):
    with pytest.raises(SettingsError) as refusal:
        freeze(tiny_lm(), chosen)
    assert all(word in str(refusal.value) for word in ("policy.trainable_map", *words))


def test_a_head_of_its_own_trains_alone():
    lm = tiny_lm(tie=False)
    freeze(lm, {"model": False, "lm_head": True})
    assert {name for name, p in lm.named_parameters() if p.requires_grad} == {"lm_head.weight"}


def test_routers_need_experts():
    with pytest.raises(SettingsError, match=r"critic\.freeze_moe_router = true: no router .* Qwen3ForCausalLM"):
        freeze(tiny_lm(), None, routers=True, section="critic")
