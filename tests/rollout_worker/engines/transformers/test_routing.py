"""Which experts were chosen: recorded in the window, compared with what a plain forward calls its experts with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rollout_worker.engines.base import EngineConfigError, Generation, GenerationRequest, SamplingSettings
from rollout_worker.engines.transformers import TransformersEngine, attention
from rollout_worker.engines.transformers.decoder import Decoder
from rollout_worker.engines.transformers.model import self_test
from rollout_worker.engines.transformers.routing import Routing
from rollout_worker.engines.transformers.settings import settings_of
from rollout_worker.engines.transformers.views import DecodeView, PromptView, WindowView
from rollout_worker.groups.leasing import training_settings
from rollout_worker.groups.pushing import to_sample
from schema.config import Config
from schema.wire.messages import LeasedGroup
from schema.wire.sample import decode_sample, encode_sample
from tests.rollout_worker.engines.engine_contract import EOS, encode
from tests.rollout_worker.tiny import publish_model, random_model, save_model, tokenizer
from tests.support.devices import DEVICE, rounding
from tests.support.fetched import fetch
from tests.support.waiting import PATIENCE

SHAPE: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": 256, "pad_token_id": 257, "moe_intermediate_size": 32, "num_experts_per_tok": 3,
}  # fmt: skip
CONFIGS = {
    "qwen": lambda: transformers.Qwen3MoeConfig(**SHAPE, num_experts=8),
    "many experts": lambda: transformers.Qwen3MoeConfig(**SHAPE, num_experts=300),
    "first layers dense": lambda: transformers.Glm4MoeConfig(
        **SHAPE, n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5
    ),
}
MIXTURES = {"qwen": 3, "many experts": 3, "first layers dense": 2}
LENGTHS = (3, 30, 1, 11)


def mixture(kind: str, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()


def make_decoder(model: Any, **changes: Any) -> Decoder:
    attention.register()
    model.to(DEVICE).set_attn_implementation(attention.NAME)
    options = {"max_model_len": 128, "fill_tokens": 64, "keep_cache": False, **changes}
    decoder = Decoder(model, None, frozenset({256}), routing=Routing(model, "weights"), **options)
    decoder.set_version(0)
    return decoder


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 3 * i) % 256 for i in range(LENGTHS[number])]


def admit_some(decoder: Decoder, **changes: Any) -> list[Generation]:
    """Four prompts of three samples each, a step after each; what ended meanwhile."""
    found = []
    for number in range(len(LENGTHS)):
        fields = {"max_tokens": 5 + 8 * number, "ignore_eos": True, "routing": "weights", **changes}
        request = GenerationRequest(
            str(number), prompt_of(number), (number, number + 50, number + 90), SamplingSettings(**fields)
        )
        decoder.admit([(request, (0, 1, 2))])
        found += decoder.step()
    return found


def finish(decoder: Decoder) -> list[Generation]:
    found = []
    while decoder.rows:
        found += decoder.step()
    return found


@torch.inference_mode()
def plain(model: Any, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights [n, M, k] that the experts are called with at all tokens but the last, without any cache."""
    calls: list[Any] = []
    layers = [layer for layer in model.modules() if type(layer).__name__.endswith("MoeExperts")]
    hooks = [layer.register_forward_pre_hook(lambda _, given: calls.append(given[1:])) for layer in layers]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    model(input_ids=torch.tensor([list(tokens[:-1])], device=DEVICE), use_cache=False)
    model.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    ids, weights = (np.stack([call[i].cpu().numpy() for call in calls], 1) for i in (0, 1))
    return ids, weights


def check(found: Generation, expected: tuple[np.ndarray, np.ndarray], rows: slice = slice(None)) -> None:
    assert (found.expert_ids.shape, found.expert_weights.dtype) == (expected[0].shape, np.float32)
    assert found.expert_weights.shape == expected[1].shape
    ids, weights = found.expert_ids[rows], found.expert_weights[rows]
    same = ids == expected[0][rows]
    # On a GPU either of two that are almost as likely may be chosen.
    assert same.mean() >= (1.0 if DEVICE.type == "cpu" else 0.99)
    np.testing.assert_allclose(weights[same], expected[1][rows][same], atol=rounding(1e-5))


