"""Model and optimizer as one flat mapping of tensors, and back.

    model.<name>                 parameters and buffers
    optimizer.<name>.<slot>      what the optimizer keeps of each parameter
    reference.<name>             the reference model, where it is reset now and then
    critic.<name>, critic_optimizer.<name>.<slot>       the same of a critic
    ema.<name>                   the moving average of the weights, where there is one
    base.<name>                  frozen weights next to adapters, only as long as an export is made of them

Of a model with adapters `model.<name>` is what trains, with what its initialiser has taken from the base; the rest is
the model's that it began with, of which the manifest has a digest.
Numbers of the optimizer that are not tensors (betas, weight decay, …) are the configuration's, and are not kept.
A reference model that is never reset is loaded from where it came from.

Random states of a rank are torch's (CPU, GPU), those of Python's `random` and of numpy's global generator:

    as many ranks as saved      each goes on with its own states
    fewer                       rank r takes the states of saved rank r; the others' are dropped
    more                        rank r without saved states is seeded from (job seed, steps, r)

So a run that is resumed twice in the same way goes on in the same way twice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate

from policy_worker.checkpoints.layout import rng_file, state_files
from policy_worker.checkpoints.storage import State, StateFiles, differences
from policy_worker.errors import CheckpointError, DamagedCheckpointError
from policy_worker.memory.offload import local_of
from policy_worker.model.lora import adapters_of
from policy_worker.model.model import Backbone
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.frozen import EarlierPolicy
from policy_worker.trained.model import TrainedModel
from policy_worker.trained.trainer import Trainer
from schema.config.sections.policy import ALTERING
from schema.util.atomic_file import usual_mode
from weight_sync.stored import BLOCK

MODEL, OPTIMIZER, REFERENCE, EMA = "model", "optimizer", "reference", "ema"
CRITIC, CRITIC_OPTIMIZER, BASE = "critic", "critic_optimizer", "base"
_WORD = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def model_state(model: Backbone, prefix: str = MODEL) -> State:
    """Parameters and buffers: those of the model itself, not copies. A tied tensor has one name."""
    named = (name for name, _ in model.named_parameters(remove_duplicate=False))
    left_out = set(named) - {name for name, _ in model.named_parameters()} | base_names(model)
    return {
        f"{prefix}.{name}": tensor
        for name, tensor in get_model_state_dict(model).items()
        if isinstance(tensor, Tensor) and name not in left_out
    }


def base_names(model: Backbone) -> set[str]:
    """The parameters that are as the model began with them, where it trains adapters; else none."""
    adapters = adapters_of(model.lm)
    if adapters is None:
        return set()
    altered = str(adapters.init_lora_weights).startswith(ALTERING)
    return {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and not (altered and ".base_layer." in name)
    }


def base_state(model: Backbone) -> State:
    """The tensors of `base_names`."""
    names = base_names(model)
    return {f"{BASE}.{name}": p.detach() for name, p in model.named_parameters() if name in names}


def base_digest(model: Backbone, group: RankGroup | None = None) -> str | None:
    """A digest of `base_state`, the same on any mesh; None: there is none. A collective of the group.

    It is made of the sum of each tensor's bits, read as whole numbers: whichever ranks add up the parts, it is exact.
    """
    parts = {
        key: _sum_of_bits(local_of(tensor))
        for key, tensor in base_state(model).items()
        if _is_first(model, group, key, tensor)
    }
    sums: dict[str, int] = {}
    for part in [parts] if group is None else group.gather(parts):
        for key, bits in part.items():
            sums[key] = (sums.get(key, 0) + bits) % 2**64
    text = json.dumps(sums, sort_keys=True).encode()
    return str(xxhash.xxh3_128_hexdigest(text)) if sums else None


def _sum_of_bits(tensor: Tensor) -> int:
    """In blocks: on a CPU each is widened before it is added up."""
    numbers = tensor.contiguous().view(-1).view(_WORD[tensor.dtype.itemsize])
    return int(torch.stack([block.sum(dtype=torch.int64) for block in numbers.split(BLOCK)]).sum())


def optimizer_state(trained: TrainedModel, prefix: str = OPTIMIZER) -> State:
    """Return what the optimizer keeps: the tensors themselves, zeros before its first step. A collective."""
    names = {parameter: name for name, parameter in trained.model.named_parameters()}
    return {
        f"{prefix}.{names[parameter]}.{slot}": value
        for parameter, slots in trained.optimizer.slots()
        for slot, value in slots.items()
    }


def average_state(trainer: Trainer) -> State:
    """The moving average of the weights; nothing where there is none."""
    average = {} if trainer.ema is None else trainer.ema.average
    return {f"{EMA}.{name}": tensor for name, tensor in average.items()}


def _roles(trainer: Trainer) -> dict[str, TrainedModel]:
    models = {"policy": trainer, "critic": trainer.critic}
    return {role: trained for role, trained in models.items() if trained is not None}


def loss_scales(trainer: Trainer) -> dict[str, tuple[float, int]]:
    """Return the loss scales of the models that have one, by role."""
    scalers = {role: trained.scaler for role, trained in _roles(trainer).items()}
    return {role: scaler.state for role, scaler in scalers.items() if scaler is not None}


def load_loss_scales(trainer: Trainer, saved: Mapping[str, tuple[float, int]]) -> None:
    """Go on with those that were saved."""
    for role, trained in _roles(trainer).items():
        if trained.scaler is not None and role in saved:
            trained.scaler.state = saved[role]


def base_digests(trainer: Trainer) -> dict[str, str]:
    """Digest the bases of the models that train adapters, by role. A collective."""
    digests = {role: base_digest(trained.model, trained.group) for role, trained in _roles(trainer).items()}
    return {role: digest for role, digest in digests.items() if digest is not None}


def reference_state(trainer: Trainer) -> State:
    """Return the weights of a reference model that cannot be loaded from where it came from."""
    if isinstance(trainer.reference, EarlierPolicy):
        return {f"{REFERENCE}.{name}": tensor for name, tensor in trainer.reference.kept.items()}
    if trainer.reference is None or not trainer.reset_interval:
        return {}
    return model_state(trainer.reference, REFERENCE)


def state_to_save(trainer: Trainer, contents: Collection[str]) -> dict[str, State]:
    """By kind, what this rank has to write: of what several ranks hold alike the first one writes it.

    A reference model that is reset, or within the policy, and a moving average come with `extra`; a critic always,
    since no export holds it, and its optimizer with that of the policy."""
    states: dict[str, State] = {}
    if MODEL in contents:
        states[MODEL] = model_state(trainer.model)
    if BASE in contents and (base := base_state(trainer.model)):
        states[BASE] = base
    if OPTIMIZER in contents:
        states[OPTIMIZER] = optimizer_state(trainer)
    if "extra" in contents and (reference := reference_state(trainer)):
        states[REFERENCE] = reference
    if "extra" in contents and trainer.ema is not None:
        states[EMA] = average_state(trainer)
    if trainer.critic is not None:
        states[CRITIC] = model_state(trainer.critic.model, CRITIC)
        if OPTIMIZER in contents:
            states[CRITIC_OPTIMIZER] = optimizer_state(trainer.critic, CRITIC_OPTIMIZER)
    written: dict[str, State] = {}
    for kind, state in states.items():
        of: TrainedModel = trainer.critic if trainer.critic and kind.startswith(CRITIC) else trainer
        written[kind] = {key: t for key, t in state.items() if _is_first(of.model, of.group, key, t)}
    return written


def _is_first(model: Backbone, group: RankGroup | None, key: str, tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold this piece of a tensor; group None: it is alone."""
    stages = model.stages
    if stages is not None and stages.has_elsewhere(key.partition(".")[2]):
        return False
    if not isinstance(tensor, DTensor):
        return group is None or group.leads_stage
    place = tensor.device_mesh.get_coordinate() or ()
    return all(at == 0 for p, at in zip(tensor.placements, place, strict=True) if isinstance(p, Replicate))


