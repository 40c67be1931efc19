"""What a job is before its first process starts, and how it ended: plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.plan.placement import Replica
from launcher.plan.redis_server import RedisServer
from launcher.plan.rundir import RunDir, Tokens
from schema.config import Config

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why the job ended. `blame` is a log file whose last lines explain it."""

    name: Literal["finished", "failed", "stopped"]
    exit_code: int
    reason: str = ""
    lines: tuple[str, ...] = ()
    blame: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was decided before the first process starts."""

    config: Config
    run: RunDir
    tokens: Tokens
    url: str
    host: str
    """Where the controller listens, at `port`."""
    port: int
    redis: RedisServer
    workers: list[Replica]
    reuse_data: bool
    continued: bool
    """Whether an earlier start of this run left its state in Redis."""
    env: Mapping[str, str]
    reserve: Sequence[Replica] = ()
    """Rollout replicas that there is room for, started when they are needed."""
    address: str = LOOPBACK
    """Of this machine, for the others of the job."""
