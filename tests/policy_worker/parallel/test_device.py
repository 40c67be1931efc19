"""A trainer computes on the GPUs that the launcher dealt to it, or ends by name."""

from __future__ import annotations

import pytest
import torch

from policy_worker.errors import SettingsError
from policy_worker.parallel.rank_group import pick_device
from schema.util.gpus import VARIABLE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can be opened here")


def test_a_rank_without_dealt_gpus_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert pick_device(0) == torch.device("cpu")


def test_a_rank_never_takes_the_cpu_for_a_dealt_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(SettingsError, match="dealt 1 GPU to this process, and PyTorch cannot open one: "):
        pick_device(0)
