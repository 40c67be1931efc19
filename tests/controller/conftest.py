from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from schema.config import Config
from tests.controller.drivers import Rollout, Trainer
from tests.support.controller import ControllerProcess, make_config, make_run_dir, running_controller
from tests.support.valkey import ValkeyServer, running_valkey


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[ValkeyServer]:
    """One server per test process: jobs have keys of their own."""
    with running_valkey() as server:
        yield server


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """A server of one's own, to be killed."""
    with running_valkey() as server:
        yield server


Start = Callable[..., ControllerProcess]


@pytest.fixture
def start(tmp_path: Path, shared_valkey: ValkeyServer) -> Iterator[Start]:
    """Start a controller on a run directory made from a config."""
    with ExitStack() as stack:

        def run(config: Config | None = None, rows: int = 12, **environment: str) -> ControllerProcess:
            run_dir = make_run_dir(tmp_path / "run", config or make_config(), rows=rows)
            return stack.enter_context(running_controller(run_dir, shared_valkey.url, **environment))

        yield run


@pytest.fixture
def controller(start: Start) -> ControllerProcess:
    return start()


@pytest.fixture
def trainer(controller: ControllerProcess) -> Iterator[Trainer]:
    with controller.client("policy") as client:
        yield Trainer(client)


@pytest.fixture
def rollout(controller: ControllerProcess) -> Iterator[Rollout]:
    with controller.client("rollout") as client:
        yield Rollout(client)
