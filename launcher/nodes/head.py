"""The head's side: takes nodes in, and runs processes on them as if they were here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LaunchError
from launcher.nodes import messages as m
from launcher.nodes.agreement import clocks_apart, difference
from launcher.nodes.announcement import Announcement, AnnouncementError, HeadAddress, place_of, shared_directories
from launcher.nodes.link import LinkClosedError, NodeLink
from launcher.nodes.listener import NodeListener
from launcher.nodes.orders import SENT
from launcher.plan.machine import Machine
from launcher.plan.placement import ProcessSpec
from launcher.plan.rundir import RunDir
from launcher.processes.host import HostLostError, ProcessEnd, ProcessOrder
from launcher.processes.supervisor import LOST
from schema.config import Config

HANDSHAKE = 60.0
"""Seconds for a machine to say who it is and to write its proofs."""
SEEN_WITHIN = 15.0
"""Seconds until a file that another machine wrote is seen here: caches of NFS keep what is not there for as long."""
LOOK = 0.1
FAREWELL = 2.0
"""Seconds for nodes to receive the end."""


class NodeProcess:
    """A process on a node."""

    def __init__(self, host: NodeHost, number: int) -> None:
        self._host, self._number, self.pid = host, number, 0
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self._end: asyncio.Future[ProcessEnd] = loop.create_future()

    @property
    def ended(self) -> bool:
        return self._end.done()

    async def wait(self) -> ProcessEnd:
        return await asyncio.shield(self._end)

    def send_signal(self, number: signal.Signals) -> None:
        if not self.ended:
            self._host.send(m.Signal(number=self._number, signal=int(number)))

    def has_ended(self, end: ProcessEnd) -> None:
        for future, result in ((self.started, None), (self._end, end)):
            if not future.done():
                future.set_result(result)  # type: ignore[arg-type]


class NodeHost:
    """One node. patience: seconds for which a node that is gone is waited for."""

    own: Callable[[ProcessSpec], Mapping[str, str]]
    """The variables that the head gives a process, secrets included: `orders.SENT`."""
    layout: m.Layout | None = None
    """The machines that processes are placed over, once they are known."""

    def __init__(self, number: int, patience: float, event: Callable[[str], None]) -> None:
        self.number, self._patience, self._event = number, patience, event
        self.name, self.machine = f"node {number}", Machine(1)
        self._link: NodeLink | None = None
        self._came, self.gone = asyncio.Event(), asyncio.Event()
        self.gone.set()
        self._numbers = itertools.count(1)
        self._processes: dict[int, NodeProcess] = {}

    @property
    def is_there(self) -> bool:
        return self._link is not None

    async def ready(self) -> None:
        if self.is_there:
            return
        self._event(f"{self.name} is gone: waiting {self._patience:g} s for it (controller.start_timeout)")
        try:
            async with asyncio.timeout(self._patience):
                await self._came.wait()
        except TimeoutError:
            raise HostLostError(
                f"{self.name} did not come back in {self._patience:g} s (controller.start_timeout)"
            ) from None

    async def spawn(self, order: ProcessOrder) -> NodeProcess:
        process = NodeProcess(self, next(self._numbers))
        if self._link is None:
            process.has_ended(self._loss("it is gone"))
            return process
        spec, env = order.spec, {**self.own(order.spec), **order.env}
        assert env.keys() <= set(SENT[spec.role]), "the node would refuse it"
        self._processes[process._number] = process
        which = {"role": spec.role, "replica": spec.replica, "rank": spec.rank}
        self.send(m.Start(number=process._number, env=env, **which))
        await process.started
        return process

    def send(self, message: m.NodeMessage) -> None:
        if self._link is not None:
            self._link.send(message)

    async def serve(self, link: NodeLink, hello: m.Hello) -> None:
        """Everything that a node says, until it is gone."""
        self.name, self.machine, self._link = f"node {self.number} ({hello.host})", hello.machine, link
        self._came.set()
        self.gone.clear()
        if self.layout is not None:
            self.send(self.layout)
        why = ""
        try:
            while not why:
                message = await link.receive()
                if isinstance(message, m.Leave):
                    why = message.reason
                elif isinstance(message, m.Started | m.Ended):
                    self._take(message)
        except LinkClosedError as error:
            why = str(error)
        finally:
            self._link = None
            self._came.clear()
            self.gone.set()
            lost, self._processes = self._processes, {}
            for process in lost.values():
                process.has_ended(self._loss(why or "the head is leaving"))
            if lost:
                self._event(f"{self.name} is lost ({why}), and with it {len(lost)} processes")

    def _take(self, message: m.Started | m.Ended) -> None:
        process = self._processes.get(message.number)
        if process is None:
            return
        if isinstance(message, m.Ended):
            del self._processes[message.number]
            process.has_ended(ProcessEnd(message.code, message.lines, message.out_of_memory))
        elif not process.started.done():
            process.pid = message.pid
            process.started.set_result(None)

    def _loss(self, why: str) -> ProcessEnd:
        return ProcessEnd(LOST, lost=f"{self.name} is lost: {why}")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms that a machine must meet to be a node. facts: of the head (`agreement.facts`)."""

    config: Config
    run: RunDir
    facts: Mapping[str, str]
    controller: tuple[str, int]
    tls: ssl.SSLContext | None = None


