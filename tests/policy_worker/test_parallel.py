"""The same batch on one, two and three real ranks: equal loss, gradients and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.policy_worker.ranks import start_ranks, wait_ranks

SAMPLES = {"n": 9, "n_masked": 1}
GRPO = {"mini_batch": 2, "entropy_coeff": 0.02, "positive_nll_coef": 0.1}


def run(
    directory: Path, world: int, **options: Any
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    directory.mkdir()
    arguments = [
        "tests.policy_worker.rank_program",
        str(directory),
        json.dumps({"samples": SAMPLES, **options}),
    ]
    for code, output in wait_ranks(start_ranks(world, arguments)):
        assert code == 0, output
    return load_file(directory / "tensors.safetensors"), json.loads((directory / "metrics.json").read_text())


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = tensor.abs().max().item()
        assert (found[name] - tensor).abs().max().item() <= tolerance * scale, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    return run(tmp_path_factory.mktemp("ranks") / "1", 1, grpo=GRPO)


def test_two_ranks_equal_one(tmp_path: Path, alone: Any):
    tensors, metrics = run(tmp_path / "2", 2, grpo={**GRPO, "balance_dp_token": True})
    assert_equal({n: t for n, t in tensors.items() if n.startswith("grad.")},
                 {n: t for n, t in alone[0].items() if n.startswith("grad.")}, 2e-6)  # fmt: skip
    assert_equal(tensors, alone[0], 2e-5)
    for name in ("loss", "grad_norm", "entropy", "behaviour_kl", "ratio_max", "clip_fraction"):
        assert metrics[0][name] == pytest.approx(alone[1][0][name], rel=2e-5), name


@pytest.mark.slow
def test_three_ranks_with_empty_micro_batches_and_packing_equal_one(tmp_path: Path, alone: Any):
    grpo = {**GRPO, "max_token_len_per_mini_batch": 25}
    tensors, metrics = run(tmp_path / "3", 3, grpo=grpo, train={"sequence_packing": True})
    assert_equal({n: t for n, t in tensors.items() if n.startswith("grad.")},
                 {n: t for n, t in alone[0].items() if n.startswith("grad.")}, 2e-6)  # fmt: skip
    assert metrics[0]["loss"] == pytest.approx(alone[1][0]["loss"], rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["always", "never"])
@pytest.mark.parametrize("impl", ["fused", "for-loop"])
def test_more_ranks_than_samples_over_several_steps(tmp_path: Path, reshard: str, impl: str):
    options: dict[str, Any] = {"samples": {"n": 2}, "grpo": {"batch_size_per_optimize": 1}, "steps": 3}
    train = {"optm_impl": impl, "fsdp_reshard_after_forward": reshard}
    expected, _ = run(tmp_path / "1", 1, train=train, **options)
    found, metrics = run(tmp_path / "3", 3, train=train, **options)
    assert metrics[0]["optimizer_steps"] == 2.0
    assert_equal(found, expected, 1e-4)


@pytest.mark.slow
def test_bfloat16_parameters_and_float32_masters(tmp_path: Path, alone: Any):
    tensors, metrics = run(tmp_path / "1", 1, grpo=GRPO, train={"param_dtype": "bfloat16"})
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert metrics[0]["loss"] == pytest.approx(alone[1][0]["loss"], rel=0.1, abs=0.02)
    assert metrics[0]["grad_norm"] == pytest.approx(alone[1][0]["grad_norm"], rel=0.1)
    assert any(not torch.equal(tensors[name], alone[0][name]) for name in tensors)
