"""What `docker build` does with our Dockerfiles, by debootstrap and chroot. Needs root.

The base is a minimal Debian of the release that FROM names. A RUN command has the stage's environment, the network
and the package indexes of this machine, and nothing else of it. What is built then runs as its USER, with a root that
cannot be written, a /tmp, and no capability.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

MIRROR = "http://deb.debian.org/debian"
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
SHARED = {
    "/etc/resolv.conf": "/etc/resolv.conf",
    CERTIFICATES: "/mnt/certificates.crt",
    **{path: path for path in ("/etc/xdg/pip", "/opt/pypi", "/opt/pypi-more", "/opt/wheels")},
}
"""Of the machine, and where it is to be read while something is built: names, certificates, indexes of packages."""


@dataclass
class Stage:
    """root: its file system. environment: for its commands. user: of the container."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH, "HOME": "/root"})
    user: str = "0:0"


class Image:
    """A Dockerfile in its context, built below `work`. arguments: of the build."""

    def __init__(self, dockerfile: Path, context: Path, work: Path, arguments: dict[str, str]) -> None:
        self.context, self.work, self.arguments = context, work, arguments
        parser = DockerfileParser(fileobj=dockerfile.open("rb"))
        self.steps: list[tuple[str, str]] = [
            (step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"
        ]
        self.stages: dict[str, Stage] = {}
        self.last: Stage

    def build(self) -> Stage:
        """Raises CalledProcessError."""
        for instruction, value in self.steps:
            print(f"{instruction} {value[:100]}", file=sys.stderr, flush=True)
            getattr(self, f"_{instruction.lower()}")(value)
        return self.last

    def _from(self, value: str) -> None:
        base, _, name = value.partition(" AS ")
        release = base.removeprefix("debian:").removesuffix("-slim")
        clean, root = self.work / f"debian-{release}", self.work / f"stage-{len(self.stages)}"
        if not clean.exists():
            partial = clean.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            run(["debootstrap", "--variant=minbase", release, str(partial), MIRROR], stdout=subprocess.DEVNULL)
            shutil.rmtree(partial / "var/lib/apt/lists")  # Debian's images have none
            partial.rename(clean)
        shutil.rmtree(root, ignore_errors=True)
        run(["cp", "-a", str(clean), str(root)])
        self.last = self.stages[name or str(len(self.stages))] = Stage(root)

    def _arg(self, value: str) -> None:
        for one in shlex.split(value):
            name, given, default = one.partition("=")
            text = self.arguments.get(name, default)
            if given or name in self.arguments:
                self.last.environment[name] = text

    def _env(self, value: str) -> None:
        for one in shlex.split(value):
            name, _, text = one.partition("=")
            self.last.environment[name] = text

    def _user(self, value: str) -> None:
        self.last.user = value

    def _label(self, value: str) -> None:
        assert all("=" in one for one in shlex.split(value))

    def _cmd(self, value: str) -> None:
        assert value.startswith("[")

    def _copy(self, value: str) -> None:
        words = shlex.split(value)
        if words[0].startswith("--from="):
            _, source, target = words
            root = self.stages[words[0].removeprefix("--from=")].root
            run(["cp", "-a", f"{root}{source}", f"{self.last.root}{target}"])
            return
        source, target = words
        assert source == "."
        into = Path(f"{self.last.root}{target}")
        into.mkdir(parents=True)
        for name in kept(self.context / ".dockerignore"):
            run(["cp", "-a", str(self.context / name), str(into)])

    def _run(self, value: str) -> None:
        mounts = [f"mount --bind /{name} {self.last.root}/{name}" for name in ("proc", "dev", "sys")]
        for path, inside in SHARED.items():
            if os.path.exists(path):
                place = f"{self.last.root}{inside}"
                mounts += [f"mkdir -p {place}" if os.path.isdir(path) else f"touch {place}"]
                mounts += [f"mount --bind {path} {place}", f"mount -o remount,ro,bind {place}"]
        machine = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        machine |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), SHARED[CERTIFICATES])
        env = [f"{name}={text}" for name, text in {**machine, **self.last.environment}.items()]
        command = shlex.join(["chroot", str(self.last.root), "env", "-i", *env, "sh", "-c", value])
        run(["unshare", "--mount", "sh", "-ec", "\n".join([*mounts, command])])
        for inside in SHARED.values():  # only places to mount at
            place = Path(f"{self.last.root}{inside}")
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()

    # ---- what was built -----------------------------------------------------------------------------------

    def command(self, *argv: str) -> list[str]:
        """A command line that runs it, as a container is run."""
        root, stage = self.last.root, self.last
        user, group = stage.user.split(":")
        assert user != "0"
        lines = [
            f"mount --bind {root} {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --bind /dev {root}/dev",
            f"mount --bind /sys {root}/sys",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm",
            f"mount -o remount,ro,bind {root}",
        ]
        env = {**stage.environment, "HOME": "/tmp", "USER": "cosmos"}
        inside = [
            *("chroot", str(root), "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"),
            *("--no-new-privs", "--bounding-set=-all", "env", "-i", *(f"{k}={v}" for k, v in env.items())),
            *argv,
        ]
        script = "\n".join([*lines, f"exec {shlex.join(inside)}"])
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", script]

    @property
    def megabytes(self) -> float:
        """Of its file system, without packages that Debian's images delete after each command."""
        said = subprocess.run(
            ["du", "-smx", "--exclude=cache/apt", str(self.last.root)], capture_output=True, text=True, check=True
        )
        return float(said.stdout.split()[0])


def kept(ignore: Path) -> list[str]:
    """What a .dockerignore that begins with `*` lets through."""
    lines = [line for line in ignore.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def run(argv: Sequence[str], stdout: int | None = None) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=stdout)
