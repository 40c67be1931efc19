"""Models that each rank reads in part are those that transformers reads, bit by bit, and need no more memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from policy_worker.errors import SettingsError
from policy_worker.model import probe
from policy_worker.model.load import ModelSource, load_model
from policy_worker.model.logits.head import Head
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import prepare_model
from policy_worker.parallel.rank_group import RankGroup
from tests.policy_worker.load_program import assert_same, compare, read_whole, trainer_of
from tests.policy_worker.material import make_config, tiny_lm, write_model
from tests.policy_worker.model.test_model import HEADS
from tests.policy_worker.ranks import start_ranks, wait_ranks
from weight_sync import hub_tensors

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "gemma3": Gemma3TextConfig(
        **SHAPE, head_dim=8, layer_types=["sliding_attention", "full_attention"], sliding_window=4
    ),
    "phi3": Phi3Config(**SHAPE),
    "phi, whose head has a bias": PhiConfig(**SHAPE),
    "qwen3 of experts": Qwen3MoeConfig(
        **SHAPE, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "deepseek, which stores a buffer": AutoConfig.for_model(
        "deepseek_v3", **SHAPE | {"num_key_value_heads": 4}, n_routed_experts=4, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        moe_intermediate_size=8, num_experts_per_tok=2,
    ),
}  # fmt: skip
"""Merged, renamed and split tensors, ties, biases, and buffers of all kinds."""


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """All its tensors are random: none is what a model begins with."""
    torch.manual_seed(0)
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in lm.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.normal_()
    return lm


def write_family(directory: Path, name: str) -> str:
    random_model(FAMILIES[name]).save_pretrained(directory, max_shard_size="20kB")
    return str(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_what_transformers_reads(tmp_path: Path, name: str, dtype: torch.dtype):
    path = write_family(tmp_path, name)
    loaded = ModelSource("it", path, None, False).load(AutoModelForCausalLM, dtype)
    assert all(parameter.is_meta for parameter in loaded.lm.parameters())
    assert loaded.weights is not None
    loaded.weights.fill(loaded.lm, CPU)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    assert_same(loaded.lm, expected)
    assert loaded.lm.generation_config.to_dict() == expected.generation_config.to_dict()
    assert loaded.lm.config.to_dict() == expected.config.to_dict()
    named = dict(hub_tensors(loaded.lm))
    assert named.keys() == dict(hub_tensors(expected)).keys()


def test_a_critic_and_a_reference_are_what_transformers_reads(tmp_path: Path, group: RankGroup):
    sections = {
        "grpo": {"advantage_estimator": "gae", "kl_beta": 0.1},
        "train": {"param_dtype": "bfloat16"},
        "reference": {"offload": True},
    }
    for name in ("qwen3 of experts", "llama tied"):
        path = write_family(tmp_path / name, name)
        config = make_config(**sections, policy={"model_name_or_path": path})
        compare(trainer_of(config, group), config)


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "everything, normal": ("llama tied", {"target_modules": "all-linear", "init_lora_weights": "gaussian"}),
    "embeddings, both random": ("qwen3", {"target_modules": ["embed_tokens"], "init_lora_weights": False}),
    "next to whole modules": ("llama", {"modules_to_save": ["lm_head", "norm"], "lora_dropout": 0.1}),
    "merged experts": ("mixtral", {"target_modules": "all-linear", "modules_to_save": ["gate"]}),
    "split layers": ("phi3", {"target_modules": ["gate_up_proj"]}),
    "one that takes from the base": ("qwen3", {"init_lora_weights": "olora"}),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_a_model_with_adapters_is_what_transformers_and_peft_make(tmp_path: Path, group: RankGroup, case: str):
    """In 16 bits but for what trains; the random numbers that follow are the same as well."""
    name, keys = ADAPTERS[case]
    policy = {"model_name_or_path": write_family(tmp_path, name), "lora": {"r": 4, "lora_alpha": 8, **keys}}
    config = make_config(policy=policy, train={"param_dtype": "bfloat16"})
    torch.manual_seed(0)
    model = load_model(config)
    drawn = torch.get_rng_state()
    assert (model.weights is None) == ("takes from" in case)
    model.read_weights(CPU)
    torch.manual_seed(0)
    expected = read_whole(AutoModelForCausalLM, config, config.train, config.policy.lora)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_same(model.lm, expected)
    names = [tensor for tensor, _ in hub_tensors(model.lm)]
    assert names == [tensor for tensor, _ in hub_tensors(expected)]


def test_one_file_with_ties_stored_twice(tmp_path: Path):
    lm = tiny_lm()
    lm.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    head = stored["model.embed_tokens.weight"]
    others = {name: tensor for name, tensor in stored.items() if tensor is not head}
    cases = {
        "alike": {"model.embed_tokens.weight": head, "lm_head.weight": head.clone()},
        "different": {"model.embed_tokens.weight": head, "lm_head.weight": head + 1},
        "under the other name": {"lm_head.weight": head},
    }
    for case, tensors in cases.items():
        save_file(others | tensors, file, {"format": "pt"})
        loaded = ModelSource("it", str(tmp_path), None, False).load(AutoModelForCausalLM, torch.float32)
        assert loaded.weights is not None
        loaded.weights.fill(loaded.lm, CPU)
        assert_same(loaded.lm, AutoModelForCausalLM.from_pretrained(tmp_path))
        tied = loaded.lm.lm_head.weight is loaded.lm.model.embed_tokens.weight
        assert tied == (case != "different"), case
        config = make_config(policy={"model_name_or_path": str(tmp_path)})
        if tied:
            assert_same(load_model(config).read_weights(CPU).lm, loaded.lm)
            continue
        with pytest.raises(SettingsError, match=r"ties lm_head\.weight .*tie_word_embeddings = false"):
            load_model(config)
        config.policy.override_config["tie_word_embeddings"] = False
        assert_same(load_model(config).read_weights(CPU).lm, loaded.lm)


def test_stored_tensors_that_the_model_has_no_place_for_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tiny_lm().save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {"visual.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    load_model(make_config(policy={"model_name_or_path": str(tmp_path)}))
    assert "Qwen3ForCausalLM has no place for, neither trained nor exported (1): visual.weight" in caplog.text


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path):
    tiny_lm().save_pretrained(tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {"intermediate_size": 40}))
    with pytest.raises(
        SettingsError, match=r"cannot be loaded: its .*\.down_proj\.weight is \[32, 48\] in the .* \[32, 40\] by"
    ):
        load_model(make_config(policy={"model_name_or_path": str(tmp_path)}))


def test_weights_that_a_checkpoint_replaces_are_not_read(tmp_path: Path):
    model = load_model(make_config(policy={"model_name_or_path": str(write_model(tmp_path))}), restored=True)
    model.read_weights(CPU)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_weights_without_safetensors_are_read_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lm = tiny_lm()
    lm.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(lm.state_dict(), tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        model = load_model(make_config(policy={"model_name_or_path": str(tmp_path)}))
    assert "each rank has read all weights, since they are not in safetensors files" in caplog.text
    assert_same(model.lm, lm)


# ---- what is proved on a small copy ----


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_without_weights_is_proved_by_a_copy_with_a_layer_of_each_kind(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    copies: list[PreTrainedModel] = []
    make = probe.random_copy

    def kept(*arguments: Any) -> PreTrainedModel:
        copies.append(make(*arguments))
        return copies[-1]

    monkeypatch.setattr(probe, "random_copy", kept)
    path = write_family(tmp_path, name)
    model = load_model(make_config(policy={"model_name_or_path": path}))
    real = prepare_model(PolicyModel(random_model(FAMILIES[name])), packed=False, recompute=False)
    assert model.takes_blocks == real.takes_blocks
    (copy,) = copies
    kinds = 2 if name in ("gemma3", "deepseek, which stores a buffer") else 1
    assert copy.config.num_hidden_layers == kinds
    assert copy.config.intermediate_size == probe.WIDTH


@pytest.mark.parametrize("name", HEADS)
def test_a_copy_shows_what_an_architecture_does_to_logits(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    AutoModelForCausalLM.from_config(HEADS[name]).save_pretrained(tmp_path)
    config = make_config(policy={"model_name_or_path": str(tmp_path)})
    assert load_model(config).weights is not None
    plain: Callable[[PolicyModel], Head] = lambda model: Head(model.lm.get_output_embeddings().weight)  # noqa: E731
    monkeypatch.setattr(PolicyModel, "_head", plain)
    with pytest.raises(SettingsError, match="not those of a linear output head"):
        load_model(config)


def test_one_rank_decides_what_is_proved(tmp_path: Path):
    config = make_config(policy={"model_name_or_path": str(write_model(tmp_path))})
    assert load_model(config).takes_blocks
    assert not load_model(config, lead=lambda _: "sdpa").takes_blocks


# ---- several ranks ----

STAGES = {"pp_size": 2, "dp_shard_size": 1}


def run(tmp_path: Path, world: int, **options: Any) -> None:
    arguments = ["tests.policy_worker.load_program", str(tmp_path), json.dumps(options)]
    for code, output in wait_ranks(start_ranks(world, arguments)):
        assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_hold_together_what_transformers_reads(tmp_path: Path, world: int):
    sections = {"grpo": {"advantage_estimator": "gae", "kl_beta": 0.1}, "reference": {"offload": True}}
    names = FAMILIES if world == 3 else ["llama tied", "gemma3", "phi3", "qwen3 of experts"]
    run(tmp_path, world, models=[write_family(tmp_path / name, name) for name in names], config=sections)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "mesh", "names", "adapters"),
    [
        (2, {"tp_size": 2, "dp_shard_size": 1}, ["llama tied", "mixtral"], False),
        (4, {"tp_size": 2, "dp_shard_size": 2}, ["llama tied", "qwen3", "mixtral"], False),
        (2, STAGES, ["llama tied", "gemma3", "phi, whose head has a bias", "mixtral"], False),
        (2, STAGES, ["llama tied", "qwen3", "mixtral"], True),
        pytest.param(2, {"ep_size": 2}, ["mixtral"], False, marks=pytest.mark.soak),
        pytest.param(2, {"ep_size": 2}, ["mixtral"], True, marks=pytest.mark.soak),
        pytest.param(2, {}, ["llama tied", "gemma3", "mixtral"], True, marks=pytest.mark.soak),
        pytest.param(4, {"tp_size": 2, "dp_shard_size": 2}, ["llama", "phi3"], True, marks=pytest.mark.soak),
        pytest.param(4, STAGES | {"tp_size": 2}, ["llama", "phi3"], True, marks=pytest.mark.soak),
    ],
)
def test_ranks_that_cut_layers_hold_together_what_transformers_reads(
    tmp_path: Path, world: int, mesh: dict[str, int], names: list[str], adapters: bool
):
    """With adapters there is a critic with others, and the reference is within the policy."""
    keys = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    more: dict[str, Any] = {}
    if adapters:
        grpo = {"advantage_estimator": "gae", "kl_beta": 0.1}
        more = {"lora": keys, "config": {"grpo": grpo, "critic": {"lora": keys | {"r": 2}}}}
    elif "pp_size" in mesh:
        more = {"config": {"grpo": {"advantage_estimator": "gae", "kl_beta": 0.1}}}
    run(tmp_path, world, models=[write_family(tmp_path / name, name) for name in names], mesh=mesh, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "layers", "limit", "mesh", "adapters"),
    [
        (2, 3, 0.7, {}, False),
        (2, 3, 0.75, STAGES, True),
        pytest.param(4, 12, 0.35, {}, False, marks=pytest.mark.soak),
        pytest.param(4, 12, 0.35, {}, True, marks=pytest.mark.soak),
        pytest.param(4, 12, 0.4, {"pp_size": 4, "dp_shard_size": 1}, False, marks=pytest.mark.soak),  # holds 0.32
        pytest.param(4, 12, 0.35, STAGES | {"tp_size": 2}, True, marks=pytest.mark.soak),
    ],
)
def test_a_rank_loads_its_part_of_a_model_that_is_larger_than_its_memory(
    tmp_path: Path,
    world: int,
    layers: int,
    limit: float,
    mesh: dict[str, int],
    adapters: bool,
    capsys: pytest.CaptureFixture[str],
):
    """Stored in 16 bits, trained in 32. The limit is on what the process may allocate (RLIMIT_DATA)."""
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": layers, "vocab_size": 16000}
    lm = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE | shape, head_dim=64), dtype=torch.bfloat16)
    lm.save_pretrained(tmp_path / "large")
    size = 4 * lm.num_parameters()
    del lm
    tiny_lm(layers=4).save_pretrained(small := str(tmp_path / "small"))
    keys = {"lora": {"r": 4, "lora_alpha": 8}} if adapters else {}
    models = [small, str(tmp_path / "large")]
    run(tmp_path, world, models=models, limit=int(limit * size), mesh=mesh, **keys)
    found = json.loads((tmp_path / "memory.json").read_text())
    with capsys.disabled():
        sizes = {name: n // 10**6 for name, n in found.items() if name != "refused"}
        print(f"\n{world} ranks, {mesh}, {adapters=}, MB: {sizes}")
    assert found["model"] == size
    assert found["peak"] < limit * size
