"""Commands for a job that runs, or ran: status, stop, pause, resume, checkpoint, profile, drain, scale."""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.commands.options import AsJson, Overrides, Targets, report
from launcher.errors import LaunchError, NotServingError
from launcher.restarts import EXIT_FAILED

if TYPE_CHECKING:
    from launcher.job.remote import RemoteJob
    from launcher.plan.checkpoints import Checkpoint
    from launcher.plan.rundir import RunDir
    from schema.wire.messages import ProfileStatus

WATCH_EVERY = 2.0
CHECKPOINT_POLL = PROFILE_POLL = 0.5
HOW_TO_OPEN = "open them at https://ui.perfetto.dev or in chrome://tracing; the .txt next to each is a table"
RUN_PROFILES = "profiles/ of the run"
MOST_STEPS = 10**6
AUTOMATIC = "auto"
LONGEST_NUMBER = 9
"""Digits."""
CLEAR = "\x1b[H\x1b[2J\x1b[3J"

Wait = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0.0, help="Wait up to this long until it is done.")
]
OneTarget = Annotated[str | None, typer.Argument(metavar="RUN_DIR|CONFIG|URL", help="The job. Default: ./outputs.")]


def status(
    targets: Targets = None,
    set_: Overrides = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the job has ended.")] = False,
    why: Annotated[
        bool, typer.Option("--why", help="Also what it waits for, what fails and why, what would help.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the state of a running or ended job: phase, what died, restarts, newest checkpoint, what to do next.

    \b
    Exit codes: 0 it runs, or has ended as it was asked to (finished, stopped); 1 it failed or was killed,
    or a URL does not answer; 2 the job does not exist, or you may not look at it.

    \b
      cosmos-launch status                     the newest run below ./outputs
      cosmos-launch status --watch             again every two seconds, until it has ended
      cosmos-launch status --why               what it waits for, since when and on whom
      cosmos-launch status run.toml            the newest run of this file
      cosmos-launch status RUN_DIR --json      everything, for programs: .state is running, starting,
                                               waiting, unreachable, ending, leaving, killed,
                                               finished, stopped or failed
    """
    from launcher.commands.status import ENDED, exit_code, find_status

    target = _find(targets, set_)
    while True:
        facts = find_status(target)
        _show(facts, as_json, watch, why)
        if not watch or facts["state"] in ENDED:
            raise typer.Exit(exit_code(facts))
        time.sleep(WATCH_EVERY)


def _show(facts: dict[str, Any], as_json: bool, again: bool, why: bool) -> None:
    import sys

    from launcher.commands.status import lines, why_lines

    if as_json:
        typer.echo(json.dumps(facts, indent=None if again else 2))
        return
    clear = CLEAR if again and sys.stdout.isatty() else ""
    typer.echo(clear + "\n".join(lines(facts) + (why_lines(facts) if why else [])))


def stop(
    targets: Targets = None,
    set_: Overrides = None,
    now: Annotated[
        bool, typer.Option("--now", help="Kill all processes of the job; only what was saved before is kept.")
    ] = False,
    wait: Wait = 0.0,
    as_json: AsJson = False,
) -> None:
    """End a job in order; `--resume` can go on with it later.

    The job saves what it saves at its end and leaves within launcher.shutdown_timeout. This works whatever of the
    job is still alive: without its controller the launcher gets a signal, without a launcher --now ends what is left.
    Exit code 1: it was not running, or has not ended in time.

    \b
      cosmos-launch stop                       the newest run below ./outputs
      cosmos-launch stop RUN_DIR --wait 60     and return when its processes have left
      cosmos-launch stop RUN_DIR --now         at once, as two Ctrl-C do
    """
    from launcher.commands.stop import stop as stop_job

    target = _find(targets, set_)
    outcome = stop_job(target, now=now, wait=wait)
    report(as_json, f"{target.name}: {outcome}", job=target.name, result=outcome)


def pause(targets: Targets = None, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Hand out no more prompts and begin no more steps; what is under way goes on. `resume` ends it.

    Rollout replicas and the trainer stay and keep their memory. To free the machine, use `stop` and `--resume`.
    """
    _operate(_find(targets, set_), "pause", as_json)


def resume(targets: Targets = None, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Let a paused job go on. (A job that was stopped or died: `cosmos-launch --resume RUN_DIR`.)"""
    _operate(_find(targets, set_), "resume", as_json)


def checkpoint(targets: Targets = None, set_: Overrides = None, wait: Wait = 0.0, as_json: AsJson = False) -> None:
    """Save a checkpoint after the step that is being trained. SIGUSR1 to the launcher does the same.

    With --wait the command returns when it is complete, and names it; exit code 1 if that takes longer.
    """
    target = _find(targets, set_)
    if wait and target.run is None:
        raise LaunchError("--wait reads the run directory, which a URL does not reach", "leave --wait out")
    step = _operate(target, "checkpoint", as_json, silent=bool(wait) and as_json)
    if wait and target.run is not None:
        saved = _wait_for_checkpoint(target.run, step, wait)
        report(as_json, f"step {saved.step}: {saved.path}", step=saved.step, path=str(saved.path))


def _wait_for_checkpoint(run: RunDir, step: int, wait: float) -> Checkpoint:
    """The first checkpoint that has everything that was committed at the request."""
    from launcher.plan.checkpoints import newest_checkpoint

    give_up = time.monotonic() + wait
    while True:
        alive, newest = run.is_alive(), newest_checkpoint(run.checkpoints)
        if newest is not None and newest.step >= step:
            return newest
        if not alive:
            raise LaunchError(
                f"{run.path} ended before step {step} was in a checkpoint",
                f"`cosmos-launch status {run.path}` says why",
                EXIT_FAILED,
            )
        if time.monotonic() >= give_up:
            raise LaunchError(
                f"step {step} is not in a checkpoint after {wait:g} s",
                f"a step may take longer; see {run.logs}/policy-*.log",
                EXIT_FAILED,
            )
        time.sleep(CHECKPOINT_POLL)


def _count(name: str, help_: str, least: int = 0, most: int = MOST_STEPS) -> Any:
    return typer.Option(name, metavar="N", min=least, max=most, help=help_)


def profile(
    targets: Targets = None,
    set_: Overrides = None,
    steps: Annotated[int | None, _count("--steps", "Steps to record. Default: active_steps.", 1)] = None,
    first_step: Annotated[
        int | None, _count("--first-step", "The first one. Default: as soon as possible.", most=2**53 - 1)
    ] = None,
    warmup: Annotated[int | None, _count("--warmup", "Warm-up before. Default: warmup_steps.")] = None,
    rank: Annotated[list[int] | None, _count("--rank", "To record; may be repeated. Default: rank_filter.")] = None,
    wait: Wait = 0.0,
    as_json: AsJson = False,
) -> None:
    """Record training steps with the torch profiler: where does a step spend its time?

    Each rank of the trainer (of several, the first that is there) writes a trace (operators, kernels of the GPU, and
    the ranges wait, step, fetch, decode, forward, loss, backward, optimizer, publish) to RUN_DIR/profiles, and a
    table of the costliest operations next to it. Step N is the one after N committed steps. The job needs
    profiler.enable_profiler = true; defaults, and what else is recorded (shapes, memory, stacks, modules), are in
    [profiler.sub_profiler_config].

    With --wait the command returns when the traces are there, and names them; exit code 1 if that takes longer.

    \b
      cosmos-launch profile --wait 600                  the next step, after one of warm-up, of all ranks
      cosmos-launch profile RUN_DIR --steps 3           three steps in one trace
      cosmos-launch profile --first-step 500 --rank 0   step 500, of the first rank alone
      cosmos-launch profile --warmup 0                  at once, with what the first use of the profiler costs
    """
    from controller.client import calls as api
    from schema.wire.messages import ProfileRequest

    target = _find(targets, set_)
    trainers = [info for info in target.ask(api.replicas()) if info.role == "policy"]
    trainer = next((info for info in trainers if info.state in ("live", "draining")), None)
    if trainer is None:
        raise LaunchError(
            f"{target.name} has no trainer at this moment",
            f"`cosmos-launch status {target.name}` shows when one has registered",
            EXIT_FAILED,
        )
    request = ProfileRequest(
        request_id=secrets.token_hex(12), first_step=first_step, steps=steps, warmup=warmup, ranks=rank or []
    )
    requested = target.ask(api.profile(trainer.replica_id, request))
    which = "the next" if requested.first_step is None else f"from step {requested.first_step} on"
    count = "1 step" if requested.steps == 1 else f"{requested.steps} steps"
    message = f"{target.name}: a profile of {count}, {which}, after {requested.warmup} of warm-up, is asked for"
    if not (wait and as_json):
        report(as_json, message, **requested.model_dump(mode="json"))
    if wait:
        written = _wait_for_profile(target, requested, wait)
        report(as_json, "\n".join(_written(written)), **written.model_dump(mode="json"))


def _written(profile: ProfileStatus) -> list[str]:
    """Where the traces are, and how to open them."""
    lines = [f"{profile.directory}/{name}" for name in profile.files]
    if others := len(profile.ranks) - len(profile.files):
        lines.append(f"and those of {others} more ranks next to them")
    return [*lines, HOW_TO_OPEN]


def _wait_for_profile(target: RemoteJob, requested: ProfileStatus, wait: float) -> ProfileStatus:
    from controller.client import calls as api

    give_up, newest = time.monotonic() + wait, requested
    while newest.state != "written":
        if newest.state == "failed":
            hint = "the trainer's log, logs/policy-*.log of the run, says more; then ask for another one"
            raise LaunchError(f"no profile: {newest.detail}", hint, EXIT_FAILED)
        if time.monotonic() >= give_up:
            raise LaunchError(
                f"the profile is not there after {wait:g} s (it is {newest.state})",
                f"a step may take longer; it is written all the same, to {newest.directory or RUN_PROFILES}",
                EXIT_FAILED,
            )
        time.sleep(PROFILE_POLL)
        try:
            profiles = [info.profile for info in target.ask(api.replicas()) if info.profile is not None]
        except LaunchError as error:
            if _is_there(newest):  # the job has ended since, with its last step in the profile
                break
            if isinstance(error, NotServingError):
                continue
            raise
        current = next((info for info in profiles if info.profile_id == requested.profile_id), None)
        if current is None:
            raise LaunchError("no profile: the trainer was started again", "ask for another one", EXIT_FAILED)
        newest = current
    return newest


def _is_there(profile: ProfileStatus) -> bool:
    """Whether its traces can be seen from here."""
    files = [os.path.join(profile.directory, name) for name in profile.files]
    return bool(files) and all(map(os.path.isfile, files))


def drain(
    replica: Annotated[str, typer.Argument(metavar="REPLICA", help="Its name, as `status` shows it.")],
    target: OneTarget = None,
    as_json: AsJson = False,
) -> None:
    """Let a rollout replica finish what it can within launcher.shutdown_timeout, give back the rest, and leave.

    What it has finished is kept, what it gives back is made by others from the same seeds: nothing is lost. SIGTERM
    to the replica does the same. One that the launcher started is not started again while another one is there.

    \b
      cosmos-launch drain rollout-1
      cosmos-launch drain by-hand outputs/20260131120000
    """
    from controller.client import calls as api

    job = _find([target] if target else None, None)
    replicas = [info for info in job.ask(api.replicas()) if info.role == "rollout"]
    chosen = [info for info in replicas if replica in (info.name, info.replica_id)]
    if not chosen:
        names = ", ".join(sorted(info.name for info in replicas if info.state == "live")) or "none"
        raise LaunchError(f"unknown rollout replica {replica!r}", f"live replicas: {names}")
    if chosen[0].state in ("left", "lost"):
        raise LaunchError(f"{replica} has state {chosen[0].state} already", "nothing is left to drain", EXIT_FAILED)
    job.ask(api.drain(chosen[0].replica_id))
    message = f"{chosen[0].name} is draining; `cosmos-launch status` shows when it has left"
    report(as_json, message, replica=chosen[0].name, draining=True)


def scale(
    replicas: Annotated[
        str,
        typer.Argument(
            metavar="N|auto", help="The number of replicas; auto: as many as the load needs, from now on."
        ),
    ],
    target: OneTarget = None,
    as_json: AsJson = False,
) -> None:
    """Set how many rollout replicas a job with autoscale.enable = true has, or give the number back (auto).

    A number by hand counts at once, within autoscale.min_replicas and autoscale.max_replicas, and stays until `auto`,
    also after a --resume. The launcher, or the scaler of the cluster, starts further ones; surplus ones finish what
    they can and leave, as by `drain`: nothing is lost. `cosmos-launch status` shows how many there are, and why.
    Exit code 1: the job is not running, does not scale, or the number is out of range.

    \b
      cosmos-launch scale 4                    four, whatever is measured
      cosmos-launch scale auto                 as many as are needed
      cosmos-launch scale 2 RUN_DIR --json     of a certain run, for programs: .desired, .replicas, .reason
    """
    from controller.client import calls as api

    count = _replicas(replicas)
    job = _find([target] if target else None, None)
    now = job.ask(api.scale(count))
    basis = "by request, until `cosmos-launch scale auto`" if now.manual else "for now: the number follows the need"
    present = f"{now.replicas} {'is' if now.replicas == 1 else 'are'} there"
    noun = "replica" if now.desired == 1 else "replicas"
    message = f"{job.name}: {now.desired} rollout {noun} {basis}; {present}"
    report(as_json, message, job=job.name, **now.model_dump(mode="json"))


def _replicas(text: str) -> int | None:
    """The number; None: as many as are needed. Raises LaunchError."""
    if text == AUTOMATIC:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER):
        raise LaunchError(
            f"{text!r} is not a number of rollout replicas",
            "the number comes first, then the job: cosmos-launch scale 3 RUN_DIR, or cosmos-launch scale auto",
        )
    return int(text)


def _find(targets: list[str] | None, set_: list[str] | None) -> RemoteJob:
    from launcher.job import remote

    return remote.find(targets or [], set_ or [], os.environ)


def _operate(target: RemoteJob, action: Any, as_json: bool, *, silent: bool = False) -> int:
    """Do it, and say so; the steps that are committed."""
    from controller.client import calls as api

    done = target.ask(api.operate(action))
    outcome = "a checkpoint is saved after this step" if action == "checkpoint" else str(done.phase)
    if not silent:
        message = f"{target.name}: {outcome} (step {done.step} of {done.total_steps})"
        report(as_json, message, job=target.name, phase=str(done.phase), step=done.step, total_steps=done.total_steps)
    return done.step
