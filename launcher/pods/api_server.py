"""The API server of the cluster, for a pod with a service account."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import LaunchError

if TYPE_CHECKING:
    import httpx

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT = 10.0
"""Seconds for one call."""


class ClusterError(Exception):
    """The cluster does not answer, or refuses; the message says what."""


@dataclass(frozen=True)
class ApiServer:
    """account: folder with token and ca.crt; the token is read anew each time, since it is replaced."""

    url: str
    account: Path

    @classmethod
    def of_this_pod(cls, account: Path) -> ApiServer:
        """Raises LaunchError: this runs outside a cluster."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host or not port.isdigit():
            raise LaunchError(
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: this runs in a pod of the cluster",
                'write kubernetes.scaler = "command", and render the manifests',
            )
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", account)

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
        return httpx.AsyncClient(base_url=self.url, verify=trusted, timeout=TIMEOUT, trust_env=False)

    async def call(
        self,
        http: httpx.AsyncClient,
        path: str,
        patch: dict[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Read the object at a path, after a merge patch of it if there is one. Raises ClusterError."""
        import httpx

        method = "GET" if patch is None else "PATCH"
        try:
            headers = {"authorization": f"Bearer {(self.account / 'token').read_text().strip()}"}
            if patch is not None:
                headers["content-type"] = "application/merge-patch+json"
            answer = await http.request(method, path, json=patch, params=dict(params or {}), headers=headers)
            if answer.is_error:
                raise ClusterError(f"{method} {path}: HTTP {answer.status_code}: {_message(answer)}")
            object_ = answer.json()
        except (httpx.HTTPError, OSError) as error:
            raise ClusterError(f"{method} {self.url}{path}: {error or type(error).__name__}") from None
        except ValueError:
            object_ = None
        if not isinstance(object_, dict):
            raise ClusterError(f"{method} {path}: an object was expected")
        return object_


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
