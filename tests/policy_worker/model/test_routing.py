"""Routing replay against mixtures that are computed by hand, and against what the same model does by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from policy_worker.errors import BadBatchError, SettingsError
from policy_worker.memory import activations
from policy_worker.model.micro_batch import (
    OWN,
    BatchLayout,
    MicroBatch,
    Mixtures,
    RoutingRecord,
    TrainSample,
    collate,
)
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import prepare_model, replay_routing
from tests.policy_worker.material import (
    VOCABULARY,
    random_samples,
    tiny_family,
    tiny_lm,
    with_common_prompts,
    with_experts,
)

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "num_experts_per_tok": 2, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
}  # fmt: skip
MIXTURES = Mixtures(2, 4)


def mixture(wanted: Any = "weights", **prepared: Any) -> PolicyModel:
    model = PolicyModel(tiny_family("qwen3_moe").double())
    prepare_model(model, packed=True, **{"recompute": False, **prepared})
    return replay_routing(model, wanted)


def samples_of(n: int = 3) -> list[TrainSample]:
    return [TrainSample.of_wire(sample) for sample in with_experts(random_samples(n), *MIXTURES)]


def batch_of(samples: list[TrainSample], mixtures: Mixtures | None = MIXTURES, **layout: Any) -> MicroBatch:
    return collate(samples, [*range(len(samples))], BatchLayout(True, VOCABULARY, mixtures=mixtures, **layout))


def learn(model: PolicyModel, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Log-probs, and gradients of their sum."""
    model.zero_grad()
    found = model(batch).logprobs
    found.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logprobs": found.detach(), **gradients}


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MixtralConfig(**SMALL, num_local_experts=4), Mixtures(2, 4)),
        (OlmoeConfig(**SMALL, num_experts=4), Mixtures(2, 4)),
        (Qwen2MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16), Mixtures(2, 4)),
        (GraniteMoeConfig(**SMALL, num_local_experts=4), Mixtures(2, 4)),
        (GptOssConfig(**SMALL, num_local_experts=4, head_dim=8), Mixtures(2, 4)),
        (DeepseekV3Config(**SMALL, **LATENT), Mixtures(1, 8)),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_experts_of_each_kind_of_model_can_be_chosen(config: PreTrainedConfig, expected: Mixtures) -> None:
    """What is proven at the start: each mixture gets ids and weights that its router would not have chosen."""
    model = replay_routing(PolicyModel(AutoModelForCausalLM.from_config(config)), "weights")
    assert model.routing_replay is not None
    assert model.routing_replay.mixtures == expected


def test_models_without_experts_or_with_other_routers_are_refused() -> None:
    with pytest.raises(SettingsError, match=r'routing_replay = "ids": Qwen3ForCausalLM has no layers of experts'):
        replay_routing(PolicyModel(tiny_lm()), "ids")
    for config in (
        PhimoeConfig(**SMALL, num_local_experts=4),
        DeepseekV2Config(**SMALL, **LATENT, topk_method="group_limited_greedy"),  # 0 outside of its groups
    ):
        with pytest.raises(SettingsError, match=r"routers of .* do not choose experts by one top k"):
            replay_routing(PolicyModel(AutoModelForCausalLM.from_config(config)), "ids")


