from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policy_worker.algorithms.masks import SampleMasks, prefixes_of_groups, shared_prefixes
from schema.wire.batch import StepTable
from tests.policy_worker.material import make_sample, make_table

TOKENS = st.lists(st.integers(0, 2), max_size=6).map(lambda ids: np.array(ids, np.int32))


def test_by_hand():
    responses = [np.array(ids, np.int32) for ids in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [8])]
    assert shared_prefixes(responses, [1.0, 0.0, 1.0, 0.0], 1) == [3, 3, 2, 0]
    assert shared_prefixes(responses, [1.0, 0.0, 1.0, 0.0], 3) == [3, 3, 0, 0]
    assert shared_prefixes(responses, [1.0, 1.0, 1.0, 1.0], 1) == [0, 0, 0, 0]


@given(st.lists(st.tuples(TOKENS, st.sampled_from([0.0, 1.0])), max_size=6), st.integers(1, 3))
def test_each_is_the_longest_with_another_score(samples: list[tuple[np.ndarray, float]], minimum: int):
    responses, scores = [ids for ids, _ in samples], [score for _, score in samples]
    for mine, score, found in zip(responses, scores, shared_prefixes(responses, scores, minimum), strict=True):
        lengths = [
            next(n for n in range(len(mine), -1, -1) if list(mine[:n]) == list(ids[:n]))
            for ids, other in samples
            if other != score
        ]
        longest = max(lengths, default=0)
        assert found == (longest if longest >= minimum else 0)


def test_groups_are_apart():
    same = np.array([1, 2], np.int32)
    found = prefixes_of_groups({3: same, 0: same, 2: same}, [0, 0, 1, 0], [0.0, None, 5.0, 1.0], 1)
    assert found == {0: 2, 3: 2, 2: 0}


def scored(*rows: tuple[float | None, int, str]) -> StepTable:
    """A table of groups of two: score, generated tokens and end of each sample."""
    made = [
        make_sample(i % 2, [5], [6] * tokens, [-1.0] * tokens, score, finish_reason=end)
        for i, (score, tokens, end) in enumerate(rows)
    ]
    return make_table(made, group_size=2)


def test_masks_of_samples_by_hand():
    table = scored(
        (1.0, 4, "length"), (0.0, 3, "stop"), (0.0, 4, "stop"), (0.0, 2, "length"),
        (1.0, 4, "stop"), (None, 4, "length"), (1.0, 1, "stop"), (1.0, 2, "stop"),
    )  # fmt: skip
    assert SampleMasks().rows(table) == {}
    assert SampleMasks(truncated=True).rows(table) == {"truncated": {0, 3}}
    assert SampleMasks(mean_score_above=0.0).rows(table) == {"mean_score": {2, 3}}
    assert SampleMasks(mean_score_below=1.0).rows(table) == {"mean_score": {4, 6, 7}}
    assert SampleMasks(mean_score_above=0.5).rows(table) == {"mean_score": {0, 1, 2, 3}}
    assert SampleMasks(failed_from_tokens=3).rows(table) == {"failed": {1, 2}}
    greedy = table.model_copy(update={"baseline": [False, True] * 4})
    assert SampleMasks(True, 0.0).rows(greedy) == {"truncated": {0}, "mean_score": {2}}, "those are not trained"
    everything = SampleMasks(True, 0.0, 1.0, 3).rows(table)
    assert everything == {"truncated": {0, 3}, "mean_score": {2, 3, 4, 6, 7}, "failed": {1, 2}}
