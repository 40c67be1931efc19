"""`cosmos-launch --config run.toml`: from a file to a finished job.

    load ─▶ preflight ─▶ run directory, lock, tokens ─▶ Job (launcher.job.job) ─▶ table, exit code

Everything up to the run directory changes nothing and ends with exit code 2 if something is wrong.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import LaunchError
from launcher.job.request import continued, finished, finished_lines
from launcher.nodes.announcement import HeadAddress
from launcher.paths import absolute
from launcher.plan import nsight, redis_server
from launcher.plan.machine import Machine, find_machine
from launcher.plan.placement import PlacementError, place_elastic
from launcher.plan.rundir import RunDir, Tokens, already_running, choose, newest
from launcher.plan.tls import (
    controller_url,
    reachable_elsewhere,
    reachable_host,
    unencrypted_addresses,
    url_of,
)
from launcher.preflight.checks import Findings, check_machine, check_redis, unset_variables
from launcher.processes.signals import note_signals
from launcher.resolved_config import values
from launcher.restarts import EXIT_CONFIG, EXIT_OK
from schema.config import Config, ConfigError, Problem, check_warnings
from schema.config.chat_template import changed_since
from schema.config.loading.load import load
from schema.util.tls import server_context

if TYPE_CHECKING:
    from launcher.display.screen import Screen
    from launcher.nodes.head import NodeServer


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that can run on this machine."""

    config: Config
    machine: Machine
    warnings: list[Problem]
    origins: dict[str, str] = field(default_factory=dict)
    """Where the keys that were written come from."""


def check(
    paths: Sequence[Path],
    overrides: Sequence[str],
    env: Mapping[str, str],
    *,
    joins: bool = False,
    rollouts: bool = True,
) -> Checked:
    """Load and check everything that can be checked before a process starts. Raises ConfigError.

    joins: controller and Redis are another machine's. rollouts: as for `launch`.
    """
    loaded = load(paths, overrides, env)
    config, machine = loaded.config, find_machine(env)
    findings = check_machine(config, machine, joins=joins, rollouts=rollouts)
    redis = Findings() if joins else check_redis(config, env)
    problems = findings.problems + redis.problems + unset_variables(config, env)
    if problems:
        raise ConfigError(loaded.placed(problems))
    warnings = (
        check_warnings(config) + unencrypted_addresses(config, env) + findings.warnings + redis.warnings
    )
    origins = {value.key: value.source for value in values(loaded, changed_only=True)}
    return Checked(config, machine, loaded.warnings + loaded.placed(warnings), origins)


def launch(
    paths: Sequence[Path],
    overrides: Sequence[str],
    *,
    resume: str | None,
    env: Mapping[str, str],
    cluster: Cluster | None = None,
    rollouts: bool = True,
) -> int:
    """Run a job to its end and return the exit code. Raises ConfigError, LaunchError before anything starts.

    `resume`: None for a run of its own, else what follows `--resume` (see `launcher.job.request`). cluster: where
    this machine is one of several. rollouts: whether the job starts its rollout replicas itself.
    """
    from launcher.display.screen import open_screen

    if cluster is not None and not cluster.leads:
        checked = check(paths, overrides, env, joins=True, rollouts=rollouts)
        return _join(checked, cluster, env, resumes=resume is not None)
    if resume is not None:
        found = continued(resume, paths, overrides)
        if found.run is not None and (summary := finished(found.run)) is not None:
            return _say_finished(found.run, summary)
        paths, overrides = found.configs, found.overrides
    checked = check(paths, overrides, env, rollouts=rollouts)
    _check_cluster(checked.config, cluster)
    if checked.config.is_evaluation and resume is not None:
        raise LaunchError(
            "an evaluation has nothing to resume", "leave --resume out: it is quick to run again"
        )
    asked = resume is not None or checked.config.train.resume is True
    wants_resume = asked and not checked.config.is_evaluation
    run, goes_on = _chosen(checked.config, wants_resume)
    if goes_on and run.is_alive():
        raise already_running(run)
    if goes_on and (summary := finished(run)) is not None:
        return _say_finished(run, summary)
    run.make()
    run.lock()
    screen = open_screen()
    try:
        for warning in checked.warnings:
            screen.event("warning: " + warning.render().replace("\n    ", "; "))
        if wants_resume and not goes_on:
            screen.event(f"nothing to resume in {checked.config.train.output_dir}: starting afresh")
        if goes_on:
            if leaving := run.leaving():
                screen.event(f"waiting for processes of an earlier start to leave ({', '.join(leaving)})")
            from launcher.job.trackers import CLOSE_SECONDS  # with asyncio, for which a dry run need not wait

            # Workers, controller and Redis leave one after the other, each within that time.
            run.wait_until_left(3 * nsight.grace(checked.config) + CLOSE_SECONDS)
            run.forget_earlier_end()
            run.sweep()
        screen.event(f"{'continuing' if goes_on else 'run directory'} {run.path}")
        if checked.config.is_evaluation:
            from launcher.job.evaluation import run_evaluation

            return run_evaluation(checked.config, run, env, screen)
        return _run(checked, run, goes_on, screen, env, cluster, rollouts=rollouts)
    finally:
        screen.close()
        run.unlock()


