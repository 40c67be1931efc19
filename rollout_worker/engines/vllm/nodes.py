"""An engine over several machines: who takes part, and one connection from each to the first.

    node 0   listens ◀── nonces, proofs of the token ──▶ node n connects, again and again until it answers
             says what it runs, and where torch's store is
             … vLLM's ranks work …
             "over", in the end

vLLM's ranks do not notice that those of another machine are gone, and wait for them for ever. These connections do:
node 0 hears of a process that has ended at once, and of a machine that is silent after SILENCE_S; the others likewise
of node 0. Both ends prove the rollout token before anything else (`schema.util.proof_exchange`), node 0 first, and
each message, which is JSON, has a MAC. A machine runs what its own configuration says, and compares it with that of
node 0 (`differences`). What vLLM's ranks exchange is neither encrypted nor proven: their network is to be a private
one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout_worker.engines.base import EngineConfigError
from schema.config import Config
from schema.util.proof import Handshake, Speaker
from schema.util.proof_exchange import (
    ANSWER_BYTES,
    MAC_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    ClientProof,
    ProofError,
    Seal,
    ServerProof,
)
from weight_sync.transport import TransferError
from weight_sync.transport.group import MAX_MESSAGE_BYTES
from weight_sync.transport.wire import Deadline, receive_exactly, send_all

log = logging.getLogger(__name__)

PORT = 29400
"""On which node 0 listens; torch's store has the next one."""
GATHER_S = 900.0
"""Seconds in which all machines come: a cluster may have to start them first."""
HELLO_S = 10.0
MOST_UNPROVEN = 32
"""Connections that have proven nothing yet; one more closes the oldest one."""
PURPOSE = "cosmos-launch: machines of an engine"
DECISIVE = ("policy", "rollout", "weight_sync")
"""Sections of the configuration that say what vLLM's ranks run."""
RETRY_S = 1.0
ACCEPT_S = 0.1
"""Seconds between looks whether all are there."""
SAID_S = 30.0
"""How often it is said who is missing."""
SILENCE_S = 25
"""Seconds without an answer after which the system takes a machine for dead."""
NAMED = 5
"""Keys that a refusal names."""
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class NodeError(Exception):
    """The machines of an engine do not come together, or one is gone."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """count: of machines. index: of this one. leader: address of node 0.

    folder: of this engine alone, where all of its machines see it. config: the file of this machine's own
    configuration, which a further machine needs.
    """

    count: int
    index: int
    leader: str
    port: int
    folder: Path
    token: str
    config: Path | None = None

    def arguments(self) -> dict[str, Any]:
        """Return arguments of `AsyncEngineArgs`."""
        return {
            "nnodes": self.count,
            "node_rank": self.index,
            "master_addr": self.leader,
            "master_port": self.port + 1,
            "distributed_executor_backend": "mp",
        }

    @contextmanager
    def own_folder(self) -> Iterator[None]:
        """For node 0, which has the name of the replica: what engines leave there is of a dead one."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clear()
        try:
            yield
        finally:
            self._clear()
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _clear(self) -> None:
        for left in self.folder.glob("cosmos-*"):
            shutil.rmtree(left, ignore_errors=True)


def nodes_of(env: Mapping[str, str]) -> Nodes | None:
    """From COSMOS_ENGINE_*; None for an engine on one machine. Raises `EngineConfigError`."""
    try:
        count = int(env.get("COSMOS_ENGINE_NODES") or 1)
        if count < 2:
            return None
        nodes = Nodes(
            count,
            int(env["COSMOS_ENGINE_NODE"]),
            env["COSMOS_ENGINE_LEADER"],
            int(env.get("COSMOS_ENGINE_PORT") or PORT),
            Path(env["COSMOS_ENGINE_FOLDER"]),
            env["COSMOS_TOKEN"],
            Path(env["COSMOS_ENGINE_CONFIG"]) if int(env["COSMOS_ENGINE_NODE"]) else None,
        )
    except KeyError as error:
        raise EngineConfigError(f"COSMOS_ENGINE_NODES is set, and {error.args[0]} is not") from None
    except ValueError as error:
        raise EngineConfigError(f"COSMOS_ENGINE_NODES, _NODE and _PORT are numbers: {error}") from None
    if not 0 <= nodes.index < nodes.count:
        raise EngineConfigError(f"COSMOS_ENGINE_NODE = {nodes.index} is not one of {nodes.count} machines")
    return nodes


def differences(own: Config, theirs: Mapping[str, Any]) -> list[str]:
    """Keys in which what node 0 runs is not what this machine's own configuration says; at most some."""
    ours = json.loads(json.dumps(own.to_dict()))
    return [
        f"{section}.{key}"
        for section in DECISIVE
        for key in sorted({**ours[section], **_table(theirs, section)})
        if ours[section].get(key) != _table(theirs, section).get(key)
    ][:NAMED]


