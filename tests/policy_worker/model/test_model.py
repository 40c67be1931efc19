from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
)

from policy_worker.checkpoints.export import ExportNames, write_export
from policy_worker.errors import SettingsError
from policy_worker.model import attention
from policy_worker.model.load import load_model
from policy_worker.model.logits.head import Head
from policy_worker.model.micro_batch import BatchLayout, collate
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import _check_parts, _check_pieces, prepare_model
from schema.config import Config
from tests.policy_worker.material import make_config, tiny_lm, write_model
from tests.policy_worker.model.test_micro_batch import LONG, SHORT, sample_of
from tests.support.devices import DEVICE, rounding
from weight_sync import gather_full

SMALL = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CPU = torch.device("cpu")
TINY = SMALL | {"hidden_size": 16, "intermediate_size": 24}


def from_config(config) -> PolicyModel:
    torch.manual_seed(0)
    return PolicyModel(AutoModelForCausalLM.from_config(copy.deepcopy(config)))


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SMALL), Qwen2Config(**SMALL, tie_word_embeddings=True)], ids=["llama", "qwen2"]
)
@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_are_those_of_transformers(config, packed: bool):
    model = prepare_model(from_config(config), packed=packed, recompute=False).to(DEVICE)
    batch = collate([LONG, SHORT], [0, 1], BatchLayout(packed, 53, DEVICE))
    found = model(batch, 0.8)
    expected = []
    for sample in (LONG, SHORT):
        ids = torch.from_numpy(sample.segments[0].token_ids.astype("int64"))[None].to(DEVICE)
        log_p = torch.log_softmax(model.lm(input_ids=ids).logits[0].float() / 0.8, dim=-1)
        picked = log_p[:-1].gather(1, ids[0, 1:, None])[:, 0]
        expected.append(picked[torch.from_numpy(sample.segments[0].loss_mask[1:]) == 1])
    torch.testing.assert_close(found.logprobs, torch.cat(expected), rtol=0, atol=rounding(2e-6))


@pytest.mark.parametrize("recompute", [False, True])
def test_shared_prompts_change_no_gradient(recompute: bool):
    gradients = []
    for least_spared in (None, 0.05):
        model = prepare_model(from_config(Qwen2Config(**SMALL)), packed=False, recompute=recompute).to(DEVICE)
        samples = [sample_of(([7, 8, 9, *range(11, 11 + n)], [0, 0, 0, *[1] * n])) for n in (5, 1, 3)]
        out = model(collate(samples, [0, 1, 2], BatchLayout(False, 53, DEVICE, least_spared)), 0.8)
        (out.logprobs.square().sum() + out.entropy.sum()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, plain in gradients[0].items():
        scale = plain.abs().max().item()
        torch.testing.assert_close(
            gradients[1][name], plain, rtol=0, atol=rounding(1e-5) * max(scale, 1e-2), msg=name
        )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=53, hidden_size=16, state_size=4, num_hidden_layers=2), "MambaForCausalLM"),
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "attention is eager"),
    ],
    ids=["mamba", "gpt-oss"],
)
def test_a_model_whose_attention_takes_no_blocks_shares_no_prompts(config, reason: str, caplog):
    with caplog.at_level("INFO"):
        model = prepare_model(from_config(config), packed=False, recompute=False)
    assert not model.takes_blocks
    assert reason in caplog.text
    batch = collate([LONG, SHORT], [0, 1], BatchLayout(True, 53))
    assert model(batch).logprobs.isfinite().all(), "the blocks of a packed row are not for it"


