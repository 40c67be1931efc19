"""An engine over several machines: who takes part, and one connection from each to the first.

    node 0   listens ◀── nonces, proofs of the token ──▶ node n connects, again and again until it answers
             says what to run, and where torch's store is
             … vLLM's ranks work …
             "over", in the end

vLLM's ranks do not notice that those of another machine are gone, and wait for them for ever. These connections do:
node 0 hears of a process that has ended at once, and of a machine that is silent after SILENCE_S; the others likewise
of node 0. Messages are JSON, and HMAC-SHA256 under the rollout token proves who speaks at the beginning. What vLLM's
ranks exchange is neither encrypted nor proven: the network between them is to be a private one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
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
from weight_sync.transport import TransferError
from weight_sync.transport.group import Line
from weight_sync.transport.wire import Deadline

log = logging.getLogger(__name__)

PORT = 29400
"""On which node 0 listens; torch's store has the next one."""
GATHER_S = 900.0
"""Seconds in which all machines come: a cluster may have to start them first."""
HELLO_S = 10.0
RETRY_S = 1.0
SAID_S = 30.0
"""How often it is said who is missing."""
SILENCE_S = 25
"""Seconds without an answer after which the system takes a machine for dead."""
KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class NodeError(Exception):
    """The machines of an engine do not come together, or one is gone."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """count: of machines. index: of this one. leader: address of node 0.

    folder: of this engine alone, where all of its machines see it.
    """

    count: int
    index: int
    leader: str
    port: int
    folder: Path
    token: bytes

    def arguments(self) -> dict[str, Any]:
        """Of `AsyncEngineArgs`."""
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
        found = Nodes(
            count,
            int(env["COSMOS_ENGINE_NODE"]),
            env["COSMOS_ENGINE_LEADER"],
            int(env.get("COSMOS_ENGINE_PORT") or PORT),
            Path(env["COSMOS_ENGINE_FOLDER"]),
            env["COSMOS_TOKEN"].encode(),
        )
    except KeyError as error:
        raise EngineConfigError(f"COSMOS_ENGINE_NODES is set, and {error.args[0]} is not") from None
    except ValueError as error:
        raise EngineConfigError(f"COSMOS_ENGINE_NODES, _NODE and _PORT are numbers: {error}") from None
    if not 0 <= found.index < found.count:
        raise EngineConfigError(f"COSMOS_ENGINE_NODE = {found.index} is not one of {found.count} machines")
    return found


def _proof(token: bytes, speaker: str, nonces: str) -> str:
    return hmac.digest(token, f"{speaker} {nonces}".encode(), hashlib.sha256).hex()


def _line(connection: socket.socket, seconds: float) -> Line:
    return Line(connection, Deadline(seconds))


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
        self._there: dict[int, socket.socket] = {}
        self._over = threading.Event()
        self.lost = ""
        """Which one is gone, and why, in words."""
        try:
            self._listener = socket.create_server((nodes.leader, nodes.port), backlog=nodes.count)
        except OSError as error:
            raise NodeError(f"{nodes.leader}:{nodes.port} cannot be listened on: {error.strerror}") from None

    def gather(self, config: Mapping[str, Any], stop: threading.Event) -> None:
        """Wait for all of them, and tell them what to run; from then on they are watched. Raises `NodeError`."""
        began = said = time.monotonic()
        with self._listener:
            self._listener.settimeout(RETRY_S)
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
                    self._take_in(*self._listener.accept())
        answer = {"config": dict(config), "leader": self._nodes.leader, "port": self._nodes.port}
        for index, connection in self._there.items():
            try:
                _line(connection, HELLO_S).tell(answer)
            except OSError as error:
                raise NodeError(f"node {index} of the engine is gone: {error}") from None
        threading.Thread(target=self._watch, name="nodes", daemon=True).start()

    def _take_in(self, connection: socket.socket, address: Any) -> None:
        """Whoever has the token. A machine that comes again takes the place of its dead process."""
        try:
            line, nonce = _line(connection, HELLO_S), secrets.token_hex(16)
            line.tell({"nonce": nonce})
            hello = line.hear()
            index, nonces = hello.get("node"), f"{nonce} {hello.get('nonce')}"
            known = hmac.compare_digest(
                str(hello.get("proof")).encode(), _proof(self._nodes.token, f"node {index}", nonces).encode()
            )
            if not known or not isinstance(index, int) or not 0 < index < self._nodes.count:
                line.tell({"failed": f"not node {index} of this engine, or with another token"})
                raise TransferError(
                    f"it is not one of the {self._nodes.count} machines, or has another token"
                )
            line.tell({"proof": _proof(self._nodes.token, "node 0", nonces)})
            _keep_alive(connection)
        except (OSError, EOFError, TransferError) as error:
            log.warning("%s is not taken into the engine: %s", address[0], error)
            connection.close()
            return
        if index in self._there:
            self._there[index].close()
        self._there[index] = connection
        log.info("node %d of %d is there: %s", index, self._nodes.count, address[0])

    def _watch(self) -> None:
        poll, numbers = select.poll(), {}
        for index, connection in self._there.items():
            numbers[connection.fileno()] = index
            poll.register(connection, select.POLLIN)
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
        for connection in self._there.values():
            with contextlib.suppress(OSError):
                _line(connection, HELLO_S).tell({"over": True})
            connection.close()
        self._there.clear()


def _last_word(connection: socket.socket) -> str:
    try:
        _line(connection, HELLO_S).hear()
    except (OSError, EOFError, TransferError) as error:
        return str(error)
    return "it says something unexpected"


# ---- the others ----------------------------------------------------------------------------------------------


class Leader:
    """Node 0, as another machine sees it. Made by `join`."""

    def __init__(self, connection: socket.socket, nodes: Nodes, config: Mapping[str, Any]) -> None:
        """nodes: with the address of node 0 that its ranks use. config: what to run."""
        self._connection, self.nodes, self.config = connection, nodes, config

    def wait(self) -> None:
        """Return when it is over. Raises `NodeError`: node 0 is gone."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.poll()
        try:
            if _line(self._connection, HELLO_S).hear().get("over"):
                return
            why = "it says something unexpected"
        except (OSError, EOFError, TransferError) as error:
            why = str(error)
        raise NodeError(f"node 0 of the engine is gone: {why}")

    def tell_failure(self, reason: str) -> None:
        """The last word, of a machine that cannot go on."""
        with contextlib.suppress(OSError):
            _line(self._connection, HELLO_S).tell({"failed": reason})
            self._connection.close()


