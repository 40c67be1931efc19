"""Probes of the trainer: loss and gradient, optimizer and schedule, precision, batches, checkpoints, exports."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from transformers import dynamic_module_utils

from controller.client import Refused
from controller.client import calls as api
from policy_worker.checkpoints.find import Resumption, _resumption, candidates
from policy_worker.checkpoints.layout import look
from policy_worker.checkpoints.load import load, parts_of
from policy_worker.checkpoints.save import Checkpointer
from policy_worker.errors import SettingsError
from policy_worker.memory import offload
from policy_worker.memory.activations import is_kept_on_host, is_recomputed
from policy_worker.memory.offload import local_of
from policy_worker.model.load import load_critic, load_model, load_reference, load_teacher
from policy_worker.model.micro_batch import TrainSample
from policy_worker.model.model import Backbone
from policy_worker.parallel.distribute import distribute
from policy_worker.parallel.experts import apply_ep
from policy_worker.parallel.fsdp import apply_fsdp
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.parallel.pipeline_schedule import Pipe, Tick
from policy_worker.parallel.pipeline_stages import cut
from policy_worker.parallel.tensor import apply_tp
from policy_worker.process import Environment, RankEnvironment, ShutdownRequest
from policy_worker.replicas.base import Alone, Registration
from policy_worker.replicas.exchange import Exchange, Round
from policy_worker.replicas.round import Peers
from policy_worker.session import Session
from policy_worker.trained.critic import Critic
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.model import TrainedModel
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import Batching, micro_batches, plan_step
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.critic import batching_of
from policy_worker.training.grpo import Grpo
from policy_worker.training.loop import Loop
from policy_worker.training.profiles import Profiles
from policy_worker.training.sft import HeldOut, Sft
from policy_worker.training.teacher_client import TeacherClient
from policy_worker.training.teachers import _key
from policy_worker.worker import _algorithm, _seed
from schema.config import Config
from schema.config.layout import mesh_of, ranks_of
from schema.config.rules.mesh import roles_have_the_policys_ranks, stages_take_any_shape
from schema.config.rules.training import TRAINING_RULES
from schema.config.sections.optimizer import PrecisionKeys
from schema.wire import messages as m
from schema.wire.batch_file import folder_of, recorded
from schema.wire.messages.members import MemberReply
from schema.wire.prompts import write_prompts
from schema.wire.sample import Sample
from tests.liveness.probe import UNSET, Made, Place, With, changed, grpo, sft, watch
from tests.policy_worker.checkpoint_material import make_checkpoint, save_state
from tests.policy_worker.material import (
    cut_short,
    encode_step,
    export_whole,
    from_sources,
    random_samples,
    tiny_critic,
    tiny_experts,
    tiny_family,
    tiny_lm,
    tiny_model,
    train_step,
    with_experts,
    with_kept_sets,
    with_shared_prefixes,
    write_model,
)
from tests.support.controller import TOKENS, make_run_dir
from tests.support.served import ServedController, served_controller
from tests.support.teacher_server import TeacherServer, teacher_server
from tests.support.waiting import until

POLICY = "train.train_policy"


# ---- loss and gradient ----------------------------------------------------------------------------------------


def _trainer(config: Config, place: Place) -> Trainer:
    torch.manual_seed(0)
    reference = None
    if config.has_reference:  # another model than the policy's, so that there is a KL
        reference = (
            tiny_model(1) if config.reference.model_name_or_path is None else load_reference(config, tiny_model())
        )
    model = tiny_model(packed=config.train.sequence_packing)
    critic = None
    if config.has_critic:
        critic = Critic(tiny_critic(), config, place.group, Schedule.of_config(config.critic, 40))
    torch.manual_seed(0)
    teachers = {one.name: load_teacher(config, one, model) for one in config.local_teachers}
    return Trainer(model, config, place.group, Schedule(10), reference, critic, teachers)


def gradient_of_alike_beginnings(config: Config, place: Place) -> dict[str, np.ndarray]:
    """The gradient where good and bad answers begin with the same two tokens."""
    algorithm, found = _grpo(config, place, samples=with_shared_prefixes(random_samples(12)))
    train_step(algorithm, 0)
    return found


def gradient_of_short_and_cut(config: Config, place: Place) -> dict[str, np.ndarray]:
    """The gradient where every third answer is ended by the longest one."""
    algorithm, found = _grpo(config, place, samples=cut_short(random_samples(12, n_masked=1)))
    train_step(algorithm, 0)
    return found


def _grpo(
    config: Config, place: Place, world: int = 1, samples: list[Sample] | None = None, trainer: Trainer | None = None
) -> tuple[Grpo, dict[str, np.ndarray]]:
    """The algorithm on twelve fixed samples, and where the gradients of its next step will be."""
    trainer = trainer or _trainer(config, place)
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


def gradient(config: Config, place: Place) -> dict[str, np.ndarray]:
    """The first gradient of a step on fixed samples, before clipping."""
    algorithm, found = _grpo(config, place)
    train_step(algorithm, 0)
    return found


def gradient_of_drawn(config: Config, place: Place) -> dict[str, np.ndarray]:
    """The gradient where samples bring the sets that their tokens were drawn from."""
    algorithm, found = _grpo(config, place, samples=with_kept_sets(random_samples(12)))
    train_step(algorithm, 0)
    return found


def gradient_of_half(config: Config, place: Place) -> dict[str, np.ndarray]:
    """The gradient of the first of two ranks."""
    algorithm, found = _grpo(config, place, world=2)
    train_step(algorithm, 0)
    return found


def step_metrics(config: Config, place: Place) -> dict[str, float]:
    """What a step reports."""
    metrics = train_step(_grpo(config, place)[0], 0)
    return {name: value for name, value in metrics.items() if name in ("optimizer_steps", "computed_fraction")}


unclipped = changed(
    grpo, {"train.optm_grad_norm_clip": 0.0, f"{POLICY}.epsilon_low": 0.1, f"{POLICY}.epsilon_high": 0.1}
)
watch(
    gradient,
    unclipped,
    {
        f"{POLICY}.variant": ("grpo", "gspo"),
        f"{POLICY}.advantage_estimator": ("grpo", "rloo"),
        f"{POLICY}.whiten_advantages": (False, True),
        f"{POLICY}.advantage_clip": (0.1, 0.5),
        f"{POLICY}.temperature": (1.0, 0.7),
        f"{POLICY}.epsilon_low": (0.1, 0.3),
        f"{POLICY}.epsilon_high": (0.1, 0.3),
        f"{POLICY}.positive_nll_coef": (0.1, 0.5),
        f"{POLICY}.lower_bound_ratio": (3.0, 1.05),
        f"{POLICY}.loss_type": ("token-mean", "seq-mean-token-sum"),
        f"{POLICY}.unbiased_advantage": (False, True),
        f"{POLICY}.entropy_coeff": (0.0, 0.1),
        f"{POLICY}.kl_beta": (0.0, 0.1),
        f"{POLICY}.kl_in_reward.beta": (0.0, 0.1),
        "rollout.sampling_config.temperature": (1.0, 0.7),
    },
)
OTHERS = {
    "variant": ("cispo", "geo_mean"),
    "advantage_estimator": (
        "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg", "pass_at_k",
    ),
    "loss_type": ("seq-mean-token-mean", "token-sum"),
    "epsilon_low": (-1.0,),
    "epsilon_high": (-1.0,),
}  # fmt: skip
"""Further values of keys that name a choice, each of which gives another gradient than the first."""
FIRST = {"variant": "grpo", "advantage_estimator": "grpo", "loss_type": "token-mean"}
for name, values in OTHERS.items():
    for value in values:
        watch(gradient, unclipped, {f"{POLICY}.{name}": (FIRST.get(name, 0.1), value)})
for value in ("reinforce", "sapo"):  # which have no ratio to clip
    watch(gradient, changed(grpo, {"train.optm_grad_norm_clip": 0.0}), {f"{POLICY}.variant": ("grpo", value)})
SAMPLING = "rollout.sampling_config"
watch(
    gradient_of_drawn,
    unclipped,
    {
        f"{SAMPLING}.top_k": (-1, 20),
        f"{SAMPLING}.top_p": (1.0, 0.9),
        f"{SAMPLING}.min_p": (0.0, 0.1),
        f"{SAMPLING}.repetition_penalty": (1.0, 1.2),
        f"{SAMPLING}.presence_penalty": (0.0, 0.5),
        f"{SAMPLING}.frequency_penalty": (0.0, 0.5),
        f"{SAMPLING}.min_tokens": (0, 3),
    },
)
watch(
    gradient_of_drawn,
    changed(unclipped, {f"{SAMPLING}.top_k": 20}),
    {f"{SAMPLING}.sampling_correction": ("exact", "raw")},
)
watch(
    gradient,
    changed(unclipped, {f"{POLICY}.loss_type": "seq-mean-token-mean"}),
    {f"{POLICY}.unbiased_loss_max_tokens": (17, 5)},
)
watch(gradient, changed(grpo, {"train.optm_grad_norm_clip": 0.0}), {f"{POLICY}.aipo_rho": (1.05, 1.2)})
watch(
    gradient,
    changed(unclipped, {f"{POLICY}.use_decoupled_loss": True}),
    {f"{POLICY}.use_decoupled_loss": (True, False), f"{POLICY}.behav_imp_weight_cap": (1.1, 1.5)},
)
correction = f"{POLICY}.rollout_correction"
watch(
    gradient,
    changed(unclipped, {f"{correction}.weights": "token"}),
    {f"{correction}.weights": ("token", "sequence"), f"{correction}.cap": (1.1, 1.5)},
)
watch(
    gradient,
    changed(unclipped, {f"{correction}.reject": "token", f"{correction}.reject_above": 1.2}),
    {
        f"{correction}.reject": ("token", "sequence"),
        f"{correction}.reject_below": (UNSET, 0.8),
        f"{correction}.reject_above": (1.1, 1.4),
        f"{correction}.off_policy_mask": (UNSET, 0.01),
    },
)
MADE = tuple(Made(lambda place, seed=seed: str(write_model(place.directory(), seed))) for seed in (3, 4))
"""Models of the policy's vocabulary."""
with_kl = {f"{POLICY}.kl_beta": 0.5, f"{POLICY}.kl_in_reward.beta": 0.5}
watch(
    gradient,
    changed(unclipped, with_kl),
    {
        f"{POLICY}.kl_type": ("k3", "full"),
        f"{POLICY}.unbiased_kl_estimate": (False, True),
        f"{POLICY}.kl_in_reward.type": ("k1", "k2"),
        "reference.model_name_or_path": MADE,
    },
)


