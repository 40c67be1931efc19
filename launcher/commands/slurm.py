"""`cosmos-launch --config run.toml --target slurm`: the sbatch scripts of a job, written and, if asked, submitted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from launcher.errors import LaunchError
from launcher.paths import absolute
from launcher.plan.placement import needs
from launcher.restarts import EXIT_OK
from launcher.targets.slurm import SlurmJob, render
from schema.config import Config
from schema.config.layout import rollout_layout
from schema.config.loading.load import load
from schema.util.atomic_file import write_text

OURS = {
    "job-name": "logging.experiment_name",
    "nodes": "placement.nodes",
    "ntasks-per-node": "one task for each node",
    "gpus-per-node": "placement.gpus_per_node",
    "array": "rollout.parallelism.n_init_replicas",
    "requeue": "a requeued job goes on",
    "open-mode": "a requeued job appends to its log",
    "chdir": "where this command was run",
    "output": "train.output_dir",
    "signal": "the time for a checkpoint before the limit",
}
"""Options of sbatch that the scripts have already, and where they come from."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for. directory: where to; None: <train.output_dir>/slurm. options: of sbatch. array: rollout
    replicas as jobs of their own. apply: submit what was written."""

    configs: Sequence[Path]
    overrides: Sequence[str]
    directory: Path | None
    options: Sequence[str]
    array: bool
    apply: bool


def write(wanted: Wanted, env: Mapping[str, str]) -> int:
    """Write the scripts; the exit code. Raises ConfigError, LaunchError."""
    config = load(wanted.configs, wanted.overrides, env).config
    if config.is_evaluation:
        raise LaunchError("an evaluation needs no cluster", "run it here: leave --target out")
    if wanted.array and not config.is_grpo:
        raise LaunchError("--rollout-array is for rollout replicas, and this job has none", "leave it out")
    for option in wanted.options:
        _check_option(option)
    job = _job(config, wanted)
    target = wanted.directory or Path(job.output) / "slurm"
    target.mkdir(parents=True, exist_ok=True)
    for name, text in render(job).items():
        write_text(target / name, text, mode=0o755)
        typer.echo(str(target / name))
    script = target / "submit.sh"
    if not wanted.apply:
        typer.echo(f"submit it with {script}")
        return EXIT_OK
    try:
        return subprocess.run([str(script.absolute())], check=False).returncode
    except OSError as error:
        raise LaunchError(f"{script} cannot be run: {error.strerror}") from None


def _job(config: Config, wanted: Wanted) -> SlurmJob:
    placement, nodes = config.placement, config.placement.nodes
    gpus, overrides = placement.gpus_per_node or 0, [*wanted.overrides]
    rollouts = rollout_layout(config) if wanted.array else None
    if rollouts is not None and gpus:
        policy = needs(config, gpus * nodes, rollouts=False)
        nodes = -(-policy.policy_replicas * policy.policy_ranks // gpus)
        overrides.append(f"placement.nodes={nodes}")
    name = re.sub(
        r"[^A-Za-z0-9_.-]", "-", config.logging.experiment_name or Path(config.train.output_dir).name
    )
    program = Path(sys.executable).with_name("cosmos-launch")
    return SlurmJob(
        name=f"cosmos-{name}",
        program=[str(program)] if program.exists() else [sys.executable, "-P", "-m", "launcher.cli"],
        directory=os.getcwd(),
        output=absolute(config.train.output_dir),
        configs=[absolute(str(path)) for path in wanted.configs],
        overrides=overrides,
        nodes=nodes,
        gpus=gpus,
        rollouts=rollouts.replicas if rollouts else 0,
        rollout_gpus=(rollouts.size or 1) if rollouts and gpus else 0,
        options=wanted.options,
    )


def _check_option(option: str) -> None:
    """Raises LaunchError: sbatch would not understand it, or the scripts have it already."""
    found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", option)
    if found is None or "\n" in option:
        raise LaunchError(
            f"--sbatch {option!r} is not an option of sbatch", "write it whole: --sbatch=--partition=gpu"
        )
    if found[1] in OURS:
        raise LaunchError(
            f"--sbatch {option}: the scripts have --{found[1]} already ({OURS[found[1]]})", "leave it out"
        )
