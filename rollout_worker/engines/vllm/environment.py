"""What vLLM's processes find in their environment, and that they end when we do.

vLLM starts its processes itself and hands them our environment, so `boot_environment` is laid over it while
it boots and taken away afterwards. `follow_parent` runs inside of those processes.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

PARENT = "COSMOS_VLLM_PARENT"
"""Process id of the rollout worker, for the processes that vLLM starts."""

MODULES = "COSMOS_VLLM_MODULES"
"""Modules, with commas, that each of those processes imports before it loads the model."""

_SECRETS = ("COSMOS_TOKEN", "COSMOS_REPLICA_SECRET", "COSMOS_CONTROLLER_URL")

_EXIT_ORPHANED = 1
_POLL_SECONDS = 0.5


def boot_environment(parent: int, modules: Sequence[str] = ()) -> dict[str, str | None]:
    """Variables to set (or, with None, to remove) while vLLM starts its processes."""
    return {
        PARENT: str(parent),
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
