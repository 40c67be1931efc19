"""The attention function of the embedded engine, registered with transformers under the name `NAME`.

Transformers' own repeats keys and values of every head group in memory before each call; in decoding, where one
query looks at the whole cache, that copy costs more than the attention. Here the query heads of a group are the
rows of one small matrix product instead. Longer queries go to PyTorch's fused attention.

Masks are what `window.py` makes: additive [N, 1, 1, K] for one query, boolean [N, 1, Q, K] for several. Keys end
at the column of the last query, and the distance of two columns is the distance of their positions, so a sliding
window of w is: the last w columns up to the query's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

NAME = "cosmos_window"


def register() -> None:
    """Make the function known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output [N, Q, H, Dv] of query [N, H, Q, D] over key [N, G, K, D], value [N, G, K, Dv].

    Raises `ValueError` for a kind of attention that it does not know (sinks, biases), so that a model
    that needs it is refused at start instead of computed wrongly.
    """
    if s_aux is not None or kwargs.get("position_bias") is not None or attention_mask is None:
        raise ValueError("attention sinks and position biases are unknown to this engine")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1:
        output = _attend_one(query, key, value, attention_mask, scale, sliding_window, softcap)
    else:
        output = _attend_many(query, key, value, attention_mask, scale, sliding_window, softcap)
    return output.transpose(1, 2), None


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    n, heads, _, width = query.shape
    groups = key.shape[1]
    if sliding_window is not None and key.shape[2] > sliding_window:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        bias = bias[..., -sliding_window:]
    grouped = query.reshape(n, groups, heads // groups, width) * scale
    scores = torch.matmul(grouped, key.transpose(-1, -2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + bias, -1, dtype=torch.float32).to(value.dtype)
    return torch.matmul(weights, value).reshape(n, heads, 1, value.shape[-1])


def _attend_many(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    n_queries, n_keys = query.shape[2], key.shape[2]
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if sliding_window is not None and n_keys > sliding_window:
        columns = torch.arange(n_keys, device=query.device)
        queries = columns[n_keys - n_queries :, None]
        allowed = allowed & (queries - columns < sliding_window)
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale)
    scores = torch.tanh(torch.matmul(query * scale, key.transpose(-1, -2)) / softcap) * softcap
    scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype), value)
