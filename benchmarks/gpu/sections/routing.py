"""The experts that vLLM says it chose, against those of a plain forward of the same tokens.

Prompts of several answers, which vLLM finds in its prefix cache, and an update by the same weights while they run,
after which it computes all of them again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.snapshot import Snapshot
from benchmarks.gpu.bench import Bench
from rollout_worker.engines import create_engine
from rollout_worker.engines.base import Generation, GenerationRequest
from rollout_worker.engines.transformers.routing import Routing
from rollout_worker.groups.leasing import training_settings
from schema.config import Config

CASE = "chosen experts"
PROMPTS, ANSWERS, LENGTH = 8, 4, 160
LEAST = 0.98
"""Share of the chosen experts that must be the same: where two are almost as likely, either may be chosen."""
PAUSE_S = 0.002


def config_of(path: Path, backend: str) -> Config:
    return Config.model_validate(
        {
            "policy": {"model_name_or_path": str(path), "model_max_length": 256},
            "train": {"param_dtype": "float32", "train_policy": {"type": "grpo", "routing_replay": "ids"}},
            "rollout": {
                "backend": backend,
                "dtype": "float32",
                "max_response_length": LENGTH,
                "max_num_seqs": 16,
                "parallelism": {"tp_size": 1},
                "sampling_config": {"ignore_eos": True},
                **({"gpu_memory_utilization": 0.3} if backend == "vllm" else {}),
            },
        }
    )


async def _generate(config: Config, model: Any, requests: list[GenerationRequest]) -> list[Generation]:
    engine, found = create_engine(config, None, frozenset()), []
    await engine.start()
    try:
        await engine.load_weights(Snapshot.of(model), 0)
        engine.submit(requests)
        while engine.stats().tokens < len(requests):  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)
        await engine.load_weights(Snapshot.of(model), 1)
        while len(found) < PROMPTS * ANSWERS:
            found += await engine.collect()
    finally:
        await engine.close()
    return found


def compare(bench: Bench, path: Path, backend: str = "vllm") -> None:
    """Report which share of the experts is the same. path: of a mixture of experts."""
    config = config_of(path, backend)
    if not bench.on_gpu and config.rollout.engine.routes_on_gpus:
        bench.skip(CASE, "vLLM returns them on GPUs alone")
        return
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [[(7 * i + 3 * j) % 256 for j in range(40)] for i in range(PROMPTS)]
    settings, seeds = training_settings(config), tuple(range(ANSWERS))
    requests = [GenerationRequest(str(i), prompt, seeds, settings) for i, prompt in enumerate(prompts)]
    samples = asyncio.run(_generate(config, model, requests))
    model, routing, chosen = model.to(bench.device), Routing(model, "ids"), list[torch.Tensor]()
    with torch.inference_mode():
        for sample in samples:
            tokens = [*prompts[int(sample.request_id)], *sample.token_ids.tolist()[:-1]]
            with routing.into(lambda ids, _: chosen.append(ids)):
                model(input_ids=torch.tensor([tokens], device=bench.device), use_cache=False)
    same = [
        (sample.expert_ids[..., None] == ids.cpu().numpy()[..., None, :]).any(-1)
        for sample, ids in zip(samples, chosen, strict=True)
    ]
    share = float(np.concatenate(same).mean())
    bench.check(
        CASE,
        share >= LEAST,
        same=share,
        least_of_a_sample=min(float(one.mean()) for one in same),
        samples_with_two_versions=sum(len(sample.version_values) > 1 for sample in samples),
    )
