"""Warnings of `train.deterministic`: what keeps a killed and resumed run from ending with the very same bits.

What is promised, and why these are left out of it, stands in docs/algorithms.md under "The same bits".
"""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config

_KEY = "train.deterministic"
_COUNTS = "ledger and counters still agree"


def the_same_bits_are_possible(config: Config) -> list[Problem]:
    """Warning: a run that asks for the same bits and cannot have them."""
    if not config.train.deterministic:
        return []
    return [
        Problem(
            _KEY, f"true does not reach the same bits here: {message}; {_COUNTS}", True, hint, related=(key,)
        )
        for key, message, hint in _obstacles(config)
    ]


def _obstacles(config: Config) -> Iterator[tuple[str, str, str]]:
    """(key, why, remedy) of everything that lets chance in."""
    replicas = config.policy.parallelism.n_init_replicas
    if replicas > 1:
        key = "policy.parallelism.n_init_replicas"
        yield key, f"{replicas} policy replicas add up gradients in the order they come", f"write {key} = 1"
    if not config.is_grpo:
        return
    if config.rollout.backend == "vllm":
        key = "rollout.backend"
        why = 'rollout.backend = "vllm" batches by what arrives when, and the last bits of log-probs follow'
        yield key, why, f'write {key} = "transformers"'
    if config.staleness_bound > 0:
        key, bound = "train.train_policy.allowed_outdated_steps", config.staleness_bound
        why = f"with {key} = {bound} the version that a sample is made by is a matter of speed"
        yield key, why, f"write {key} = 0"
    if config.controller.oversample > 1.0:
        key = "controller.oversample"
        yield (
            key,
            f"with {key} = {config.controller.oversample} the fastest groups are trained",
            f"write {key} = 1.0",
        )
    if config.controller.on_stale == "drop":
        key = "controller.on_stale"
        yield key, f'{key} = "drop" drops groups by the clock', f'write {key} = "wait"'


EXACTNESS_WARNINGS = (the_same_bits_are_possible,)
