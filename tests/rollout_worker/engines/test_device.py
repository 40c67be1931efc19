"""An engine computes on the GPUs that the launcher dealt to its process, or ends by name."""

from __future__ import annotations

import pytest
import torch

from rollout_worker.engines.base import EngineConfigError, check_no_gpu_was_dealt
from schema.util.gpus import VARIABLE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be opened here")


def test_an_engine_without_dealt_gpus_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    check_no_gpu_was_dealt()


def test_an_engine_never_takes_the_cpu_for_a_dealt_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "2")
    with pytest.raises(EngineConfigError, match="dealt 2 GPUs to this process, and PyTorch cannot open one: "):
        check_no_gpu_was_dealt()


def test_an_engine_built_for_cpus_is_refused_where_pytorch_could_use_the_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(EngineConfigError, match="the installed engine computes on the CPU"):
        check_no_gpu_was_dealt()
