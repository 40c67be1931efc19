"""The sbatch scripts: what is in them, that a shell understands them, and what is refused before any is written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.targets.slurm import SlurmJob, render
from tests.launcher.cli import cosmos
from tests.launcher.samples import write_job

JOB = SlurmJob(
    name="cosmos-my-run", program=["/opt/it's here/cosmos-launch"], directory="/home/me", output="/shared/out put",
    configs=["/home/me/run.toml"], overrides=['policy.model_name_or_path="a b"'], nodes=2, gpus=8, rollouts=0,
    rollout_gpus=0, options=["--partition=gpu"],
)  # fmt: skip


def changed(**values: object) -> SlurmJob:
    return SlurmJob(**{name: getattr(JOB, name) for name in JOB.__slots__} | values)  # type: ignore[arg-type]


@pytest.mark.parametrize("job", [JOB, changed(nodes=1), changed(nodes=1, rollouts=4, rollout_gpus=1)])
def test_shellcheck_finds_nothing(job: SlurmJob, tmp_path: Path) -> None:
    for name, text in render(job).items():
        (tmp_path / name).write_text(text)
    checked = subprocess.run(["shellcheck", *tmp_path.iterdir()], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_a_job_on_two_nodes() -> None:
    scripts = render(JOB)
    assert scripts.keys() == {"submit.sh", "job.sbatch"}
    job = scripts["job.sbatch"]
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue",
        "#SBATCH --signal=B:USR2@300", "#SBATCH --partition=gpu", "#SBATCH --chdir=/home/me",
    ):  # fmt: skip
        assert line in job.splitlines()
    assert "--set 'policy.model_name_or_path=\"a b\"'" in job
    assert '--resume --head "$address:$port"' in job


def test_rollouts_as_an_array() -> None:
    scripts = render(changed(nodes=1, rollouts=4, rollout_gpus=2))
    assert "#SBATCH --array=0-3" in scripts["rollouts.sbatch"].splitlines()
    assert "#SBATCH --gpus-per-node=2" in scripts["rollouts.sbatch"].splitlines()
    assert '--name "rollout-$SLURM_ARRAY_TASK_ID"' in scripts["rollouts.sbatch"]
    assert "--no-rollouts" in scripts["job.sbatch"]
    assert 'controller.host=\\"$address\\"' in scripts["job.sbatch"], "else it listens at the loopback address"
    assert "--dependency" in scripts["submit.sh"]


def test_the_command_writes_them(tmp_path: Path) -> None:
    config = write_job(tmp_path, extra="\n[placement]\nnodes = 3\ngpus_per_node = 4\n")
    shared = ["--set", 'train.output_dir="/shared/out"']
    result = cosmos(
        "--config", config, "--target", "slurm", "-o", tmp_path / "slurm", "--sbatch=--time=1:00:00", *shared
    )
    assert result.returncode == 0, result.stderr
    job = (tmp_path / "slurm" / "job.sbatch").read_text()
    assert "#SBATCH --nodes=3\n" in job
    assert "#SBATCH --time=1:00:00\n" in job
    assert f"--config {config}" in job
    assert (tmp_path / "slurm" / "submit.sh").stat().st_mode & 0o100


SLURM = ("--target", "slurm")
NODES = ("--set", "placement.nodes=2", "--set", 'train.output_dir="/shared/out"')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SLURM, "--sbatch=partition"], "is not an option of sbatch"),
        ([*SLURM, "--sbatch=--nodes=3"], "the scripts have --nodes already (placement.nodes)"),
        ([*SLURM, "--head", "a"], "--target slurm takes --config and --set"),
        (["--node", "1"], "--node needs --head"),
        (["--sbatch=--time=1"], "--sbatch needs --target slurm"),
        (["--head", "10.0.0.1"], "is for jobs on several machines, and placement.nodes = 1"),
        (NODES, "and none is named as their head"),
        (["--head", "10.0.0.1:x"], "is not an address"),
    ],
)
def test_what_is_refused_before_anything_is_written(tmp_path: Path, arguments: list[str], said: str) -> None:
    output = ["-o", tmp_path / "slurm"] if SLURM[1] in arguments else []
    cosmos("--config", write_job(tmp_path), *output, *arguments).complains(2, said)
    assert not (tmp_path / "slurm").exists()
