"""What the worker's tests play on: a real controller, a trainer without optimizer that publishes real weights,
and rollout workers in threads or as processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from controller.client import Client
from controller.client import calls as api
from rollout_worker.shutdown import Kind
from rollout_worker.worker import Worker
from schema.config import Config
from schema.wire import messages as m
from schema.wire.prompts import write_prompts
from schema.wire.sample import Sample, decode_sample
from tests.controller.drivers import Trainer, request_id
from tests.rollout_worker.tiny import Models, publish_model, tokenizer
from tests.support.controller import TOKENS, ControllerProcess, running_controller
from tests.support.forked import Forked
from tests.support.served import ServedController, served_controller
from tests.support.valkey import ValkeyServer
from tests.support.waiting import PATIENCE, until

MAX_LEN = 64

REWARDS = """
import pathlib
import time

def once(marker, kind):
    try:
        pathlib.Path(marker + kind).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def length(completion, row, unit=1.0, marker=""):
    if row["answer"] == "hang" and once(marker, "hang"):
        while not pathlib.Path(marker + "go").exists():
            time.sleep(0.01)
    if row["answer"] == "raise" and once(marker, "raise"):
        raise KeyError("no reward for this")
    reward = len(completion) * unit
    return (reward, {0: reward / 2}) if completion else reward
"""
# A user's reward: the text's length; for two answers the first call fails: one hangs until "go" exists.


@dataclass
class Publisher(Trainer):
    """A policy replica that publishes real weights instead of learning."""

    models: Models = field(kw_only=True)

    def publish(self, version: int) -> m.PublishReply:
        store = Path(self.reply.weight_store)
        publication = publish_model(store, self.models.of(version), version)
        fields = publication.model_dump(include={"uri", "manifest_hash", "content_hash", "n_bytes"})
        request = m.PublishRequest.model_validate({**self._mine(), **fields, "version": version})
        return self.client.send(api.publish(request))

    def begin(self) -> None:
        self.register()
        self.publish(0)

    def step(self, t: int) -> list[Sample]:
        """Take the batch of step t, commit, publish; returns its samples."""
        found = until(lambda: self.batch(t, wait_s=5.0), f"the batch of step {t}")
        samples = [decode_sample(frame) for frame in found[1]]
        if self.commit(t).publish:
            self.publish(t + 1)
        return samples


def secret_of(name: str) -> str:
    """The same for every life of a name, as the launcher has it."""
    return f"a-secret-of-the-replica-{name}"


class WorkerThread:
    """A rollout worker on an event loop of its own."""

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._made = threading.Event()
        self._thread.start()
        assert self._made.wait(PATIENCE)

    def _run(self) -> None:
        async def work() -> None:
            self.worker = Worker(self._url, TOKENS["rollout"], self._name, None, secret_of(self._name))
            self._loop = asyncio.get_running_loop()
            self._made.set()
            await self.worker.run()

        try:
            asyncio.run(work())
        except BaseException as error:
            self.error = error

    def ask(self, kind: Kind) -> None:
        self._loop.call_soon_threadsafe(self.worker.shutdown.ask, kind, "the test asked for it")

    def join(self) -> None:
        """Wait for its end; raises what ended it."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the worker does not end"
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        if self._thread.is_alive():
            self.ask("stop")
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive(), "the worker does not end"


