"""Infrastructure: atomic files, locks, back-off, daemon threads, the exit watchdog."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from schema.util.atomic_file import remove_unfinished, replacing, replacing_directory, write_text
from schema.util.backoff import Backoff
from schema.util.file_lock import open_lock, release, try_lock
from schema.util.host import boot_id
from schema.util.threads import in_daemon


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_that_is_not_finished_leaves_what_was_there(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old", durable=durable)
    with pytest.raises(RuntimeError, match="power"), replacing(path, durable=durable) as neighbour:  # noqa: PT012
        neighbour.write_text("half")
        assert path.read_text() == "old"
        raise RuntimeError("power")
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    assert path.read_text() == "old"


def test_the_mode_of_a_secret_never_widens(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    write_text(path, "ü", mode=0o600)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == ("ü".encode(), 0o600)


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with replacing_directory(target) as neighbour:
        (neighbour / "weights").write_text("whole")
    (tmp_path / ".model.1a2b").mkdir()
    (tmp_path / ".model.3c4d").write_text("half")
    (tmp_path / ".models").write_text("another's")
    remove_unfinished(target)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".models", "model"]
    assert (target / "weights").read_text() == "whole"


def test_locks_belong_to_open_files(tmp_path: Path) -> None:
    first, second = open_lock(tmp_path / "lock"), open_lock(tmp_path / "lock")
    assert try_lock(first, exclusive=True)
    assert not try_lock(second, exclusive=False)
    release(first)
    assert try_lock(second, exclusive=False)
    release(second)
    (tmp_path / "link").symlink_to(tmp_path / "lock")
    with pytest.raises(OSError, match="symbolic"):
        open_lock(tmp_path / "link")


def test_back_off_doubles_up_to_its_bound_and_respects_a_request() -> None:
    backoff = Backoff(first=0.5, most=8.0)
    for attempt, usual in ((1, 0.5), (2, 1.0), (5, 8.0), (10_000, 8.0)):
        assert all(usual / 2 <= backoff.after(attempt) <= usual for _ in range(50))
    assert all(6.0 <= backoff.after(1, at_least=12.0) <= 12.0 for _ in range(50))
    assert len({backoff.after(3) for _ in range(50)}) > 1


def test_work_in_a_daemon_thread_answers_or_raises_where_it_is_awaited() -> None:
    done = in_daemon(threading.current_thread, "worker")
    assert (done.result(60).name, done.result(60).daemon) == ("worker", True)
    with pytest.raises(SystemExit, match="7"):
        in_daemon(lambda: sys.exit(7), "worker").result(60)


def test_the_boot_id_is_that_of_the_kernel() -> None:
    path = Path("/proc/sys/kernel/random/boot_id")
    assert boot_id() == (path.read_text().strip() if path.exists() else "")


PROGRAM = """
import subprocess, sys, threading
from schema.util.threads import exit_after
exit_after(0.2, 7, "launcher.shutdown_timeout")
if sys.argv[1] == "hangs":
    threading.Event().wait(300)
"""


@pytest.mark.parametrize(("how", "code", "said"), [("leaves", 0, ""), ("hangs", 7, "launcher.shutdown_timeout")])
def test_a_process_that_hangs_is_ended_with_its_stacks_in_the_log(how: str, code: int, said: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert found.returncode == code, found.stderr
    assert said in found.stderr
    assert ("most recent call first" in found.stderr) == bool(said)
