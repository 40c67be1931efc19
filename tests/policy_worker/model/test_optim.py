from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from policy_worker.errors import NonFiniteGradientError, SettingsError
from policy_worker.model.optim import Optimizer, OptimizerSettings
from tests.policy_worker.material import make_config
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
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        2e-4,
        (0.8, 0.95),
        1e-5,
        0.2,
    )
    assert (group["foreach"], group["fused"]) == (False, False)
    assert optimizer.peak_lr == 2e-4


def test_clipping_scales_all_gradients_to_the_norm():
    parameters = [with_gradient(3.0, 0.0), with_gradient(4.0)]
    optimizer = Optimizer(parameters, OptimizerSettings(**{**SETTINGS.__dict__, "grad_norm_clip": 1.0}))
    seen: list[float] = []
    optimizer.optimizers[0].register_step_pre_hook(
        lambda *_: seen.extend(p.grad.norm().item() for p in parameters)
    )
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
