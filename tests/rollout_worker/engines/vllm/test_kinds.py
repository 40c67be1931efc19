"""Models whose layers vLLM computes from something other than their parameters, and meshes: real engines, against
transformers with the same weights after each update, and against an engine that is booted with them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rollout_worker.engines.base import Generation, GenerationRequest, SamplingSettings, WeightMismatch
from tests.rollout_worker.engines.engine_contract import Subject, log_softmax, plain_logits, request
from tests.rollout_worker.engines.vllm.test_engine import subject_of
from tests.rollout_worker.versions import Versions, nudged

pytestmark = pytest.mark.slow

SHAPE: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 256,
    "pad_token_id": 257, "bos_token_id": None,
}  # fmt: skip
FOUR: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
PADDED: dict[str, Any] = {"moe_intermediate_size": 48}
"""No multiple of what a CPU's kernel computes with: it is padded."""
LATENT: dict[str, Any] = {
    **ROUTED, **PADDED, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, **FOUR, **PADDED, "norm_topk_prob": True},
    "qwen2_moe": {**FOUR, **PADDED, "shared_expert_intermediate_size": 64},
    "mixtral": LOCAL,
    "olmoe": {**FOUR, "num_key_value_heads": 4, "intermediate_size": 96},
    "glm4_moe": {"head_dim": 32, **ROUTED, **PADDED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "granitemoe": {**LOCAL, "intermediate_size": 96, "logits_scaling": 8.0},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "q_lora_rank": 32, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
EXACT = 1e-5
"""Of a log-prob, in float32."""
HALF = {"dtype": "bfloat16", "quantization": "fp8_per_block"}


def model_of(family: str, **changes: Any) -> Any:
    """Random weights, small enough that logits in float32 are right to 1e-6."""
    torch.manual_seed(1)
    shape = SHAPE | FAMILIES.get(family, {"head_dim": 32}) | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).float().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() >= 2 or "correction_bias" in name:
                tensor.normal_(0.0, 0.1)
    model.generation_config = GenerationConfig(eos_token_id=256, pad_token_id=257)
    return model


def drawn(subject: Subject, seed: int = 5) -> tuple[GenerationRequest, list[Generation]]:
    wanted = request([1, 2, 3, seed], SamplingSettings(max_tokens=24, ignore_eos=True), (seed, seed + 1))
    return wanted, [*subject.generate([wanted]).values()]


def error(model: Any, wanted: GenerationRequest, samples: list[Generation]) -> float:
    """The largest difference between a log-prob and that of a plain forward."""
    worst = 0.0
    for sample in samples:
        tokens = sample.token_ids.tolist()
        logits = plain_logits(model, wanted.prompt_token_ids, tokens)
        expected = [log_softmax(row)[token] for row, token in zip(logits, tokens, strict=True)]
        worst = max(worst, *abs(expected - sample.logprobs))
    return worst


def follows(subject: Subject, model: Any, root: Path) -> list[str]:
    """Each version is what is served, whole or as changes. Returns how each was loaded."""
    versions, modes = Versions(root / "line"), []
    for version in range(1, 5):
        before = copy.deepcopy(model)
        nudged(model, version)
        publication = versions.publish(model, version, full=version == 3)
        modes.append(subject.follow(versions, publication).mode)
        close = error(model, *(found := drawn(subject, version)))
        assert close <= EXACT
        assert error(before, *found) > 100 * EXACT, "what was served before shows"
        checksum = subject.checksum()
        assert (checksum.content_hash, checksum.exact, checksum.problems) == (publication.content_hash, True, [])
    versions.close()
    return modes


WHOLE_AND_CHANGED = ["full", "in_place", "full", "in_place"]


