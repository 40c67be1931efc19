"""Probes of optimizers and their schedules, the policy's and the critic's; what the critic learns; randomness."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.model import TrainedModel
from policy_worker.worker import _seed
from schema.config import Config
from tests.liveness.probe import UNSET, Place, With, changed, grpo, under, watch
from tests.liveness.trained import (
    SECTIONS,
    after_steps,
    gradient,
    policy,
    step_metrics,
    trained_models,
    trainer_of,
    with_critic,
)


def _scheduled(config: Config, place: Place) -> list[TrainedModel]:
    trainer = trainer_of(config, place)
    trainer.schedule = Schedule.of_config(config.train, 40)
    return trained_models(trainer)


def optimizer_settings(config: Config, place: Place) -> list[dict[str, Any]]:
    """What torch's optimizers are made with, the policy's and the critic's."""
    names = ("lr", "betas", "eps", "weight_decay", "fused", "foreach", "momentum")
    return [
        {
            type(optimizer).__name__: {name: group.get(name) for group in optimizer.param_groups for name in names}
            for optimizer in trained.optimizer.optimizers
        }
        for trained in _scheduled(config, place)
    ]


def weight_decays(config: Config, place: Place) -> list[float]:
    """The weight decay of each of three steps, of the policy and of the critic."""
    seen = []
    for trained in _scheduled(config, place):
        (optimizer,) = trained.optimizer.optimizers
        for step in (0, 10, 30):
            trained.step(step)
            seen.append(optimizer.param_groups[0]["weight_decay"])
    return seen


def learning_rates(config: Config, place: Place) -> list[float]:
    """The rate of each of forty steps, of the policy and of the critic."""
    return [trained.lr(step) for trained in _scheduled(config, place) for step in range(40)]


def applied_norm(config: Config, place: Place) -> float:
    """The norm of the gradients that the optimizer gets."""
    found = gradient(config, place)
    return float(np.sqrt(sum(float((value**2).sum()) for value in found.values())))


def weights_of_the_critic(config: Config, place: Place) -> dict[str, np.ndarray]:
    """What two steps make of it."""
    named = after_steps(config, place, 2).critic.model.named_parameters()
    return {name: p.detach().cpu().numpy().copy() for name, p in named}


watch(applied_norm, grpo, under("train", optm_grad_norm_clip=(0.5, 0.01)))
watch(weights_of_the_critic, with_critic, under("critic", optm_grad_norm_clip=(0.5, 0.01)))
for section, job in SECTIONS:
    watch(
        optimizer_settings,
        job,
        under(
            section,
            optm_lr=(1e-3, 1e-4),
            optm_impl=("foreach", "for-loop"),
            optm_weight_decay=(0.01, 0.1),
            optm_betas=([0.9, 0.999], [0.8, 0.95]),
            epsilon=(1e-6, 1e-8),
            optm_name=("AdamW", "Muon"),
        ),
    )
    descent = changed(job, under(section, optm_name="SGD"))
    watch(optimizer_settings, descent, under(section, optm_momentum=(UNSET, 0.9)))
    ramping = changed(job, under(section, optm_weight_decay_ramp="linear"))
    ramps = under(section, optm_weight_decay_ramp=("linear", "cosine"), optm_weight_decay_start=(UNSET, 0.005))
    watch(weight_decays, ramping, ramps)
    stepwise = {"optm_decay_steps": 8, "optm_decay_type": "cosine"}
    for keys, values in (
        ({}, {"optm_warmup_steps": (0, 5), "optm_lr": (1e-3, 1e-4)}),
        (
            {"optm_decay_ratio": 0.5, "optm_decay_type": "linear"},
            {
                "optm_decay_ratio": (0.5, 0.25),
                "optm_decay_type": ("linear", "cosine"),
                "optm_min_lr_factor": (0.0, 0.2),
            },
        ),
        (stepwise, {"optm_decay_steps": (8, 16), "optm_num_cycles": (0.5, 1.5)}),
        (stepwise | {"optm_decay_type": "wsd"}, {"optm_wsd_decay_type": ("linear", "exponential")}),
        ({"optm_warmup_steps": 5}, {"optm_warmup_start_factor": (0.0, 0.3)}),
    ):
        watch(learning_rates, changed(job, under(section, **keys)), under(section, **values))

plain = changed(with_critic, policy(whiten_advantages=False))
losses = under("critic", loss_type=("token-mean", "seq-mean-token-mean"), mu_iterations=(1, 2))
watch(weights_of_the_critic, plain, losses | under("critic", batch_size_per_optimize=(UNSET, 4)))
several = changed(with_critic, under("critic", mu_iterations=3, batch_size_per_optimize=4))
watch(weights_of_the_critic, several, under("critic", value_clip=(0.5, 0.001), mini_batch_shuffle=(False, True)))
watch(gradient, plain, policy(gae_lambda=(1.0, 0.5)))
watch(step_metrics, with_critic, under("critic", warmup_steps=(0, 1)))
watch(gradient, with_critic, under("critic", enable=(True, With(False, policy(advantage_estimator="grpo")))))


def randomness(config: Config, place: Place) -> tuple[float, float, float, bool]:
    """The random state that training begins with, and whether torch is deterministic."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        _seed(config)
        chosen = torch.are_deterministic_algorithms_enabled()
        return random.random(), float(np.random.rand()), float(torch.rand(1)), chosen
    finally:
        torch.use_deterministic_algorithms(False)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


watch(randomness, grpo, under("train", seed=(1, 2), deterministic=(False, True)))
