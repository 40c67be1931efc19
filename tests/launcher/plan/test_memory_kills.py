"""Who killed a process is read from the kernel's counters, of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.plan.machine import KILLED_FOR_GROUP, KILLED_FOR_MACHINE, MemoryKills

V1, V2 = "4:memory:/jobs/mine\n3:cpu:/\n0::/\n", "0::/jobs/mine\n"


def machine(root: Path, cgroup: str, files: dict[str, int]) -> Path:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, count in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        (V1, "sys/fs/cgroup/memory/jobs/mine/memory.oom_control"),
        (V1, "sys/fs/cgroup/memory/memory.oom_control"),
        (V2, "sys/fs/cgroup/jobs/mine/memory.events"),
        (V2, "sys/fs/cgroup/memory.events"),
    ],
)
def test_a_kill_in_our_group_is_certain(tmp_path: Path, cgroup: str, file: str) -> None:
    before = MemoryKills.read(machine(tmp_path, cgroup, {file: 3, "proc/vmstat": 7}))
    assert before == MemoryKills(3, 7)
    assert before.cause(before) == ""
    assert (
        before.cause(MemoryKills.read(machine(tmp_path, cgroup, {file: 4, "proc/vmstat": 8})))
        == KILLED_FOR_GROUP
    )


def test_a_kill_elsewhere_is_likely_ours_and_nothing_is_said_where_nothing_is_told(tmp_path: Path) -> None:
    before = MemoryKills.read(machine(tmp_path, V2, {"proc/vmstat": 7}))
    assert before == MemoryKills(None, 7)
    assert before.cause(MemoryKills.read(machine(tmp_path, V2, {"proc/vmstat": 8}))) == KILLED_FOR_MACHINE
    nothing = MemoryKills.read(tmp_path / "nowhere")
    assert nothing == MemoryKills(None, None)
    assert nothing.cause(before) == before.cause(nothing) == ""


def test_this_machine_tells() -> None:
    assert MemoryKills.read() != MemoryKills(None, None)
