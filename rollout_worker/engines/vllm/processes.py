"""The processes that vLLM starts below ours: their environment, how they are found, watched and ended, and that they
end when we do.

vLLM starts its processes itself and hands them our environment, so `boot_environment` is laid over it while
it boots and taken away afterwards. `follow_parent` runs inside of those processes.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

PARENT = "COSMOS_VLLM_PARENT"
"""Process id of the rollout worker, for the processes that vLLM starts."""

MODULES = "COSMOS_VLLM_MODULES"
"""Modules, with commas, that each of those processes imports before it loads the model."""

_SECRETS = ("COSMOS_TOKEN", "COSMOS_REPLICA_SECRET", "COSMOS_CONTROLLER_URL")

_EXIT_ORPHANED = 1
_POLL_SECONDS = 0.5


def boot_environment(parent: int, modules: Sequence[str] = (), *, flashinfer: bool = False) -> dict[str, str | None]:
    """Variables to set (or, with None, to remove) while vLLM starts its processes. flashinfer: whether it samples."""
    return {
        PARENT: str(parent),
        "VLLM_USE_FLASHINFER_SAMPLER": str(int(flashinfer)),
        MODULES: ",".join(modules) or None,
        # A forked copy of a process with threads and an event loop may deadlock.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Its own level where the user has set one; else its chatter at every boot hides what matters.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # Standard output is for the program that runs the engine.
        "VLLM_LOGGING_STREAM": os.environ.get("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
        # A training job does not report to third parties.
        "VLLM_NO_USAGE_STATS": "1",
        # An engine has no business with the controller.
        **dict.fromkeys(_SECRETS),
        # On a CPU vLLM pins its threads to cores which the trainer may be using; the system shares better.
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        # On a CPU the cache's size is an engine argument (see the adapter), which this would override.
        "VLLM_CPU_KVCACHE_SPACE": None,
    }


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, and put everything back afterwards, what others changed meanwhile included."""
    before = dict(os.environ)
    try:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def follow_parent() -> None:
    """In a process that vLLM started for us: leave at once when the rollout worker is gone, however it died.

    A thread waits for it, since PR_SET_PDEATHSIG fires when the starting *thread* ends. Does nothing
    elsewhere.
    """
    parent = int(os.environ.get(PARENT, "0"))
    if parent in (0, os.getpid()):
        return
    threading.Thread(target=_wait_for, args=(parent,), name="follow-parent", daemon=True).start()


def _wait_for(parent: int) -> None:
    try:
        if hasattr(os, "pidfd_open"):
            poll = select.poll()
            poll.register(os.pidfd_open(parent), select.POLLIN)
            poll.poll()
        else:
            while True:
                os.kill(parent, 0)
                time.sleep(_POLL_SECONDS)
    except ProcessLookupError:
        pass
    os._exit(_EXIT_ORPHANED)


# ---- as the worker sees them -------------------------------------------------------------------------------

LEAVE_SECONDS = 5.0
"""How long a process may take to leave before it is killed; it has nothing to save."""


def children() -> set[int]:
    """Ids of all processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def trees(roots: Iterable[int]) -> list[psutil.Process]:
    """These processes and all below them."""
    tops = [psutil.Process(pid) for pid in roots]
    return [*tops, *(child for top in tops for child in top.children(recursive=True))]


def started_by_vllm(before: Collection[int]) -> list[psutil.Process]:
    """Processes of vLLM below ours that were not among `before`."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if process.pid not in before and _is_vllm(process)]


def _is_vllm(process: psutil.Process) -> bool:
    try:
        if process.name().startswith("VLLM"):  # it writes its title over its environment
            return True
        helper = any("resource_tracker" in part for part in process.cmdline())  # multiprocessing's, it stays
        return PARENT in process.environ() and not helper
    except psutil.Error:
        return False


def shared_segments(processes: Iterable[psutil.Process]) -> set[Path]:
    """Shared memory that vLLM's ranks on a CPU exchange tensors through, and that they leave behind."""
    paths: set[Path] = set()
    for process in processes:
        try:
            paths.update(Path(entry.path) for entry in process.memory_maps())
        except psutil.Error:
            continue
    return {path for path in paths if path.match("/dev/shm/vllm_dist_*")}  # noqa: S108


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end(processes: list[psutil.Process], patience: float = LEAVE_SECONDS) -> None:
    """End processes, by force where they do not leave in time. Blocks for at most twice the patience."""
    deadline = time.monotonic() + patience
    for process in filter(alive, processes):
        process.terminate()
    _, left = psutil.wait_procs(processes, timeout=max(0.0, deadline - time.monotonic()))
    for process in left:
        log.warning("vLLM's process %d did not leave in time and was killed", process.pid)
        process.kill()
    psutil.wait_procs(left, timeout=patience)
