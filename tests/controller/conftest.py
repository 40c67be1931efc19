from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from controller.client import Client
from schema.config import Config
from tests.controller.drivers import Rollout, Trainer
from tests.support.controller import ControllerProcess, make_config, make_run_dir, running_controller
from tests.support.served import ServedController, served_controller
from tests.support.valkey import ValkeyServer, running_valkey


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[ValkeyServer]:
    """One server per test process: jobs have keys of their own."""
    with running_valkey() as server:
        yield server


PATIENT = {"heartbeat_timeout": 1000.0, "lease_timeout": 1000.0}
"""For controllers with a clock of their own: nobody beats in most tests, and a busy machine makes nobody dead."""


@dataclass
class Stage:
    """Everything that a test of the service starts, ended with the test."""

    directory: Path
    valkey: ValkeyServer
    stack: ExitStack

    def run_dir(self, config: Config | None = None, rows: int = 12, validation_rows: int = 3) -> Path:
        name = f"run-{len(list(self.directory.iterdir()))}"
        return make_run_dir(self.directory / name, config or make_config(), rows, validation_rows)

    def serve(
        self, config: Config | None = None, rows: int = 12, validation_rows: int = 3
    ) -> ServedController:
        """A controller in a thread of this process."""
        run_dir = self.run_dir(config, rows, validation_rows)
        return self.stack.enter_context(served_controller(run_dir, self.valkey.url))

    def process(self, config: Config | None = None, rows: int = 12, **environment: str) -> ControllerProcess:
        """A controller as a process of its own."""
        run_dir = self.run_dir(config or make_config(controller=PATIENT), rows)
        return self.stack.enter_context(running_controller(run_dir, self.valkey.url, **environment))

    def trainer(self, served: ServedController | ControllerProcess, name: str = "policy-0") -> Trainer:
        return Trainer(self.client(served, "policy"), name)

    def rollout(self, served: ServedController | ControllerProcess, name: str = "rollout-0") -> Rollout:
        return Rollout(self.client(served, "rollout"), name)

    def client(self, served: ServedController | ControllerProcess, role: str = "user") -> Client:
        return self.stack.enter_context(served.client(role))

    def ready(self, served: ServedController | ControllerProcess) -> tuple[Trainer, Rollout]:
        """A trainer that has published version 0 and a rollout replica that holds it."""
        trainer, rollout = self.trainer(served), self.rollout(served)
        trainer.register()
        trainer.publish(0)
        rollout.register()
        return trainer, rollout


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, shared_valkey: ValkeyServer) -> Iterator[Stage]:
    """One for all tests of a module that leave their controller as they found it."""
    with ExitStack() as stack:
        yield Stage(tmp_path_factory.mktemp("shared"), shared_valkey, stack)


@pytest.fixture(scope="module")
def idle(shared: Stage) -> ServedController:
    """A controller that nobody has registered with, for calls that change nothing."""
    return shared.serve()


@pytest.fixture
def stage(tmp_path: Path, shared_valkey: ValkeyServer) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(tmp_path, shared_valkey, stack)
