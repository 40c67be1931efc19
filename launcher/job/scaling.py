"""Obeys the controller's number of rollout replicas: starts those that there is room for, drains what is too many.

    GET /v1/autoscale ─▶ desired − those that joined from elsewhere ─▶ changes() ─┬─▶ launch
                                                                                 └─▶ drain, or end what still boots

While the controller does not answer nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from controller.client import ControllerError
from controller.client import calls as api
from launcher.job.controller_link import ControllerLink
from launcher.plan.placement import PlacedReplica
from launcher.processes.supervisor import Supervisor
from launcher.restarts import Role
from schema.wire.messages import ReplicaInfo

log = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds between looks; decisions are `autoscale.interval` apart."""


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """Names to start, and to end."""

    start: Sequence[str] = ()
    end: Sequence[str] = ()


def changes(
    desired: int, names: Sequence[str], running: Collection[str], leaving: Collection[str], leases: Mapping[str, int]
) -> ReplicaChange:
    """Choose what to start and to end for `desired` replicas of ours. Pure.

    names: all that there is room for, those of the start first. running: whose processes are up or about to be.
    leaving: of these, those that were asked to leave. leases: groups of each that is registered.

    Those that have not registered go first, then those of the fewest groups, the last ones first.
    """
    staying = [name for name in names if name in running and name not in leaving]
    free = [name for name in names if name not in running]
    order = sorted(staying, key=lambda name: (leases.get(name, -1), -names.index(name)))
    return ReplicaChange(free[: max(0, desired - len(staying))], order[: max(0, len(staying) - desired)])


class LocalScaling:
    """Follows the number for one start of a job. replicas: rollout replicas that there is room for."""

    def __init__(
        self,
        replicas: Sequence[PlacedReplica],
        link: ControllerLink,
        supervisor: Supervisor,
        event: Callable[[str], None],
    ) -> None:
        self._replicas = {replica.name: replica for replica in replicas if replica.role is Role.ROLLOUT}
        self._link, self._supervisor, self._event = link, supervisor, event
        self.leaving: set[str] = set()
        """Replicas that were asked to leave, and have not left yet."""
        self._short = 0
        self.over = False
        """Whether the job is ending: nothing is started any more."""

    async def follow(self) -> None:
        """For as long as the job runs, where it starts rollout replicas itself."""
        while self._replicas and not self.over:
            try:
                await self.look()
            except ControllerError as error:
                log.debug("the number of replicas is not known: %s", error)
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Ask for the number, and do what it takes. Raises `ControllerError`."""
        status = await self._link.ask(api.autoscale())
        if status.final:
            return
        infos = [info for info in await self._link.ask(api.replicas()) if info.role == "rollout"]
        present = {info.name: info for info in infos if info.state in ("live", "draining")}
        foreign = sum(name not in self._replicas for name in present)
        running = {kept.replica.name for kept in self._supervisor.running(self._replicas)}
        self.leaving &= running
        leases = {name: info.leases for name, info in present.items()}
        if self.over:
            return
        change = changes(status.desired - foreign, [*self._replicas], running, self.leaving, leases)
        if change.start or change.end:
            self._event(f"autoscale: {status.desired} rollout replicas are needed ({status.reason})")
        for name in change.start:
            self._supervisor.launch(self._replicas[name])
        for name in change.end:
            await self._end(name, present.get(name))
        for name in self.leaving.difference(change.end):  # one that crashed meanwhile is there again
            if name in present and present[name].state == "live":
                await self._end(name, present[name])
        self._say_short(status.desired - foreign - len(running | {*change.start}) + len(self.leaving))

    async def _end(self, name: str, info: ReplicaInfo | None) -> None:
        self.leaving.add(name)
        if info is None:  # it boots, and holds nothing
            self._event(f"{name} is ended before it has registered")
            await self._supervisor.stop([name])
        else:
            self._event(f"{name} is asked to leave")
            await self._link.ask(api.drain(info.replica_id))

    def _say_short(self, short: int) -> None:
        if short > 0 and short != self._short:
            self._event(
                f"{short} rollout replicas are missing: all devices are taken (cosmos-launch join brings others)"
            )
        self._short = max(0, short)
