"""Jobs that need as many rollout replicas as a file says.

Each replica has one reward process, and a reward takes as long as the file says. The trainer is slow, so that one
replica with quick rewards is enough for it: it passes over each batch twelve times, or it sleeps.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.held import REWARDS

SLOW = """
import time

def slow(completion, row, load):
    with open(load) as file:
        time.sleep(float(file.read()))
    return float(len(completion) % 3)
"""
SLEEPY = """
import time

from policy_worker.algorithms.losses import grpo

def loss(tokens, clip):
    time.sleep({seconds})
    return grpo(tokens, clip)
"""
BUSY = "mu_iterations = 12"


def put_load(config: Path, seconds: float) -> None:
    """Let a reward take so long from now on."""
    (config.parent / "load").write_text(str(seconds))


def sleepy(config: Path, seconds: float) -> str:
    """Keys of a trainer that sleeps so long in each micro-batch, for a job of this configuration."""
    (config.parent / "loss.py").write_text(SLEEPY.format(seconds=seconds))
    return f'variant = "{config.parent}/loss.py:loss"'


def loaded(config: Path, trainer: str = BUSY, **autoscale: float) -> Path:
    """Change a configuration of `write_config`, and give it back. trainer: keys that make it slow. autoscale: keys of
    the section."""
    (config.parent / "slow.py").write_text(SLOW)
    put_load(config, 0.0)
    text = config.read_text()
    assert REWARDS in text
    ours = f'{{ "{config.parent}/slow.py:slow" = 1.0 }}\n{trainer}'
    keys = "\n".join(f"{name} = {value}" for name, value in autoscale.items())
    rest = f'[reward]\nnum_workers = 1\n\n[custom]\nload = "{config.parent}/load"\n'
    config.write_text(f"{text.replace(REWARDS, ours)}\n[autoscale]\nenable = true\n{keys}\n\n{rest}")
    return config
