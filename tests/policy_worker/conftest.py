from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from policy_worker.parallel.group import Group
from policy_worker.process import RankEnvironment
from tests.support.devices import DEVICE
from tests.support.objects import ObjectStore, running_objects


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """A replica of one rank, with its process group."""
    group = Group(RankEnvironment())
    assert group.device == DEVICE
    yield group
    group.close()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Equal bits from equal steps, as `train.deterministic` asks for them: some kernels of GPUs add in any order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """One server for all tests that only need buckets of their own."""
    with running_objects("cosmos-tests", "cosmos-proofs") as store:
        yield store
