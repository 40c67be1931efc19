"""From what engine and rewards deliver to the sample that travels. Pure."""

from __future__ import annotations

import numpy as np

from rollout_worker.engines.base import Generation
from schema.wire.messages import LeasedGroup
from schema.wire.sample import FinishReason, Sample, SampleHeader

MAX_ERROR = 8192


def finish_reason(
    sample: Generation, prompt_tokens: int, max_tokens: int, model_max_length: int
) -> FinishReason:
    """Why a sample ended. `overlong`: it is longer than training allows, or was ended by the longest sequence
    of model or engine before its own limit: never cut in silence."""
    tokens = len(sample.token_ids)
    ended_early = sample.finish_reason == "length" and tokens < max_tokens
    if ended_early or prompt_tokens + tokens > model_max_length:
        return "overlong"
    return sample.finish_reason


def scored(
    group: LeasedGroup,
    index: int,
    generated: Generation,
    reason: FinishReason,
    rewards: dict[str, float],
    score: float | None,
    error: str | None,
    text: str | None,
    outage: bool = False,
) -> Sample:
    """A generated sample with its rewards, or with the error that took their place."""
    prompt = np.asarray(group.prompt_token_ids, np.int32)
    n, r = len(prompt), len(generated.token_ids)
    header = SampleHeader(
        index=index,
        prompt_tokens=n,
        response_tokens=r,
        total_tokens=n + r,
        oldest_version=int(generated.version_values.min()),
        newest_version=int(generated.version_values.max()),
        finish_reason=reason,
        rewards=rewards,
        score=score,
        error=None if error is None else error[:MAX_ERROR],
        outage=outage,
    )
    return Sample(
        header=header,
        token_ids=np.concatenate([prompt, generated.token_ids]),
        loss_mask=np.concatenate([np.zeros(n, np.uint8), np.ones(r, np.uint8)]),
        logprobs=np.concatenate([np.zeros(n, np.float32), np.minimum(generated.logprobs, 0.0)]),
        version_starts=np.concatenate([np.zeros(1, np.int32), generated.version_starts + np.int32(n)]),
        version_values=np.concatenate([np.full(1, -1, np.int32), generated.version_values]),
        text=text,
    )


def failed(group: LeasedGroup, index: int, error: str) -> Sample:
    """A sample that could not be generated: its prompt, and why."""
    prompt = np.asarray(group.prompt_token_ids, np.int32)
    n = len(prompt)
    header = SampleHeader(
        index=index,
        prompt_tokens=n,
        response_tokens=0,
        total_tokens=n,
        oldest_version=-1,
        newest_version=-1,
        finish_reason="abort",
        error=error[:MAX_ERROR],
    )
    return Sample(
        header=header,
        token_ids=prompt,
        loss_mask=np.zeros(n, np.uint8),
        logprobs=np.zeros(n, np.float32),
        version_starts=np.zeros(1, np.int32),
        version_values=np.full(1, -1, np.int32),
    )
