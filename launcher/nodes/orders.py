"""The orders that a head may give a node. Pure but for the file system's names.

The head names a process by role and numbers, and the node makes the rest from its own configuration: the command line
by the same placement over the same machines, the log's name, the directories, the profiler. Of variables the head
sends `SENT` alone; all others are the node's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.nodes import messages as m
from launcher.paths import absolute
from launcher.plan.machine import Machine
from launcher.plan.needs import PlacementError
from launcher.plan.placement import PlacedReplica, ProcessSpec, place_elastic, process_of
from launcher.plan.rundir import RunDir
from launcher.restarts import Role
from schema.config import Config

SENT: Mapping[Role, tuple[str, ...]] = {
    Role.POLICY: ("COSMOS_CONTROLLER_URL", "COSMOS_TOKEN", "COSMOS_RENDEZVOUS"),
    Role.ROLLOUT: ("COSMOS_CONTROLLER_URL", "COSMOS_TOKEN", "COSMOS_REPLICA_SECRET"),
}
"""The variables that a head sends with a process: where the controller is, and the secrets of this start."""
_TEXT = re.compile(r"[!-~]{1,1024}")


class OrderError(Exception):
    """An order that the node refuses; the message has the reason."""


def run_of(config: Config, path: str) -> RunDir:
    """The run directory that the head names, where it is one of `train.output_dir`. Raises OrderError."""
    output = Path(absolute(config.train.output_dir))
    name = path.rpartition("/")[2]
    if not name or name.startswith(".") or not name.isprintable() or path != str(output / name):
        raise OrderError(f"the head names the run directory {path}, which is not one of train.output_dir = {output}")
    return RunDir(output / name)


class Orders:
    """number: of this node."""

    def __init__(self, config: Config, machine: Machine, number: int) -> None:
        self._config, self._machine, self._number = config, machine, number
        self._replicas: list[PlacedReplica] = []

    def place(self, layout: m.Layout) -> None:
        """Place the job's processes as the head does. Raises OrderError: they are not placed over this machine."""
        machines, count = list(layout.machines), self._config.placement.nodes
        if len(machines) != count:
            raise OrderError(
                f"the head places processes over {len(machines)} machines, not placement.nodes = {count}"
            )
        if (assigned := machines[self._number].gpus) != self._machine.gpus:
            raise OrderError(f"the head gives this machine the GPUs {assigned}, and it has {self._machine.gpus}")
        try:
            first, reserve = place_elastic(self._config, *machines, rollouts=layout.rollouts)
        except PlacementError as error:
            raise OrderError(f"the head's machines do not fit this configuration: {error}") from None
        self._replicas = [*first, *reserve]

    def process(self, start: m.Start) -> ProcessSpec:
        """The process that is meant. Raises OrderError: it is not on this node, or a variable is wrong."""
        spec = process_of(self._replicas, start.role, start.replica, start.rank)
        if spec is None or spec.node != self._number:
            raise OrderError(f"no rank {start.rank} of {start.role}-{start.replica} is on this node")
        sent = SENT[start.role]
        if foreign := sorted(start.env.keys() - set(sent)):
            raise OrderError(
                f"{', '.join(foreign)} is not a variable that a head sends to {spec.name} ({', '.join(sent)})"
            )
        for name, text in start.env.items():
            if not _TEXT.fullmatch(text):
                raise OrderError(f"{name} for {spec.name} is not printable text without spaces")
        scheme = "https" if self._config.controller.tls_cert else "http"
        url = start.env.get("COSMOS_CONTROLLER_URL", "")
        if not url.startswith(f"{scheme}://"):
            raise OrderError(
                f"COSMOS_CONTROLLER_URL for {spec.name} is {url!r}, which does not begin with {scheme}:// "
                "(controller.tls_cert)"
            )
        return replace(spec, env={**spec.env, **start.env})
