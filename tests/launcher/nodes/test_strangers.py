"""What listens at the head's address and is not the head, who comes to the head and is not a node, what is on the way
between them, and what even a head may not order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.nodes import listener
from launcher.nodes import messages as m
from launcher.nodes.announcement import HeadAddress, place_of
from launcher.nodes.link import LENGTH_BYTES, PURPOSE, LinkClosedError, NodeLink
from launcher.nodes.orders import SENT, OrderError, Orders, run_of
from launcher.plan.machine import Machine
from launcher.restarts import Role
from schema.util.proof_exchange import (
    ANSWER_BYTES,
    MAC_BYTES,
    MAGIC,
    OPENING_BYTES,
    PROOF_BYTES,
    ClientProof,
    ServerProof,
)
from tests.launcher.nodes.stage import MACHINE, SILENCE, URL, Stage, on, there, worker
from tests.launcher.processes.test_supervisor import comes_true
from tests.launcher.samples import config
from tests.support.certificates import make_certificates
from tests.support.waiting import PATIENCE

__all__ = ["worker"]

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Answer = Callable[[bytes], bytes]
"""What an impostor sends when it has read the opening of a node."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.agent.LOOK", 0.02)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.agent.PROVE", 1.0)
    monkeypatch.setattr("launcher.nodes.link.PROVE", 1.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.nodes.listener.PROVE", PATIENCE)
    monkeypatch.setattr("launcher.nodes.link.PROVE", PATIENCE)


@asynccontextmanager
async def server(serve: Callable[[Reader, Writer], Awaitable[object]], host: str, port: int) -> AsyncIterator[None]:
    async def closing(reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    started = await asyncio.start_server(closing, host, port)
    try:
        yield
    finally:
        started.close()


# ---- who listens and is not the head ----------------------------------------------------------------------

ARGV = [sys.executable, "-c", "open({!r}, 'w')"]


def old_words(marker: Path) -> bytes:
    """Lines by which an earlier version of the protocol took a node in and made it start a program."""
    argv = [ARGV[1], ARGV[2].format(str(marker))]
    lines = [
        {"kind": "challenge", "name": f".node-{'0' * 32}", "directories": {}, "controller": ["127.0.0.1", 1]},
        {"kind": "welcome", "node": 1, "nodes": 2, "run": str(marker.parent), "grace": 1, "silence": 9},
        {"kind": "start", "number": 1, "name": "x", "role": "policy", "argv": argv, "env": {}},
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def impostors(marker: Path, recorded: bytes) -> dict[str, Answer]:
    """recorded: what the genuine head answered another connection."""
    start = m.Start(number=1, role=Role.POLICY, replica=0, rank=1, env={}).model_dump_json().encode()
    sealed = len(start).to_bytes(LENGTH_BYTES, "big") + bytes(MAC_BYTES) + start
    return {
        "the opening again": lambda opening: opening,
        "its own nonce": lambda opening: opening + bytes(PROOF_BYTES) + sealed,
        "a recorded answer": lambda opening: recorded + sealed,
        "another token": lambda opening: ServerProof(PURPOSE, "guessed", opening).answer + sealed,
        "no token": lambda opening: ServerProof(PURPOSE, "", opening).answer + sealed,
        "words of an earlier version": lambda opening: old_words(marker),
        "half an answer": lambda opening: recorded[: ANSWER_BYTES - 1],
        "a very long line": lambda opening: MAGIC + b"x" * 2**22,
        "a web page": lambda opening: b"HTTP/1.1 200 OK\r\n\r\n" + opening,
        "nothing": lambda opening: b"",
    }


@pytest.mark.usefixtures("impatient")
def test_what_listens_and_is_not_the_head_gets_a_nonce_and_runs_nothing(
    tmp_path: Path, worker: Callable[[str], object]
) -> None:
    """One node meets them all, since it comes again and again; a head that then comes takes it in."""
    marker, seen, said = tmp_path / "marker", list[bytes](), list[str]()
    worker(f"open({str(marker)!r}, 'w')")

    async def body(stage: Stage) -> None:
        opening = ClientProof(PURPOSE, "left", ()).opening
        answers = impostors(marker, ServerProof(PURPOSE, "left", opening, (str(stage.head),)).answer)
        waiting = list(answers.values())

        async def impostor(reader: Reader, writer: Writer) -> None:
            opening = await reader.readexactly(OPENING_BYTES)
            writer.write(waiting.pop(0)(opening) if waiting else b"")
            with contextlib.suppress(OSError):
                seen.append(opening + await reader.read())

        stage.announce("left")
        async with server(impostor, stage.head.host, stage.head.port):
            node = stage.node(said)
            await comes_true(lambda: len(seen) > len(answers))
        assert [len(one) for one in seen] == [OPENING_BYTES] * len(seen)
        assert len(set(seen)) == len(seen), "a nonce of its own for each"
        assert not any(b"left" in one for one in seen)
        async with stage.listening() as head:  # which replaces the announcement
            await head.gather([])
            assert stage.announced().token != "left"
            await head.finish("finished", 0)
            assert await node == 0
        assert not marker.exists()
        assert not (tmp_path / "run" / "logs" / "x.log").exists()

    on(body, tmp_path)
    words = f"does not know the token of the announced run: it is not its head ({{}}; {tmp_path}/.nodes/"
    for why in ("it does not know the token", "it speaks another protocol", "it has not proven anything"):
        assert any(words.format(why).partition(";")[0] in line for line in said), (why, said)
    assert all("pid 4711 on gone" in line for line in said if "its head" in line)
    assert len(said) == len(set(said))


@pytest.mark.usefixtures("impatient")
def test_a_node_that_waits_for_its_head_gives_up_by_name(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async def silent(reader: Reader, writer: Writer) -> None:
            await reader.read()

        stage.announce("left")
        async with server(silent, stage.head.host, stage.head.port):
            with pytest.raises(LaunchError, match=r"could not join the head .* it is not its head"):
                await stage.node()

    on(body, tmp_path, start=0.5)


def test_the_head_of_another_address_proves_nothing_by_a_relay(tmp_path: Path) -> None:
    """Its token is the announced one: a copied announcement, say."""

    async def body(stage: Stage) -> None:
        async with stage.listening() as head:
            dialled = Stage(tmp_path)
            dialled.announce(stage.announced().token)
            answered = list[bytes]()

            async def relay(mine: Reader, back: Writer) -> None:
                reader, writer = await asyncio.open_connection(stage.head.host, stage.head.port)
                writer.write(await mine.readexactly(OPENING_BYTES))
                back.write(await reader.readexactly(ANSWER_BYTES))
                with contextlib.suppress(OSError):
                    answered.append(await mine.read())
                writer.close()

            async with server(relay, dialled.head.host, dialled.head.port):
                node = dialled.node(said := [])
                await comes_true(lambda: any("it does not know the token" in line for line in said))
                node.cancel()
            assert not any(answered)
            assert not there(head).is_there

    on(body, tmp_path)


def test_an_announcement_that_others_could_write_is_not_believed(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        connections = []

        async def counted(reader: Reader, writer: Writer) -> None:
            connections.append(await reader.read())

        stage.announce("chosen")
        place_of(stage.config, stage.head).chmod(0o622)
        async with server(counted, stage.head.host, stage.head.port):
            with pytest.raises(LaunchError, match="with mode 622"):
                await stage.node()
            if os.geteuid() == 0:  # another user can be made up
                place_of(stage.config, stage.head).chmod(0o600)
                os.chown(place_of(stage.config, stage.head), 12345, -1)
                with pytest.raises(LaunchError, match="of user 12345"):
                    await stage.node()
        place_of(stage.config, stage.head).unlink()
        os.mkfifo(place_of(stage.config, stage.head), 0o600)
        with pytest.raises(LaunchError, match="could not join"):  # nobody will ever write to it
            await stage.node()
        assert not any(connections)

    on(body, tmp_path, start=0.1)


def test_a_certificate_is_checked_before_anything_crosses(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "other").mkdir()
    own, other = make_certificates(tmp_path / "own"), make_certificates(tmp_path / "other")
    tls = {"tls_cert": str(own.cert), "tls_key": str(own.key), "tls_ca": str(own.ca)}

    async def body(stage: Stage) -> None:
        from schema.util.tls import server_context

        node = stage.node(said := [])
        async with stage.listening(tls=server_context(str(other.cert), str(other.key))):
            await comes_true(lambda: any("the certificate of what listens" in line for line in said))
        async with stage.listening(tls=server_context(str(own.cert), str(own.key))) as head:
            await head.gather([])
            await head.finish("finished", 0)
            assert await node == 0

    on(body, tmp_path, controller=tls)


# ---- who comes to the head and is not a node --------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_strangers_learn_nothing_and_hold_up_nobody(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        async with stage.listening() as head:
            waiting = [await asyncio.open_connection(stage.head.host, stage.head.port) for _ in range(200)]
            for number, (_, writer) in enumerate(waiting):
                writer.write(ClientProof(PURPOSE, "guessed").opening[: number % (OPENING_BYTES + 1)])
            node = stage.node()
            await head.gather([])
            accepted = head._listener._unproven
            assert len(accepted) <= listener.MOST_UNPROVEN
            for claim in (b"", bytes(PROOF_BYTES), b"x" * 2**20):
                reader, writer = await asyncio.open_connection(stage.head.host, stage.head.port)
                writer.write(ClientProof(PURPOSE, "guessed").opening + claim)
                answer = await reader.readexactly(ANSWER_BYTES)
                writer.write(answer[-PROOF_BYTES:])  # the head's own proof, sent back
                rest = b"reset"
                with contextlib.suppress(OSError):
                    rest = await reader.read()
                assert rest in (b"", b"reset")
                writer.close()
            assert there(head).is_there
            for _, writer in waiting:
                writer.close()
            await head.finish("finished", 0)
            assert await node == 0
        about = [event for event in stage.events if "did not prove the token" in event]
        assert len(about) == 1, "one a minute"
        assert not any("is refused as a node" in event for event in stage.events)

    on(body, tmp_path)


# ---- on the way -------------------------------------------------------------------------------------------

Frames = list[bytes]


@dataclass
class OnTheWay:
    """Hands everything on, but for the frames of one direction that `meddle` answers with others, once."""

    meddle: Meddle
    to_node: bool
    seen: Frames = field(default_factory=list)
    other: Frames = field(default_factory=list)
    """Of the other direction."""
    done: bool = False

    async def serve(self, reader: Reader, writer: Writer, host: str, port: int) -> None:
        up, down = await asyncio.open_connection(host, port)
        try:
            down.write(await reader.readexactly(OPENING_BYTES))
            writer.write(await up.readexactly(ANSWER_BYTES))
            down.write(await reader.readexactly(PROOF_BYTES))
            both = (self._pass(up, writer, self.to_node), self._pass(reader, down, not self.to_node))
            await asyncio.gather(*both)
        finally:
            down.close()

    async def _pass(self, reader: Reader, writer: Writer, meddles: bool) -> None:
        try:
            while True:
                head = await reader.readexactly(LENGTH_BYTES + MAC_BYTES)
                frame = head + await reader.readexactly(int.from_bytes(head[:LENGTH_BYTES], "big"))
                passed = [frame]
                if meddles and not self.done:
                    self.seen.append(frame)
                    passed = self.meddle(self)
                    self.done = passed != [frame]
                elif not meddles:
                    self.other.append(frame)
                writer.write(b"".join(passed))
        finally:
            writer.close()


Meddle = Callable[[OnTheWay], Frames]
"""What is handed on in the place of the newest frame."""


def at(kind: str, made: Meddle) -> Meddle:
    """Meddle with the first message of a kind."""
    return lambda way: made(way) if f'"kind":"{kind}"'.encode() in way.seen[-1] else way.seen[-1:]


def changed(old: bytes, new: bytes) -> Meddle:
    return lambda way: [way.seen[-1].replace(old, new)]


FORGED = m.Start(number=9, role=Role.POLICY, replica=0, rank=1, env={"COSMOS_CONTROLLER_URL": URL})
BODY = FORGED.model_dump_json().encode()
FORGED_FRAME = len(BODY).to_bytes(LENGTH_BYTES, "big") + bytes(MAC_BYTES) + BODY
TO_NODE: dict[str, Meddle] = {
    "changed": at("start", changed(b"of-policy", b"of-nobody")),
    "repeated": at("start", lambda way: way.seen[-1:] * 2),
    "an earlier one again": at("start", lambda way: [way.seen[0], way.seen[-1]]),
    "left out": at("layout", lambda way: []),
    "added": at("start", lambda way: [FORGED_FRAME, way.seen[-1]]),
    "one of its own": at("start", lambda way: [way.other[-1], way.seen[-1]]),
    "too long": at("start", lambda way: [b"\xff" * LENGTH_BYTES + way.seen[-1]]),
}
TO_HEAD: dict[str, Meddle] = {
    "changed": at("started", changed(b'"pid":', b'"pid":1')),
    "repeated": at("started", lambda way: way.seen[-1:] * 2),
    "one of its own": at("started", lambda way: [way.other[-1], way.seen[-1]]),
}
WORDS = ("has a wrong MAC", "bytes, more than")


@pytest.mark.parametrize(("to_node", "how"), [*((True, how) for how in TO_NODE), *((False, how) for how in TO_HEAD)])
def test_what_is_changed_on_the_way_ends_the_link(
    tmp_path: Path, worker: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, to_node: bool, how: str
) -> None:
    """Nothing is started that the head has not ordered, nor twice; and the node joins again."""
    said = list[str]()
    worker("import time; time.sleep(600)")
    way = OnTheWay((TO_NODE if to_node else TO_HEAD)[how], to_node)
    monkeypatch.setattr(HeadAddress, "listening_host", lambda self: "127.0.0.2")

    async def body(stage: Stage) -> None:
        def serve(reader: Reader, writer: Writer) -> Awaitable[None]:
            return way.serve(reader, writer, "127.0.0.2", stage.head.port)

        async with server(serve, stage.head.host, stage.head.port), stage.listening() as head:
            node = stage.node(said)
            await head.gather([])
            process = await there(head).spawn(stage.order())
            assert (await process.wait()).lost
            await comes_true(lambda: sum(line.startswith("node 1 of 2") for line in said) == 2)
            await comes_true(lambda: there(head).is_there)
            complaints = said if to_node else stage.events
            assert any(words in line for words in WORDS for line in complaints), (said, stage.events)
            started = [line for line in said if "is started" in line]
            assert len(started) == (not to_node or how == "repeated"), said
            await head.finish("finished", 0)
            assert await node == 0

    on(body, tmp_path)


# ---- what a head may order --------------------------------------------------------------------------------


def test_a_proven_head_cannot_make_a_node_run_or_write_what_it_likes(
    tmp_path: Path, worker: Callable[[str], object]
) -> None:
    worker("import os; print(sorted(os.environ))")
    start = m.Start(number=1, role=Role.POLICY, replica=0, rank=1, env={"COSMOS_CONTROLLER_URL": URL})
    refused = [
        (start.model_copy(update={"env": start.env | {name: "x"}}), f"{name} is not a variable")
        for name in ("LD_PRELOAD", "PYTHONPATH", "PATH", "HF_HOME", "COSMOS_TLS_CA", "COSMOS_REPLICA_SECRET")
    ]
    refused += [
        (start.model_copy(update={"env": {"COSMOS_CONTROLLER_URL": "file:///x"}}), "not begin with http://"),
        (start.model_copy(update={"env": start.env | {"COSMOS_TOKEN": "a\nb"}}), "COSMOS_TOKEN for"),
        (start.model_copy(update={"rank": 0}), "no rank 0 of policy-0 is on this node"),
        (start.model_copy(update={"replica": 7}), "no rank 1 of policy-7"),
        (start.model_copy(update={"role": Role.CONTROLLER, "rank": 0}), "no rank 0 of controller-0"),
    ]

    async def body(stage: Stage) -> None:
        async def joined(link: NodeLink) -> None:
            await link.expect(m.Hello)
            link.send(m.Challenge(name=NAME, run=str(stage.run.path), controller=("127.0.0.1", 1)))
            assert (await link.expect(m.Proof)).faults == {}
            link.send(m.Welcome(node=1))

        async def orders(link: NodeLink) -> None:
            await joined(link)
            link.send(start)
            assert "no rank 1 of policy-0" in await refusal(link), "nothing is placed yet"
            link.send(m.Layout(machines=(MACHINE, MACHINE), rollouts=True))
            for message, words in refused:
                link.send(message)
                assert words in await refusal(link)
            link.send(start)
            assert (await link.expect(m.Started)).pid
            (line,) = (await link.expect(m.Ended)).lines
            assert "OWN" in line
            assert "LD_PRELOAD" not in line
            link.send(m.Signal.model_construct(number=1, signal=19))

        async def elsewhere(link: NodeLink) -> None:
            await link.expect(m.Hello)
            link.send(m.Challenge(name=NAME, run=str(tmp_path.parent), controller=("127.0.0.1", 1)))
            with pytest.raises(LinkClosedError):
                await link.receive()

        async def other_gpus(link: NodeLink) -> None:
            await joined(link)
            link.send(m.Layout(machines=(MACHINE, Machine(4, ("0", "7"))), rollouts=True))
            assert "the head gives this machine the GPUs ('0', '7')" in (await link.expect(m.Leave)).reason

        async def over(link: NodeLink) -> None:
            await joined(link)
            link.send(m.Finish(outcome="finished", exit_code=0))

        turns, faults = [orders, elsewhere, other_gpus, over], list[BaseException]()

        async def head(reader: Reader, writer: Writer) -> None:
            link = await NodeLink.to_node(reader, writer, SILENCE, "the token", stage.head)
            try:
                await turns.pop(0)(link)
                with contextlib.suppress(LinkClosedError):
                    await link.receive()
            except BaseException as error:
                faults.append(error)
                raise
            finally:
                await link.close()

        stage.announce("the token")
        async with server(head, stage.head.host, stage.head.port):
            code = await stage.node(said := [])
            assert (code, faults, turns) == (0, [], [])
        assert any("(signal.signal: Input should be 2, 9 or 15)" in line for line in said), said
        assert any(f"names the run directory {tmp_path.parent}, which is not one of" in line for line in said)
        assert not (tmp_path.parent / NAME).exists()
        assert (stage.run.path / NAME).exists()

    on(body, tmp_path)


NAME = f".node-{'0' * 32}"


async def refusal(link: NodeLink) -> str:
    assert (await link.expect(m.Started)).pid == 0
    (line,) = (await link.expect(m.Ended)).lines
    return line


def test_a_process_that_wrote_long_lines_has_ended_all_the_same() -> None:
    end = m.Ended.of(1, 134, ["x" * 70_000, "short"], "y" * 5_000)
    assert m.ADAPTER.validate_json(end.model_dump_json()) == end
    assert [len(line) for line in end.lines] == [m.MOST_TEXT, 5]


SMALL = config(train={"output_dir": "/out"}, placement={"nodes": 2}, policy={"parallelism": {"dp_shard_size": 2}})


@given(st.text() | st.lists(st.sampled_from(["..", ".", "", "run", "/", "\0", "x"])).map("/".join))
def test_a_run_directory_lies_in_that_of_the_configuration(path: str) -> None:
    whole = f"/out/{path}"
    try:
        found = run_of(SMALL, whole)
    except OrderError:
        return
    assert str(found.path) == whole
    assert found.path.parent == Path("/out")
    assert not found.path.name.startswith(".")


@given(
    st.text(max_size=20).filter(lambda name: name not in SENT[Role.POLICY]) | st.sampled_from(sorted(os.environ)),
    st.text(max_size=20),
)
def test_no_other_variable_is_taken(name: str, text: str) -> None:
    env = {"COSMOS_CONTROLLER_URL": URL, name: text}
    start = m.Start(number=1, role=Role.POLICY, replica=0, rank=1, env=env)
    with pytest.raises(OrderError, match="is not a variable that a head sends to policy-0-rank1"):
        ORDERS.process(start)


ORDERS = Orders(SMALL, Machine(2), 1)
ORDERS.place(m.Layout(machines=(Machine(2), Machine(2)), rollouts=True))
