"""One training step against an independent implementation, and what must never change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from policy_worker.errors import BadBatchError, SettingsError
from policy_worker.model.micro_batch import MicroBatch
from policy_worker.model.model import PolicyModel
from policy_worker.model.prepare import prepare_model, replay_routing
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.frozen import EarlierPolicy
from policy_worker.training.batches.source import BatchSource, DataEnded, decode_payload
from policy_worker.training.grpo import Grpo
from schema.config import Config
from schema.wire.sample import Sample, encode_sample
from tests.policy_worker.material import (
    cut_short,
    encode_step,
    make_config,
    make_sample,
    make_table,
    make_trainer,
    random_samples,
    tiny_experts,
    tiny_model,
    train_step,
    with_baselines,
    with_common_prompts,
    with_experts,
    with_kept_sets,
    with_shared_prefixes,
)
from tests.policy_worker.reference import grpo_loss, token_facts
from tests.support.devices import rounding

EVEN = [0.0, 0.5, 1.0, 0.5]
"""Scores of a group whose second and fourth sample have no advantage."""
RICH = {"entropy_coeff": 0.02, "positive_nll_coef": 0.1, "epsilon_high": 0.28}


def make_grpo(group: RankGroup, config: Config, answer: bytes, model: PolicyModel | None = None) -> Grpo:
    """The algorithm on a controller that always answers with the same batch."""
    source = BatchSource(group, lambda call: answer, 1, config.staleness_bound)
    return Grpo(config, make_trainer(config, group, model), source)


def trained(
    group: RankGroup,
    samples: Sequence[Sample],
    grpo: dict[str, Any],
    train: dict[str, Any] | None = None,
    change: Callable[[Grpo], None] = lambda _: None,
    **sections: Any,
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics, gradient of each parameter on the CPU) of one optimizer step with plain descent: lr 1, no clipping.

    AdamW would hide the size of a gradient; the gradient is caught by a hook that runs when it is complete.
    """
    config = make_config(grpo, {"optm_grad_norm_clip": 0.0, **(train or {})}, **sections)
    algorithm = make_grpo(group, config, encode_step(samples))
    change(algorithm)
    found: dict[str, torch.Tensor] = {}
    trainer = algorithm._trainer
    hook = trainer.optimizer.optimizers[0].register_step_pre_hook(
        lambda *_: found.update({n: p.grad.clone().cpu() for n, p in trainer.model.named_parameters()})
    )
    metrics = train_step(algorithm, 0)
    hook.remove()
    return metrics, found


def assert_equal_gradients(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    """Every gradient equal up to `rounding`, relative to the largest entry of that parameter's."""
    assert a.keys() == b.keys()
    for name, gradient in a.items():
        scale = gradient.abs().max().item()
        assert (gradient - b[name]).abs().max().item() <= rounding(tolerance) * scale, name


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return any(not torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-7) for name in a)


