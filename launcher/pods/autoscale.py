"""`cosmos-launch autoscale`: the number of a Deployment's replicas follows the controller, for clusters without KEDA.

    GET /v1/autoscale ─▶ a number within its limits ─▶ GET, PATCH …/deployments/NAME/scale

While the controller cannot be reached, or says what it may not, the number stays. It runs in the cluster, as a
service account that may read and change the scale of this one Deployment.
"""

from __future__ import annotations

import os
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.errors import LaunchError
from launcher.processes.signals import ended_at_once
from launcher.restarts import EXIT_OK

if TYPE_CHECKING:
    import asyncio

    import httpx

    from schema.wire.messages.autoscale import AutoscaleStatus

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT = 10.0
"""Seconds for one call of the cluster."""


def autoscale(
    deployment: Annotated[
        str, typer.Option("--deployment", metavar="NAME", help="The Deployment of rollout pods.")
    ],
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="Where it is.")],
    controller: Annotated[
        str, typer.Option("--controller", metavar="URL", help="Of the job; COSMOS_TOKEN is any token of it.")
    ],
    interval: Annotated[
        float, typer.Option("--interval", min=0.05, metavar="SECONDS", help="Between two looks.")
    ] = 5.0,
    account: Annotated[
        Path, typer.Option("--account", metavar="DIR", help="With token and ca.crt of the service account.")
    ] = ACCOUNT,
) -> None:
    """Let a Deployment follow the number of rollout replicas that the controller asks for; SIGTERM ends it."""
    with ended_at_once():
        import asyncio

    token = os.environ.get("COSMOS_TOKEN", "")
    if not token:
        raise LaunchError("COSMOS_TOKEN is not set", "set it to the rollout token of the job")
    scale = Scale(_api_server(), account, namespace, deployment)
    asyncio.run(_follow(scale, controller, token, interval))
    raise typer.Exit(EXIT_OK)


def _api_server() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host or not port.isdigit():
        raise LaunchError(
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: this runs in a pod of the cluster",
            'write kubernetes.scaler = "command", and render the manifests',
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


class ScaleError(Exception):
    """The cluster does not say, or does not take, a number; the message says why."""


@dataclass(frozen=True)
class Scale:
    """The scale of one Deployment. account: see ACCOUNT; its token is read anew each time, since it is replaced."""

    server: str
    account: Path
    namespace: str
    deployment: str

    def client(self) -> httpx.AsyncClient:
        """Raises LaunchError: what belongs to the account is not there."""
        import httpx

        try:
            (self.account / "token").read_bytes()
            trusted = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        except OSError as error:
            raise LaunchError(
                f"{self.account} has no token and ca.crt of a service account: {error.strerror}",
                "give the pod a service account, with automountServiceAccountToken: true",
            ) from None
        return httpx.AsyncClient(base_url=self.server, verify=trusted, timeout=TIMEOUT, trust_env=False)

    async def read(self, http: httpx.AsyncClient) -> int:
        """The number that is wanted now. Raises ScaleError."""
        return await self._call(http, "GET", None)

    async def write(self, http: httpx.AsyncClient, replicas: int) -> int:
        """Want another number; the one that the cluster took. Raises ScaleError."""
        return await self._call(http, "PATCH", {"spec": {"replicas": replicas}})

    async def _call(self, http: httpx.AsyncClient, method: str, body: dict[str, object] | None) -> int:
        import httpx

        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{self.deployment}/scale"
        try:
            headers = {"authorization": f"Bearer {(self.account / 'token').read_text().strip()}"}
            if body is not None:
                headers["content-type"] = "application/merge-patch+json"
            answer = await http.request(method, path, json=body, headers=headers)
            if answer.is_error:
                raise ScaleError(f"{method} {path}: HTTP {answer.status_code}: {_message(answer)}")
            return int(answer.json()["spec"].get("replicas", 0))  # zero is left out
        except (httpx.HTTPError, OSError) as error:
            raise ScaleError(f"{method} {self.server}{path}: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ScaleError(f"{method} {path}: the answer is not a Scale") from None


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]


def wanted(status: AutoscaleStatus) -> tuple[int | None, str]:
    """The number that the controller asks for; None, and why, where it may not be obeyed. Pure."""
    if status.final and status.desired == 0:
        return 0, status.reason
    if not status.minimum <= status.desired <= status.maximum:
        limits = f"{status.minimum} to {status.maximum}"
        return None, f"the controller asks for {status.desired} replicas, which is not within {limits}"
    return status.desired, status.reason


async def _follow(scale: Scale, url: str, token: str, interval: float) -> None:
    """Until a signal comes. Raises LaunchError."""
    import asyncio
    import signal

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    following = asyncio.create_task(_keep_following(scale, url, token, interval))
    stopped: asyncio.Task[bool] = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
    finally:
        for task in (following, stopped):
            task.cancel()
        await asyncio.gather(following, stopped, return_exceptions=True)


async def _keep_following(scale: Scale, url: str, token: str, interval: float) -> None:
    import asyncio

    from controller.client import AsyncClient, ControllerError, Unusable
    from controller.client import calls as api

    said = ""
    try:
        job = AsyncClient(url, token)
    except Unusable as error:
        raise LaunchError(f"--controller, COSMOS_TOKEN: {error}") from None
    async with scale.client() as http, job:
        while True:
            try:
                text = await _once(scale, http, wanted(await job.send(api.autoscale())))
            except (ControllerError, ScaleError) as error:
                text = f"the number stays: {error}"
            if text and text != said:
                typer.echo(f"{time.strftime('%H:%M:%S')} {text}")
            said = text or said
            await asyncio.sleep(interval)


async def _once(scale: Scale, http: httpx.AsyncClient, asked: tuple[int | None, str]) -> str:
    """Let the Deployment have the number; what has changed, in words. Raises ScaleError."""
    number, reason = asked
    if number is None:
        return f"the number stays: {reason}"
    before = await scale.read(http)
    if before == number:
        return ""
    return f"{before} → {await scale.write(http, number)} replicas: {reason}"
