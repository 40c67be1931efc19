"""A job as sbatch scripts: what to submit, rendered from the configuration.

    submit.sh ─▶ job.sbatch        one task on each node runs the same command; the first node leads
             └─▶ rollouts.sbatch   where asked for: an array, each task a rollout replica that joins the run

The run's directory is <train.output_dir>/slurm-<job id>, and the command resumes: a job that Slurm requeues has the
same number and goes on. Signals to the batch script (`scancel --batch --signal=… JOB`): USR1 saves a checkpoint;
USR2, which Slurm sends before the time limit, saves one, ends in order and requeues the job.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from launcher.errors import LaunchError
from launcher.paths import absolute
from launcher.plan.needs import needs
from launcher.restarts import EXIT_OK
from schema.config import Config
from schema.config.layout import rollout_layout
from schema.config.loading.load import load
from schema.util.atomic_file import write_text

WARNING = 300
"""Seconds before the time limit at which Slurm sends USR2: a checkpoint, an end in order."""
PATIENCE = 120
"""Seconds for each of the two."""
JOINING = 3600
"""Seconds for which a task of the array waits for the job."""
FIRST_PORT, PORTS = 20000, 20000
"""Ports of the head: by the number of the job, since several may share a machine."""


_ADDRESS = (
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    'address=$(scontrol show node "$first" --oneliner | grep -o "NodeAddr=[^ ]*" | cut -d = -f 2)',
)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job to submit. program: the command line of cosmos-launch itself. directory: where it is run, which its
    relative paths mean. output: `train.output_dir`. configs, overrides: as on the command line.

    gpus: of each node; 0: none is asked for. rollouts: tasks of the array; 0: the job runs its rollout replicas.
    rollout_gpus: of each of them. options: further ones of sbatch, for all scripts.
    """

    name: str
    program: Sequence[str]
    directory: str
    output: str
    configs: Sequence[str]
    overrides: Sequence[str]
    nodes: int
    gpus: int
    rollouts: int
    rollout_gpus: int
    options: Sequence[str]


def render(job: SlurmJob) -> Mapping[str, str]:
    """The scripts by name."""
    scripts = {"submit.sh": _submit(job), "job.sbatch": _batch(job)}
    return scripts | ({"rollouts.sbatch": _rollouts(job)} if job.rollouts else {})


def _submit(job: SlurmJob) -> str:
    lines = [
        "#!/bin/bash",
        "# Submits the job; further options of sbatch may follow, for all of it.",
        "set -euo pipefail",
        'here=$(cd "$(dirname "$0")" && pwd)',
        f"mkdir -p {shlex.quote(job.output)}",
        'job=$(sbatch --parsable "$@" "$here/job.sbatch")',
        "job=${job%%;*}",
        f"run={shlex.quote(job.output)}/slurm-$job",
        'echo "job $job, run directory $run"',
    ]
    if job.rollouts:
        lines.append('sbatch --dependency="after:$job" --export="ALL,COSMOS_RUN=$run" "$@" "$here/rollouts.sbatch"')
    return "\n".join(lines) + "\n"


def _batch(job: SlurmJob) -> str:
    ours = ["--kill-on-bad-exit=0", "--wait=0"]
    command = [*job.program, *(part for config in job.configs for part in ("--config", config))]
    command += [part for text in job.overrides for part in ("--set", text)]
    command += ["--no-rollouts"] if job.rollouts else []
    started = f'srun {shlex.join([*ours, *command])} --set "train.timestamp=\\"$name\\"" --resume'
    lines = [*_header(job, job.name, [f"--nodes={job.nodes}", "--ntasks-per-node=1", *_gpus(job.gpus)])]
    lines += [f"#SBATCH --signal=B:USR2@{WARNING}", "set -euo pipefail", "", "name=slurm-$SLURM_JOB_ID"]
    lines += [f"run={shlex.quote(job.output)}/$name"]
    if job.nodes > 1:
        lines += [
            "# The first node leads; a job's number gives its port.",
            *_ADDRESS,
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
        ]
        started += ' --head "$address:$port"'
    elif job.rollouts:
        lines += ["# The tasks of the array reach the controller at this machine's address.", *_ADDRESS]
        started += ' --set "controller.host=\\"$address\\""'
    program = shlex.join(job.program)
    lines += [
        "",
        "checkpoint() {",
        f'  {program} checkpoint "$run" --wait {PATIENCE} || true',
        "}",
        "requeue() {",
        "  trap '' USR1 USR2",
        "  checkpoint",
        f'  {program} stop "$run" --wait {PATIENCE} || true',
        '  if wait "$step"; then exit 0; fi  # it has finished meanwhile',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "}",
        f"{started} &",
        "step=$!",
        "trap checkpoint USR1",
        "trap requeue USR2",
        "# A signal ends `wait` early.",
        'while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done',
        'wait "$step"',
    ]
    return "\n".join(lines) + "\n"


