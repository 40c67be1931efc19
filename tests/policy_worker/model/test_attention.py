"""FlashAttention: what its versions are called with is what torch computes from masks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from policy_worker.errors import SettingsError
from policy_worker.model import attention
from policy_worker.model.attention import Blocks, attend, block_of, flash_of, use_flash

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def documented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    deterministic: bool = False,
) -> Tensor:
    """The attention that the package's documentation says, one query at a time: [R, n, H, D] of [R, m, H', D].

    A causal query i of n sees the keys up to i + m - n, and of these those from `left` before that on.
    """
    assert causal
    rows, n, heads, width = q.shape
    m, group = k.shape[1], q.shape[2] // k.shape[2]
    left = window_size[0]
    out = torch.zeros_like(q)
    for row in range(rows):
        for i in range(n):
            last = i + m - n
            first = 0 if left in (None, -1) else max(0, last - left)
            for head in range(heads):
                keys, values = (x[row, first : last + 1, head // group] for x in (k, v))
                scores = keys @ q[row, i, head] * (softmax_scale or width**-0.5)
                out[row, i, head] = scores.softmax(0) @ values
    return out


def inputs(rows: int, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shared", [True, False], ids=["blocks", "rows"])
def test_flash_computes_what_masks_say(
    monkeypatch: pytest.MonkeyPatch, version: int, window: int | None, shared: bool
):
    """Blocks that share positions, blocks without, and plain rows; versions that return the log-sum-exp too."""
    rows, length = (1, 19) if shared else (2, 7)
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window}
    if shared:
        options["blocks"] = Blocks([block_of(0, 5, [3, 2], "cpu"), block_of(10, 0, [8], "cpu")])
    query, key, value = inputs(rows, length)
    expected, _ = attend(torch.nn.Identity(), query, key, value, None, **options)
    asked = []

    def function(*tensors: Tensor, **named: Any) -> Any:
        asked.append(named)
        found = documented(*tensors, **named)
        return found if version == 2 else (found, None)

    monkeypatch.setattr(attention.Chosen, "flash", staticmethod(flash_of(function, version)))
    monkeypatch.setattr(attention, "_on_gpu", lambda _: True)
    found, _ = attend(torch.nn.Identity(), query, key, value, None, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(asked) == (3 if shared else 1)
    endless = None if version == 4 else -1
    assert {one["window_size"] for one in asked} == {(2, 0) if window else (endless, endless)}


def test_what_is_on_a_cpu_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention.Chosen, "flash", None)
    query, key, value = inputs(1, 5)
    expected, _ = attend(torch.nn.Identity(), query, key, value, None)

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=refuse))
    use_flash(2)
    assert torch.equal(attend(torch.nn.Identity(), query, key, value, None)[0], expected)
    use_flash(None)
    assert attention.Chosen.flash is None


@pytest.mark.parametrize(("version", "module"), attention.FLASH.items())
def test_a_missing_version_is_named(monkeypatch: pytest.MonkeyPatch, version: int, module: str):
    for name in ("flash_attn", module):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=rf"train.fa_version = {version}: {module} cannot be imported"):
        use_flash(version)
