from __future__ import annotations

import math

import pytest
import torch

from policy_worker.algorithms.masked import masked_max, masked_mean, masked_sum, segment_mean

NAN = math.nan


def test_values_outside_of_the_mask_never_matter():
    x = torch.tensor([1.0, NAN, 3.0, math.inf], requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    total = masked_mean(x, mask)
    total.backward()
    assert total.item() == 2.0
    assert masked_sum(x.detach(), mask).item() == 4.0
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_empty_masks_give_zero():
    x = torch.tensor([NAN, 1.0])
    nothing = torch.tensor([False, False])
    assert masked_mean(x, nothing).item() == 0.0
    assert masked_max(x, nothing).item() == 0.0
    assert masked_max(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).item() == 0.0


def test_maximum_under_the_mask():
    assert masked_max(torch.tensor([2.0, 9.0, 3.0]), torch.tensor([True, False, True])).item() == 3.0


def test_segment_means():
    x = torch.tensor([1.0, 3.0, NAN, 10.0, 7.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, False])
    segment = torch.tensor([0, 0, 0, 2, 2])
    means = segment_mean(x, mask, segment, 4)
    assert means.tolist() == [2.0, 0.0, 10.0, 0.0]
    assert means.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_passes_through(dtype: torch.dtype):
    x = torch.ones(3, dtype=dtype)
    assert masked_mean(x, torch.ones(3, dtype=torch.bool)).dtype == dtype