def with_teacher(place: Place, **keys: Any) -> dict[str, Any]:
    data = unclipped(place)
    data["policy"]["model_name_or_path"] = str(write_model(place.directory(), 0))
    data["teacher"] = [{"name": "one", "model": str(write_model(place.directory(), 3)), **keys}]
    return data


def teacher_by_advantage(place: Place) -> dict[str, Any]:
    return with_teacher(place)


def teacher_by_divergence(place: Place) -> dict[str, Any]:
    return with_teacher(place, loss="top_k_jsd", top_k=3)


def gradient_of_sources(config: Config, place: Place) -> dict[str, np.ndarray]:
    """The gradient where the prompts of each group are of another source."""
    algorithm, found = _grpo(config, place, samples=from_sources(random_samples(12), ["math", "code"]))
    train_step(algorithm, 0)
    return found


watch(gradient, teacher_by_advantage, {"teacher.model": MADE, "teacher.weight": (1.0, 0.5)})
watch(gradient_of_sources, teacher_by_advantage, {"teacher.source": (["math"], ["math", "code"])})
watch(
    gradient,
    teacher_by_divergence,
    {
        "teacher.loss": ("top_k_jsd", With("reverse_kl_k2", {"teacher.top_k": 20})),
        "teacher.top_k": (3, 7),
        "teacher.beta": (0.5, 0.2),
    },
)


def teacher_metrics(config: Config, place: Place) -> list[str]:
    """Names of the metrics that speak of teachers."""
    return sorted(name for name in train_step(_grpo(config, place)[0], 0) if name.startswith("teacher/"))


watch(teacher_metrics, teacher_by_advantage, {"teacher.name": ("one", "two")})


def place_of_a_teacher(config: Config, place: Place) -> list[str]:
    """Where FSDP keeps the weights of a teacher between its passes; nothing where it does not shard it."""
    (model,) = _trainer(config, place).teachers.values()
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    return [type(state._fsdp_param_group.offload_policy).__name__ for state in states]


watch(place_of_a_teacher, teacher_by_advantage, {"teacher.offload": (False, True)})


def request_to_a_teacher(config: Config, place: Place) -> list[Any]:
    """Which server is asked, for which model, with which key, and whether an answer after a while is waited for."""
    (teacher,) = config.teacher
    samples = {0: TrainSample.of_wire(random_samples(1)[0])}
    port = teacher.url.rpartition(":")[2]
    server, found = _teacher_servers(place)[int(port)], []
    server.seen, server.fault, server.delay = [], "slow", 0.5
    with patch.dict(os.environ, {"KEY_A": "a", "KEY_B": "b"}):
        client = TeacherClient(teacher, 61, _key(teacher))
        client.ask(samples)
        until(lambda: client.advance(0.05) or client.is_done or client.trouble, "an answer or a time-out")
        found = [port, client.is_done, *((body["model"], key) for body, key in server.seen[:1])]
        client.close()
    server.fault = ""
    return found


def _teacher_servers(place: Place) -> dict[int, TeacherServer]:
    if not hasattr(place, "teacher_servers"):
        place.teacher_servers = {}
        for _ in range(2):
            server = place.stack.enter_context(teacher_server(tiny_lm(3)))
            place.teacher_servers[server.port] = server
    return place.teacher_servers


def _address(number: int) -> Made:
    return Made(lambda place: list(_teacher_servers(place).values())[number].url)


def with_server(place: Place) -> dict[str, Any]:
    data = unclipped(place)
    data["teacher"] = [{"name": "far", "url": _address(0).make(place), "served_model": "a"}]
    return data


watch(
    request_to_a_teacher,
    with_server,
    {
        "teacher.url": (_address(0), _address(1)),
        "teacher.served_model": ("a", "b"),
        "teacher.key_variable": ("KEY_A", "KEY_B"),
        "teacher.timeout": (60.0, 0.1),
    },
)


def after_two_steps(config: Config, place: Place) -> tuple[float, int, float]:
    """A sum of the reference model's weights, steps in the optimizer's state, the coefficient of the KL."""
    algorithm, _ = _grpo(config, place)
    for step in range(2):
        train_step(algorithm, step)
    trainer = algorithm._trainer
    weights = sum(float(p.double().abs().sum()) for p in trainer.reference.parameters())
    (counted, *_) = (int(slots["step"]) for slots in trainer.optimizer.optimizers[0].state.values())
    return weights, counted, trainer.kl_coefficient


resets = changed(unclipped, {**with_kl, "train.optm_lr": 1e-3, "train.optm_warmup_steps": 0})
watch(after_two_steps, resets, {f"{POLICY}.reference_reset_interval": (UNSET, 1)})
watch(
    after_two_steps,
    changed(resets, {f"{POLICY}.reference_reset_interval": 1}),
    {f"{POLICY}.reset_optimizer_with_reference": (True, False)},
)
adaptive = {
    f"{POLICY}.kl_in_reward.controller": "adaptive",
    f"{POLICY}.kl_in_reward.target": 1e-4,
    f"{POLICY}.kl_in_reward.horizon": 100,
}
watch(
    after_two_steps,
    changed(resets, adaptive),
    {f"{POLICY}.kl_in_reward.target": (1e-4, 10.0), f"{POLICY}.kl_in_reward.horizon": (100, 1000)},
)
watch(after_two_steps, resets, {f"{POLICY}.kl_in_reward.controller": ("fixed", "adaptive")})


def place_of_the_reference(config: Config, place: Place) -> list[str]:
    """Where FSDP keeps the weights of the reference model between its passes; nothing where it does not shard it."""
    model = _trainer(config, place).reference
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    return [type(state._fsdp_param_group.offload_policy).__name__ for state in states]


