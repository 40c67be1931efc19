"""Where the time of an optimizer step goes, and where the host waits for the device.

Parts are measured from outside of the product: what it calls for attention and log-probs is wrapped, and the step
marks its own phases. On a GPU a part is two events, which are read when the step has ended, so that measuring waits
for nothing; on a CPU it is a clock.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AttentionInterface

from benchmarks.harness import ROOT
from policy_worker.model import attention, model

Result = TypeVar("Result")
WAITS = "called a synchronizing CUDA operation"
"""What PyTorch warns of where the host waits for the device, in the mode that reports it."""
NAMED = 3
"""Places that are named, of those where the host waits."""
PHASES = ("arrival", "forward", "backward", "optimizer")
"""Parts that together are a whole step; attention and log-probs are within forward."""


class Parts:
    """A stopwatch for named parts of a step. It measures within `recording` alone."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu, self._marks = on_gpu, list[tuple[str, Any, Any]]()
        self._recording, self._open = False, list[str]()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure what is within as part of this name. A part within backward is backward's, since layers that are
        recomputed call the attention again there."""
        if not self._recording or "backward" in self._open:
            yield
            return
        self._open.append(name)
        began = self._mark()
        try:
            yield
        finally:
            self._marks.append((name, began, self._mark()))
            self._open.pop()

    def seconds(self, step: Callable[[], object]) -> dict[str, float]:
        """Take a step; the seconds of its parts, of `other forward`, and of the whole as `step`."""
        self._marks.clear()
        self._recording = True
        try:
            with self.part("step"):
                step()
        finally:
            self._recording = False
        if self._on_gpu:
            torch.cuda.synchronize()
        sums = dict.fromkeys((*PHASES, "attention", "log-probs", "step"), 0.0)
        for name, began, ended in self._marks:
            sums[name] += self._between(began, ended)
        sums["other forward"] = sums.pop("forward") - sums["attention"] - sums["log-probs"]
        return sums

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1e3 if self._on_gpu else float(ended - began)

    @contextmanager
    def within_models(self) -> Iterator[None]:
        """Measure the attention and the log-probs of models that are made or computed meanwhile."""
        head: Any = model  # the module as what computes log-probs, by a name that it imports
        attend, logprobs = attention.attend, head.token_logprobs
        attention.attend = self._wrapped("attention", attend)
        head.token_logprobs = self._wrapped("log-probs", logprobs)
        AttentionInterface.register(attention.NAME, attention.attend)
        try:
            yield
        finally:
            attention.attend, head.token_logprobs = attend, logprobs
            AttentionInterface.register(attention.NAME, attend)

    def _wrapped(self, name: str, function: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(function)
        def measured(*arguments: Any, **named: Any) -> Result:
            with self.part(name):
                return function(*arguments, **named)

        return measured


# ---- where the host waits ---------------------------------------------------------------------------------------


def waits(step: Callable[[], object], on_gpu: bool) -> Counter[str]:
    """Take a step; how often the host waited for the device, by the line of this project that did.

    On a CPU nothing waits, but for what a test lets warn."""
    sites: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if WAITS in str(message):
            sites[_site()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    return sites


def _site() -> str:
    """The innermost line of this project that is running, apart from this module."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def in_words(sites: Counter[str]) -> str:
    """The places that wait most often."""
    return ", ".join(f"{count} at {site}" for site, count in sites.most_common(NAMED)) or "nowhere"
