"""Starts the ranks of one replica as processes, as a launcher would."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE


def start_ranks(world: int, arguments: Sequence[str], **environment: str) -> list[Forked]:
    port = str(free_port())
    return [
        Forked(
            arguments,
            {
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment,
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
