"""A node's side: finds the head, joins, runs the processes that the head names, and leaves with the job.

The announcement in `train.output_dir` may be older than what listens at the head's address by now. Until that has
proven the announced token, it gets nothing from the node but a nonce. What a proven head may order is in `orders`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LaunchError
from launcher.nodes import messages as m
from launcher.nodes.agreement import facts
from launcher.nodes.announcement import Announcement, AnnouncementError, HeadAddress, place_of, shared_directories
from launcher.nodes.link import BUFFER, PROVE, LinkClosedError, NodeLink, RefusedError
from launcher.nodes.orders import OrderError, Orders, run_of
from launcher.plan import nsight
from launcher.plan.credentials import trust
from launcher.plan.machine import Machine
from launcher.plan.placement import ProcessSpec
from launcher.plan.rundir import RunDir
from launcher.processes.host import Folders, LocalHost, LocalProcess, ProcessEnd, ProcessOrder, escalation
from launcher.processes.share import attended
from launcher.processes.signals import queued_signals
from launcher.restarts import EXIT_CONFIG, EXIT_FAILED, SIGNALLED
from schema.config import Config
from schema.util.proof_exchange import ProofError
from schema.util.tls import client_context

LOOK = 0.5
CONNECT = 3.0
"""Seconds for one attempt to connect: a machine that is there answers at once, if only to refuse."""
TAKEN_IN = 180.0
"""Seconds from the proofs until the head has taken this machine in or refused it: it waits for files on NFS."""
TROUBLES = 20
"""Reasons to wait that are reported: what is not a head may make up many."""
STEADY = 10.0
"""Seconds that a connection lasts which was not in vain."""
NOT_STARTED = 127
"""Exit code of a program that cannot be started, as in a shell."""


@dataclass(frozen=True, slots=True)
class Joining:
    """A machine that joins as a node. number: its own; None: any that is free."""

    config: Config
    machine: Machine
    head: HeadAddress
    number: int | None
    env: Mapping[str, str]


async def run_node(joining: Joining, event: Callable[[str], None]) -> int:
    """Be a node until the job is over; the job's exit code. Raises LaunchError: it cannot join, with the reason."""
    being = asyncio.create_task(_be_node(joining, event))
    with queued_signals(lambda: None) as interrupts:  # SIGUSR1 is the head's matter
        number = await attended(being, interrupts)
    return being.result() if number is None else SIGNALLED + number


async def _be_node(joining: Joining, event: Callable[[str], None]) -> int:
    """Join, and join again when the head is lost. Cancelled: this machine leaves."""
    own_facts, unsteady_since = facts(joining.config, joining.env), float("inf")
    while True:
        node = await _join_once(joining, own_facts, event)
        joined = time.monotonic()
        if (code := await node.run()) is not None:
            return code
        event(f"the connection to the head is lost ({node.why}); joining again")
        is_steady = time.monotonic() - joined > STEADY
        unsteady_since = float("inf") if is_steady else min(unsteady_since, joined)
        if time.monotonic() - unsteady_since > joining.config.controller.start_timeout:
            raise LaunchError(
                f"{socket.gethostname()} joins {joining.head} and loses it again at once: {node.why}",
                "give every machine the same version and configuration",
                EXIT_FAILED,
            )
        await asyncio.sleep(LOOK)


async def _join_once(joining: Joining, own_facts: Mapping[str, str], event: Callable[[str], None]) -> Node:
    """Try until the head takes this machine in. Raises LaunchError after `controller.start_timeout`."""
    config, head = joining.config, joining.head
    patience, place = config.controller.start_timeout, place_of(config, head)
    give_up, held = time.monotonic() + patience, 0.0
    reported = set[str]()
    while True:
        try:
            return await _handshake(joining, own_facts, place, event)
        except RefusedError as error:
            refusal, held = error.refusal, held or time.monotonic()
            # A node that died a moment ago is believed to be there until its silence is noticed.
            if not refusal.again or time.monotonic() - held > 2 * config.controller.heartbeat_timeout:
                raise LaunchError(
                    f"the head refuses {socket.gethostname()}: {refusal.reason}", refusal.hint, EXIT_CONFIG
                ) from None
            trouble = refusal.reason
        except (LinkClosedError, AnnouncementError, OrderError, OSError, TimeoutError) as error:
            trouble, held = _in_words(error), 0.0
        if trouble not in reported and len(reported) < TROUBLES:
            event(f"waiting for the head at {head}: {trouble}")
            reported.add(trouble)
        if time.monotonic() >= give_up:
            raise LaunchError(
                f"{socket.gethostname()} could not join the head at {head} in {patience:g} s: {trouble}",
                "start the command on the head too; see that its port is open between these machines, and that "
                "train.output_dir is on a file system that all of them share",
                EXIT_FAILED,
            )
        await asyncio.sleep(LOOK)


