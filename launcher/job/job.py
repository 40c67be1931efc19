"""The processes of one job, started in the order of their needs and ended in the reverse.

    t = 0   redis ─────────────┐
            data preparation ──┴─▶ controller ─▶ ready ─▶ watch ─▶ finished | failed | stopped
            policy, rollout replicas: started at once, they import and load while the rest gets ready;
            a policy that shares the memory of GPUs with an engine: when the engine has booted

    end     workers ─▶ collect the controller's records ─▶ controller ─▶ redis ─▶ summary.json

`_drive` goes through the upper line. It is abandoned when a process makes the job impossible or the user presses
Ctrl-C; whatever the reason, `_finish` goes through the lower one. A second Ctrl-C kills.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from controller.client import ControllerError
from controller.client import calls as api
from launcher.display.screen import Screen
from launcher.display.summary import Collected, RunResult
from launcher.display.view import View, duration
from launcher.job.controller_link import BRIEF, ControllerLink
from launcher.job.launcher_log import LauncherLog
from launcher.job.plan import JobOutcome, JobPlan
from launcher.job.redis_pulse import RedisPulse
from launcher.job.scaling import LocalScaling
from launcher.job.trackers import Trackers
from launcher.job.watch import JobWatch, blame
from launcher.plan import placement, redis_server
from launcher.plan.credentials import environment, withheld
from launcher.plan.placement import PlacedReplica, ProcessSpec
from launcher.processes.host import Host
from launcher.processes.logs import tail
from launcher.processes.share import attended
from launcher.processes.signals import queued_signals, stop_signals
from launcher.processes.supervisor import Ending, Exit, Setting, Situation, Supervised, Supervisor
from launcher.restarts import EXIT_CONFIG, EXIT_NAME_TAKEN, EXIT_OK, SIGNALLED, EndJob, Role, is_crash
from schema.wire import data_report
from schema.wire.messages import TERMINAL_PHASES, JobStatus, Phase

log = logging.getLogger(__name__)

ABANDON_SECONDS = 5.0
"""For the start-up to let go of what it waits for; whatever it does, the end of the job is not held up."""

POLL, REDRAW = 0.5, 1.0
"""Seconds between looks at the controller, and between pictures of what it said."""
LEFT_PATIENCE = 60.0
"""Seconds to learn whether the job is over when a worker has left in order: a guess would restart it in vain."""
OVER = TERMINAL_PHASES | {Phase.FINISHING}


class Job:
    """One start of `cosmos-launch`."""

    def __init__(
        self, plan: JobPlan, screen: Screen, early: Sequence[int] = (), hosts: Mapping[int, Host] | None = None
    ) -> None:
        """early: signals that came before this; read when the job begins to handle them itself. hosts: the other
        machines, by the number of the node."""
        self.plan, self.screen, self._early = plan, screen, early
        config, run = plan.config, plan.run
        self.view = View(bound=config.staleness_bound if config.is_grpo else None, log_dir=str(run.logs))
        # The ranks of a replica find each other through the controller.
        setting = Setting.of_run(
            config, run, self._environment, hosts, lambda: {"COSMOS_RENDEZVOUS": secrets.token_hex(8)}
        )
        self.supervisor, self._grace = Supervisor(setting, self), setting.grace
        self.link = ControllerLink(plan.site.url, plan.tokens.user, config.controller.tls_ca or None)
        self._started = time.monotonic()
        self.event_log = LauncherLog(run.launcher_json, run.logs / "launcher.log")
        self.watch = JobWatch(plan, self.link, self.supervisor, self.view, self.event)
        self.redis = RedisPulse(plan.redis, lambda: self.supervisor.kill("redis"), self.event)
        self.trackers = Trackers(config, run.path, plan.env, self.event)
        rollouts = [*plan.workers, *plan.reserve]
        self.scaling = LocalScaling(rollouts, self.link, self.supervisor, self.event)
        self._errands: set[asyncio.Task[None]] = set()
        self._secrets: dict[str, str] = {}
        """The secret of each rollout replica by name: with it a successor takes its place at once."""

    # ---- the whole ----------------------------------------------------------------------------------------

    async def run(self) -> RunResult:
        """Run the job to its end, whatever that is; leaves no process behind."""
        ask = partial(self._send, self._ask_for_checkpoint)
        try:
            with queued_signals(ask, self._early) as interrupts:
                ticker = asyncio.create_task(self._tick())
                try:
                    outcome = await self._until_over(interrupts)
                    collected = await self._unless_killed(outcome, interrupts)
                finally:
                    ticker.cancel()
                    await self.supervisor.kill_all()
                    self.trackers.kill()
                    if self.plan.redis.directory:
                        shutil.rmtree(self.plan.redis.directory, ignore_errors=True)
                    await self.link.close()
                    self.screen.close()
        finally:
            for number in (*stop_signals(), signal.SIGUSR1):
                # All have left; one more Ctrl-C must not cost the summary.
                signal.signal(number, signal.SIG_IGN)
        return self._result(outcome, collected)

    async def _until_over(self, interrupts: asyncio.Queue[int]) -> JobOutcome:
        drive = asyncio.create_task(self._drive())
        over: set[asyncio.Future[Any]] = {drive, self.supervisor.ended}
        number = await attended(asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED), interrupts)
        if drive.done():
            try:
                return drive.result()
            except ControllerError as error:
                return blame(self.plan.run.logs, "controller", str(error))
        drive.cancel()
        await asyncio.wait({drive}, timeout=ABANDON_SECONDS)
        if self.supervisor.ended.done():
            return _blamed(self.supervisor.ended.result())
        assert number is not None
        return JobOutcome("stopped", 128 + number, f"by {signal.Signals(number).name}")

    async def _unless_killed(self, outcome: JobOutcome, interrupts: asyncio.Queue[int]) -> Collected:
        """End the job in order; the second Ctrl-C ends it at once."""
        self.view.stopping = outcome.name == "stopped"
        self.event_log.ending = outcome.name + (f": {outcome.reason}" if outcome.reason else "")
        self._show()
        finish = asyncio.create_task(self._finish(outcome))
        signalled = outcome.exit_code > SIGNALLED
        if not signalled and await attended(asyncio.wait({finish}), interrupts) is not None:
            self.event("the job is ending already; Ctrl-C again kills all processes at once")
        await attended(asyncio.wait({finish}), interrupts)
        if finish.done():
            return finish.result()
        finish.cancel()
        self.event("killing all processes")
        await self.supervisor.kill_all()
        return Collected(status=self.view.status)

    def _result(self, outcome: JobOutcome, collected: Collected) -> RunResult:
        restarts = {name: kept.restarts.total for name, kept in self.supervisor.replicas.items()}
        elapsed, run = time.monotonic() - self._started, self.plan.run
        how = outcome.exit_code, outcome.name, outcome.reason
        result = RunResult(*how, run.path, elapsed, collected, restarts, run.earlier())
        result.write()
        if outcome.lines:
            self.screen.write(f"last lines of {outcome.blame}:" if outcome.blame else "the error in full:")
            self.screen.write("\n".join(f"  │ {text}" for text in outcome.lines))
        return result

    # ---- start --------------------------------------------------------------------------------------------

    async def _drive(self) -> JobOutcome:
        plan, config, logs = self.plan, self.plan.config, self.plan.run.logs
        if names := withheld(config, plan.env):
            self.event(
                f"secrets that no process gets: {', '.join(names)} (reward.environment names what rewards need)"
            )
        if plan.redis.replica is not None:
            self.supervisor.launch(
                plan.redis.replica, after="controller", keeps=str(plan.run.redis), private=plan.redis.directory
            )
        if not plan.continued:
            self._launch_workers()
        if not plan.reuse_data:
            # A run that goes on may have had more rows than the early ones.
            preparation = placement.data_preparation(str(plan.run.path), early=not plan.continued)
            data = self.supervisor.launch(preparation)
            if (failed := await self._prepare_data(data)) is not None:
                return failed
        if plan.redis.replica is not None:
            self.view.stage = "waiting for redis"
            if not await redis_server.wait_ready(plan.redis.url, config.controller.start_timeout):
                return blame(logs, "redis", "the embedded Valkey does not answer (controller.start_timeout)")
        self._send(self.redis.look_forever)
        self.view.stage = "starting the controller"
        self.supervisor.launch(
            placement.controller(str(plan.run.path), plan.site.host, plan.site.port), after="workers"
        )
        self.link.started.set()
        if not await self.link.wait_ready(config.controller.start_timeout):
            return blame(logs, "controller", "the controller did not get ready (controller.start_timeout)")
        self.trackers.start()  # the controller has made the job's id
        self.view.stage = "waiting for replicas"
        if plan.continued and not await self._reopen():
            return JobOutcome("finished", EXIT_OK, "it was finished before")
        if plan.continued:
            self._launch_workers()
        if config.generates:
            self.event(
                f"the controller listens at {plan.site.url}; another rollout replica joins with "
                f"`cosmos-launch join {plan.run.path}`"
            )
        if config.autoscale.enable:
            self._send(self.scaling.follow)
        return await self.watch.until_over()

    def _launch_workers(self) -> None:
        """Start all workers but those that share the memory of their GPUs with an engine which measures it first."""
        waiting = placement.engines_before(self.plan.config, self.plan.workers)
        for replica in self.plan.workers:
            if replica.name in waiting:
                self._send(partial(self._launch_after, replica, waiting[replica.name]))
            else:
                self.supervisor.launch(replica)

    async def _launch_after(self, replica: PlacedReplica, engines: frozenset[str]) -> None:
        names = ", ".join(sorted(engines))
        self.event(f"{replica.name} starts when {names}, on the same GPUs, has measured their memory")
        try:
            await self.watch.until_booted(engines)
        except Exception:  # then its own check of memory decides
            log.exception("cannot tell whether %s has booted: %s starts now", names, replica.name)
        if not self.scaling.over:
            self.supervisor.launch(replica)

    async def _reopen(self) -> bool:
        """Open a stopped or failed job again: it would send its workers away. False if nothing is left to do."""
        patience = self.plan.config.controller.start_timeout  # one that is killed now is restarted, too
        status = await self.link.ask(api.job(), patience)
        if status.phase in (Phase.STOPPED, Phase.FAILED):
            status = await self.link.ask(api.operate("resume"), patience)
        for replica in self.plan.workers:
            # It has ended with its launcher, had another secret, and holds its name still.
            if replica.role is Role.ROLLOUT:
                await self.link.notify(api.replica_exited(replica.name, "its launcher ended", crashed=False))
        self.event(f"going on after {status.step} of {status.total_steps} steps")
        return status.phase is not Phase.FINISHED

    async def _prepare_data(self, data: Supervised) -> JobOutcome | None:
        """Wait for the preparation, as far as the job needs it to begin; the supervisor's verdict if it failed, which
        ends the job."""
        run = self.plan.run
        while not data.done.is_set():
            if not self.plan.continued and run.prompts.exists() and not data_report.has_all_rows(run.prompts):
                self.event("data: the first rows are prepared, and the job begins while the others are")
                self._send(partial(self._report_data, data))
                return None
            last_lines = tail(run.logs / "data.log", 1)
            self.view.stage = "preparing data" + (f": {last_lines[0][:100]}" if last_lines else "")
            try:
                async with asyncio.timeout(POLL / 2):
                    await data.done.wait()
            except TimeoutError:
                continue
        if data.last_exit is None or data.last_exit.code != EXIT_OK:
            return _blamed(await self.supervisor.ended)
        await self._report_data(data)
        return None

    async def _report_data(self, data: Supervised) -> None:
        """Show what became of the rows, once all are prepared."""
        await data.done.wait()
        if data.last_exit is not None and data.last_exit.code == EXIT_OK:
            for text in data_report.of_run(self.plan.run.path):
                self.event(f"data: {text}")

    def _environment(self, spec: ProcessSpec) -> dict[str, str]:
        config, node_variables = self.plan.config, {"COSMOS_NODE_ADDRESS": self.plan.site.address}
        secrets_ = node_variables | self.own(spec, config.controller.tls_ca)
        return spec.environment(config, self.plan.env, secrets_)

    def own(self, spec: ProcessSpec, tls_ca: str = "") -> dict[str, str]:
        """The secrets and addresses that a process gets, wherever it runs. tls_ca: which a node has of its own."""
        plan, redis = self.plan, self.plan.redis
        variables = environment(spec.role, plan.tokens, plan.site.url, redis.url, redis.password, tls_ca)
        if spec.role is Role.ROLLOUT:
            variables["COSMOS_REPLICA_SECRET"] = self._secrets.setdefault(spec.name, secrets.token_urlsafe(32))
        return variables

    # ---- what the supervisor asks (Observer) --------------------------------------------------------------

    def event(self, text: str) -> None:
        """Something happened: on the screen, and in a log file like those of the processes."""
        self.screen.event(text)
        try:
            self.event_log.append(text)
        except OSError as error:  # a full disk ends those who have something to save, not the launcher
            self.screen.event(f"launcher.log cannot be written: {error.strerror}")

    async def exited(self, exit_: Exit) -> Situation:
        """Notify the controller of a replica that went down, and find out whether the job still needs it."""
        role, name = exit_.replica.role, exit_.replica.name
        self.event_log.ended(exit_)
        is_replica = role in (Role.POLICY, Role.ROLLOUT)
        if is_replica and not self.link.started.is_set() and exit_.code != EXIT_CONFIG:
            return await self._too_early(exit_)
        if is_replica and exit_.code != EXIT_NAME_TAKEN:  # else another process lives under its name
            crashed = exit_.hung or is_crash(exit_.code)
            await self.link.notify(api.replica_exited(name, exit_.how, crashed=crashed, parent_pid=exit_.pid))
        status = await self._newest_status(LEFT_PATIENCE if exit_.code == EXIT_OK else BRIEF, role)
        if status is None:
            return Situation(over=False, needed=True)
        # Without controller and Redis it is unknown how the job ended: they are needed until they are stopped.
        ends = OVER if role is Role.DATA else TERMINAL_PHASES  # no step is left that needs rows
        over = status.phase in ends and role not in (Role.CONTROLLER, Role.REDIS)
        return Situation(over=over, needed=self._needed(exit_, status), counts=not exit_.lost)

    async def _too_early(self, exit_: Exit) -> Situation:
        """A worker gave up waiting for the controller while data is being prepared: not its fault."""
        self.event(
            f"{exit_.replica.name} ended ({exit_.how}) before the controller was started; it is "
            f"started again with it; its log: {exit_.log_file}"
        )
        await self.link.started.wait()
        return Situation(over=False, needed=True, counts=False)

    async def _newest_status(self, patience: float, role: Role) -> JobStatus | None:
        if role not in (Role.POLICY, Role.ROLLOUT, Role.DATA) or not self.link.started.is_set():
            return self.view.status
        try:
            self.view.status = await self.link.ask(api.job(), patience)
        except ControllerError as error:
            log.debug("no status: %s", error)
        return self.view.status

    def _needed(self, exit_: Exit, status: JobStatus) -> bool:
        """Whether a replica that left with code 0 is missed."""
        if exit_.replica.role is Role.POLICY:
            if status.members is not None and status.replicas.get("policy", 0):
                return False  # it was asked to leave, and the others go on
            return status.phase not in OVER and status.step < status.total_steps
        if exit_.replica.role is Role.ROLLOUT:
            if exit_.replica.name in self.scaling.leaving:
                return False
            others = [
                kept
                for kept in self.supervisor.running()
                if kept.replica.role is Role.ROLLOUT and kept.replica.name != exit_.replica.name
            ]
            return not others and not status.replicas.get("rollout", 0)
        return True

    # ---- end ----------------------------------------------------------------------------------------------

    async def _finish(self, outcome: JobOutcome) -> Collected:
        self.scaling.over = True
        services = (Role.CONTROLLER, Role.REDIS)
        workers = [name for name, kept in self.supervisor.replicas.items() if kept.replica.role not in services]
        if outcome.name == "failed":
            self.event(f"failed: {outcome.reason}")
            await self.link.notify(api.fail(outcome.reason))
        elif outcome.name == "stopped":
            self.event(f"stopping ({outcome.reason}); Ctrl-C again kills all processes at once")
            await self.link.notify(api.operate("stop"))
        else:
            self.event(f"{outcome.reason or 'finished'}; the workers are leaving")
            await self.supervisor.wait([name for name in workers if name != "data"], self._grace)
        await self._stop(workers)
        collected = Collected(status=self.view.status)
        if self.supervisor.running(["controller"]):
            collected = await self.link.collect(self.view.status)
        if collected.missing:
            self.event(f"the summary is incomplete: {collected.missing}")
        self.view.status = collected.status
        self._show()
        await self._stop(["controller"])
        await self._stop(["redis"])
        await self.trackers.finish()
        return collected

    async def _stop(self, names: Iterable[str]) -> None:
        chosen = [kept.replica.name for kept in self.supervisor.running(names)]
        if not chosen:
            return
        stopping, begun = asyncio.create_task(self.supervisor.stop(chosen)), time.monotonic()
        try:
            while not (await asyncio.wait({stopping}, timeout=POLL))[0]:
                pending = [kept.replica.name for kept in self.supervisor.running(chosen)]
                remaining = max(0.0, self._grace - (time.monotonic() - begun))
                self.view.notice = (
                    f"waiting for {', '.join(pending)}: {duration(remaining)} until they are killed; "
                    "Ctrl-C kills them now"
                )
        finally:
            stopping.cancel()
            self.view.notice = ""

    async def _tick(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(REDRAW)

    def _show(self) -> None:
        self.view.elapsed = time.monotonic() - self._started
        self.view.redis = self.event_log.redis = self.redis.trouble
        self.view.processes = {
            name: kept.state + (f" ({total} restarts)" if (total := kept.restarts.total) else "")
            for name, kept in self.supervisor.replicas.items()
            if name != "data"
        }
        self.screen.show(self.view)
        status = self.view.status
        stage = self.view.notice or (self.view.stage if status is None else str(status.phase))
        try:
            self.event_log.write(stage, self.supervisor.replicas.values())
        except OSError as error:
            log.warning("%s cannot be written: %s", self.event_log.path, error.strerror)

    # ---- signals ------------------------------------------------------------------------------------------

    def _send(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something in parallel with the rest."""
        task = asyncio.create_task(work())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _ask_for_checkpoint(self) -> None:
        """SIGUSR1."""
        done = await self.link.notify(api.operate("checkpoint"))
        if done is None:
            self.event("SIGUSR1: no checkpoint can be requested now, the controller does not answer or refuses")
        else:
            self.event(f"SIGUSR1: a checkpoint is saved after step {done.step}")


def _blamed(ending: Ending) -> JobOutcome:
    verdict: EndJob = ending.verdict
    exit_ = ending.exit
    lines, blame = (exit_.lines, exit_.log_file) if exit_ else ((), None)
    return JobOutcome("failed", verdict.exit_code, verdict.reason, lines, blame)