def join(nodes: Nodes) -> Leader:
    """Find node 0, and wait for what it says. Raises `NodeError`."""
    give_up, said, problem = time.monotonic() + GATHER_S, 0.0, ""
    while (now := time.monotonic()) < give_up:
        try:
            return _joined(nodes)
        except (OSError, EOFError) as error:  # its name is known, and it listens, once it runs
            problem = f"{nodes.leader}:{nodes.port}: {error}"
        except TransferError as error:
            raise NodeError(f"node 0 ({nodes.leader}:{nodes.port}): {error}") from None
        if now - said > SAID_S:
            log.info("waiting for node 0 of the engine: %s", problem)
            said = now
        time.sleep(RETRY_S)
    raise NodeError(f"node 0 of the engine did not come within {GATHER_S:.0f} s: {problem}")


def _joined(nodes: Nodes) -> Leader:
    connection = socket.create_connection((nodes.leader, nodes.port), HELLO_S)
    try:
        line, nonce, name = _line(connection, HELLO_S), secrets.token_hex(16), f"node {nodes.index}"
        nonces = f"{line.hear().get('nonce')} {nonce}"
        line.tell({"node": nodes.index, "nonce": nonce, "proof": _proof(nodes.token, name, nonces)})
        proof = str(line.hear().get("proof"))
        if not hmac.compare_digest(proof.encode(), _proof(nodes.token, "node 0", nonces).encode()):
            raise TransferError("it has another token")
        _keep_alive(connection)
        answer = _line(connection, GATHER_S).hear()
        if not isinstance(answer.get("config"), dict):
            raise TransferError("it does not say what to run")
        of_ranks = replace(nodes, leader=str(answer.get("leader")), port=int(answer.get("port") or 0))
        return Leader(connection, of_ranks, answer["config"])
    except BaseException:
        connection.close()
        raise