def _in_words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of what listens there is refused: {error.verify_message} (controller.tls_ca)"
    if isinstance(error, ssl.SSLError):
        return f"what listens there does not speak TLS as controller.tls_cert demands: {error.reason or error}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or f"no answer in {CONNECT:g} s: is a firewall in between?"


async def _handshake(
    joining: Joining, own_facts: Mapping[str, str], place: Path, event: Callable[[str], None]
) -> Node:
    announced = Announcement.read(place)
    config, head = joining.config, joining.head
    context: ssl.SSLContext | None = None
    if config.controller.tls_cert:
        context = client_context(config.controller.tls_ca)
    async with asyncio.timeout(CONNECT):
        reader, writer = await asyncio.open_connection(
            head.host, head.port, limit=BUFFER, ssl=context, server_hostname=head.host if context else None
        )
    link = await _proven(announced, joining, reader, writer, place)
    try:
        async with asyncio.timeout(TAKEN_IN):
            link.send(
                m.Hello(
                    node=joining.number, host=socket.gethostname(), address=link.address, pid=os.getpid(),
                    clock=time.time(), machine=joining.machine, facts=dict(own_facts),
                )
            )  # fmt: skip
            challenge = await link.expect(m.Challenge)
            run = run_of(config, challenge.run)
            link.send(m.Proof(faults=await _prove(challenge, shared_directories(config, run))))
            welcome = await link.expect(m.Welcome)
        nodes = config.placement.nodes
        if not 0 < welcome.node < nodes or joining.number not in (None, welcome.node):
            raise OrderError(f"the head makes this machine node {welcome.node} of {nodes}")
    except TimeoutError:
        await link.close()
        raise LinkClosedError(f"the head has not taken this machine in for {TAKEN_IN:g} s") from None
    except BaseException:
        await link.close()
        raise
    event(f"node {welcome.node} of {nodes}, run directory {run.path}")
    return Node(joining, link, run, welcome.node, event)


async def _proven(
    announced: Announcement | None,
    joining: Joining,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    place: Path,
) -> NodeLink:
    """The link, once what listens has proven that it is the announced head. Raises LinkClosedError: it has not."""
    head, why = joining.head, f"it has not proven anything for {PROVE:g} s"
    try:
        if announced is None:
            raise LinkClosedError(
                f"it listens, but {place} is not here: train.output_dir is not shared, or just begins"
            )
        try:
            async with asyncio.timeout(PROVE):
                silence = joining.config.controller.heartbeat_timeout
                return await NodeLink.to_head(reader, writer, silence, announced.token, head)
        except (ProofError, TimeoutError) as error:
            why = str(error) or why
        raise LinkClosedError(
            f"what listens at {head} does not know the token of the announced run: it is not its head ({why}; "
            f"{place} was written by pid {announced.pid} on {announced.host}); it was sent nothing"
        )
    except BaseException:
        writer.transport.abort()
        raise


async def _prove(challenge: m.Challenge, directories: Mapping[str, str]) -> dict[str, str]:
    """Write what the head wants to see, and look whether the controller's port lets us through."""
    faults = await asyncio.to_thread(_write, challenge.name, directories)
    host, port = challenge.controller
    try:
        async with asyncio.timeout(CONNECT):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except TimeoutError:
        faults["controller"] = (
            f"packets to {host}:{port}, the controller's port, get no answer: a firewall drops them"
        )
    except OSError:
        pass  # refused: nobody listens yet, but nothing is in between
    return faults


