"""The signals that stop a job, from the first moment on.

Python makes of a Ctrl-C an exception that is raised wherever the program is just then. While a library is imported
that may be inside of a callback which drops it, and the Ctrl-C is lost: therefore it ends the program at once while
modules are imported, and once the run directory is taken signals are noted until the job's event loop handles them.

A shell without job control has its background jobs ignore SIGINT, and what is ignored stays so in every program that
they start. A SIGINT sent to the launcher is meant (`cosmos-launch stop` does, where no controller answers), so it is
taken however the launcher was started; and a signal with a handler has its default in each process of the job.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


def stop_signals() -> list[signal.Signals]:
    """Signals that stop the job. Under `nohup` the end of the terminal is not one of them."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def take_interrupts() -> None:
    """Undo what a shell did that started us in the background: see the module's docstring."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Inside, a Ctrl-C ends the program without an exception: nothing has been done yet."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ended_by_exit() -> Iterator[None]:
    """Inside, each signal that stops a job raises, as SIGINT does: what is open is closed, steps are killed."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in stop_signals() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def note_signals() -> list[int]:
    """From now on signals that stop the job do nothing but appear, in order, in the list that is returned."""
    noted: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda number, _: noted.append(number))
    return noted


@contextmanager
def queued_signals(
    on_user_signal: Callable[[], object] | None = None, early: Sequence[int] = ()
) -> Iterator[asyncio.Queue[int]]:
    """Inside, with an event loop, signals that stop the job do nothing but appear, in order, in the queue.

    on_user_signal: what SIGUSR1 does meanwhile. early: signals that came before this. The handlers that were there
    before are there again afterwards.
    """
    import asyncio  # not in the commands that have no loop

    loop, queue, numbers = asyncio.get_running_loop(), asyncio.Queue[int](), stop_signals()
    handlers: dict[int, Callable[[], object]] = {n: partial(queue.put_nowait, int(n)) for n in numbers}
    if on_user_signal is not None:
        handlers[signal.SIGUSR1] = on_user_signal
    before = {number: signal.getsignal(number) for number in handlers}
    for number in early:
        queue.put_nowait(number)
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield queue
    finally:
        for number, earlier in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, earlier)