def load_model_state(model: Backbone, directory: Path, prefix: str = MODEL) -> None:
    """Read a model's weights from a checkpoint. Raises `CheckpointError`: they are of another model."""
    state = model_state(model, prefix)
    load_state(directory, state, prefix, model)
    loaded = {key.removeprefix(f"{prefix}."): tensor for key, tensor in state.items()}
    set_model_state_dict(model, get_model_state_dict(model) | loaded)


def load_state(directory: Path, state: State, prefix: str, model: Backbone) -> None:
    """Fill the tensors of a state of a model from a checkpoint. prefix: the kind of state.

    Raises `CheckpointError`: what was saved is of another model or optimizer."""
    with StateFiles(state_files(directory, prefix)) as files:
        _check_same(files, state, prefix, model)
        files.load(state)


def _check_same(files: StateFiles, state: State, prefix: str, model: Backbone) -> None:
    stages = model.stages
    saved = {
        key: meta
        for key, meta in files.tensors.items()
        if key.startswith(f"{prefix}.")
        and (key in state or stages is None or not stages.has_elsewhere(key.removeprefix(f"{prefix}.")))
    }
    wrong = differences(saved, state)
    if wrong:
        further = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        words = prefix.replace("_", "'s ")
        owner, keys = ("critic", "critic") if prefix.startswith(CRITIC) else ("policy", "train")
        optimizer = f", and its optimizer with {keys}.optm_name" if prefix.endswith(OPTIMIZER) else ""
        adapters = ""
        if any(".lora_" in name or ".modules_to_save." in name for name in wrong):
            adapters = f", and its adapters as they were with [{owner}.lora]"
        chosen = f"{owner}.freeze_moe_router" + (" and policy.trainable_map" if owner == "policy" else "")
        frozen = f"; keep {chosen} as they were" if prefix.endswith((OPTIMIZER, EMA)) else ""
        raise CheckpointError(
            f"its {words} is another one: {'; '.join(wrong[:3])}{further}: name the model that it was trained "
            f"from with {owner}.model_name_or_path{optimizer}{adapters}{frozen}"
        )


