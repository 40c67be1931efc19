"""The supervisor with real processes: restarts, replicas of several ranks, ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from launcher.plan import addresses, redis_server
from launcher.plan.placement import PlacedReplica, ProcessSpec
from launcher.processes import host
from launcher.processes.host import Folders, LocalHost
from launcher.processes.private_directory import make_private
from launcher.processes.supervisor import Exit, Setting, Situation, Supervisor
from launcher.restarts import RestartBudget, Role
from schema.util import memory_kills
from schema.util.memory_kills import BY_LIMIT
from tests.launcher.scripts import ON_TERM, PYTHON, STUBBORN, WITH_GRANDCHILD, pids, until_gone
from tests.schema.util.test_memory_kills import counted
from tests.support.waiting import PATIENCE, until

BUDGET = RestartBudget(max_restarts=2, backoff=0.01, backoff_max=0.02)


class Watcher:
    """Notes what happens; the job is never over unless a test says so."""

    def __init__(self, over: bool = False, needed: bool = True) -> None:
        self.exits: list[Exit] = []
        self.events: list[str] = []
        self.situation = Situation(over, needed)

    async def exited(self, exit_: Exit) -> Situation:
        self.exits.append(exit_)
        return self.situation

    def event(self, text: str) -> None:
        self.events.append(text)


def replica(name: str, *scripts: str, role: Role = Role.ROLLOUT) -> PlacedReplica:
    specs = tuple(
        ProcessSpec(name if len(scripts) == 1 else f"{name}-rank{rank}", role, (*PYTHON, script), rank=rank)
        for rank, script in enumerate(scripts)
    )
    return PlacedReplica(name, role, specs, rendezvous=role is Role.POLICY)


def supervise(
    tmp_path: Path, body: Callable[[Supervisor], Awaitable[None]], watcher: Watcher, grace: float = PATIENCE
) -> None:
    """Run `body` with a supervisor; nothing may be left afterwards."""

    async def main() -> None:
        def environment(spec: ProcessSpec) -> dict[str, str]:
            return {"MARK": spec.name}

        supervisor = Supervisor(Setting(Folders(tmp_path, tmp_path), grace, BUDGET, environment), watcher)
        try:
            async with asyncio.timeout(PATIENCE):
                await body(supervisor)
        finally:
            await supervisor.kill_all()
        assert not supervisor.running()

    asyncio.run(main())


async def comes_true(check: Callable[[], bool]) -> None:
    """Wait for what the supervisor does in this event loop."""
    async with asyncio.timeout(PATIENCE):
        while not check():  # noqa: ASYNC110 - there is no event for it, and none is needed outside tests
            await asyncio.sleep(0.01)


async def written(*files: Path) -> list[int]:
    return [pid for file in files for pid in await asyncio.to_thread(pids, file)]


@pytest.mark.parametrize("kill", [True, False])
def test_a_stopped_keeper_is_continued_and_can_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: bool):
    monkeypatch.setattr(host, "LOOK_EVERY", 600.0 if kill else 0.05)
    watcher, ready = Watcher(), tmp_path / "ready"

    async def body(supervisor: Supervisor) -> None:
        supervised = supervisor.launch(replica("rollout-0", STUBBORN.format(ready=str(ready))))
        (worker,) = await written(ready)
        keeper_pid = supervised.processes["rollout-0"].pid
        os.kill(keeper_pid, signal.SIGSTOP)
        if kill:
            supervisor.kill("rollout-0")
        else:
            os.kill(worker, signal.SIGKILL)
        await comes_true(lambda: bool(watcher.exits))

    supervise(tmp_path, body, watcher)
    assert (watcher.exits[0].code, watcher.exits[0].hung) == (128 + signal.SIGKILL, kill)


def test_a_process_has_its_secrets_and_its_keeper_has_none(tmp_path: Path):
    ready = tmp_path / "ready"
    secret = "a secret with ünïcode and \udcff"

    async def body(supervisor: Supervisor) -> None:
        setting = supervisor.setting
        local = LocalHost(setting.folders, setting.grace, lambda spec: {"PLANTED": secret})
        supervisor.hosts = {0: local}
        supervised = supervisor.launch(replica("rollout-0", STUBBORN.format(ready=str(ready))))
        (worker,) = await written(ready)
        kept, own = [
            await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_bytes)
            for pid in (worker, supervised.processes["rollout-0"].pid)
        ]
        assert b"PLANTED=" + os.fsencode(secret) + b"\0" in kept
        assert os.fsencode(secret) not in own

    supervise(tmp_path, body, Watcher())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_redis_comes_back_whatever_ends_its_keeper_and_whatever_was_removed(tmp_path: Path, number: signal.Signals):
    """Its socket's directory, its data, locks and logs are made by the start that needs them."""
    (tmp_path / "redis").mkdir()
    server, watcher = redis_server.embedded(tmp_path / "redis"), Watcher()
    folders = Folders(tmp_path / "logs", tmp_path / "locks")

    async def main() -> None:
        supervisor = Supervisor(Setting(folders, PATIENCE, BUDGET, lambda spec: {}), watcher)
        try:
            assert server.replica is not None
            supervised = supervisor.launch(server.replica, keeps=str(tmp_path / "redis"), private=server.directory)
            assert await redis_server.wait_ready(server.url, PATIENCE)
            for folder in (tmp_path / "redis", folders.logs, folders.locks, Path(server.directory)):
                shutil.rmtree(folder)
            os.kill(supervised.processes["redis"].pid, number)
            await comes_true(lambda: bool(watcher.exits) and supervised.state == "up")
            assert await redis_server.wait_ready(server.url, PATIENCE), (folders.logs / "redis.log").read_text()
        finally:
            await supervisor.kill_all()

    try:
        asyncio.run(main())
        assert stat.S_IMODE(Path(server.directory).stat().st_mode) == 0o700
    finally:
        shutil.rmtree(server.directory)


