"""A checkpoint before the first step (SIGTERM while the first batch is awaited) changes no bit of what follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.source import BatchSource
from policy_worker.training.grpo import Grpo
from tests.policy_worker.checkpoint_material import load_state, save_state
from tests.policy_worker.material import encode_step, make_config, random_samples, tiny_model, train_step


def trainer_of(group: RankGroup) -> Trainer:
    return Trainer(tiny_model(), make_config(), group, Schedule(10))


def weights_after_two_steps(trainer: Trainer, group: RankGroup) -> dict[str, Tensor]:
    for step in range(2):
        answer = encode_step(random_samples(8), step=step)
        source = BatchSource(group, lambda call, answer=answer: answer, 1, 4)
        train_step(Grpo(make_config(), trainer, source), step)
    return {name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}


@pytest.mark.usefixtures("deterministic")
def test_saving_before_the_first_step_is_not_a_step(tmp_path: Path, group: RankGroup) -> None:
    calm = weights_after_two_steps(trainer_of(group), group)
    went_on, resumed = trainer_of(group), trainer_of(group)
    found = save_state(went_on, tmp_path)
    assert found is not None
    load_state(resumed, found.path, make_config())
    for trainer in (went_on, resumed):
        after = weights_after_two_steps(trainer, group)
        assert after.keys() == calm.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in calm.items())
