"""Model and optimizer as one flat mapping of tensors, and back.

    model.<name>                 parameters and buffers
    optimizer.<name>.<slot>      what AdamW keeps of each parameter

Numbers of the optimizer that are no tensors (betas, weight decay, …) are the configuration's, and are not kept.
A frozen reference model and an adaptive KL coefficient will be further prefixes; a trainer without them has none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from policy_worker.checkpoints.storage import State, StateFiles, differences
from policy_worker.errors import CheckpointError
from policy_worker.trainer import Trainer

MODEL, OPTIMIZER = "model", "optimizer"


def model_state(trainer: Trainer) -> State:
    """Parameters and buffers: those of the model itself, not copies. A tied tensor has one name."""
    model = trainer.model
    named = (name for name, _ in model.named_parameters(remove_duplicate=False))
    aliases = set(named) - {name for name, _ in model.named_parameters()}
    return {
        f"{MODEL}.{name}": tensor
        for name, tensor in get_model_state_dict(model).items()
        if isinstance(tensor, Tensor) and name not in aliases
    }


def optimizer_state(trainer: Trainer) -> State:
    """What the optimizer keeps; zeros before its first step."""
    adamw = trainer.optimizer.adamw
    fresh = not adamw.state
    found = get_optimizer_state_dict(trainer.model, adamw)
    if (
        fresh
    ):  # torch has made the state by a step at a learning rate of 0, and counted it: the next is the first
        for slots in adamw.state.values():
            slots["step"].zero_()
        found = get_optimizer_state_dict(trainer.model, adamw)
    return _flatten(found["state"])


def _flatten(slots: dict[str, dict[str, Any]]) -> State:
    return {
        f"{OPTIMIZER}.{name}.{slot}": value
        for name, values in slots.items()
        for slot, value in values.items()
        if isinstance(value, Tensor)
    }


def state_to_save(trainer: Trainer, kinds: Collection[str]) -> dict[str, State]:
    """By kind, what this rank has a part in. What every rank holds alike is rank 0's to write."""
    makers = {MODEL: model_state, OPTIMIZER: optimizer_state}
    return {
        kind: {k: v for k, v in make(trainer).items() if trainer.group.leads or isinstance(v, DTensor)}
        for kind, make in makers.items()
        if kind in kinds
    }


def load_model_state(trainer: Trainer, files: StateFiles) -> None:
    """Raises `CheckpointError`: the weights are of another model."""
    state = model_state(trainer)
    _load(files, state, MODEL)
    loaded = {key.removeprefix(f"{MODEL}."): tensor for key, tensor in state.items()}
    set_model_state_dict(trainer.model, get_model_state_dict(trainer.model) | loaded)


def load_optimizer_state(trainer: Trainer, files: StateFiles) -> None:
    """Raises `CheckpointError`: the state is of another model."""
    found = get_optimizer_state_dict(trainer.model, trainer.optimizer.adamw)
    state = _flatten(found["state"])
    _load(files, state, OPTIMIZER)
    set_optimizer_state_dict(trainer.model, trainer.optimizer.adamw, found)
    trainer.optimizer.apply_settings()


def _load(files: StateFiles, state: State, prefix: str) -> None:
    saved = {key: meta for key, meta in files.tensors.items() if key.startswith(f"{prefix}.")}
    wrong = differences(saved, state)
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"its {prefix} is another one: {'; '.join(wrong[:3])}{more}: name the model that it was trained "
            f"from with policy.model_name_or_path"
        )
    files.load(state)


def weights_from(files: StateFiles, prefix: str = "lm.") -> Callable[[str, Tensor], Tensor]:
    """A `weight_sync.Gather` that takes a transformers model's tensors, by name, from a checkpoint."""

    def gather(name: str, _: Tensor) -> Tensor:
        return files.whole(f"{MODEL}.{prefix}{name}")

    return gather
