"""The command replay. The work is done by the trainer's own processes: this program never loads torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.options import Overrides
from launcher.errors import LaunchError


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run that has recorded batches.")],
    first_step: Annotated[
        int | None, typer.Option("--first-step", min=0, help="Default: the oldest that is recorded.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Default: all that follow.")] = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Train all of them so often; the weights go on changing.")
    ] = 1,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object a line.")] = False,
) -> None:
    """Train a run's recorded batches again, without controller, Redis and generators: to profile and debug.

    The run must have had profiler.record_batches. It may be running; nothing of it is changed. Training begins with
    the checkpoint of exactly the first step if there is one, and then every number is that of the run; else with the
    nearest one before, or with the model as it was at step 0.

    \b
      cosmos-launch replay RUN_DIR                                  every recorded step, in order
      cosmos-launch replay RUN_DIR --first-step 40 --steps 1 --repeat 20
      cosmos-launch replay RUN_DIR --set train.train_policy.mini_batch=4
    """
    from launcher.job.remote import run_below
    from launcher.job.replay import Wanted
    from launcher.job.replay import replay as run_replay
    from launcher.plan.machine import has_module

    found = run_below(run, named=True)
    if not has_module("torch"):
        hint = "pip install '.[policy]' in the checkout of cosmos-launch"
        raise LaunchError("the package torch is not installed", hint)
    wanted = Wanted(found, first_step, steps, repeat, set_ or [], as_json)
    raise typer.Exit(run_replay(wanted, os.environ))
