"""Rules of lengths in tokens: what is generated fits into what is trained on, and that into a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from schema.config.problem import Problem
from schema.config.root import Config

_POLICY = "train.train_policy"
_LONGEST = "policy.model_max_length"
_BUDGET = "max_token_len_per_mini_batch"


def longest_sample_fits(config: Config) -> list[Problem]:
    """The hard cap on a micro-batch's tokens holds at least one sample of the longest kind, in every pass."""
    problems, longest = [], config.policy.model_max_length
    for key, cap in _caps(config):
        if cap is not None and cap < longest:
            message = f"a sample of {_LONGEST} = {longest} tokens does not fit into a micro-batch of {cap}"
            hint = f"write {key} = {longest} or more"
            if not config.is_grpo or cap > config.rollout.max_response_length:
                hint += f", or {_LONGEST} = {cap}"
            problems.append(Problem(key, message, cap, hint, related=(_LONGEST,)))
    return problems


def _caps(config: Config) -> Iterator[tuple[str, int | None]]:
    yield f"{_POLICY}.{_BUDGET}", config.train.train_policy.max_token_len_per_mini_batch
    if config.is_grpo:
        yield f"{_POLICY}.old_log_prob.{_BUDGET}", config.grpo.old_log_prob.max_token_len_per_mini_batch
        yield f"reference.{_BUDGET}", config.reference.max_token_len_per_mini_batch
        if config.critic.enable:
            yield f"critic.{_BUDGET}", config.critic.max_token_len_per_mini_batch


def responses_leave_room(config: Config) -> list[Problem]:
    """A response leaves room for a prompt, in the trainer and in the engine."""
    if not config.is_grpo:
        return []
    responses = {"rollout.max_response_length": config.rollout.max_response_length}
    if config.validation.enable and config.validation.max_response_length is not None:
        responses["validation.max_response_length"] = config.validation.max_response_length
    limits = {_LONGEST: config.policy.model_max_length}
    if config.rollout.max_model_len is not None:
        limits["rollout.max_model_len"] = config.rollout.max_model_len
    problems = []
    for key, response in responses.items():
        for limit_key, limit in limits.items():
            if response >= limit:
                message = f"{response} tokens leave no room for a prompt within {limit_key} = {limit}"
                hint = f"write {key} = {max(min(limits.values()) // 2, 1)}, or a larger {limit_key}"
                problems.append(Problem(key, message, response, hint, related=(limit_key,)))
    return problems


def overlong_buffer_fits(config: Config) -> list[Problem]:
    """The buffer in which the penalty grows is a part of the response."""
    if not config.is_grpo or not config.grpo.overlong_reward.enable_overlong_penalty:
        return []
    longest, buffer = config.rollout.max_response_length, config.grpo.overlong_reward.buffer_length
    if buffer <= longest:
        return []
    key = f"{_POLICY}.overlong_reward.buffer_length"
    message = f"{buffer} is longer than rollout.max_response_length = {longest}"
    hint = f"write {key} = {max(longest // 4, 1)}, or any value up to {longest}"
    related = ("rollout.max_response_length", f"{_POLICY}.overlong_reward.enable_overlong_penalty")
    return [Problem(key, message, buffer, hint, related=related)]


def engine_steps_hold_enough(config: Config) -> list[Problem]:
    """vLLM: an engine step holds a whole prompt unless prompts come in chunks, and a token of each sequence."""
    rollout, key = config.rollout, "rollout.max_num_batched_tokens"
    budget = rollout.max_num_batched_tokens
    if not config.is_grpo or rollout.backend != "vllm" or budget is None:
        return []
    problems, longest = [], config.engine_max_len
    length_key = "rollout.max_model_len" if rollout.max_model_len is not None else _LONGEST
    if not rollout.enable_chunked_prefill and budget < longest:
        message = (
            f"{budget} tokens per engine step are fewer than {length_key} = {longest}, and "
            "rollout.enable_chunked_prefill = false does not cut a prompt"
        )
        hint = f"write {key} = {longest}, or rollout.enable_chunked_prefill = true"
        related = (length_key, "rollout.enable_chunked_prefill")
        problems.append(Problem(key, message, budget, hint, related=related))
    elif rollout.max_num_seqs is not None and budget < rollout.max_num_seqs:
        message = (
            f"{budget} tokens per engine step are fewer than rollout.max_num_seqs = {rollout.max_num_seqs}"
        )
        hint = f"write {key} = {rollout.max_num_seqs} or more, or rollout.max_num_seqs = {budget}"
        problems.append(Problem(key, message, budget, hint, related=("rollout.max_num_seqs",)))
    return problems


LENGTH_RULES = (longest_sample_fits, responses_leave_room, overlong_buffer_fits, engine_steps_hold_enough)
