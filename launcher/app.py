"""The commands and options of `cosmos-launch`. Imports are inside the commands: `--help` answers in an instant."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launcher.commands import configuration, convert, init, kept, machines, operate, plot, samples, try_reward
from launcher.commands.options import Cores, GpuMemory, HostMemory, Overrides, print_json, print_problems
from launcher.errors import LaunchError
from launcher.evaluation import command as evaluation_command
from launcher.processes.signals import ended_at_once

if TYPE_CHECKING:
    from launcher.plan.machine import DescribedMachine

HELP = """
Train a language model by asynchronous reinforcement learning, from one file.

\b
Begin
  cosmos-launch init                                      list the recipes to start from
  cosmos-launch init addition-sft                         a recipe that runs as it is, without a GPU
  cosmos-launch init grpo -o run.toml                     a commented file that fits this machine
  cosmos-launch explain train.optm_lr                     what a key does; explain 'rollout.*_len*' finds keys
  cosmos-launch convert verl.yaml -o run.toml             a file of verl, ROLL or cosmos-rl, every key accounted for

\b
Check
  cosmos-launch validate run.toml                         every mistake at once, with line and remedy
  cosmos-launch validate run.toml --data                  what becomes of each row of the data, and three prompts
  cosmos-launch try-reward run.toml                       what your rewards say of the first rows; starts no job
  cosmos-launch show run.toml --changed                   what was written, and where; without it everything
  cosmos-launch --config run.toml --dry-run               processes, commands and memory; starts nothing
  cosmos-launch schema -o config.schema.json              the JSON schema, for editors

\b
Run
  cosmos-launch --config run.toml                         run the job, with a live display
  cosmos-launch --config run.toml --set train.epoch=2     change a key for this run
  cosmos-launch --config base.toml --config mine.toml     several files, later ones over earlier ones
  COSMOS_TRAIN__EPOCH=2 cosmos-launch --config run.toml   a key from the environment
  cosmos-launch --resume                                  go on with the newest run below ./outputs, as it was
  cosmos-launch --resume outputs/20260131120000           go on with a certain run
  cosmos-launch --config run.toml --resume                go on with the newest run of this file, as it is now

\b
Several machines (placement.nodes)
  cosmos-launch --config run.toml --head 10.0.0.1         the same command on each; the one with the address leads
  cosmos-launch --config run.toml --target slurm          sbatch scripts of the job; --apply submits them
  cosmos-launch --config run.toml --target kubernetes     manifests of the job; --apply gives them to the cluster
  cosmos-launch join outputs/20260131120000               one more rollout replica, where the run directory is shared

\b
Precedence
  default < first --config < last --config < environment (COSMOS_<SECTION>__<KEY>) < --set
  Tables of files are merged; lists and single values are replaced, and so are the tables
  that a file names at its top: replace = ["train.train_policy.reward_function"]

\b
Look and operate (from another terminal)
  cosmos-launch status                                    the newest run below ./outputs
  cosmos-launch status outputs/20260131120000 --json      a certain run, for programs
  COSMOS_TOKEN=... cosmos-launch status http://host:port  a job on another machine
  cosmos-launch status --why                              what it waits for, what fails, what would help
  cosmos-launch samples --worst                           what the model writes, and what it is paid for it
  cosmos-launch plot outputs/a outputs/b -o ab.png        learning curves of one run or several
  cosmos-launch dashboard                                 all of it in a browser, also of ended runs and of several
  cosmos-launch stop --wait 60                            end it in order, and wait for that
  cosmos-launch checkpoint --wait 60                      save a checkpoint now
  cosmos-launch profile --wait 600                        record a training step, to see where its time goes
  cosmos-launch eval outputs/a outputs/b --config run.toml -n 8   mean@n, pass@k and maj@n of several models
  cosmos-launch export outputs/20260131120000 -o my-model its newest checkpoint as a model for transformers
  cosmos-launch replay outputs/20260131120000             its recorded batches through the trainer alone
  cosmos-launch pause, cosmos-launch resume               hand out no more work; go on
  cosmos-launch drain rollout-1                           let a rollout replica finish and leave
  cosmos-launch scale 4, cosmos-launch scale auto         set the number of rollout replicas; choose it by the load

