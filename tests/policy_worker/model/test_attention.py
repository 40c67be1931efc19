"""FlashAttention: what its versions are called with is what torch computes from masks."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from policy_worker.errors import SettingsError
from policy_worker.model import flash
from policy_worker.model.attention import Block, Blocks, attend
from policy_worker.model.flash import flash_of, has_kernel, takes_type, use_flash

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def documented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
) -> Tensor:
    """The attention that the package's documentation says, one query at a time: [T, H, D] of [T', H', D].

    A causal query i of n sees the keys up to i + m - n, and of these those from `left` before that on.
    """
    assert causal
    width, group, left = q.shape[2], q.shape[1] // k.shape[1], window_size[0]
    rows = []
    for (first_q, last_q), (first_k, last_k) in zip(
        pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True
    ):
        n, m = last_q - first_q, last_k - first_k
        assert n <= max_seqlen_q
        assert m <= max_seqlen_k
        for i in range(n):
            last = i + m - n
            first = 0 if left in (None, -1) else max(0, last - left)
            keys, values = (x[first_k + first : first_k + last + 1].repeat_interleave(group, 1) for x in (k, v))
            scores = (keys * q[first_q + i]).sum(-1) * (softmax_scale or width**-0.5)  # [m, H]
            rows.append((scores.softmax(0)[..., None] * values).sum(0))
    assert len(rows) == len(q)
    return torch.stack(rows)


def inputs(rows: int, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]


BLOCKS = [Block(0, 5, (3, 2, 0)), Block(10, 0, (8, 7)), Block(25, 2, (0, 0)), Block(27, 3, (4,))]
PACKED = [Block(0, 0, (8, 7)), Block(15, 0, (19,))]


def computed(blocks: Blocks | None, window: int | None, context: Any = None) -> list[Tensor]:
    """Outputs of a row with two positions of padding, or of two rows, and the gradients of what they come from."""
    tensors = [tensor.requires_grad_() for tensor in inputs(*((1, 36) if blocks else (2, 7)))]
    options = {"scaling": 0.3, "sliding_window": window, "blocks": blocks, "context": context}
    output, _ = attend(torch.nn.Identity(), *tensors, None, **options)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    end = 34 if blocks else 7
    return [output[:, :end], *torch.autograd.grad((output * weights)[:, :end].sum(), tensors)]


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("blocks", [BLOCKS, PACKED, None], ids=["shared", "packed", "rows"])
def test_flash_computes_what_masks_say(
    monkeypatch: pytest.MonkeyPatch, version: int, window: int | None, blocks: list[Block] | None
):
    """One call computes all sequences of a row, and all gradients: with shared positions, packed, and padded. Some
    versions return the log-sum-exp too."""
    expected = computed(blocks and Blocks(blocks), window)
    asked = []

    def function(*tensors: Tensor, **named: Any) -> Any:
        asked.append(named)
        outputs = documented(*tensors, **named)
        return outputs if version == 2 else (outputs, None)

    monkeypatch.setattr(flash.Chosen, "kernel", staticmethod(flash_of(function, version)))
    monkeypatch.setattr(flash, "has_kernel", lambda *_: True)
    in_one_call = computed(blocks and Blocks(blocks), window)
    for ours, theirs in zip(in_one_call, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    (call,) = asked
    endless = None if version == 4 else -1
    assert call["window_size"] == ((2, 0) if window else (endless, endless))


def test_no_mask_is_made_where_a_kernel_takes_any_length(monkeypatch: pytest.MonkeyPatch):
    """Three layers make the mask of a block once, and places of its samples; with a kernel neither."""

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            if isinstance(result, Tensor) and result.dtype in (torch.bool, torch.int64):
                made.append(result.shape)
            return result

    def layers() -> None:
        blocks = Blocks([Block(0, 5, (3, 2)), Block(10, 3, (4, 4))])
        for _ in range(3):
            attend(torch.nn.Identity(), *inputs(1, 21), None, blocks=blocks)

    made: list[torch.Size] = []
    with torch.no_grad(), Made():
        layers()
    assert {(3, 8), (4, 7)} <= set(made)
    masks = [shape for shape in made if len(shape) == 2]
    assert len(masks) == len(set(masks)) * 2, "ones, of which the upper triangle is cut, once"
    monkeypatch.setattr(flash.Chosen, "kernel", staticmethod(lambda query, *_: query))
    monkeypatch.setattr(flash, "has_kernel", lambda *_: True)
    made.clear()
    with torch.no_grad(), Made():
        layers()
    assert made == []


@pytest.mark.parametrize(
    ("dtype", "capability", "takes"),
    [
        (torch.bfloat16, (8, 0), True),
        (torch.float16, (9, 0), True),
        (torch.float32, (9, 0), False),
        (torch.float16, (7, 5), False),
    ],
)
def test_types_that_a_gpu_has_a_kernel_for(dtype: torch.dtype, capability: tuple[int, int], takes: bool):
    assert takes_type(dtype, capability) is takes
    assert not has_kernel(*inputs(1, 4)), "on a CPU there is none"


def test_a_version_that_cannot_compute_here_is_named(monkeypatch: pytest.MonkeyPatch):
    """Before weights are read, and not in the first backward."""

    def function(*tensors: Tensor, window_size: Any, **named: Any) -> Tensor:
        if window_size != (None, None):
            raise AssertionError("local not supported yet")
        return documented(*tensors, window_size=window_size, **named)

    monkeypatch.setattr(flash.Chosen, "kernel", staticmethod(flash_of(function, 4)))
    device = torch.device("cpu")
    flash.try_kernel(4, [None], device)
    says = (
        r"train.fa_version = 4: flash_attn.cute cannot compute attention with a sliding window.*AssertionError: local"
    )
    with pytest.raises(SettingsError, match=says):
        flash.try_kernel(4, [None, 4], device)


def test_heads_that_a_kernel_takes():
    assert flash.takes_heads(128, 128, 128)
    assert not flash.takes_heads(192, 192, 128)
    assert not flash.takes_heads(512, 512, 512)


def test_the_kernel_in_torch_is_called_with_what_it_declares():
    """Its operator for tensors without data, which has the shapes of the one on a GPU."""
    query, key, value = (tensor[0].transpose(0, 1).to("meta", torch.bfloat16) for tensor in inputs(1, 34))
    blocks = Blocks(BLOCKS)
    sequences = blocks.sequences(torch.device("meta"))
    key, value = blocks.keys_of(key), blocks.keys_of(value)
    assert len(key) == len(value) == 5 + (5 + 3) + (5 + 2) + 15 + 2 + 3 + (3 + 4)
    assert sequences[2:] == (8, 8)
    output = flash.Chosen.kernel(query, key, value, sequences, 0.3, 4)
    assert output.shape == query.shape


def test_what_is_on_a_cpu_is_computed_by_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flash.Chosen, "kernel", flash.Chosen.kernel)
    query, key, value = inputs(1, 5)
    expected, _ = attend(torch.nn.Identity(), query, key, value, None)

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=refuse))
    use_flash(2)
    assert torch.equal(attend(torch.nn.Identity(), query, key, value, None)[0], expected)
    use_flash(None)
    assert flash.Chosen.kernel is flash._of_torch


@pytest.mark.parametrize(("version", "module"), flash.FLASH.items())
def test_a_missing_version_is_named(monkeypatch: pytest.MonkeyPatch, version: int, module: str):
    for name in ("flash_attn", module):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingsError, match=rf"train.fa_version = {version}: {module} cannot be imported"):
        use_flash(version)
