"""Losses and gradients against TRL's, an implementation that shares nothing with ours but torch and transformers."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.trl.venv import trl_python
from policy_worker.parallel.rank_group import RankGroup
from schema.wire.sample import Sample
from tests.policy_worker.material import random_samples, write_model
from tests.policy_worker.training.test_grpo import trained

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 900.0
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28, "lower_bound_ratio": 1.5}
THEIR_CLIP = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.5}
MEAN, BY_SAMPLE = {"loss_type": "token-mean"}, {"loss_type": "seq-mean-token-mean"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (CLIP | MEAN, THEIR_CLIP | {"loss_type": "bnpo"}),
    (CLIP | MEAN | {"variant": "dapo"}, THEIR_CLIP | {"loss_type": "dapo"}),
    (CLIP | BY_SAMPLE, THEIR_CLIP | {"loss_type": "grpo"}),
    (
        CLIP | BY_SAMPLE | {"unbiased_loss_max_tokens": 32},
        THEIR_CLIP | {"loss_type": "dr_grpo", "max_completion_length": 32},
    ),
    (
        {"variant": "gspo", "epsilon_low": 0.01, "epsilon_high": 0.02},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02},
    ),
    (
        {"variant": "cispo", "epsilon_low": -1.0, "epsilon_high": 0.28} | MEAN,
        {"loss_type": "cispo", "epsilon_high": 1.28},
    ),
    ({"variant": "sapo"} | BY_SAMPLE, {"loss_type": "sapo"}),
    (CLIP | MEAN | {"entropy_coeff": 0.02}, THEIR_CLIP | {"loss_type": "bnpo", "entropy_coef": 0.02}),
    (
        CLIP | MEAN | {"kl_beta": 0.1, "kl_type": "k3"},
        THEIR_CLIP | {"loss_type": "bnpo", "beta": 0.1, "use_bias_correction_kl": False},
    ),
    (
        CLIP | BY_SAMPLE | {"kl_beta": 0.1, "kl_type": "k3", "unbiased_kl_estimate": True},
        THEIR_CLIP | {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
    (CLIP | MEAN | {"temperature": 0.7}, THEIR_CLIP | {"loss_type": "bnpo", "temperature": 0.7}),
]


def plainly(samples: list[Sample]) -> list[dict[str, Any]]:
    """The samples in plain numbers, with the advantages of GRPO, arXiv 2402.03300, §4.1.2."""
    found = []
    for number, sample in enumerate(samples):
        begin = number - number % 4
        scores = [one.header.score or 0.0 for one in samples[begin : begin + 4]]
        spread = statistics.stdev(scores) + 1e-6
        cut = sample.header.prompt_tokens
        found.append(
            {
                "prompt": sample.token_ids[:cut].tolist(),
                "response": sample.token_ids[cut:].tolist(),
                "logprobs": sample.logprobs[cut:].tolist(),
                "advantage": ((sample.header.score or 0.0) - statistics.mean(scores)) / spread,
            }
        )
    return found


@pytest.mark.soak
def test_losses_and_gradients_are_those_of_trl(tmp_path: Path, group: RankGroup) -> None:
    samples = random_samples(8)
    write_model(tmp_path / "policy", 0)
    write_model(tmp_path / "reference", 1)
    (tmp_path / "samples.json").write_text(json.dumps(plainly(samples)))
    (tmp_path / "cases.json").write_text(json.dumps([theirs for _, theirs in CASES]))
    program = Path(__file__).parents[1] / "trl_program.py"
    command = [str(trl_python(ROOT / ".venv-trl")), str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "loss.json").read_text())
    assert len(losses) == len(CASES)
    for number, (ours, theirs) in enumerate(CASES):
        metrics, gradients = trained(group, samples, ours)
        assert metrics["loss"] == pytest.approx(losses[number], rel=1e-4, abs=1e-6), number
        expected = load_file(tmp_path / f"{number}.safetensors")
        assert {name.removeprefix("lm.") for name in gradients} == expected.keys()
        for name, gradient in gradients.items():
            other = expected[name.removeprefix("lm.")]
            scale = max(other.abs().max().item(), 1e-3)
            assert (gradient - other).abs().max().item() <= 1e-4 * scale, (name, theirs)
