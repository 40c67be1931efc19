"""The chosen experts out of what vLLM returns."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_worker.engines.base import EngineFailed
from rollout_worker.engines.vllm.adapter import Ids, chosen_experts

RETURNED = np.arange(6 * 4 * 2, dtype=np.uint16).reshape(6, 4, 2)
"""Of six tokens in four layers, two of which have experts: [rows, layers, k]."""


@pytest.mark.parametrize("computed", [1, 5, 6])
def test_rows_of_computed_tokens_in_the_layers_that_have_experts(computed: int) -> None:
    found = chosen_experts(RETURNED, computed, [1, 3])
    assert (found.dtype, found.shape) == (np.uint16, (computed, 2, 2))
    assert found.flags.c_contiguous
    for token in range(computed):
        assert found[token].tolist() == [RETURNED[token, 1].tolist(), RETURNED[token, 3].tolist()]
    assert chosen_experts(RETURNED.astype(np.uint8), computed, [0]).dtype == np.uint8


@pytest.mark.parametrize(
    ("returned", "mixtures", "message"),
    [
        (None, [1], "of 0 tokens in 0 layers, and 6 tokens"),
        (RETURNED[:5], [1], "of 5 tokens in 4 layers, and 6 tokens"),
        (RETURNED, [1, 4], "in 4 layers, and 6 tokens were computed in layers up to 4"),
    ],
)
def test_missing_rows_or_layers_end_the_engine(returned: Ids | None, mixtures: list[int], message: str) -> None:
    with pytest.raises(EngineFailed, match=rf'{message}.*: write train\.train_policy\.routing_replay = "none"'):
        chosen_experts(returned, 6, mixtures)
