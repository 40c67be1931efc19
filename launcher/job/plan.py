"""The fourth stage of a start: everything that is decided before the first process starts, and how a job ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.job.directory import RunStart
from launcher.plan import redis_server
from launcher.plan.addresses import Site
from launcher.plan.needs import PlacementError
from launcher.plan.placement import PlacedReplica, place_elastic
from launcher.plan.redis_server import RedisServer
from launcher.plan.rundir import RunDir, RunTokens
from schema.config import Config, ConfigError


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Why the job ended. `blame` is a log file whose last lines explain it."""

    name: Literal["finished", "failed", "stopped"]
    exit_code: int
    reason: str = ""
    lines: tuple[str, ...] = ()
    blame: Path | None = None


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Everything that was decided before the first process starts."""

    config: Config
    run: RunDir
    tokens: RunTokens
    site: Site
    redis: RedisServer
    workers: list[PlacedReplica]
    reuse_data: bool
    continued: bool
    """Whether an earlier start of this run left its state in Redis."""
    env: Mapping[str, str]
    reserve: Sequence[PlacedReplica] = ()
    """Rollout replicas that there is room for, started when they are needed."""


def plan(start: RunStart, site: Site, tokens: RunTokens, reuse_data: bool) -> JobPlan:
    """Decide what runs where. Raises ConfigError: the job does not fit the machines."""
    checked, run = start.checked, start.run
    config, request = checked.config, checked.request
    try:
        workers, reserve = place_elastic(config, checked.machine, *site.others, rollouts=request.rollouts)
    except PlacementError as error:  # of what other machines have, which nobody knew before
        raise ConfigError([error.problem]) from None
    redis = redis_server.named(config.redis, request.env) or redis_server.embedded(run.redis)
    return JobPlan(
        config=config, run=run, tokens=tokens, site=site, redis=redis, workers=workers, reserve=reserve,
        reuse_data=reuse_data, continued=start.goes_on, env=request.env,
    )  # fmt: skip
