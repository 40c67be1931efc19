"""From the rewards of a sample to what is pushed: whatever comes out, every sample of a group is settled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_worker.groups.leasing import Leasing
from rollout_worker.groups.local_rows import LocalRows
from rollout_worker.groups.pipeline import GenerationPipeline
from rollout_worker.groups.pushing import Pusher, failed
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.rewards.pool import RewardResult
from rollout_worker.weights.follower import WeightFollower
from schema.wire.messages import SampleText
from schema.wire.sample import SampleHeader, read_sample_metadata
from tests.launcher.samples import config
from tests.rollout_worker.test_bookkeeping import generation, lease

REWARDS = {"boxed_math": 1.0, "format": 10.0}


class Letters:
    """Tokens as letters of the alphabet."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + number % 26) for number in ids)


def pushed(result: RewardResult, text: Any = "text", groups: int = 0) -> tuple[SampleHeader, SampleText | None]:
    """Header and text of what is queued for a sample with these rewards, where `groups` of each step are kept."""
    settings = config(
        train={"train_policy": {"type": "grpo", "reward_function": REWARDS}}, logging={"sample_groups": groups}
    )
    held, nothing = LeaseTable(), None

    async def work() -> tuple[SampleHeader, SampleText | None]:
        weights = WeightFollower(settings.weight_sync, nothing, nothing, nothing, held, Metrics())  # type: ignore[arg-type]
        leasing = Leasing(settings, nothing, nothing, held, weights, nothing, nothing, Metrics(), LocalRows({}))  # type: ignore[arg-type]
        pusher = Pusher(nothing, held, 1 << 20)  # type: ignore[arg-type]
        generating = GenerationPipeline(settings, nothing, Letters(), held, leasing, nothing, pusher)  # type: ignore[arg-type]
        group = held.add(lease(group_id="e0-p0"))
        assert group is not None
        scored: Future[RewardResult] = Future()
        scored.set_result(result)
        generating._push(group, 2, generation(), text, scored, began=time.monotonic())  # type: ignore[arg-type]
        (entry,) = pusher._queue
        assert entry.index == 2
        header, metadata = read_sample_metadata(entry.frame)
        kept = metadata.get("text")
        return header, None if kept is None else SampleText.model_validate_json(kept)

    return asyncio.run(work())


def test_rewards_become_a_score() -> None:
    header, kept = pushed(RewardResult({"boxed_math": 0.5, "format": 0.25}))
    assert (header.score, header.error, header.ending) == (3.0, None, "finished")
    assert header.seconds is not None
    assert kept is None


def test_samples_of_chosen_groups_are_kept_as_text() -> None:
    header, kept = pushed(RewardResult({"boxed_math": 0.5, "format": 0.25}), "one two\x1b[31m", groups=1_000_000)
    assert kept is not None
    assert kept.answer == "one two\x1b[31m"
    assert kept.prompt == Letters().decode(lease().prompt_token_ids)
    assert len(kept.pieces) == len(kept.logprobs) == header.response_tokens > 0
    assert kept.weights == REWARDS
    assert kept.versions[0][0] == 0


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (RewardResult({"boxed_math": 1.0}, "KeyError: no such word"), "KeyError: no such word"),
        (RewardResult({"boxed_math": 1.0, "format": 1e308}), "RewardNotANumber: the weighted sum of the rewards is "
                                                             "inf"),
    ],
)  # fmt: skip
def test_what_has_no_score_is_an_error_by_name(rewards: RewardResult, words: str) -> None:
    header, kept = pushed(rewards)
    assert (header.score, header.error, header.ending) == (None, words, "reward_error")
    assert kept is not None
    assert (kept.answer, kept.pieces) == ("text", [])


@pytest.mark.parametrize(
    ("rollout", "deterministic", "done", "asked"),
    [
        ({}, False, [], [((0, 1, 2, 3), True)]),
        ({}, False, [1, 3], [((0, 2), False)]),
        ({}, False, [0, 1, 2], [((3,), True)]),
        ({}, True, [1, 3], [((0, 1, 2, 3), True)]),
        ({"n_generation_to_batch": True}, True, [1], [((0,), False), ((2,), False), ((3,), True)]),
    ],
)
def test_the_greedy_sample_shares_the_request_of_its_group(
    rollout: dict[str, Any], deterministic: bool, done: list[int], asked: list[tuple[tuple[int, ...], bool]]
) -> None:
    settings = config(
        train={"deterministic": deterministic, "train_policy": {"type": "grpo"}},
        rollout={"backend": "transformers", **rollout},
    )
    held, nothing = LeaseTable(), None
    weights = WeightFollower(settings.weight_sync, nothing, nothing, nothing, held, Metrics())  # type: ignore[arg-type]
    engine = SimpleNamespace(max_model_len=64)
    leasing = Leasing(settings, nothing, engine, held, weights, nothing, nothing, Metrics(), LocalRows({}))  # type: ignore[arg-type]
    group = held.add(lease(n=4, greedy=3, done=done))
    assert group is not None
    requests = leasing._requests(group)
    assert [(one.seeds, one.greedy_last) for one in requests] == asked
    for one in requests:
        drawn = [one.settings_of(index).greedy for index in range(len(one.seeds))]
        assert drawn == [seed == 3 for seed in one.seeds]


def test_a_greedy_sample_is_marked_also_where_it_failed() -> None:
    group = lease(n=3, greedy=2)
    marked = [failed(group, index, "no").header.baseline for index in range(3)]
    assert marked == [False, False, True]
    unnamed = group.model_copy(update={"row": {**group.row, "data_source": None}})
    assert failed(unnamed, 0, "no").header.source == ""


def test_a_sample_that_cannot_be_made_does_not_hold_its_group_for_ever() -> None:
    header, _ = pushed(RewardResult({"boxed_math": 1.0, "format": 1.0}), text="\ud800")
    assert header.score is None
    assert header.error is not None
    assert header.error.startswith("UnicodeEncodeError")
