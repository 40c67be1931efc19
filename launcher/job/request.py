"""The first stage of a start: what the command line requests, and the run that it continues.

    --config FILE                 a run of its own
    --resume                      the newest run below ./outputs, with the configuration it was started with
    --resume DIR                  that run, or the newest one below DIR, with its own configuration
    --config FILE --resume        the newest run of the file's train.output_dir, with the file
    --config FILE --resume DIR    that run, with the file

`--set` and the environment count as in any start. A run that is alive is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from launcher.errors import LaunchError
from launcher.job.remote import DEFAULT_OUTPUT, run_below
from launcher.nodes.announcement import HeadAddress
from launcher.plan.machine import DescribedMachine
from launcher.plan.rundir import RunDir, already_running


@dataclass(frozen=True)
class Cluster:
    """A job on several machines. number: of this one, 0 leads; None: it leads if the head's address is its own."""

    head: HeadAddress
    number: int | None = None

    @cached_property
    def leads(self) -> bool:
        """Whether this is the head. Raises LaunchError if its name is unknown."""
        return self.head.is_here() if self.number is None else self.number == 0


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A start that is requested.

    resume: None for a run of its own, else what follows `--resume`. cluster: where this machine is one of several.
    rollouts: whether the job starts its rollout replicas itself. run: the one that goes on, where it is named.
    described: another machine that the job is planned for; None: this one.
    """

    configs: Sequence[Path]
    overrides: Sequence[str]
    env: Mapping[str, str]
    resume: str | None = None
    cluster: Cluster | None = None
    rollouts: bool = True
    run: RunDir | None = None
    described: DescribedMachine | None = None

    def continued(self) -> LaunchRequest:
        """The request with the run that it names, whose configuration counts where no other is given.

        Raises LaunchError: the run does not exist, it is alive, or its configuration is missing.
        """
        if self.resume is None or (self.configs and not self.resume):
            return self
        run = run_below(Path(self.resume or DEFAULT_OUTPUT), named=bool(self.resume))
        if run.is_alive():
            raise already_running(run)
        if not self.configs and not run.config_toml.is_file():
            raise LaunchError(
                f"{run.path} holds no config.toml", "name the configuration: cosmos-launch --config run.toml --resume"
            )
        place = {"train.output_dir": str(run.path.parent), "train.timestamp": run.path.name}
        where = [f"{key}={json.dumps(value)}" for key, value in place.items()]
        # config.toml is to begin other runs with; this one began where it says, unless it has a checkpoint by now.
        began = [] if self.configs or run.has_checkpoint else [f"train.resume={json.dumps(run.began_from)}"]
        overrides = [*began, *self.overrides, *where]
        return replace(self, configs=self.configs or [run.config_toml], overrides=overrides, run=run)
