"""A head in a directory, nodes that come to it, and small programs in the place of workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.nodes import messages as m
from launcher.nodes.agent import Joining, run_node
from launcher.nodes.agreement import facts
from launcher.nodes.announcement import Announcement, HeadAddress, place_of
from launcher.nodes.head import NodeHost, NodeServer, Terms
from launcher.nodes.link import NodeLink
from launcher.plan.machine import Machine
from launcher.plan.placement import PlacedReplica, ProcessSpec, place
from launcher.plan.rundir import RunDir
from launcher.processes.host import ProcessOrder
from schema.config import Config
from tests.launcher.samples import config
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

SILENCE, START = 2.0, 60.0
MACHINE = Machine(4, ("0", "1"))
URL = "http://127.0.0.1:1"


@dataclass
class Stage:
    """A head and what it says. Rank 0 of the policy is on it, rank 1 and rollout-1 are on node 1."""

    root: Path
    nodes: int = 2
    start: float = START
    controller: Mapping[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.head = HeadAddress("127.0.0.1", free_port())
        self.run = RunDir(self.root / "run")
        self.run.make()

    @property
    def config(self) -> Config:
        times = {"heartbeat_timeout": SILENCE, "start_timeout": self.start, **self.controller}
        placement = {"nodes": self.nodes, "gpus_per_node": 2, "policy": [0, 2], "rollout": [[1], [3]]}
        mesh = {"parallelism": {"dp_shard_size": 2}}
        engines = {"parallelism": {"n_init_replicas": 2}}
        train = {"output_dir": str(self.root)}
        return config(placement=placement, controller=times, train=train, policy=mesh, rollout=engines)

    @asynccontextmanager
    async def listening(self, **more: Any) -> AsyncIterator[NodeServer]:
        terms = Terms(self.config, self.run, self.facts(), ("127.0.0.1", free_port()), **more)
        server = NodeServer(self.head, terms, self.events.append)
        async with server.listening():
            server.lend(sent, [MACHINE, MACHINE])
            yield server

    def joining(self, number: int | None = None, **changed: Any) -> Joining:
        env = {"PATH": "/bin", "OWN": "here"}
        return Joining(changed.get("config", self.config), MACHINE, self.head, number, env)

    def node(self, said: list[str] | None = None, **changed: Any) -> asyncio.Task[int]:
        return asyncio.create_task(run_node(self.joining(**changed), (said if said is not None else []).append))

    def facts(self) -> dict[str, str]:
        return dict(_facts(self.config.model_dump_json()))

    def announced(self) -> Announcement:
        found = Announcement.read(place_of(self.config, self.head))
        assert found is not None
        return found

    def announce(self, token: str) -> None:
        """As a head that is gone has left it."""
        left = Announcement(str(self.head), str(self.run.path), token, "gone", 4711)
        left.write(place_of(self.config, self.head))

    @asynccontextmanager
    async def by_hand(self) -> AsyncIterator[NodeLink]:
        """A proven connection to the head, on which a test says what it wants."""
        reader, writer = await asyncio.open_connection(self.head.host, self.head.port)
        link = await NodeLink.to_head(reader, writer, SILENCE, self.announced().token, self.head)
        try:
            yield link
        finally:
            await link.close()

    def hello(self, known: Mapping[str, str] | None = None, **changed: Any) -> m.Hello:
        said: dict[str, Any] = {"host": "other", "address": "127.0.0.1", "pid": 1}
        said |= {"clock": time.time(), "machine": MACHINE, "facts": known or self.facts()}
        return m.Hello(**said | changed)

    async def be_welcome(self, link: NodeLink) -> None:
        link.send(self.hello())
        challenge = await link.expect(m.Challenge)
        (self.run.path / challenge.name).touch()
        link.send(m.Proof(faults={}))
        assert (await link.expect(m.Welcome)).node == 1
        await link.expect(m.Layout)

    def replicas(self) -> list[PlacedReplica]:
        return place(self.config, MACHINE, MACHINE)

    def order(self, name: str = "policy-0-rank1") -> ProcessOrder:
        specs: list[ProcessSpec] = [spec for one in self.replicas() for spec in one.processes]
        return ProcessOrder(next(spec for spec in specs if spec.name == name), meeting() if "rank" in name else {})


def sent(spec: ProcessSpec) -> dict[str, str]:
    """What the head gives a process."""
    return {"COSMOS_CONTROLLER_URL": URL, "COSMOS_TOKEN": f"of-{spec.name}"}


def meeting() -> dict[str, str]:
    return {"COSMOS_RENDEZVOUS": "x"}


@cache
def _facts(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(facts(Config.model_validate_json(text), {}).items())


def on(stage: Callable[[Stage], Awaitable[None]], root: Path, **facts_: Any) -> None:
    async def body() -> None:
        async with asyncio.timeout(PATIENCE):
            await stage(Stage(root, **facts_))

    asyncio.run(body())


def there(server: NodeServer) -> NodeHost:
    return server.hosts[1]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Sets the program that `python -P -m …`, and so each worker that is started from now on, is in this test."""
    program, python = tmp_path / "worker.py", tmp_path / "python"
    program.write_text("")
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -P ]; then exec {sys.executable} -I -S {program} "$@"; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    return program.write_text