def _chosen(config: Config, wants_resume: bool) -> tuple[RunDir, bool]:
    """The directory for this start, and whether it continues an earlier run. One without a name is taken at once:
    another launcher may begin in the same second."""
    while True:
        run, goes_on = choose(config, wants_resume, time.time())
        if goes_on or config.train.timestamp or run.take():
            return run, goes_on


def _say_finished(run: RunDir, summary: Mapping[str, Any]) -> int:
    sys.stdout.write("\n".join(finished_lines(run, summary)) + "\n")
    return EXIT_OK


@dataclass(frozen=True)
class Cluster:
    """A job on several machines. number: of this one, 0 leads; None: it leads if the head's address is its own."""

    head: HeadAddress
    number: int | None = None

    @cached_property
    def leads(self) -> bool:
        """Whether this is the head. Raises LaunchError if its name is unknown."""
        return self.head.is_here() if self.number is None else self.number == 0


def _check_cluster(config: Config, cluster: Cluster | None) -> None:
    nodes = 1 if config.is_evaluation else config.placement.nodes
    if nodes > 1 and cluster is None:
        raise LaunchError(
            f"placement.nodes = {nodes}: the job runs on several machines, and none is named as their head",
            "run the same command on each with the address of one of them: --head ADDRESS; or --target slurm",
        )
    if nodes == 1 and cluster is not None:
        raise LaunchError(
            f"--head {cluster.head} is for jobs on several machines, and placement.nodes = 1",
            "write placement.nodes = 2, or as many as there are, or leave --head out",
        )


def _join(checked: Checked, cluster: Cluster, env: Mapping[str, str], *, resumes: bool) -> int:
    """Be a node of a job that another machine leads. resumes: the head goes on with a run, or finds it finished."""
    import asyncio

    from launcher.display.screen import open_screen
    from launcher.nodes.agent import Joining, run_node

    _check_cluster(checked.config, cluster)
    output, name = Path(absolute(checked.config.train.output_dir)), checked.config.train.timestamp
    run = RunDir(output / name) if name else newest(output)
    if resumes and run is not None and not run.is_alive() and (summary := finished(run)) is not None:
        return _say_finished(run, summary)
    screen = open_screen()
    try:
        joining = Joining(checked.config, checked.machine, cluster.head, cluster.number, env)
        return asyncio.run(run_node(joining, screen.event))
    finally:
        screen.close()


