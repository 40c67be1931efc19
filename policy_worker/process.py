"""Influences on the process from outside: environment, signals, and the death of its parent."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from types import FrameType

from policy_worker.errors import SettingsError
from schema.util.gpus import dealt_gpus
from schema.util.host import count_cores, descends_from
from schema.util.imports import wait_asleep
from schema.util.text import configure_logging
from schema.util.threads import exit_after

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Environment:
    """Where the controller is and who we are. `parent`: leave when this process is not above us any more."""

    url: str
    token: str
    name: str
    threads: int | None
    parent: int | None

    @staticmethod
    def of_environ() -> Environment:
        """Raises `SettingsError` naming what is missing or not a number."""
        values = {name: os.environ.get(name, "") for name in ("COSMOS_CONTROLLER_URL", "COSMOS_TOKEN")}
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise SettingsError(
                f"{' and '.join(missing)} must be set in the environment: this program is started by "
                f"cosmos-launch, or by hand with the URL and the policy token of a running job"
            )
        return Environment(
            url=values["COSMOS_CONTROLLER_URL"],
            token=values["COSMOS_TOKEN"],
            name=os.environ.get("COSMOS_REPLICA_NAME") or f"policy-{socket.gethostname()}",
            threads=number_of("COSMOS_CPU_THREADS"),
            parent=number_of("COSMOS_PARENT_PID"),
        )


def number_of(name: str) -> int | None:
    """A positive number out of the environment; None where it is not set. Raises `SettingsError`."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdigit() or int(text) == 0:
        raise SettingsError(f"{name} = {text!r} must be a positive whole number")
    return int(text)


@dataclass(frozen=True)
class RankEnvironment:
    """The settings of each rank that torchrun and similar launchers make."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    """Ranks of this replica on this machine."""
    meeting: str = ""
    """Where they meet by the controller; empty: at MASTER_ADDR and MASTER_PORT."""
    address: str = "127.0.0.1"
    """Address of this machine, for the others."""

    @staticmethod
    def of_environ() -> RankEnvironment:
        """Raises `SettingsError` for values that are not whole numbers or contradict each other."""
        try:
            world = int(os.environ.get("WORLD_SIZE", "1"))
            rank, local, ranks_here = (
                int(os.environ.get(name, default))
                for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", world))
            )
        except ValueError as error:
            names = "RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"
            raise SettingsError(f"{names} must be whole numbers: {error}") from None
        if not 0 <= rank < world or not 0 <= local < ranks_here:
            raise SettingsError(
                f"RANK = {rank} of WORLD_SIZE = {world} and LOCAL_RANK = {local} of LOCAL_WORLD_SIZE = {ranks_here} "
                f"contradict each other"
            )
        meeting = os.environ.get("COSMOS_RENDEZVOUS", "") if world > 1 else ""
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if world > 1 and missing and not meeting:
            raise SettingsError(
                f"WORLD_SIZE = {world} needs {' and '.join(missing)} in the environment, or COSMOS_RENDEZVOUS"
            )
        address = os.environ.get("COSMOS_NODE_ADDRESS") or RankEnvironment.address
        return RankEnvironment(rank, world, local, ranks_here, meeting, address)


def set_up_logging(rank: int) -> None:
    """Log to standard error, each line with the rank."""
    configure_logging(f"%(asctime)s %(levelname)s rank{rank} %(name)s: %(message)s", force=True)
    for noisy in ("httpx", "httpx2", "httpcore", "transformers", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    wait_asleep()


MOST_COMPILE_THREADS = 32
"""PyTorch takes as many on a large machine, for each process."""
ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""PyTorch 2.9 renamed the variable, and reads both."""


def set_up_torch(
    ranks_here: int, cores: int | None = None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set what PyTorch reads of the environment when it is imported; what the user has set stays.

    The threads that compile share the cores of a machine among its ranks: PyTorch would start 32 for each. On GPUs
    segments of memory grow, for micro-batches of many sizes leave gaps between those of a fixed one.

    cores: of this machine; None: those that this process may use.
    """
    cores = count_cores() if cores is None else cores
    threads = max(1, min(MOST_COMPILE_THREADS, cores // ranks_here))
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    on_wsl = "microsoft" in os.uname().release.lower()  # whose driver cannot map memory so
    if dealt_gpus(environment) and not on_wsl and not environment.keys() & set(ALLOCATORS):
        environment[ALLOCATORS[-1]] = "expandable_segments:True"


class ShutdownRequest:
    """Whether this process should leave, and why: asked for by a signal, a command or the parent's death.

    Training ends at the next point where the run is consistent. grace: seconds in which it should get there.
    checkpoint_asked: save at the next such point, and go on."""

    def __init__(self, grace: float = 30.0) -> None:
        self.grace = grace
        self._event = threading.Event()
        self.reason = ""
        self.checkpoint_asked = False
        """A plain flag, since a signal handler sets it: an event's lock may be held by the thread it interrupts."""

    def __bool__(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """Ask to leave; safe from signal handlers and any thread, and only the first reason counts."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep, but no longer than until a request; whether there is one. Not for the main thread, where a signal
        handler could not set what its own thread holds."""
        return self._event.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Do as `wait`, for the main thread."""
        give_up = time.monotonic() + seconds
        while not self and time.monotonic() < give_up:
            time.sleep(0.1)


def enforce(shutdown: ShutdownRequest) -> None:
    """End the process by force if it does not leave within the grace: a collective that hangs, a dead controller."""

    def watch() -> None:
        shutdown.wait()
        exit_after(shutdown.grace, 1, f"launcher.shutdown_timeout; asked to leave: {shutdown.reason}")

    threading.Thread(target=watch, name="leave-watch", daemon=True).start()


def install_signals(shutdown: ShutdownRequest) -> None:
    """SIGTERM and SIGINT ask to leave, SIGUSR1 asks for a checkpoint."""

    def handle(number: int, _: FrameType | None) -> None:
        shutdown.request(f"signal {signal.Signals(number).name}")

    def save(_: int, __: FrameType | None) -> None:
        shutdown.checkpoint_asked = True

    signal.signal(signal.SIGUSR1, save)
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def watch_parent(parent: int | None, shutdown: ShutdownRequest) -> None:
    """Ask to leave when the process that started us is gone (checked every second, in a thread)."""
    if parent is None:
        return

    def watch() -> None:
        while not shutdown.wait(1.0):
            if not descends_from(parent):
                shutdown.request("the process that started this one has ended")

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
