"""Names of what a rank is at, for profilers: `with span("forward"): …`.

    Nsight Systems, any NVTX tool   ranges of the domain `cosmos`, pushed and popped in the thread that works
    the torch profiler              the same names, while `policy_worker.training.profiles` records

Off, a range costs a quarter of a microsecond; torch's own costs five, so it is entered during a profile alone.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from schema.util.nvtx_domain import ATTACHED, DOMAIN, attributes

_recording = False


def record(on: bool) -> None:
    """Whether ranges are the torch profiler's, too."""
    global _recording  # noqa: PLW0603 - one profiler at a time serves a whole process
    _recording = on


class span:  # noqa: N801 - used like a function
    """A range around a block."""

    __slots__ = ("_function", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if ATTACHED:
            DOMAIN.push_range(attributes(self._name))
        self._function = record_function(self._name) if _recording else None
        if self._function is not None:
            self._function.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._function is not None:
            self._function.__exit__(*error)
        if ATTACHED:
            DOMAIN.pop_range()