WINDOWED = {
    "mistral": MistralConfig(**SMALL, sliding_window=3, initializer_range=0.2),
    "gemma3": Gemma3TextConfig(
        **SMALL,
        head_dim=8,
        sliding_window=2,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.2,
    ),
}


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("shared", [False, True])
def test_windows_of_blocks_are_those_of_transformers(name: str, shared: bool):
    model = from_config(WINDOWED[name])
    expected = copy.deepcopy(model.lm)
    model = prepare_model(model, packed=False, recompute=False).to(DEVICE)
    assert model.takes_blocks
    assert model.lm.config.sliding_window == WINDOWED[name].sliding_window, "a probe has put it back"
    samples = [sample_of(([7, 8, 9, 10, *range(11, 11 + n)], [0, 0, 0, 0, *[1] * n])) for n in (6, 1, 4)]
    batches = {
        True: collate(samples, [0, 1, 2], BatchLayout(False, 53, DEVICE, 0.05)),
        False: collate(samples, [0, 1, 2], BatchLayout(False, 53, DEVICE)),
    }
    found = model(batches[shared], 1.0).logprobs
    alone = []
    for sample in samples:
        ids = torch.from_numpy(sample.segments[0].token_ids.astype("int64"))[None]
        alone.append(torch.log_softmax(expected(input_ids=ids).logits[0, 3:-1], -1).gather(1, ids[0, 4:, None])[:, 0])
    torch.testing.assert_close(found.cpu(), torch.cat(alone), rtol=0, atol=rounding(2e-6))


def test_a_window_that_its_attention_is_not_told_of_is_noticed(monkeypatch: pytest.MonkeyPatch, caplog):
    model = from_config(WINDOWED["mistral"])

    def untold(*arguments: Any, sliding_window: int | None = None, **options: Any) -> Any:
        del sliding_window
        return attention.attend(*arguments, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, untold)
    model.lm.config.sliding_window = 64  # longer than any probe
    with caplog.at_level("INFO"):
        assert not prepare_model(model, packed=False, recompute=False).takes_blocks
    assert "see each other" in caplog.text


@pytest.mark.parametrize(
    ("config", "pieces", "reason"),
    [
        (LlamaConfig(**SMALL), 3, r"cp_size = 3 does not divide the 4 attention heads.*write .* = 1 or 2 or 4"),
        (MambaConfig(vocab_size=53, hidden_size=16, state_size=4, num_hidden_layers=2), 2, r"Mamba.*cannot be cut"),
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), 2, r"cut: its attention is eager"),
    ],
    ids=["heads", "state", "sinks"],
)
def test_sequences_that_cannot_be_cut_are_refused(config, pieces: int, reason: str):
    with pytest.raises(SettingsError, match=reason):
        prepare_model(from_config(config), packed=False, recompute=False, pieces=pieces)


def test_a_layer_that_looks_at_neighbours_cannot_be_cut():
    model = from_config(LlamaConfig(**SMALL))
    prepare_model(model, packed=True, recompute=False, pieces=4)
    assert model.context is None
    for looks in (lambda x: x + 0.3 * x.roll(1, 1), lambda x: x + 0.3 * x.mean(1, keepdim=True)):
        hook = model.lm.model.layers[0].mlp.register_forward_hook(lambda _, __, out, looks=looks: looks(out))
        with pytest.raises(SettingsError, match="positions see others outside of its attention"):
            _check_pieces(model, 2, "")
        hook.remove()
        assert model.context is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (OPTConfig(**SMALL, ffn_dim=48), r"OPTForCausalLM cannot be split between its layers: .*"),
        (MambaConfig(vocab_size=53, hidden_size=16, state_size=4, num_hidden_layers=2), "Mamba.* cannot be split"),
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), r"layers: its attention is eager"),
    ],
    ids=["learned positions", "state", "sinks"],
)
def test_sequences_that_cannot_be_split_between_layers_are_refused(config, reason: str):
    with pytest.raises(SettingsError, match=f"sequence_parallel = true: .*{reason}.*write .* = false"):
        prepare_model(from_config(config), packed=False, recompute=False, parted=True)


def test_a_layer_that_looks_at_neighbours_cannot_be_split():
    model = from_config(LlamaConfig(**SMALL))
    prepare_model(model, packed=True, recompute=False, parted=True)
    norm = model.lm.model.layers[0].input_layernorm
    hook = norm.register_forward_hook(lambda _, __, out: out + 0.3 * out.roll(1, 1))
    with pytest.raises(SettingsError, match="positions see others between its layers; write"):
        _check_parts(model, "")
    hook.remove()
    _check_parts(model, "")