CUT_SHORT = {"truncated": True}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"variant": "dapo", "epsilon_low": 0.1, "epsilon_high": 0.28},
    {"variant": "gspo", "epsilon_low": 0.3, "epsilon_high": 0.4},
    {"loss_type": "seq-mean-token-sum"},
    {"loss_type": "seq-mean-token-mean"},
    {"loss_type": "seq-mean-token-mean", "unbiased_loss_max_tokens": 17},
    {"unbiased_advantage": True},
    {"lower_bound_ratio": 1.01},
    RICH,
    *({"kl_beta": 0.2, "kl_type": kind} for kind in ("k1", "abs", "k2", "k3", "full")),
    {"kl_beta": 0.2, "unbiased_kl_estimate": True, "loss_type": "seq-mean-token-mean"},
    *({"kl_in_reward": {"beta": 0.1, "type": kind}, "unbiased_advantage": True} for kind in ("k1", "k3", "full")),
    {"sample_masks": CUT_SHORT, "loss_type": "seq-mean-token-mean"},
    {"sample_masks": {"mean_score_above": 0.5}, **RICH},
    {"sample_masks": {"mean_score_below": 0.75}, "loss_type": "seq-mean-token-sum"},
    {"sample_masks": {"failed_from_tokens": 4}},
    {"sample_masks": CUT_SHORT, "kl_in_reward": {"beta": 0.1, "type": "k1"}, "unbiased_advantage": True},
    {
        "sample_masks": {**CUT_SHORT, "mean_score_below": 0.75, "failed_from_tokens": 6},
        "rollout_correction": {"reject": "token", "reject_below": 0.7},
    },
    {"use_decoupled_loss": True},
    {"use_decoupled_loss": True, "behav_imp_weight_cap": 1.5},
    {"rollout_correction": {"weights": "token", "cap": 1.2}},
    {"rollout_correction": {"weights": "sequence", "cap": 3.0}, "loss_type": "seq-mean-token-sum"},
    {"rollout_correction": {"reject": "token", "reject_below": 0.7, "reject_above": 1.3}, **RICH},
    {"rollout_correction": {"reject": "sequence", "reject_below": 0.5}, "loss_type": "seq-mean-token-mean"},
    {
        "rollout_correction": {"weights": "token", "reject": "geometric", "reject_above": 1.02},
        "loss_type": "seq-mean-token-sum",
    },
    {"rollout_correction": {"off_policy_mask": 0.01}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_an_independent_implementation(group: RankGroup, options: dict[str, Any]):
    """Loss and gradient, where some samples have no score and some prompts are shared."""
    samples, model = with_common_prompts(cut_short(random_samples(12, n_masked=2))), tiny_model()
    config = make_config(options)
    frozen = tiny_model(seed=1).lm if config.has_reference else None
    loss = grpo_loss(model.lm, samples, config.grpo, frozen=frozen, temperature=options.get("temperature", 1.0))
    loss.backward()
    metrics, gradients = trained(group, samples, {"mini_batch": 5, **options})
    assert metrics["loss"] == pytest.approx(loss.item(), rel=rounding(2e-5), abs=1e-7)
    assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, gradients, 3e-5)
    assert (metrics["shared_fraction"] > 0.1) == (group.device.type == "cpu")
    assert metrics.get("reference_kl", 1.0) > 0.01
    if config.grpo.recomputes_old:
        assert metrics["clip_fraction"] == 0.0
        assert metrics["behaviour_kl"] > 0.01
    shares = {name: value for name, value in metrics.items() if name.startswith("masked_fraction/")}
    assert shares.keys() == {
        f"masked_fraction/{name.removesuffix('_above').removesuffix('_below').removesuffix('_from_tokens')}"
        for name in options.get("sample_masks", {})
    }
    assert all(0 < share < 1 for share in shares.values()), shares


ALIKE = [make_sample(i, [5, 6], [7, 8, 9], [-1.0] * 3, float(i)) for i in range(4)]
MASK = {"sample_masks": {"mean_score_above": 9.0}}
MASKED = {"masked_fraction/mean_score": 1.0}
REJECT = {"rollout_correction": {"reject": "token", "reject_above": 1e-9}}


