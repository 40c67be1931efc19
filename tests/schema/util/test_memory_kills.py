"""Who killed a process is read from the kernel's counters, of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from schema.util import memory_kills
from schema.util.memory_kills import BY_LIMIT, BY_OTHERS, LOOKS, PROBABLY, MemoryKills, RecentKills

V1, V2 = "4:memory:/jobs/mine\n3:cpu:/\n0::/\n", "0::/jobs/mine\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory_kills, "ROOT", tmp_path)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def counted(root: Path, kills: int, limit: int = 0) -> None:
    """What version 2 says."""
    write(root, "proc/self/cgroup", V2)
    write(root, "sys/fs/cgroup/jobs/mine/memory.events", f"max 3\noom {limit}\noom_kill {kills}\n")


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/jobs/mine", "sys/fs/cgroup"])
@pytest.mark.parametrize(("by_limit", "cause"), [(1, BY_LIMIT), (0, BY_OTHERS)])
def test_a_kill_in_our_group_is_certain_and_its_limit_only_where_it_was_reached(
    root: Path, folder: str, by_limit: int, cause: str
) -> None:
    write(root, "proc/self/cgroup", V2)
    write(root, f"{folder}/memory.events", "max 3\noom 2\noom_kill 3\n")
    write(root, "proc/vmstat", "nr_free_pages 5\noom_kill 7\n")
    before = MemoryKills.read()
    assert before == MemoryKills(3, 2, 7)
    write(root, f"{folder}/memory.events", f"max 3\noom {2 + by_limit}\noom_kill 4\n")
    write(root, "proc/vmstat", "nr_free_pages 5\noom_kill 8\n")
    assert before.cause(MemoryKills.read()) == cause


@pytest.mark.parametrize("folder", ["sys/fs/cgroup/memory/jobs/mine", "sys/fs/cgroup/memory"])
@pytest.mark.parametrize(("limit", "cause"), [("4096", BY_LIMIT), ("9223372036854771712", BY_OTHERS)])
def test_version_1_counts_kills_alone_so_the_limit_is_asked_for(
    root: Path, folder: str, limit: str, cause: str
) -> None:
    write(root, "proc/self/cgroup", V1)
    write(root, f"{folder}/memory.limit_in_bytes", limit)
    write(root, f"{folder}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    before = MemoryKills.read()
    write(root, f"{folder}/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert before.cause(MemoryKills.read()) == cause


def test_a_kill_elsewhere_is_ours_only_where_our_group_does_not_count(root: Path) -> None:
    before = MemoryKills(None, 0, 7)
    assert before.cause(MemoryKills(None, 0, 8)) == PROBABLY
    assert MemoryKills(3, 0, 7).cause(MemoryKills(3, 0, 8)) == ""
    nothing = MemoryKills.read()
    assert nothing == MemoryKills(None, 0, None)
    assert nothing.cause(before) == before.cause(nothing) == ""


def test_all_that_ends_soon_is_explained_by_a_kill_and_nothing_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_kills, "LOOK_EVERY", 0.0)
    counted(root, kills=0)
    kills = RecentKills()
    counted(root, kills=1)
    for _ in range(LOOKS - 1):
        kills.look()
        assert [kills.cause(), kills.cause()] == [BY_OTHERS] * 2
    kills.look()
    assert kills.cause() == ""
    assert RecentKills().cause() == ""


def test_this_machine_tells() -> None:
    assert MemoryKills.read() != MemoryKills(None, 0, None)
