"""Where the ranks of a replica meet: rank 0 opens a store on a port that its own machine picks, and the controller
tells the others. Nobody chooses a port of another machine, and a new start of the replica is another meeting.

    rank 0    listen ─▶ announce, until all are there ─┐
    others    ask the controller ─▶ can it be reached? ┴─▶ store
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from controller.client import calls as api
from policy_worker.errors import RendezvousError
from policy_worker.process import Environment, RankEnvironment, ShutdownRequest
from policy_worker.session import Caller, LeaveRequestedError
from schema.wire import messages as m

log = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds for all ranks to come: on the slowest machine torch is imported in the meantime."""
REACH = 30.0
"""Seconds of attempts to connect to rank 0, which listens already."""
POLL = 3.0
"""Seconds: of one long-poll, and between two announcements."""
_ARRIVED, _SIOCGIFADDR = "arrived", 0x8915


def meet(
    ranks: RankEnvironment,
    environment: Environment,
    shutdown: ShutdownRequest,
    patience: float | None = None,
    over: Callable[[], str] = lambda: "",
) -> dist.Store:
    """The store in which the ranks find each other, once all of them are there.

    patience: seconds for them to come; None: `PATIENCE`. over: why nobody waits for them any more; "": all do.

    Raises `RendezvousError`: some did not come, or this one cannot reach rank 0; `LeaveRequestedError`,
    `ControllerLost`, `Refused`: see `Caller.call`."""
    caller = Caller(environment, shutdown)
    if (name := interface_of(ranks.address)) is not None:
        # Else gloo takes the address of the machine's name, which is often the loopback one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    try:
        seconds = PATIENCE if patience is None else patience
        return (_listen if ranks.rank == 0 else _connect)(ranks, caller, seconds, over)
    finally:
        caller.close()


def _listen(ranks: RankEnvironment, caller: Caller, patience: float, over: Callable[[], str]) -> dist.Store:
    family = socket.AF_INET6 if ":" in ranks.address else socket.AF_INET
    listener = socket.create_server((ranks.address, 0), family=family, backlog=ranks.world)
    port = int(listener.getsockname()[1])
    # On this address alone, which is the loopback one where all ranks are here.
    store = dist.TCPStore(
        ranks.address, port, ranks.world, is_master=True, wait_for_workers=False,
        timeout=timedelta(seconds=patience), master_listen_fd=listener.detach(),
    )  # fmt: skip
    meeting = m.Meeting(address=ranks.address, port=port, host=socket.gethostname())
    give_up = time.monotonic() + patience
    while True:
        caller.call(api.announce(ranks.meeting, meeting))
        again = time.monotonic() + POLL
        while time.monotonic() < again:
            if store.add(_ARRIVED, 0) == ranks.world - 1:
                return store
            _check(caller.shutdown, over)
            time.sleep(0.02)
        if time.monotonic() >= give_up:
            arrived = store.add(_ARRIVED, 0) + 1
            raise RendezvousError(
                f"{arrived} of {ranks.world} ranks came to {ranks.address}:{port} in {patience:g} s"
            )


def _connect(ranks: RankEnvironment, caller: Caller, patience: float, over: Callable[[], str]) -> dist.Store:
    give_up = time.monotonic() + patience
    while (meeting := caller.call(api.find_meeting(ranks.meeting, POLL))) is None:
        _check(caller.shutdown, over)
        if time.monotonic() >= give_up:
            raise RendezvousError(f"rank 0 did not come in {patience:g} s")
    log.info("rank %d of %d joins %s:%d (%s)", ranks.rank, ranks.world, meeting.address, meeting.port, meeting.host)
    _reach(meeting, caller.shutdown)
    store = dist.TCPStore(
        meeting.address, meeting.port, ranks.world, is_master=False, timeout=timedelta(seconds=patience)
    )
    store.add(_ARRIVED, 1)
    return store


def _reach(meeting: m.Meeting, shutdown: ShutdownRequest) -> None:
    """Whether rank 0's machine lets us in: torch itself would wait for minutes and name no reason."""
    give_up = time.monotonic() + REACH
    while True:
        _check(shutdown)
        try:
            socket.create_connection((meeting.address, meeting.port), timeout=POLL).close()
        except OSError as error:
            if time.monotonic() < give_up:
                time.sleep(0.2)
                continue
            raise RendezvousError(
                f"{socket.gethostname()} cannot reach rank 0 on {meeting.host} at {meeting.address}:{meeting.port} "
                f"({error}): open the ports between these machines, which the ranks choose freely, or start every "
                f"machine with an address that the others reach"
            ) from None
        return


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this machine; None: none has (by SIOCGIFADDR, or if_inet6)."""
    if ":" in address:
        try:
            lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        except OSError:
            return None
        wanted = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        return next((line[-1] for line in lines if line[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def _check(shutdown: ShutdownRequest, over: Callable[[], str] = lambda: "") -> None:
    if shutdown:
        raise LeaveRequestedError(shutdown.reason)
    if reason := over():
        raise RendezvousError(f"the ranks are not waited for any more: {reason}")
