"""Savers that end badly: `python -m tests.policy_worker.save_program WHAT ROOT SEED…` prints one JSON line per seed.

    kill      a process that saves on and on is killed at a random moment; what it leaves is looked at
    full      the disk takes no more in the middle of a save; afterwards there is room again
    forbidden the directory cannot be written

Each is a process of its own, forked from one that has imported everything.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from policy_worker.checkpoints import directory
from policy_worker.checkpoints.find import chain_in
from policy_worker.checkpoints.layout import faults, state_files
from policy_worker.checkpoints.retention import Housekeeper
from policy_worker.checkpoints.save import Checkpointer
from policy_worker.checkpoints.storage import StateFiles
from policy_worker.checkpoints.uploads import Uploader
from policy_worker.errors import CheckpointSaveError
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment, ShutdownRequest
from policy_worker.replicas.base import Registration
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config.sections.train import CheckpointConfig
from schema.wire import messages as m
from tests.policy_worker.checkpoint_material import save_state
from tests.policy_worker.material import make_config, tiny_model

NORM = "model.lm.model.norm.weight"
SAVES = 500
MOST_SECONDS = 0.6
"""A save takes about 0.02 s here: the moment of death lies anywhere in the first thirty or so."""


def make_trainer() -> Trainer:
    return Trainer(tiny_model(), make_config(), RankGroup(RankEnvironment()), Schedule(10))


def save(trainer: Trainer, root: Path, step: int) -> None:
    """A checkpoint in which the step can be read."""
    with torch.no_grad():
        trainer.model.lm.model.norm.weight.fill_(float(step))
    found = save_state(trainer, root, step, staged=True)
    assert found is not None
    Housekeeper(root, CheckpointConfig(max_keep=2), Uploader((), root)).tidy(found, {})


def child(work: Callable[[Callable[[Any], None]], None]) -> tuple[int, Any]:
    """A forked process that tells something by JSON lines: its pid and a stream of them."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(source)
        with os.fdopen(sink, "w") as out:
            try:
                work(lambda value: print(json.dumps(value), file=out, flush=True))
            finally:
                out.flush()
                os._exit(0)
    os.close(sink)
    return pid, os.fdopen(source)


def kill(root: Path, seed: int) -> dict[str, Any]:
    """What is left after a death in the middle of things."""

    def work(tell: Callable[[Any], None]) -> None:
        trainer = make_trainer()
        for step in range(1, SAVES):
            save(trainer, root, step)
            tell(step)

    pid, stream = child(work)
    reported = [int(stream.readline())]
    time.sleep(random.Random(seed).uniform(0, MOST_SECONDS))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reported += [int(line) for line in stream.read().split()]
    left = sorted(os.listdir(root))
    chain, damage = chain_in(root)
    with StateFiles(state_files(chain[0].path, "model")) as files:
        value = float(files.whole(NORM)[0])
    wrong = [fault for found in chain for fault in faults(found.path, found.manifest.files)]
    directory.clean(root)
    return {
        "reported": reported[-1], "step": chain[0].step, "value": value, "faults": wrong, "damage": damage,
        "left": left,
        "cleaned": sorted(os.listdir(root)), "whole": [found.path.name for found in chain],
    }  # fmt: skip


def full(root: Path, seed: int) -> dict[str, Any]:
    """A limit on the size of files stands for a disk that is full."""

    def work(tell: Callable[[Any], None]) -> None:
        trainer = make_trainer()
        save(trainer, root, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        try:
            save(trainer, root, 2)
        except CheckpointSaveError as error:
            left = sorted(os.listdir(root))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            save(trainer, root, 3)
            tell({"error": str(error), "left": left, "after": sorted(os.listdir(root))})

    pid, stream = child(work)
    answer = stream.read()
    os.waitpid(pid, 0)
    found: dict[str, Any] = json.loads(answer)
    return found


def forbidden(root: Path, seed: int) -> dict[str, Any]:
    """A process that may not write finds out before it trains."""

    def work(tell: Callable[[Any], None]) -> None:
        trainer = make_trainer()
        os.chmod(root, 0o555)
        if os.getuid() == 0:
            os.setuid(65534)
        reply = m.RegisterReply(
            replica_id="p.1", incarnation=1, job_id="job", config={}, job_seed=1, mode="grpo", timeline=0,
            committed_steps=0, total_steps=10, policy_epoch=1, heartbeat_interval=1.0, heartbeat_timeout=5.0,
            run_dir=str(root), weight_store=str(root), data_file="", publication=None,
        )  # fmt: skip
        config = make_config(train={"ckpt": {"enable_checkpoint": True}})
        try:
            Checkpointer(Registration(config, reply, trainer, None, ShutdownRequest()))
        except CheckpointSaveError as error:
            tell({"error": str(error)})

    pid, stream = child(work)
    answer = stream.read()
    os.waitpid(pid, 0)
    os.chmod(root, 0o755)
    found: dict[str, Any] = json.loads(answer)
    return found


def main(what: str, root: Path, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        place = root / str(seed)
        place.mkdir()
        print(json.dumps({"kill": kill, "full": full, "forbidden": forbidden}[what](place, seed)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]])
