"""From the configuration to the settings of one request: training and validation."""

from __future__ import annotations

from rollout_worker.engines.base import SamplingSettings
from schema.config import Config


def training_settings(config: Config) -> SamplingSettings:
    """How training rollouts are drawn: `[rollout.sampling_config]` and the temperature of `train_policy`."""
    rollout, sampling = config.rollout, config.rollout.sampling_config
    return SamplingSettings(
        max_tokens=rollout.max_response_length,
        temperature=config.sampling_temperature,
        do_sample=sampling.do_sample,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        include_stop_str_in_output=rollout.include_stop_str_in_output,
        extra=dict(sampling.extra),
    )


def validation_settings(config: Config) -> SamplingSettings:
    """How validation answers are drawn: `[validation]` says how tokens are chosen, `[rollout]` when they end.

    A temperature of 0 is greedy decoding, where filters mean nothing.
    """
    rollout, sampling, validation = config.rollout, config.rollout.sampling_config, config.validation
    greedy = validation.temperature == 0.0
    return SamplingSettings(
        max_tokens=validation.max_response_length or rollout.max_response_length,
        temperature=validation.temperature,
        do_sample=True,
        top_p=1.0 if greedy or validation.top_p is None else validation.top_p,
        top_k=0 if greedy or validation.top_k is None else max(validation.top_k, 0),
        repetition_penalty=validation.repetition_penalty,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        include_stop_str_in_output=rollout.include_stop_str_in_output,
        extra=dict(sampling.extra),
    )
