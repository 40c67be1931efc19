"""vLLM keeps the contract of all engines: real vLLM in processes of its own, on a CPU here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from schema.config import Config
from tests.rollout_worker.engines.engine_contract import EngineContract, KeepKvContract, Subject, running

pytestmark = pytest.mark.slow


class TestVllm(EngineContract):
    backend = "vllm"
    sleeps = torch.cuda.is_available()

    @classmethod
    def config(cls, model: Path, **sections: Any) -> Config:
        turns = {"placement": {"share": "time"}} if cls.sleeps else {}
        return super().config(model, **turns | sections)


@pytest.mark.soak
class TestKeepKv(KeepKvContract):
    """With a cache that outlives updates; the rest of the contract is the same engine's above."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
        with running(
            TestVllm, tmp_path_factory.mktemp("keep"), weight_sync={"update_mode": "keep_kv"}
        ) as subject:
            yield subject
