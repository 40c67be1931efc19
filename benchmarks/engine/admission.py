"""The embedded engine alone: tokens per second of CPU time, by way of admitting samples.

    python -m benchmarks.engine.admission [--rounds 3] [--slots 128]

Variants, in turns on the same samples, one thread:

    static      a batch begins when the last one has ended
    refill      slots are filled again when a quarter of them is free (the engine's rule)

on short answers (8 to 44 tokens, as in the quickstart) and on answers with a long tail (up to 1,024); and next to
`model.generate` of transformers on a static batch of equal length. A figure is the best round of a variant (CPU time
of this thread, so that other load on the machine matters little).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.harness import in_turns, options, report
from rollout_worker.engines.base import GenerationRequest, SamplingSettings
from rollout_worker.engines.transformers import attention, scheduler
from rollout_worker.engines.transformers.decoder import Decoder

GROUP = 8
Lengths = Callable[[np.random.Generator], list[int]]


def quickstart_model() -> Any:
    """The quickstart's architecture with random weights: 0.33M parameters."""
    attention.register()
    config = Qwen3Config(
        vocab_size=270, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    config._attn_implementation = attention.NAME
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def short(rng: np.random.Generator) -> list[int]:
    return [int(n) for n in rng.integers(8, 45, GROUP)]


def long_tail(rng: np.random.Generator) -> list[int]:
    return [min(int(n) + 1, 1024) for n in np.exp(rng.normal(4.5, 0.9, GROUP))]


@torch.inference_mode()
def run(model: Any, slots: int, groups: int, lengths: Lengths, refill: float) -> dict[str, float]:
    """Decode `groups` groups; tokens/s and samples/s."""
    rng = np.random.default_rng(1)
    decoder = Decoder(model, None, frozenset(), max_model_len=4096, fill_tokens=8192, keep_cache=False)
    decoder.set_version(0)
    begun = samples = tokens = 0
    start = time.thread_time()
    while begun < groups or decoder.rows:
        free = slots - len(decoder.rows)
        if begun < groups and (not decoder.rows or free >= max(refill * slots, GROUP)):
            count = min(free // GROUP, groups - begun)
            _begin(decoder, rng, begun, count, lengths)
            begun += count
        finished = decoder.step() if decoder.rows else []
        samples += len(finished)
        tokens += sum(len(sample.token_ids) for sample in finished)
    seconds = time.thread_time() - start
    return {"tokens_s": tokens / seconds, "samples_s": samples / seconds}


def _begin(decoder: Decoder, rng: np.random.Generator, first: int, count: int, lengths: Lengths) -> None:
    """Admit groups whose samples end at lengths of their own: in one wave, as the engine does."""
    batch, limits = [], []
    settings = SamplingSettings(max_tokens=1024)
    for number in range(first, first + count):
        prompt = rng.integers(0, 270, int(rng.integers(15, 21))).tolist()
        seeds = tuple(range(number * GROUP, number * GROUP + GROUP))
        batch.append((GenerationRequest(str(number), prompt, seeds, settings), range(GROUP)))
        limits += lengths(rng)
    decoder.admit(batch)
    decoder.columns["limit"][-len(limits) :] = limits


@torch.inference_mode()
def generate(model: Any, rows: int, tokens: int = 44) -> dict[str, float]:
    """Run transformers' own loop: one static batch, every row as long as the others."""
    model.set_attn_implementation("sdpa")
    ids = torch.randint(0, 270, (rows, 18), generator=torch.Generator().manual_seed(0))
    start = time.thread_time()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=True, top_k=0, pad_token_id=0,
    )  # fmt: skip
    seconds = time.thread_time() - start
    model.set_attn_implementation(attention.NAME)
    return {"tokens_s": rows * tokens / seconds, "samples_s": rows / seconds}


def main() -> None:
    given = options(__doc__, rounds=3, slots=128, groups=64)
    transformers_logging.set_verbosity_error()
    model, slots, groups = quickstart_model(), given.slots, given.groups
    decode = partial(run, model, slots)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "short/static": lambda: decode(groups, short, 1.0),
        "short/refill": lambda: decode(groups, short, scheduler.REFILL),
        "long/static": lambda: decode(groups // 2, long_tail, 1.0),
        "long/refill": lambda: decode(groups // 2, long_tail, scheduler.REFILL),
        "equal/static": lambda: decode(slots // GROUP, lambda _: [44] * GROUP, 1.0),
        "equal/generate": lambda: generate(model, slots),
    }
    turns = in_turns(ways, given.rounds, warm_up=0)
    best = {name: max(taken, key=lambda result: result["tokens_s"]) for name, taken in turns.items()}
    report(given, {"slots": slots, **best}, best)


if __name__ == "__main__":
    main()