@pytest.mark.parametrize(
    ("grpo", "samples", "expected", "said"),
    [
        ({}, random_samples(4, n_masked=4), {}, ""),
        (MASK, random_samples(), MASKED, "no sample that counts"),
        ({**MASK, "kl_in_reward": {"beta": 0.1}}, random_samples(), MASKED, "no sample that counts"),
        ({**REJECT, "mini_batch": 3}, random_samples(), {"left_out_fraction": 1.0}, ""),
        ({"min_filter_prefix_tokens": 3}, ALIKE, {}, ""),
    ],
    ids=["no score", "masked", "masked, with a reference", "rejected", "alike"],
)
def test_a_step_in_which_nothing_counts_updates_nothing(
    group: RankGroup,
    grpo: dict[str, Any],
    samples: list[Sample],
    expected: dict[str, float],
    said: str,
    caplog: pytest.LogCaptureFixture,
):
    algorithm = make_grpo(group, make_config(grpo), encode_step(samples))
    before = [p.detach().clone() for p in algorithm._trainer.model.parameters()]
    metrics = train_step(algorithm, 0)
    assert {"optimizer_steps": 0.0, **expected}.items() <= metrics.items()
    assert "loss" not in metrics
    assert said in caplog.text
    for old, new in zip(before, algorithm._trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_prefixes_shared_by_good_and_bad_answers_are_left_out(group: RankGroup):
    samples = with_shared_prefixes(random_samples(12, n_masked=1))
    options = {**RICH, "loss_type": "seq-mean-token-mean", "mini_batch": 3}
    metrics, gradients = trained(group, samples, {**options, "min_filter_prefix_tokens": 2})
    assert differ(gradients, trained(group, samples, options)[1])
    left_out = 0
    for first in range(0, 12, 4):
        members = samples[first : first + 4]
        for sample in members:
            others = {other.header.score for other in members if other.header.response_tokens > 2}
            if sample.header.score is None or sample.header.response_tokens <= 2:
                continue
            if others - {sample.header.score, None}:
                start = sample.header.prompt_tokens
                sample.loss_mask[start : start + 2] = 0
                left_out += 2
    assert left_out > 6
    changed = [
        replace(s, header=s.header.model_copy(update={"response_tokens": int(s.loss_mask.sum())})) for s in samples
    ]
    model = tiny_model()
    loss = grpo_loss(model.lm, changed, make_config(options).grpo)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=rounding(2e-5), abs=1e-7)
    assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, gradients, 3e-5)


@pytest.mark.parametrize("computed", [True, False])
def test_samples_that_are_masked_are_not_trained_in_place_of_others(group: RankGroup, computed: bool):
    """Nothing of this optimizer step is computed for its own sake: each sample is masked or without advantage."""
    samples = [
        replace(s, header=s.header.model_copy(update={"score": EVEN[i % 4], "finish_reason": end}))
        for i, (s, end) in enumerate(zip(random_samples(8), ["length", "stop"] * 4, strict=True))
    ]
    config = make_config(
        {"sample_masks": CUT_SHORT, "epsilon_low": -1.0, "epsilon_high": -1.0},
        {"metrics_of_all_samples": computed, "optm_weight_decay": 0.0},
    )
    algorithm = make_grpo(group, config, encode_step(samples))
    before = [p.detach().clone() for p in algorithm._trainer.model.parameters()]
    metrics = train_step(algorithm, 0)
    assert (metrics["optimizer_steps"], metrics["masked_fraction/truncated"]) == (1.0, 0.5)
    for old, new in zip(before, algorithm._trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_mismatch_is_measured_apart_for_engine_and_staleness(group: RankGroup):
    samples = random_samples(8, version=[0, 0, 1, 1] * 2)
    config = make_config({"allowed_outdated_steps": 1, "mini_batch": 3}, {"metrics_of_all_samples": True})
    algorithm = make_grpo(group, config, encode_step(samples, step=1))
    metrics = train_step(algorithm, 1)
    model = tiny_model()
    for cause, version in (("engine", 1), ("stale", 0)):
        chosen = [sample for sample in samples if sample.header.newest_version == version]
        facts = [fact for sample in chosen for fact in token_facts(model.lm, sample, 1.0)]
        d = np.array([float(logprob.detach()) - made for logprob, _, made in facts])
        w = np.exp(d)
        expected = {
            "k1": -d.mean(),
            "k3": (w - 1 - d).mean(),
            "ess": 1 / ((w / w.mean()) ** 2).mean(),
            "ratio_max": w.max(),
            "cut": (w > 2.0).mean(),
        }
        for name, value in expected.items():
            found = metrics[f"mismatch/{cause}_{name}"]
            assert found == pytest.approx(value, rel=rounding(1e-4), abs=1e-7), (cause, name)


def test_experts_are_replayed_in_the_policy_alone(group: RankGroup):
    """And every tenth step says what the mismatch would be without."""
    samples = random_samples(4)
    options = {"routing_replay": "ids", "kl_beta": 0.1, "use_decoupled_loss": True}
    config = make_config({"allowed_outdated_steps": 10, **options})

    def made(samples: Sequence[Sample], step: int) -> Grpo:
        model = prepare_model(PolicyModel(tiny_experts()), packed=False, recompute=False)
        return make_grpo(group, config, encode_step(samples, step=step), replay_routing(model, "ids"))

    for step in (9, 10):
        algorithm = made(with_experts(random_samples(4, version=step), 2, 4), step)
        trainer, seen = algorithm._trainer, []
        trainer.model.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(("policy", given[0])))
        trainer.reference.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(("other", given[0])))
        metrics = train_step(algorithm, step)
        assert ("mismatch/unreplayed_k3" in metrics) is (step == 10)
        assert metrics.get("mismatch/unreplayed_k3") != metrics["mismatch/engine_k3"]
        assert 0.5 < metrics["routing/differs"] < 1
        asked = [(who, batch.routing is not None) for who, batch in seen]
        assert set(asked) == {("policy", True), ("other", False)}
    with pytest.raises(SettingsError, match="sample 0 of step 9 does not say which experts the engine chose"):
        train_step(made(samples, 9), 9)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size_per_optimize": 4}, {"loss_type": "seq-mean-token-mean", "variant": "gspo"}, RICH],
    ids=str,
)
def test_samples_without_advantage_are_left_out_exactly(group: RankGroup, options: dict[str, Any]):
    samples = [
        replace(s, header=s.header.model_copy(update={"score": 1.0 if i >= 8 else EVEN[i % 4]}))
        for i, s in enumerate(random_samples(12))
    ]
    found, computed = [], []
    for everything in (True, False):
        config = make_config(options, {"metrics_of_all_samples": everything, "optm_weight_decay": 0.1})
        algorithm = make_grpo(group, config, encode_step(samples))
        seen: list[int] = []
        forward = algorithm._trainer.forward

        def watched(batch: MicroBatch, forward: Any = forward, seen: list[int] = seen, **asked: Any) -> Any:
            seen.extend(batch.rows)
            return forward(batch, **asked)

        algorithm._trainer.forward = watched
        metrics = train_step(algorithm, 0)
        found.append([p.detach().clone() for p in algorithm._trainer.model.parameters()])
        computed.append((len(seen), metrics["computed_fraction"]))
        assert metrics["optimizer_steps"] == (3.0 if "batch_size_per_optimize" in options else 1.0)
    skips = "entropy_coeff" not in options
    few = 5 if "batch_size_per_optimize" in options else 4
    assert computed == [(12, 1.0), (few, few / 12) if skips else (12, 1.0)]
    for whole, lean in zip(*found, strict=True):
        torch.testing.assert_close(whole, lean, atol=rounding(2e-6), rtol=rounding(1e-5))


