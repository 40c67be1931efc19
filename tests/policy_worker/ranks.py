"""Starts the ranks of one replica as processes, as a launcher would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.support.ports import free_port
from tests.support.waiting import PATIENCE


def start_ranks(world: int, arguments: Sequence[str], **environment: str) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment,
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


def wait_ranks(ranks: Sequence[subprocess.Popen[str]], timeout: float = PATIENCE) -> list[tuple[int, str]]:
    """(exit code, output) of each; none is left behind."""
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
        return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