class WorkerProcess:
    """`python -m rollout_worker`."""

    def __init__(self, url: str, name: str, log: Path, **environment: str) -> None:
        self.log = log
        fixed = {
            "COSMOS_CONTROLLER_URL": url,
            "COSMOS_TOKEN": TOKENS["rollout"],
            "COSMOS_REPLICA_NAME": name,
            "COSMOS_REPLICA_SECRET": secret_of(name),
            "COSMOS_CPU_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.process = Forked(["rollout_worker"], {**os.environ, **fixed, **environment}, log)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def stop(self, how: signal.Signals = signal.SIGKILL) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.wait()


@dataclass
class Stage:
    """Starts everything a test of the worker needs; all of it ends with the test."""

    directory: Path
    valkey: ValkeyServer
    models: Models
    stack: ExitStack

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def config(self, **changes: Any) -> Config:
        """2 groups of 2 samples per step, S = 1. Keyword: dotted path with `__` for the dots."""
        rewards = self.directory / "rewards.py"
        rewards.write_text(REWARDS)
        base: dict[str, Any] = {
            "policy": {"model_name_or_path": str(self.models.folder), "model_max_length": MAX_LEN},
            "train": {
                "train_batch_per_replica": 4,
                "param_dtype": "float32",
                "max_num_steps": 4,
                "seed": 5,
                "train_policy": {
                    "type": "grpo",
                    "allowed_outdated_steps": 1,
                    "reward_function": {f"{rewards}:length": 0.5},
                },
            },
            "rollout": {
                "backend": "transformers",
                "dtype": "float32",
                "n_generation": 2,
                "max_response_length": 12,
                "max_concurrent_samples": 16,
                "parallelism": {"tp_size": 1},
            },
            "controller": {"heartbeat_interval": 0.2, "heartbeat_timeout": PATIENCE},
            "launcher": {"shutdown_timeout": PATIENCE},
        }
        for path, value in changes.items():
            *sections, key = path.split("__")
            table = base
            for section in sections:
                table = table.setdefault(section, {})
            table[key] = value
        return Config.model_validate(base)

    def prepare(self, config: Config, prompts: list[str], answers: list[str] | None = None) -> Path:
        """Write the run directory as the launcher does; validation data are the last three
        prompts. The prompt "unknown" is a token that the model does not have."""
        self.run_dir.mkdir(parents=True)
        (self.run_dir / "config.json").write_text(config.model_dump_json())
        ids = [tokenizer()(prompt)["input_ids"] if prompt != "unknown" else [999] for prompt in prompts]
        known = answers or [str(i) for i in range(len(prompts))]
        rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, known, strict=True)]
        write_prompts(self.run_dir / "data" / "train.safetensors", ids, rows)
        write_prompts(self.run_dir / "data" / "validation.safetensors", ids[-3:], rows[-3:])
        return self.run_dir

    def serve(self) -> ServedController:
        """The controller in a thread of this process."""
        return self.stack.enter_context(served_controller(self.run_dir, self.valkey.url))

    def process(self) -> ControllerProcess:
        """The controller as a process, which can be killed."""
        return self.stack.enter_context(running_controller(self.run_dir, self.valkey.url))

    def client(self, controller: ServedController | ControllerProcess, role: str) -> Client:
        return self.stack.enter_context(controller.client(role, PATIENCE))

    def trainer(self, controller: ServedController | ControllerProcess) -> Publisher:
        return Publisher(self.client(controller, "policy"), models=self.models)

    def begin(
        self, config: Config, prompts: list[str], answers: list[str] | None = None
    ) -> tuple[ServedController, Publisher]:
        """Prepare the run, serve it, and let a trainer publish version 0."""
        self.prepare(config, prompts, answers)
        served = self.serve()
        trainer = self.trainer(served)
        trainer.begin()
        return served, trainer

    def worker(self, url: str, name: str = "rollout-0") -> WorkerThread:
        worker = WorkerThread(url, name)
        self.stack.callback(worker.stop)
        return worker

    def worker_process(self, url: str, name: str = "rollout-0", **environment: str) -> WorkerProcess:
        worker = WorkerProcess(url, name, self.directory / f"{name}.log", **environment)
        self.stack.callback(worker.stop)
        return worker


def plain_logprobs(model: Any, sample: Sample) -> np.ndarray:
    """Log-probs [T] of a sample's tokens at temperature 1 by one forward without cache; 0 for the first."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    found = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate([np.zeros(1), found])  # type: ignore[no-any-return]


__all__ = ["REWARDS", "Models", "Publisher", "Stage", "WorkerProcess", "plain_logprobs", "request_id"]
