"""Tensors that are parked have no memory, and come back bit by bit, with all their views."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weight_sync.parking import Parked

ANYWHERE = ""


def test_memory_is_released_and_every_view_is_right_again() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    state = [value for one in optimizer.state.values() for value in one.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *state]
    view, before = model.weight.data[3:5], [tensor.clone() for tensor in tensors]
    parked = Parked([*tensors, view], ANYWHERE)
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
    parked.restore()
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
    assert torch.equal(view, before[0][3:5])
    assert view.data_ptr() == model.weight.data_ptr() + 3 * 64 * 4


@pytest.mark.parametrize("stays", ["cpu"])
def test_what_is_in_host_memory_stays(stays: str) -> None:
    tensor = torch.arange(8.0)
    parked = Parked([tensor], stays)
    assert tensor.tolist() == list(range(8))
    parked.restore()
    assert tensor.tolist() == list(range(8))
