"""Rows that ranks share along the sequence: the numbers of one process, whatever is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from policy_worker.parallel.group import Group
from tests.policy_worker.parallel.test_ranks import (
    EVERYTHING,
    GRPO,
    TEACHERS,
    assert_equal,
    gradients,
    run_each,
    run_here,
    with_critic,
    with_penalties,
)
from tests.support.devices import rounding

SAMPLES = {"n": 9, "n_masked": 1}
STEPS: dict[str, Any] = {"steps": 3, "exact": True, "train": {"optm_lr": 1e-2}}
KL = {"kl_beta": 0.1, "entropy_coeff": 0.02}
PACKED: dict[str, Any] = {"train": {"sequence_packing": True}}
FAMILIES = [
    {"family": "llama", "tie": False},
    {"family": "qwen3", "kv_heads": 1},
    {"family": "gemma3_text", "kv_heads": 2},
    {"family": "phi3", "tie": False},
]
"""Heads of keys and values that two ranks divide, and one that is repeated; windows that samples are longer than."""


def of_algorithms() -> list[dict[str, Any]]:
    """What passes before training find, all losses of teachers, a critic, penalties, and ranks without a token."""
    everything = {"grpo": GRPO | EVERYTHING, "samples": SAMPLES}
    taught = everything | {"sections": {"teacher": TEACHERS}} | PACKED
    short = {"grpo": GRPO | KL | {"mini_batch": 1}, "samples": {"n": 4, "longest": 2}}
    return [
        everything,
        everything | PACKED,
        taught,
        with_critic()[0],
        with_critic()[1],
        with_penalties()[1],
        short,
    ]


def of_families(families: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One step in float32 and three in float64, packed or in rows of their own by turns."""
    found = []
    for number, family in enumerate(families):
        packed = {"sequence_packing": bool(number % 2)}
        case = {"model": family, "grpo": GRPO | KL | {"mini_batch": 4}, "samples": SAMPLES, "train": packed}
        found += [case, case | STEPS | {"train": STEPS["train"] | packed}]
    return found


def check(
    directory: Path, group: Group, world: int, mesh: dict[str, int], cases: list[dict[str, Any]]
) -> None:
    found = run_each(directory, world, [{"mesh": mesh, **case} for case in cases])
    for case, (tensors, metrics) in zip(cases, found, strict=True):
        alone, expected = run_here(group, **case)
        tolerance, of_metrics = (1e-10, 1e-9) if case.get("exact") else (5e-6, rounding(2e-5))
        assert_equal(gradients(tensors), gradients(alone), tolerance)
        if case.get("exact"):
            assert {tensor.dtype for tensor in tensors.values()} == {torch.float64}
            assert_equal(tensors, alone, tolerance)
        del expected[-1]["shared_fraction"]
        for name, value in expected[-1].items():
            assert metrics[-1][name] == pytest.approx(value, rel=of_metrics, abs=1e-6), (name, case)


@pytest.mark.slow
def test_two_pieces_equal_whole_rows(tmp_path: Path, group: Group):
    check(tmp_path / "2", group, 2, {"cp": 2}, [*of_algorithms(), *of_families(FAMILIES)])
