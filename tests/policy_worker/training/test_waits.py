"""How often a training step asks for a number that is on the device, for which the host waits until it has come."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from policy_worker.parallel.rank_group import RankGroup
from tests.policy_worker.rank_program import train

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
"""Operations whose result, or its size, the host has to know."""


class Waits(TorchDispatchMode):
    """Counts operations that wait, indexing by a mask among them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.count += name in WAITS or by_mask
        return function(*args, **kwargs or {})


def test_no_micro_batch_waits_for_the_device(group: RankGroup):
    """Twice as many micro-batches wait no more often: forward, loss, metrics and backward ask for nothing."""
    grpo = {"mini_batch": 2, "kl_beta": 0.1, "entropy_coeff": 0.02}
    train_keys = {"sequence_packing": True, "param_dtype": "bfloat16"}
    counts = []
    for samples in (4, 4, 8):  # the first one makes what is kept afterwards
        with Waits() as waits:
            train(group, {"samples": {"n": samples}, "grpo": grpo, "train": train_keys})
        counts.append(waits.count)
    assert counts[1] == counts[2] > 0