@pytest.mark.parametrize("wanted", ["ids", "weights"])
def test_a_mixture_says_what_its_recorded_experts_say(wanted: str) -> None:
    """One mixture by hand: the router's softmax over all experts, renormalised over the recorded ones."""
    model = mixture(wanted)
    block = model.lm.model.layers[0].mlp
    block.gate.norm_topk_prob = True
    hidden = torch.randn(1, 5, 32, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[3, 0], [1, 2], [0, 1], [2, 3], [OWN, OWN]], dtype=torch.int16)
    weights = torch.rand(1, 5, 2, 2)
    assert model.routing_replay is not None
    model.routing_replay.begin(RoutingRecord(ids[None, :, None].expand(1, 5, 2, 2), weights))
    found = block(hidden)[0]
    model.routing_replay.begin(None)
    scores = torch.softmax(hidden[0] @ block.gate.weight.T, -1)
    chosen = ids.long()
    chosen[4] = scores[4].topk(2).indices
    of_router = scores.gather(1, chosen)
    of_router = (of_router / of_router.sum(1, keepdim=True)).float().double()  # as this model rounds them
    gates = of_router
    if wanted == "weights":
        known = (ids >= 0).all(1, keepdim=True)
        gates = torch.where(known, weights[0, :, 0].double() + of_router - of_router.detach(), of_router)
    said = torch.stack([block.experts(hidden[0], torch.full((5, 1), e), torch.ones(5, 1)) for e in range(4)], 1)
    expected = (said.gather(1, chosen[..., None].expand(-1, -1, 32)) * gates[..., None]).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    (a,), (b,) = (torch.autograd.grad(one.square().sum(), [block.gate.weight]) for one in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert b.abs().max() > 0


def test_what_the_model_would_choose_itself_changes_nothing() -> None:
    model, plain = mixture("weights"), PolicyModel(tiny_family("qwen3_moe").double())
    prepare_model(plain, packed=True, recompute=False)
    batch = batch_of(samples_of())
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1:]))
        for layer in plain.lm.model.layers
    ]
    expected = learn(plain, batch)
    for hook in hooks:
        hook.remove()
    ids, weights = (torch.stack([one[i] for one in chosen], 1)[None].detach() for i in (0, 1))
    found = learn(model, replace(batch, routing=RoutingRecord(ids.to(torch.int16), weights)))
    assert_alike(found, expected)
    assert model.routing_replay is not None
    assert model.routing_replay.take_seen() == [ids.shape[1] * 2, 0], "each choice, of which none differs"
    assert model.routing_replay.take_seen() == [0, 0]
    found = learn(model, replace(batch, routing=RoutingRecord(torch.full_like(ids, OWN).to(torch.int16), weights)))
    assert_alike(found, expected)
    assert model.routing_replay.take_seen() == [0, 0], "nothing was recorded"
    learn(model, batch)
    recorded, otherwise = model.routing_replay.take_seen()
    assert recorded == (batch.routing.ids[..., 0] != OWN).sum()
    assert 0.5 < otherwise / recorded < 1, "of six pairs one is right by chance"
    with model.routing_replay.off():
        assert_alike(learn(model, batch), expected)
    assert model.routing_replay.take_seen() == [0, 0]


@pytest.mark.parametrize("prepared", [{"recompute": True}, {"recompute": True, "parts": ["experts"]}], ids=str)
def test_what_is_computed_again_chooses_again_as_recorded(prepared: dict[str, Any]) -> None:
    expected, model = learn(mixture(), batch_of(samples_of())), mixture(**prepared)
    assert_alike(learn(model, batch_of(samples_of())), expected)
    first, second = batch_of(samples_of()), batch_of(samples_of(2))
    model.zero_grad()
    found = model(first).logprobs
    model(second)  # as the stages of a pipeline do
    model.recall(first, again=True)
    found.sum().backward()
    assert model.lm.model.layers[0].mlp.gate.weight.grad is not None
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-11)
    assert sum(activations.is_recomputed(m) for m in model.modules()) == (2 if "parts" in prepared else 0)


