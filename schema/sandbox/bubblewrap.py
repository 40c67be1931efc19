"""One program in a sandbox of bubblewrap: what it can read is listed, what it writes is forgotten.

    Sandbox(read_only, empty) ──run(command)──▶ Outcome(stdout, stderr, channel, ended_by)

It has namespaces of its own (users, processes, network, host name), no capabilities, a clean environment and no
terminal. Its root is empty but for `read_only` and `empty`, and cannot be written outside of `empty`, whose sizes are
bounded. It ends with this process, and it is killed with all that it started at the first limit it reaches. Its
processes are counted from outside, as a limit by the kernel does not hold for root.
"""

from __future__ import annotations

import os
import resource
import selectors
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

MIB = 1 << 20
_POLL_S = 0.02
_PROGRAM = "bwrap"
_REASON = 400
"""Characters of why it does not work."""


@dataclass(frozen=True)
class SandboxLimits:
    """Bounds of what a program uses: seconds by the clock, bytes of memory of all its processes, and their number.

    output: bytes on standard output, standard error and the channel together.
    """

    seconds: float = 10.0
    memory: int = 256 * MIB
    processes: int = 64
    output: int = 2 * MIB
    files: int = MIB
    """Bytes of each directory of `Sandbox.empty`."""


@dataclass(frozen=True)
class Outcome:
    """The end of a program. channel: what it wrote to the descriptor that CHANNEL names in its environment.

    ended_by: "" if it ended by itself; else the limit that it reached: time, memory, processes or output.
    """

    code: int
    stdout: bytes
    stderr: bytes
    channel: bytes
    ended_by: str = ""


@dataclass(frozen=True)
class Sandbox:
    """Files and directories of a program. read_only: from here -> where it sees them. empty: writable directories.

    Later directories may lie in earlier ones. environment: all of it.
    """

    read_only: Sequence[tuple[Path, Path]]
    empty: Sequence[Path] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path("/")
    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def run(self, command: Sequence[str], channel: str = "") -> Outcome:
        """Run a program to its end. channel: the variable that gets the number of a descriptor to write to.

        Raises OSError where bubblewrap is not installed; one that cannot work here is an `Outcome` of code 1.
        """
        reading, writing = os.pipe()
        environment = {**self.environment, **({channel: str(writing)} if channel else {})}
        try:
            process = subprocess.Popen(
                [_PROGRAM, *self._options(environment), "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(writing,),
                env={},
                executable=shutil.which(_PROGRAM),
                preexec_fn=self._limit,  # noqa: PLW1509 - it calls setrlimit alone
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            return self._followed(process, reading)
        finally:
            process.kill()  # the first process of its namespace: all others end with it
            process.wait()
            os.close(reading)
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()

    def _options(self, environment: Mapping[str, str]) -> list[str]:
        options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        options += ["--proc", "/proc", "--dev", "/dev"]
        for folder in self.empty:
            options += ["--size", str(self.limits.files), "--tmpfs", str(folder)]
        for source, target in self.read_only:
            options += ["--ro-bind", str(source), str(target)]
        options += ["--remount-ro", "/", "--chdir", str(self.folder)]
        for name, value in environment.items():
            options += ["--setenv", name, value]
        return options

    def _limit(self) -> None:
        for name, most in (
            (resource.RLIMIT_AS, self.limits.memory),
            (resource.RLIMIT_CPU, int(self.limits.seconds) + 1),
            (resource.RLIMIT_FSIZE, max(self.limits.files, self.limits.output)),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(name, (most, most))

    def _followed(self, process: subprocess.Popen[bytes], channel: int) -> Outcome:
        """Read what it writes until all of its ends are closed, or it reaches a limit."""
        assert process.stdout is not None
        assert process.stderr is not None
        parts: dict[int, list[bytes]] = {process.stdout.fileno(): [], process.stderr.fileno(): [], channel: []}
        end, total, ended_by = time.monotonic() + self.limits.seconds, 0, ""
        with selectors.DefaultSelector() as selector:
            for descriptor in parts:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map() and not ended_by:
                for key, _ in selector.select(_POLL_S):
                    block = os.read(key.fd, 1 << 16)
                    parts[key.fd].append(block)
                    total += len(block)
                    if not block:
                        selector.unregister(key.fd)
                ended_by = self._reached(process.pid, time.monotonic() > end, total)
        if ended_by:
            process.kill()
        code = process.wait()
        stdout, stderr, written = (b"".join(blocks) for blocks in parts.values())
        return Outcome(code, stdout, stderr, written, ended_by)

    def _reached(self, pid: int, is_late: bool, total: int) -> str:
        if is_late:
            return "time"
        if total > self.limits.output:
            return "output"
        processes = _below(pid, self.limits.processes + 2)
        if len(processes) > self.limits.processes:
            return "processes"
        return "memory" if sum(map(_resident, processes)) > self.limits.memory else ""


def _below(pid: int, most: int) -> list[int]:
    """A process and those that it has started, directly or not; about `most` of them at most."""
    processes = [pid]
    for parent in processes:
        if len(processes) > most:
            break
        with suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                processes += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return processes


def _resident(pid: int) -> int:
    """Bytes of memory that a process has to itself and shares with none, as far as /proc says; 0: it has ended."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


@cache
def why_not() -> str:
    """Why no sandbox can be made on this machine; "" where one can."""
    if shutil.which(_PROGRAM) is None:
        return f"{_PROGRAM} (bubblewrap) is not installed"
    shell = Path(shutil.which("sh") or "/bin/sh")
    outcome = Sandbox(programs([shell])).run([str(shell), "-c", ":"])
    if outcome.code == 0:
        return ""
    return f"{_PROGRAM} does not work here: {outcome.stderr.decode(errors='replace').strip()[:_REASON]}"


def programs(paths: Sequence[Path]) -> list[tuple[Path, Path]]:
    """The files that these programs need, for `Sandbox.read_only`: themselves and the directories of libraries."""
    libraries = [Path(name) for name in ("/lib", "/lib64", "/usr/lib", "/usr/lib64") if Path(name).is_dir()]
    needed = [path for library in libraries for path in _of_linker(library)]
    return [(path, path) for path in (*needed, *paths)]


def _of_linker(library: Path) -> list[Path]:
    """The directories below one of libraries in which the linker looks, without what else lies there."""
    machine = f"{os.uname().machine}-linux-gnu"
    below = library / machine
    if below.is_dir():
        return [below]
    return [library] if library.name == "lib64" or not Path("/usr/lib", machine).is_dir() else []