class NodeServer:
    """Listens for nodes, and has a host for each."""

    def __init__(self, head: HeadAddress, terms: Terms, event: Callable[[str], None]) -> None:
        self._head, self._terms, self._event = head, terms, event
        self.address = head.host
        """Ours, by which nodes reach us: once one has come."""
        self._token, config = secrets.token_urlsafe(32), terms.config
        patience = config.controller.start_timeout
        numbers = range(1, config.placement.nodes)
        self.hosts = {number: NodeHost(number, patience, event) for number in numbers}
        self._taken: set[int] = set()
        self._silence = config.controller.heartbeat_timeout
        self._file: Path = place_of(config, head)
        self._listener = NodeListener(head, self._token, self._silence, terms.tls, self._serve, event)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Listen, and announce where. Raises LaunchError."""
        head = self._head
        try:
            self._listener.open()
        except OSError as error:
            hint = "end what listens there, or name another port: --head HOST:PORT on every machine"
            raise LaunchError(f"the head cannot listen at {head}: {error.strerror}", hint) from None
        announced = Announcement(str(head), str(self._terms.run.path), self._token, socket.gethostname(), os.getpid())
        try:
            try:
                announced.write(self._file)
            except OSError as error:
                raise LaunchError(
                    f"the head cannot write {self._file}: {error.strerror}",
                    "remove what another user has left there, or choose another train.output_dir",
                ) from None
            self._listener.start()
            try:
                yield
            except Exception:
                await self.finish("failed", 1)
                raise
        finally:
            with contextlib.suppress(AnnouncementError):
                if Announcement.read(self._file) == announced:
                    self._file.unlink(missing_ok=True)
            await self._listener.close()

    async def gather(self, interrupts: Sequence[int]) -> list[Machine]:
        """The machines of all nodes but the head's, once they are there. Raises LaunchError when some do not come.

        interrupts: signals that have come; the first one ends the wait.
        """
        patience = self._terms.config.controller.start_timeout
        give_up, reported = time.monotonic() + patience, -1
        while missing := [host.name for host in self.hosts.values() if not host.is_there]:
            present = len(self.hosts) + 1 - len(missing)
            if present != reported:
                self._event(
                    f"{present} of {len(self.hosts) + 1} nodes are there; waiting at {self._head} for the others"
                )
                reported = present
            if interrupts:
                raise LaunchError("interrupted while waiting for nodes", exit_code=128 + interrupts[0])
            if time.monotonic() >= give_up:
                raise LaunchError(
                    f"{', '.join(missing)} did not come to {self._head} in {patience:g} s (controller.start_timeout)",
                    f"run the same command on each machine; where {self._head} is not reached, it says so",
                    exit_code=1,
                )
            await asyncio.sleep(LOOK)
        return [host.machine for host in self.hosts.values()]

    def lend(
        self,
        variables: Callable[[ProcessSpec], Mapping[str, str]],
        machines: Sequence[Machine],
        *,
        rollouts: bool = True,
    ) -> None:
        """Say what the head gives its processes, and how they were placed: see `place_elastic`."""
        layout = m.Layout(machines=tuple(machines), rollouts=rollouts)
        for host in self.hosts.values():
            host.own, host.layout = variables, layout
            host.send(layout)

    async def finish(self, outcome: str, exit_code: int) -> None:
        """Send all nodes the end of the job."""
        for host in self.hosts.values():
            host.send(m.Finish(outcome=outcome, exit_code=exit_code))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await asyncio.gather(*(host.gone.wait() for host in self.hosts.values()))

    # ---- one machine that comes -----------------------------------------------------------------------------

    async def _serve(self, link: NodeLink) -> None:
        """A machine that has proven the token, until it is gone."""
        try:
            await self._admit(link)
        except (LinkClosedError, TimeoutError) as error:
            self._event(f"a connection from {link.peer} has ended: {error or 'it did not say who it is'}")

    async def _admit(self, link: NodeLink) -> None:
        async with asyncio.timeout(HANDSHAKE):
            hello = await link.expect(m.Hello)
        number, refusal = self._number_for(hello)
        if refusal is None and number in self._taken:
            reason = f"{self.hosts[number].name} is there already"
            refusal = m.Refusal(reason=reason, hint="start the command once on each machine", again=True)
        if refusal is not None:
            return self._refuse(link, hello, refusal)
        self._taken.add(number)
        try:
            async with asyncio.timeout(HANDSHAKE):
                refusal = self._disagreement(hello, number) or await self._prove(link)
            if refusal is not None:
                return self._refuse(link, hello, refusal)
            link.send(m.Welcome(node=number))
            self.address = link.address
            self._event(f"node {number} is {hello.host} ({hello.address}, pid {hello.pid})")
            await self.hosts[number].serve(link, hello)
        finally:
            self._taken.discard(number)

    def _refuse(self, link: NodeLink, hello: m.Hello, refusal: m.Refusal) -> None:
        link.send(refusal)
        if not refusal.again:
            self._event(f"{hello.host} ({hello.address}, pid {hello.pid}) is refused as a node: {refusal.reason}")

    def _number_for(self, hello: m.Hello) -> tuple[int, m.Refusal | None]:
        """Which node it is: the one it says, one that it was before, else the first that is missing."""
        free = [number for number in self.hosts if number not in self._taken]
        if hello.node is not None:
            if hello.node in self.hosts:
                return hello.node, None
            reason = f"node {hello.node} is not one of placement.nodes = {len(self.hosts) + 1}"
            return 0, m.Refusal(reason=reason, hint="number the machines from 0, the head, or leave --node out")
        before = [number for number in free if self.hosts[number].name.endswith(f"({hello.host})")]
        if before or free:
            return (before or free)[0], None
        reason = f"all {len(self.hosts) + 1} nodes are there (placement.nodes)"
        return 0, m.Refusal(reason=reason, hint="start the command once on each machine", again=True)

    def _disagreement(self, hello: m.Hello, number: int) -> m.Refusal | None:
        if apart := clocks_apart(time.time(), hello.clock):
            return m.Refusal(reason=apart, hint="set both clocks by NTP")
        unlike, remedy = difference(self._terms.facts, hello.facts)
        if unlike:
            return m.Refusal(reason=unlike, hint=remedy)
        before = self.hosts[number].machine
        if before != Machine(1) and before.gpus != hello.machine.gpus:
            return m.Refusal(
                reason=f"it has the GPUs {hello.machine.gpus}, and node {number} had {before.gpus} before",
                hint="bring back a machine of the same kind, or start the job anew with --resume",
            )
        return None

    async def _prove(self, link: NodeLink) -> m.Refusal | None:
        """Whether what must be shared is: the machine writes a file into each directory, and we see it."""
        name, terms = f".node-{secrets.token_hex(16)}", self._terms
        directories = shared_directories(terms.config, terms.run)
        link.send(m.Challenge(name=name, run=str(terms.run.path), controller=terms.controller))
        proof = await link.expect(m.Proof)
        try:
            for key, fault in proof.faults.items():
                if key == "controller":
                    return m.Refusal(reason=fault, hint="open the port of the controller between these machines")
                hint = "mount it there, for the same user"
                return m.Refusal(reason=f"{key}: {directories.get(key, key)} cannot be written: {fault}", hint=hint)
            for key, directory in directories.items():
                if not await _appears(Path(directory) / name):
                    reason = f"{key}: {directory} there is not the head's: what is written is not seen here"
                    return m.Refusal(reason=reason, hint="put it on a file system that all machines share")
        finally:
            for directory in directories.values():
                with contextlib.suppress(OSError):
                    (Path(directory) / name).unlink(missing_ok=True)
        return None


async def _appears(path: Path) -> bool:
    give_up = time.monotonic() + SEEN_WITHIN
    while not await asyncio.to_thread(_is_seen, path):
        if time.monotonic() >= give_up:
            return False
        await asyncio.sleep(LOOK)
    return True


def _is_seen(path: Path) -> bool:
    with contextlib.suppress(OSError):
        os.listdir(path.parent)  # NFS looks again
    return path.exists()
