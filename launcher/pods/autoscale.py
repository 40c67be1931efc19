"""`cosmos-launch autoscale`: the number of rollout replicas follows the controller, for clusters without KEDA.

    GET /v1/autoscale ─▶ a number within its limits ─▶ GET, PATCH …/deployments/NAME/scale, …/leaderworkersets/…
    GET /v1/replicas  ─▶ seconds of work in hand    ─▶ GET, PATCH …/pods (`costs`)

While the controller cannot be reached, or says what it may not, the number stays. It runs in the cluster, as a
service account that may read and change the scale of this one object, and for costs the pods of the namespace.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

import httpx
import typer

from controller.client import AsyncClient, ControllerError, Unusable
from controller.client import calls as api
from launcher.errors import LaunchError
from launcher.pods.api_server import ApiServer, ClusterError
from launcher.pods.costs import Costs
from schema.wire.messages.autoscale import AutoscaleStatus

GROUPS = "leaderworkerset.x-k8s.io/v1"
COSTS_EVERY = 20.0
"""Seconds between looks at deletion costs, which take a list of all replicas."""


@dataclass(frozen=True)
class Scale:
    """The scale of one object. path: of the object, behind /apis/."""

    server: ApiServer
    path: str

    async def read(self, http: httpx.AsyncClient) -> int:
        """The number that is wanted now. Raises ClusterError."""
        return await self._call(http, None)

    async def write(self, http: httpx.AsyncClient, replicas: int) -> int:
        """Want another number; the one that the cluster took. Raises ClusterError."""
        return await self._call(http, {"spec": {"replicas": replicas}})

    async def _call(self, http: httpx.AsyncClient, patch: dict[str, object] | None) -> int:
        path = f"/apis/{self.path}/scale"
        answer = await self.server.call(http, path, patch)
        try:
            return int(answer["spec"].get("replicas", 0))  # zero is left out
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ClusterError(f"{path}: the answer is not a Scale") from None


def wanted(status: AutoscaleStatus) -> tuple[int | None, str]:
    """The number that the controller asks for; None, and why, where it may not be obeyed. Pure."""
    if status.final and status.desired == 0:
        return 0, status.reason
    if not status.minimum <= status.desired <= status.maximum:
        limits = f"{status.minimum} to {status.maximum}"
        return None, f"the controller asks for {status.desired} replicas, which is not within {limits}"
    return status.desired, status.reason


async def until_a_signal(follower: ScaleFollower, url: str, token: str, interval: float) -> None:
    """Raises LaunchError."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    following = asyncio.create_task(follower.follow(url, token, interval))
    stopped: asyncio.Task[bool] = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    finally:
        for task in (following, stopped):
            task.cancel()
        await asyncio.gather(following, stopped, return_exceptions=True)


@dataclass
class ScaleFollower:
    """scale, costs: what follows the controller. kept_at: monotonic time of the last look at the costs."""

    server: ApiServer
    scale: Scale | None
    costs: Costs | None
    kept_at: float = -COSTS_EVERY

    async def follow(self, url: str, token: str, interval: float) -> None:
        """Raises LaunchError."""
        reported = ""
        try:
            job = AsyncClient(url, token)
        except Unusable as error:
            raise LaunchError(f"--controller, COSMOS_TOKEN: {error}") from None
        async with self.server.client() as http, job:
            while True:
                try:
                    text = await self._look(http, job)
                except (ControllerError, ClusterError) as error:
                    text = f"{'the number stays' if self.scale else 'costs stay'}: {error}"
                if text and text != reported:
                    typer.echo(f"{time.strftime('%H:%M:%S')} {text}")
                reported = text or reported
                await asyncio.sleep(interval)

    async def _look(self, http: httpx.AsyncClient, job: AsyncClient) -> str:
        """Follow the controller's number; the change, in words. Raises ClusterError, ControllerError."""
        if self.scale is None:
            await self._keep_costs(http, job)
            return ""
        number, reason = wanted(await job.send(api.autoscale()))
        before = await self.scale.read(http)
        await self._keep_costs(http, job, at_once=number is not None and number < before)
        if number is None:
            return f"the number stays: {reason}"
        if before == number:
            return ""
        return f"{before} → {await self.scale.write(http, number)} replicas: {reason}"

    async def _keep_costs(self, http: httpx.AsyncClient, job: AsyncClient, at_once: bool = False) -> None:
        """Now and then, and before the number falls. Raises ClusterError, ControllerError."""
        if self.costs is None or not (at_once or time.monotonic() - self.kept_at >= COSTS_EVERY):
            return
        self.kept_at = time.monotonic()
        replicas = await job.send(api.replicas())
        await self.costs.keep(http, {info.name: info.work_s for info in replicas if info.state == "live"})
