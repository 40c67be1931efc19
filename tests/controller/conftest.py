from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from controller.client import Client, Refused
from controller.client import calls as api
from schema.config import Config
from tests.controller.drivers import Rollout, Trainer, begin
from tests.support.controller import TOKENS, ControllerProcess, make_config, make_run_dir, running_controller
from tests.support.served import ServedController, served_controller
from tests.support.valkey import ValkeyServer, running_valkey
from tests.support.waiting import PATIENCE


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test in a loop of its own, for `PATIENCE` at most."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), PATIENCE))

    return run


def refused(call: Callable[..., object], *arguments: Any, **named: Any) -> Refused:
    """How the controller refuses a call."""
    with pytest.raises(Refused) as caught:
        call(*arguments, **named)
    return caught.value


def asking(url: str, role: str = "user") -> httpx.Client:
    """A client of plain requests, with the token of a role."""
    headers = {"authorization": f"Bearer {TOKENS[role]}"}
    return httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=PATIENCE)


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

    def serve(self, config: Config | None = None, rows: int = 12, validation_rows: int = 3) -> ServedController:
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

    @contextmanager
    def history_lost(self, served: ServedController) -> Iterator[None]:
        """What is written meanwhile the store loses; another controller goes on."""
        client = Redis.from_url(self.valkey.url)
        kept = {key: client.dump(key) for key in client.scan_iter(f"*{served.job.job_id}*")}
        yield
        served.stop()
        client.delete(*client.scan_iter(f"*{served.job.job_id}*"))
        for key, value in kept.items():
            if not key.endswith(b":lock"):
                client.restore(key, 0, value)
        client.close()
        served.restart()

    def joined(self, served: ServedController | ControllerProcess, name: str = "rollout-0") -> Rollout:
        """A rollout replica that has registered."""
        rollout = self.rollout(served, name)
        rollout.register()
        return rollout

    def states(self, served: ServedController) -> dict[str, str]:
        """The state of each replica, by its name."""
        return {info.name: info.state for info in self.client(served).send(api.replicas())}

    def client(self, served: ServedController | ControllerProcess, role: str = "user") -> Client:
        return self.stack.enter_context(served.client(role))

    def ready(self, served: ServedController | ControllerProcess) -> tuple[Trainer, Rollout]:
        """A trainer that has published version 0 and a rollout replica that holds it."""
        return begin(self.client(served, "policy"), self.client(served, "rollout"))

    def at_work(
        self, config: Config | None = None, rows: int = 12, validation_rows: int = 3
    ) -> tuple[ServedController, Trainer, Rollout]:
        """A controller in a thread of this process, with the trainer and the replica of `ready`."""
        served = self.serve(config, rows, validation_rows)
        return served, *self.ready(served)


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
