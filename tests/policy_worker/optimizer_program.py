"""Optimizers on the ranks of a replica: `python -m tests.policy_worker.optimizer_program OUT`.

Each case of `CASES` takes three steps on gradients that are the same however many ranks there are. After the second
one it is saved to OUT/<case>; a trainer that goes on from there must come to the same bits. Rank 0 writes the whole
weights to OUT/<case>.safetensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from policy_worker.parallel.fsdp import whole
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from tests.policy_worker.checkpoint_material import load_state, save_state
from tests.policy_worker.material import make_config, tiny_model
from tests.policy_worker.ranks import joined

STEPS = range(3)
CASES: dict[str, dict[str, Any]] = {
    "AdamW": {"ema_decay": 0.6},
    "Adam": {"optm_impl": "for-loop"},
    "SGD": {},
    "SGD with momentum": {"optm_name": "SGD", "optm_momentum": 0.8},
    "Muon": {"optm_lr": [1e-2, 1e-3], "ema_decay": 0.6},
}


def trainer_of(name: str, group: RankGroup) -> tuple[Trainer, Any]:
    """A trainer of this case, and its configuration."""
    ramp = {"optm_weight_decay": 0.1, "optm_weight_decay_ramp": "linear"}
    config = make_config(train={"optm_name": name, "optm_grad_norm_clip": 0.0, **ramp, **CASES[name]})
    return Trainer(tiny_model(), config, group, Schedule(len(STEPS))), config


def take(trainer: Trainer, steps: Iterable[int]) -> None:
    """Optimizer steps on gradients that follow from the number of the step."""
    for step in steps:
        random = torch.Generator().manual_seed(step)
        for parameter in trainer.model.parameters():
            gradient = torch.randn(parameter.shape, generator=random).to(trainer.group.device)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        trainer.step(step)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Weights and their average, whole. A collective."""
    averages = trainer.ema.average if trainer.ema is not None else {}
    held = {**dict(trainer.model.named_parameters()), **{f"ema.{k}": v for k, v in averages.items()}}
    return {name: whole(tensor).detach().cpu().clone() for name, tensor in held.items()}


def in_one_go(name: str, group: RankGroup) -> dict[str, Tensor]:
    """All steps of a case."""
    trainer, _ = trainer_of(name, group)
    take(trainer, STEPS)
    return weights(trainer)


def resumed(name: str, group: RankGroup, checkpoint: Path) -> dict[str, Tensor]:
    """The last step, from a checkpoint of the others."""
    trainer, config = trainer_of(name, group)
    load_state(trainer, checkpoint, config)
    take(trainer, STEPS[2:])
    return weights(trainer)


def main(out: Path, names: list[str]) -> None:
    with joined() as group:
        for name in names:
            trainer, _ = trainer_of(name, group)
            take(trainer, STEPS[:2])
            save_state(trainer, out / name, 2)
            take(trainer, STEPS[2:])
            expected, found = weights(trainer), resumed(name, group, out / name / "step-00000002")
            for key, tensor in expected.items():
                assert torch.equal(found[key], tensor), (name, key)
            if group.leads:
                save_file(expected, out / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
