"""What the probes of the trainer share: trainers of tiny models, their algorithm, and jobs for the two to run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from policy_worker.memory.offload import local_of
from policy_worker.model.load import load_reference, load_teacher
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.process import Environment, ShutdownRequest
from policy_worker.session import Session
from policy_worker.trained.critic import Critic
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.model import TrainedModel
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from schema.config import Config
from schema.wire.sample import Sample
from tests.liveness.probe import Made, Observe, Place, changed, grpo, under
from tests.policy_worker.material import (
    encode_step,
    random_samples,
    tiny_critic,
    tiny_experts,
    tiny_family,
    tiny_model,
    train_step,
    write_model,
)
from tests.support.controller import TOKENS, make_run_dir
from tests.support.served import ServedController, served_controller

POLICY = "train.train_policy"
policy = partial(under, POLICY)


def trainer_of(config: Config, place: Place) -> Trainer:
    torch.manual_seed(0)
    reference = None
    if config.has_reference:  # another model than the policy's, so that there is a KL
        own = config.reference.model_name_or_path is not None
        reference = load_reference(config, tiny_model()) if own else tiny_model(1)
    model = tiny_model(packed=config.train.sequence_packing)
    critic = None
    if config.has_critic:
        critic = Critic(tiny_critic(), config, place.group, Schedule.of_config(config.critic, 40))
    torch.manual_seed(0)
    teachers = {one.name: load_teacher(config, one, model) for one in config.local_teachers}
    return Trainer(model, config, place.group, Schedule(10), reference, critic, teachers)


def trained_models(trainer: Trainer) -> list[TrainedModel]:
    """The policy, and the critic where there is one."""
    return [trainer, *([trainer.critic] if trainer.critic else [])]


def grpo_of(
    config: Config, place: Place, world: int = 1, samples: list[Sample] | None = None, trainer: Trainer | None = None
) -> tuple[Grpo, dict[str, np.ndarray]]:
    """The algorithm on twelve fixed samples, and where the gradients of its next step will be."""
    trainer = trainer or trainer_of(config, place)
    chosen = samples or random_samples(12)
    if world > 1:
        trainer.group = copy(place.group)
        trainer.group.sizes = ParallelDims(dp_shard=world)  # this rank's share of the batch of two
    source = BatchSource(
        place.group, lambda call: encode_step(chosen, step=int(call.path.split("/")[3])), 1, config.staleness_bound
    )
    found: dict[str, np.ndarray] = {}

    def keep(*_: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                found.setdefault(name, local_of(parameter.grad).numpy().copy())

    trainer.optimizer.optimizers[0].register_step_pre_hook(keep)
    return Grpo(config, trainer, source), found


def gradient_over(samples: Callable[[list[Sample]], list[Sample]], name: str, world: int = 1) -> Observe:
    """An observer of the first gradient before clipping, of a step on twelve samples made from fixed ones."""

    def observe(config: Config, place: Place) -> dict[str, np.ndarray]:
        algorithm, found = grpo_of(config, place, world, samples(random_samples(12)))
        train_step(algorithm, 0)
        return found

    observe.__name__ = name
    return observe


gradient = gradient_over(list, "gradient")


def after_steps(config: Config, place: Place, steps: int) -> Trainer:
    """The trainer after so many steps of the algorithm."""
    algorithm, _ = grpo_of(config, place)
    for step in range(steps):
        train_step(algorithm, step)
    return algorithm._trainer


def step_metrics(config: Config, place: Place) -> dict[str, float]:
    """What a step reports."""
    metrics = train_step(grpo_of(config, place)[0], 0)
    return {name: value for name, value in metrics.items() if name in ("optimizer_steps", "computed_fraction")}


def sharded_modules(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """The modules that FSDP shards one by one, each with what it keeps of their parameters."""
    modules = [(name, module) for name, module in model.named_modules() if hasattr(module, "_get_fsdp_state")]
    return [(name, module._get_fsdp_state()._fsdp_param_group) for name, module in modules]


@contextmanager
def registered(config: Config, place: Place) -> Iterator[tuple[ServedController, Session]]:
    """A real controller of this job, and a policy replica that has registered with it."""
    run_dir = make_run_dir(place.directory() / "run", config)
    with served_controller(run_dir, place.valkey.url) as served:
        session = Session(Environment(served.url, TOKENS["policy"], "policy-0", None, None), ShutdownRequest(), 1)
        session.register()
        try:
            yield served, session
        finally:
            session.leave("done")


# ---- jobs and models ------------------------------------------------------------------------------------------


def saved(name: str, make: Callable[[], PreTrainedModel]) -> Made:
    """The path of a model that the others' tokenizer fits."""

    def path_of(place: Place) -> str:
        path = place.root / name
        if not path.exists():
            shutil.copytree(place.model, path)
            make().save_pretrained(path)
        return str(path)

    return Made(path_of)


EXPERTS = saved("experts", lambda: tiny_experts(vocabulary=259))
SHARED_EXPERTS = saved("shared experts", lambda: tiny_family("glm4_moe", vocabulary=259))
FOUR_LAYERS = saved("four layers", lambda: tiny_family("llama", layers=4, vocabulary=259))
MODELS = tuple(Made(lambda place, seed=seed: str(write_model(place.directory(), seed))) for seed in (3, 4))
"""Two of the policy's vocabulary."""

open_clip = changed(grpo, under("train", optm_grad_norm_clip=0.0))
unclipped = changed(open_clip, policy(epsilon_low=0.1, epsilon_high=0.1))
WITH_KL = policy(kl_beta=0.5) | {f"{POLICY}.kl_in_reward.beta": 0.5}
both = under(
    "critic",
    enable=True,
    param_dtype="float32",
    model_gradient_checkpointing=False,
    optm_impl="foreach",
    optm_lr=1e-3,
    optm_warmup_steps=0,
)
with_critic = changed(unclipped, both | policy(advantage_estimator="gae"))
SECTIONS = (("train", grpo), ("critic", with_critic))
"""Sections of a trained model, each with a job that has it."""
