"""With `train.deterministic` the bits of a sample follow from its request, whatever happens around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout_worker.engines.base import EngineConfigError, Generation, GenerationRequest, SamplingSettings
from rollout_worker.engines.transformers import TransformersEngine
from rollout_worker.engines.transformers.settings import EngineSettings, settings_of
from schema.config import Config
from tests.rollout_worker.engines.engine_contract import EOS, encode
from tests.rollout_worker.tiny import Models, publish_model, tokenizer
from tests.support.fetched import Weights, fetch
from tests.support.waiting import PATIENCE

SETTINGS = SamplingSettings(max_tokens=24, ignore_eos=True)
PROMPTS = ("What is 12 + 34?", "Hi", "Add 5 and 6, then think about it for a good while.", "7 + 7 = ?")


def requests(label: str, prompts: Sequence[str] = PROMPTS) -> list[GenerationRequest]:
    """Each prompt has the same four seeds in every job."""
    return [
        GenerationRequest(f"{label}-{text}", encode(text), tuple(range(10 * i, 10 * i + 4)), SETTINGS)
        for i, text in enumerate(prompts)
    ]


def settings(model: Path, deterministic: bool = True) -> EngineSettings:
    config = {
        "policy": {"model_name_or_path": str(model), "model_max_length": 96},
        "train": {"param_dtype": "float32", "deterministic": deterministic, "train_policy": {"type": "grpo"}},
        "rollout": {
            "backend": "transformers",
            "dtype": "float32",
            "n_generation": 4,
            "max_concurrent_samples": 16,
            "parallelism": {"tp_size": 1},
        },
    }
    return settings_of(Config.model_validate(config))


@pytest.fixture
def weights(tmp_path: Path, models: Models) -> Weights:
    return fetch(tmp_path / "store", publish_model(tmp_path / "store", models.of(0), 0))


async def collect(engine: TransformersEngine, n: int) -> list[Generation]:
    found: list[Generation] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < n:
            found += await engine.collect()
    return found


def bits(found: Sequence[Generation]) -> dict[tuple[str, int], tuple[bytes, bytes]]:
    """By prompt and sample: token ids and log-probs as bytes."""
    return {
        (one.request_id.partition("-")[2], one.index): (one.token_ids.tobytes(), one.logprobs.tobytes())
        for one in found
    }


def test_the_same_bits_in_any_company(models: Models, weights: Weights) -> None:
    """At once; then one by one in another order, after other prompts, over an update, in a new engine."""

    async def at_once() -> list[Generation]:
        engine = TransformersEngine(settings(models.folder), tokenizer(), frozenset({EOS}))
        await engine.start()
        await engine.load_weights(weights, 0)
        engine.submit(requests("a"))
        try:
            return await collect(engine, 16)
        finally:
            await engine.close()

    async def disturbed() -> list[Generation]:
        engine = TransformersEngine(settings(models.folder), tokenizer(), frozenset({EOS}))
        await engine.start()
        await engine.load_weights(weights, 0)
        engine.submit(requests("other", ["A prompt of the validation, as long as it may be: 0123456789"]))
        *rest, last = requests("b")
        engine.submit([last])
        report = asyncio.create_task(engine.load_weights(weights, 1))
        found = await collect(engine, 8)
        await report
        engine.submit(rest[::-1])
        try:
            return found + await collect(engine, 12)
        finally:
            await engine.close()

    try:
        calm, other = bits(asyncio.run(at_once())), asyncio.run(disturbed())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(len(one.version_values) == 1 for one in other), "an update waits for what runs"
    again = {key: value for key, value in bits(other).items() if key in calm}
    assert len(calm) == 16
    assert again == calm


def test_a_request_larger_than_the_slots_is_cut_alike(models: Models, weights: Weights) -> None:
    async def run(first: Sequence[str]) -> list[Generation]:
        few = replace(settings(models.folder), slots=3)
        engine = TransformersEngine(few, tokenizer(), frozenset({EOS}))
        await engine.start()
        await engine.load_weights(weights, 0)
        engine.submit(requests("x", first))
        try:
            return await collect(engine, 4 * len(first))
        finally:
            await engine.close()

    try:
        alone = bits(asyncio.run(run(PROMPTS[:1])))
        beside = bits(asyncio.run(run(PROMPTS[:2])))
    finally:
        torch.use_deterministic_algorithms(False)
    assert {key: beside[key] for key in alone} == alone


def test_a_cache_too_small_for_a_group_is_refused(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many samples fit must not decide how they are batched: free memory is another at every start."""

    async def start() -> None:
        engine = TransformersEngine(settings(models.folder), tokenizer(), frozenset({EOS}))
        try:
            await engine.start()
        finally:
            await engine.close()

    per_token = 2 * 2 * 2 * 32 * 4
    monkeypatch.setattr("rollout_worker.engines.transformers.engine._cache_memory", lambda _: 3 * 96 * per_token)
    try:
        with pytest.raises(EngineConfigError, match=r"4 sequences at once .*rollout\.max_num_seqs"):
            asyncio.run(start())
    finally:
        torch.use_deterministic_algorithms(False)


def test_only_the_key_turns_it_on(models: Models) -> None:
    assert settings(models.folder).alone
    assert not settings(models.folder, deterministic=False).alone
