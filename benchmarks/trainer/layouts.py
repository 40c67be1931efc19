"""How a micro-batch is laid out: what a forward and backward cost padded, packed, and with prompts computed once.

    python -m benchmarks.trainer.layouts [--rounds 9] [--sizes 0.3M,20M]

Models of random weights; groups of 8 answers to one prompt, as long as `prompt:answer` says (answers 60 to 100 % of
it). "mask" is a packed row under one mask over the whole row, which is what transformers makes of its positions.
The variants take turns; each figure is the median over the rounds of padded time / its time: above 1 is faster.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.harness import in_turns, options, ratio, report, timed
from benchmarks.trainer.material import GROUP, VOCABULARY, language_model
from policy_worker.model.micro_batch import BatchLayout, Segment, TrainSample, collate
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import prepare_model

WIDE = {"intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"0.3M": ({}, 2), "5M": ({}, 1), "20M": (WIDE, 1)}
"""Changes of the model's configuration, and groups of a micro-batch."""
SHAPES = {"20:44": (20, 44), "256:64": (256, 64), "160:160": (160, 160), "64:256": (64, 256)}
VARIANTS = {
    "padded": (False, {}), "once": (False, {"least_spared": 0.0}), "packed": (True, {}), "mask": (True, {})
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_samples(groups: int, prompt: int, longest: int) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(groups):
        start = rng.integers(0, VOCABULARY, prompt)
        for length in rng.integers(longest * 6 // 10, longest + 1, GROUP).tolist():
            ids = np.concatenate([start, rng.integers(0, VOCABULARY, length)]).astype(np.int32)
            mask = (np.arange(len(ids)) >= prompt).astype(np.uint8)
            samples.append(TrainSample([Segment(ids, mask, np.zeros(len(ids), np.float32))]))
    return samples


def seconds(model: PolicyModel, samples: list[TrainSample], variant: str) -> float:
    """Time of one forward and backward."""
    packed, spared = VARIANTS[variant]
    batch = collate(samples, range(len(samples)), BatchLayout(packed, VOCABULARY, DEVICE, **spared))
    model.lm.set_attn_implementation("sdpa" if variant == "mask" else "blocks")

    def work() -> None:
        model(batch).logprobs.mean().backward()
        if batch.index.is_cuda:
            torch.cuda.synchronize()

    return timed(work)


def main() -> None:
    given = options(__doc__, rounds=9, sizes=(list(SIZES), "of " + ", ".join(SIZES)))
    rows: dict[str, dict[str, float]] = {}
    for size in given.sizes:
        changes, groups = SIZES[size]
        lm = language_model(size, max_position_embeddings=4096, **changes)
        model = prepare_model(PolicyModel(lm), packed=True, recompute=False).to(DEVICE)
        for shape, lengths in SHAPES.items():
            samples = make_samples(groups, *lengths)
            times = in_turns({name: partial(seconds, model, samples, name) for name in VARIANTS}, given.rounds)
            padded = times.pop("padded")
            rows[f"{size} {shape}"] = {name: ratio(padded, taken) for name, taken in times.items()}
    report(given, {"device": DEVICE, **rows}, rows)


if __name__ == "__main__":
    main()
