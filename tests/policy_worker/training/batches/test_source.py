"""What the log says of a batch, and how old its tokens may be."""

from __future__ import annotations

import numpy as np
import pytest

from policy_worker.errors import BadBatchError
from policy_worker.model.micro_batch import TrainSample
from policy_worker.training.batches.source import check_versions, describe
from schema.wire.batch import StepTable


def table(group_ids: list[str], oldest: list[int], newest: list[int]) -> StepTable:
    n = len(group_ids)
    return StepTable(
        step=7,
        timeline=1,
        policy_epoch=2,
        group_ids=group_ids,
        group=list(range(n)),
        index=[0] * n,
        score=[None if value < 0 else 1.0 for value in oldest],
        rewards={},
        prompt_tokens=[1] * n,
        response_tokens=[2] * n,
        total_tokens=[3] * n,
        oldest_version=oldest,
        newest_version=newest,
        finish_reason=["stop"] * n,
    )


@pytest.mark.parametrize(
    ("group_ids", "said"),
    [
        (["e0-p28", "e0-p29", "e0-p30", "e0-p33"], "e0-p28..30 e0-p33"),
        (["e0-p3", "e0-p3-s1", "e0-p4-s1", "e0-p4-s2"], "e0-p3 e0-p3..4-s1 e0-p4-s2"),
        (["e0-p99", "e1-p100", "e1-p0", "e1-p1"], "e0-p99 e1-p100 e1-p0..1"),
    ],
)
def test_a_batch_is_told_in_one_line(group_ids: list[str], said: str) -> None:
    text = describe(table(group_ids, [5, 6, 6, -1], [6, 7, 6, -1]))
    assert text == f"step 7 of timeline 1 trains 3 samples of versions 5 to 7: {said}"


@pytest.mark.parametrize("version", [4, 8, -1])
def test_a_token_too_old_or_of_the_future_is_refused(version: int) -> None:
    sample = TrainSample([], np.array([6] * 5 + [version], np.int32))
    with pytest.raises(BadBatchError, match=rf"sample 3 of step 7 .* version {version}, .* versions 5 to 7"):
        check_versions(7, 3, sample, 2)
    check_versions(7, 3, TrainSample([], np.array([5] * 7 + [7] * 2, np.int32)), 2)