watch(place_of_the_reference, changed(unclipped, with_kl), {"reference.offload": (False, True)})
returns = {f"{POLICY}.advantage_estimator": "reinforce_plus_plus", f"{POLICY}.whiten_advantages": False}
watch(
    gradient,
    changed(unclipped, returns),
    {
        f"{POLICY}.gamma": (1.0, 0.9),
        f"{POLICY}.reward_shaping.center": ("none", "group"),
        f"{POLICY}.reward_shaping.scale": ("none", "group"),
        f"{POLICY}.reward_shaping.clip": (0.1, 0.5),
    },
)
watch(gradient_of_alike_beginnings, unclipped, {f"{POLICY}.min_filter_prefix_tokens": (UNSET, 2)})
watch(
    gradient_of_short_and_cut,
    unclipped,
    {
        f"{POLICY}.sample_masks.truncated": (False, True),
        f"{POLICY}.sample_masks.mean_score_above": (UNSET, 0.5),
        f"{POLICY}.sample_masks.mean_score_below": (UNSET, 0.75),
        f"{POLICY}.sample_masks.failed_from_tokens": (UNSET, 4),
    },
)
watch(
    gradient_of_half, changed(unclipped, {f"{POLICY}.mini_batch": 12}), {f"{POLICY}.balance_dp_token": (False, True)}
)
watch(step_metrics, grpo, {"train.metrics_of_all_samples": (False, True)})
watch(step_metrics, grpo, {f"{POLICY}.mu_iterations": (1, 2), f"{POLICY}.batch_size_per_optimize": (8, 4)})

# ---- recorded batches -----------------------------------------------------------------------------------------


def batches_on_disk(config: Config, place: Place) -> list[int]:
    """Of four steps that were trained, those whose batches a replay would find."""
    with _registered(config, place) as (_, session):
        registration = Registration(config, session.reply, _trainer(config, place), session, ShutdownRequest())
        algorithm = _algorithm(registration, session, Alone())
        assert isinstance(algorithm, Grpo)
        samples = random_samples(12)
        algorithm._source._call = lambda call: encode_step(samples, step=int(call.path.split("/")[3]))
        for step in range(4):
            train_step(algorithm, step)
        return recorded(folder_of(Path(session.reply.run_dir)))


watch(batches_on_disk, grpo, {"profiler.record_batches": (0, 3)})

# ---- micro-batches --------------------------------------------------------------------------------------------


def rows_of_micro_batches(config: Config, place: Place) -> list[list[int]]:
    """How twelve samples are cut."""
    lengths = [int(sample.header.total_tokens) for sample in random_samples(12)]
    return micro_batches(list(range(12)), lengths, Batching.of_config(config))


def rows_of_optimizer_steps(config: Config, place: Place) -> list[list[int]]:
    """Which of twelve samples each optimizer step trains on."""
    plan = plan_step([10] * 12, [True] * 12, Batching.of_config(config), data_ranks=1, step=3)
    return [mini_batch.rows for mini_batch in plan]


def shape_of_a_micro_batch(config: Config, place: Place) -> list[int]:
    """Rows and columns of two samples side by side."""
    samples = {row: TrainSample.of_wire(sample) for row, sample in enumerate(random_samples(2))}
    return list(next(_trainer(config, place).micro_batches(samples, [[0, 1]])).input_ids.shape)


watch(rows_of_micro_batches, sft, {f"{POLICY}.mini_batch": (2, 3)})
watch(
    rows_of_micro_batches,
    changed(grpo, {"policy.model_max_length": 24}),
    {f"{POLICY}.mini_batch": (2, 3), f"{POLICY}.max_token_len_per_mini_batch": (24, 48)},
)


def _four_layers(place: Place) -> str:
    """A model that the others' tokenizer fits."""
    path = place.root / "four layers"
    if not path.exists():
        shutil.copytree(place.model, path)
        tiny_family("llama", layers=4, vocabulary=259).save_pretrained(path)
    return str(path)


of_stages = changed(
    grpo,
    {"policy.parallelism.pp_size": 2, f"{POLICY}.mini_batch": 4, "policy.model_name_or_path": Made(_four_layers)},
)


def layers_of_a_rank(config: Config, place: Place) -> list[str]:
    """What a rank has of a model of four layers."""
    model, pipe = load_model(config), Pipe.of_config(config.policy.parallelism)
    cut(model, 0, pipe.ranks, pipe.chunks)
    return list(model.state_dict())


def order_of_work(config: Config, place: Place) -> list[Tick]:
    """Of four micro-batches."""
    return Pipe.of_config(config.policy.parallelism).schedule(4)


watch(rows_of_micro_batches, of_stages, {"policy.parallelism.pp_micro_batch_size": (1, 2)})
watch(layers_of_a_rank, of_stages, {"policy.parallelism.virtual_pp_size": (1, 2)})
watch(order_of_work, of_stages, {"policy.parallelism.pp_schedule": ("1F1B", "GPipe")})


def samples_of_passes(config: Config, place: Place) -> list[int]:
    """How many samples the micro-batches have that models see without training on them."""
    trainer, seen = (algorithm := _grpo(config, place)[0])._trainer, []
    for model in (trainer.model, trainer.reference, *trainer.teachers.values()):
        if model is not None:
            model.register_forward_pre_hook(
                lambda _, given: None if torch.is_grad_enabled() else seen.append(given[0].n_samples)
            )
    train_step(algorithm, 0)
    return seen


watch(
    rows_of_optimizer_steps,
    changed(grpo, {f"{POLICY}.batch_size_per_optimize": 4, f"{POLICY}.mini_batch_shuffle": True}),
    {f"{POLICY}.mini_batch_shuffle": (True, False), f"{POLICY}.mini_batch_shuffle_seed": (UNSET, 8)},
)
watch(
    samples_of_passes,
    changed(grpo, {f"{POLICY}.use_decoupled_loss": True, "policy.model_max_length": 24}),
    {f"{POLICY}.old_log_prob.mini_batch": (2, 3), f"{POLICY}.old_log_prob.max_token_len_per_mini_batch": (24, 48)},
)
watch(
    samples_of_passes,
    changed(grpo, {f"{POLICY}.kl_beta": 0.5, "policy.model_max_length": 24}),
    {"reference.mini_batch": (2, 3), "reference.max_token_len_per_mini_batch": (24, 48)},
)


def short_teacher(place: Place) -> dict[str, Any]:
    data = teacher_by_advantage(place)
    data["policy"]["model_max_length"] = 24
    return data


watch(
    samples_of_passes, short_teacher, {"teacher.mini_batch": (2, 3), "teacher.max_token_len_per_mini_batch": (24, 48)}
)
watch(shape_of_a_micro_batch, grpo, {"train.sequence_packing": (False, True)})

# ---- optimizer and schedule -----------------------------------------------------------------------------------


def optimizer_settings(config: Config, place: Place) -> list[dict[str, Any]]:
    """What torch's optimizers are made with, the policy's and the critic's."""
    names = ("lr", "betas", "eps", "weight_decay", "fused", "foreach", "momentum")
    return [
        {
            type(optimizer).__name__: {name: group.get(name) for group in optimizer.param_groups for name in names}
            for optimizer in trained.optimizer.optimizers
        }
        for trained in _trained(config, place)
    ]


def _trained(config: Config, place: Place) -> list[TrainedModel]:
    trainer = _trainer(config, place)
    trainer.schedule = Schedule.of_config(config.train, 40)
    return [trainer, trainer.critic] if trainer.critic else [trainer]


def weight_decays(config: Config, place: Place) -> list[float]:
    """The weight decay of each of three steps, of the policy and of the critic."""
    seen = []
    for trained in _trained(config, place):
        (optimizer,) = trained.optimizer.optimizers
        for step in (0, 10, 30):
            trained.step(step)
            seen.append(optimizer.param_groups[0]["weight_decay"])
    return seen


def applied_norm(config: Config, place: Place) -> float:
    """The norm of the gradients that the optimizer gets."""
    found = gradient(config, place)
    return float(np.sqrt(sum(float((value**2).sum()) for value in found.values())))


def learning_rates(config: Config, place: Place) -> list[float]:
    """The rate of each of forty steps, of the policy and of the critic."""
    return [trained.lr(step) for trained in _trained(config, place) for step in range(40)]


def weights_of_the_critic(config: Config, place: Place) -> dict[str, np.ndarray]:
    """What two steps make of it."""
    algorithm, _ = _grpo(config, place)
    for step in range(2):
        train_step(algorithm, step)
    named = algorithm._trainer.critic.model.named_parameters()
    return {name: p.detach().cpu().numpy().copy() for name, p in named}