\b
One start makes <train.output_dir>/<timestamp>/ with logs/, weights/, checkpoints/, final/ (the trained
model) and summary.json. Ctrl-C ends it in order, a second one at once; SIGUSR1 saves a checkpoint.

\b
Exit codes: 0 success, 1 the job failed, 2 wrong configuration or usage,
130 stopped (Ctrl-C or `cosmos-launch stop`), 143 and 129 stopped by SIGTERM and SIGHUP.
"""

app = typer.Typer(
    name="cosmos-launch",
    help=HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Commands of the same meaning share a module.
app.command()(init.init)
app.command()(configuration.explain)
app.command()(convert.convert)
app.command()(configuration.validate)
app.command()(configuration.show)
app.command()(configuration.schema)
app.command()(try_reward.try_reward)
app.command("eval")(evaluation_command.eval_)
app.command()(operate.status)
app.command()(operate.stop)
app.command()(operate.pause)
app.command()(operate.resume)
app.command()(operate.checkpoint)
app.command()(operate.profile)
app.command()(operate.drain)
app.command()(operate.scale)
app.command()(machines.join)
app.command()(machines.pod)
app.command()(machines.autoscale)
app.command()(kept.export)
app.command()(kept.replay)
app.command()(samples.samples)
app.command()(plot.plot)
app.command()(plot.dashboard)


COMMANDS = frozenset(
    command.name or command.callback.__name__.replace("_", "-")
    for command in app.registered_commands
    if command.callback
)


ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", metavar="FILE", help="TOML file of the job; later files take precedence."),
]
Resumed = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[RUN_DIR]",
        help="Continue a run, the newest if none is named. Without --config: as it was started.",
    ),
]
HeadOption = Annotated[
    str,
    typer.Option(
        "--head",
        metavar="ADDRESS[:PORT]",
        help="The machine that leads where there are several (placement.nodes): run the same command on each.",
    ),
]
NodeNumber = Annotated[
    int | None,
    typer.Option(
        "--node",
        min=0,
        help="With --head: number of this machine; 0 leads. Unset: SLURM_NODEID, or found by its address.",
    ),
]
NoRollouts = Annotated[
    bool, typer.Option("--no-rollouts", help="Start no rollout replicas: they join by `cosmos-launch join`.")
]
TargetName = Annotated[
    Literal["local", "slurm", "kubernetes"],
    typer.Option(
        "--target", help="Where to run the job: on this machine, or by sbatch scripts or manifests to be written."
    ),
]
OutputDirectory = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="With --target: folder for the files. Unset: <train.output_dir>/slurm, or kubernetes/<name of the job>.",
    ),
]
SbatchOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch",
        metavar="OPTION",
        help="With --target slurm: option of sbatch for all scripts, such as --sbatch=--partition=gpu.",
    ),
]
RolloutArray = Annotated[
    bool,
    typer.Option(
        "--rollout-array", help="With --target slurm: run the rollout replicas as a job array of their own."
    ),
]
Apply = Annotated[bool, typer.Option("--apply", help="With --target: submit or apply what was written.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, show processes and memory, start nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON, for programs.")]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", min=0, help="With --dry-run: plan for another machine, with so many GPUs on each node."),
]


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    config: ConfigFiles = None,
    set_: Overrides = None,
    resume: Resumed = None,
    head: HeadOption = "",
    node: NodeNumber = None,
    no_rollouts: NoRollouts = False,
    target: TargetName = "local",
    output: OutputDirectory = None,
    sbatch: SbatchOptions = None,
    rollout_array: RolloutArray = False,
    apply: Apply = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    cores: Cores = None,
    host_memory: HostMemory = None,
) -> None:
    """Run a job (without a command)."""
    from launcher.plan.machine import DescribedMachine

    described = DescribedMachine(gpus, gpu_memory, cores, host_memory)
    chosen = (resume is not None, node is not None, target != "local", not described.is_empty)
    of_a_run = (config, set_, dry_run, as_json, head, *chosen)
    if context.invoked_subcommand is not None:
        if any(of_a_run):
            raise LaunchError(
                f"the options of a run go without the command {context.invoked_subcommand!r}",
                f"put --set and --json behind it: cosmos-launch {context.invoked_subcommand} run.toml --set …",
            )
        return
    if not config and resume is None:
        raise LaunchError("no job is named", "cosmos-launch --config run.toml (see cosmos-launch --help)")
    if as_json and not dry_run:
        raise LaunchError("--json needs --dry-run", "a run writes summary.json at its end")
    dependent = (
        ("--node", node is not None, bool(head), "--head"),
        ("--gpus", gpus is not None, dry_run, "--dry-run"),
        ("--gpu-memory", gpu_memory is not None, dry_run and bool(gpus), "--dry-run --gpus"),
        ("--cores", cores is not None, dry_run and gpus is not None, "--dry-run --gpus"),
        ("--host-memory", host_memory is not None, dry_run and gpus is not None, "--dry-run --gpus"),
        ("--output", output, target != "local", "--target slurm or kubernetes"),
        ("--sbatch", sbatch, target == "slurm", "--target slurm"),
        ("--rollout-array", rollout_array, target == "slurm", "--target slurm"),
        ("--apply", apply, target != "local", "--target slurm or kubernetes"),
    )
    _check_dependent(dependent)
    configs, overrides = config or [], set_ or []
    if target != "local" and (head or resume is not None or dry_run):
        raise LaunchError(
            f"--target {target} takes --config and --set", "what is written names the head, and resumes"
        )
    if target == "kubernetes":
        from launcher.targets import kubernetes
        from schema.config.loading.load import load

        loaded = load(configs, overrides, os.environ, elsewhere=True)
        raise typer.Exit(kubernetes.write(loaded, output, os.environ, applies=apply))
    if target == "slurm":
        from launcher.targets import slurm

        options = slurm.SlurmOptions(configs, overrides, output, sbatch or [], rollout_array, apply)
        raise typer.Exit(slurm.write(options, os.environ))
    if dry_run:
        _show_plan(configs, overrides, resume, described, as_json)
        return
    with ended_at_once():
        from launcher.job.launch import launch
        from launcher.job.request import Cluster, LaunchRequest
        from launcher.nodes.announcement import HeadAddress

    cluster = Cluster(HeadAddress.parse(head), _number(node)) if head else None
    request = LaunchRequest(configs, overrides, os.environ, resume, cluster, rollouts=not no_rollouts)
    raise typer.Exit(launch(request))


def _show_plan(
    configs: list[Path], overrides: list[str], resume: str | None, described: DescribedMachine, as_json: bool
) -> None:
    with ended_at_once():
        from launcher.commands.dry_run import plan, plan_lines
        from launcher.job.checked import check
        from launcher.job.request import LaunchRequest
        from launcher.preflight.hardware import slow_on_gpus

    elsewhere = None if described.is_empty else described
    checked = check(LaunchRequest(configs, overrides, os.environ, resume, described=elsewhere).continued())
    planned = plan(checked)
    planned.warnings += slow_on_gpus(checked.config, checked.machine)
    if as_json:
        print_json(planned.as_dict())
    else:
        typer.echo("\n".join(plan_lines(planned)))
        print_problems("warning", planned.warnings)


def _check_dependent(options: Iterable[tuple[str, object, object, str]]) -> None:
    """Check options that are of use with others alone: name, what is given, whether it may be, what it needs.

    Raises LaunchError."""
    for name, given, is_allowed, needed in options:
        if given and not is_allowed:
            raise LaunchError(f"{name} needs {needed}", f"write {needed}, or leave {name} out")


def _number(node: int | None) -> int | None:
    """Return the number of this machine among those of the job, where the user or Slurm gives it."""
    by_slurm = os.environ.get("SLURM_NODEID", "")
    return int(by_slurm) if node is None and by_slurm.isdigit() else node
