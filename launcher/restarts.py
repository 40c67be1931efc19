"""The decision when a process of the job has ended: pure, over plain values, no clock and no process.

               ┌───────────── restart after back-off ◀─── any other end, budget left
               ▼                                      │
    spawn ─▶ running ─ exit ─▶ is the job over? ─ no ─┼─ exit 0 and not needed, or 6 ▶ left
                                     │ yes            ├─ exit 2, 3, 4: no use trying ─▶ the job ends
                                     ▼                └─ budget used up ─────────────▶ the job ends
                                   left

The budget is per replica: `max_restarts` within one streak of failures. A replica that stayed up for
`healthy_after` seconds begins a new streak, so a run of weeks is not ended by one crash a day.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schema.config import Config
    from schema.wire.messages import ReplicaInfo

HEALTHY_AFTER = 300.0
"""Seconds up after which a replica counts as healthy: more than any engine needs to load and fail."""

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2
EXIT_FENCED, EXIT_NO_CHECKPOINT, EXIT_NAME_TAKEN, EXIT_UNLIKE = 3, 4, 5, 6
SIGNALLED = 128
"""Exit codes above it are signals, as in a shell."""
ROLLOUT_PATIENCE, POLICY_PATIENCE = 60.0, 300.0
"""Seconds of silence beyond `controller.heartbeat_timeout`. Both beat while they load or compute, so a minute means
trouble; a trainer gets more, since its restart costs the steps since the newest checkpoint."""
_KILLS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


class Role(StrEnum):
    """The purpose of a process."""

    DATA = "data"
    REDIS = "redis"
    CONTROLLER = "controller"
    POLICY = "policy"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """How often and how fast one replica may be restarted; times are seconds."""

    max_restarts: int
    backoff: float
    backoff_max: float
    healthy_after: float = HEALTHY_AFTER

    @classmethod
    def of_config(cls, config: Config) -> RestartBudget:
        """The budget of each replica of a job."""
        launcher = config.launcher
        return cls(launcher.max_restarts, launcher.restart_backoff, launcher.restart_backoff_max)

    def delay(self, attempt: int) -> float:
        """Seconds to wait before restart number `attempt` (from 1) of a streak: doubled each time, bounded."""
        # The exponent is bounded too: beyond 2**60 seconds a float product could overflow.
        return float(min(self.backoff * 2.0 ** min(attempt - 1, 60), self.backoff_max))


NO_RESTARTS = RestartBudget(0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Left:
    """The process has left in order, or is of no use to the others, and is not started again."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after `delay` seconds; the `attempt`-th of `limit` in this streak (0: it does not count)."""

    delay: float
    attempt: int
    limit: int
    reason: str


@dataclass(frozen=True, slots=True)
class EndJob:
    """The job cannot go on. `exit_code` is the launcher's own."""

    exit_code: int
    reason: str


Verdict = Left | Restart | EndJob


def describe_exit(code: int) -> str:
    """An exit code in words; codes above 128 are signals, as in a shell."""
    if code > SIGNALLED:
        try:
            name = signal.Signals(code - SIGNALLED).name
        except ValueError:
            return f"exit code {code}"
        return f"killed by {name}"
    return f"exit code {code}"


def is_crash(code: int) -> bool:
    """Whether a process ended by its own fault: not in order, and not killed from outside as spot instances are."""
    return code != EXIT_OK and code not in {128 + number for number in _KILLS}


class Restarts:
    """The restart record of one replica."""

    def __init__(self, name: str, role: Role, budget: RestartBudget) -> None:
        self.name, self.role, self.budget = name, role, budget
        self.streak = 0
        self.total = 0
        self._started_at = 0.0

    def started(self, now: float) -> None:
        self._started_at = now

    def in_a_row(self, now: float) -> int:
        """Restarts that count against the budget if the replica, which runs now, ends now."""
        return 0 if now - self._started_at >= self.budget.healthy_after else self.streak

    def exited(
        self, now: float, code: int, how: str = "", *, over: bool, needed: bool, counts: bool = True
    ) -> Verdict:
        """Decide after an exit. `how` it ended, if the code does not say it.

        over: the job has ended, or the process was asked to end. needed: whether the job misses a process that
        left with code 0 (a drained rollout replica is not missed while another one is there). counts: whether
        this end is the process's own fault.
        """
        if over or (code == EXIT_OK and (not needed or self.role is Role.DATA)):
            return Left()
        final = self._final(code)
        if final is not None:
            return final
        how = how or describe_exit(code) if code != EXIT_OK else "it left although the job still needs it"
        limit = self.budget.max_restarts
        if not counts:
            return Restart(0.0, 0, limit, how)
        if code == EXIT_OK and self.role is Role.ROLLOUT:  # it was asked to leave: no failure
            self.total += 1
            return Restart(self.budget.delay(1), 0, limit, "it left in order and is the last one")
        if code == EXIT_NAME_TAKEN and self.role is Role.ROLLOUT:  # the fault of the process that took it
            self.total += 1
            return Restart(self.budget.delay(1), 0, limit, "another replica lives under its name")
        self.streak = self.in_a_row(now)
        if self.streak >= limit:
            used = f"its restarts are used up (launcher.max_restarts = {limit})"
            return EndJob(EXIT_FAILED, f"{self.name} ended ({how}) and {used}")
        self.streak += 1
        self.total += 1
        return Restart(self.budget.delay(self.streak), self.streak, limit, how)

    def _final(self, code: int) -> EndJob | Left | None:
        """The ends that a restart cannot help."""
        if self.role is Role.POLICY and code == EXIT_UNLIKE:  # it was refused by others, which go on
            return Left()
        if code == EXIT_CONFIG:
            return EndJob(EXIT_CONFIG, f"{self.name} cannot work with this configuration (exit code 2)")
        # The same rows would fail again; a killed one is repeated.
        if self.role is Role.DATA and code <= SIGNALLED:
            return EndJob(EXIT_FAILED, f"the preparation of the data failed ({describe_exit(code)})")
        if self.role is Role.CONTROLLER and code == EXIT_FENCED:
            return EndJob(EXIT_FAILED, "another controller has taken over this job in the same Redis (exit code 3)")
        if self.role is Role.POLICY and code == EXIT_NO_CHECKPOINT:
            return EndJob(
                EXIT_FAILED,
                f"{self.name} was lost after committed steps and there is no checkpoint to go back to (exit code 4); "
                "train.ckpt.enable_checkpoint = true keeps a run alive through this",
            )
        return None


def is_hung(info: ReplicaInfo, up_for: float, heartbeat_timeout: float) -> bool:
    """Whether a replica's process must be killed: a pure decision, so that no silent replica holds a job up for ever.

    A replica that misses its heartbeats is `lost` for the controller, which gives its work to others; the process may
    be stopped, or stuck in a call that never returns, and it would never be restarted. One that stays silent for much
    longer is killed and restarted like one that crashed.

    info: the controller's record of the newest incarnation. up_for: seconds since its present process was started;
    a silence that began before is not its own.
    """
    patience = ROLLOUT_PATIENCE if info.role == "rollout" else POLICY_PATIENCE
    silent = info.last_seen_s
    return info.state == "lost" and silent < up_for and silent > heartbeat_timeout + patience
