"""Who only looks at a lock gets into nobody's way, and what cannot be seen is said, not guessed."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.errors import LaunchError
from launcher.locks import held_alone, held_by_any
from launcher.processes.keeper import Keeper, KeeperSettings
from tests.support.waiting import PATIENCE


@contextmanager
def locked(path: Path, kind: int) -> Iterator[None]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)


def test_what_nobody_holds_and_what_does_not_exist_is_free(tmp_path: Path):
    path = tmp_path / "it.lock"
    assert (held_alone(path), held_by_any(path)) == (False, False)
    path.touch()
    assert (held_alone(path), held_by_any(path)) == (False, False)
    with locked(path, fcntl.LOCK_EX):
        assert held_alone(path)
    with locked(path, fcntl.LOCK_SH):
        assert held_by_any(path)
        assert not held_alone(path), "what a look takes"


def test_what_cannot_be_seen_is_not_taken_for_dead(tmp_path: Path):
    (tmp_path / "launcher.lock").symlink_to("launcher.lock")
    for look in (held_alone, held_by_any):
        with pytest.raises(LaunchError, match=r"cannot be determined: .*launcher\.lock") as caught:
            look(tmp_path / "launcher.lock")
        assert "COSMOS_TOKEN" in caught.value.hint


def test_a_look_does_not_keep_a_keeper_from_its_lock(tmp_path: Path):
    path = tmp_path / "workers.lock"
    tried = threading.Event()

    class Trying(Keeper):
        def _open_lock(self, path: str, kind: int) -> int | None:
            handle = super()._open_lock(path, kind)
            tried.set()
            return handle

    keeper = Trying(KeeperSettings(parent=os.getpid(), grace=PATIENCE, hold=str(path)), [])
    with ThreadPoolExecutor() as pool:
        with locked(path, fcntl.LOCK_EX):
            holding = pool.submit(keeper._hold)
            assert tried.wait(PATIENCE)
        assert holding.result(PATIENCE)
    assert held_by_any(path)
