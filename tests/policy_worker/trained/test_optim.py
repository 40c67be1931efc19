from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from policy_worker.errors import NonFiniteGradientError, SettingsError
from policy_worker.trained.optim import Optimizer, OptimizerSettings
from tests.policy_worker.material import make_config, tiny_model
from tests.support.devices import DEVICE

SETTINGS = OptimizerSettings(
    lrs=(0.1,), betas=(0.9, 0.99), epsilon=1e-6, weight_decay=0.5, impl="foreach", grad_norm_clip=0.0
)


def with_gradient(*values: float, start: float = 1.0) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((len(values),), start, device=DEVICE))
    parameter.grad = torch.tensor(values, device=DEVICE)
    return parameter


@pytest.mark.parametrize("impl", ["foreach", "for-loop", "fused"])
def test_first_step_by_hand(impl: str):
    # bias-corrected moments of the first step are g and g²: the update is lr · g / (|g| + eps), after the decay
    parameter = with_gradient(2.0, -0.5)
    optimizer = Optimizer([parameter], OptimizerSettings(**{**SETTINGS.__dict__, "impl": impl}))
    assert optimizer.step(0.5) == pytest.approx(math.sqrt(4.25))
    decayed = 1 - 0.05 * 0.5
    assert parameter.tolist() == pytest.approx([decayed - 0.05, decayed + 0.05], rel=1e-5)
    assert parameter.grad is None


def test_settings_come_from_the_configuration():
    train = make_config(
        train={
            "optm_lr": [2e-4], "optm_impl": ["for-loop"], "optm_betas": [0.8, 0.95], "epsilon": 1e-5,
            "optm_weight_decay": 0.2, "optm_grad_norm_clip": 0.3,
        }
    ).train  # fmt: skip
    optimizer = Optimizer([with_gradient(1.0)], OptimizerSettings.of_config(train))
    (group,) = optimizer.optimizers[0].param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-4, (0.8, 0.95), 1e-5, 0.2)
    assert (group["foreach"], group["fused"]) == (False, False)
    assert optimizer.peak_lr == 2e-4


def test_clipping_scales_all_gradients_to_the_norm():
    parameters = [with_gradient(3.0, 0.0), with_gradient(4.0)]
    optimizer = Optimizer(parameters, OptimizerSettings(**{**SETTINGS.__dict__, "grad_norm_clip": 1.0}))
    seen: list[float] = []
    optimizer.optimizers[0].register_step_pre_hook(lambda *_: seen.extend(p.grad.norm().item() for p in parameters))
    assert optimizer.step(1.0) == pytest.approx(5.0)
    assert seen == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize("clip", [0.0, 10.0])
def test_nothing_is_clipped_below_the_norm_or_at_zero(clip: float):
    parameter = with_gradient(3.0, 4.0)
    optimizer = Optimizer([parameter], OptimizerSettings(**{**SETTINGS.__dict__, "grad_norm_clip": clip}))
    seen: list[float] = []
    optimizer.optimizers[0].register_step_pre_hook(lambda *_: seen.extend(parameter.grad.tolist()))
    optimizer.step(1.0)
    assert seen == [3.0, 4.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_before_it_does_harm(bad: float):
    parameter = with_gradient(1.0, bad)
    with pytest.raises(NonFiniteGradientError, match="nothing was applied"):
        Optimizer([parameter], SETTINGS).step(1.0)
    assert parameter.tolist() == [1.0, 1.0]


def test_parameters_that_do_not_train_are_left_out():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert Optimizer([frozen, with_gradient(1.0)], SETTINGS).parameters[0].shape == (1,)


def test_an_impossible_implementation_is_refused_by_name():
    parameter = nn.Parameter(torch.ones(2, device="meta", dtype=torch.complex64))
    with pytest.raises(SettingsError, match=r'train\.optm_impl = "fused".*"foreach"'):
        Optimizer([parameter], OptimizerSettings(**{**SETTINGS.__dict__, "impl": "fused"}))


def test_adam_adds_its_decay_to_the_gradient():
    # the first update of Adam is lr · sign of the gradient, which the decay 0.5 · 1.0 has made positive
    parameter = with_gradient(-0.4)
    Optimizer([parameter], replace(SETTINGS, name="Adam")).step(1.0)
    assert parameter.item() == pytest.approx(1 - 0.1, rel=1e-4)
    parameter = with_gradient(-0.4)
    Optimizer([parameter], replace(SETTINGS, weight_decay=0.5)).step(1.0)
    assert parameter.item() == pytest.approx(1 * (1 - 0.05) + 0.1, rel=1e-4)


@pytest.mark.parametrize("impl", ["foreach", "for-loop", "fused"])
def test_sgd_with_momentum_by_hand(impl: str):
    parameter = with_gradient(1.0, start=0.0)
    optimizer = Optimizer([parameter], replace(SETTINGS, name="SGD", momentum=0.5, weight_decay=0.0, impl=impl))
    moved = []
    for factor in (1.0, 1.0, 0.5):  # momentum: 1, 1.5, 1.75
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(factor)
        moved.append(parameter.item())
    assert moved == pytest.approx([-0.1, -0.25, -0.3375])


def test_muon_orthogonalises_and_takes_adamws_rate():
    # singular values go to about 1, times 0.2 · √(larger side): a step has the root mean square of AdamW's, 0.2
    random = torch.Generator().manual_seed(0)
    matrix = nn.Parameter(torch.zeros(64, 32, device=DEVICE))
    matrix.grad = torch.randn(64, 32, generator=random).to(DEVICE)
    gradient = matrix.grad.clone()
    settings = replace(SETTINGS, name="Muon", lrs=(1.0, 0.1), weight_decay=0.0)
    bias = with_gradient(2.0)
    optimizer = Optimizer([matrix, bias], settings, [matrix])
    optimizer.step(1.0)
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    values = torch.linalg.svdvals(matrix.detach()) / (0.2 * math.sqrt(64))
    assert values.min() > 0.6
    assert values.max() < 1.3
    cosine = -(matrix * (u @ v)).sum() / (matrix.norm() * (u @ v).norm())
    assert cosine > 0.97
    assert bias.item() == pytest.approx(1 - 0.1, rel=1e-5)  # AdamW, at the second rate
    assert [type(one).__name__ for one in optimizer.optimizers] == ["Muon", "AdamW"]
    assert (optimizer.peak_lr, optimizer.peak_lrs) == (1.0, (1.0, 0.1))


def test_muon_takes_the_matrices_of_the_layers_alone():
    model = tiny_model()
    optimizer = Optimizer.of_model(model, make_config(train={"optm_name": "Muon"}).train)
    names = {parameter: name for name, parameter in model.named_parameters()}
    of_muon, of_adamw = (
        {names[p] for group in one.param_groups for p in group["params"]} for one in optimizer.optimizers
    )
    assert of_muon == {
        f"lm.model.layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in (
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        )
    }
    assert of_adamw == set(names.values()) - of_muon


