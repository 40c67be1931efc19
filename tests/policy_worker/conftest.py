from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from schema.config import Config
from tests.policy_worker.job import Job
from tests.support.devices import DEVICE
from tests.support.objects import ObjectStore, running_objects
from tests.support.valkey import ValkeyServer, running_valkey


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    """A replica of one rank, with its process group."""
    group = RankGroup(RankEnvironment())
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


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def start(tmp_path: Path, valkey: ValkeyServer) -> Iterator[Any]:
    """Starts a job with a config; ends its controller after the test."""
    jobs: list[Job] = []

    def starter(config: Config, name: str = "a") -> Job:
        job = Job(tmp_path / name, config, valkey.url)
        jobs.append(job)
        job.controller.start()
        return job

    yield starter
    for job in jobs:
        job.stop()
