"""Sums and means under a mask, such that nothing outside of the mask matters, not even NaN.

`torch.where` and not a product: `0 * NaN` is NaN, in the value as in the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Σ of `x` where `mask` is true; both of one shape, mask bool. Gradient 0 outside of the mask."""
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Σ where(m, x, 0) / max(|m|, 1): an empty mask gives 0."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Largest `x` under the mask; 0 if the mask is empty (for quantities that are never negative)."""
    return torch.where(mask, x, torch.zeros_like(x)).amax() if x.numel() else x.new_zeros(())


def segment_mean(x: Tensor, mask: Tensor, segment: Tensor, n_segments: int) -> Tensor:
    """Masked mean of each segment, [n_segments].

    Args:
        x: values, [K]. mask: bool, [K].
        segment: which segment each value belongs to, int64 [K], in [0, n_segments).
    """
    kept = torch.where(mask, x, torch.zeros_like(x))
    sums = x.new_zeros(n_segments).index_add(0, segment, kept)
    counts = x.new_zeros(n_segments).index_add(0, segment, mask.to(x.dtype))
    return sums / counts.clamp(min=1)
