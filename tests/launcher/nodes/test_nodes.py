"""Head and nodes over real connections, with real processes: they join, run, are refused, get lost and come back."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LaunchError
from launcher.nodes import messages as m
from launcher.nodes.announcement import Announcement, place_of
from launcher.nodes.head import NodeServer
from launcher.nodes.link import LinkClosedError, NodeLink
from launcher.plan.machine import Machine
from launcher.plan.placement import PlacedReplica
from launcher.processes.host import Folders, HostLostError, ProcessEnd
from launcher.processes.supervisor import LOST, Setting, Supervisor
from launcher.restarts import RestartBudget, Role
from schema.util.proof import Handshake
from tests.launcher.nodes.stage import MACHINE, Stage, meeting, on, there, worker
from tests.launcher.processes.test_supervisor import Watcher, comes_true
from tests.launcher.samples import config
from tests.launcher.scripts import alive

__all__ = ["worker"]


class Unknown(m.NodeMessage):
    """Of another version, say."""

    kind: str = "unknown"
    more: int = 1


STAYS = "import time; print('up', flush=True); time.sleep(600)"


async def gather(server: NodeServer) -> list[Machine]:
    return await server.gather([])


def test_a_node_runs_what_the_head_names_and_leaves_with_the_job(
    tmp_path: Path, worker: Callable[[str], object]
) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            node = stage.node()
            assert await gather(server) == [MACHINE]
            assert server.address == "127.0.0.1"
            names = "OWN RANK COSMOS_RENDEZVOUS COSMOS_TOKEN COSMOS_NODE_ADDRESS CUDA_VISIBLE_DEVICES"
            worker(f"import os, sys; print(sys.argv[1:], [os.environ[n] for n in '{names}'.split()])")
            told = await there(server).spawn(stage.order())
            values = ["here", "1", "x", "of-policy-0-rank1", "127.0.0.1", "0"]
            assert await told.wait() == ProcessEnd(0, (f"['-P', '-m', 'policy_worker'] {values}",))
            assert (stage.run.logs / "policy-0-rank1.log").is_file()
            worker(STAYS)
            stays = await there(server).spawn(stage.order("rollout-1"))
            assert stays.pid
            twice = await (await there(server).spawn(stage.order("rollout-1"))).wait()
            assert "rollout-1, number 3 of this connection, runs already" in twice.lines[0]
            stays.send_signal(signal.SIGTERM)
            assert (await stays.wait()).code == 128 + signal.SIGTERM
            await server.finish("finished", 7)
            assert await node == 7

    on(body, tmp_path)


def test_processes_end_with_the_head(tmp_path: Path, worker: Callable[[str], object]) -> None:
    async def body(stage: Stage) -> None:
        marker = tmp_path / "pid"
        worker(f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
        async with stage.listening() as server:
            node = stage.node(said := [])
            await gather(server)
            await there(server).spawn(stage.order())
            await comes_true(lambda: marker.exists() and marker.read_text() != "")
        pid = int(marker.read_text())
        await comes_true(lambda: not alive(pid))
        await comes_true(lambda: any("joining again" in line for line in said))
        async with stage.listening() as server:  # a head that comes back finds its nodes
            await gather(server)
            await server.finish("failed", 1)
            assert await node == 1

    on(body, tmp_path)


def test_who_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        known = stage.facts()
        cases: list[tuple[dict[str, Any], str]] = [
            ({"clock": time.time() + 60}, "its clock is 60 s ahead"),
            ({"known": known | {"code": "x"}}, "its code of cosmos-launch is another one"),
            ({"node": 7}, "node 7 is not one of placement.nodes = 2"),
        ]
        async with stage.listening():
            for changed, reason in cases:
                async with stage.by_hand() as link:
                    link.send(stage.hello(**changed))
                    refusal = await link.expect(m.Refusal)
                    assert refusal.reason.startswith(reason), refusal
            for faults, reason in (
                ({"controller": "a firewall"}, "a firewall"),
                (
                    {"train.output_dir": "Read-only file system"},
                    f"train.output_dir: {stage.run.path} cannot be written",
                ),
            ):
                async with stage.by_hand() as link:
                    link.send(stage.hello())
                    await link.expect(m.Challenge)
                    link.send(m.Proof(faults=faults))
                    assert (await link.expect(m.Refusal)).reason.startswith(reason)
        assert any("is refused as a node: its clock" in event for event in stage.events)

    on(body, tmp_path)


def test_a_directory_that_is_not_shared_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.head.SEEN_WITHIN", 0.2)

    async def body(stage: Stage) -> None:
        async with stage.listening(), stage.by_hand() as link:
            link.send(stage.hello())
            challenge = await link.expect(m.Challenge)
            assert challenge.run == str(stage.run.path)
            link.send(m.Proof(faults={}))  # it wrote elsewhere
            assert "what is written is not seen here" in (await link.expect(m.Refusal)).reason

    on(body, tmp_path)


def test_what_is_not_understood_ends_the_connection(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            for message in (Unknown(), Unknown(kind="beat")):
                async with stage.by_hand() as link:
                    link.send(message)
                    with pytest.raises(LinkClosedError, match="closed"):
                        await link.receive()
            assert "a message that is not understood" in stage.events[-1]
            node = stage.node()
            await gather(server)
            await server.finish("finished", 0)
            assert await node == 0

    on(body, tmp_path)


def test_a_node_that_is_lost_comes_back_and_one_more_is_refused(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            async with stage.by_hand() as link:
                await stage.be_welcome(link)
                await gather(server)
                async with stage.by_hand() as second:
                    second.send(stage.hello(host="second"))
                    refusal = await second.expect(m.Refusal)
                    assert refusal.again
                    assert "all 2 nodes are there" in refusal.reason
                starting = asyncio.create_task(there(server).spawn(stage.order()))
                start = await link.expect(m.Start)
                link.send(m.Started(number=start.number, pid=4711))
                process = await starting
                assert process.pid == 4711
            end = await process.wait()
            assert end.code == LOST
            assert end.lost == "node 1 (other) is lost: the connection was closed"
            assert (await (await there(server).spawn(stage.order())).wait()).lost
            async with stage.by_hand() as link:
                link.send(stage.hello(machine=Machine(4, ("0",))))
                assert "it has the GPUs ('0',), and node 1 had ('0', '1')" in (await link.expect(m.Refusal)).reason
            async with stage.by_hand() as link:
                await stage.be_welcome(link)
                await there(server).ready()

    on(body, tmp_path)


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
    setting = Setting(Folders(root, root), 0.2, RestartBudget(0, 0.0, 0.0), lambda spec: {}, server.hosts, meeting)
    return Supervisor(setting, watcher)


def test_ranks_on_two_machines_live_and_die_together(tmp_path: Path, worker: Callable[[str], object]) -> None:
    """A node that is lost takes the rank here with it, costs no restart, and is waited for."""
    worker(STAYS)
    watcher = Watcher()
    watcher.situation = type(watcher.situation)(over=False, needed=True, counts=False)

    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            node = stage.node()
            await gather(server)
            supervisor = supervisor_over(server, tmp_path, watcher)
            kept = supervisor.launch(stage.replicas()[0])
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
    async def body(stage: Stage) -> None:
        async with stage.listening() as server:
            supervisor = supervisor_over(server, tmp_path, Watcher())
            only = (stage.order().spec,)
            supervisor.launch(PlacedReplica("policy-0", Role.POLICY, only))
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
        link = NodeLink(reader, writer, 0.1, Handshake("", "", "", ""), "client")
        with pytest.raises(LinkClosedError, match=r"no sign of life for 0.1 s"):
            await link.receive()
        await link.close()
        server.close()

    on(body, tmp_path)
