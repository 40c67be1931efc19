"""Probes of batches: micro-batches of training and of other passes, recorded ones, and those of supervised jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from policy_worker.model.micro_batch import TrainSample
from policy_worker.process import ShutdownRequest
from policy_worker.replicas.base import Alone, Registration
from policy_worker.training.batches.cutting import Batching, micro_batches, plan_step
from policy_worker.training.grpo import Grpo
from policy_worker.training.sft import HeldOut, Sft
from policy_worker.worker import _algorithm
from schema.config import Config
from schema.wire import messages as m
from schema.wire.batch_file import folder_of, recorded
from schema.wire.prompts import write_prompts
from tests.liveness.probe import UNSET, Place, changed, grpo, sft, under, watch
from tests.liveness.teachers import with_teacher
from tests.liveness.trained import FOUR_LAYERS, grpo_of, policy, registered, trainer_of, with_critic
from tests.policy_worker.material import encode_step, random_samples, train_step

MESH = "policy.parallelism"
SIZES = {"mini_batch": (2, 3), "max_token_len_per_mini_batch": (24, 48)}
SHORT = under("policy", model_max_length=24)


def batches_on_disk(config: Config, place: Place) -> list[int]:
    """Return which of four trained steps have recorded batches that a replay finds."""
    with registered(config, place) as (_, session):
        registration = Registration(config, session.reply, trainer_of(config, place), session, ShutdownRequest())
        algorithm = _algorithm(registration, session, Alone())
        assert isinstance(algorithm, Grpo)
        samples = random_samples(12)
        algorithm._source._call = lambda call: encode_step(samples, step=int(call.path.split("/")[3]))
        for step in range(4):
            train_step(algorithm, step)
        return recorded(folder_of(Path(session.reply.run_dir)))


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
    return list(next(trainer_of(config, place).micro_batches(samples, [[0, 1]])).input_ids.shape)


def samples_of_passes(config: Config, place: Place) -> list[tuple[str, bool, int]]:
    """Samples of the micro-batches of each model but those of the policy's training, and whether they train it."""
    trainer, seen = (algorithm := grpo_of(config, place)[0])._trainer, []
    models = {"policy": trainer.model, "reference": trainer.reference, **trainer.teachers}
    if trainer.critic is not None:
        models["critic"] = trainer.critic.model
    for name, model in models.items():
        if model is not None:
            model.register_forward_pre_hook(
                lambda _, given, name=name: seen.append((name, torch.is_grad_enabled(), given[0].n_samples))
            )
    train_step(algorithm, 0)
    return [one for one in seen if one[:2] != ("policy", True)]


watch(batches_on_disk, grpo, under("profiler", record_batches=(0, 3)))
watch(rows_of_micro_batches, sft, policy(mini_batch=(2, 3)))
watch(rows_of_micro_batches, changed(grpo, SHORT), policy(**SIZES))
staged = changed(grpo, {f"{MESH}.pp_size": 2, "policy.model_name_or_path": FOUR_LAYERS} | policy(mini_batch=4))
watch(rows_of_micro_batches, staged, under(MESH, pp_micro_batch_size=(1, 2)))
shuffled = changed(grpo, policy(batch_size_per_optimize=4, mini_batch_shuffle=True))
watch(rows_of_optimizer_steps, shuffled, policy(mini_batch_shuffle=(True, False), mini_batch_shuffle_seed=(UNSET, 8)))
decoupled = changed(grpo, policy(use_decoupled_loss=True) | SHORT)
watch(samples_of_passes, decoupled, policy(**{f"old_log_prob.{name}": pair for name, pair in SIZES.items()}))
watch(samples_of_passes, changed(grpo, policy(kl_beta=0.5) | SHORT), under("reference", **SIZES))
watch(samples_of_passes, changed(with_teacher, SHORT), under("teacher", **SIZES))
watch(samples_of_passes, changed(with_critic, SHORT), under("critic", **SIZES, forward_mini_batch=(UNSET, 3)))
watch(shape_of_a_micro_batch, grpo, under("train", sequence_packing=(False, True)))

# ---- supervised training --------------------------------------------------------------------------------------


def _write_rows(path: Path, count: int) -> Path:
    rows = range(count)
    write_prompts(path, [[3, 4, 5 + row] for row in rows], [{"key": str(row)} for row in rows], [[0, 1, 1]] * count)
    return path


def supervised_rows(config: Config, place: Place) -> tuple[list[int], float]:
    """The order of the rows of all epochs, and how many of them the first step trains on."""
    algorithm = Sft(config, trainer_of(config, place), _write_rows(place.directory() / "train.safetensors", 24))
    metrics = train_step(algorithm, 0)
    return algorithm._rows._order.rows(0, 1000), metrics["samples"]


def validated_versions(config: Config, place: Place) -> list[int]:
    """Which of the first three versions of a supervised run are validated."""
    folder = place.directory()
    train, _ = (_write_rows(folder / f"{name}.safetensors", 16) for name in ("train", "validation"))
    reply = m.RegisterReply.model_construct(mode="sft", data_file=str(train), total_steps=10)
    registration = Registration(config, reply, trainer_of(config, place), None, ShutdownRequest())
    algorithm, found = _algorithm(registration, None, Alone()), []  # type: ignore[arg-type]
    for step in range(2):
        train_step(algorithm, step)
        found += [record.version for record in algorithm.validations]
    return found


def validation_rows(config: Config, place: Place) -> list[int]:
    """How many conversations each micro-batch of a validation has."""
    path = _write_rows(place.directory() / "validation.safetensors", 16)
    return [len(rows) for rows in HeldOut(config, trainer_of(config, place), path, 10)._batches]


rows: dict[str, tuple[Any, Any]] = under("train", seed=(1, 2), epoch=(1, 2), train_batch_per_replica=(8, 4))
watch(supervised_rows, sft, rows | policy(dataloader_shuffle=(True, False)))
validating = changed(sft, {"validation.enable": True, "validation.dataset.name": "synthetic:addition"})
validating = changed(validating, {"validation.dataset.options": {"demonstrations": True}})
watch(validated_versions, validating, under("validation", freq=(20, 1), before=(True, False), enable=(True, False)))
watch(validation_rows, validating, under("validation", batch_size=(UNSET, 4)))
