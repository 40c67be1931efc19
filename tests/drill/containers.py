"""Runs the containers of rendered manifests as processes: their own commands, with the environment that they name.

What a kubelet does is done here by hand: Secrets and fields of the pod become variables, the ConfigMap a file. The
claim is a directory of this machine, which `kubernetes.volume_path` names; only addresses and two folders are others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from controller.client import Client, ControllerError
from launcher.plan.addresses import free_port
from launcher.plan.redis_server import valkey_binary
from launcher.targets.manifests.base import CONFIG_FOLDER, SECRET_FOLDER
from tests.e2e.program import COMMAND, LONG, ROOT
from tests.support.waiting import PATIENCE, until


@dataclass
class Container:
    """A process of a pod. message: its termination message."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    termination: Path

    @property
    def message(self) -> str:
        return self.termination.read_text()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(LONG)


@dataclass
class Cluster:
    """Manifests of a folder, and the containers of them that run."""

    folder: Path
    manifests: Path
    containers: list[Container] = field(default_factory=list)
    objects: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.objects = [
            one for path in (self.manifests / "base").glob("*.yaml") for one in yaml.safe_load_all(path.read_text())
        ]
        self.secrets = {one["metadata"]["name"]: one["stringData"] for one in self._of("Secret")}
        (config,) = self._of("ConfigMap")
        self.name = config["metadata"]["name"].removesuffix("-config")
        self.config = self.folder / "config.json"
        self.config.write_text(config["data"]["config.json"])
        (service,) = (one for one in self._of("Service") if one["metadata"]["name"].endswith("-controller"))
        self.port = service["spec"]["ports"][0]["port"]
        self.redis_port = free_port("127.0.0.1")

    def _of(self, kind: str) -> list[Any]:
        return [one for one in self.objects if one["kind"] == kind]

    def _container(self, component: str) -> Any:
        for one in self.objects:
            if one["metadata"].get("labels", {}).get("app.kubernetes.io/component") == component:
                if one["kind"] == "JobSet":
                    (job,) = one["spec"]["replicatedJobs"]
                    return job["template"]["spec"]["template"]["spec"]["containers"][0]
                if one["kind"] in ("Deployment", "StatefulSet"):
                    return one["spec"]["template"]["spec"]["containers"][0]
        raise KeyError(component)

    def start(
        self, component: str, number: int | str = 0, given: Mapping[str, str] | None = None, **fields: str
    ) -> Container:
        """A container of a pod, of an Indexed Job the one with this number. given: variables that the platform adds.
        fields: further ones of the pod."""
        container, name = self._container(component), f"{self.name}-{component}-{number}"
        known = {"metadata.name": name, "status.podIP": "127.0.0.1", **fields}
        env = {entry["name"]: self._value(entry, known) for entry in container["env"]}
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        termination, log = folder / "termination-log", folder / "log"
        termination.touch()
        paths = {CONFIG_FOLDER: str(self.folder), SECRET_FOLDER: str(folder)}
        argv = [COMMAND if word == "cosmos-launch" else _mapped(word, paths) for word in container["command"]]
        if component == "policy":
            env["JOB_COMPLETION_INDEX"] = str(number)
        env |= {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "COSMOS_TERMINATION_LOG": str(termination),
            **(given or {}),
        }
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        started = Container(name, process, log, termination)
        self.containers.append(started)
        return started

    def _value(self, entry: Any, known: dict[str, str]) -> str:
        if "value" in entry:
            return self._near(entry["value"])
        source = entry["valueFrom"]
        if "secretKeyRef" in source:
            return self._near(self.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]])
        return known[source["fieldRef"]["fieldPath"]]

    def _near(self, text: str) -> str:
        """Addresses of Services as this machine has them."""
        text = text.replace(f"{self.name}-redis:6379", f"127.0.0.1:{self.redis_port}")
        return text.replace(f"{self.name}-controller.default.svc", "127.0.0.1")

    def start_redis(self) -> None:
        """The job's own server, with its own configuration."""
        conf = self.secrets[f"{self.name}-redis"]["valkey.conf"].replace("/data", str(self.folder))
        path = self.folder / "valkey.conf"
        path.write_text(conf.replace("port 6379", f"port {self.redis_port}\nbind 127.0.0.1"))
        with (self.folder / "redis.log").open("wb") as out:
            process = subprocess.Popen([str(valkey_binary()), str(path)], stdout=out, stderr=out)
        self.containers.append(Container("redis", process, self.folder / "redis.log", path))

    @contextmanager
    def client(self, role: str = "user") -> Iterator[Client]:
        with Client(f"http://127.0.0.1:{self.port}", self.secrets[f"{self.name}-tokens"][role]) as client:
            yield client

    def until(self, what: str, call: Any, holds: Any) -> Any:
        """Ask the controller until an answer holds."""

        def look() -> Any:
            ends = {one.name: one.process.poll() for one in self.containers}
            assert not any(code for code in ends.values() if code != -signal.SIGKILL), self.said()
            try:
                with self.client() as client:
                    answer = client.send(call)
            except ControllerError:
                return None
            return answer if holds(answer) else None

        return until(look, f"{what}; logs in {self.folder}", LONG)

    def said(self) -> str:
        return "\n".join(f"{one.name}: {one.log.read_text()[-1500:]}" for one in self.containers)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for one in reversed(self.containers):
            if one.process.poll() is None:
                one.process.terminate()
        for one in self.containers:
            try:
                one.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
        if sys.exc_info()[0] is not None:
            print(self.said())


def _mapped(word: str, paths: dict[str, str]) -> str:
    for inside, here in paths.items():
        if word.startswith(inside):
            return here + word.removeprefix(inside)
    return word
