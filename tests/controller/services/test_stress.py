"""The real service under duplicated, reordered, delayed and lost messages and crashes: a seed decides everything.

Thousands of schedules: `python -m tests.controller.services.test_stress FIRST LAST`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random

import pytest

from schema.config import Config
from tests.controller.services.stress import World, quiet, seeded
from tests.controller.services.stress_replicas import rollout_process, trainers
from tests.support.controller import make_config, make_run_dir
from tests.support.effort import examples
from tests.support.virtual import run

SEEDS = range(4, 4 + examples(4))
"""Four in a row have all bounds; these are the cheapest."""
ROWS = 16


def job(seed: int) -> Config:
    """Bounds 0 to 3 and one or two steps between publications, by the seed."""
    bound = seed % 4
    interval = 1 + (bound >= 1 and seed % 3 == 0)
    timeouts = {"heartbeat_timeout": 10.0, "lease_timeout": 30.0, "start_timeout": 100_000.0}
    return make_config(
        train={"sync_weight_interval": interval, "train_policy": {"allowed_outdated_steps": bound}},
        controller={**timeouts, "max_attempts": 50},
    )


def simulate(seed: int, directory: Path) -> World:
    """One schedule; a failing one raises with its seed in the message."""
    config = job(seed)
    run_dir = make_run_dir(directory / f"run-{seed}", config, rows=ROWS)

    async def scenario() -> World:
        world = World(seed, config, run_dir, n_rollouts=1 + seed % 3)
        with seeded(Random(seed)):
            await world.run(trainers, rollout_process)
        return world

    with quiet():
        try:
            return run(scenario())
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.scaled
@pytest.mark.parametrize("seed", SEEDS)
def test_any_schedule_keeps_the_invariants_and_ends(seed: int, tmp_path: Path) -> None:
    world = simulate(seed, tmp_path)
    assert world.calls > 100
    assert sum(world.faults.values()) > 50


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    one, other = simulate(7, tmp_path), simulate(7, tmp_path / "again")
    assert (one.calls, one.faults, one.weights) == (other.calls, other.faults, other.weights)


if __name__ == "__main__":
    first, last = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as place:
        for number in range(first, last):
            simulate(number, Path(place))
    sys.stdout.write(f"{last - first} schedules kept all invariants\n")
