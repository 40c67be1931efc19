"""Rules of sizes: what a step, a group and a micro-batch hold, and which lengths in tokens fit into which."""

from __future__ import annotations

import math
from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.rows import FirstOf, Refusal, Rule, refused, value_at
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
    samples, generation = config.samples_per_step, config.rollout.n_generation
    if not config.is_grpo or samples % generation == 0:
        return
    batch, replicas = config.train.train_batch_per_replica, config.policy.parallelism.n_init_replicas
    near = nearest_divisor(samples, generation)
    says = f"{batch} samples per replica * {replicas} policy replicas = {samples} samples per step, which is not a "
    hint = f"write {_BATCH} = {' or '.join(map(str, whole_batches(batch, generation, replicas)))}"
    if near > 1:  # a group of one would have nothing to be compared with
        hint += f", or rollout.n_generation = {near}"
    related = ("rollout.n_generation", "policy.parallelism.n_init_replicas")
    yield refused(config, _BATCH, says + "whole number of groups of {rollout.n_generation=}", hint, related)


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
        if piece is not None and batch % piece:
            near = {divisor_below(batch, min(piece, batch)), divisor_above(batch, piece)}
            says = f"{{{_BATCH}=}} cannot be cut into optimizer steps of {piece} samples"
            hint = f"write {{!}} = {' or '.join(map(str, sorted(near)))}"
            yield refused(config, f"{section}.batch_size_per_optimize", says, hint)


def shuffling_has_pieces(config: Config) -> Iterator[Problem]:
    """A shuffle of samples before each pass changes something only if a pass has several optimizer steps."""
    batch = config.train.train_batch_per_replica
    for section, learner in _learners(config):
        piece = learner.batch_size_per_optimize
        if learner.mini_batch_shuffle and learner.mu_iterations == 1 and (piece is None or piece >= batch):
            says = (
                f"nothing is shuffled: {{.mu_iterations=}} and {{.batch_size_per_optimize!}} ({piece or 'unset'}) "
                f"make one optimizer step of {_BATCH} = {batch}"
            )
            related = (".mu_iterations", ".batch_size_per_optimize")
            hint = "write {.mu_iterations!} = 2, or leave it out"
            yield refused(config, f"{section}.mini_batch_shuffle", says, hint, related)
    seed = config.is_grpo and config.grpo.mini_batch_shuffle_seed is not None
    if seed and not any(learner.mini_batch_shuffle for _, learner in _learners(config)):
        hint = "leave it out, or write {.mini_batch_shuffle!} = true"
        if config.grpo.mu_iterations == 1 and config.grpo.batch_size_per_optimize is None:
            hint += " and {.mu_iterations!} = 2"
        yield refused(config, f"{_POLICY}.mini_batch_shuffle_seed", "has no effect: {.mini_batch_shuffle=}", hint)


_LONGEST = "policy.model_max_length"
_BUDGET = "max_token_len_per_mini_batch"


def longest_sample_fits(config: Config) -> Iterator[Problem]:
    """The hard cap on a micro-batch's tokens holds at least one sample of the longest kind, in every pass."""
    for key, cap in _caps(config):
        if cap is not None and cap < config.policy.model_max_length:
            hint = f"write {{!}} = {{{_LONGEST}}} or more"
            if not config.is_grpo or cap > config.rollout.max_response_length:
                hint += f", or {_LONGEST} = {{}}"
            says = f"a sample of {{{_LONGEST}=}} tokens does not fit into a micro-batch of {{}}"
            yield refused(config, f"{key}.{_BUDGET}", says, hint)


def _caps(config: Config) -> Iterator[tuple[str, int | None]]:
    yield _POLICY, config.train.train_policy.max_token_len_per_mini_batch
    if config.is_grpo:
        yield f"{_POLICY}.old_log_prob", config.grpo.old_log_prob.max_token_len_per_mini_batch
        yield "reference", config.reference.max_token_len_per_mini_batch
        for number, teacher in enumerate(config.teacher):
            yield f"teacher[{number}]", teacher.max_token_len_per_mini_batch
        if config.critic.enable:
            yield "critic", config.critic.max_token_len_per_mini_batch


