"""The embedded engine alone: tokens per second of CPU time, by way of admitting samples and of updating weights.

    python -m benchmarks.engine.admission [--rounds 3] [--slots 128]

Variants, interleaved round by round on the same samples, one thread:

    static      a batch begins when the last one has ended; an update waits for that
    refill      slots are filled again when a quarter of them is free (the engine's rule)
    …/update    new weights every 0.28 s: `recompute` interrupts running samples, `wait` lets them end

on short answers (8 to 44 tokens, as in the quickstart) and on answers with a long tail (up to 1,024), and next to
them `model.generate` of transformers on a static batch of equal length. The last line is JSON: the best round of
each variant (CPU time of this thread, so that other load on the machine matters little).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rollout_worker.engines.base import GenerationRequest, SamplingSettings
from rollout_worker.engines.transformers import attention, scheduler
from rollout_worker.engines.transformers.decoder import Decoder

GROUP = 8
UPDATE_S = 0.28
Lengths = Callable[[np.random.Generator], list[int]]


def quickstart_model() -> Any:
    """The quickstart's architecture with random weights: 0.33M parameters."""
    attention.register()
    config = Qwen3Config(
        vocab_size=270,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    config._attn_implementation = attention.NAME
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def short(rng: np.random.Generator) -> list[int]:
    return [int(n) for n in rng.integers(8, 45, GROUP)]


def long_tail(rng: np.random.Generator) -> list[int]:
    return [min(int(n) + 1, 1024) for n in np.exp(rng.normal(4.5, 0.9, GROUP))]


@torch.inference_mode()
def run(
    model: Any,
    slots: int,
    groups: int,
    lengths: Lengths,
    refill: float,
    update_s: float = 0.0,
    patience: float = 0.0,
) -> dict[str, float]:
    """Decode `groups` groups; returns tokens/s, samples/s and the number of updates."""
    rng = np.random.default_rng(1)
    decoder = Decoder(model, None, frozenset(), max_model_len=4096, fill_tokens=8192, keep_cache=False)
    decoder.set_version(0)
    step, fill = scheduler.Speed(), scheduler.Speed()
    begun = samples = tokens = updates = 0
    start = last = time.thread_time()
    while begun < groups or decoder.rows:
        due = update_s > 0 and time.thread_time() - last > update_s
        if due and not _wait(decoder, step, fill, patience):
            decoder.set_version(decoder.version + 1)
            last, updates, due = time.thread_time(), updates + 1, False
        free = slots - len(decoder.rows)
        if not due and begun < groups and (not decoder.rows or free >= max(refill * slots, GROUP)):
            count = min(free // GROUP, groups - begun)
            before = time.thread_time()
            computed = _begin(decoder, rng, begun, count, lengths)
            fill.observe(time.thread_time() - before, computed)
            begun += count
        before = time.thread_time()
        finished = decoder.step() if decoder.rows else []
        step.observe(time.thread_time() - before)
        samples += len(finished)
        tokens += sum(len(sample.token_ids) for sample in finished)
    seconds = time.thread_time() - start
    return {"tokens_s": tokens / seconds, "samples_s": samples / seconds, "updates": updates}


def _begin(decoder: Decoder, rng: np.random.Generator, first: int, count: int, lengths: Lengths) -> int:
    """Admit groups whose samples end at lengths of their own: in one wave, as the engine does."""
    batch, limits = [], []
    settings = SamplingSettings(max_tokens=1024)
    for number in range(first, first + count):
        prompt = rng.integers(0, 270, int(rng.integers(15, 21))).tolist()
        seeds = tuple(range(number * GROUP, number * GROUP + GROUP))
        batch.append((GenerationRequest(str(number), prompt, seeds, settings), range(GROUP)))
        limits += lengths(rng)
    computed = decoder.admit(batch)
    decoder.columns["limit"][-len(limits) :] = limits
    return computed


def _wait(decoder: Decoder, step: scheduler.Speed, fill: scheduler.Speed, patience: float) -> bool:
    return bool(decoder.rows) and scheduler.let_running_end(
        decoder.steps_left(), step.seconds, decoder.tokens_to_recompute(), fill.seconds, patience
    )


@torch.inference_mode()
def generate(model: Any, rows: int, tokens: int = 44) -> dict[str, float]:
    """transformers' own loop: one static batch, every row as long as the others."""
    model.set_attn_implementation("sdpa")
    ids = torch.randint(0, 270, (rows, 18), generator=torch.Generator().manual_seed(0))
    start = time.thread_time()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=True, top_k=0, pad_token_id=0,
    )  # fmt: skip
    seconds = time.thread_time() - start
    model.set_attn_implementation(attention.NAME)
    return {"tokens_s": rows * tokens / seconds, "samples_s": rows / seconds, "updates": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--groups", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    model, slots, groups = quickstart_model(), options.slots, options.groups
    never = float("inf")
    variants: dict[str, Callable[[], dict[str, float]]] = {
        "short/static": lambda: run(model, slots, groups, short, 1.0),
        "short/refill": lambda: run(model, slots, groups, short, scheduler.REFILL),
        "short/static/update": lambda: run(model, slots, groups, short, 1.0, UPDATE_S, never),
        "short/refill/recompute": lambda: run(model, slots, groups, short, scheduler.REFILL, UPDATE_S),
        "short/refill/wait": lambda: run(model, slots, groups, short, scheduler.REFILL, UPDATE_S, never),
        "long/static": lambda: run(model, slots, groups // 2, long_tail, 1.0),
        "long/refill": lambda: run(model, slots, groups // 2, long_tail, scheduler.REFILL),
        "long/static/update": lambda: run(model, slots, groups // 2, long_tail, 1.0, UPDATE_S, never),
        "long/refill/recompute": lambda: run(
            model, slots, groups // 2, long_tail, scheduler.REFILL, UPDATE_S
        ),
        "equal/static": lambda: run(model, slots, slots // GROUP, lambda _: [44] * GROUP, 1.0),
        "equal/generate": lambda: generate(model, slots),
    }
    best: dict[str, dict[str, float]] = {}
    for number in range(options.rounds):
        for name, variant in variants.items():
            result = {key: round(value) for key, value in variant().items()}
            print(f"round {number + 1}  {name:24s} {result}", flush=True)
            if name not in best or result["tokens_s"] > best[name]["tokens_s"]:
                best[name] = result
    print(json.dumps({"slots": slots, "cpu_time": True, **best}))


if __name__ == "__main__":
    main()