def test_a_directory_of_another_user_is_refused(tmp_path: Path):
    own, link, file = tmp_path / "own", tmp_path / "link", tmp_path / "file"
    own.mkdir(mode=0o755)
    make_private(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    link.symlink_to(own)
    file.touch()
    for other in (link, file):
        with pytest.raises(OSError, match=other.name):
            make_private(other)
    stranger = tmp_path / "stranger" if os.geteuid() == 0 else Path("/")
    if os.geteuid() == 0:
        stranger.mkdir()
        os.chown(stranger, 12345, 12345)
    with pytest.raises(PermissionError, match="another user"):
        make_private(stranger)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", ""])
def test_a_chosen_port_is_given_to_no_connection_meanwhile(address: str, monkeypatch: pytest.MonkeyPatch):
    """On a busy machine one of those is taken within seconds, and the controller could not listen."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = {addresses.free_port(address) for _ in range(20)}
    assert all(addresses.FIRST_PORT <= port < first for port in found)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as taken:
        port = int(taken.getsockname()[1])
        monkeypatch.setattr(addresses, "FIRST_PORT", port)
        monkeypatch.setattr(addresses, "_first_of_connections", lambda: port + 1)
        assert addresses.free_port(address) != port, "it is in use, and so is all that may be tried"
    with pytest.raises(OSError, match="assign"):
        addresses.free_port("192.0.2.1")


def test_a_crashing_replica_is_restarted_until_its_budget_is_used_up(tmp_path: Path):
    watcher = Watcher()

    async def body(supervisor: Supervisor) -> None:
        supervisor.launch(replica("rollout-0", "print('loading', flush=True); raise SystemExit('cannot allocate')"))
        ending = await supervisor.ended
        assert ending.verdict.exit_code == 1
        assert "rollout-0" in ending.verdict.reason
        assert "launcher.max_restarts = 2" in ending.verdict.reason
        assert ending.exit is not None
        assert ending.exit.lines == ("loading", "cannot allocate"), "of the last start alone"
        assert supervisor.replicas["rollout-0"].restarts.total == 2

    supervise(tmp_path, body, watcher)
    assert [exit_.code for exit_ in watcher.exits] == [1, 1, 1]
    assert len(watcher.events) == 2
    assert "restart 1 of 2" in watcher.events[0]
    assert (tmp_path / "rollout-0.log").read_text().count("cannot allocate") == 3, "logs are appended to"


def test_what_is_killed_because_it_hangs_is_said_to(tmp_path: Path):
    """Not to have run out of memory; what kills its successor is another matter."""
    watcher = Watcher()
    counter = tmp_path / "starts"
    script = f"import os, time; open({str(counter)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"

    async def body(supervisor: Supervisor) -> None:
        supervisor.launch(replica("rollout-0", script))
        await written(counter)
        supervisor.kill("rollout-0")
        await asyncio.to_thread(until, lambda: len(counter.read_text().split()) == 2, "a second start")
        os.kill(int(counter.read_text().split()[1]), signal.SIGKILL)
        await comes_true(lambda: len(watcher.exits) == 2)
        assert not supervisor.ended.done()

    supervise(tmp_path, body, watcher)
    assert [(exit_.code, exit_.hung) for exit_ in watcher.exits] == [(137, True), (137, False)]
    assert "killed because it did not answer; restart" in watcher.events[0].replace(")", "")
    assert watcher.exits[1].how == "killed by SIGKILL"


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("sys.exit(1)", f"exit code 1, after a process of the job was {BY_LIMIT}"),
        ("os.kill(os.getpid(), 9)", BY_LIMIT),
    ],
)
def test_a_kill_for_memory_is_named_also_where_a_child_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, how: str
):
    """The kernel's counters are files of the test, which the process counts up before it ends."""
    monkeypatch.setattr(memory_kills, "ROOT", tmp_path)
    counted(tmp_path, kills=0)
    events = tmp_path / "sys/fs/cgroup/jobs/mine/memory.events"
    script = f"import os, sys; open({str(events)!r}, 'w').write('oom 1\\noom_kill 1\\n'); {end}"
    watcher = Watcher()

    async def body(supervisor: Supervisor) -> None:
        supervisor.launch(replica("rollout-0", script))
        await comes_true(lambda: len(watcher.exits) == 1)

    supervise(tmp_path, body, watcher)
    assert watcher.exits[0].how == how


def test_one_rank_that_dies_takes_the_others_with_it_and_all_come_back(tmp_path: Path):
    """Each start meets at a port of its own. The culprit is the rank that failed first."""
    watcher = Watcher()
    met = tmp_path / "met"
    met.mkdir()
    stays = f"""
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
open({str(met)!r} + '/' + os.environ['MASTER_PORT'], 'w')
time.sleep(600)
"""
    dies = f"""
import os, time
while not os.path.exists({str(met)!r} + '/' + os.environ['MASTER_PORT']): time.sleep(0.01)
raise SystemExit('rank 1 is out of memory')
"""

    async def body(supervisor: Supervisor) -> None:
        supervisor.launch(replica("policy-0", stays, dies, role=Role.POLICY))
        ending = await supervisor.ended
        assert ending.exit is not None
        assert ending.exit.process == "policy-0-rank1"
        assert ending.exit.lines == ("rank 1 is out of memory",)

    supervise(tmp_path, body, watcher)
    assert [exit_.code for exit_ in watcher.exits] == [1, 1, 1]
    assert len(list(met.iterdir())) > 1, "three, unless the kernel gives the same port twice"


def test_a_rank_that_cannot_be_started_leaves_no_other_behind(tmp_path: Path):
    """Its log cannot be written; the first rank runs already."""
    watcher = Watcher()
    (tmp_path / "policy-0-rank1.log").mkdir()

    async def body(supervisor: Supervisor) -> None:
        kept = supervisor.launch(replica("policy-0", "import time; time.sleep(600)", "pass", role=Role.POLICY))
        ending = await supervisor.ended
        assert "could not keep policy-0: IsADirectoryError" in ending.verdict.reason
        await kept.done.wait()
        (first,) = kept.processes.values()
        assert first.ended

    supervise(tmp_path, body, watcher)


def test_ranks_that_finish_at_different_times_are_waited_for(tmp_path: Path):
    watcher = Watcher(over=True)
    late = tmp_path / "late"
    slow = f"import time; time.sleep(0.4); open({str(late)!r}, 'w')"

    async def body(supervisor: Supervisor) -> None:
        kept = supervisor.launch(replica("policy-0", slow, "pass", role=Role.POLICY))
        await kept.done.wait()

    supervise(tmp_path, body, watcher)
    assert late.exists()
    assert [exit_.code for exit_ in watcher.exits] == [0]


def test_leaving_when_nobody_needs_it_is_no_failure(tmp_path: Path):
    watcher = Watcher(needed=False)

    async def body(supervisor: Supervisor) -> None:
        kept = supervisor.launch(replica("rollout-0", "pass"))
        await kept.done.wait()
        assert kept.state == "ended"
        assert not supervisor.ended.done()
        assert await supervisor.wait(["rollout-0"], 0.0)

    supervise(tmp_path, body, watcher)


def test_stop_lets_processes_leave_in_order(tmp_path: Path):
    watcher = Watcher()
    left = tmp_path / "left"

    async def body(supervisor: Supervisor) -> None:
        script = ON_TERM.format(ready=str(tmp_path / "ready"), body=f"open({str(left)!r}, 'w')")
        supervisor.launch(replica("rollout-0", script))
        await written(tmp_path / "ready")
        await supervisor.stop(["rollout-0"])
        assert supervisor.replicas["rollout-0"].state == "stopped"

    supervise(tmp_path, body, watcher)
    assert left.exists()
    assert not watcher.exits, "a stop is not an exit to be judged"


def test_stop_ends_a_replica_that_waits_for_its_restart(tmp_path: Path):
    watcher = Watcher()

    async def main() -> None:
        patient = RestartBudget(max_restarts=2, backoff=600.0, backoff_max=600.0)
        supervisor = Supervisor(Setting(Folders(tmp_path, tmp_path), 5.0, patient, lambda _: {}), watcher)
        kept = supervisor.launch(replica("rollout-0", "raise SystemExit(1)"))
        await comes_true(lambda: kept.state == "waiting")
        await supervisor.stop(["rollout-0"])
        assert kept.done.is_set()

    asyncio.run(main())


def test_a_killed_keeper_leaves_nothing_and_counts_as_a_crash(tmp_path: Path):
    watcher, found = Watcher(), []

    async def body(supervisor: Supervisor) -> None:
        ready = tmp_path / "ready"
        kept = supervisor.launch(
            replica("rollout-0", WITH_GRANDCHILD.format(ready=str(ready), then="time.sleep(600)"))
        )
        found.extend(await written(ready))
        os.kill(kept.alive[0].pid, signal.SIGKILL)
        await comes_true(lambda: bool(watcher.exits))
        await asyncio.to_thread(until_gone, found)

    supervise(tmp_path, body, watcher)
    assert watcher.exits[0].code == 128 + signal.SIGKILL


def test_each_process_gets_its_own_environment_and_nothing_else(tmp_path: Path):
    os.environ["COSMOS_TEST_OF_LEAKS"] = "leaked"
    script = "import os; print(sorted(os.environ))"

    async def body(supervisor: Supervisor) -> None:
        kept = supervisor.launch(replica("rollout-0", script))
        await kept.done.wait()

    try:
        supervise(tmp_path, body, Watcher(needed=False))
    finally:
        del os.environ["COSMOS_TEST_OF_LEAKS"]
    said = (tmp_path / "rollout-0.log").read_text()
    assert "'MARK'" in said
    assert "'COSMOS_PARENT_PID'" in said
    assert "LEAKS" not in said