def _rollouts(job: SlurmJob) -> str:
    sizes = [f"--array=0-{job.rollouts - 1}", "--nodes=1", "--ntasks=1", *_gpus(job.rollout_gpus)]
    lines = [*_header(job, f"{job.name}-rollout", sizes, log="%A_%a")]
    lines += [
        "set -euo pipefail",
        "",
        'run=${COSMOS_RUN:?"submit.sh names the run directory"}',
        f'srun {shlex.join(job.program)} join "$run" --name "rollout-$SLURM_ARRAY_TASK_ID" --wait {JOINING}',
    ]
    return "\n".join(lines) + "\n"


def _header(job: SlurmJob, name: str, sizes: Sequence[str], log: str = "%j") -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"# {name}: made by `cosmos-launch --target slurm` from {', '.join(job.configs)}"
    options = [f"--job-name={name}", *sizes, "--requeue", "--open-mode=append"]
    options += [f"--chdir={job.directory}", f"--output={job.output}/{name}-{log}.log"]
    yield from (f"#SBATCH {option}" for option in [*options, *job.options])


def _gpus(count: int) -> list[str]:
    return [f"--gpus-per-node={count}"] if count else []


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
class SlurmOptions:
    """The options of the command. directory: None is <train.output_dir>/slurm. options: of sbatch. array: rollout
    replicas as jobs of their own. apply: submit what was written."""

    configs: Sequence[Path]
    overrides: Sequence[str]
    directory: Path | None
    options: Sequence[str]
    array: bool
    apply: bool


def write(options: SlurmOptions, env: Mapping[str, str]) -> int:
    """Write the scripts; the exit code. Raises ConfigError, LaunchError."""
    config = load(options.configs, options.overrides, env).config
    if config.is_evaluation:
        raise LaunchError("an evaluation needs no cluster", "run it here: leave --target out")
    if options.array and not config.generates:
        raise LaunchError("--rollout-array is for rollout replicas, and this job has none", "leave it out")
    for option in options.options:
        _check_option(option)
    job = _job(config, options)
    target = options.directory or Path(job.output) / "slurm"
    target.mkdir(parents=True, exist_ok=True)
    for name, text in render(job).items():
        write_text(target / name, text, mode=0o755)
        typer.echo(str(target / name))
    script = target / "submit.sh"
    if not options.apply:
        typer.echo(f"submit it with {script}")
        return EXIT_OK
    try:
        return subprocess.run([str(script.absolute())], check=False).returncode
    except OSError as error:
        raise LaunchError(f"{script} cannot be run: {error.strerror}") from None


def _job(config: Config, options: SlurmOptions) -> SlurmJob:
    placement, nodes = config.placement, config.placement.nodes
    gpus, overrides = placement.gpus_per_node or 0, [*options.overrides]
    rollouts = rollout_layout(config) if options.array else None
    if rollouts is not None and gpus:
        policy = needs(config, gpus * nodes, rollouts=False)
        nodes = -(-policy.policy_replicas * policy.policy_ranks // gpus)
        overrides.append(f"placement.nodes={nodes}")
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", config.logging.experiment_name or Path(config.train.output_dir).name)
    program = Path(sys.executable).with_name("cosmos-launch")
    return SlurmJob(
        name=f"cosmos-{name}",
        program=[str(program)] if program.exists() else [sys.executable, "-P", "-m", "cosmos_launch"],
        directory=os.getcwd(),
        output=absolute(config.train.output_dir),
        configs=[absolute(str(path)) for path in options.configs],
        overrides=overrides,
        nodes=nodes,
        gpus=gpus,
        rollouts=rollouts.replicas if rollouts else 0,
        rollout_gpus=(rollouts.size or 1) if rollouts and gpus else 0,
        options=options.options,
    )


def _check_option(option: str) -> None:
    """Raises LaunchError: sbatch would not understand it, or the scripts have it already."""
    parts = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", option)
    if parts is None or "\n" in option:
        raise LaunchError(
            f"--sbatch {option!r} is not an option of sbatch", "write it whole: --sbatch=--partition=gpu"
        )
    if parts[1] in OURS:
        raise LaunchError(
            f"--sbatch {option}: the scripts have --{parts[1]} already ({OURS[parts[1]]})", "leave it out"
        )
