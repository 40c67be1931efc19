"""One way to run a machine's share of a job: the processes that the configuration gives it, until they have left.

    started as                its share                                hosts               restarted by   ends with
    cosmos-launch             all replicas (`plan.placement`)          here, on its nodes  a supervisor   the job
    … --head, not the head    what the head orders (`nodes.orders`)    here                the head       the job
    cosmos-launch join        one replica (`placement.joined`)         here                a supervisor   its replica
    cosmos-launch pod         the ranks of one pod (`plan.pods`)       the pod             the platform   its ranks
    an evaluation, a replay   their steps, one after the other         here                nobody         the last one

A host starts processes (`processes.host`, `nodes.head`, `pods.children`), a `Supervisor` cares for replicas over
hosts and asks its observer what each end means, and `attended` waits for the share and for signals. The first signal
asks the share to leave in order. Slurm and users start the same commands; a target differs in what restarts a share.
A node has no supervisor: it is the head's hand, and the head has one already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from launcher.plan.placement import PlacedReplica
from launcher.processes.supervisor import Supervisor

POLL = 0.5
"""Seconds between two looks while something is waited for."""


async def attended(
    work: Awaitable[Any], interrupts: asyncio.Queue[int], look: Callable[[], Any] = bool, every: float = POLL
) -> int | None:
    """Wait until `work` is done or a signal arrives; the signal, or None.

    look: is called every so many seconds; something true ends the wait. Unfinished work is cancelled, and gets the
    time that it takes to clean up.
    """
    waits = awaited, signalled = asyncio.ensure_future(work), asyncio.ensure_future(interrupts.get())
    try:
        while not (awaited.done() or signalled.done()):
            await asyncio.wait(waits, timeout=every, return_when=asyncio.FIRST_COMPLETED)
            if look():
                break
        return signalled.result() if signalled.done() else None
    finally:
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)


async def until_left(
    supervisor: Supervisor,
    replica: PlacedReplica,
    interrupts: asyncio.Queue[int],
    leaving: Callable[[int | None], None],
    look: Callable[[], Any] = bool,
    every: float = POLL,
) -> int | None:
    """Run one replica until it has left for good, `look` is true or a signal arrives; the signal, or None.

    In the latter cases `leaving` is called, with the signal if there is one, and the replica is asked to leave; the
    next signal kills it. No process is left behind.
    """
    kept = supervisor.launch(replica)
    try:
        number = await attended(kept.done.wait(), interrupts, look, every)
        if not kept.done.is_set():
            leaving(number)
            await attended(supervisor.stop([replica.name]), interrupts, lambda: look() and None, every)
        return number
    finally:
        await supervisor.kill_all()