def _table(config: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    table = config.get(section)
    return table if isinstance(table, dict) else {}


class _Line:
    """Messages over a connection whose ends are proven: length, MAC, a JSON object."""

    def __init__(self, connection: socket.socket, handshake: Handshake, speaker: Speaker) -> None:
        peer: Speaker = "client" if speaker == "server" else "server"
        self._connection, self._sending, self._receiving = (
            connection,
            Seal(handshake, speaker),
            Seal(handshake, peer),
        )

    def fileno(self) -> int:
        return self._connection.fileno()

    def tell(self, message: Mapping[str, Any], seconds: float = HELLO_S) -> None:
        """Raises `OSError`."""
        text = json.dumps(message, separators=(",", ":")).encode()
        head = len(text).to_bytes(4, "little") + self._sending.mac(text)
        send_all(self._connection, head + text, Deadline(seconds))

    def hear(self, seconds: float = HELLO_S) -> dict[str, Any]:
        """Raises `OSError`, `EOFError`; `TransferError` for what is not a message, or reports a failure."""
        deadline = Deadline(seconds)
        head = receive_exactly(self._connection, 4 + MAC_BYTES, deadline)
        size = int.from_bytes(head[:4], "little")
        if size > MAX_MESSAGE_BYTES:
            raise TransferError(f"a message would have {size} bytes")
        text = receive_exactly(self._connection, size, deadline)
        if not self._receiving.holds(text, head[4:]):
            raise TransferError("a message has a wrong MAC: something in between has changed or added it")
        message = json.loads(text)
        if "failed" in message:
            raise TransferError(f"the other side says: {str(message['failed'])[:500]}")
        return dict(message)

    def close(self) -> None:
        self._connection.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, number in KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, number)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)


# ---- node 0 --------------------------------------------------------------------------------------------------