HEADS = {
    "capped": Gemma2Config(**TINY, head_dim=4, final_logit_softcapping=0.5, sliding_window=4),
    "divided": GraniteConfig(**TINY, logits_scaling=0.25),
    "multiplied": CohereConfig(**TINY, logit_scale=4.0),
    "shifted": PhiConfig(**TINY),
    "multiplied by what others divide by": HyperCLOVAXConfig(**TINY, logits_scaling=4.0),
}


@pytest.mark.parametrize("name", HEADS)
def test_capped_scaled_and_shifted_logits_are_those_of_transformers(name: str):
    model = from_config(HEADS[name])
    _make_logits_large(model)
    model = prepare_model(model, packed=False, recompute=False).to(DEVICE)
    batch = collate([LONG, SHORT], [0, 1], BatchLayout(False, 53, DEVICE))
    found, expected = model(batch, 0.8), []
    for sample in (LONG, SHORT):
        ids = torch.from_numpy(sample.segments[0].token_ids.astype("int64"))[None].to(DEVICE)
        log_p = torch.log_softmax(model.lm(input_ids=ids).logits[0].float() / 0.8, dim=-1)
        picked = log_p[:-1].gather(1, ids[0, 1:, None])[:, 0]
        expected.append(picked[torch.from_numpy(sample.segments[0].loss_mask[1:]) == 1])
    torch.testing.assert_close(found.logprobs, torch.cat(expected), rtol=0, atol=rounding(5e-6))
    parameters = [p for p in model.parameters() if p.requires_grad]
    pairs = [torch.autograd.grad(one.sum(), parameters) for one in (found.logprobs, torch.cat(expected))]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=rounding(2e-5) * max(b.abs().max().item(), 1.0))


@pytest.mark.parametrize("packed", [False, True])
def test_capped_attention_is_that_of_the_definition(packed: bool):
    """Which transformers' fused attention leaves out; in rows and in blocks."""
    config = Gemma2Config(**TINY, head_dim=4, attn_logit_softcapping=0.02, query_pre_attn_scalar=1, sliding_window=3)
    model = from_config(config)
    _make_logits_large(model)
    for layer in model.lm.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
    model = prepare_model(model, packed=packed, recompute=False).to(DEVICE)
    assert model.takes_blocks
    found = model(collate([LONG, SHORT], [0, 1], BatchLayout(packed, 53, DEVICE))).logprobs
    expected = {}
    for name in ("eager", "sdpa"):
        model.lm.set_attn_implementation(name)
        rows = [torch.from_numpy(s.segments[0].token_ids.astype("int64"))[None].to(DEVICE) for s in (LONG, SHORT)]
        log_p = [torch.log_softmax(model.lm(input_ids=ids).logits[0].float(), -1) for ids in rows]
        picked = [p[:-1].gather(1, ids[0, 1:, None])[:, 0] for p, ids in zip(log_p, rows, strict=True)]
        masks = [torch.from_numpy(s.segments[0].loss_mask[1:]) == 1 for s in (LONG, SHORT)]
        expected[name] = torch.cat([p[mask] for p, mask in zip(picked, masks, strict=True)])
    torch.testing.assert_close(found, expected["eager"], rtol=0, atol=rounding(5e-6))
    assert (expected["sdpa"] - expected["eager"]).abs().max() > 1e-3, "the cap matters here"


def _make_logits_large(model: PolicyModel) -> None:
    """Enough that a factor, a cap or a shift is far above rounding."""
    head = model.lm.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(20)
        if head.bias is not None:
            head.bias.copy_(torch.linspace(-2, 2, len(head.bias)))


