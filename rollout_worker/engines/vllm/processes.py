"""The processes that vLLM starts below ours: found, watched and ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

from rollout_worker.engines.vllm.environment import PARENT

log = logging.getLogger(__name__)

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
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.pid not in before and _is_vllm(process)]


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
    found: set[Path] = set()
    for process in processes:
        try:
            found.update(Path(entry.path) for entry in process.memory_maps())
        except psutil.Error:
            continue
    return {path for path in found if path.match("/dev/shm/vllm_dist_*")}  # noqa: S108


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
