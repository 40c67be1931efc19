"""The scale of one Deployment or LeaderWorkerSet, and its pods, over HTTPS as the API server of a cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import kubernetes_validate

from tests.support.certificates import make_certificates

PATHS = (
    "/apis/apps/v1/namespaces/training/deployments/run-rollout/scale",
    "/apis/leaderworkerset.x-k8s.io/v1/namespaces/training/leaderworkersets/run-rollout/scale",
)
PODS = "/api/v1/namespaces/training/pods"
LABELS = {"app": "run", "part": "rollout"}
TOKEN = "token-of-the-service-account"


class ScaleApi:
    """The number of replicas, and what was asked of it. Answers are what Kubernetes' schema says they are."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.calls: list[tuple[str, int]] = []
        self.token = TOKEN
        self.pods: dict[str, dict[str, str]] = {}
        """Annotations by name."""
        self.patched: list[str] = []
        self.page = 2

    def scale(self, replicas: int) -> dict[str, Any]:
        scale = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": "run-rollout", "namespace": "training", "resourceVersion": str(len(self.calls))},
            "spec": {"replicas": replicas} if replicas else {},
            "status": {"replicas": replicas, "selector": "app=run"},
        }
        kubernetes_validate.validate(scale, "1.34", strict=True)
        return scale

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        if headers["authorization"] != f"Bearer {self.token}":
            return _failure(401, "Unauthorized")
        path, _, query = path.partition("?")
        if path == PODS:
            return self._list(dict(parse_qsl(query)))
        if path.startswith(f"{PODS}/") and method == "PATCH":
            return self._annotate(path.rpartition("/")[2], json.loads(body))
        if path not in PATHS:
            return _failure(403, f"deployments.apps is forbidden: cannot {method} {path}")
        replicas = self.replicas  # read once: a test changes it while this answers
        if method == "PATCH":
            assert headers["content-type"] == "application/merge-patch+json"
            patch = json.loads(body)
            assert list(patch) == ["spec"]
            kubernetes_validate.validate({**self.scale(replicas), **patch}, "1.34", strict=True)
            self.replicas = replicas = patch["spec"]["replicas"]
        self.calls.append((method, replicas))
        return 200, self.scale(replicas)

    def _list(self, query: dict[str, str]) -> tuple[int, dict[str, Any]]:
        assert query["labelSelector"] == ",".join(f"{key}={value}" for key, value in LABELS.items())
        begin = int(query.get("continue", 0))
        names = sorted(self.pods)[begin : begin + self.page]
        more = begin + self.page
        meta = {"resourceVersion": "1"} | ({"continue": str(more)} if more < len(self.pods) else {})
        items = [self._pod(name) for name in names]
        return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": meta, "items": items}

    def _annotate(self, name: str, patch: Any) -> tuple[int, dict[str, Any]]:
        assert list(patch) == ["metadata"]
        assert list(patch["metadata"]) == ["annotations"]
        self.pods[name] = self.pods[name] | patch["metadata"]["annotations"]
        self.patched.append(name)
        return 200, self._pod(name)

    def _pod(self, name: str) -> dict[str, Any]:
        meta = {"name": name, "namespace": "training", "labels": LABELS}
        if self.pods[name]:
            meta["annotations"] = self.pods[name]
        container = {"name": "rollout", "image": "image:1"}
        found = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [container]}}
        kubernetes_validate.validate(found, "1.34", strict=True)
        return found


def _failure(code: int, message: str) -> tuple[int, dict[str, Any]]:
    """A Status, which is not a kind that a manifest may have: nothing checks it."""
    return code, {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "code": code}


@contextmanager
def scale_api(folder: Path, replicas: int) -> Iterator[tuple[ScaleApi, dict[str, str]]]:
    """A server for the block, the files of a service account in `folder`, and the variables of a pod."""
    api, certificates = ScaleApi(replicas), make_certificates(folder / "certificates")

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            code, answer = api.answer(self.command, self.path, self.headers, body)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = _do

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = certificates.server_context().wrap_socket(server.socket, server_side=True)
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "ca.crt").write_bytes(certificates.ca.read_bytes())
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.server_port)}
        yield api, address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