@pytest.mark.parametrize("name", HEADS)
def test_a_change_of_logits_that_is_not_applied_is_refused(name: str):
    model = from_config(HEADS[name])
    _make_logits_large(model)
    head = model._head()
    model._head = lambda: Head(head.weight)
    with pytest.raises(SettingsError, match=rf"{type(model.lm).__name__}.*not those of a linear output head"):
        prepare_model(model, packed=False, recompute=False)


def test_an_architecture_with_state_along_the_row_is_refused_for_packing_only():
    config = MambaConfig(vocab_size=53, hidden_size=16, state_size=4, num_hidden_layers=2, tie_word_embeddings=False)
    prepare_model(from_config(config), packed=False, recompute=False)
    with pytest.raises(SettingsError, match="sequence_packing = false"):
        prepare_model(from_config(config), packed=True, recompute=False)


def test_loads_in_the_master_type_and_without_dropout(tmp_path: Path):
    lm = tiny_lm()
    lm.config.attention_dropout = 0.25
    lm.save_pretrained(tmp_path)
    model = load_model(make_config(policy={"model_name_or_path": str(tmp_path)}))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.training
    assert model.lm.model.layers[0].self_attn.attention_dropout == 0.0
    assert model.dropout == {"attention_dropout": 0.25}
    half = load_model(make_config(policy={"model_name_or_path": str(tmp_path)}, train={"master_dtype": "bfloat16"}))
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_entries_of_its_configuration_are_replaced(tmp_path: Path):
    write_model(tmp_path)

    def overridden(**entries: Any) -> Config:
        return make_config(policy={"model_name_or_path": str(tmp_path), "override_config": entries})

    config = overridden(rms_norm_eps=0.1, attention_dropout=0.0)
    model = load_model(config).read_weights(CPU)
    assert model.lm.model.norm.variance_epsilon == 0.1
    write_export(ExportNames(model), gather_full, config, tmp_path / "export", {})
    assert json.loads((tmp_path / "export" / "config.json").read_text())["rms_norm_eps"] == 0.1
    with pytest.raises(
        SettingsError, match=r"policy\.override_config\.rms_norm_epz(?s:.*)did you mean 'rms_norm_eps'"
    ):
        load_model(overridden(rms_norm_epz=0.1))
    with pytest.raises(SettingsError, match=r"override_config\.attention_dropout(?s:.*)dropout is off in training"):
        load_model(overridden(attention_dropout=0.1))
    with pytest.raises(SettingsError, match=r"override_config\.hidden_size = 'wide' is not taken by the model"):
        load_model(overridden(hidden_size="wide"))


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"policy\.model_name_or_path = .*nowhere"):
        load_model(make_config(policy={"model_name_or_path": str(tmp_path / "nowhere")}))
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(SettingsError, match="cannot be loaded"):
        load_model(make_config(policy={"model_name_or_path": str(tmp_path)}))


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path):
    lm = tiny_lm()
    weights = {name: tensor for name, tensor in lm.state_dict().items() if "layers.1.mlp.up" not in name}
    lm.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(SettingsError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(make_config(policy={"model_name_or_path": str(tmp_path)}))


def test_an_export_is_of_the_configured_model(tmp_path: Path):
    """Weights that are resumed from an export never bring another model along."""
    settings = {"model_name_or_path": str(write_model(tmp_path / "model")), "model_max_length": 64}
    config = make_config(policy=settings)
    same = write_model(tmp_path / "same", seed=1)
    loaded = load_model(config, str(same)).read_weights(CPU).lm.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tiny_lm(seed=1).state_dict().items())
    for layers, said in ((1, r"lacks weights: model\.layers\.1"), (3, r"that this model does not: model\.layers\.2")):
        tiny_lm(layers=layers).save_pretrained(tmp_path / "other")
        with pytest.raises(SettingsError, match=rf"other as a model of policy\.model_name_or_path = .*{said}"):
            load_model(config, str(tmp_path / "other"))


def test_decoder_layers_are_found():
    model = from_config(LlamaConfig(**SMALL))
    assert [type(layer).__name__ for layer in model.decoder_layers()] == ["LlamaDecoderLayer"] * 2
