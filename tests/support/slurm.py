"""Debian's Slurm with its nodes in network namespaces of this machine, in a directory of its own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from tests.support.namespaces import Namespaces
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE, until

CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmUser={user}
SlurmdUser={user}
MpiDefault=none
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class SlurmCluster:
    """munged, slurmctld and a slurmd on each of the machines, from Debian's slurm-wlm. Ended at the end."""

    def __init__(self, root: Path, machines: Namespaces) -> None:
        self.root, self._machines, self._stack = root, machines, ExitStack()
        for folder in ("state", "munge"):
            (root / folder).mkdir(parents=True)
        (root / "munge" / "key").write_bytes(secrets.token_bytes(1024))
        (root / "munge" / "key").chmod(0o400)
        self._nodes = [f"n{number}" for number in range(machines.count)]
        host, cpus = socket.gethostname(), os.cpu_count()
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr={machines.address(number)} Port={free_port()} CPUs={cpus} "
            "State=UNKNOWN"
            for number, name in enumerate(self._nodes)
        ]
        text = CONF.format(
            host=host, address=machines.outside, root=root, controller=free_port(), nodes="\n".join(lines),
            user=os.environ.get("USER", "root"),
        )  # fmt: skip
        (root / "slurm.conf").write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.root / "slurm.conf")}

    def run(self, *argv: str) -> str:
        """A command of Slurm, with its output."""
        ended = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert ended.returncode == 0, f"{' '.join(argv)}: {ended.stderr}"
        return ended.stdout

    def state(self, job: str) -> str:
        """Of a job, as Slurm calls it."""
        found = self.run("scontrol", "show", "job", job, "--oneliner")
        return found.partition("JobState=")[2].split()[0]

    def start_again(self, job: str) -> None:
        """Let a requeued job start without the two minutes that Slurm gives it. Not in the second in which it was
        requeued, for which a node still refuses its number ("Job credential revoked").
        """
        self.run("scontrol", "update", f"jobid={job}", "starttime=now+3")

    def until_state(self, job: str, *states: str, told: Callable[[], str] = lambda: "") -> None:
        def look() -> bool:
            time.sleep(0.3)
            state = self.state(job)
            assert state in states or state not in ENDED, "it has ended"
            return state in states

        try:
            until(look, f"job {job} to be {' or '.join(states)}")
        except AssertionError as error:
            raise AssertionError(f"{error}: it is {self.state(job)}\n{told()}") from None

    def __enter__(self) -> SlurmCluster:
        munge = self.root / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        with self._stack:
            options = [f"--{name}={munge / file}" for name, file in files.items()]
            self._start("munged", "--foreground", "--force", *options)
            until((munge / "socket").exists, "munged")
            self._start("slurmctld", "-D", "-f", str(self.root / "slurm.conf"))
            for number, name in enumerate(self._nodes):
                line = ("slurmd", "-D", "-N", name, "-f", str(self.root / "slurm.conf"))
                self._start(*self._machines.command(number, *line))
            until(self._is_up, "all nodes of Slurm to be idle")
            self._stack = self._stack.pop_all()
        return self

    def _is_up(self) -> bool:
        time.sleep(0.2)
        found = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], env=self.environment, capture_output=True, text=True, check=False
        )
        return found.stdout.split() == ["idle"] * len(self._nodes)

    def _start(self, *argv: str) -> None:
        output = self._stack.enter_context((self.root / f"{argv[0]}.out").open("ab"))
        process = subprocess.Popen(argv, env=self.environment, stdout=output, stderr=output)

        def end() -> None:
            process.terminate()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20.0)

        self._stack.callback(end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run("scancel", "--full", "--signal=KILL", "--user", os.environ.get("USER", "root"))
            self.run("scancel", "--user", os.environ.get("USER", "root"))
            until(lambda: not self.run("squeue", "-h"), "all jobs to be gone", 60.0)
        finally:
            self._stack.close()
