"""One pod: a container as a kubelet runs it, made of namespaces of this machine.

Its root is that of its image, or this machine's, as the lower layer of an overlay: what belongs to it is written
there first, then it is read-only. Its command has the user, the variables and the volumes of its manifest, no
capability, the network of its pod, and is process 1. On this machine's root Python and code are in their places.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launcher.plan.redis_server import valkey_binary

ROOT = Path(__file__).resolve().parents[2]
CODE = tuple(dict.fromkeys((str(ROOT), os.path.realpath(sys.prefix), sys.base_prefix, str(valkey_binary().parent))))
"""Folders that a container has from this machine, where volumes would hide them."""
PATH = f"{sys.prefix}/bin:{valkey_binary().parent}:/usr/local/bin:/usr/bin:/bin"
IMAGE_PATH = "/opt/cosmos/bin:/usr/bin:/bin"
"""Of the Dockerfiles."""
MACHINE = Path("/")
DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass
class Pod:
    """component: by its label. spec: of the pod. volumes: folder of this machine by name. hosts: of /etc/hosts.

    leaving: monotonic time at which it is killed, once it was told to leave.
    """

    name: str
    component: str
    node: str
    address: str
    namespace: str
    spec: Mapping[str, Any]
    environment: Mapping[str, str]
    volumes: Mapping[str, Path]
    hosts: str
    folder: Path
    image: Path = MACHINE
    born: float = field(default_factory=time.monotonic)
    leaving: float | None = None
    starts: int = 0
    ready: bool = False
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def container(self) -> Mapping[str, Any]:
        (one,) = self.spec["containers"]
        return dict(one)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def message(self) -> str:
        """Its termination message."""
        return (self.folder / "termination-log").read_text()

    def start(self) -> None:
        """Start the container, the first time or again."""
        self.starts += 1
        for name in ("layers", "root"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "termination-log").write_text("")
        (self.folder / "termination-log").chmod(0o666)
        (self.folder / "hosts").write_text(f"{self.hosts}{self.address} {self.name}\n")
        argv = ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--pid", "--uts"]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*argv, "--fork", "--kill-child", "sh", "-ec", self._script()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _script(self) -> str:
        here, root = shlex.quote(str(self.folder)), shlex.quote(str(self.folder / "root"))
        mounts = [(self.volumes[one["name"]], one["mountPath"]) for one in self.container["volumeMounts"]]
        code = CODE if self.image == MACHINE else ()
        places = [(str(source), place) for source, place in mounts] + [(path, path) for path in code]
        lines = [
            f"hostname {shlex.quote(self.name)}",
            f"mount -t tmpfs tmpfs {here}/layers",
            f"mkdir {here}/layers/upper {here}/layers/work",
            "mount -t overlay overlay -o "
            f"lowerdir={shlex.quote(str(self.image))},upperdir={here}/layers/upper,workdir={here}/layers/work {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /sys {root}/sys",
            f"mount -t tmpfs tmpfs {root}/dev",
            f"mkdir {root}/dev/shm",
            f"ln -s /proc/self/fd {root}/dev/fd",
            f"for one in {' '.join(DEVICES)} termination-log; do touch {root}/dev/$one; done",
            f"for one in {' '.join(DEVICES)}; do mount --bind /dev/$one {root}/dev/$one; done",
            f"mount --bind {here}/termination-log {root}/dev/termination-log",
            f"cp {here}/hosts {root}/etc/hosts",
        ]
        for source, place in places:
            inside = f"{root}{shlex.quote(place)}"
            lines += [f"mkdir -p {inside}", f"mount --bind {shlex.quote(source)} {inside}"]
        lines += [f"chmod o+x {root}{shlex.quote(str(above))}" for above in _above(code)]
        user, inside = self.spec["securityContext"], self.container["securityContext"]
        assert user["runAsNonRoot"]
        assert not inside["allowPrivilegeEscalation"]
        assert inside["capabilities"] == {"drop": ["ALL"]}
        if inside["readOnlyRootFilesystem"]:
            lines.append(f"mount -o remount,ro {root}")
        own = {"PATH": PATH, "PYTHONPATH": str(ROOT)} if code else {"PATH": IMAGE_PATH}
        command = [
            *("chroot", str(self.folder / "root"), "setpriv", "--clear-groups", "--no-new-privs"),
            *(f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}"),
            *("--bounding-set=-all", "--inh-caps=-all", "env", "-i"),
            *(f"{name}={text}" for name, text in {**own, **self.environment}.items()),
            *self.container["command"],
        ]
        return "\n".join([*lines, f"exec {shlex.join(command)}"])

    def leave(self, grace: float) -> None:
        """Tell it to leave; it is killed after so many seconds."""
        if self.leaving is None:
            self.leaving = time.monotonic() + grace
            self.signal(signal.SIGTERM)

    def worker(self) -> psutil.Process:
        """The first child of process 1 of the container."""
        (first,) = psutil.Process(self.process.pid).children()
        return first.children()[0]

    def signal(self, number: int) -> None:
        """To process 1 of the container; what else is in it ends with that."""
        try:
            (first,) = psutil.Process(self.process.pid).children()
            first.send_signal(number)
        except (psutil.Error, ValueError):  # it has ended, or not begun
            if number == signal.SIGKILL:
                self.process.kill()


def _above(paths: tuple[str, ...]) -> list[Path]:
    """Folders over these that others may not enter."""
    every = {above for path in paths for above in Path(path).parents}
    return sorted(above for above in every if not above.stat().st_mode & 0o001)
