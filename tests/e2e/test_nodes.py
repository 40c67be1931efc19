"""A job on two machines, network namespaces with lost packets between them, of which one is lost; by hand, without
Slurm."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from schema.config.rules.checkpoint import OF_ONE_HOST
from tests.e2e.program import COMMAND, ROOT, Program, check_ledger, write_config
from tests.support.namespaces import Namespaces
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NODES = """
[placement]
nodes = 2
"""
LOST = 5
"""Per cent of all packets between the machines."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that is not one of a single host's: a job on several machines refuses those, wherever this runs."""
    places = (Path.home(), ROOT, Path("/var/lib"), Path("/opt"))
    place = next(place for place in places if not any(place.is_relative_to(own) for own in OF_ONE_HOST))
    path = Path(tempfile.mkdtemp(prefix=".cosmos-e2e-", dir=place))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@dataclass
class Node(Program):
    """`cosmos-launch` on one of the machines; the head's output is the job's."""

    machines: Namespaces = field(kw_only=True)
    number: int = 0

    def __enter__(self) -> Node:
        with self.log.open("a") as log:
            line = [str(COMMAND), "--config", str(self.config), "--head", self.machines.address(0)]
            self.process = subprocess.Popen(
                self.machines.command(self.number, *line), cwd=self.config.parent, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        return self

    @property
    def log(self) -> Path:
        return self.config.parent / ("launcher.log" if self.number == 0 else f"node-{self.number}.log")


@pytest.mark.soak
def test_two_machines_train_when_one_is_lost(shared: Path, model: Path) -> None:
    config = write_config(shared, model, steps=8, validation=False)
    text = config.read_text().replace("heartbeat_timeout = 60.0", "heartbeat_timeout = 5.0")
    text = text.replace("[policy.parallelism]", "[policy.parallelism]\ndp_shard_size = 2")
    config.write_text(text + NODES + "\n[train.ckpt]\nenable_checkpoint = true\nsave_freq = 2\n")
    with Namespaces(2) as machines:
        machines.lose(LOST)
        with Node(config, machines=machines) as head, Node(config, machines=machines, number=1) as node:
            head.until_step(3)
            os.kill(node.process.pid, signal.SIGKILL)
            node.process.wait(PATIENCE)
            until(lambda: "is gone: waiting" in head.output(), "the node to be missed")
            node.wait_no_orphans()
            with Node(config, machines=machines, number=1) as again:
                summary = head.finish()
                assert again.wait() == 0, again.log.read_text()
            assert "node 1 (" in head.output()
            assert "and with it 2 processes" in head.output()
        assert min(machines.lost(number) for number in range(2)) > 0
    assert summary["status"]["step"] == 8
    check_ledger(summary, bound=2)
