"""Random states of a rank: torch (CPU, GPU), Python's `random`, numpy's global generator.

    as many ranks as saved      each goes on with its own states
    fewer                       rank r takes the states of saved rank r; the others' are dropped
    more                        rank r without saved states is seeded from (job seed, steps, r)

So a run that is resumed twice in the same way goes on in the same way twice.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from policy_worker.checkpoints.layout import rng_file
from policy_worker.errors import DamagedCheckpointError
from schema.util.atomic_file import usual_mode

States = dict[str, np.ndarray[Any, Any]]


def capture(device: torch.device) -> States:
    """The states as they are now."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert (version, name) == (3, "MT19937")
    states: States = {
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


def apply(states: States, device: torch.device) -> None:
    """Inverse of `capture`. Raises `KeyError`, `ValueError`, `TypeError`, `RuntimeError` for what is no state."""
    gauss = states["python_gauss"]
    random.setstate(
        (3, tuple(int(word) for word in states["python"]), float(gauss[0]) if len(gauss) else None)
    )
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


def write(directory: Path, rank: int, states: States) -> None:
    """Raises `OSError`."""
    path = directory / rng_file(rank)
    try:
        with usual_mode(path):
            save_file(states, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def restore(
    directory: Path, *, rank: int, saved_world: int, seed: int, step: int, device: torch.device
) -> None:
    """Go on as the module's docstring says. Raises `DamagedCheckpointError`."""
    if rank >= saved_world:
        seed_new_rank(seed, step, rank)
        return
    path = directory / rng_file(rank)
    try:
        apply(load_file(path), device)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} holds no random states: {error}") from error
