"""Rules of batches: what is cut must come out whole, and what is shuffled must have more than one piece."""

from __future__ import annotations

import math
from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.sections.critic import CriticConfig
from schema.config.sections.train_policy import GrpoConfig

_POLICY = "train.train_policy"
_BATCH = "train.train_batch_per_replica"
_SEARCH = 100_000  # numbers looked at on each side for a divisor: a typing error of many digits must not hang


def divisor_below(number: int, start: int) -> int:
    """The largest divisor of `number` that is at most `start`, as far as it is near; else 1."""
    last = max(start - _SEARCH, 0)
    return next((value for value in range(start, last, -1) if number % value == 0), 1)


def divisor_above(number: int, start: int) -> int:
    """The smallest divisor of `number` that is at least `start`, as far as it is near; else the number itself."""
    last = min(start + _SEARCH, number)
    return next((value for value in range(start, last + 1) if number % value == 0), number)


def nearest_divisor(number: int, value: int) -> int:
    """The divisor of `number` that is nearest to `value`; of two equally near the smaller."""
    below, above = divisor_below(number, min(value, number)), divisor_above(number, value)
    return below if value - below <= above - value or above < value else above


def batch_is_whole_groups(config: Config) -> list[Problem]:
    """B = train_batch_per_replica * n_init_replicas / n_generation is a whole number (NUMERICS, Batches)."""
    if not config.is_grpo or config.samples_per_step % config.rollout.n_generation == 0:
        return []
    batch, replicas = config.train.train_batch_per_replica, config.policy.parallelism.n_init_replicas
    generation = config.rollout.n_generation
    unit = generation // math.gcd(generation, replicas)
    batches = [value for value in (batch // unit * unit, (batch // unit + 1) * unit) if value > 0]
    near = nearest_divisor(config.samples_per_step, generation)
    message = (
        f"{batch} samples per replica * {replicas} policy replicas = {config.samples_per_step} samples per "
        f"step, which is not a whole number of groups of rollout.n_generation = {generation}"
    )
    hint = f"write {_BATCH} = {' or '.join(map(str, batches))}"
    if near > 1:  # a group of one would have nothing to be compared with
        hint += f", or rollout.n_generation = {near}"
    related = ("rollout.n_generation", "policy.parallelism.n_init_replicas")
    return [Problem(_BATCH, message, batch, hint, related=related)]


def _learners(config: Config) -> Iterator[tuple[str, GrpoConfig | CriticConfig]]:
    """The sections that cut a batch into optimizer steps, with their keys."""
    if config.is_grpo:
        yield _POLICY, config.grpo
        if config.critic.enable:
            yield "critic", config.critic


def optimizer_steps_divide_batch(config: Config) -> list[Problem]:
    """The batch is cut into whole optimizer steps, the policy's and the critic's."""
    problems, batch = [], config.train.train_batch_per_replica
    for section, learner in _learners(config):
        piece = learner.batch_size_per_optimize
        if piece is None or batch % piece == 0:
            continue
        near = {divisor_below(batch, min(piece, batch)), divisor_above(batch, piece)}
        key = f"{section}.batch_size_per_optimize"
        message = f"{_BATCH} = {batch} cannot be cut into optimizer steps of {piece} samples"
        hint = f"write {key} = {' or '.join(map(str, sorted(near)))}"
        problems.append(Problem(key, message, piece, hint, related=(_BATCH,)))
    return problems


def shuffling_has_pieces(config: Config) -> list[Problem]:
    """A shuffle of samples before each pass changes something only if a pass has several optimizer steps."""
    problems, batch = [], config.train.train_batch_per_replica
    for section, learner in _learners(config):
        key, piece = f"{section}.mini_batch_shuffle", learner.batch_size_per_optimize
        if learner.mini_batch_shuffle and learner.mu_iterations == 1 and (piece is None or piece >= batch):
            shown = "unset" if piece is None else str(piece)
            message = (
                f"nothing is shuffled: {section}.mu_iterations = 1 and {section}.batch_size_per_optimize "
                f"({shown}) make one optimizer step of {_BATCH} = {batch}"
            )
            hint = f"write {section}.mu_iterations = 2, or leave it out"
            related = (f"{section}.mu_iterations", f"{section}.batch_size_per_optimize")
            problems.append(Problem(key, message, True, hint, related=related))
    if config.is_grpo and config.grpo.mini_batch_shuffle_seed is not None:
        shuffled = config.grpo.mini_batch_shuffle or (
            config.critic.enable and config.critic.mini_batch_shuffle
        )
        if not shuffled:
            key, other = f"{_POLICY}.mini_batch_shuffle_seed", f"{_POLICY}.mini_batch_shuffle"
            message = f"has no effect: {other} = false"
            hint, seed = f"leave it out, or write {other} = true", config.grpo.mini_batch_shuffle_seed
            if config.grpo.mu_iterations == 1 and config.grpo.batch_size_per_optimize is None:
                hint += f" and {_POLICY}.mu_iterations = 2"
            problems.append(Problem(key, message, seed, hint, related=(other,)))
    return problems


BATCH_RULES = (batch_is_whole_groups, optimizer_steps_divide_batch, shuffling_has_pieces)
