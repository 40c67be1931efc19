"""What kept sets cost vLLM: tokens per second by vocabulary and by how many log-probs are asked for.

    python -m benchmarks.engine.kept_sets [--vocabularies 320,32000,150000] [--tokens 64] [--samples 16]

A Qwen3 of two layers and 64 dimensions with random weights, through our engine as a rollout replica runs it: no sets
(filters in validation), sets of `top_k`, and sets of `top_p` alone, which need the log-probs of the whole vocabulary.
Wall time, the best of three rounds.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.engine.snapshot import Snapshot
from benchmarks.harness import options, report
from rollout_worker.engines import create_engine
from rollout_worker.engines.base import Engine, GenerationRequest, SamplingSettings
from schema.config import Config

PROMPT = 16
WAYS: dict[str, dict[str, Any]] = {
    "top_k 50, no sets": {"top_k": 50},
    "top_k 50": {"top_k": 50, "correction": "exact"},
    "top_k 1000": {"top_k": 1000, "correction": "exact"},
    "top_p 0.9 alone": {"top_p": 0.9, "correction": "exact"},
}


def model_of(vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=False, max_position_embeddings=512,
        initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def config_of(path: Path) -> Config:
    return Config.model_validate(
        {
            "policy": {"model_name_or_path": str(path), "model_max_length": 256},
            "train": {"param_dtype": "float32"},
            "rollout": {
                "backend": "vllm",
                "dtype": "float32",
                "load_format": "dummy",
                "max_num_seqs": 16,
                "parallelism": {"tp_size": 1},
                "sampling_config": {"top_p": 0.9},  # lets all log-probs be asked for
            },
        }
    )


async def tokens_per_second(engine: Engine, settings: SamplingSettings, samples: int, name: str) -> dict[str, float]:
    """Speed of one wave of samples, and the mean number of ids in a set."""
    began, tokens, sizes, ended = time.monotonic(), 0, [0.0], 0
    engine.submit([GenerationRequest(f"{name}/{i}", range(1, PROMPT), (i,), settings) for i in range(samples)])
    while ended < samples:
        for sample in await engine.collect():
            ended, tokens = ended + 1, tokens + len(sample.token_ids)
            sizes += sample.kept_counts.tolist()
    return {"tokens_s": tokens / (time.monotonic() - began), "ids": float(np.mean(sizes[1:] or sizes))}


async def measure(vocabulary: int, samples: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(vocabulary)
        model.save_pretrained(folder)
        engine = create_engine(config_of(Path(folder)), None, frozenset())
        await engine.start()
        try:
            await engine.load_weights(Snapshot.of(model), 0)
            plain = SamplingSettings(max_tokens=tokens, ignore_eos=True)
            best: dict[str, dict[str, float]] = {}
            for number in range(rounds):
                for way, keys in WAYS.items():
                    if keys.get("top_k", 0) < vocabulary:
                        found = await tokens_per_second(engine, replace(plain, **keys), samples, f"{way} {number}")
                        best[way] = max(found, best.get(way, found), key=lambda row: row["tokens_s"])
            return {f"{vocabulary}, {way}": row for way, row in best.items()}
        finally:
            await engine.close()


def main() -> None:
    given = options(__doc__, rounds=3, vocabularies=[320, 4096, 32000, 150000], samples=16, tokens=64)
    rows: dict[str, dict[str, float]] = {}
    for vocabulary in given.vocabularies:
        rows |= asyncio.run(measure(vocabulary, given.samples, given.tokens, given.rounds))
    report(given, rows, rows)


if __name__ == "__main__":
    main()
