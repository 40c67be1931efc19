"""Adapters on sharded models: the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from policy_worker.errors import SettingsError
from policy_worker.model import lora
from policy_worker.model.model import PolicyModel
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.parallel.tensor import apply_tp
from schema.config.sections.policy import LoraConfig
from tests.policy_worker.material import tiny_lm, write_model
from tests.policy_worker.parallel.test_meshes import assert_one, files_of, model, staged
from tests.policy_worker.parallel.test_ranks import (
    EVERYTHING,
    GRPO,
    SAMPLES,
    assert_equal,
    gradients,
    run,
    run_each,
    run_here,
)
from tests.policy_worker.rank_program import train
from tests.support.devices import rounding

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.mark.slow
def test_two_ranks_with_adapters_equal_one_and_one_goes_on(tmp_path: Path, group: RankGroup):
    # of policy and critic, with norms that are trained whole; the reference is within the policy, and reset once
    options: dict[str, Any] = {
        "exact": True,
        "grpo": GRPO | EVERYTHING | {"advantage_estimator": "gae", "reference_reset_interval": 2},
        "train": {"optm_lr": 1e-2},
        "sections": {
            "policy": {"lora": LORA | {"modules_to_save": ["model.norm"]}},
            "critic": {"lora": LORA | {"r_pattern": {"down_proj": 2}, "use_dora": True}},
        },
    }
    expected, metrics = run_here(group, steps=3, **options)
    found, theirs = run(tmp_path / "2", 2, steps=3, save=str(tmp_path / "s"), save_step=3, **options)
    named = gradients(found)
    assert len(named) == 2 * 28 + 14 + 1 + 1
    assert all(".lora_" in n or ".modules_to_save." in n or n.endswith("value_head") for n in named)
    assert_equal(found, expected, 1e-4)
    for name in ("loss", "grad_norm", "reference_kl"):
        for step in range(3):
            assert theirs[step][name] == pytest.approx(metrics[step][name], rel=rounding(5e-5), abs=1e-7)
    first, _ = run_here(group, steps=1, **options)
    again, _ = run(tmp_path / "first", 2, steps=1, **options)
    assert_equal(gradients(again), gradients(first), 5e-6)
    state = str(tmp_path / "s" / "step-00000003")
    expected, _ = run_here(group, steps=4, **options)
    found, _ = run_here(group, first_step=3, steps=4, restore=state, **options)
    assert_equal(found, expected, 2e-4)


def adapters() -> list[dict[str, Any]]:
    """Each family, with biases and fused layers; a critic with adapters, and a reference within the policy."""
    exact = {"exact": True, "steps": 3, "grpo": GRPO, "sections": {"policy": {"lora": LORA}}}
    learning = {"policy": {"lora": LORA}, "critic": {"lora": LORA}}
    whole = {"grpo": GRPO | EVERYTHING | {"advantage_estimator": "gae"}, "sections": learning, "steps": 2}
    few = {"samples": {"n": 2}, "grpo": {"batch_size_per_optimize": 1}}
    return [
        *(model(family, tie=False) | exact for family in ("llama", "phi3", "gemma3_text", "qwen3_moe")),
        model("qwen3") | exact | whole,
        model("qwen3") | exact | few,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_adapters_on_layers_that_ranks_share_equal_one_process(
    tmp_path: Path, group: RankGroup, mesh: dict[str, int]
):
    cases = [staged(case) if "pp" in mesh else case for case in adapters()]
    assert_one(tmp_path / "2", group, 2, mesh, cases)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}], ids=str)
def test_adapters_that_two_share_go_on_alone_and_back(tmp_path: Path, group: RankGroup, mesh: dict[str, int]):
    learning = {"policy": {"lora": LORA | {"init_lora_weights": "pissa"}}, "critic": {"lora": LORA}}
    grpo = GRPO | EVERYTHING | {"advantage_estimator": "gae"}
    options: dict[str, Any] = staged({"samples": SAMPLES, "grpo": grpo, "sections": learning})
    expected, _ = train(group, options | {"steps": 3})
    shared, saved = options | {"mesh": mesh}, {"save": str(tmp_path / "two"), "save_step": 1}
    policy = {"model_name_or_path": str(write_model(tmp_path / "model")), "lora": LORA}
    plain = options | {"sections": {"policy": policy}, "grpo": GRPO, "steps": 1}
    exported = {"save": str(tmp_path / "plain"), "save_step": 1, "export": str(tmp_path / "of two")}
    run_each(tmp_path / "1", 2, [shared | saved | {"steps": 1}, plain | exported | {"mesh": mesh}])
    state = {"restore": str(tmp_path / "plain" / "step-00000001"), "first_step": 1}
    train(group, plain | state | {"export": str(tmp_path / "of one")})
    assert files_of(tmp_path / "of one") == files_of(tmp_path / "of two")
    assert (tmp_path / "of one" / "adapter" / "adapter_model.safetensors").exists()
    alone = {"restore": str(tmp_path / "two" / "step-00000001"), "first_step": 1}
    train(group, options | alone | {"steps": 2, "save": str(tmp_path / "one"), "save_step": 2})
    back = {"restore": str(tmp_path / "one" / "step-00000002"), "first_step": 2}
    ((found, _),) = run_each(tmp_path / "2", 2, [shared | back | {"steps": 3}])
    assert_equal(found, expected, 1e-4)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head, of which there are two"),
        ({"modules_to_save": ["q_norm"]}, r"layers\.0\.self_attn\.q_norm, of which there are two"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens with an adapter"),
    ],
)
def test_what_tensor_parallelism_cannot_cut_is_named(group: RankGroup, keys: dict[str, Any], name: str):
    model = PolicyModel(tiny_lm(tie=False))
    lora.inject(model.lm, LoraConfig(**keys), "policy.lora")
    with pytest.raises(SettingsError, match=rf"tensor parallelism cannot cut .*{name}.*tp_size = 1"):
        apply_tp(model, init_device_mesh(group.device.type, (1,), mesh_dim_names=("tp",)))


MESHES = [
    {"tp": 2, "sequence": True, "dp_shard": 2},
    {"tp": 2, "dp_shard": 2},
    {"cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 4, "ep": 2},
    {"pp": 2, "dp_shard": 2},
]


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_adapters_on_meshes_of_four_equal_one_process(tmp_path: Path, group: RankGroup, mesh: dict[str, int]):
    cases = [staged(case) if "pp" in mesh else case for case in adapters()]
    mixture = [case for case in cases if case["model"]["family"] == "qwen3_moe"]
    assert_one(tmp_path / "4", group, 4, mesh, mixture if "ep" in mesh else cases)