@pytest.mark.parametrize(
    "family", [name if name == "qwen3_moe" else pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES]
)
def test_experts_are_updated_in_place(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    with subject_of(tmp_path, [model], {"load_format": "auto"}, loaded=False) as subject:
        assert follows(subject, model, tmp_path) == WHOLE_AND_CHANGED
        first = FAMILIES[family].get("first_k_dense_replace", 0)
        found = subject.run(subject.engine._adapter.find_mixtures())  # type: ignore[attr-defined]
        assert found == list(range(first, SHAPE["num_hidden_layers"]))
        others = Versions(tmp_path / "others")
        fewer = others.publish(model_of(family, **dict.fromkeys(COUNTS & FAMILIES[family].keys(), 2)), 9)
        with pytest.raises(WeightMismatch, match="cannot be loaded"):
            subject.follow(others, fewer)
        others.close()
        lines = Versions(tmp_path / "again")
        subject.follow(lines, lines.publish(model, 10))
        assert error(model, *drawn(subject)) <= EXACT, "after a version that could not be loaded"
        lines.close()


COUNTS = {"num_experts", "n_routed_experts", "num_local_experts"}


@pytest.mark.soak
def test_an_updated_engine_is_one_that_was_booted_with_the_weights(tmp_path: Path) -> None:
    model = model_of("qwen3_moe")
    with subject_of(tmp_path / "first", [model], {"load_format": "auto"}, loaded=False) as subject:
        follows(subject, model, tmp_path)
        _, updated = drawn(subject)
    with subject_of(tmp_path / "second", [model], {"load_format": "auto"}, loaded=False) as subject:
        subject.run(subject.engine._adapter._llm.update_weight_version("0"))  # type: ignore[attr-defined]
        subject.engine._gate.set()  # type: ignore[attr-defined]
        _, booted = drawn(subject)
    for one, other in zip(updated, booted, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert abs(one.logprobs - other.logprobs).max() <= EXACT / 10


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3", {"tp_size": 1, "pp_size": 2}),
        ("qwen3_moe", {"tp_size": 1, "pp_size": 2}),
        ("qwen3_moe", {"tp_size": 2}),
        ("qwen3", {"tp_size": 1, "dp_shard_size": 2}),
    ],
)
def test_each_rank_gets_its_part(tmp_path: Path, family: str, mesh: dict[str, int]) -> None:
    """A stage its layers, a tensor-parallel rank its slices, a data-parallel copy all of it."""
    model = model_of(family)
    with subject_of(tmp_path, [model], {"load_format": "auto", "parallelism": mesh}, loaded=False) as subject:
        assert follows(subject, model, tmp_path) == WHOLE_AND_CHANGED


@pytest.mark.soak
def test_a_quantised_engine_quantises_each_version(tmp_path: Path) -> None:
    """Against the same quantisation, by hand: a scale for each block of 128 x 128, then e4m3."""
    model = model_of("qwen3")
    with subject_of(tmp_path, [model], HALF | {"load_format": "auto"}, loaded=False) as subject:
        versions = Versions(tmp_path / "line")
        for version in range(1, 4):
            nudged(model, version)
            publication = versions.publish(model, version)
            assert subject.follow(versions, publication).mode == "full"
            wanted, samples = drawn(subject, version)
            close, far = error(quantised(model), wanted, samples), error(model, wanted, samples)
            assert close < 0.1 < far, "0.03 to 0.05, and 0.27 to 0.33 were seen"
            checksum = subject.checksum()
            assert (checksum.content_hash, checksum.problems) == (publication.content_hash, [])
        versions.close()


def quantised(model: Any) -> Any:
    """The model with what vLLM's quantised layers multiply by: each fused as vLLM fuses it."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for fused in (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        ):
            whole = by_blocks(torch.cat([linear.weight.detach() for linear in fused]).bfloat16().float())
            parts = whole.split([linear.weight.shape[0] for linear in fused])
            for linear, part in zip(fused, parts, strict=True):
                linear.weight.data.copy_(part)
    return model


def by_blocks(weight: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(weight)
    for rows in range(0, weight.shape[0], 128):
        for columns in range(0, weight.shape[1], 128):
            block = weight[rows : rows + 128, columns : columns + 128]
            scale = block.abs().max() / torch.finfo(torch.float8_e4m3fn).max
            found[rows : rows + 128, columns : columns + 128] = (block / scale).to(
                torch.float8_e4m3fn
            ).float() * scale
    return found
