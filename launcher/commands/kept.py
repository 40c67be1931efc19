"""Commands on what a run has kept: its checkpoints as models, its batches trained again.

The work is done by processes of their own: this program never loads torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands.options import AsJson, Overrides
from launcher.errors import LaunchError
from launcher.plan.checkpoints import newest_checkpoint

DTYPES = ("float32", "bfloat16", "float16")


def _need_torch() -> None:
    from launcher.plan.machine import has_module

    if not has_module("torch"):
        hint = "pip install '.[policy]' in the checkout of cosmos-launch"
        raise LaunchError("the package torch is not installed", hint)


def _refuse_run_without_checkpoint(path: Path) -> None:
    from launcher.plan.rundir import is_run

    if not is_run(path) or newest_checkpoint(path / "checkpoints") is not None:
        return
    if (path / "final" / "config.json").exists():
        raise LaunchError(f"{path} has no checkpoint", f"its model is in {path / 'final'}")
    raise LaunchError(f"{path} has no checkpoint", "train.ckpt.enable_checkpoint = true saves some")


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT|RUN_DIR", help="A checkpoint, or a run: its newest complete one.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the model goes.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, bfloat16 or float16; otherwise that of the run.")
    ] = "",
    model: Annotated[
        str, typer.Option("--model", help="The model that the run began with, where it has moved.")
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option("--config", help="The run's config.json, where the checkpoint was moved away from it."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is at DIR.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a model for transformers out of a checkpoint: safetensors, config, tokenizer, generation config.

    \b
    cosmos-launch export outputs/20260131120000 -o my-model
    cosmos-launch export outputs/20260131120000/checkpoints/step-00000040 -o my-model --dtype bfloat16

    Works offline in one process on the CPU, however many ranks have written the checkpoint, and checks every file
    that it reads. The model of a finished run is in its final/ already.
    """
    if dtype and dtype not in DTYPES:
        raise LaunchError(f"--dtype {dtype} is unknown", f"there are {', '.join(DTYPES)}")
    _refuse_run_without_checkpoint(checkpoint)
    from launcher.plan.credentials import without_secrets

    _need_torch()
    command = [sys.executable, "-P", "-m", "policy_worker.export_command", str(checkpoint), str(output)]
    for name, value in (("--dtype", dtype), ("--model", model), ("--config", config)):
        command += [name, str(value)] if value else []
    command += ["--force"] * force + ["--json"] * as_json
    env = {**without_secrets(os.environ), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import subprocess

    raise typer.Exit(subprocess.run(command, env=env, check=False).returncode)


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
    from launcher.job.replay import ReplayOptions
    from launcher.job.replay import replay as run_replay

    recorded_run = run_below(run, named=True)
    _need_torch()
    options = ReplayOptions(recorded_run, first_step, steps, repeat, set_ or [], as_json)
    raise typer.Exit(run_replay(options, os.environ))
