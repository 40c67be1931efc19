from __future__ import annotations

import pytest
import torch
from torch import nn

from policy_worker.trained.trainer import Ema


def test_the_average_by_hand():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    ema = Ema(model, 0.75)
    for weight in (3.0, -1.0):  # 0.75 · 1 + 0.25 · 3 = 1.5, then 0.75 · 1.5 - 0.25
        model.weight.data.fill_(weight)
        ema.update()
    assert ema.average["weight"].item() == pytest.approx(0.875)
    ema.reset()
    assert ema.average["weight"].item() == -1.0
    model.weight.data.fill_(5.0)
    assert ema.average["weight"].item() == -1.0, "a copy"


def test_it_is_in_float32_and_leaves_out_what_does_not_train():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    ema = Ema(model, 0.9999)
    assert list(ema.average) == ["1.weight"]
    begin = ema.average["1.weight"].clone()
    model[1].weight.data.add_(1.0)
    ema.update()
    moved = ema.average["1.weight"] - begin
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-4), rtol=0.05, atol=0)