watch(applied_norm, grpo, {"train.optm_grad_norm_clip": (0.5, 0.01)})
both = {
    "critic.enable": True,
    f"{POLICY}.advantage_estimator": "gae",
    "critic.param_dtype": "float32",
    "critic.model_gradient_checkpointing": False,
    "critic.optm_impl": "foreach",
    "critic.optm_lr": 1e-3,
    "critic.optm_warmup_steps": 0,
}
with_critic = changed(unclipped, both)
watch(weights_of_the_critic, with_critic, {"critic.optm_grad_norm_clip": (0.5, 0.01)})
for section, job in (("train", grpo), ("critic", with_critic)):
    watch(
        optimizer_settings,
        job,
        {
            f"{section}.optm_lr": (1e-3, 1e-4),
            f"{section}.optm_impl": ("foreach", "for-loop"),
            f"{section}.optm_weight_decay": (0.01, 0.1),
            f"{section}.optm_betas": ([0.9, 0.999], [0.8, 0.95]),
            f"{section}.epsilon": (1e-6, 1e-8),
            f"{section}.optm_name": ("AdamW", "Muon"),
        },
    )
    descent = changed(job, {f"{section}.optm_name": "SGD"})
    watch(optimizer_settings, descent, {f"{section}.optm_momentum": (UNSET, 0.9)})
    ramping = changed(job, {f"{section}.optm_weight_decay_ramp": "linear"})
    watch(weight_decays, ramping, {f"{section}.optm_weight_decay_ramp": ("linear", "cosine")})
    watch(weight_decays, ramping, {f"{section}.optm_weight_decay_start": (UNSET, 0.005)})
    rates = {f"{section}.optm_warmup_steps": (0, 5), f"{section}.optm_lr": (1e-3, 1e-4)}
    watch(learning_rates, job, rates)
    watch(
        learning_rates,
        changed(job, {f"{section}.optm_decay_ratio": 0.5, f"{section}.optm_decay_type": "linear"}),
        {
            f"{section}.optm_decay_ratio": (0.5, 0.25),
            f"{section}.optm_decay_type": ("linear", "cosine"),
            f"{section}.optm_min_lr_factor": (0.0, 0.2),
        },
    )
    stepwise = {f"{section}.optm_decay_steps": 8, f"{section}.optm_decay_type": "cosine"}
    watch(
        learning_rates,
        changed(job, stepwise),
        {f"{section}.optm_decay_steps": (8, 16), f"{section}.optm_num_cycles": (0.5, 1.5)},
    )
    watch(
        learning_rates,
        changed(job, stepwise | {f"{section}.optm_decay_type": "wsd"}),
        {f"{section}.optm_wsd_decay_type": ("linear", "exponential")},
    )
    watch(
        learning_rates,
        changed(job, {f"{section}.optm_warmup_steps": 5}),
        {f"{section}.optm_warmup_start_factor": (0.0, 0.3)},
    )

# ---- model and precision --------------------------------------------------------------------------------------


def loaded_model(config: Config, place: Place) -> tuple[str, bool, float, float]:
    """Type, recomputation, a weight and an entry of the configuration of the model that is trained."""
    lm = load_model(config).read_weights(torch.device("cpu")).lm
    weight = next(iter(lm.parameters()))
    value = weight.detach().flatten()[0].item()
    return str(weight.dtype), lm.is_gradient_checkpointing, value, lm.config.rms_norm_eps


def modules_of_the_trainer(config: Config, place: Place) -> bool:
    """Whether loading the model has imported a user's module."""
    sys.modules.pop(USER_MODULE, None)
    load_model(config)
    return USER_MODULE in sys.modules


def weights_that_move(config: Config, place: Place) -> list[str]:
    """Which weights of the policy and of the critic, as they are loaded, two steps change."""
    model = load_model(config)
    critic = None
    if config.has_critic:
        schedule = Schedule.of_config(config.critic, 40)
        critic = Critic(load_critic(config, model), config, place.group, schedule)
    trainer = Trainer(model, config, place.group, Schedule(10), critic=critic)
    trained = [trainer.model, *([trainer.critic.model] if trainer.critic else [])]
    before = [{name: p.detach().clone() for name, p in one.named_parameters()} for one in trained]
    algorithm, _ = _grpo(config, place, trainer=trainer)
    for step in range(2):
        train_step(algorithm, step)
    return [
        f"{type(one).__name__}.{name}"
        for one, old in zip(trained, before, strict=True)
        for name, p in one.named_parameters()
        if not torch.equal(p, old[name])
    ]


def _experts(place: Place) -> str:
    """A tiny mixture of experts that the other models' tokenizer fits."""
    path = place.root / "experts"
    if not path.exists():
        shutil.copytree(place.model, path)
        tiny_experts(vocabulary=259).save_pretrained(path)
    return str(path)


watch(weights_that_move, grpo, {"policy.trainable_map": (UNSET, {"model.layers.0.mlp": False})})
of_experts = {"policy.model_name_or_path": Made(_experts)}
watch(weights_that_move, changed(grpo, of_experts), {"policy.freeze_moe_router": (False, True)})
watch(weights_that_move, changed(with_critic, of_experts), {"critic.freeze_moe_router": (False, True)})


def gradient_of_routed(config: Config, place: Place) -> dict[str, np.ndarray]:
    """The gradient of a mixture where samples bring the experts that their engine chose."""
    trainer = Trainer(load_model(config), config, place.group, Schedule(10))
    samples = with_experts(random_samples(12), 2, 4)
    algorithm, found = _grpo(config, place, samples=samples, trainer=trainer)
    metrics = train_step(algorithm, 0)
    return found | {"differs": np.array(metrics.get("routing/differs", -1.0))}


watch(gradient_of_routed, changed(grpo, of_experts), {f"{POLICY}.routing_replay": ("none", "ids")})
watch(gradient_of_routed, changed(grpo, of_experts), {f"{POLICY}.routing_replay": ("ids", "weights")})


def implementation_of_experts(config: Config, place: Place) -> str:
    """How transformers computes the experts of the policy."""
    return str(load_model(config).lm.config._experts_implementation)


def held_experts(config: Config, place: Place) -> int:
    """By how many ranks the experts of a layer are shared where a replica has two."""
    return ParallelDims.of_config(config.policy.parallelism, 2).ep


def exchanges_of_layers(config: Config, place: Place) -> int:
    """How often sums are scattered over tensor-parallel ranks, of which a replica has two, in a forward of one."""
    model, sizes = load_model(config), ParallelDims.of_config(config.policy.parallelism, 2)
    mesh = init_device_mesh(place.group.device.type, (1,), mesh_dim_names=("tp",))
    apply_tp(model, mesh, config.policy.dispatcher if sizes.sequence else None)
    model.read_weights(place.group.device)
    exchange = torch.distributed.reduce_scatter_single
    with patch.object(torch.distributed, "reduce_scatter_single", wraps=exchange) as seen:
        model.lm.base_model(input_ids=torch.arange(3, 8)[None])
    return seen.call_count


watch(
    exchanges_of_layers,
    changed(grpo, {"policy.parallelism.tp_size": 2}),
    {"policy.parallelism.sequence_parallel": (False, True)},
)


def exchanges_of_experts(config: Config, place: Place) -> int:
    """How often tokens travel in a forward of a model whose experts are spread."""
    model = load_model(config)
    mesh = init_device_mesh(place.group.device.type, (1,), mesh_dim_names=("ep",))
    apply_ep(model, mesh, config.policy.dispatcher)
    model.read_weights(place.group.device)
    exchange = torch.distributed.all_to_all_single
    with patch.object(torch.distributed, "all_to_all_single", wraps=exchange) as seen:
        model.lm(input_ids=torch.arange(3, 8)[None])
    return seen.call_count


def order_of_experts(config: Config, place: Place) -> list[str]:
    """When a shared expert computes, and the layer of experts next to it."""
    model = load_model(config)
    mesh = init_device_mesh(place.group.device.type, (1,), mesh_dim_names=("ep",))
    apply_ep(model, mesh, config.policy.dispatcher)
    model.read_weights(place.group.device)
    layer, order = model.lm.model.layers[1].mlp, list[str]()
    for name in ("experts", "shared_experts"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name))
    model.lm(input_ids=torch.arange(3, 8)[None])
    return order


def _shared_experts(place: Place) -> str:
    """A tiny mixture with a shared expert that the other models' tokenizer fits."""
    path = place.root / "shared experts"
    if not path.exists():
        shutil.copytree(place.model, path)
        tiny_family("glm4_moe", vocabulary=259).save_pretrained(path)
    return str(path)


