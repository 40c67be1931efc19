"""Kept sets out of the log-probs that vLLM returns."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_worker.engines.base import EngineConfigError
from rollout_worker.engines.vllm.adapter import kept_sets


def sets(ids: list[list[int]], logprobs: list[list[float]], vocabulary: int = 9) -> list[list[int]]:
    with np.errstate(divide="ignore"):
        logs = np.log(np.array(logprobs, np.float32))
    counts, kept = kept_sets(np.array(ids, np.int32), logs, vocabulary)
    return [one.tolist() for one in np.split(kept, np.cumsum(counts)[:-1])]


def test_the_set_is_what_has_a_finite_log_prob() -> None:
    ids, probabilities = [[4, 2, 4, 1], [3, 3, 0, 1]], [[0.3, 0.7, 0.3, 0.0], [1.0, 1.0, 0.0, 0.0]]
    assert sets(ids, probabilities) == [[2, 4], [3]]


def test_a_token_that_is_not_among_the_likeliest_is_in_its_set() -> None:
    assert sets([[5, 2, 4]], [[0.2, 0.4, 0.4]]) == [[5, 2, 4]]


def test_a_set_of_all_is_not_listed() -> None:
    assert sets([[1, 0, 1, 2]], [[0.3, 0.5, 0.3, 0.2]], vocabulary=3) == [[]]


def test_a_set_that_ties_have_made_too_large_is_refused() -> None:
    with pytest.raises(EngineConfigError, match=r"more than 2 ids, .* rollout\.sampling_config\.top_k"):
        sets([[1, 0, 1]], [[0.3, 0.3, 0.3]])
