"""vLLM keeps the contract of all engines: real vLLM in processes of its own, on a CPU here."""

from __future__ import annotations

import pytest

from tests.rollout_worker.engine_contract import EngineContract

pytestmark = pytest.mark.slow


class TestVllm(EngineContract):
    backend = "vllm"