@torch.inference_mode()
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_recorded_is_what_a_plain_forward_chooses(kind: str) -> None:
    """Rows of different lengths that come and go, in a window that moves."""
    model = mixture(kind)
    decoder = make_decoder(model)
    found = admit_some(decoder)
    decoder.drop({"2"})
    found += finish(decoder)
    assert {one.request_id for one in found} == {"0", "1", "3"}
    for one in found:
        tokens = [*prompt_of(int(one.request_id)), *one.token_ids.tolist()]
        assert one.expert_ids.shape == (len(tokens) - 1, MIXTURES[kind], 3)
        assert one.expert_ids.dtype == (np.uint16 if kind == "many experts" else np.uint8)
        check(one, plain(model, tokens))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["qwen", "first layers dense"])
@pytest.mark.parametrize(("keep_cache", "released"), [(False, False), (False, True), (True, False), (True, True)])
def test_what_is_recorded_is_what_the_cache_was_computed_with(kind: str, keep_cache: bool, released: bool) -> None:
    """New weights while samples run: where the cache is computed again, all positions have what these choose."""
    model, old, new = mixture(kind), mixture(kind).to(DEVICE), mixture(kind, 2).to(DEVICE)
    decoder = make_decoder(model, keep_cache=keep_cache)
    ended = admit_some(decoder)
    at = {
        (row.request.request_id, row.index): int(n) for row, n in zip(decoder.rows, decoder._generated(), strict=True)
    }
    model.load_state_dict(new.state_dict())
    if released:
        decoder.release_cache()
    decoder.set_version(1)
    found = finish(decoder)
    assert not ended
    assert len(found) == 12
    kept = keep_cache and not released
    for one in found:
        prompt = prompt_of(int(one.request_id))
        tokens, computed = [*prompt, *one.token_ids.tolist()], len(prompt) + at[one.request_id, one.index] - 1
        check(one, plain(old if kept else new, tokens), slice(0, computed))
        if not kept:  # else later ones are of new weights on top of an old cache
            assert one.version_values.tolist() == [0, 1]
            check(one, plain(new, tokens), slice(computed, None))


@torch.inference_mode()
@pytest.mark.parametrize("wanted", ["none", "ids"])
def test_only_what_is_wanted_is_returned(wanted: str) -> None:
    decoder = make_decoder(mixture("qwen"))
    found = admit_some(decoder, max_tokens=1, routing=wanted) + finish(decoder)
    assert len(found) == 12
    for one in found:
        n = len(prompt_of(int(one.request_id)))
        assert one.expert_ids.shape == ((0, 0, 0) if wanted == "none" else (n, 3, 3))
        assert one.expert_weights.shape == (0, 0, 0)


# ---- the engine ----------------------------------------------------------------------------------------------


def config(folder: Path, routing: str = "weights", **train: Any) -> Config:
    return Config.model_validate(
        {
            "policy": {"model_name_or_path": str(folder), "model_max_length": 96},
            "train": {"param_dtype": "float32", "train_policy": {"type": "grpo", "routing_replay": routing}, **train},
            "rollout": {
                "backend": "transformers",
                "dtype": "float32",
                "n_generation": 3,
                "max_response_length": 12,
                "max_concurrent_samples": 16,
                "parallelism": {"tp_size": 1},
            },
        }
    )


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True], indirect=True)
def test_the_experts_of_an_engine_travel_with_its_samples(tmp_path: Path, deterministic: bool) -> None:
    folder = save_model(tmp_path / "model", mixture("first layers dense"))
    made = config(folder, deterministic=deterministic)
    prompts = [encode(text) for text in ("What is 12 + 34?", "x")]
    settings = training_settings(made)
    requests = [GenerationRequest(str(i), prompt, (1, 2, 3), settings) for i, prompt in enumerate(prompts)]

    async def generate() -> list[Generation]:
        engine = TransformersEngine(settings_of(made), tokenizer(), frozenset({EOS}))
        await engine.start()
        publication = publish_model(tmp_path / "store", mixture("first layers dense"), 0)
        await engine.load_weights(fetch(tmp_path / "store", publication), 0)
        engine.submit(requests)
        found: list[Generation] = []
        try:
            async with asyncio.timeout(PATIENCE):
                while len(found) < 6:
                    found += await engine.collect()
        finally:
            await engine.close()
        return found

    model = mixture("first layers dense").to(DEVICE)
    for one in asyncio.run(generate()):
        prompt = prompts[int(one.request_id)]
        lease = LeasedGroup(
            group_id="g", lease_id="l", kind="train", epoch=0, position=0, attempt=1, row={}, deadline=3,
            prompt_token_ids=prompt, seeds=[1, 2, 3],
        )  # fmt: skip
        sample = decode_sample(encode_sample(to_sample(lease, one.index, one, "stop", error=None, score=1.0)))
        ids, weights = plain(model, sample.token_ids.tolist())
        check(one, (ids, weights))
        assert sample.expert_shape.tolist() == [2, 3]
        assert sample.expert_ids.tolist() == one.expert_ids.ravel().tolist()
        assert sample.expert_weights.tolist() == one.expert_weights.ravel().tolist()


