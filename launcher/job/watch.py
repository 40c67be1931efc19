"""Following a job that runs: its state by the controller, replicas that no longer answer, and its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from controller.client import ControllerError, NotServing, Unauthorized
from controller.client import calls as api
from launcher.display.view import View, sample_line
from launcher.job.controller_link import ControllerLink
from launcher.job.plan import JobOutcome, JobPlan
from launcher.plan import nsight
from launcher.processes.logs import tail
from launcher.processes.supervisor import Supervisor
from launcher.restarts import EXIT_FAILED, EXIT_OK, is_hung
from schema.util.text import visible
from schema.wire import sample_file
from schema.wire.messages import TERMINAL_PHASES, Phase

log = logging.getLogger(__name__)

POLL = 0.5
"""Seconds between looks at the controller."""
LOOK_AT_REPLICAS = 10.0
"""Seconds between looks for replicas that live and are silent."""
HUNG_AFTER = 60.0
"""Seconds without any answer after which a controller whose process lives is killed and restarted."""


class JobWatch:
    """Keeps the view up to date until the job is over."""

    def __init__(
        self, plan: JobPlan, link: ControllerLink, supervisor: Supervisor, view: View, event: Callable[[str], None]
    ) -> None:
        self._config, self._logs = plan.config, plan.run.logs
        self._link, self._supervisor, self._view, self._event = link, supervisor, view, event
        self._samples = sample_file.folder_of(plan.run.path)
        self._looked_at = float("-inf")
        self._unseen = {replica.name for replica in plan.workers}
        """Replicas that have not registered yet."""

    async def until_over(self) -> JobOutcome:
        """Follow the controller until the job is over."""
        silent_since: float | None = None
        while True:
            began = time.monotonic()
            try:
                await self._look()
                await self._look_at_replicas()
                silent_since, self._view.refusal = None, ""
            except Unauthorized:
                raise
            except NotServing as error:
                silent_since, self._view.refusal = None, error.detail
            except ControllerError as error:
                log.debug("no status: %s", error)
                self._view.refusal = ""
                now = time.monotonic()
                silent_since = silent_since or began
                # A silence that began before its present process was started is not that one's.
                silent = now - max(silent_since, self._supervisor.replicas["controller"].since)
                if silent > HUNG_AFTER and not await self._link.is_healthy():
                    self._event(f"the controller has not answered for {silent:.0f} s: restarting it")
                    self._supervisor.kill("controller")
                    silent_since = None
            self._view.reachable = silent_since is None
            outcome = self._judge()
            if outcome is not None:
                return outcome
            await asyncio.sleep(POLL)

    async def until_booted(self, names: Collection[str]) -> None:
        """Wait until each of these rollout replicas has an engine, or is not started again."""
        await self._link.started.wait()
        while waiting := {name for name in names if not self._supervisor.replicas[name].done.is_set()}:
            with suppress(ControllerError):
                infos = await self._link.ask(api.replicas())
                # Only an engine that has booted has numbers to report.
                if waiting <= {info.name for info in infos if info.state == "live" and info.gauges}:
                    return
            await asyncio.sleep(POLL)

    async def _look(self) -> None:
        status = await self._link.ask(api.job())
        before, view = self._view.status, self._view
        if status.reward is not None and (before is None or before.step != status.step):
            view.rewards.append(status.reward)
        if status.validation is not None and view.first_held_out is None:
            records = await self._link.ask(api.validations())
            alike = (record for record in records if (record.loss is None) == (status.validation.loss is None))
            view.first_held_out = next((record.value for record in alike), None)
        over = status.phase in TERMINAL_PHASES  # the outcome has the reason
        if before is not None and status.last_error and status.last_error != before.last_error and not over:
            self._event(f"error: {status.last_error}")
        note = "" if before is None else before.note
        if status.note != note and not over and status.phase is not Phase.FINISHING:
            self._event(status.note or "prompts are handed out as before")
        if before is not None and before.step != status.step:
            view.sample = await asyncio.to_thread(self._newest_sample, status.step)
        view.status = status

    def _newest_sample(self, committed: int) -> str:
        """One sample of the newest step that has any; nothing where its file cannot be read."""
        try:
            samples = sample_file.find(self._samples, kind="train", limit=1, committed=committed)
        except OSError:
            return ""
        return sample_line(samples[0]) if samples else ""

    async def _look_at_replicas(self) -> None:
        """Note who has registered, and kill who lives and does not answer."""
        now = time.monotonic()
        if not self._unseen and now - self._looked_at < LOOK_AT_REPLICAS:
            return
        self._looked_at = now
        infos = await self._link.ask(api.replicas())
        self._unseen -= {info.name for info in infos}
        for info in infos:
            kept = self._supervisor.replicas.get(info.name)
            # Under Nsight Systems its process outlives it, to write a report.
            timeout = self._config.controller.heartbeat_timeout + nsight.report_seconds(self._config)
            if kept is None or kept.state != "up" or not is_hung(info, now - kept.since, timeout):
                continue
            self._event(f"{info.name} is alive, but has sent nothing for {info.last_seen_s:.0f} s: restarting it")
            self._supervisor.kill(info.name)

    def _judge(self) -> JobOutcome | None:
        status = self._view.status
        if status is None or status.phase not in TERMINAL_PHASES:
            return None
        if status.phase is Phase.FINISHED:
            return JobOutcome("finished", EXIT_OK, status.note)
        if status.phase is Phase.STOPPED:
            return JobOutcome("stopped", 128 + signal.SIGINT, "by `cosmos-launch stop` or the API")
        if status.traceback:
            lines = visible(status.traceback).split("\n")
            return JobOutcome("failed", EXIT_FAILED, status.last_error or "", tuple(lines))
        culprit = min(self._unseen, default="controller")  # one that did not register has written why
        return blame(self._logs, culprit, status.last_error or "the controller reports that the job has failed")


def blame(logs: Path, process: str, reason: str) -> JobOutcome:
    """A failure that the end of a process's log explains."""
    log_file = next(iter(sorted(logs.glob(f"{process}*.log"))), logs / f"{process}.log")
    return JobOutcome("failed", EXIT_FAILED, reason, tuple(tail(log_file)), log_file)
