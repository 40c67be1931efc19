"""vLLM keeps the contract of all engines: real vLLM in processes of its own, on a CPU here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rollout_worker.engines.base import SamplingSettings
from rollout_worker.engines.vllm.arguments import MOST_HELD_BACK
from schema.config import Config
from tests.rollout_worker.engines.engine_contract import (
    PROMPTS,
    RAW,
    EngineContract,
    KeepKvContract,
    Subject,
    request,
    running,
)

pytestmark = pytest.mark.slow

MODEL_RUNNER = "model_runner"
"""Property of a test report: the model runner of vLLM that the engine met."""
AHEAD = "schedules_ahead"
"""Whether it schedules a step while the one before is on its way."""


class TestVllm(EngineContract):
    backend = "vllm"
    raw_at = ()
    sleeps = torch.cuda.is_available()

    @classmethod
    def config(cls, model: Path, **sections: Any) -> Config:
        turns = {"placement": {"share": "time"}} if cls.sleeps else {}
        return super().config(model, **turns | sections)

    def test_the_model_runner_is_the_one_of_the_configuration(
        self, subject: Subject, record_testsuite_property: Callable[[str, object], None]
    ) -> None:
        """Its name is in the report: the rest of the contract holds for this one."""
        adapter: Any = subject.engine._adapter  # type: ignore[attr-defined]
        record_testsuite_property(MODEL_RUNNER, adapter.runner)
        vllm_config = adapter._llm.vllm_config
        assert adapter.runner == ("V2" if vllm_config.use_v2_model_runner else "V1")
        record_testsuite_property(AHEAD, vllm_config.scheduler_config.async_scheduling)

    def test_more_stop_tokens_than_the_model_runner_holds_back_are_refused(self, subject: Subject) -> None:
        """The second runner would end vLLM's process."""
        settings = SamplingSettings(max_tokens=4, min_tokens=2, stop_token_ids=tuple(range(MOST_HELD_BACK)))
        if subject.engine._adapter.runner == "V1":  # type: ignore[attr-defined]
            subject.one(request(PROMPTS[0], settings))
            return
        with pytest.raises(ValueError, match=r"holds back 129 stop tokens.* V2 holds back 128 at most"):
            subject.one(request(PROMPTS[0], settings))
        subject.one(request(PROMPTS[0], replace(settings, min_tokens=0)))


class RawContract(TestVllm):
    """Not collected."""

    raw_at = (1.0,)
    rollout: ClassVar[dict[str, Any]] = {"sampling_config": RAW}


@pytest.mark.soak
class TestRaw:
    """With log-probs of the softmax of the logits: what it has instead is said, what it has not is refused."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        with running(RawContract, tmp_path_factory.mktemp("raw")) as subject:
            yield subject

    def test_raw_log_probs_are_those_of_the_softmax_or_refused(self, subject: Subject, tmp_path: Path) -> None:
        RawContract().test_raw_log_probs_are_those_of_the_softmax_or_refused(subject, tmp_path)
        others = SamplingSettings(24, temperature=0.6, top_p=0.9, correction="none")
        with pytest.raises(ValueError, match=r'correction = "none" at temperature 0\.6'):
            subject.one(request(PROMPTS[0], others, (1,)))
        subject.one(request(PROMPTS[0], replace(others, correction="unread"), (1,)))


@pytest.mark.soak
class TestKeepKv(KeepKvContract):
    """With a cache that outlives updates; the rest of the contract is the same engine's above."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        with running(TestVllm, tmp_path_factory.mktemp("keep"), weight_sync={"update_mode": "keep_kv"}) as subject:
            yield subject
