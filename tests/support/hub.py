"""A server that answers what the Hugging Face client asks when it uploads, and has files of models to download."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE

TOKEN = "hf_test_token_of_no_use"
_OF_TOKENIZER = {
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "special_tokens_map.json",
    "added_tokens.json",
}


def fetched(cache: Path) -> set[str]:
    """Names of the JSON files and weights below a cache of the hub's client, without those of tokenizers."""
    names = {path.name for path in cache.rglob("*") if path.suffix in (".json", ".safetensors")}
    return names - _OF_TOKENIZER


def refused_worker(hub: Hub, module: str, cache: Path, **job: str) -> str:
    """What `python -m MODULE` writes that ends with exit code 2 once it has asked this hub.

    Not a fork: the hub's client reads its environment when it is imported.
    """
    environment = {**os.environ, **hub.environment, "HF_HOME": str(cache), **job}
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert fetched(cache) == {"config.json", "generation_config.json"}
    return done.stderr


@dataclass
class Hub:
    """What the server has been given."""

    url: str = ""
    repositories: dict[str, bool] = field(default_factory=dict)
    """Name, and whether it was made private."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    """Blobs that were put, repeated ones too."""
    models: dict[str, Path] = field(default_factory=dict)
    """Directories whose files can be downloaded, by name."""
    fail_next: list[int] = field(default_factory=list)
    """Status codes for the next commits."""

    @property
    def environment(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, value: Any = None) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _known(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._body()
        self._answer(401, {"error": "Invalid username or password."})
        return False

    def do_HEAD(self) -> None:
        self.do_GET()

    def _file(self) -> None:
        name, _, rest = self.path.removeprefix("/").partition("/resolve/")
        folder = self.hub.models.get(name)
        path = None if folder is None else folder / rest.partition("/")[2]
        self.send_response(200 if path is not None and path.is_file() else 404)
        body = path.read_bytes() if path is not None and path.is_file() else b""
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Error-Code", "RepoNotFound" if folder is None else "EntryNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self._file()
        elif "/tree/" in self.path:
            files = {file["key"] for commit in self.hub.commits for file in commit["files"]}
            self._answer(200, [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in sorted(files)])
        elif self.path.endswith("/auth-check/write"):
            if self._known():
                self._answer(200, {})
        elif self.path.removeprefix("/api/models/") in self.hub.repositories:
            self._answer(200, {"id": self.path, "sha": "0" * 40, "siblings": [], "tags": []})
        else:
            self._answer(404, {"error": "Repository not found"})

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.rpartition("/")[2]] = self._body()
        self.hub.sent += 1
        self._answer(200)

    def do_POST(self) -> None:
        if not self._known():
            return
        body = self._body()
        if self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif "/preupload/" in self.path:
            self._answer(200, {"files": [self._mode(file) for file in json.loads(body)["files"]]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [self._object(one) for one in json.loads(body)["objects"]]
            self._answer(200, {"transfer": "basic", "objects": objects})
        else:
            self._commit(body)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] == "others":
            self._answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        elif name in self.hub.repositories:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        else:
            self.hub.repositories[name] = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            self._answer(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        large = file["path"].endswith(".safetensors")
        return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}

    def _object(self, wanted: dict[str, Any]) -> dict[str, Any]:
        found = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] not in self.hub.blobs:
            found["actions"] = {"upload": {"href": f"{self.hub.url}/blobs/{wanted['oid']}"}}
        return found

    def _commit(self, body: bytes) -> None:
        if self.hub.fail_next:
            self._answer(self.hub.fail_next.pop(0), {"error": "not now"})
            return
        lines = [json.loads(line) for line in body.decode().splitlines()]
        files = []
        for line in lines:
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                files.append({"key": line["value"]["path"], "content": content})
            elif line["key"] == "lfsFile":
                files.append({"key": line["value"]["path"], "content": self.hub.blobs[line["value"]["oid"]]})
        deleted = [line["value"]["path"] for line in lines if line["key"] == "deletedFile"]
        header = next(line["value"] for line in lines if line["key"] == "header")
        self.hub.commits.append({"summary": header["summary"], "files": files, "deleted": deleted})
        self._answer(200, {"commitUrl": f"{self.hub.url}/me/model/commit/{'1' * 40}", "commitOid": "1" * 40})


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A server on a free port, ended at the end."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
