"""A run directory with a model in it, a controller, and policy replicas that the test starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from controller.client import calls as api
from schema.config import Config
from schema.wire.messages import JobStatus, ProfileRequest
from schema.wire.prompts import write_prompts
from tests.policy_worker.ranks import start_ranks
from tests.support.controller import TOKENS, ControllerProcess, make_run_dir
from tests.support.forked import Forked
from tests.support.proxy import FaultyProxy, faulty_proxy
from tests.support.waiting import until


class Job:
    """A run directory with a model in it, and a controller."""

    def __init__(self, directory: Path, config: Config, redis_url: str) -> None:
        self.run_dir = make_run_dir(directory / "run", config, rows=40)
        if not config.is_grpo:
            for name in ("train", "validation"):
                _write_conversations(self.run_dir / "data" / f"{name}.safetensors")
        self.controller = ControllerProcess(self.run_dir, redis_url)
        self._ranks: list[Forked] = []
        self._started: list[Forked] = []

    def start_policy(self, world: int = 1, **environment: str) -> list[Forked]:
        settings = {
            "COSMOS_CONTROLLER_URL": self.controller.url, "COSMOS_TOKEN": TOKENS["policy"],
            "COSMOS_REPLICA_NAME": "policy-0", "COSMOS_CPU_THREADS": "1", **environment,
        }  # fmt: skip
        self._ranks = start_ranks(world, ["policy_worker"], **settings)
        self._started += self._ranks
        return self._ranks

    def stop(self) -> None:
        for rank in self._started:
            rank.close()
        self.controller.stop()

    @contextmanager
    def stopped_before(self, step: int) -> Iterator[tuple[list[Forked], FaultyProxy]]:
        """A trainer that is about to commit this step (counted from 1); it may when the proxy holds nothing."""
        with faulty_proxy(self.controller.url, seed=0, rate=0.0) as proxy:
            proxy.hold = f"POST /v1/steps/{step - 1}/commit ".encode()
            ranks = self.start_policy(COSMOS_CONTROLLER_URL=proxy.url)
            self.wait_for(proxy.holding.is_set, f"step {step}")
            yield ranks, proxy

    def status(self) -> JobStatus:
        with self.controller.client() as client:
            return client.send(api.job())

    def ask_for_profile(self, **request: Any) -> None:
        """And wait until the trainer has it, which must have nothing to train on."""
        with self.controller.client() as client:
            self.wait_for(lambda: client.send(api.replicas()), "the registration")
            (trainer,) = client.send(api.replicas())
            client.send(api.profile(trainer.replica_id, ProfileRequest(**request)))

            def state() -> str:
                (trainer,) = client.send(api.replicas())
                return "" if trainer.profile is None else trainer.profile.state

            self.wait_for(lambda: state() == "waiting", "the trainer's answer")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Something that the trainer does; if it ends before, that is told."""

        def look() -> bool:
            for rank in self._ranks:
                assert rank.poll() is None, f"waited for {what}: {rank.output()}"
            return condition()

        until(look, what)

    def wait_for_weights(self) -> None:
        self.wait_for(lambda: self.status().version >= 0, "the first weights")

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.status().step >= step, f"step {step}")

    def wait_for_checkpoint(self, name: str) -> None:
        self.wait_for((self.run_dir / "checkpoints" / name).exists, f"{name} among the checkpoints")

    def final(self) -> dict[str, torch.Tensor]:
        return load_file(self.run_dir / "final" / "model.safetensors")


def _write_conversations(path: Path) -> None:
    """Rows that can be learned: each is one token repeated, and the first names it."""
    ids = [[1, token, *[token] * 6, 2] for token in range(3, 35)]
    write_prompts(path, ids, [{}] * len(ids), [[0, 0, *[1] * 7]] * len(ids))