watch(implementation_of_experts, changed(grpo, of_experts), {"policy.moe_grouped_gemm": (False, True)})
two_shards = {"policy.parallelism.dp_shard_size": 2}
watch(held_experts, changed(grpo, of_experts | two_shards), {"policy.parallelism.ep_size": (1, 2)})
two_of_experts = of_experts | two_shards | {"policy.parallelism.ep_size": 2}
watch(exchanges_of_experts, changed(grpo, two_of_experts), {"policy.moe_token_dispatcher": ("alltoall", "allgather")})

watch(
    order_of_experts,
    changed(grpo, two_of_experts | {"policy.model_name_or_path": Made(_shared_experts)}),
    {"policy.moe_shared_expert_overlap": (False, True)},
)

# ---- meshes of other models ------------------------------------------------------------------------------------


def _role(config: Config) -> str:
    """The model next to the policy that this job has."""
    return "critic" if config.has_critic else "reference"


def ranks_of_a_role(config: Config, place: Place) -> ParallelDims:
    """Of the reference model or the critic, as ranks by dimension."""
    mesh = mesh_of(config, _role(config))
    return ParallelDims.of_config(mesh, ranks_of(mesh) or 4, "its section")


def layers_of_a_role(config: Config, place: Place) -> list[str]:
    """What a rank has of a reference model or critic of four layers."""
    policy, pipe = load_model(config), Pipe.of_config(mesh_of(config, _role(config)))
    model: Backbone = (load_critic if config.has_critic else load_reference)(config, policy)
    cut(model, 0, pipe.ranks, pipe.chunks)
    return list(model.state_dict())


def work_of_a_role(config: Config, place: Place) -> list[Tick]:
    """Of four micro-batches."""
    return Pipe.of_config(mesh_of(config, _role(config))).schedule(4)


def batches_of_a_role(config: Config, place: Place) -> list[list[int]]:
    """How its micro-batches of twelve samples are cut."""
    batching = Batching.of_config(config, config.reference.parallelism)
    if config.has_critic:
        batching = batching_of(config, Batching.of_config(config))
    return micro_batches(list(range(12)), [10] * 12, batching)


def faults_of_a_mesh(config: Config, place: Place) -> list[str]:
    """Keys that the mesh of a model next to the policy cannot have."""
    rules = (stages_take_any_shape, roles_have_the_policys_ranks)
    return [problem.key for rule in rules for problem in rule(config)]


for role, on in (
    ("reference", {f"{POLICY}.kl_beta": 0.1}),
    ("critic", {f"{POLICY}.advantage_estimator": "gae", "critic.enable": True, "critic.mini_batch": 4}),
):
    mesh = f"{role}.parallelism"
    sizes = ("tp_size", "cp_size", "ep_size", "pp_size", "dp_replicate_size")
    open_ = on | {"policy.parallelism.dp_shard_size": -1, mesh: {"tp_size": 1, "dp_shard_size": -1}}
    watch(
        ranks_of_a_role,
        changed(grpo, open_ | of_experts),
        {f"{mesh}.{size}": (1, 2) for size in sizes} | {f"{mesh}.dp_shard_size": (2, 4)},
    )
    watch(
        ranks_of_a_role,
        changed(grpo, open_ | {mesh: {"tp_size": 2, "dp_shard_size": -1}}),
        {f"{mesh}.sequence_parallel": (False, True)},
    )
    two = on | {"policy.parallelism.dp_shard_size": 2, mesh: {"tp_size": 1, "pp_size": 2}}
    staged = changed(grpo, two | {f"{POLICY}.mini_batch": 4, "policy.model_name_or_path": Made(_four_layers)})
    watch(layers_of_a_role, staged, {f"{mesh}.virtual_pp_size": (1, 2)})
    watch(work_of_a_role, staged, {f"{mesh}.pp_schedule": ("1F1B", "GPipe")})
    watch(batches_of_a_role, staged, {f"{mesh}.pp_micro_batch_size": (1, 2)})
    refusals = {"pp_dynamic_shape": (True, False), "n_init_replicas": (1, 2)}
    watch(faults_of_a_mesh, staged, {f"{mesh}.{n}": v for n, v in refusals.items()}, refused=True)


ADAPTERS = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}


def adapters(config: Config, place: Place) -> dict[str, tuple[float, ...]]:
    """What trains in the policy, the critic and what their adapters add; by name, its size, sum and scale."""
    random.seed(0)
    torch.manual_seed(0)
    model = load_model(config)
    models = [model, load_critic(config, model)] if config.has_critic else [model]
    found = {}
    for one in models:
        one.read_weights(torch.device("cpu"))
        for name, parameter in one.named_parameters():
            if parameter.requires_grad:
                total = float(parameter.detach().double().abs().sum())
                found[f"{type(one).__name__}.{name}"] = (*parameter.shape, total)
        for name, module in one.named_modules():
            if hasattr(module, "lora_A"):
                found[f"{type(one).__name__}.{name}"] = (module.scaling["default"],)
    return found


def loss_with_adapters(config: Config, place: Place) -> list[float]:
    """The loss of a step of the policy, or of its critic, whose adapters begin at random."""
    random.seed(0)
    torch.manual_seed(0)
    model, critic = load_model(config), None
    if config.has_critic:
        values = load_critic(config, model)
        torch.nn.init.normal_(values.value_head)
        critic = Critic(values, config, place.group, Schedule.of_config(config.critic, 40))
    trainer = Trainer(model, config, place.group, Schedule(10), critic=critic)
    metrics = train_step(_grpo(config, place, trainer=trainer)[0], 0)
    return [metrics["loss"], metrics.get("critic/loss", 0.0)]


for section, job in (("policy", grpo), ("critic", with_critic)):
    with_adapters = changed(job, {f"{section}.lora": ADAPTERS})
    watch(
        adapters,
        with_adapters,
        {
            f"{section}.lora.r": (4, 2),
            f"{section}.lora.lora_alpha": (8.0, 4.0),
            f"{section}.lora.target_modules": (["q_proj"], "all-linear"),
            f"{section}.lora.use_rslora": (False, True),
            f"{section}.lora.use_dora": (False, True),
            f"{section}.lora.modules_to_save": (UNSET, ["norm"]),
            f"{section}.lora.alpha_pattern": (UNSET, {".*q_proj": 2.0}),
            f"{section}.lora.r_pattern": (UNSET, {r"layers\.0.*": 2}),
            f"{section}.lora.init_lora_weights": (False, "pissa"),
        },
    )
    watch(loss_with_adapters, with_adapters, {f"{section}.lora.lora_dropout": (0.0, 0.5)})

USER_MODULE = "tabnanny"  # of the standard library, and imported by nobody
watch(modules_of_the_trainer, grpo, {"policy.external_modules": ([], [USER_MODULE])})


def loaded_critic(config: Config, place: Place) -> tuple[object, ...]:
    """Class, type, recomputation, a weight and an entry of the configuration of the critic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(place.root / "modules"))
        patch.setattr(sys, "path", list(sys.path))
        lm = load_critic(config, load_model(config)).read_weights(torch.device("cpu")).lm
    weight = next(iter(lm.parameters()))
    facts = str(weight.dtype), lm.is_gradient_checkpointing, weight.detach().flatten()[0].item()
    return type(lm).__name__, *facts, lm.config.rms_norm_eps


def modules_of_the_critic(config: Config, place: Place) -> bool:
    """Whether loading the critic has imported a user's module."""
    sys.modules.pop(USER_MODULE, None)
    load_critic(config, load_model(config))
    return USER_MODULE in sys.modules


CRITIC_WITH_CODE = """
from transformers import Qwen3Model

class OwnModel(Qwen3Model):
    pass
"""


def _critic_with_code(place: Place) -> Path:
    """A model whose class is in a file of its own directory."""
    path = place.tiny_model("own-critic", 3)
    (path / "own_critic.py").write_text(CRITIC_WITH_CODE)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModel": "own_critic.OwnModel"}}))
    return path


