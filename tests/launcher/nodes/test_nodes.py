"""Head and nodes over real connections, with real processes: they join, run, are refused, get lost and come back."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.nodes import messages as m
from launcher.nodes.agent import Joining, run_node
from launcher.nodes.agreement import facts
from launcher.nodes.announcement import Announcement, HeadAddress, place_of
from launcher.nodes.head import NodeHost, NodeServer, Terms
from launcher.nodes.link import Link, LinkClosedError
from launcher.plan.machine import Machine
from launcher.plan.placement import ProcessSpec, Replica
from launcher.plan.rundir import RunDir
from launcher.processes.host import End, Folders, HostLostError, Order
from launcher.processes.supervisor import LOST, Setting, Supervisor
from launcher.restarts import Budget, Role
from schema.config import Config
from tests.launcher.processes.test_supervisor import Watcher, comes_true
from tests.launcher.samples import config
from tests.launcher.scripts import alive
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

SILENCE, START = 2.0, 60.0
MACHINE = Machine(4, ("0", "1"))


@dataclass
class Stage:
    """A head in a directory, and what it says."""

    root: Path
    nodes: int = 2
    start: float = START
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.head = HeadAddress("127.0.0.1", free_port())
        self.run = RunDir(self.root / "run")
        self.run.make()

    @property
    def config(self) -> Config:
        times = {"heartbeat_timeout": SILENCE, "start_timeout": self.start}
        train = {"output_dir": str(self.root)}
        return config(placement={"nodes": self.nodes}, controller=times, train=train)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[NodeServer]:
        terms = Terms(self.config, self.run, facts(self.config, {}), ("127.0.0.1", free_port()), 0.2)
        server = NodeServer(self.head, terms, self.events.append)
        async with server.listening():
            server.lend(lambda spec: {"SECRET": f"of {spec.name}"})
            yield server

    def joining(self, number: int | None = None, **changed: Any) -> Joining:
        return Joining(
            changed.get("config", self.config), MACHINE, self.head, number, {"PATH": "/bin", "OWN": "here"}
        )

    def node(self, said: list[str] | None = None, **changed: Any) -> asyncio.Task[int]:
        return asyncio.create_task(
            run_node(self.joining(**changed), (said if said is not None else []).append)
        )


def on(stage: Callable[[Stage], Awaitable[None]], root: Path, **facts_: Any) -> None:
    async def body() -> None:
        async with asyncio.timeout(PATIENCE):
            await stage(Stage(root, **facts_))

    asyncio.run(body())


def script(text: str, name: str = "policy-0-rank1") -> Order:
    return Order(
        ProcessSpec(name, Role.POLICY, (sys.executable, "-c", text), {"RANK": "1"}, node=1), {"MEET": "x"}
    )


def there(server: NodeServer) -> NodeHost:
    return server.hosts[1]


async def gather(server: NodeServer) -> list[Machine]:
    return await server.gather([])


def test_a_node_runs_what_the_head_says_and_leaves_with_the_job(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            node = stage.node()
            assert await gather(server) == [MACHINE]
            assert server.address == "127.0.0.1"
            names = "OWN RANK MEET SECRET COSMOS_NODE_ADDRESS"
            told = await there(server).spawn(
                script(f"import os; print([os.environ[n] for n in '{names}'.split()])")
            )
            end = await told.wait()
            assert end == End(0, ("['here', '1', 'x', 'of policy-0-rank1', '127.0.0.1']",))
            assert (stage.run.logs / "policy-0-rank1.log").is_file()
            stays = await there(server).spawn(script("import time; print('up', flush=True); time.sleep(600)"))
            assert stays.pid
            stays.send_signal(signal.SIGTERM)
            assert (await stays.wait()).code == 128 + signal.SIGTERM
            await server.finish("finished", 7)
            assert await node == 7

    on(body, tmp_path)


def test_processes_end_with_the_head(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        marker = tmp_path / "pid"
        text = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        async with stage.listening() as server:
            node = stage.node(said := [])
            await gather(server)
            await there(server).spawn(script(text))
            await comes_true(marker.exists)
        pid = int(marker.read_text())
        await comes_true(lambda: not alive(pid))
        await comes_true(lambda: any("joining again" in line for line in said))
        async with stage.listening() as server:  # a head that comes back finds its nodes
            await gather(server)
            await server.finish("failed", 1)
            assert await node == 1

    on(body, tmp_path)


@asynccontextmanager
async def by_hand(stage: Stage) -> AsyncIterator[Link]:
    """A connection on which a test says what it wants."""
    reader, writer = await asyncio.open_connection(stage.head.host, stage.head.port)
    link = Link(reader, writer, SILENCE)
    try:
        yield link
    finally:
        await link.close()


def hello(stage: Stage, known: Mapping[str, str] | None = None, **changed: Any) -> m.Hello:
    announced = Announcement.read(place_of(stage.config, stage.head))
    assert announced is not None
    said: dict[str, Any] = {"token": announced.token, "host": "other", "address": "127.0.0.1", "pid": 1}
    said |= {"clock": time.time(), "machine": MACHINE, "facts": known or facts(stage.config, {})}
    return m.Hello(**said | changed)


def test_who_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        known = facts(stage.config, {})
        cases = [
            ({"token": "guessed"}, "this is not the token"),
            ({"clock": time.time() + 60}, "its clock is 60 s ahead"),
            ({"known": known | {"code": "x"}}, "its code of cosmos-launch is another one"),
            ({"node": 7}, "node 7 is not one of placement.nodes = 2"),
        ]
        async with stage.listening():
            for changed, reason in cases:
                async with by_hand(stage) as link:
                    link.send(hello(stage, **changed))
                    refusal = await link.expect(m.Refusal)
                    assert refusal.reason.startswith(reason), refusal
            for faults, reason in (
                ({"controller": "a firewall"}, "a firewall"),
                (
                    {"train.output_dir": "Read-only file system"},
                    f"train.output_dir: {stage.run.path} cannot be written",
                ),
            ):
                async with by_hand(stage) as link:
                    link.send(hello(stage))
                    await link.expect(m.Challenge)
                    link.send(m.Proof(faults=faults))
                    assert (await link.expect(m.Refusal)).reason.startswith(reason)
        assert any("is refused as a node: its clock" in event for event in stage.events)

    on(body, tmp_path)


def test_a_directory_that_is_not_shared_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.head.SEEN_WITHIN", 0.2)

    async def body(stage: Stage) -> None:
        async with stage.listening(), by_hand(stage) as link:
            link.send(hello(stage))
            challenge = await link.expect(m.Challenge)
            assert challenge.directories == {"train.output_dir": str(stage.run.path)}
            link.send(m.Proof(faults={}))  # it wrote elsewhere
            assert "what is written is not seen here" in (await link.expect(m.Refusal)).reason

    on(body, tmp_path)


def test_what_is_not_understood_ends_the_connection(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            for line in (b"GET / HTTP/1.1\n", b"{}\n", b'{"kind": "beat", "more": 1}\n', b"x" * 100 + b"\n"):
                reader, writer = await asyncio.open_connection(stage.head.host, stage.head.port)
                writer.write(line)
                while await reader.readline():  # beats, then the end
                    pass
                writer.close()
            node = stage.node()
            await gather(server)
            await server.finish("finished", 0)
            assert await node == 0

    on(body, tmp_path)


def test_a_node_that_is_lost_comes_back_and_one_more_is_refused(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            async with by_hand(stage) as link:
                await be_welcome(stage, link)
                await gather(server)
                async with by_hand(stage) as second:
                    second.send(hello(stage, host="second"))
                    refusal = await second.expect(m.Refusal)
                    assert refusal.again
                    assert "all 2 nodes are there" in refusal.reason
                starting = asyncio.create_task(there(server).spawn(script("pass")))
                start = await link.expect(m.Start)
                link.send(m.Started(number=start.number, pid=4711))
                process = await starting
                assert process.pid == 4711
            end = await process.wait()
            assert end.code == LOST
            assert end.lost == "node 1 (other) is lost: the connection was closed"
            assert (await (await there(server).spawn(script("pass"))).wait()).lost
            async with by_hand(stage) as link:
                link.send(hello(stage, machine=Machine(4, ("0",))))
                assert (
                    "it has the GPUs ('0',), and node 1 had ('0', '1')"
                    in (await link.expect(m.Refusal)).reason
                )
            async with by_hand(stage) as link:
                await be_welcome(stage, link)
                await there(server).ready()

    on(body, tmp_path)


async def be_welcome(stage: Stage, link: Link) -> None:
    link.send(hello(stage))
    challenge = await link.expect(m.Challenge)
    for directory in challenge.directories.values():
        (Path(directory) / challenge.name).touch()
    link.send(m.Proof(faults={}))
    assert (await link.expect(m.Welcome)).node == 1


def test_who_does_not_come_is_named_on_both_sides(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        with pytest.raises(LaunchError, match=r"could not join the head at 127\.0\.0\.1.*refused"):
            await stage.node()
        async with stage.listening() as server:
            with pytest.raises(LaunchError, match=r"node 1, node 2 did not come to 127.0.0.1"):
                await gather(server)
            with pytest.raises(LaunchError, match="interrupted"):
                await server.gather([signal.SIGTERM])

    on(body, tmp_path, nodes=3, start=0.3)


def test_a_run_that_is_not_seen_is_not_joined(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening():
            elsewhere = config(
                placement={"nodes": 2},
                controller={"start_timeout": 0.3},
                train={"output_dir": str(tmp_path / "other")},
            )
            with pytest.raises(LaunchError, match="output_dir is not shared"):
                await stage.node(config=elsewhere)

    on(body, tmp_path)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening():
            with pytest.raises(LaunchError, match="the head cannot listen at"):
                async with stage.listening():
                    pass
            assert Announcement.read(place_of(stage.config, stage.head)) is not None, "the other's"

    on(body, tmp_path)


# ---- the supervisor, over hosts that get lost -------------------------------------------------------------


def supervisor_over(server: NodeServer, root: Path, watcher: Watcher) -> Supervisor:
    setting = Setting(Folders(root, root), 0.2, Budget(0, 0.0, 0.0), lambda spec: {}, server.hosts)
    return Supervisor(setting, watcher)


def test_ranks_on_two_machines_live_and_die_together(tmp_path: Path) -> None:
    """A node that is lost takes the rank here with it, costs no restart, and is waited for."""
    stays = (sys.executable, "-c", "import time; time.sleep(600)")
    specs = tuple(ProcessSpec(f"policy-0-rank{n}", Role.POLICY, stays, rank=n, node=n) for n in range(2))
    watcher = Watcher()
    watcher.situation = type(watcher.situation)(over=False, needed=True, counts=False)

    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            node = stage.node()
            await gather(server)
            supervisor = supervisor_over(server, tmp_path, watcher)
            kept = supervisor.launch(Replica("policy-0", Role.POLICY, specs))
            await comes_true(lambda: kept.state == "up")
            first = kept.processes["policy-0-rank0"].pid
            node.cancel()
            await comes_true(lambda: len(watcher.exits) == 1)
            assert watcher.exits[0].process == "policy-0-rank1"
            assert watcher.exits[0].how.startswith("node 1 ("), watcher.exits[0]
            assert not alive(first), "it hung in a collective"
            node = stage.node()
            await comes_true(lambda: kept.state == "up" and kept.processes["policy-0-rank0"].pid != first)
            await supervisor.kill_all()
            await server.finish("stopped", 130)
            assert await node == 130

    on(body, tmp_path)


def test_a_policy_without_its_node_ends_the_job_in_the_end(tmp_path: Path) -> None:
    specs = (ProcessSpec("policy-0", Role.POLICY, (sys.executable, "-c", "pass"), node=1),)

    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            supervisor = supervisor_over(server, tmp_path, Watcher())
            supervisor.launch(Replica("policy-0", Role.POLICY, specs))
            ending = await supervisor.ended
            assert "policy-0 cannot go on: node 1 did not come back in 0.3 s" in ending.verdict.reason
            with pytest.raises(HostLostError):
                await there(server).ready()

    on(body, tmp_path, start=0.3)


def test_a_link_ends_when_the_other_side_is_silent(tmp_path: Path) -> None:
    async def body(_: Stage) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(30.0)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        link = Link(reader, writer, 0.1)
        with pytest.raises(LinkClosedError, match=r"no sign of life for 0.1 s"):
            await link.receive()
        await link.close()
        server.close()

    on(body, tmp_path)