class Members:
    """The other machines, as node 0 sees them."""

    def __init__(self, nodes: Nodes, on_lost: Callable[[], object]) -> None:
        """on_lost: called, in a thread, when one is gone. Raises `NodeError`."""
        self._nodes, self._on_lost = nodes, on_lost
        self._there: dict[int, _Line] = {}
        self._coming: dict[socket.socket, str] = {}
        """Connections that have proven nothing yet, the oldest first, with their addresses."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.lost = ""
        """Which one is gone, and why, in words."""
        self._strangers, self._complete = 0, False
        try:
            self._listener = socket.create_server((nodes.leader, nodes.port), backlog=nodes.count)
        except OSError as error:
            raise NodeError(f"{nodes.leader}:{nodes.port} cannot be listened on: {error.strerror}") from None

    def gather(self, config: Mapping[str, Any], stop: threading.Event) -> None:
        """Wait for all of them, and tell them what to run; from then on they are watched. Raises `NodeError`."""
        began = said = time.monotonic()
        with self._listener:
            self._listener.settimeout(ACCEPT_S)
            while missing := [index for index in range(1, self._nodes.count) if index not in self._there]:
                now = time.monotonic()
                if stop.is_set():
                    raise NodeError("closed while it was starting")
                text = ", ".join(f"node {index}" for index in missing)
                if now - began > GATHER_S:
                    raise NodeError(f"{text} of {self._nodes.count} did not come within {GATHER_S:.0f} s")
                if now - said > SAID_S:
                    log.info("waiting for %s of %d machines of the engine", text, self._nodes.count)
                    said = now
                with contextlib.suppress(TimeoutError):
                    self._greet(*self._listener.accept())
            with self._lock:
                self._complete = True
        answer = {"config": dict(config), "leader": self._nodes.leader, "port": self._nodes.port}
        for index, line in self._there.items():
            try:
                line.tell(answer)
            except OSError as error:
                raise NodeError(f"node {index} of the engine is gone: {error}") from None
        threading.Thread(target=self._watch, name="nodes", daemon=True).start()

    def _greet(self, connection: socket.socket, address: Any) -> None:
        """Take it in, in a thread: what proves nothing must not hold up the others."""
        with self._lock:
            if len(self._coming) >= MOST_UNPROVEN:
                oldest = next(iter(self._coming))
                del self._coming[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._coming[connection] = address[0]
        threading.Thread(target=self._take_in, args=(connection,), name="greet", daemon=True).start()

    def _take_in(self, connection: socket.socket) -> None:
        """Take in a machine that has the token. A machine that comes again takes the place of its dead process."""
        address, deadline = self._coming.get(connection, "?"), Deadline(HELLO_S)
        try:
            server_proof = ServerProof(
                PURPOSE, self._nodes.token, receive_exactly(connection, OPENING_BYTES, deadline)
            )
            send_all(connection, server_proof.answer, deadline)
            handshake = server_proof.check(receive_exactly(connection, PROOF_BYTES, deadline))
            line = _Line(connection, handshake, "server")
            index = line.hear().get("node")
            if not isinstance(index, int) or not 0 < index < self._nodes.count:
                reason = f"node {index} is not one of the {self._nodes.count} machines of this engine"
                line.tell({"failed": reason})
                raise TransferError(reason)
            _keep_alive(connection)
        except (OSError, EOFError, TransferError, ProofError) as error:
            self._refused(address, error)
            connection.close()
            return
        finally:
            with self._lock:
                self._coming.pop(connection, None)
        with self._lock:
            if self._complete:
                line.close()
                return
            if index in self._there:
                self._there[index].close()
            self._there[index] = line
        log.info("node %d of %d is there: %s", index, self._nodes.count, address)

    def _refused(self, address: str, error: Exception) -> None:
        """Say so, a few times: strangers must not fill the log."""
        self._strangers += 1
        if self._strangers <= NAMED:
            log.warning("%s is not taken into the engine: %s", address, error)

    def _watch(self) -> None:
        poll, numbers = select.poll(), {}
        for index, line in self._there.items():
            numbers[line.fileno()] = index
            poll.register(line, select.POLLIN)
        while not self._over.is_set():
            for number, _ in poll.poll(1000 * RETRY_S):
                if not self._over.is_set():
                    index = numbers[number]
                    self.lost = f"node {index} of the engine is gone: {_last_word(self._there[index])}"
                    log.error("%s", self.lost)
                    self._on_lost()
                return

    def end(self) -> None:
        """Tell them that it is over. Idempotent."""
        self._over.set()
        self._listener.close()
        for line in self._there.values():
            with contextlib.suppress(OSError):
                line.tell({"over": True})
            line.close()
        self._there.clear()


def _last_word(line: _Line) -> str:
    try:
        line.hear()
    except (OSError, EOFError, TransferError) as error:
        return str(error)
    return "it says something unexpected"


# ---- the others ----------------------------------------------------------------------------------------------


class LeadingNode:
    """Node 0, as another machine sees it. Made by `join`."""

    def __init__(self, line: _Line, nodes: Nodes, config: Mapping[str, Any]) -> None:
        """nodes: with the address of node 0 that its ranks use. config: what node 0 runs, to compare."""
        self._line, self.nodes, self.config = line, nodes, config

    def wait(self) -> None:
        """Return when it is over. Raises `NodeError`: node 0 is gone."""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        poll.poll()
        try:
            if self._line.hear().get("over"):
                return
            why = "it says something unexpected"
        except (OSError, EOFError, TransferError) as error:
            why = str(error)
        raise NodeError(f"node 0 of the engine is gone: {why}")

    def tell_failure(self, reason: str) -> None:
        """The last word, of a machine that cannot go on."""
        with contextlib.suppress(OSError):
            self._line.tell({"failed": reason})
            self._line.close()


def join(nodes: Nodes) -> LeadingNode:
    """Find node 0, and wait for what it says. Raises `NodeError`."""
    give_up, said, problem = time.monotonic() + GATHER_S, 0.0, ""
    while (now := time.monotonic()) < give_up:
        try:
            return _joined(nodes)
        except (OSError, EOFError) as error:  # its name is known, and it listens, once it runs
            problem = f"{nodes.leader}:{nodes.port}: {error}"
        except (TransferError, ProofError) as error:
            raise NodeError(f"node 0 ({nodes.leader}:{nodes.port}): {error}") from None
        if now - said > SAID_S:
            log.info("waiting for node 0 of the engine: %s", problem)
            said = now
        time.sleep(RETRY_S)
    raise NodeError(f"node 0 of the engine did not come within {GATHER_S:.0f} s: {problem}")


def _joined(nodes: Nodes) -> LeadingNode:
    connection = socket.create_connection((nodes.leader, nodes.port), HELLO_S)
    try:
        client_proof, deadline = ClientProof(PURPOSE, nodes.token), Deadline(HELLO_S)
        send_all(connection, client_proof.opening, deadline)
        proof, handshake = client_proof.check(receive_exactly(connection, ANSWER_BYTES, deadline))
        send_all(connection, proof, deadline)
        line = _Line(connection, handshake, "client")
        line.tell({"node": nodes.index})
        _keep_alive(connection)
        answer = line.hear(GATHER_S)
        if not isinstance(answer.get("config"), dict):
            raise TransferError("it does not say what it runs")
        of_ranks = replace(nodes, leader=str(answer.get("leader")), port=int(answer.get("port") or 0))
        return LeadingNode(line, of_ranks, answer["config"])
    except BaseException:
        connection.close()
        raise
