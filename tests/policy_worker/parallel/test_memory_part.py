"""A rank leaves an engine on its GPU the memory that is the engine's."""

from __future__ import annotations

import pytest
import torch

from policy_worker.parallel.rank_group import CONTEXT_BYTES, keep_to_part
from schema.util.gpus import PART_VARIABLE

TOTAL = 80 * CONTEXT_BYTES


@pytest.mark.parametrize(
    ("part", "total", "kept"),
    [("", TOTAL, None), ("1", TOTAL, None), ("0.5", TOTAL, 39 / 80), ("0.2", TOTAL // 40, 0.1)],
)
def test_the_allocator_is_bounded_on_the_device_of_the_rank(
    part: str, total: int, kept: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the part without what a process takes next to its tensors; at least by half of it, on a tiny GPU."""
    bounds: list[tuple[float, torch.device]] = []
    monkeypatch.setenv(PART_VARIABLE, part)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, total))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *bound: bounds.append(bound))
    second = torch.device("cuda", 1)
    keep_to_part(second)
    assert bounds == ([] if kept is None else [(pytest.approx(kept), second)])