watch(
    loaded_critic,
    with_critic,
    {
        "critic.master_dtype": ("float32", "bfloat16"),
        "critic.override_config": ({}, {"rms_norm_eps": 0.1}),
        "critic.model_gradient_checkpointing": (False, True),
        "critic.model_name_or_path": (UNSET, Made(lambda p: str(p.other_model))),
    },
)
watch(
    loaded_critic,
    changed(with_critic, {"critic.model_name_or_path": Made(lambda place: str(_critic_with_code(place)))}),
    {"critic.trust_remote_code": (False, True)},
)
watch(modules_of_the_critic, with_critic, {"critic.external_modules": ([], [USER_MODULE])})
watch(
    weights_of_the_critic,
    changed(with_critic, {f"{POLICY}.whiten_advantages": False}),
    {
        "critic.loss_type": ("token-mean", "seq-mean-token-mean"),
        "critic.mu_iterations": (1, 2),
        "critic.batch_size_per_optimize": (UNSET, 4),
    },
)
watch(
    weights_of_the_critic,
    changed(with_critic, {"critic.mu_iterations": 3, "critic.batch_size_per_optimize": 4}),
    {"critic.value_clip": (0.5, 0.001), "critic.mini_batch_shuffle": (False, True)},
)
watch(gradient, changed(with_critic, {f"{POLICY}.whiten_advantages": False}), {f"{POLICY}.gae_lambda": (1.0, 0.5)})
watch(step_metrics, with_critic, {"critic.warmup_steps": (0, 1)})
watch(gradient, with_critic, {"critic.enable": (True, With(False, {f"{POLICY}.advantage_estimator": "grpo"}))})


def samples_of_the_critic(config: Config, place: Place) -> list[tuple[bool, int]]:
    """Samples of each of its micro-batches, and whether they are trained on."""
    seen, algorithm = [], _grpo(config, place)[0]
    algorithm._trainer.critic.model.register_forward_pre_hook(
        lambda _, given: seen.append((torch.is_grad_enabled(), given[0].n_samples))
    )
    train_step(algorithm, 0)
    return seen


watch(
    samples_of_the_critic,
    changed(with_critic, {"policy.model_max_length": 24}),
    {
        "critic.mini_batch": (2, 3),
        "critic.max_token_len_per_mini_batch": (24, 48),
        "critic.forward_mini_batch": (UNSET, 3),
    },
)


def nothing(config: Config, place: Place) -> dict[str, Any]:
    """What is refused before anybody reads it."""
    return config.critic.model_dump()


def _renamed_tokenizer(place: Place) -> Path:
    """A tokenizer one of whose tokens is another than the policy's."""
    path = place.root / "renamed-tokenizer"
    if not path.exists():
        shutil.copytree(place.model, path)
        file = path / "tokenizer.json"
        file.write_text(file.read_text().replace("<|im_start|>", "<|begin|>"))
    return path


watch(
    nothing,
    with_critic,
    {"critic.tokenizer_name_or_path": (UNSET, Made(lambda place: str(_renamed_tokenizer(place))))},
    refused=True,
)
watch(
    nothing,
    changed(with_critic, {"critic.model_name_or_path": Made(lambda place: str(place.other_model))}),
    {"critic.model_revision": (UNSET, "v2")},
    refused=True,
)


def sharding_of_the_critic(config: Config, place: Place) -> list[tuple[str, str, bool]]:
    """How FSDP treats each of its modules, as `sharding`."""
    return _sharded(tiny_critic(), config.critic, place)


def sharding(config: Config, place: Place) -> list[tuple[str, str, bool]]:
    """How FSDP treats each of its modules: type of parameters, type of the reduction, sharded after forward."""
    return _sharded(tiny_model(), config.train, place)


def _sharded(model: Backbone, keys: PrecisionKeys, place: Place) -> list[tuple[str, str, bool]]:
    model = apply_fsdp(model, place.group.mesh(), keys)
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    groups = [state._fsdp_param_group for state in states]
    return [
        (str(one.mp_policy.param_dtype), str(one.mp_policy.reduce_dtype), one.post_forward_mesh_info is not None)
        for one in groups
    ]


watch(
    loaded_model,
    grpo,
    {
        "train.master_dtype": ("float32", "bfloat16"),
        "policy.model_gradient_checkpointing": (False, True),
        "policy.model_name_or_path": (Made(lambda p: str(p.model)), Made(lambda p: str(p.other_model))),
        "policy.override_config": ({}, {"rms_norm_eps": 0.1}),
    },
)
for section, observe, job in (("train", sharding, grpo), ("critic", sharding_of_the_critic, with_critic)):
    watch(
        observe,
        job,
        {
            f"{section}.param_dtype": ("bfloat16", "float16"),
            f"{section}.fsdp_reduce_dtype": ("float32", "bfloat16"),
            f"{section}.fsdp_reshard_after_forward": ("default", "never"),
        },
    )


# ---- memory ---------------------------------------------------------------------------------------------------


def _units(model: Backbone, keys: PrecisionKeys, place: Place) -> list[tuple[str, str]]:
    """What FSDP shards one by one, and where it keeps the weights."""
    model = distribute(model, place.group, keys)
    names = {id(module): name for name, module in model.named_modules()}
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    return [(names[id(state._modules[0])], type(state._fsdp_param_group.offload_policy).__name__) for state in states]


def units(config: Config, place: Place) -> list[tuple[str, str]]:
    return _units(tiny_model(), config.train, place)


def units_of_the_critic(config: Config, place: Place) -> list[tuple[str, str]]:
    return _units(tiny_critic(), config.critic, place)


def units_of_the_reference(config: Config, place: Place) -> list[str]:
    modules = _trainer(config, place).reference.named_modules()
    return [name for name, module in modules if hasattr(module, "_get_fsdp_state")]


def after_backward(config: Config, place: Place) -> list[tuple[int, list[int]]]:
    """Of policy and critic: how many parameters have a gradient where they are, after backward; and how many step at
    a time."""
    algorithm, found = _grpo(config, place)[0], []
    for trained in _trained_by(algorithm):
        steps: list[int] = []
        found.append((0, steps))

        def end_part(one: TrainedModel = trained, at: int = len(found) - 1) -> None:
            found[at] = sum(p.grad is not None for p in one.model.parameters()), found[at][1]
            type(one).end_part(one)

        def count(optimizer: Any, *_: Any, steps: list[int] = steps) -> None:
            steps.append(sum(len(group["params"]) for group in optimizer.param_groups))

        trained.end_part = end_part
        trained.optimizer.optimizers[0].register_step_pre_hook(count)
    with patch.object(offload, "NUMBERS", 3000):
        train_step(algorithm, 0)
    return found


def _trained_by(algorithm: Grpo) -> list[TrainedModel]:
    trainer = algorithm._trainer
    return [trainer, *([trainer.critic] if trainer.critic else [])]


def kept_activations(config: Config, place: Place) -> list[tuple[str, bool, bool]]:
    """The modules of policy and critic that are recomputed, or have activations in host memory."""
    model = load_model(config)
    models = [model, *([load_critic(config, model)] if config.has_critic else [])]
    modules = [(name, m) for one in models for name, m in one.named_modules()]
    facts = (
        (name, is_recomputed(m) or getattr(m, "gradient_checkpointing", False) is True, is_kept_on_host(m))
        for name, m in modules
    )
    return [fact for fact in facts if fact[1] or fact[2]]


for section, observe, job in (("train", units, grpo), ("critic", units_of_the_critic, with_critic)):
    cast_units = changed(job, {f"{section}.param_dtype": "bfloat16"})
    watch(
        observe,
        cast_units,
        {
            f"{section}.fsdp_offload": (False, True),
            f"{section}.fsdp_wrap_layers": ([], ["Qwen3MLP"]),
            f"{section}.fsdp_wrap_min_params": (0, 3000),
        },
    )
    watch(
        after_backward,
        cast_units,
        {
            f"{section}.fsdp_gradient_offload": (False, True),
            f"{section}.optimizer_offload": (False, True),
            f"{section}.overlap_grad_reduce": (True, False),
        },
    )
    owner = "policy" if section == "train" else section
    again = changed(job, {f"{owner}.model_gradient_checkpointing": True, "policy.model_name_or_path": Made(_experts)})
    watch(
        kept_activations,
        again,
        {
            f"{section}.recompute_granularity": ("full", "selective"),
            f"{section}.recompute_moe_layers": (False, True),
            f"{section}.activation_offload": (False, True),
        },
    )
watch(
    units_of_the_reference,
    changed(unclipped, with_kl | {"reference.offload": True}),
    {"reference.fsdp_wrap_layers": ([], ["Qwen3MLP"]), "reference.fsdp_wrap_min_params": (0, 3000)},
)


def compiled(config: Config, place: Place) -> list[bool]:
    """Whether the layers of each trained model are compiled."""
    layers = [layer for trained in _trained(config, place) for layer in trained.model.decoder_layers()]
    return [hasattr(layer.forward, "_torchdynamo_orig_callable") for layer in layers]