def _write(name: str, directories: Mapping[str, str]) -> dict[str, str]:
    faults = {}
    for key, directory in directories.items():
        try:
            (Path(directory) / name).touch(mode=0o600)
        except OSError as error:
            faults[key] = str(error.strerror)
    return faults


class Node:
    """A machine that was taken in."""

    def __init__(
        self, joining: Joining, link: NodeLink, run: RunDir, number: int, event: Callable[[str], None]
    ) -> None:
        self._joining, self._link, self._event = joining, link, event
        self._grace = nsight.grace(joining.config)
        self._orders = Orders(joining.config, joining.machine, number)
        self.why = ""
        self._host = LocalHost(Folders.of_run(run), self._grace, self._environment)
        self._processes: dict[int, LocalProcess] = {}
        self._names: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def _environment(self, spec: ProcessSpec) -> dict[str, str]:
        config = self._joining.config
        variables = {"COSMOS_NODE_ADDRESS": self._link.address, **trust(config.controller.tls_ca)}
        return spec.environment(config, self._joining.env, variables)

    async def run(self) -> int | None:
        """Obey the head; the exit code, or None when the head is gone. No process is left, cancelled or not."""
        code: int | None = None
        self.why = "it was interrupted there"
        try:
            while code is None:
                code = self._obey(await self._link.receive())
        except LinkClosedError as error:
            self.why = str(error)
        except asyncio.CancelledError:
            self._event("leaving: interrupted here")
            raise
        finally:
            leaving = asyncio.create_task(self._leave(code))
            try:
                await asyncio.shield(leaving)
            except asyncio.CancelledError:
                await leaving
                raise
        return code

    async def _leave(self, code: int | None) -> None:
        if code is None:
            self._link.send(m.Leave(reason=self.why))
        await self._end_all()
        await self._link.close()

    def _obey(self, message: m.AnyMessage) -> int | None:
        if isinstance(message, m.Layout):
            try:
                self._orders.place(message)
            except OrderError as error:
                raise LinkClosedError(str(error)) from None
        elif isinstance(message, m.Start):
            task = asyncio.create_task(self._start(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, m.Signal):
            process = self._processes.get(message.number)
            if process is not None:
                process.send_signal(signal.Signals(message.signal))
        elif isinstance(message, m.Finish):
            self._event(f"the job has {message.outcome}")
            return message.exit_code
        return None

    async def _start(self, message: m.Start) -> None:
        name = ""
        try:
            spec = self._orders.process(message)
            if spec.name in self._names or message.number in self._processes:
                raise OrderError(f"{spec.name}, number {message.number} of this connection, runs already")
            name = spec.name
            self._names.add(name)
            process = await self._host.spawn(ProcessOrder(spec, {}))
        except (OSError, OrderError) as error:
            self._names.discard(name)
            verb = "refuses" if isinstance(error, OrderError) else "cannot start a process"
            text = f"{socket.gethostname()} {verb}: {error}"
            self._event(text)
            self._link.send(m.Started(number=message.number, pid=0))
            return self._link.send(m.Ended.of(message.number, NOT_STARTED, (text,)))
        self._processes[message.number] = process
        self._event(f"{spec.name} is started (pid {process.pid})")
        self._link.send(m.Started(number=message.number, pid=process.pid))
        end: ProcessEnd = await process.wait()
        del self._processes[message.number]
        self._names.discard(name)
        self._event(f"{spec.name} has ended (exit code {end.code})")
        self._link.send(m.Ended.of(message.number, end.code, end.lines, end.out_of_memory))

    async def _end_all(self) -> None:
        """SIGTERM, the grace, then kill; none is left."""
        for number, seconds in escalation(self._grace):
            for process in self._processes.values():
                process.send_signal(number)
            give_up = time.monotonic() + seconds
            while self._tasks and time.monotonic() < give_up:
                await asyncio.wait(set(self._tasks), timeout=LOOK)
            if not self._tasks:
                return
