"""The second stage of a start: the configuration, loaded and checked on this machine. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from launcher.errors import LaunchError
from launcher.job.request import LaunchRequest
from launcher.plan.machine import Machine, find_machine
from launcher.preflight.checks import Findings, check_all
from launcher.resolved_config import values
from schema.config import Config, ConfigError, Problem
from schema.config.loading.load import load


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that can run on this machine."""

    request: LaunchRequest
    config: Config
    machine: Machine
    warnings: list[Problem]
    origins: dict[str, str] = field(default_factory=dict)
    """Where the keys that were written come from."""

    @property
    def resumes(self) -> bool:
        """Whether the start continues a run, where there is one."""
        is_requested = self.request.resume is not None or self.config.train.resume is True
        return is_requested and not self.config.is_evaluation


def check(request: LaunchRequest, *, joins: bool = False) -> Checked:
    """Load and check everything that can be checked before a process starts. Raises ConfigError.

    joins: controller and Redis are another machine's.
    """
    env, loaded = request.env, load(request.configs, request.overrides, request.env)
    config, described = loaded.config, request.described
    machine = find_machine(env) if described is None else described.machine()
    findings = check_all(config, machine, env, asks_redis=True, joins=joins, rollouts=request.rollouts)
    if described is not None:  # the job will not run here
        findings = Findings([], findings.warnings + findings.problems)
    if findings.problems:
        raise ConfigError(loaded.placed(findings.problems))
    origins = {value.key: value.source for value in values(loaded, changed_only=True)}
    return Checked(request, config, machine, loaded.warnings + loaded.placed(findings.warnings), origins)


def check_start(checked: Checked) -> None:
    """Check the options of the start against the configuration. Raises LaunchError."""
    config, cluster = checked.config, checked.request.cluster
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
    if config.is_evaluation and checked.request.resume is not None:
        raise LaunchError("an evaluation has nothing to resume", "leave --resume out: it is quick to run again")