def kernel_of_the_attention(config: Config, place: Place) -> str:
    """Which package loading the model asks for, where none is installed."""
    try:
        load_model(config)
    except SettingsError as refusal:
        return str(refusal)
    return "torch"


def kernels_of_the_layers(config: Config, place: Place) -> str:
    """Which package the trainer asks for, where none is installed."""
    try:
        with patch.dict(sys.modules, {"liger_kernel": None, "torchao": None}):
            _trainer(config, place)
    except SettingsError as refusal:
        return str(refusal)
    return "torch"


@dataclass(frozen=True)
class Recipe:
    """What is asked of torchao's configuration of fp8."""

    name: str = ""
    pad_inner_dim: bool = False
    emulate: bool = False

    from_recipe_name = classmethod(lambda cls, name: cls(name))


def fp8_recipe(config: Config, place: Place) -> set[str]:
    """Which recipe torchao is handed, for layers that fit."""
    asked = set()

    def convert(layer: Any, *, config: Recipe, module_filter_fn: Any) -> None:
        asked.add(config.name)
        assert any(module_filter_fn(module, name) for name, module in layer.named_modules())

    library = SimpleNamespace(Float8LinearConfig=Recipe, convert_to_float8_training=convert)
    with patch.dict(sys.modules, {"torchao": SimpleNamespace(float8=library), "torchao.float8": library}):
        _trainer(config, place)
    return asked


for section, job in (("train", grpo), ("critic", with_critic)):
    watch(compiled, job, {f"{section}.compile": (False, True)})
narrow = changed(grpo, {"train.param_dtype": "bfloat16"})
watch(kernel_of_the_attention, narrow, {"train.fa_version": (2, 3)})
watch(
    kernels_of_the_layers,
    narrow,
    {"policy.enable_liger_kernel": (False, True), "train.fp8.enable_fp8": (False, True)},
)
in_fp8 = changed(narrow, {"train.fp8.enable_fp8": True})
watch(fp8_recipe, in_fp8, {"train.fp8.quant_recipe": ("rowwise", "tensorwise")})


def refusals_of_training(config: Config, place: Place) -> list[str]:
    """What the rules of training have against it."""
    return [problem.render() for rule in TRAINING_RULES for problem in rule(config)]


watch(refusals_of_training, in_fp8, {"train.fp8.fp8_recipe": ("dynamic_scaling", "delayed_scaling")}, refused=True)
watch(
    refusals_of_training,
    grpo,
    {
        "train.async_tp_enabled": (False, True),
        "train.fp4.enable_fp4": (False, True),
        "train.fp4.fp4_recipe": ("dynamic_scaling", "delayed_scaling"),
        "train.fp4.quant_recipe": ("rowwise", "tensorwise"),
    },
    refused=True,
)


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


watch(randomness, grpo, {"train.seed": (1, 2), "train.deterministic": (False, True)})

# ---- supervised training --------------------------------------------------------------------------------------


def supervised_rows(config: Config, place: Place) -> tuple[list[int], float]:
    """The order of the rows of all epochs, and how many of them the first step trains on."""
    path = place.directory() / "train.safetensors"
    ids = [[3, 4, 5 + row] for row in range(24)]
    write_prompts(path, ids, [{"key": str(row)} for row in range(24)], [[0, 1, 1]] * 24)
    algorithm = Sft(config, _trainer(config, place), path)
    metrics = train_step(algorithm, 0)
    return algorithm._order.rows(0, 1000), metrics["samples"]


watch(
    supervised_rows,
    sft,
    {
        "train.seed": (1, 2),
        "train.epoch": (1, 2),
        "train.train_batch_per_replica": (8, 4),
        f"{POLICY}.dataloader_shuffle": (True, False),
    },
)


def validated_versions(config: Config, place: Place) -> list[int]:
    """Which of the first three versions of a supervised run are validated."""
    folder = place.directory()
    for name in ("train", "validation"):
        ids = [[3, 4, 5 + row] for row in range(16)]
        write_prompts(folder / f"{name}.safetensors", ids, [{}] * 16, [[0, 1, 1]] * 16)
    reply = m.RegisterReply.model_construct(mode="sft", data_file=str(folder / "train.safetensors"), total_steps=10)
    registration = Registration(config, reply, _trainer(config, place), None, ShutdownRequest())
    algorithm, found = _algorithm(registration, None, Alone()), []  # type: ignore[arg-type]
    for step in range(2):
        train_step(algorithm, step)
        found += [record.version for record in algorithm.validations]
    return found


def validation_rows(config: Config, place: Place) -> list[int]:
    """How many conversations each micro-batch of a validation has."""
    path = place.directory() / "validation.safetensors"
    write_prompts(path, [[3, 4, 5 + row] for row in range(16)], [{}] * 16, [[0, 1, 1]] * 16)
    return [len(rows) for rows in HeldOut(config, _trainer(config, place), path, 10)._batches]


validating = changed(sft, {"validation.enable": True, "validation.dataset.name": "synthetic:addition"})
validating = changed(validating, {"validation.dataset.options": {"demonstrations": True}})
watch(
    validated_versions,
    validating,
    {"validation.freq": (20, 1), "validation.before": (True, False), "validation.enable": (True, False)},
)
watch(validation_rows, validating, {"validation.batch_size": (UNSET, 4)})

# ---- checkpoints and exports ----------------------------------------------------------------------------------


@contextmanager
def _registered(config: Config, place: Place) -> Iterator[tuple[ServedController, Session]]:
    """A real controller of this job, and a policy replica that has registered with it."""
    run_dir = make_run_dir(place.directory() / "run", config)
    with served_controller(run_dir, place.valkey.url) as served:
        session = Session(Environment(served.url, TOKENS["policy"], "policy-0", None, None), ShutdownRequest(), 1)
        session.register()
        try:
            yield served, session
        finally:
            session.leave("done")


def gradients_in_the_store(config: Config, place: Place) -> list[str]:
    """What a policy replica writes into the weight store for others to fetch, of whom none comes."""
    with _registered(config, place) as (served, session):
        environment = Environment(served.url, TOKENS["policy"], "policy-0", None, None)
        trainer, shutdown = _trainer(config, place), ShutdownRequest()
        registration = Registration(config, session.reply, trainer, session, shutdown)
        peers = Peers(registration, environment, RankEnvironment())
        order = {"epoch": 1, "parts": [0], "members": [session.reply.replica_id, "other"], "counts": [1, 1]}
        peers._order = MemberReply(action="exchange", step=0, leads=True, **order)
        found: list[str] = []

        def exchange(transport: Exchange, round_: Round) -> None:
            try:
                transport.notes(round_, {0: b"a note"})
            finally:
                written = Path(session.reply.weight_store).glob("*-gradients.*")
                found.extend(path.name.partition(".")[2] for path in written)

        assert peers._attempt(exchange) is None
        return found


def files_of_a_checkpoint(config: Config, place: Place) -> list[str]:
    """What is in the directory of checkpoints after one is saved."""
    with _registered(config, place) as (_, session):
        checkpointer = _checkpointer(config, place, session)
        checkpointer.save(0)
        checkpointer.finish()
        root = Path(session.reply.run_dir) / "checkpoints"
        return sorted(str(path.relative_to(root)) for path in root.rglob("*.safetensors"))


def who_writes(config: Config, place: Place) -> bool:
    """Whether a checkpoint is still to be waited for when training goes on."""
    with _registered(config, place) as (_, session):
        checkpointer = _checkpointer(config, place, session)
        checkpointer.save(0)
        try:
            return checkpointer._background.busy
        finally:
            checkpointer.finish()


def _checkpointer(config: Config, place: Place, session: Session | None = None) -> Checkpointer:
    reply = _reply(config, place) if session is None else session.reply
    return Checkpointer(Registration(config, reply, _trainer(config, place), session, ShutdownRequest()))


