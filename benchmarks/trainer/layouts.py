"""How a micro-batch is laid out: what a forward and backward cost padded, packed, and with prompts computed once.

    python -m benchmarks.trainer.layouts [--rounds 9] [--sizes 0.3M,20M]

Models of random weights; groups of 8 answers to one prompt, as long as `prompt:answer` says (answers 60 to 100 % of
it). "mask" is a packed row under one mask over the whole row, which is what transformers makes of its positions.
The variants take turns; each figure is the median over the rounds of padded time / its time: above 1 is faster.

Ends with one line of JSON: for each model and shape the ratio of every variant.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks import harness  # noqa: F401
from policy_worker.model.micro_batch import Layout, MicroBatch, Segment, TrainSample, collate
from policy_worker.model.model import PolicyModel, prepare_model

VOCABULARY, GROUP = 512, 8
SIZES = {"0.3M": (64, 4, 256, 2), "5M": (256, 6, 1024, 1), "20M": (512, 6, 2048, 1)}
"""Hidden size, layers, inner size, groups of a micro-batch."""
SHAPES = {"20:44": (20, 44), "256:64": (256, 64), "160:160": (160, 160), "64:256": (64, 256)}
VARIANTS = {
    "padded": Layout(False, VOCABULARY),
    "shared": Layout(False, VOCABULARY, least_spared=0.0),
    "packed": Layout(True, VOCABULARY),
    "mask": Layout(True, VOCABULARY),
}


def make_model(size: str, device: str) -> PolicyModel:
    hidden, layers, inner, _ = SIZES[size]
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    model = PolicyModel(AutoModelForCausalLM.from_config(config))
    return prepare_model(model, packed=True, recompute=False).to(device)


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


def seconds(model: PolicyModel, batch: MicroBatch, variant: str) -> float:
    """Of one forward and backward."""
    model.lm.set_attn_implementation("sdpa" if variant == "mask" else "blocks")
    began = time.perf_counter()
    model(batch).logprobs.mean().backward()
    if batch.index.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant after one that warms up")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for size in options.sizes.split(","):
        model = make_model(size, device)
        for shape, (prompt, longest) in SHAPES.items():
            samples = make_samples(SIZES[size][3], prompt, longest)
            times: dict[str, list[float]] = {name: [] for name in VARIANTS}
            for _ in range(options.rounds + 1):
                for name, layout in VARIANTS.items():
                    batch = collate(
                        samples,
                        range(len(samples)),
                        Layout(layout.packed, VOCABULARY, device, layout.least_spared),
                    )
                    times[name].append(seconds(model, batch, name))
            padded = times.pop("padded")[1:]
            ratios = {
                name: round(statistics.median(a / b for a, b in zip(padded, values[1:], strict=True)), 2)
                for name, values in times.items()
            }
            found[f"{size} {shape}"] = ratios
            print(
                f"{size:>5} {shape:>8}  padded {statistics.median(padded) * 1e3:7.1f} ms  {ratios}",
                flush=True,
            )
    print(json.dumps({"device": device, **found}))


if __name__ == "__main__":
    main()
