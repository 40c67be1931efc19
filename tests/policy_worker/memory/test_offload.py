"""Gradients and optimizer state in host memory: the same numbers, elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from policy_worker.memory import offload
from policy_worker.memory.offload import Gradients, in_parts
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.optim import _laid_out_as
from tests.policy_worker.parallel.test_ranks import assert_equal, run_here
from tests.support.devices import DEVICE

OFFLOADS = ("fsdp_offload", "fsdp_gradient_offload", "optimizer_offload")
GRPO = {"mini_batch": 2}


def states(trained: Any) -> list[torch.Tensor]:
    found = (state for one in trained.optimizer.optimizers for state in one.state.values())
    return [value for state in found for value in state.values() if value.ndim]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "train",
    [
        {"optm_impl": "foreach"},
        {"optm_impl": "fused", "param_dtype": "bfloat16"},
        {"optm_name": "SGD", "optm_momentum": 0.9},
        {"optm_name": "Muon", "param_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_where_it_is_changes_no_number(train: dict[str, Any], group: RankGroup, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "NUMBERS", 3000)
    expected, metrics = run_here(group, grpo=GRPO, train=train, steps=3)
    for key in OFFLOADS if DEVICE.type == "cpu" else OFFLOADS[1:]:  # by the first one the host computes
        found, others = run_here(group, grpo=GRPO, train=train | {key: True}, steps=3)
        assert_equal(found, expected, 0.0)
        assert [step["grad_norm"] for step in others] == [step["grad_norm"] for step in metrics]


@pytest.mark.usefixtures("deterministic")
def test_adapters_and_a_critic_have_the_same_numbers(group: RankGroup):
    grpo = {"advantage_estimator": "gae", "mini_batch": 2}
    lora = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    everything = dict.fromkeys(OFFLOADS[1:], True)
    options = {"grpo": grpo, "steps": 2}
    sections = {"policy": {"lora": lora}}
    expected, _ = run_here(group, **options, sections=sections)
    offloaded = sections | {"critic": everything}
    found, _ = run_here(group, **options, train=everything, sections=offloaded)
    assert_equal(found, expected, 0.0)


@pytest.mark.usefixtures("deterministic")
def test_what_is_in_host_memory_is_saved_and_restored(tmp_path, group: RankGroup, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "NUMBERS", 3000)
    expected, _ = run_here(group, steps=4)
    for key in (*OFFLOADS, "none"):  # each goes on from what another has saved
        train = {} if key == "none" else {key: True}
        other = {} if key == "optimizer_offload" else {"optimizer_offload": True}
        path = tmp_path / key
        run_here(group, train=other, steps=2, save=str(path), save_step=2)
        restore = str(path / "step-00000002")
        found, _ = run_here(group, train=train, first_step=2, steps=4, restore=restore)
        assert_equal(found, expected, 0.0)


def test_parameters_step_in_parts_of_about_as_many_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offload, "NUMBERS", 10)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (4, 4, 4, 30, 2, 3)]
    assert [[p.numel() for p in part] for part in in_parts(parameters)] == [[4, 4, 4], [30], [2, 3]]


def test_gradients_of_several_backwards_add_up_in_host_memory():
    weight = nn.Parameter(torch.tensor([1.0, 2.0], device=DEVICE))
    gradients = Gradients([weight])
    for factor in (3.0, 5.0):
        (weight * factor).sum().backward()
        assert weight.grad is None
    assert gradients.kept[weight].device.type == "cpu"
    gradients.bring_back()
    assert weight.grad.tolist() == [8.0, 8.0]
    assert gradients.kept == {}


@pytest.mark.usefixtures("group")
def test_a_part_in_host_memory_stays_there_on_a_mesh_of_gpus():
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    empty = torch.empty(4, 3, device="meta")
    whole = DTensor.from_local(empty, mesh, [Shard(0)], run_check=False, shape=(4, 3), stride=(3, 1))
    part = torch.ones(4, 3)
    assert offload.mapped(whole, lambda _: part)._local_tensor is part
    codes = torch.zeros(4, 6, dtype=torch.uint8)
    slot = _laid_out_as(offload.mapped(whole, lambda _: part), codes)
    assert slot.shape == (4, 6)
    assert slot._local_tensor is codes
    copy = offload.on_host(offload.mapped(whole, lambda _: part))
    assert copy._local_tensor.device.type == "cpu"
    assert copy._local_tensor is not part
