"""Imports of large libraries: what they read of the environment, and without the garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DRIVER = Path("/dev/nvidiactl")


def wait_asleep() -> None:
    """On a machine without a GPU, let OpenMP's threads that wait for each other sleep, unless the environment says
    otherwise. Only counts before torch is imported.

    The processes of a job share cores, and a thread that spins keeps the one from running that it waits for: two
    processes of two threads each on two cores made 21 samples/s, and 384 where they sleep.
    """
    if not DRIVER.exists():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage inside: thousands of modules are created and none is garbage, yet the collector walks over
    all of them again and again. The trainer's imports, torch and transformers among them: 9.1 s of CPU time become
    7.5 s (medians of four interleaved pairs on a busy machine)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