def steps_that_are_saved(config: Config, place: Place) -> list[int]:
    """Of forty steps, five to an epoch, those after which a checkpoint is due."""
    checkpointer = _checkpointer(config, place)
    return [step for step in range(1, 41) if checkpointer.due(step, last=False, data_passes=step // 5)]


def checkpoints_that_stay(config: Config, place: Place) -> list[str]:
    """Of four old checkpoints, those that are there when another one is complete."""
    checkpointer = _checkpointer(config, place)
    paths = [make_checkpoint(checkpointer._directory, step) for step in range(1, 6)]
    checkpointer._housekeeper.resumed_from(paths[3])
    checkpointer._housekeeper.tidy(look(paths[4]), {})
    return sorted(path.name for path in checkpointer._directory.iterdir())


def what_is_resumed(config: Config, place: Place) -> str:
    """The checkpoint from which a fresh run goes on."""
    run = Path(config.train.output_dir) / "fresh"
    run.mkdir(parents=True, exist_ok=True)
    found = candidates(config, run).found
    return str(found[0].path) if found else ""


def what_is_read(config: Config, place: Place) -> tuple[object, int]:
    """What is taken from another run's checkpoint of three steps, and how many steps it counts for."""
    resumption = _resumption(look(_older_run(place)), config, own=False)
    return parts_of(resumption, config), resumption.step


def rates_after_resume(config: Config, place: Place) -> list[float]:
    """Learning rates of forty steps; the checkpoint was to decay, the configuration is not."""
    trainer = _trainer(config, place)
    trainer.schedule = Schedule(40, decay_ratio=0.5, decay_type="linear")
    root = place.directory()
    save_state(trainer, root)
    trainer.schedule = Schedule(40)
    load(Resumption(look(root / "step-00000000"), 0, own=True), trainer, config, None)
    return [trainer.lr(step) for step in range(40)]


def _reply(config: Config, place: Place) -> m.RegisterReply:
    return m.RegisterReply(
        replica_id="policy-0.1", incarnation=1, job_id="job", config=config.to_dict(), job_seed=1,
        mode="grpo" if config.is_grpo else "sft", timeline=0, committed_steps=0, total_steps=10, policy_epoch=1,
        heartbeat_interval=1.0, heartbeat_timeout=5.0, run_dir=str(place.directory()),
        weight_store=str(place.directory()), data_file="", publication=None,
    )  # fmt: skip


def _older_run(place: Place) -> Path:
    root = place.root / "outputs" / "older" / "checkpoints"
    return root / "step-00000003" if root.exists() else make_checkpoint(root, 3, latest=True)


watch(
    gradients_in_the_store,
    changed(
        grpo,
        {
            "train.ckpt.enable_checkpoint": True,
            "policy.parallelism.n_init_replicas": 2,
            "controller.heartbeat_interval": 0.2,
            "controller.heartbeat_timeout": 0.5,
        },
    ),
    {"policy.exchange": ("collective", "store")},
)
saving = changed(grpo, {"train.ckpt.enable_checkpoint": True, "train.ckpt.save_mode": "sync"})
watch(
    files_of_a_checkpoint,
    saving,
    {
        "train.ckpt.export_safetensors": (True, False),
        "train.ckpt.save_contents": (["model", "optimizer", "extra"], ["model", "extra"]),
    },
)
watch(who_writes, saving, {"train.ckpt.save_mode": ("sync", "async")})
watch(
    steps_that_are_saved,
    changed(saving, {"train.epoch": 4}),
    {
        "train.ckpt.enable_checkpoint": (True, False),
        "train.ckpt.save_freq": (20, 7),
        "train.ckpt.save_freq_in_epoch": (0, 3),
    },
)
watch(checkpoints_that_stay, saving, {"train.ckpt.max_keep": (3, -1), "train.ckpt.delete_after_load": (False, True)})
watch(
    what_is_read, saving, {"train.ckpt.load_contents": (UNSET, With(["model"], {"train.ckpt.load_schedule": False}))}
)
watch(rates_after_resume, saving, {"train.ckpt.load_schedule": (True, False)})
watch(
    what_is_resumed,
    changed(grpo, {"train.output_dir": Made(lambda place: str(_older_run(place).parents[2]))}),
    {"train.resume": (False, True)},
)
watch(
    what_is_resumed,
    changed(grpo, {"train.output_dir": Made(lambda place: str(place.root / "elsewhere"))}),
    {"train.resume": (False, Made(lambda place: str(_older_run(place))))},
)


def exported_type(config: Config, place: Place) -> set[str]:
    """The type of the exported tensors."""
    target = place.directory() / "final"
    export_whole(_trainer(config, place), config, target)
    with safe_open(target / "model.safetensors", framework="pt") as file:
        return {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def files_at_the_end(config: Config, place: Place) -> bool:
    """Whether a finished run leaves a model."""
    reply = _reply(config, place)
    trainer = _trainer(config, place)
    registration = Registration(config, reply, trainer, None, ShutdownRequest())
    loop = Loop(registration, Checkpointer(registration))
    loop._leads = True
    loop._finish(0)
    return (Path(reply.run_dir) / "final" / "config.json").exists()


def averaged_weight(config: Config, place: Place) -> list[float]:
    """A weight of the averaged model that is exported after a step; nothing where none is kept."""
    trainer, target = _trainer(config, place), place.directory() / "final_ema"
    if trainer.ema is None:
        return []
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.step(0)
    export_whole(trainer, config, target, average=True)
    with safe_open(target / "model.safetensors", framework="pt") as file:
        return [file.get_tensor("model.norm.weight").flatten()[0].item()]


watch(averaged_weight, changed(sft, {"train.transfer_dtype": "float32"}), {"train.ema_decay": (0.5, 0.9)})
watch(averaged_weight, sft, {"train.ema_decay": (UNSET, 0.9)})
watch(exported_type, sft, {"train.transfer_dtype": ("float32", "bfloat16")})
watch(files_at_the_end, sft, {"launcher.export_final": (True, False)})


def patience_of_a_trainer(config: Config, place: Place) -> tuple[float, float]:
    """How long it looks for a lost controller, and how long it may take to leave."""
    with _registered(config, place) as (_, session):
        return session.patience, session.shutdown.grace


watch(
    patience_of_a_trainer,
    grpo,
    {"controller.controller_lost_timeout": (60.0, 90.0), "launcher.shutdown_timeout": (10.0, 20.0)},
)


# ---- profiles -------------------------------------------------------------------------------------------------

SUB = "profiler.sub_profiler_config"


def answer_to_a_profile(config: Config, place: Place) -> str:
    """What the controller answers to who asks for one."""
    with _registered(config, place) as (served, session), served.client("user") as user:
        try:
            return user.send(api.profile(session.reply.replica_id, m.ProfileRequest())).state
        except Refused as error:
            return str(error.code)


def _profiles(config: Config, place: Place, trainer: Trainer) -> Profiles:
    profiles = Profiles(config.profiler, trainer, place.directory(), None, ShutdownRequest())
    profiles.begin(0)
    return profiles


def steps_that_are_recorded(config: Config, place: Place) -> tuple[Any, ...]:
    """What is due at each of eight steps of the profile that begins with the trainer, and on which ranks."""
    window = _profiles(config, place, _trainer(config, place))._window
    return () if window is None else (window.ranks, [window.phase(step) for step in range(8)])


def kinds_in_a_trace(config: Config, place: Place) -> dict[str, bool]:
    """What a trace of a step has, of all that it may have."""
    algorithm, _ = _grpo(config, place)
    profiles = _profiles(config, place, algorithm._trainer)
    profiles.reach(0, profiles.signals())
    train_step(algorithm, 0)
    profiles.stop(1)
    profiles.settle(0.0)
    (path,) = profiles._directory.glob("*.gz")
    with gzip.open(path) as file:
        found = json.load(file)["traceEvents"]
    return {
        "shapes": any("Input Dims" in event.get("args", {}) for event in found),
        "memory": any(event["name"] == "[memory]" for event in found),
        "stacks": any(event.get("cat") == "python_function" for event in found),
        "modules": any(event["name"] == "lm.model.layers.0.mlp" for event in found),
    }


enabled = changed(grpo, {"profiler.enable_profiler": True, f"{SUB}.do_profile": True})
watch(answer_to_a_profile, grpo, {"profiler.enable_profiler": (False, True)})
watch(
    steps_that_are_recorded,
    changed(enabled, {"policy.parallelism.dp_shard_size": -1}),
    {
        f"{SUB}.do_profile": (True, False),
        f"{SUB}.wait_steps": (1, 3),
        f"{SUB}.warmup_steps": (1, 3),
        f"{SUB}.active_steps": (1, 3),
        f"{SUB}.rank_filter": ([0], [1]),
    },
)
watch(
    kinds_in_a_trace,
    changed(enabled, {f"{SUB}.wait_steps": 0, f"{SUB}.warmup_steps": 0}),
    {
        f"{SUB}.record_shape": (False, True),
        f"{SUB}.profile_memory": (False, True),
        f"{SUB}.with_stack": (False, True),
        f"{SUB}.with_modules": (False, True),
    },
)
