from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from policy_worker.parallel.group import Group
from policy_worker.process import RankEnvironment


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """A replica of one rank, with its process group."""
    group = Group(RankEnvironment())
    yield group
    group.close()
