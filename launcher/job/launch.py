"""`cosmos-launch --config run.toml`: from a request to a finished job, stage by stage.

    request ─▶ checked configuration ─▶ run directory, locked ─▶ plan ─▶ job ─▶ table, exit code

    lead        all of them; a run that goes on differs in what the stages find
    evaluation  two steps in the place of plan and job (launcher.job.evaluation)
    follow      a node of a job that another machine leads: a checked configuration (launcher.nodes.agent)
    dry run     a checked configuration, and what the rest would do (launcher.commands.dry_run)
    replay      the trainer of a run alone, in a directory that is removed (launcher.job.replay)

Everything up to the run directory changes nothing and ends with exit code 2 if something is wrong.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from launcher.job.checked import check, check_start
from launcher.job.directory import FinishedError, RunStart, opened, refuse_finished
from launcher.job.request import Cluster, LaunchRequest
from launcher.nodes.announcement import HeadAddress
from launcher.plan.addresses import Site, free_port, reachable_elsewhere, url_of
from launcher.plan.rundir import RunTokens, named_or_newest
from launcher.processes.signals import note_signals
from launcher.restarts import EXIT_CONFIG, EXIT_OK
from schema.config.chat_template import changed_since
from schema.util.tls import server_context

if TYPE_CHECKING:
    from launcher.display.summary import RunResult
    from launcher.nodes.head import NodeServer


def launch(request: LaunchRequest) -> int:
    """Run what is requested, or this machine's part of it, to its end; the exit code.

    Raises ConfigError, LaunchError before anything starts.
    """
    cluster = request.cluster
    try:
        return lead(request) if cluster is None or cluster.leads else follow(request, cluster)
    except FinishedError as end:
        sys.stdout.write(end.render() + "\n")
        return EXIT_OK


def lead(request: LaunchRequest) -> int:
    """Run a job, or an evaluation, from here."""
    request = request.continued()
    if request.run is not None:
        refuse_finished(request.run)
    checked = check(request)
    check_start(checked)
    with opened(checked) as start:
        if checked.config.is_evaluation:
            from launcher.job.evaluation import run_evaluation

            return run_evaluation(start)
        return train(start)


def follow(request: LaunchRequest, cluster: Cluster) -> int:
    """Join the job of another machine as a node, until that job has ended."""
    checked = check(request, joins=True)
    check_start(checked)
    import asyncio

    from launcher.display.screen import open_screen
    from launcher.nodes.agent import Joining, run_node

    run = named_or_newest(checked.config) if request.resume is not None else None
    if run is not None and not run.is_alive():
        refuse_finished(run)  # as the head does
    screen = open_screen()
    try:
        joining = Joining(checked.config, checked.machine, cluster.head, cluster.number, request.env)
        return asyncio.run(run_node(joining, screen.event))
    finally:
        screen.close()


def train(start: RunStart) -> int:
    """Plan the job, run it, and show how it ended."""
    from launcher.display.summary import ALL_DROPPED, out_of_data

    result, screen = run_job(start), start.screen
    screen.table(result.summary())
    if out_of_data(result.summary()):
        screen.write(f"{ALL_DROPPED}.")
    elif result.outcome != "finished" and result.exit_code != EXIT_CONFIG:
        screen.write(f"cosmos-launch --resume {start.run.path} goes on from here.")
    return result.exit_code


def run_job(start: RunStart) -> RunResult:
    """Plan the job and run it to its end."""
    early = note_signals()
    import asyncio

    # "save a checkpoint": until the job is up there is nothing to save.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    tokens, reuse_data = start.run.write_start(start.checked.config, start.checked.origins)
    screen = start.screen
    if reuse_data and (warning := changed_since(start.checked.config, start.run.path)):
        screen.event(f"warning: {warning}")
    return asyncio.run(_run(start, tokens, reuse_data, early))


async def _run(start: RunStart, tokens: RunTokens, reuse_data: bool, early: Sequence[int]) -> RunResult:
    """Run the job on this machine, or on all of its cluster. early: signals that arrive before it handles them."""
    from launcher.job.job import Job
    from launcher.job.plan import plan

    checked, cluster = start.checked, start.checked.request.cluster
    if cluster is None:
        site = Site.here(checked.config)
        return await Job(plan(start, site, tokens, reuse_data), start.screen, early).run()
    async with _nodes(start, cluster.head, early) as (server, site):
        job = Job(plan(start, site, tokens, reuse_data), start.screen, early, server.hosts)
        server.lend(job.own, [checked.machine, *site.others], rollouts=checked.request.rollouts)
        result = await job.run()
        await server.finish(result.outcome, result.exit_code)
        return result


@asynccontextmanager
async def _nodes(start: RunStart, head: HeadAddress, early: Sequence[int]) -> AsyncIterator[tuple[NodeServer, Site]]:
    """Wait for the other machines at the address of the head. Raises LaunchError: some do not come."""
    from launcher.nodes.agreement import facts
    from launcher.nodes.head import NodeServer, Terms

    config, env = start.checked.config, start.checked.request.env
    controller = config.controller
    port, chosen = controller.port or free_port(""), "host" in controller.model_fields_set
    tls = server_context(controller.tls_cert, controller.tls_key) if controller.tls_cert else None
    named = reachable_elsewhere(config) if chosen else head.host
    terms = Terms(config, start.run, facts(config, env), (named, port), tls)
    server = NodeServer(head, terms, start.screen.event)
    async with server.listening():
        machines = await server.gather(early)
        # A certificate is for a name; without one the address by which nodes came is surely reachable.
        name = named if chosen or tls else server.address
        listens = controller.host if chosen else server.address
        yield server, Site(listens, port, url_of(config, name, port), server.address, machines)
