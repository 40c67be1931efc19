"""What kept sets cost vLLM: tokens per second by vocabulary and by how many log-probs are asked for.

    python -m benchmarks.engine.kept_sets [--vocabularies 320,32000,150000] [--tokens 64] [--samples 16]

A Qwen3 of two layers and 64 dimensions with random weights, through our engine as a rollout replica runs it: no sets
(filters in validation), sets of `top_k`, and sets of `top_p` alone, which need the log-probs of the whole vocabulary.
Wall time, the best of three rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

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


class Weights:
    """Those that a model has."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        self._model = model

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._model.state_dict().items())


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


async def tokens_per_second(engine: Engine, settings: SamplingSettings, samples: int, name: str) -> float:
    speed = 0.0
    for round_number in range(3):
        began = time.monotonic()
        requests = [
            GenerationRequest(f"{name}/{round_number}/{i}", range(1, PROMPT), (i,), settings)
            for i in range(samples)
        ]
        engine.submit(requests)
        found = 0
        tokens = 0
        sizes: list[float] = []
        while found < samples:
            for sample in await engine.collect():
                found, tokens = found + 1, tokens + len(sample.token_ids)
                sizes += sample.kept_counts.tolist()
        speed = max(speed, tokens / (time.monotonic() - began))
    print(f"  {name}: {speed:.0f} tok/s, {np.mean(sizes or [0]):.0f} ids in a set", flush=True)
    return speed


async def measure(vocabulary: int, samples: int, tokens: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(vocabulary)
        model.save_pretrained(folder)
        engine = create_engine(config_of(Path(folder)), None, frozenset())
        await engine.start()
        try:
            await engine.load_weights(Weights(model), 0)
            plain = SamplingSettings(max_tokens=tokens, ignore_eos=True)
            return {
                name: round(await tokens_per_second(engine, replace(plain, **way), samples, name))
                for name, way in WAYS.items()
                if way.get("top_k", 0) < vocabulary
            }
        finally:
            await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", default="320,4096,32000,150000")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    found = {}
    for vocabulary in map(int, arguments.vocabularies.split(",")):
        print(f"vocabulary of {vocabulary}:", flush=True)
        found[vocabulary] = asyncio.run(measure(vocabulary, arguments.samples, arguments.tokens))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