def longest_sequence(config: Config) -> tuple[str, int]:
    """Return the key that bounds prompt and answer together, and its tokens."""
    engine = config.rollout.max_model_len
    if engine is not None and engine < config.policy.model_max_length:
        return "rollout.max_model_len", engine
    return _LONGEST, config.policy.model_max_length


def responses_leave_room(config: Config) -> Iterator[Problem]:
    """Warning: an answer that may be as long as a whole sequence ends with the sequence."""
    key, limit = longest_sequence(config)
    validated = ["validation", *(f"validation.dataset.part[{i}]" for i in range(len(config.validation.dataset.part)))]
    sections = ["rollout", *(validated if config.validation.enable else [])] if config.generates else []
    for section in sections:
        response = value_at(config, f"{section}.max_response_length")
        if response is not None and response >= limit:
            says = (
                f"{{}} tokens leave no room for a prompt within {{{key}=}}: prompts of up to {limit - 1} tokens are "
                f"kept, an answer goes on until both together have {limit}, and one that is ended there counts as "
                "overlong, which is not trained"
            )
            hint = f"write {{!}} = {max(limit // 2, 1)}, or a larger {key}"
            yield refused(config, f"{section}.max_response_length", says, hint)


def overlong_buffer_fits(config: Config) -> Iterator[Problem]:
    """The buffer in which the penalty grows is a part of the response, and answers reach it."""
    if not config.is_grpo or not config.grpo.overlong_reward.enable_overlong_penalty:
        return
    longest, buffer = config.rollout.max_response_length, config.grpo.overlong_reward.buffer_length
    key, limit = longest_sequence(config)
    related = ["rollout.max_response_length", ".enable_overlong_penalty"]
    if buffer > longest:
        says = "{} is longer than {rollout.max_response_length=}"
        hint = f"write {{!}} = {max(longest // 4, 1)}, or any value up to {longest}"
    elif longest - buffer >= limit - 1:
        says = f"the penalty begins at {longest - buffer} tokens ({{rollout.max_response_length=}} less {{}}), which "
        says += f"no answer within {key} = {limit} exceeds"
        hint = f"write rollout.max_response_length = {max(limit // 2, 1)} and {{!}} = {max(limit // 8, 1)}"
        related.insert(1, key)
    else:
        return
    yield refused(config, f"{_POLICY}.overlong_reward.buffer_length", says, hint, related)


def _tokens_of_a_step(config: Config) -> int | None:
    """Tokens per engine step, where the engine has such a bound."""
    rollout = config.rollout
    return rollout.max_num_batched_tokens if config.generates and rollout.engine.bounds_steps else None


def _length_key(config: Config) -> str:
    return "rollout.max_model_len" if config.rollout.max_model_len is not None else _LONGEST


BATCH_RULES: tuple[Rule, ...] = (
    batch_is_whole_groups,
    optimizer_steps_divide_batch,
    shuffling_has_pieces,
    longest_sample_fits,
    overlong_buffer_fits,
    FirstOf(  # vLLM: an engine step holds a whole prompt unless prompts come in chunks, and a token of each sequence
        Refusal("rollout.max_num_batched_tokens",
            lambda c: not c.rollout.enable_chunked_prefill and (_tokens_of_a_step(c) or math.inf) < c.engine_max_len,
            lambda c: f"{{}} tokens per engine step are fewer than {{{_length_key(c)}=}}, and "
            "{.enable_chunked_prefill=} does not cut a prompt",
            lambda c: f"write {{!}} = {c.engine_max_len}, or {{.enable_chunked_prefill!}} = true"),
        Refusal("rollout.max_num_batched_tokens",
            lambda c: (_tokens_of_a_step(c) or math.inf) < (c.rollout.max_num_seqs or 0),
            "{} tokens per engine step are fewer than {.max_num_seqs=}",
            "write {!} = {.max_num_seqs} or more, or {.max_num_seqs!} = {}"),
    ),
)  # fmt: skip
BATCH_WARNINGS = (responses_leave_room,)
