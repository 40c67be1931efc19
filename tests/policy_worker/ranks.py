"""Starts the ranks of one replica as processes, as a launcher would; on the CPU where there are too few GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from tests.support.devices import GPUS, WITHOUT_GPU
from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE


@contextmanager
def joined() -> Iterator[RankGroup]:
    """In a program of a rank: its group, which all leave together."""
    torch.set_num_threads(1)
    group = RankGroup(RankEnvironment.of_environ())
    try:
        yield group
        group.barrier()
    finally:
        group.close()


def start_ranks(
    world: int, arguments: Sequence[str] | Callable[[int], Sequence[str]], **environment: str
) -> list[Forked]:
    port, devices = str(free_port()), {} if world <= GPUS else WITHOUT_GPU
    return [
        Forked(
            arguments(rank) if callable(arguments) else arguments,
            {
                **os.environ, **devices, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, **environment,
            },
        )
        for rank in range(world)
    ]  # fmt: skip


def wait_ranks(ranks: Sequence[Forked], timeout: float = PATIENCE) -> list[tuple[int, str]]:
    """(exit code, output) of each; none is left behind."""
    try:
        return [(rank.wait(timeout), rank.output()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()


def replay_ranks(world: int, run_dir: Path, output: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `python -m policy_worker.replay` reports of a run."""
    program = ["policy_worker.replay", str(run_dir), "--output", str(output), *arguments]
    for code, text in wait_ranks(start_ranks(world, program, COSMOS_CPU_THREADS="1")):
        assert code == 0, text
    return [json.loads(line) for line in output.read_text().splitlines()]