def test_the_old_policy_is_that_of_before_the_first_optimizer_step(group: RankGroup):
    samples = on_policy_samples(tiny_model())
    steps = {"batch_size_per_optimize": 4, "mu_iterations": 3}
    found = []
    for options in ({}, {"use_decoupled_loss": True}):
        config = make_config({**steps, **options}, {"optm_lr": 5e-3})
        algorithm = make_grpo(group, config, encode_step(samples))
        metrics = train_step(algorithm, 0)
        found.append([p.detach().clone() for p in algorithm._trainer.model.parameters()])
    assert metrics["correction_weight"] == pytest.approx(1.0, abs=rounding(1e-5))
    for plain, decoupled in zip(*found, strict=True):  # the samples are the old policy's own
        torch.testing.assert_close(plain, decoupled, atol=1e-5, rtol=1e-3)


DRAWN = {"top_k": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "min_tokens": 2}


@pytest.mark.parametrize("kind", ["full", "k3"])
def test_every_pass_is_of_what_tokens_were_drawn_from(group: RankGroup, kind: str):
    """The policy, itself as reference and as π_old agree over kept sets and penalties, in every layout."""
    samples = with_kept_sets(with_common_prompts(random_samples(12)))
    grpo = {"kl_beta": 0.2, "kl_type": kind, "use_decoupled_loss": True}

    def run(packing: bool, mini_batch: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        return trained(
            group,
            samples,
            {**grpo, "mini_batch": mini_batch},
            {"sequence_packing": packing},
            lambda algorithm: setattr(algorithm._trainer, "reference", tiny_model()),
            rollout={"sampling_config": DRAWN},
        )

    metrics, gradients = run(packing=False, mini_batch=12)
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["entropy"] < math.log(5) + 1e-6
    for packing, mini_batch in ((True, 12), (True, 1)):
        assert_equal_gradients(run(packing, mini_batch)[1], gradients)


def test_a_token_that_was_not_in_its_set_is_a_bad_batch(group: RankGroup):
    samples = with_kept_sets(random_samples(8))
    for sample in samples:
        sample.kept_ids[:5] = (sample.kept_ids[0] + 7) % 61
    algorithm = make_grpo(group, make_config(rollout={"sampling_config": DRAWN}), encode_step(samples))
    with pytest.raises(BadBatchError, match=r"sample 0 .*generated token 0 is \d+, which is not among the 5 ids"):
        train_step(algorithm, 0)


def test_samples_without_their_sets_end_the_job(group: RankGroup):
    algorithm = make_grpo(group, make_config(rollout={"sampling_config": DRAWN}), encode_step(random_samples(8)))
    with pytest.raises(SettingsError, match=r"which ids its tokens were drawn from.*start anew"):
        train_step(algorithm, 0)


def test_the_policy_as_it_was_chooses_experts_for_itself_as_a_reference(group: RankGroup):
    """Then it is what a model of its own is, and not the policy."""
    samples = with_experts(random_samples(8), 2, 4)

    def mixture() -> PolicyModel:
        return prepare_model(PolicyModel(tiny_experts()), packed=False, recompute=False)

    found = []
    for reference in (lambda policy: mixture(), EarlierPolicy):
        config = make_config({"routing_replay": "ids", "kl_beta": 0.2})
        algorithm = make_grpo(group, config, encode_step(samples), replay_routing(mixture(), "ids"))
        algorithm._trainer.reference = reference(algorithm._trainer.model)
        found.append(train_step(algorithm, 0)["reference_kl"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0] > 1e-3


def test_order_of_groups_and_samples_does_not_matter(group: RankGroup):
    samples = random_samples(12)
    _, expected = trained(group, samples, RICH)
    order = [9, 8, 11, 10, 2, 0, 3, 1, 5, 6, 7, 4]  # within groups, and the groups
    _, gradients = trained(group, [samples[i] for i in order], RICH)
    assert_equal_gradients(expected, gradients)


def test_greedy_samples_are_nothing_but_baselines(group: RankGroup):
    """A step with a greedy sample behind each group trains like one without, whose scores are the differences."""
    samples, bases = cut_short(random_samples(12, n_masked=1)), [1.5, 0.0, -0.5]
    samples[5].header = samples[5].header.model_copy(update={"score": 0.0})  # as good as the greedy one: it is idle
    differences = [
        replace(s, header=s.header.model_copy(update={"score": s.header.score - bases[number // 4]}))
        if s.header.score is not None
        else s
        for number, s in enumerate(samples)
    ]
    greedy = with_baselines(samples, bases)
    assert greedy[4].header.total_tokens > max(s.header.total_tokens for s in samples)
    for options in (
        {"mini_batch": 5, "loss_type": "seq-mean-token-mean", "min_filter_prefix_tokens": 2},
        {"max_token_len_per_mini_batch": 20, "min_filter_prefix_tokens": 2},
        {"mini_batch": 3, "batch_size_per_optimize": 6, "mini_batch_shuffle": True, "mu_iterations": 2},
        {"entropy_coeff": 0.0, "sample_masks": {"truncated": True}},
    ):
        metrics, weights = after_a_step(group, encode_step(greedy, group_size=5), options, "remax")
        skips = options.get("entropy_coeff") == 0.0  # what is idle; the other estimator cannot know it
        # the discounted return is the score itself
        plain, expected = after_a_step(
            group, encode_step(differences), {**options, "whiten_advantages": False}, "reinforce_plus_plus"
        )
        assert_equal_gradients(weights, expected, 2e-5)
        same = {"loss", "entropy", "samples", "tokens", "response_tokens_mean", "optimizer_steps", "grad_norm"} - (
            {"entropy"} if skips else set()
        )
        assert {name: metrics[name] for name in same} == {name: pytest.approx(plain[name]) for name in same}
        assert (metrics["computed_fraction"] < plain["computed_fraction"]) is skips
        assert metrics["greedy_score"] == pytest.approx(1 / 3)
        scores = [s.header.score for s in samples if s.header.score is not None]
        assert metrics["reward_mean"] == pytest.approx(sum(scores) / len(scores))
        assert "greedy_score" not in plain


def with_parts(samples: list[Sample], place: int, share: float) -> list[Sample]:
    """Each earned this share of its score at this one of its tokens, or at the last one."""

    def of(sample: Sample) -> Sample:
        header = sample.header
        at = min(header.prompt_tokens + place, header.total_tokens - 1)
        part = share * (header.score or 0.0)
        return replace(sample, part_positions=np.array([at], np.int32), part_values=np.array([part], np.float32))

    return [of(sample) for sample in samples]


def test_parts_of_scores_count_where_they_were_earned(group: RankGroup):
    samples = random_samples(12)
    options = {"gamma": 0.5, "kl_beta": 0.0}

    def weights(which: list[Sample], estimator: str) -> dict[str, torch.Tensor]:
        return after_a_step(group, encode_step(which), options, estimator)[1]

    plain = weights(samples, "reinforce_plus_plus")
    assert not differ(weights(with_parts(samples, 99, 0.5), "reinforce_plus_plus"), plain)
    assert differ(weights(with_parts(samples, 0, 0.5), "reinforce_plus_plus"), plain)
    assert not differ(weights(with_parts(samples, 0, 0.5), "rloo"), weights(samples, "rloo"))


def test_a_payload_that_contradicts_its_mark_is_refused(group: RankGroup):
    samples = random_samples(4)
    table = make_table(samples).model_copy(update={"baseline": [False, False, False, True]})
    with pytest.raises(BadBatchError, match="baseline are"):
        decode_payload(table, 3, encode_sample(samples[3]))
    assert decode_payload(table, 2, encode_sample(samples[2])).learned_tokens == samples[2].header.response_tokens


def after_a_step(
    group: RankGroup, answer: bytes, options: dict[str, Any], estimator: str
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """(metrics, weights) of a step that is answered with this batch."""
    grpo = {"entropy_coeff": 0.02, **options, "advantage_estimator": estimator}
    algorithm = make_grpo(group, make_config(grpo, {"train_batch_per_replica": 12}), answer)
    metrics = train_step(algorithm, 0)
    weights = dict(algorithm._trainer.model.named_parameters())
    return metrics, {name: value.detach().clone().cpu() for name, value in weights.items()}


def test_a_greedy_sample_older_than_the_bound_is_refused(group: RankGroup):
    samples = random_samples(4)
    for sample in samples:
        sample.header = sample.header.model_copy(update={"oldest_version": 1, "newest_version": 1})
    algorithm = make_grpo(
        group,
        make_config({"advantage_estimator": "remax", "allowed_outdated_steps": 0}),
        encode_step(with_baselines(samples, [0.0]), group_size=5, step=1),
    )
    with pytest.raises(BadBatchError, match="sample 4 of step 1 is 1 steps old"):
        algorithm.poll(1, 0.0)


def on_policy_samples(model: PolicyModel) -> list[Sample]:
    """Samples with the log-probs that transformers itself computes for them."""
    samples = random_samples(8)
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
        with torch.no_grad():
            log_p = torch.log_softmax(model.lm(input_ids=ids, use_cache=False).logits[0], dim=-1)
        picked = log_p[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        sample.logprobs[1:] = picked * sample.loss_mask[1:]
    return samples


@pytest.mark.parametrize("packed", [False, True])
def test_first_on_policy_step_has_ratio_one(group: RankGroup, packed: bool):
    samples = on_policy_samples(tiny_model())
    metrics, _ = trained(group, samples, {"mini_batch": 4}, {"sequence_packing": packed})
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=rounding(1e-5))
    assert metrics["behaviour_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["clip_fraction"] == 0.0


def test_several_optimizer_steps_per_batch(group: RankGroup):
    samples = on_policy_samples(tiny_model())
    config = make_config({"batch_size_per_optimize": 4, "mu_iterations": 3}, {"optm_lr": 5e-3})
    algorithm = make_grpo(group, config, encode_step(samples))
    metrics = train_step(algorithm, 0)
    assert metrics["optimizer_steps"] == 6.0
    # Later steps compare with the policy that sampled, not with themselves.
    assert metrics["behaviour_kl"] > 1e-6
    state = next(iter(algorithm._trainer.optimizer.optimizers[0].state.values()))
    assert state["step"].item() == 6


def test_metrics_of_the_table(group: RankGroup):
    samples = [
        make_sample(0, [3, 4], [5, 6, 7], [-1.0] * 3, 1.0, version=2),
        make_sample(1, [3, 4], [5], [-1.0], 0.0, version=4),
        make_sample(2, [3, 4], [5], [-1.0], None, version=4),
        make_sample(3, [3, 4], [5, 6], [-1.0] * 2, 0.5, version=3),
    ]
    config = make_config({"allowed_outdated_steps": 2})
    metrics = train_step(make_grpo(group, config, encode_step(samples, step=4)), 4)
    expected = {
        "samples": 3.0, "tokens": 5.0 + 3.0 + 4.0, "reward_mean": 0.5, "reward/right": 0.5,
        "response_tokens_mean": 7 / 4, "staleness_mean": 1.0, "staleness_max": 2.0, "lr": 1e-3,
        "advantage_abs_mean": 2 / 3, "optimizer_steps": 1.0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    for name in ("loss", "entropy", "clip_fraction", "behaviour_kl", "ratio_max", "grad_norm"):
        assert math.isfinite(metrics[name])


def sample_of_versions(index: int, versions: Sequence[int], score: float | None) -> Sample:
    """A sample whose response has one token of each of these versions."""
    n = len(versions)
    found = {"oldest_version": min(versions), "newest_version": max(versions)}
    sample = make_sample(index, [3, 4], [5] * n, [-1.0] * n, score, **found)
    sample.version_starts = np.array([0, *range(2, n + 2)], np.int32)
    sample.version_values = np.array([-1, *versions], np.int32)
    return sample


@pytest.mark.parametrize("optimizer_steps", [1, 4])
def test_tokens_are_told_by_age(group: RankGroup, optimizer_steps: int):
    """Ten tokens count, each once however often it is trained on: ages 4, 4, 3, 1 (twice) and 1, 0; none masked."""
    samples = [
        sample_of_versions(0, [5, 5, 6, 8], 1.0),
        sample_of_versions(1, [8, 9], 0.0),
        sample_of_versions(2, [5, 6, 7], None),
    ]
    rule = {"batch_size_per_optimize": 2, "mu_iterations": 2} if optimizer_steps > 1 else {}
    config = make_config({"allowed_outdated_steps": 4, **rule})
    metrics = train_step(make_grpo(group, config, encode_step([*samples, *samples[:1]], step=9)), 9)
    tokens = {"0": 1, "1": 3, "2": 0, "3": 2, "4": 4}
    found = {name: value for name, value in metrics.items() if name.startswith("staleness_tokens")}
    expected = {f"staleness_tokens/{age}": count / 10 for age, count in tokens.items()}
    assert found == pytest.approx({**expected, "staleness_tokens_mean": (3 + 6 + 16) / 10})


def test_samples_beyond_the_staleness_bound_are_refused(group: RankGroup):
    samples = random_samples(4, version=1)
    answer = encode_step(samples, step=4)
    assert train_step(make_grpo(group, make_config({"allowed_outdated_steps": 3}), answer), 4)["samples"] == 4
    with pytest.raises(BadBatchError, match=r"3 steps old .version 1., the bound is 2"):
        train_step(make_grpo(group, make_config({"allowed_outdated_steps": 2}), answer), 4)
    with pytest.raises(BadBatchError, match="weight versions 1 to 1"):
        train_step(make_grpo(group, make_config(), encode_step(samples, step=0)), 0)


def test_a_batch_without_samples_says_that_the_data_has_ended(group: RankGroup):
    with pytest.raises(DataEnded):
        make_grpo(group, make_config(), encode_step([])).poll(0, 0.0)
