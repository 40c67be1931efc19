"""Rules of sizes: what a step, a group and a micro-batch hold, and which lengths in tokens fit into which."""

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


def whole_batches(batch: int, generation: int, replicas: int) -> list[int]:
    """The samples per replica next to `batch`, itself included, that make a step of whole groups."""
    unit = generation // math.gcd(generation, replicas)
    below = batch // unit * unit
    return [value for value in dict.fromkeys((below, -(-batch // unit) * unit)) if value > 0]


def batch_is_whole_groups(config: Config) -> Iterator[Problem]:
    """B = train_batch_per_replica * n_init_replicas / n_generation is a whole number (NUMERICS, Batches)."""
    if not config.is_grpo or config.samples_per_step % config.rollout.n_generation == 0:
        return
    batch, replicas = config.train.train_batch_per_replica, config.policy.parallelism.n_init_replicas
    generation = config.rollout.n_generation
    batches = whole_batches(batch, generation, replicas)
    near = nearest_divisor(config.samples_per_step, generation)
    message = (
        f"{batch} samples per replica * {replicas} policy replicas = {config.samples_per_step} samples per "
        f"step, which is not a whole number of groups of rollout.n_generation = {generation}"
    )
    hint = f"write {_BATCH} = {' or '.join(map(str, batches))}"
    if near > 1:  # a group of one would have nothing to be compared with
        hint += f", or rollout.n_generation = {near}"
    related = ("rollout.n_generation", "policy.parallelism.n_init_replicas")
    yield Problem(_BATCH, message, batch, hint, related=related)


def _learners(config: Config) -> Iterator[tuple[str, GrpoConfig | CriticConfig]]:
    """The sections that cut a batch into optimizer steps, with their keys."""
    if config.is_grpo:
        yield _POLICY, config.grpo
        if config.critic.enable:
            yield "critic", config.critic


def optimizer_steps_divide_batch(config: Config) -> Iterator[Problem]:
    """The batch is cut into whole optimizer steps, the policy's and the critic's."""
    batch = config.train.train_batch_per_replica
    for section, learner in _learners(config):
        piece = learner.batch_size_per_optimize
        if piece is None or batch % piece == 0:
            continue
        near = {divisor_below(batch, min(piece, batch)), divisor_above(batch, piece)}
        key = f"{section}.batch_size_per_optimize"
        message = f"{_BATCH} = {batch} cannot be cut into optimizer steps of {piece} samples"
        hint = f"write {key} = {' or '.join(map(str, sorted(near)))}"
        yield Problem(key, message, piece, hint, related=(_BATCH,))


def shuffling_has_pieces(config: Config) -> Iterator[Problem]:
    """A shuffle of samples before each pass changes something only if a pass has several optimizer steps."""
    batch = config.train.train_batch_per_replica
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
            yield Problem(key, message, True, hint, related=related)
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
            yield Problem(key, message, seed, hint, related=(other,))


_LONGEST = "policy.model_max_length"
_BUDGET = "max_token_len_per_mini_batch"


def longest_sample_fits(config: Config) -> Iterator[Problem]:
    """The hard cap on a micro-batch's tokens holds at least one sample of the longest kind, in every pass."""
    longest = config.policy.model_max_length
    for key, cap in _caps(config):
        if cap is not None and cap < longest:
            message = f"a sample of {_LONGEST} = {longest} tokens does not fit into a micro-batch of {cap}"
            hint = f"write {key} = {longest} or more"
            if not config.is_grpo or cap > config.rollout.max_response_length:
                hint += f", or {_LONGEST} = {cap}"
            yield Problem(key, message, cap, hint, related=(_LONGEST,))


def _caps(config: Config) -> Iterator[tuple[str, int | None]]:
    yield f"{_POLICY}.{_BUDGET}", config.train.train_policy.max_token_len_per_mini_batch
    if config.is_grpo:
        yield f"{_POLICY}.old_log_prob.{_BUDGET}", config.grpo.old_log_prob.max_token_len_per_mini_batch
        yield f"reference.{_BUDGET}", config.reference.max_token_len_per_mini_batch
        for number, teacher in enumerate(config.teacher):
            yield f"teacher[{number}].{_BUDGET}", teacher.max_token_len_per_mini_batch
        if config.critic.enable:
            yield f"critic.{_BUDGET}", config.critic.max_token_len_per_mini_batch


def _longest_responses(config: Config) -> dict[str, int]:
    """The longest answers of a GRPO job in tokens, by key."""
    if not config.is_grpo:
        return {}
    responses = {"rollout.max_response_length": config.rollout.max_response_length}
    if config.validation.enable and config.validation.max_response_length is not None:
        responses["validation.max_response_length"] = config.validation.max_response_length
    return responses


def longest_sequence(config: Config) -> tuple[str, int]:
    """Return the key that bounds prompt and answer together, and its tokens."""
    engine = config.rollout.max_model_len
    if engine is not None and engine < config.policy.model_max_length:
        return "rollout.max_model_len", engine
    return _LONGEST, config.policy.model_max_length


def responses_leave_room(config: Config) -> Iterator[Problem]:
    """Warning: an answer that may be as long as a whole sequence ends with the sequence."""
    limit_key, limit = longest_sequence(config)
    for key, response in _longest_responses(config).items():
        if response >= limit:
            message = (
                f"{response} tokens leave no room for a prompt within {limit_key} = {limit}: prompts of up to "
                f"{limit - 1} tokens are kept, an answer goes on until both together have {limit}, and one that "
                "is ended there counts as overlong, which is not trained"
            )
            hint = f"write {key} = {max(limit // 2, 1)}, or a larger {limit_key}"
            yield Problem(key, message, response, hint, related=(limit_key,))


def overlong_buffer_fits(config: Config) -> Iterator[Problem]:
    """The buffer in which the penalty grows is a part of the response, and answers reach it."""
    if not config.is_grpo or not config.grpo.overlong_reward.enable_overlong_penalty:
        return
    longest, buffer = config.rollout.max_response_length, config.grpo.overlong_reward.buffer_length
    limit_key, limit = longest_sequence(config)
    key, related = f"{_POLICY}.overlong_reward.buffer_length", ["rollout.max_response_length"]
    if buffer > longest:
        message = f"{buffer} is longer than rollout.max_response_length = {longest}"
        hint = f"write {key} = {max(longest // 4, 1)}, or any value up to {longest}"
    elif longest - buffer >= limit - 1:
        message = (
            f"the penalty begins at {longest - buffer} tokens (rollout.max_response_length = {longest} less "
            f"{buffer}), which no answer within {limit_key} = {limit} exceeds"
        )
        hint = f"write rollout.max_response_length = {max(limit // 2, 1)} and {key} = {max(limit // 8, 1)}"
        related.append(limit_key)
    else:
        return
    related.append(f"{_POLICY}.overlong_reward.enable_overlong_penalty")
    yield Problem(key, message, buffer, hint, related=tuple(related))


def engine_steps_hold_enough(config: Config) -> Iterator[Problem]:
    """vLLM: an engine step holds a whole prompt unless prompts come in chunks, and a token of each sequence."""
    rollout, key = config.rollout, "rollout.max_num_batched_tokens"
    budget = rollout.max_num_batched_tokens
    if not config.is_grpo or not rollout.engine.bounds_steps or budget is None:
        return
    longest = config.engine_max_len
    length_key = "rollout.max_model_len" if rollout.max_model_len is not None else _LONGEST
    if not rollout.enable_chunked_prefill and budget < longest:
        message = (
            f"{budget} tokens per engine step are fewer than {length_key} = {longest}, and "
            "rollout.enable_chunked_prefill = false does not cut a prompt"
        )
        hint = f"write {key} = {longest}, or rollout.enable_chunked_prefill = true"
        related = (length_key, "rollout.enable_chunked_prefill")
        yield Problem(key, message, budget, hint, related=related)
    elif rollout.max_num_seqs is not None and budget < rollout.max_num_seqs:
        message = (
            f"{budget} tokens per engine step are fewer than rollout.max_num_seqs = {rollout.max_num_seqs}"
        )
        hint = f"write {key} = {rollout.max_num_seqs} or more, or rollout.max_num_seqs = {budget}"
        yield Problem(key, message, budget, hint, related=("rollout.max_num_seqs",))


BATCH_RULES = (
    batch_is_whole_groups,
    optimizer_steps_divide_batch,
    shuffling_has_pieces,
    longest_sample_fits,
    overlong_buffer_fits,
    engine_steps_hold_enough,
)
BATCH_WARNINGS = (responses_leave_room,)