def test_an_engine_that_records_nothing_is_not_asked_for_experts(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", mixture("qwen"))

    async def ask() -> None:
        engine = TransformersEngine(settings_of(config(folder, "none")), tokenizer(), frozenset({EOS}))
        await engine.start()
        try:
            assert not [layer for layer in engine._decoder.model.modules() if layer._forward_pre_hooks]
            settings = SamplingSettings(max_tokens=4, routing="ids")
            with pytest.raises(ValueError, match="request r asks for the ids of experts: not recorded"):
                engine.submit([GenerationRequest("r", [1], (1,), settings)])
        finally:
            await engine.close()

    asyncio.run(ask())


# ---- refusals ------------------------------------------------------------------------------------------------

REFUSAL = r'train\.train_policy\.routing_replay = "ids" cannot be done with {}: .*{}.*; write .* = "none"'


def test_a_model_without_mixtures_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", random_model(1))

    async def start() -> None:
        engine = TransformersEngine(settings_of(config(folder, "ids")), tokenizer(), frozenset({EOS}))
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(EngineConfigError, match=REFUSAL.format("Qwen3ForCausalLM", "cannot be found")):
        asyncio.run(start())


def test_experts_that_are_called_otherwise_are_refused() -> None:
    torch.manual_seed(1)
    shape = {name: value for name, value in SHAPE.items() if name != "moe_intermediate_size"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Llama4TextConfig(**{**shape, "num_experts_per_tok": 1}, num_local_experts=4)
    )
    attention.register()
    model.to(DEVICE).eval().set_attn_implementation(attention.NAME)
    with pytest.raises(EngineConfigError, match=REFUSAL.format("Llama4ForCausalLM", "not called with states")):
        self_test(model, frozenset({256}), Routing(model, "ids"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_right_bookkeeping_is_accepted(kind: str, dtype: torch.dtype) -> None:
    model = mixture(kind).to(dtype)
    attention.register()
    model.to(DEVICE).set_attn_implementation(attention.NAME)
    without = self_test(model, frozenset({256}))
    each = 2 if kind == "many experts" else 1
    assert self_test(model, frozenset({256}), Routing(model, "ids")) > without + MIXTURES[kind] * 3 * each


@pytest.mark.parametrize("view", [DecodeView, PromptView])
def test_wrong_bookkeeping_is_refused(view: type[WindowView], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one kind of forward records goes to the rows, or columns, of others."""
    model = mixture("qwen")
    attention.register()
    model.to(DEVICE).set_attn_implementation(attention.NAME)
    record = view.record
    monkeypatch.setattr(view, "record", lambda self, ids, weights: record(self, ids.roll(1, 0), weights.roll(1, 0)))
    with pytest.raises(EngineConfigError, match=REFUSAL.format("Qwen3MoeForCausalLM", "a plain forward")):
        self_test(model, frozenset({256}), Routing(model, "ids"))


def test_ties_are_forgiven_and_weights_are_not() -> None:
    compare = Routing(mixture("qwen"), "ids").check
    ids = np.tile(np.arange(4, dtype=np.uint8), (50, 1, 1))
    weights = np.full(ids.shape, 0.25, np.float32)
    tied = ids.copy()
    tied[3, 0, 3] = 9
    compare([(ids, weights)], [(tied, weights)], exactly=True)
    other = weights.copy()
    other[7, 0, 1] = 0.3
    with pytest.raises(EngineConfigError, match=r"chooses 100% .* differ by up to 0\.17 of the largest"):
        compare([(ids, weights)], [(ids, other)], exactly=True)
    compare([(ids, weights)], [(ids, other)], exactly=False)
    with pytest.raises(EngineConfigError, match="chooses 25% of the experts"):
        compare([(ids, weights)], [(ids[:, :, ::-1] + 3, weights)], exactly=False)