@pytest.mark.parametrize(
    ("ramp", "expected"), [("linear", 0.1 + 0.4 / 4), ("cosine", 0.1 + 0.4 * (1 - math.sqrt(0.5)) / 2)]
)
def test_weight_decay_goes_up_a_ramp(ramp: str, expected: float):
    settings = replace(SETTINGS, weight_decay_ramp=ramp, weight_decay_start=0.1)
    decays = [settings.weight_decay_at(progress) for progress in (0.0, 0.25, 1.0)]
    assert decays == pytest.approx([0.1, expected, 0.5])
    parameter = with_gradient(0.0)
    Optimizer([parameter], settings).step(1.0, 0.25)
    assert parameter.item() == pytest.approx(1 - 0.1 * expected)


CASES = [
    replace(SETTINGS, name="Adam"),
    replace(SETTINGS, name="SGD"),
    replace(SETTINGS, name="SGD", momentum=0.9),
    replace(SETTINGS, name="Muon"),
]


@pytest.mark.parametrize("settings", CASES, ids=lambda one: f"{one.name}-{one.momentum}")
def test_looking_at_the_state_changes_nothing(settings: OptimizerSettings):
    def trained(looks: bool) -> list[Tensor]:
        matrix = nn.Parameter(torch.arange(6.0, device=DEVICE).reshape(2, 3))
        optimizer = Optimizer([matrix, other := with_gradient(1.0)], settings, [matrix])
        for step in range(3):
            if looks:
                for _, slots in optimizer.slots():
                    assert all(step or not slot.count_nonzero() for slot in slots.values())
            matrix.grad, other.grad = torch.full_like(matrix, 1.0 + step), torch.ones_like(other)
            optimizer.step(0.5)
        return [matrix.detach(), other.detach()]

    for found, expected in zip(trained(looks=True), trained(looks=False), strict=True):
        assert torch.equal(found, expected)


def test_state_that_is_forgotten_begins_anew():
    matrix = nn.Parameter(torch.ones(2, 3, device=DEVICE))
    matrix.grad = torch.ones_like(matrix)
    optimizer = Optimizer([matrix, with_gradient(1.0)], replace(SETTINGS, name="Muon"), [matrix])
    optimizer.step(1.0)
    assert all(slot.count_nonzero() for _, slots in optimizer.slots() for slot in slots.values())
    optimizer.forget()
    assert not any(slot.count_nonzero() for _, slots in optimizer.slots() for slot in slots.values())


def test_an_optimizer_whose_library_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    parameter = nn.Parameter(torch.zeros(128, 64))
    settings = replace(SETTINGS, name="AdamW8bit", section="critic")
    with pytest.raises(SettingsError, match=r'critic\.optm_name = "AdamW8bit" needs .*torchao.*\[8bit\].*"AdamW"'):
        Optimizer([parameter], settings)


@pytest.mark.slow  # torchao compiles its step
def test_eight_bit_moments_are_tensors_of_rows():
    """In a process of its own, which finds torchao where `make setup-8bit` puts it."""
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), str(Path(sys.prefix) / "8bit")])
    command = [sys.executable, "-m", "tests.policy_worker.trained.eight_bit_program"]
    ended = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
