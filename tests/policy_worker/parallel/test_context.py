"""Rows that ranks share along the sequence: the numbers of one process, whatever is trained."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from policy_worker.parallel.rank_group import RankGroup
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
    {"family": "llama", "tie": False, "kv_heads": 1},
    {"family": "qwen3", "heads": 6, "kv_heads": 3},
    {"family": "gemma3_text", "kv_heads": 2},
    {"family": "phi3", "tie": False},
]
"""Heads of keys and values that two ranks divide, or that are repeated; windows that samples are longer than."""


def of_algorithms() -> list[dict[str, Any]]:
    """Passes before training, all losses of teachers, a critic, penalties, ranks without a token, checkpointing."""
    everything = {"grpo": GRPO | EVERYTHING, "samples": SAMPLES}
    taught = everything | {"sections": {"teacher": TEACHERS}} | PACKED
    short = {"grpo": GRPO | KL | {"mini_batch": 1}, "samples": {"n": 4, "longest": 2}}
    again = {"policy": {"model_gradient_checkpointing": True}}
    recomputed = {"family": FAMILIES[0], "grpo": GRPO, "samples": SAMPLES, "sections": again}
    critic = [case | {"exact": True} for case in with_critic()]
    mixture = {"model": {"family": "qwen3_moe"}, "samples": SAMPLES}
    replayed = mixture | {"grpo": GRPO | {"routing_replay": "weights"}} | PACKED
    return [everything, everything | PACKED, taught, *critic, with_penalties()[1], short, recomputed, replayed]


def of_families(families: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One step in float32 and three in float64, packed or in rows of their own by turns."""
    found = []
    for number, family in enumerate(families):
        packed = {"sequence_packing": bool(number % 2)}
        case = {"model": family, "grpo": GRPO | KL | {"mini_batch": 4}, "samples": SAMPLES, "train": packed}
        found += [case, case | STEPS | {"train": STEPS["train"] | packed}]
    return found


def check(directory: Path, group: RankGroup, world: int, mesh: dict[str, int], cases: list[dict[str, Any]]) -> None:
    found = run_each(directory, world, [{"mesh": mesh, **case} for case in cases])
    for case, (tensors, metrics) in zip(cases, found, strict=True):
        alone, expected = run_here(group, **case)
        tolerance, of_metrics = (1e-10, 1e-9) if case.get("exact") else (5e-6, rounding(2e-5))
        assert_equal(gradients(tensors), gradients(alone), tolerance)
        if case.get("exact"):
            assert {tensor.dtype for tensor in tensors.values()} == {torch.float64}
            assert_equal(tensors, alone, tolerance)
        del expected[-1]["shared_fraction"]
        expected[-1].pop("routing/differs", None)  # prompts that are there once count once
        if mesh.keys() - {"cp"}:  # of the first micro-batch of each data rank, which then are others
            of_ranks = {name for name in expected[-1] if name.startswith("mismatch/unreplayed_")}
            assert of_ranks <= metrics[-1].keys()
            expected[-1] = {name: value for name, value in expected[-1].items() if name not in of_ranks}
        for name, value in expected[-1].items():
            assert metrics[-1][name] == pytest.approx(value, rel=of_metrics, abs=1e-6), (name, case)


@pytest.mark.slow
def test_two_pieces_equal_whole_rows(tmp_path: Path, group: RankGroup):
    check(tmp_path / "2", group, 2, {"cp": 2}, [*of_algorithms(), *of_families(FAMILIES)])


@pytest.mark.slow
def test_a_checkpoint_of_pieces_goes_on_in_whole_rows_and_back(tmp_path: Path, group: RankGroup):
    grpo = GRPO | {"advantage_estimator": "gae"}
    options: dict[str, Any] = {"grpo": grpo, "train": STEPS["train"] | PACKED["train"]}
    last: dict[str, Any] = {"first_step": 2, "steps": 3, **options}
    expected, _ = run_here(group, **last | {"first_step": 0})
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    run_here(group, steps=2, save=str(whole), save_step=2, **options)
    saving = {"steps": 2, "save": str(pieces), "save_step": 2, "mesh": {"cp": 2}, "samples": SAMPLES}
    resumed = {"restore": str(whole / "step-00000002"), "samples": SAMPLES}
    _, (found, _) = run_each(tmp_path / "2", 2, [saving | options, resumed | last])
    assert_equal(found, expected, 1e-4)
    found, _ = run_here(group, restore=str(pieces / "step-00000002"), **last)
    assert_equal(found, expected, 1e-4)


MESHES = [{"dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "cp": 2}, {"cp": 4}]


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pieces_on_four_ranks_equal_whole_rows(tmp_path: Path, group: RankGroup, mesh: dict[str, int]):
    names = ["llama", "qwen3", "gemma3_text", "phi3", "qwen3_moe"]
    families = [
        {"family": name, "tie": tie, "kv_heads": heads}
        for name, (tie, heads) in product(names, [(True, 2), (False, 1)])
    ]
    check(tmp_path / "4", group, 4, mesh, [*of_algorithms(), *of_families(families)])
