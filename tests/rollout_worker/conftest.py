from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.rollout_worker.tiny import Models
from tests.support.valkey import ValkeyServer, running_valkey

if TYPE_CHECKING:
    from tests.rollout_worker.stage import Stage


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[ValkeyServer]:
    """One server per test process: jobs have keys of their own."""
    with running_valkey() as server:
        yield server


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stage(tmp_path: Path, shared_valkey: ValkeyServer, models: Models) -> Iterator[Stage]:
    from tests.rollout_worker.stage import Stage  # a whole controller, which tests of engines can do without

    with ExitStack() as stack:
        yield Stage(tmp_path, shared_valkey, models, stack)