def weights_from(files: StateFiles, prefix: str = "lm.") -> Callable[[str, Tensor], Tensor]:
    """A `weight_sync.Gather` that takes a transformers model's tensors, by name, from a checkpoint."""

    def gather(name: str, _: Tensor) -> Tensor:
        key = f"{prefix}{name}"
        return files.whole(f"{MODEL if f'{MODEL}.{key}' in files.tensors else BASE}.{key}")

    return gather


# ---- random states ----

RngStates = dict[str, np.ndarray[Any, Any]]


def capture_rng(device: torch.device) -> RngStates:
    """The states as they are now."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert (version, name) == (3, "MT19937")
    states: RngStates = {
        "torch": torch.get_rng_state().numpy(),
        "python": np.array(words, np.uint32),
        "python_gauss": np.array([] if gauss is None else [gauss], np.float64),
        "numpy": np.asarray(keys, np.uint32),
        "numpy_position": np.array([position, has_gauss], np.int64),
        "numpy_gauss": np.array([cached], np.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy()
    return states


def apply_rng(states: RngStates, device: torch.device) -> None:
    """Inverse of `capture_rng`. Raises `KeyError`, `ValueError`, `TypeError`, `RuntimeError` for anything else."""
    gauss = states["python_gauss"]
    random.setstate((3, tuple(int(word) for word in states["python"]), float(gauss[0]) if len(gauss) else None))
    position, has_gauss = (int(value) for value in states["numpy_position"])
    np.random.set_state(("MT19937", states["numpy"], position, has_gauss, float(states["numpy_gauss"][0])))
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(states["cuda"].copy()), device)


def seed_new_rank(seed: int, step: int, rank: int) -> None:
    """The states of a rank that the checkpoint has none for."""
    torch_seed, python_seed, numpy_seed = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    torch.manual_seed(int(torch_seed))
    random.seed(int(python_seed))
    np.random.seed(int(numpy_seed))


def write_rng(directory: Path, rank: int, states: RngStates) -> None:
    """Raises `OSError`."""
    path = directory / rng_file(rank)
    try:
        with usual_mode(path):
            save_file(states, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def restore_rng(directory: Path, *, rank: int, saved_world: int, seed: int, step: int, device: torch.device) -> None:
    """Go on with the states that were saved. Raises `DamagedCheckpointError`."""
    if rank >= saved_world:
        seed_new_rank(seed, step, rank)
        return
    path = directory / rng_file(rank)
    try:
        apply_rng(load_file(path), device)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} holds no random states: {error}") from error
