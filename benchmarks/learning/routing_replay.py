"""What a trainer's and an engine's choice of experts do to log-probs, and what replaying the engine's does about it.

    python -m benchmarks.learning.routing_replay [--model DIR] [--steps 3]

Trainer and embedded engine are those of a job, in one process; each sample is made with the present weights.
The engine computes in bfloat16, the trainer in float32 or bfloat16, by other kernels. Without --model it is a mixture
of random weights: eight layers of 32 experts, two of which see a token. A line is a run of its own, `mismatch/…` of
its tokens are medians over the steps.
"""

from __future__ import annotations

import asyncio
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.harness import QUICKSTART, options, report
from benchmarks.learning.in_process import learn
from examples.quickstart.make_model import make_tokenizer
from schema.config import load_config


def random_mixture(out: Path) -> Path:
    """Weights large enough that a token's experts say different things."""
    shape = Qwen3MoeConfig(
        vocab_size=make_tokenizer(out), hidden_size=128, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=32,
        num_experts_per_tok=2, norm_topk_prob=True, initializer_range=0.12, max_position_embeddings=256,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(out)
    return out


def measured(model: Path, replayed: str, dtype: str, steps: int) -> dict[str, float]:
    """Medians over the steps of a run."""
    overrides = [
        f'policy.model_name_or_path="{model}"',
        f'train.train_policy.routing_replay="{replayed}"',
        "train.train_policy.allowed_outdated_steps=0",
        'rollout.dtype="bfloat16"',
        f'train.param_dtype="{dtype}"',
    ]
    with tempfile.TemporaryDirectory() as out:
        learned = asyncio.run(learn(load_config(QUICKSTART / "grpo_plain.toml", overrides), Path(out), steps))
    columns = {
        "differs": "routing/differs", "k3": "mismatch/engine_k3", "ess": "mismatch/engine_ess",
        "ratio max": "mismatch/engine_ratio_max", "cut": "mismatch/engine_cut",
    }  # fmt: skip
    return {
        name: median(step[metric] for step in learned.metrics)
        for name, metric in columns.items()
        if metric in learned.metrics[-1]
    }


def main() -> None:
    given = options(
        __doc__, steps=3, model=(Path, "a mixture with its tokenizer, in the place of random weights")
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or random_mixture(Path(folder) / "model")
        rows = {
            f"{dtype} {replayed}": measured(model, replayed, dtype, given.steps)
            for dtype, replayed in product(("float32", "bfloat16"), ("none", "ids", "weights"))
        }
    report(given, rows, rows)


if __name__ == "__main__":
    main()
