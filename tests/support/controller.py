"""A real controller for a test: a run directory, and `python -m controller` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.client import AsyncClient, Client
from schema.config import Config
from schema.wire.prompts import write_prompts
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until

TOKENS = {role: f"{role}-token-for-these-tests" for role in ("user", "rollout", "policy")}


def make_config(**sections: Any) -> Config:
    """A small GRPO config: 2 groups of 2 samples per step. Keyword: section -> values that replace."""
    base: dict[str, Any] = {
        "train": {
            "compile": False,
            "train_batch_per_replica": 4,
            "train_policy": {"type": "grpo", "allowed_outdated_steps": 1},
        },
        "rollout": {"n_generation": 2, "backend": "transformers"},
        "policy": {"model_max_length": 64},
        "controller": {"lock_timeout": 1000.0},  # nobody stands by unless a test says so
    }
    for name, values in sections.items():
        base[name] = _merged(base.get(name, {}), values)
    return Config.model_validate(base)


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {**old, **new}
    for key in old.keys() & new.keys():
        if isinstance(old[key], dict) and isinstance(new[key], dict):
            both[key] = _merged(old[key], new[key])
    return both


def make_run_dir(directory: Path, config: Config, rows: int = 12, validation_rows: int = 3) -> Path:
    """Write config.json and prepared data as the launcher does."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config.model_dump_json())
    for name, count in (("train", rows), ("validation", validation_rows)):
        ids = [[1, 2, 3 + i] for i in range(count)]
        items = [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(count)]
        write_prompts(directory / "data" / f"{name}.safetensors", ids, items)
    return directory


class ControllerProcess:
    """`python -m controller` on one run directory; may be killed and started again."""

    def __init__(
        self, run_dir: Path, redis_url: str, *arguments: str, log: str = "controller.log", **environment: str
    ) -> None:
        self.run_dir = run_dir
        self._log = run_dir / log
        self._arguments = arguments
        self._environment = {
            **os.environ,
            **{f"COSMOS_TOKEN_{role.upper()}": token for role, token in TOKENS.items()},
            "COSMOS_REDIS_URL": redis_url,
            **environment,
        }
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, port: int | None = None) -> None:
        """Start the process without waiting for it."""
        command = [sys.executable, "-m", "controller", "--run-dir", str(self.run_dir), "--port"]
        log = self._log.open("ab")
        self._port = self._port if port is None else port
        with log:
            self._process = subprocess.Popen(
                [*command, str(self._port), *self._arguments], env=self._environment, stderr=log
            )

    def start(self) -> None:
        """Start and wait until it serves; a later start gets the same port."""
        self.launch()
        until(self._serves, "a controller that serves")
        self._port = int(self.address()["url"].rpartition(":")[2])

    def _serves(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the controller did not start: {self.log()}")
        return bool(self.address().get("pid") == self._process.pid)

    def address(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.run_dir / "controller.json").read_text())
        except FileNotFoundError:
            return {}
        return content

    def log(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def client(self, role: str = "user", patience: float = PATIENCE) -> Client:
        return Client(self.url, TOKENS[role], patience=patience)

    def async_client(self, role: str = "user", patience: float = PATIENCE) -> AsyncClient:
        return AsyncClient(self.url, TOKENS[role], patience=patience)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        assert self._process is not None
        code = self._process.wait(seconds)
        self._process = None
        return code

    def stop(self, how: signal.Signals = signal.SIGKILL) -> int | None:
        """Send a signal and wait; None if it does not run."""
        if self._process is None:
            return None
        self._process.send_signal(how)
        return self.wait()


@contextmanager
def running_controller(
    run_dir: Path, redis_url: str, *arguments: str, log: str = "controller.log", **environment: str
) -> Iterator[ControllerProcess]:
    """A controller for the duration of a block."""
    process = ControllerProcess(run_dir, redis_url, *arguments, log=log, **environment)
    try:
        process.start()
        yield process
    finally:
        process.stop()
