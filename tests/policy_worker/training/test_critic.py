"""The critic against a naive implementation, on a problem whose values are known, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from policy_worker.errors import SettingsError
from policy_worker.model.load import load_critic
from policy_worker.model.model import ValueModel
from policy_worker.model.prepare import prepare_model
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.training.critic import fit
from schema.config import Config
from schema.wire.sample import Sample
from tests.policy_worker.material import (
    encode_step,
    make_config,
    make_sample,
    random_samples,
    tiny_critic,
    tiny_lm,
    tiny_model,
    train_step,
    with_common_prompts,
    write_model,
)
from tests.policy_worker.training.test_grpo import make_grpo
from tests.support.devices import rounding

GAE = {"advantage_estimator": "gae", "gamma": 0.9, "gae_lambda": 0.8}


def naive_values(model: ValueModel, sample: Sample) -> list[Tensor]:
    """What is expected before each generated token, one sequence at a time."""
    ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
    states = model.lm(input_ids=ids, use_cache=False).last_hidden_state[0]
    return [states[i - 1] @ model.value_head for i in range(1, ids.shape[1]) if sample.loss_mask[i]]


def naive_loss(model: ValueModel, old: ValueModel, samples: list[Sample], config: Config) -> Tensor:
    """The value loss of one optimizer step on all samples that have a score."""
    how, keys = config.grpo, config.critic
    total, per_sample = torch.zeros(()), []
    for sample in (sample for sample in samples if sample.header.score is not None):
        before = [float(value.detach()) for value in naive_values(old, sample)]
        n, later, returns = len(before), 0.0, [0.0] * len(before)
        for t in reversed(range(n)):
            reward = sample.header.score if t == n - 1 else 0.0
            after = before[t + 1] if t < n - 1 else 0.0
            later = reward + how.gamma * after - before[t] + how.gamma * how.gae_lambda * later
            returns[t] = later + before[t]
        losses = []
        for value, was, aim in zip(naive_values(model, sample), before, returns, strict=True):
            change = float(value.detach()) - was
            moved = was + max(-keys.value_clip, min(change, keys.value_clip))
            bounded = abs(change) > keys.value_clip
            clipped = torch.tensor((moved - aim) ** 2) if bounded else (value - aim) ** 2
            losses.append(torch.maximum((value - aim) ** 2, clipped) / 2)
        per_sample.append(losses)
    if keys.loss_type == "token-mean":
        total = sum((sum(losses) for losses in per_sample), total) / sum(map(len, per_sample))
    else:
        by_tokens = keys.loss_type == "seq-mean-token-mean"
        means = [sum(losses) / (len(losses) if by_tokens else 1) for losses in per_sample]
        total = sum(means, total) / len(means)
    return total


@pytest.mark.parametrize(
    ("critic", "train"),
    [
        ({}, {}),
        ({"loss_type": "seq-mean-token-sum", "value_clip": 0.01, "mini_batch": 12}, {"sequence_packing": True}),
        ({"loss_type": "seq-mean-token-mean", "max_token_len_per_mini_batch": 40}, {}),
    ],
    ids=str,
)
def test_one_optimizer_step_equals_the_naive_one(group: RankGroup, critic: dict[str, Any], train: dict[str, Any]):
    # of the second pass over the batch, so that values have moved away from the old ones
    samples = with_common_prompts(random_samples(12, n_masked=1))
    keys = {"mu_iterations": 2, "optm_lr": 3e-3, "optm_grad_norm_clip": 0.0, **critic}
    config = make_config({**GAE, "mini_batch": 3}, train, critic=keys)
    algorithm = make_grpo(group, config, encode_step(samples))
    learned = algorithm._trainer.critic
    assert learned is not None
    states: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def keep(*_: object) -> None:
        named = list(learned.model.named_parameters())
        weights = {name: p.detach().clone().cpu() for name, p in named}
        states.append((weights, {name: p.grad.clone().cpu() for name, p in named}))

    learned.optimizer.optimizers[0].register_step_pre_hook(keep)
    metrics = train_step(algorithm, 0)
    assert len(states) == 2
    model, old = tiny_critic(), tiny_critic()
    model.load_state_dict(states[1][0])
    loss = naive_loss(model, old, samples, config)
    loss.backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        assert (states[1][1][name] - parameter.grad).abs().max().item() <= rounding(2e-5) * scale, name
    first = float(naive_loss(old, old, samples, config).detach())
    assert metrics["critic/loss"] == pytest.approx((first + float(loss)) / 2, rel=rounding(1e-5))
    if critic.get("value_clip") == 0.01:
        assert metrics["critic/clip_fraction"] > 0.1


def test_values_of_a_problem_with_two_states_are_found(group: RankGroup):
    # after the prompt both tokens are as likely; 5 then earns 1, 6 nothing, both after one more token. γ = 0.9
    samples = [make_sample(i, [3, 4], [5 + i % 2, 7], [-0.7, 0.0], float(i % 2 == 0)) for i in range(8)]
    keys = {"optm_lr": 1e-2, "warmup_steps": 1000, "value_clip": 1.0, "mini_batch": 8}
    config = make_config({**GAE, "gae_lambda": 1.0}, critic=keys)
    algorithm = make_grpo(group, config, encode_step(samples))
    trainer = algorithm._trainer
    before = [p.detach().clone() for p in trainer.model.parameters()]
    for _ in range(150):
        metrics = train_step(algorithm, 0)
    assert trainer.critic is not None
    found = [[float(value) for value in naive_values(trainer.critic.model.cpu(), samples[i])] for i in (0, 1)]
    trainer.critic.model.to(group.device)
    assert found[0] == pytest.approx([0.45, 1.0], abs=0.02)
    assert found[1] == pytest.approx([0.45, 0.0], abs=0.02)
    # returns of 0.9, 1, 0, 0, of which the first two differ from 0.45 by 0.45: 1 − 0.10125 / 0.226875
    assert metrics["critic/explained_variance"] == pytest.approx(0.554, abs=0.02)
    assert metrics["optimizer_steps"] == 0.0 == metrics["lr"]
    after = list(trainer.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "it only warms up"


def test_masked_samples_and_failed_ones_teach_nothing(group: RankGroup):
    samples = random_samples(12, n_masked=2)
    spoiled = [make_sample(i, [3], [4] * 5, [-1.0] * 5, None) for i in range(2)] + samples[2:]
    gradients = []
    for chosen in (samples, spoiled):
        algorithm = make_grpo(group, make_config(GAE), encode_step(chosen))
        critic = algorithm._trainer.critic
        assert critic is not None
        critic.optimizer.optimizers[0].register_step_pre_hook(
            lambda *_: gradients.append([p.grad.clone() for p in critic.model.parameters()])  # noqa: B023
        )
        train_step(algorithm, 0)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_fresh_critic_expects_nothing(tmp_path: Path):
    config = make_config(GAE, policy={"model_name_or_path": str(write_model(tmp_path / "m"))})
    model = load_critic(config, tiny_model()).read_weights(torch.device("cpu"))
    assert not model.value_head.any()
    assert model.lm.get_input_embeddings().weight.equal(tiny_lm().get_input_embeddings().weight)


def test_a_critic_of_another_vocabulary_is_refused(tmp_path: Path):
    lm = tiny_lm()
    lm.resize_token_embeddings(64)
    lm.save_pretrained(tmp_path / "other")
    config = make_config(GAE, critic={"model_name_or_path": str(tmp_path / "other")})
    with pytest.raises(SettingsError, match=r"other' has 64 tokens, and policy.model_name_or_path = .* has 61"):
        load_critic(config, tiny_model())


def test_a_critic_of_layers_that_mix_sequences_is_refused():
    lm = tiny_critic().lm
    lm.config._attn_implementation = "eager"
    forward = lm.forward
    lm.forward = lambda **given: forward(**{**given, "position_ids": None})
    with pytest.raises(SettingsError, match="sequences in one row see each other"):
        prepare_model(ValueModel(lm), packed=True, recompute=False)


@pytest.mark.parametrize("constant", [1.0, 0.7, 10.1, 1000.1, 1e-7])
def test_returns_that_do_not_vary_have_no_explained_variance(constant: float):
    def fitted(gain: torch.Tensor) -> dict[str, float]:
        value = torch.linspace(-1.0, 1.0, len(gain), dtype=torch.float64) * constant
        error = gain - value
        parts = (value, gain, gain.square(), error, error.square())
        return fit([float(len(gain)), *(float(x.sum()) for x in parts)])

    for n in (1, 100, 1000, 100_003):
        same = torch.full([n], constant, dtype=torch.float64)
        assert "critic/explained_variance" not in fitted(same), n
    varying = constant * (1 + torch.linspace(-0.001, 0.001, 1000, dtype=torch.float64))
    assert fitted(varying)["critic/explained_variance"] == pytest.approx(1 - 0.999**2 / 1e-6, rel=1e-3)
