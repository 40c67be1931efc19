"""The pure parts of the worker loop: groups held, samples made, numbers shown, wishes to leave."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.engines.base import EngineStats, Generation, GenerationRequest, SamplingSettings
from rollout_worker.engines.vllm import engine as vllm_engine
from rollout_worker.engines.vllm.adapter import Completion
from rollout_worker.groups.pipeline import finish_reason
from rollout_worker.groups.pushing import failed, to_sample
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.rewards.pool import PoolStats
from rollout_worker.shutdown import ShutdownRequest
from schema.config import Config
from schema.wire.messages import LeasedGroup
from schema.wire.sample import decode_sample, encode_sample


def lease(name: str = "a", n: int = 4, **changes: Any) -> LeasedGroup:
    fields: dict[str, Any] = {
        "group_id": f"group-{name}",
        "lease_id": f"lease-{name}",
        "kind": "train",
        "epoch": 0,
        "position": 0,
        "attempt": 1,
        "prompt_token_ids": [5, 6, 7],
        "row": {},
        "seeds": list(range(n)),
        "deadline": 3,
    }
    return LeasedGroup.model_validate({**fields, **changes})


def generation(
    n: int = 4, reason: str = "stop", starts: tuple[int, ...] = (0,), values: tuple[int, ...] = (2,)
) -> Generation:
    return Generation(
        request_id="r",
        index=0,
        token_ids=np.arange(n, dtype=np.int32),
        logprobs=np.full(n, -0.5, np.float32),
        version_starts=np.array(starts, np.int32),
        version_values=np.array(values, np.int32),
        finish_reason=reason,  # type: ignore[arg-type]
        stop_reason=None if reason == "length" else 256,
    )


# ---- held -----------------------------------------------------------------------------------------------------


def test_a_group_is_held_until_its_last_sample_is_done() -> None:
    held = LeaseTable()
    group = held.add(lease(n=3, done=[1]))
    assert group is not None
    assert (held.samples, held.lease_ids, held.pinned) == (2, ["lease-a"], False)
    held.ask("r1", group, [0, 2])
    assert held.request("r1") == (group, (0, 2))
    held.done("lease-a", 0)
    assert len(held) == 1
    held.done("lease-a", 2)
    assert (len(held), held.requests, held.request("r1")) == (0, [], None)


def test_a_group_twice_or_without_work_is_not_taken() -> None:
    held = LeaseTable()
    assert held.add(lease(n=2, done=[0, 1])) is None
    assert held.add(lease()) is not None
    assert held.add(lease()) is None


def test_dropping_tells_which_requests_to_abort() -> None:
    held = LeaseTable()
    for name in "ab":
        group = held.add(lease(name, pinned_version=2 if name == "a" else None))
        assert group is not None
        held.ask(f"r-{name}", group, [0, 1, 2, 3])
    assert held.pinned
    assert held.drop(["lease-a", "never heard of"]) == {"r-a"}
    assert not held.pinned
    assert held.requests == ["r-b"]
    held.done("lease-a", 0)
    assert [one.group_id for one in held.declared()] == ["group-b"]


@given(st.lists(st.tuples(st.sampled_from(["add", "done", "drop"]), st.integers(0, 4), st.integers(0, 3))))
def test_requests_belong_to_groups_that_are_held(events: list[tuple[str, int, int]]) -> None:
    held, number = LeaseTable(), 0
    for kind, which, index in events:
        if kind == "add":
            group = held.add(lease(str(which)))
            if group is not None:
                number += 1
                held.ask(f"r{number}", group, range(4))
        elif kind == "done":
            held.done(f"lease-{which}", index)
        else:
            held.drop([f"lease-{which}"])
        groups = [found[0] for request in held.requests if (found := held.request(request)) is not None]
        assert {group.lease.lease_id for group in groups} == set(held.lease_ids)
        assert held.samples == sum(len(group.open) for group in groups)
        assert all(group.open for group in groups)


# ---- samples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "reason", "prompt", "expected"),
    [
        (5, "stop", 3, "stop"),
        (10, "stop", 3, "stop"),
        (10, "length", 3, "length"),
        (9, "length", 3, "overlong"),
        (10, "stop", 11, "overlong"),
        (10, "length", 11, "overlong"),
        (10, "length", 10, "length"),
    ],
)
def test_finish_reason(tokens: int, reason: str, prompt: int, expected: str) -> None:
    """At most 10 tokens of response, 20 in all. Ended earlier by length: by the longest sequence, not by us."""
    assert finish_reason(generation(tokens, reason), prompt, 10, 20) == expected


@given(st.integers(1, 30), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.data())
def test_a_scored_sample_is_what_the_wire_checks(n: int, versions: list[int], data: st.DataObject) -> None:
    runs = sorted(set(versions))[:n]
    starts = sorted({0, *data.draw(st.sets(st.integers(0, n - 1), max_size=len(runs) - 1))})
    runs = runs[: len(starts)]
    starts = starts[: len(runs)]
    answer = generation(n, "stop", tuple(starts), tuple(runs))
    judged = {"rewards": {"f": 1.0}, "score": 0.5}
    made = to_sample(lease(), 2, answer, "stop", error=None, text="text ü", **judged)
    sample = decode_sample(encode_sample(made))
    assert sample.token_ids.tolist() == [5, 6, 7, *range(n)]
    assert sample.loss_mask.tolist() == [0, 0, 0] + [1] * n
    assert (sample.header.oldest_version, sample.header.newest_version) == (runs[0], runs[-1])
    assert sample.text == "text ü"
    assert sample.header.index == 2


def test_the_experts_of_prompt_and_answer_go_with_a_sample() -> None:
    ids = np.arange(6 * 2 * 3, dtype=np.uint16).reshape(6, 2, 3)
    chosen = replace(generation(4, "stop"), expert_ids=ids, expert_weights=ids.astype(np.float32))
    made = to_sample(lease(), 0, chosen, "stop", error=None, score=1.0)
    sample = decode_sample(encode_sample(made))
    assert sample.expert_shape.tolist() == [2, 3]
    assert (sample.expert_ids.dtype, sample.expert_ids.tolist()) == (np.uint16, list(range(36)))
    assert sample.expert_weights.tolist() == list(range(36))


def test_an_error_takes_the_place_of_a_score() -> None:
    made = to_sample(lease(), 0, generation(), "stop", error="X: " + "y" * 10_000)
    header = decode_sample(encode_sample(made)).header
    assert header.score is None
    assert header.error is not None
    assert header.error.startswith("X: y")


def test_a_failed_sample_carries_its_prompt_and_why() -> None:
    sample = decode_sample(encode_sample(failed(lease(), 1, "PromptTooLong: …")))
    assert sample.token_ids.tolist() == [5, 6, 7]
    assert not sample.loss_mask.any()
    assert (sample.header.response_tokens, sample.header.oldest_version) == (0, -1)
    assert sample.header.error == "PromptTooLong: …"


# ---- metrics ---------------------------------------------------------------------------------------------------


def stats(idle: float, samples: int, tokens: int) -> EngineStats:
    return EngineStats(idle_s=idle, samples=samples, tokens=tokens, running=1, waiting=2)


def test_rates_look_back_ten_seconds_and_idle_counts_from_the_first_lease() -> None:
    metrics = Metrics()
    assert "idle_fraction" not in metrics.read(0.0, stats(0.0, 0, 0))
    metrics.training_began(100.0, stats(60.0, 0, 0))
    metrics.training_began(101.0, stats(99.0, 0, 0))
    metrics.rewards = lambda: PoolStats(attempts=8, seconds=4.0, retried=2)
    values = metrics.read(104.0, stats(61.0, 40, 400))
    assert values["idle_fraction"] == pytest.approx(0.25)
    assert [values[f"reward_{name}"] for name in ("attempts", "seconds", "retried")] == [8.0, 4.0, 2.0]
    for second in range(105, 130):
        values = metrics.read(float(second), stats(61.0, 40 + 10 * (second - 104), 400 + 100 * (second - 104)))
    assert values["samples_per_s"] == pytest.approx(10.0)
    assert values["tokens_per_s"] == pytest.approx(100.0)
    assert values["idle_fraction"] == pytest.approx(1.0 / 29)


class Inside:
    """What the engine asks of vLLM, which has aborted a request a while after its task was cancelled."""

    max_model_len, vocabulary, death, runner = 64, 64, "", "V1"

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.answer = asyncio.Event()

    def progress(self) -> dict[str, int]:
        return dict(self.tokens)

    async def generate(self, name: str, *_: Any, **__: Any) -> Completion:
        self.tokens[name] = 0
        try:
            await self.answer.wait()
        finally:
            del self.tokens[name]
        await asyncio.sleep(0)
        none = np.zeros(0, np.int32)
        return Completion(
            [5] * 30, np.zeros(30, np.float32), [(0, 0)], "stop", None, none, none, np.zeros((0, 0, 0), np.uint8)
        )


def test_tokens_of_aborted_requests_stay_in_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "installed_version", lambda: "")
    totals: list[int] = []

    async def work() -> None:
        engine, inside = vllm_engine.VllmEngine(Config.model_validate({}), None, frozenset()), Inside()
        engine._adapter = inside  # type: ignore[assignment]
        engine._gate.set()
        settings = SamplingSettings(max_tokens=40)
        engine.submit([GenerationRequest(name, [5], (1, 2), settings) for name in ("a", "b")])

        async def look() -> None:
            for _ in range(4):
                totals.append(engine.stats().tokens)
                await asyncio.sleep(0)

        await look()
        for name, tokens in (("a/0", 10), ("b/0", 20), ("b/1", 30)):
            inside.tokens[name] = tokens
        await look()
        inside.tokens["a/1"] = 5
        engine.abort(["a"])
        await look()
        inside.answer.set()
        await look()
        assert (engine.stats().samples, engine.stats().longest) == (2, 0)
        engine.abort(["a", "b"])

    asyncio.run(work())
    assert totals == sorted(totals)
    assert list(dict.fromkeys(totals)) == [0, 60, 65, 75]


# ---- shutdown ------------------------------------------------------------------------------------------------


def test_a_more_urgent_wish_replaces_another() -> None:
    async def work() -> None:
        shutdown = ShutdownRequest()
        assert not shutdown.asked
        shutdown.ask("drain", "first")
        shutdown.ask("drain", "second")
        await asyncio.wait_for(shutdown.wait(), 1)
        assert (shutdown.kind, shutdown.reason) == ("drain", "first")
        shutdown.ask("stop", "now")
        shutdown.ask("finished", "too late")
        await asyncio.wait_for(shutdown.wait_urgent(), 1)
        assert (shutdown.kind, shutdown.reason) == ("stop", "now")

    asyncio.run(work())


def test_a_lost_parent_is_noticed() -> None:
    async def work() -> None:
        shutdown = ShutdownRequest()
        shutdown.check_parent(None)
        shutdown.check_parent(os.getppid())
        assert not shutdown.asked
        shutdown.check_parent(1_000_000_000)
        assert shutdown.kind == "stop"

    asyncio.run(work())


def test_requests_that_take_too_long_are_given_up_once() -> None:
    held = LeaseTable()
    group = held.add(lease("a"))
    assert group is not None
    held.ask("r1", group, [0, 1, 2], 10.0)
    held.ask("r2", group, [3], 20.0)
    held.generated("r1", 1)
    held.done("lease-a", 0)
    assert held.overdue(10.0) == []
    assert held.overdue(15.0) == [("r1", group, [2])]
    assert held.overdue(15.0) == []
    held.generated("r1", 2)  # it came in the very moment
    assert held.overdue(30.0) == [("r2", group, [3])]
    held.drop(["lease-a"])
    assert held.overdue(99.0) == []


def test_time_asleep_is_no_time_of_a_request() -> None:
    held = LeaseTable()
    group = held.add(lease())
    assert group is not None
    held.ask("before", group, [0], 10.0)
    held.sleep(14.0)
    held.ask("meanwhile", group, [1], 50.0)
    assert held.overdue(99.0) == [], "nothing is given up that cannot go on"
    held.wake(114.0)
    assert held.overdue(110.0) == []
    assert [name for name, *_ in held.overdue(110.5)] == ["before"]
    assert held.overdue(114.0) == []
    assert [name for name, *_ in held.overdue(114.5)] == ["meanwhile"]