def _run(
    checked: Checked,
    run: RunDir,
    goes_on: bool,
    screen: Screen,
    env: Mapping[str, str],
    cluster: Cluster | None,
    *,
    rollouts: bool,
) -> int:
    early = note_signals()
    import asyncio  # a dry run, which loads this module too, need not wait for it

    from launcher.display.summary import ALL_DROPPED, Result, out_of_data
    from launcher.job.job import Job
    from launcher.job.plan import LOOPBACK, Plan
    from launcher.processes.supervisor import free_port

    # "save a checkpoint": until the job is up there is nothing to save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    config = checked.config
    before = run.written_config()
    written = run.write_config(config)
    run.write_origins(checked.origins)
    tokens = Tokens.fresh()
    run.write_tokens(tokens, trainers=config.policy.parallelism.n_init_replicas > 1)

    reuses = goes_on and _same_data(before, written, run)
    if reuses and (warning := changed_since(config, run.path)):
        screen.event(f"warning: {warning}")

    def planned(host: str, port: int, url: str, address: str, others: Sequence[Machine]) -> Plan:
        try:
            workers, reserve = place_elastic(config, checked.machine, *others, rollouts=rollouts)
        except PlacementError as error:  # of what other machines have, which nobody knew before
            raise ConfigError([error.problem]) from None
        return Plan(
            config=config,
            run=run,
            tokens=tokens,
            url=url,
            host=host,
            port=port,
            redis=redis_server.named(config.redis, env) or redis_server.embedded(run.redis),
            workers=workers,
            reserve=reserve,
            reuse_data=reuses,
            continued=goes_on,
            env=env,
            address=address,
        )

    async def alone() -> Result:
        port = config.controller.port or free_port(reachable_host(config))
        plan = planned(config.controller.host, port, controller_url(config, port), LOOPBACK, [])
        return await Job(plan, screen, early).run()

    async def with_nodes(head: HeadAddress) -> Result:
        async with _nodes_of(head, checked.config, run, env, screen, early) as nodes:
            job = Job(
                planned(*nodes.controller, nodes.server.address, nodes.machines),
                screen,
                early,
                nodes.server.hosts,
            )
            nodes.server.lend(job.own, [checked.machine, *nodes.machines], rollouts=rollouts)
            result = await job.run()
            await nodes.server.finish(result.outcome, result.exit_code)
            return result

    result = asyncio.run(alone() if cluster is None else with_nodes(cluster.head))
    run.sweep()
    screen.table(result.summary())
    if out_of_data(result.summary()):
        screen.write(f"{ALL_DROPPED}.")
    elif result.outcome != "finished" and result.exit_code != EXIT_CONFIG:
        screen.write(f"cosmos-launch --resume {run.path} goes on from here.")
    return result.exit_code


@dataclass(frozen=True)
class _Nodes:
    """The other machines, once they are there. controller: where it listens, host and port, and its URL."""

    server: NodeServer
    machines: list[Machine]
    controller: tuple[str, int, str]


@asynccontextmanager
async def _nodes_of(
    head: HeadAddress,
    config: Config,
    run: RunDir,
    env: Mapping[str, str],
    screen: Screen,
    interrupts: Sequence[int],
) -> AsyncIterator[_Nodes]:
    """Wait for them at the head's address. Raises LaunchError."""
    from launcher.nodes.agreement import facts
    from launcher.nodes.head import NodeServer, Terms
    from launcher.processes.supervisor import free_port

    wanted, tls = config.controller, None
    port, chosen = wanted.port or free_port(""), "host" in wanted.model_fields_set
    if wanted.tls_cert:
        tls = server_context(wanted.tls_cert, wanted.tls_key)
    named = reachable_elsewhere(config) if chosen else head.host
    terms = Terms(config, run, facts(config, env), (named, port), tls)
    server = NodeServer(head, terms, screen.event)
    async with server.listening():
        machines = await server.gather(interrupts)
        # A certificate is for a name; without one the address by which nodes came is surely reachable.
        name = named if chosen or tls else server.address
        listens = wanted.host if chosen else server.address
        yield _Nodes(server, machines, (listens, port, url_of(config, name, port)))


def _same_data(before: Mapping[str, Any] | None, now: Mapping[str, Any], run: RunDir) -> bool:
    """Whether the data that an earlier start prepared can be used again: nothing but the resumption differs."""
    if before is None or not (run.path / "data" / "train.safetensors").exists():
        return False

    def relevant(data: Mapping[str, Any]) -> dict[str, Any]:
        return {**data, "train": {**data["train"], "resume": None}, "controller": None, "launcher": None}

    return relevant(before) == relevant(now)
