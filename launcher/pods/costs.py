"""Deletion costs of rollout pods: when their number falls, those with the least work in hand go first.

A cost is seconds of work that would be lost: how long a replica has had the groups that it holds, all together. It is
written again only when it is wrong by a factor of two, so that a cluster of thousands of pods gets few calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.pods.api_server import ApiServer, ClusterError

if TYPE_CHECKING:
    import httpx

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
MOST = 100
"""Pods that are changed at one look."""
PAGE = 500
LARGEST = 2**31 - 1


def changes(present: Mapping[str, int], work: Mapping[str, float]) -> dict[str, int]:
    """New costs of pods, of those that are most wrong. Pure.

    present: costs as they are, by the pod's name. work: seconds in hand of the replica of that name; an unknown
    one has none.
    """
    wrong = {}
    for name, cost in present.items():
        seconds = work.get(name, 0.0)
        if abs(seconds - cost) >= 1.0 and not cost / 2 <= seconds <= 2 * cost:
            wrong[name] = min(round(seconds), LARGEST)
    first = sorted(wrong, key=lambda name: abs(wrong[name] - present[name]), reverse=True)
    return {name: wrong[name] for name in first[:MOST]}


@dataclass(frozen=True)
class Costs:
    """The costs of the pods with these labels. selector: as `kubectl get --selector` takes it."""

    server: ApiServer
    namespace: str
    selector: str

    async def keep(self, http: httpx.AsyncClient, work: Mapping[str, float]) -> int:
        """Write what is wrong; how many. Raises ClusterError."""
        new = changes(await self._read(http), work)
        for name, cost in new.items():
            patch = {"metadata": {"annotations": {ANNOTATION: str(cost)}}}
            await self.server.call(http, f"{self._path}/{name}", patch)
        return len(new)

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    async def _read(self, http: httpx.AsyncClient) -> dict[str, int]:
        costs: dict[str, int] = {}
        page = {"labelSelector": self.selector, "limit": str(PAGE)}
        while True:
            answer = await self.server.call(http, self._path, params=page)
            try:
                for pod in answer["items"]:
                    text = (pod["metadata"].get("annotations") or {}).get(ANNOTATION, "0")
                    costs[pod["metadata"]["name"]] = int(text)
                page["continue"] = answer["metadata"].get("continue", "")
            except (KeyError, TypeError, ValueError, AttributeError):
                raise ClusterError(f"GET {self._path}: a list of pods was expected") from None
            if not page["continue"]:
                return costs
