"""What is traded for memory changes no bit on any mesh; units of FSDP are those that were named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from policy_worker.errors import SettingsError
from policy_worker.model import lora
from policy_worker.parallel.distribute import distribute
from policy_worker.parallel.fsdp import Units
from policy_worker.parallel.rank_group import RankGroup
from tests.policy_worker.material import make_config, make_trainer, tiny_model
from tests.policy_worker.parallel.test_meshes import model
from tests.policy_worker.parallel.test_ranks import GRPO, SAMPLES, assert_equal, run_each

AGAIN = {"model_gradient_checkpointing": True}
OFFLOADS = ("fsdp_offload", "fsdp_gradient_offload", "optimizer_offload", "activation_offload")


def assert_alike(directory: Path, world: int, mesh: dict[str, Any], case: dict[str, Any], *ways: Any) -> None:
    """The same bits as without, on the same mesh. ways: keys of train; with "again" they recompute.

    With "parks" all of it leaves the devices before each step.
    """
    case = {"samples": SAMPLES, "grpo": GRPO, "steps": 2, "mesh": mesh} | case

    def by(way: dict[str, Any]) -> dict[str, Any]:
        keys = {name: value for name, value in way.items() if name not in ("again", "parks")}
        sections = case.get("sections", {})
        if "again" in way:
            sections = sections | {"policy": sections.get("policy", {}) | AGAIN}
        return case | {"sections": sections, "train": case.get("train", {}) | keys, "parks": "parks" in way}

    found = run_each(directory, world, [case, *map(by, ways)])
    (expected, metrics), others = found[0], found[1:]
    for way, (tensors, numbers) in zip(ways, others, strict=True):
        assert_equal(tensors, expected, 0.0)
        assert numbers == metrics, way


@pytest.mark.slow
def test_two_shards(tmp_path: Path):
    ways = [{key: True} for key in (*OFFLOADS, "parks")]
    ways += [{"overlap_grad_reduce": False, "fsdp_gradient_offload": True, "optimizer_offload": True}]
    ways += [{"fsdp_wrap_layers": ["Qwen3Attention", "Qwen3MLP"]}, {"fsdp_wrap_min_params": 3000}]
    ways += [{"overlap_grad_reduce": False, "fsdp_offload": True, "fsdp_wrap_layers": ["Linear"], "again": True}]
    train = {"param_dtype": "bfloat16", "optm_name": "Muon"}
    assert_alike(tmp_path / "2", 2, {"dp_shard": 2}, model("qwen3") | {"train": train}, *ways)


SELECTIVE = {"recompute_granularity": "selective", "again": True}
BOTH = SELECTIVE | {"recompute_moe_layers": True}


@pytest.mark.slow
def test_two_ranks_that_share_layers_and_positions(tmp_path: Path):
    ways = [SELECTIVE, BOTH, {"activation_offload": True}, BOTH | {"activation_offload": True}]
    ways += [{key: True} for key in (*OFFLOADS[:3], "parks")]
    case = model("glm4_moe", tie=False) | {"train": {"fsdp_accumulation": "whole"}}
    assert_alike(tmp_path / "2", 2, {"tp": 2, "sequence": True}, case, *ways)


@pytest.mark.slow
def test_gradients_that_add_up_in_shards_are_those_that_add_up_whole(tmp_path: Path):
    """Copies of shards have equal gradients up to the order of sums, reduced within backward or after it."""
    case = {"samples": SAMPLES, "grpo": GRPO, "mesh": {"dp_replicate": 2}} | model("qwen3")
    ways = [{"overlap_grad_reduce": overlap} for overlap in (True, False)]
    each = [
        {"param_dtype": "bfloat16", "fsdp_accumulation": how} | way for how in ("sharded", "whole") for way in ways
    ]
    results = run_each(tmp_path / "2", 2, [case | {"train": train} for train in each])
    for one, other, bound in ((0, 1, 0.0), (2, 3, 0.0), (0, 2, 1e-5)):
        assert_equal(results[one][0], results[other][0], bound)


@pytest.mark.soak
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "overlapped"])
def test_two_ranks_that_share_experts(tmp_path: Path, dispatcher: str):
    policy = {"moe_token_dispatcher": dispatcher}
    if dispatcher == "overlapped":
        policy = {"moe_shared_expert_overlap": True}
    case = model("glm4_moe") | {"sections": {"policy": policy}, "train": {"param_dtype": "bfloat16"}}
    ways = [SELECTIVE, BOTH, {"recompute_moe_layers": True, "again": True}, {"again": True}]
    ways += [{key: True} for key in OFFLOADS]
    ways += [{"overlap_grad_reduce": False}, {"fsdp_wrap_min_params": 3000}]
    assert_alike(tmp_path / "2", 2, {"dp_shard": 2, "ep": 2}, case, *ways)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        (2, {"pp": 2}),
        (2, {"tp": 2}),
        (2, {"dp_shard": 2}),
        (2, {"cp": 2}),
        (4, {"pp": 2, "dp_shard": 2}),
        (4, {"dp_replicate": 2, "dp_shard": 2}),
        (4, {"dp_shard": 2, "tp": 2}),
        (4, {"pp": 2, "tp": 2, "sequence": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tie", [True, False])
def test_meshes(tmp_path: Path, world: int, mesh: dict[str, Any], tie: bool):
    ways = [{key: True} for key in OFFLOADS]
    ways += [SELECTIVE, {"again": True, "activation_offload": True}, SELECTIVE | {"activation_offload": True}]
    ways += [{"fsdp_wrap_layers": ["Qwen3MLP"], "fsdp_offload": True}]
    late = [{"overlap_grad_reduce": False, "fsdp_gradient_offload": True}]
    half = {"param_dtype": "bfloat16"}
    # Within a backward what ranks share of a layer adds up in bfloat16, after it in float32, as micro-batches do.
    if "tp" in mesh:
        case = model("qwen3", tie=tie) | {"train": half | {"fsdp_accumulation": "whole"}}
        assert_alike(tmp_path / "whole", world, mesh, case, *late)
        late = []
    assert_alike(tmp_path / "n", world, mesh, model("qwen3", tie=tie) | {"train": half}, *ways, *late)


# ---- units ----------------------------------------------------------------------------------------------------


def names_of(model: torch.nn.Module) -> list[str]:
    return [name.removeprefix("lm.") for name, m in model.named_modules() if isinstance(m, FSDPModule)]


def sharded(group: RankGroup, units: Units | None = None, **how: Any) -> list[str]:
    keys = make_config(train={"param_dtype": "bfloat16", **how}).train
    return names_of(distribute(tiny_model(), group, keys, units=units))


LAYERS = ["model.layers.0", "model.layers.1"]


def test_units_are_the_layers_or_what_is_named(group: RankGroup):
    assert sharded(group) == ["", *LAYERS]
    found = sharded(group, fsdp_wrap_layers=["Qwen3MLP", "Qwen3DecoderLayer"])
    assert found == ["", "model.layers.0", "model.layers.0.mlp", "model.layers.1", "model.layers.1.mlp"]
    found = sharded(group, fsdp_wrap_layers=["Linear"])  # all but the output layer
    assert len(found) == 1 + 2 * 7
    assert "lm_head" not in found


def test_units_are_as_large_as_is_written(group: RankGroup):
    layer = tiny_model().decoder_layers()[0]
    sizes = {part: sum(p.numel() for p in module.parameters()) for part, module in layer.named_children()}
    whole = sum(sizes.values())
    assert sharded(group, fsdp_wrap_min_params=whole) == ["", *LAYERS]
    rest = whole - sizes["self_attn"] - sizes["mlp"]  # norms
    assert rest < min(sizes["self_attn"], sizes["mlp"])
    parts = [f"{name}.{part}" for name in LAYERS for part in ("self_attn", "mlp")]
    assert sharded(group, fsdp_wrap_min_params=min(sizes["self_attn"], sizes["mlp"])) == ["", *parts]
    assert sharded(group, fsdp_wrap_min_params=10**9) == [""]


def test_frozen_models_have_units_of_their_own(group: RankGroup):
    keys = make_config(train={"param_dtype": "bfloat16", "fsdp_wrap_layers": ["Qwen3MLP"]}).train
    frozen = distribute(tiny_model(), group, keys, frozen=True, offload=True, units=Units(["Qwen3Attention"]))
    assert names_of(frozen) == ["", *(f"{name}.self_attn" for name in LAYERS)]
    assert names_of(distribute(tiny_model(), group, keys, frozen=True, offload=True)) == ["", *LAYERS]


def test_adapters_stay_with_the_layers_that_use_their_weights(group: RankGroup):
    config = make_config(
        train={"param_dtype": "bfloat16", "fsdp_wrap_layers": ["Linear"]},
        policy={"lora": {"r": 4, "target_modules": ["q_proj"], "use_dora": True}},
    )
    policy = tiny_model()
    lora.inject(policy.lm, config.policy.lora, "policy.lora")
    names = [name.rpartition(".")[2] for name in names_of(distribute(policy, group, config.train))]
    assert names.count("q_proj") == 2
    assert not {"base_layer", "default"} & set(names)


@pytest.mark.parametrize("name", ["NoSuchLayer", "Embedding", "ModuleList"])
def test_a_class_that_the_model_does_not_have_is_refused_with_those_that_it_has(group: RankGroup, name: str):
    config = make_config(train={"fsdp_wrap_layers": [name]})
    with pytest.raises(SettingsError, match=rf"train\.fsdp_wrap_layers: .* of class '{name}'.*Qwen3MLP"):
        make_trainer(config, group)
    config = make_config({"kl_beta": 0.1}, reference={"fsdp_wrap_layers": [name]})
    with pytest.raises(SettingsError, match=r"reference\.fsdp_wrap_layers: .* it has .*Qwen3DecoderLayer"):
        make_trainer(config, group)


def test_wrapping_the_reference_changes_no_number(group: RankGroup):
    """The reference alone is sharded otherwise, where it is sharded at all: in host memory."""
    config = make_config({"kl_beta": 0.1}, reference={"offload": True, "fsdp_wrap_layers": ["Qwen3MLP"]})
    trainer = make_trainer(config, group)
    assert names_of(trainer.reference) == ["", *(f"{name}.mlp" for name in LAYERS)]
    assert names_of(trainer.model) == []
