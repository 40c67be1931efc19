"""Kernels of attention that take all sequences of a row in one call, each of any length: FlashAttention's.

A process has one of them: PyTorch's own, or that of a package. What they do not take is computed by
`policy_worker.model.attention` in padded blocks, with masks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from policy_worker.errors import SettingsError

log = logging.getLogger(__name__)

FLASH = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
"""The module of each version of FlashAttention."""
WIDEST, OLDEST = 256, (8, 0)
"""The most dimensions of a head, and the least compute capability, that FlashAttention in PyTorch takes."""


class Sequences(NamedTuple):
    """S sequences of one row, for a kernel that takes all of them at once.

    queries, keys: int32 [S + 1], where each begins, and the last one ends; the queries of a sequence are the last of
    its keys' positions. longest_query, longest_key: the most that a sequence has."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int


Kernel = Callable[[Tensor, Tensor, Tensor, Sequences, float | None, int | None], Tensor]
"""(queries [T, H, D], keys, values [T', H', D], sequences, scale, window) → [T, H, D], causal."""


def _of_torch(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None, window: int | None
) -> Tensor:
    """FlashAttention 2 as PyTorch has it. Causal queries are the last ones of the keys' positions there, too."""
    function, asks = _varlen_of_torch()
    size = (-1 if window is None else window - 1, 0)
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if asks else {}
    return cast(Tensor, function(query, key, value, *sequences, scale=scale, window_size=size, **grouped))


@cache
def _varlen_of_torch() -> tuple[Callable[..., Any], bool]:
    """Import it; whether it asks if there are fewer heads of keys, which before 2.12 it took in any case."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in signature(varlen_attn).parameters


class Chosen:
    """The kernel of this process for what `has_kernel`."""

    kernel: Kernel = staticmethod(_of_torch)


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the attention of these is computed by `Chosen.kernel`, not with masks."""
    return (
        query.is_cuda
        and takes_type(query.dtype, torch.cuda.get_device_capability(query.device))
        and takes_heads(*(tensor.shape[-1] for tensor in (query, key, value)))
    )


def takes_type(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether GPUs of this capability have a kernel for sequences of any length in this type."""
    return dtype in (torch.bfloat16, torch.float16) and capability >= OLDEST


def takes_heads(*widths: int) -> bool:
    """Whether these kernels take heads whose queries, keys and values are so wide."""
    return len(set(widths)) <= 1 and all(width <= WIDEST and width % 8 == 0 for width in widths)


def use_flash(version: int | None) -> None:
    """Compute what is on a GPU with this version of FlashAttention from now on; None: with the one in PyTorch.

    What is on a CPU, as the small models by which architectures are proven, is computed by torch in any case.

    Raises `SettingsError`: it cannot be imported."""
    if version is None:
        Chosen.kernel = staticmethod(_of_torch)
        return
    try:
        function = import_module(FLASH[version]).flash_attn_varlen_func
    except (ImportError, OSError, AttributeError) as error:
        raise SettingsError(
            f"train.fa_version = {version}: {FLASH[version]} cannot be imported ({error}): see docs/precision.md, or "
            f"leave it out"
        ) from error
    Chosen.kernel = staticmethod(flash_of(function, version))


def try_kernel(version: int, windows: Sequence[int | None], device: torch.device) -> None:
    """Compute some attention and its gradients by the chosen kernel: no version has all on every GPU.

    windows: that the model's layers have.

    Raises `SettingsError`: it cannot be computed."""
    queries, keys = (torch.tensor(starts, dtype=torch.int32, device=device) for starts in ([0, 2, 5], [0, 3, 8]))
    for window in windows:
        query, key, value = (
            torch.ones(length, heads, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
            for length, heads in ((5, 2), (8, 1), (8, 1))
        )
        try:
            Chosen.kernel(query, key, value, Sequences(queries, keys, 3, 5), None, window).sum().backward()
        except Exception as error:  # of any kind: compilers and kernels have their own
            what = "attention" if window is None else "attention with a sliding window"
            raise SettingsError(
                f"train.fa_version = {version}: {FLASH[version]} cannot compute {what} and its gradient here "
                f"({type(error).__name__}: {str(error)[:300]}): install another one, or leave it out"
            ) from error


def flash_of(function: Callable[..., Any], version: int) -> Kernel:
    """`flash_attn_varlen_func` of a version's module, under the arguments that they have in common.

    From 2.1 on causal queries are the last ones of the keys' positions (Dao-AILab/flash-attention, README), which is
    how own positions see those that they share. No window is (-1, -1) in versions 2 and 3, (None, None) in 4."""
    endless = None if version == 4 else -1

    def attention(
        query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None, window: int | None
    ) -> Tensor:
        size = (endless, endless) if window is None else (window - 1, 0)
        alike = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
        output = function(
            query,
            key,
            value,
            cu_seqlens_q=sequences.queries,
            cu_seqlens_k=sequences.keys,
            max_seqlen_q=sequences.longest_query,
            max_seqlen_k=sequences.longest_key,
            softmax_scale=scale,
            causal=True,
            window_size=size,
            **alike,
        )
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)  # some add the log-sum-exp

    return attention


@cache
def say_slow(dtype: torch.dtype, *widths: int) -> None:
    log.warning(
        "attention in %s with heads of %s is computed with masks, which costs several times as much as "
        "FlashAttention does in bfloat16 or float16 with heads of at most %d, on GPUs from Ampere on",
        str(dtype).removeprefix("torch."), " and ".join(map(str, dict.fromkeys(widths))), WIDEST,
    )  # fmt: skip