@pytest.mark.parametrize("packed", [True, False])
def test_records_lie_where_their_tokens_are(packed: bool) -> None:
    """Also in rows of a length that ranks divide, and where equal prompts are there once, if their records are."""
    made = with_experts(with_common_prompts(random_samples(5)), *MIXTURES)
    samples = [TrainSample.of_wire(sample) for sample in made]
    for layout in (
        BatchLayout(packed, VOCABULARY, mixtures=MIXTURES, parts=4),
        BatchLayout(True, VOCABULARY, mixtures=MIXTURES, least_spared=0.0),
    ):
        batch = collate(samples, [*range(5)], layout)
        assert batch.routing is not None
        ids, tokens = batch.routing.ids.flatten(0, 1), batch.input_ids.flatten()
        weights = batch.routing.weights.flatten(0, 1)
        at, position = 0, batch.position_ids.flatten()
        for number, sample in enumerate(samples):
            (segment,) = sample.segments
            n = sample.learned_tokens
            places = batch.index[at : at + n]
            at += n
            known, of_known = segment.experts
            first = len(segment.token_ids) - 1 - n
            assert tokens[places].tolist() == segment.token_ids[first:-1].tolist(), number
            assert ids[places].tolist() == known[first:].astype(int).tolist()
            assert torch.equal(weights[places], torch.from_numpy(of_known[first:].copy()))
            assert position[places].tolist() == [*range(first, first + n)]
        computed = sum(len(one.segments[0].token_ids) - 1 for one in samples)
        recorded = int((ids[:, 0, 0] != OWN).sum())
        assert recorded == computed if layout.least_spared is None else recorded < computed
    first, second, *_ = samples
    (segment,) = second.segments
    ids, weights = segment.experts
    other = replace(second, segments=[replace(segment, experts=(ids[:, ::-1], weights))])
    learned = len(ids) - second.learned_tokens  # the row of the last prompt token

    def blocks(changed: int | None = None, layout: BatchLayout = layout, sample: TrainSample = second) -> int:
        if changed is not None:
            rounded = weights.copy()
            rounded[changed] *= 1 + 1e-6
            sample = replace(second, segments=[replace(segment, experts=(ids, rounded))])
        return len(collate([first, sample], [0, 1], layout).blocks)

    assert blocks() == blocks(learned), "engines compute it for each answer"
    assert blocks() < blocks(learned - 1) == blocks(sample=other)
    assert blocks() == blocks(learned - 1, replace(layout, mixtures=None)), "they are not replayed"


def test_segments_have_records_of_their_own_and_samples_may_lack_them() -> None:
    (made,) = with_experts(random_samples(1, longest=12), *MIXTURES)
    total = len(made.token_ids)
    start = made.header.prompt_tokens
    halves = np.array([0, start - 1], np.int32)
    shape = (total - 1, 2, 2)
    ids = np.delete(made.expert_ids.reshape(shape), start - 2, axis=0)
    cut = TrainSample.of_wire(
        replace(made, segment_starts=halves, expert_ids=ids.flatten(), expert_weights=np.zeros(0, np.float32))
    )
    assert [len(one.experts[0]) for one in cut.segments] == [start - 2, total - start]
    assert np.array_equal(cut.segments[1].experts[0], made.expert_ids.reshape(shape)[start - 1 :])
    assert (cut.has_routing(weights=False), cut.has_routing(weights=True)) == (True, False)
    plain = TrainSample.of_wire(random_samples(1)[0])
    assert not plain.has_routing(weights=False)
    batch = batch_of([cut, plain])
    assert [int((row[:, 0, 0] != OWN).sum()) for row in batch.routing.ids] == [total - 2]
    for samples in (
        [],
        [plain],
    ):  # as a rank computes that has fewer micro-batches than others, and as Liger is tried
        empty = batch_of(samples)
        assert empty.routing is None
        assert mixture()(empty).logprobs.shape == (sum(one.learned_tokens for one in samples),)
    assert batch_of([cut], None).routing is None


def test_records_of_other_models_are_refused() -> None:
    samples = samples_of()
    (segment,) = samples[0].segments
    huge = np.zeros((len(segment.token_ids) - 1, 2, 2**16), np.uint8)  # of all tokens it would be too much memory
    broken = replace(samples[0], segments=[replace(segment, experts=(huge, None))])
    with pytest.raises(BadBatchError, match="ids up to 0 of 65536 experts"):
        batch_of([broken])
    with pytest.raises(BadBatchError, match=r"ids up to 3 of 2 experts in each of 2 mixtures.*3 mixtures of 4"):
        batch_of(samples, Mixtures(3, 4))
    with pytest.raises(BadBatchError, match="2 mixtures of 3: engine and trainer have other models"):
        batch_of(samples, Mixtures(2, 3))
    more = [TrainSample.of_wire(one) for one in with_experts(random_samples(2), 2, 4, per_token=3)]
    with pytest.raises(BadBatchError, match="engine chose 3 experts for a token, and this model's routers choose 2"):
        mixture()(batch_of(more))
