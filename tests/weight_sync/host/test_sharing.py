"""Several processes share one copy: fetched once, and bit-equal whoever dies at which line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.effort import combinations
from tests.support.waiting import PATIENCE
from tests.weight_sync.host.advancer import ended, processes, right, started, vanish
from tests.weight_sync.versions import RemoteStore, Versions
from weight_sync.errors import NotReadableError
from weight_sync.host.files import open_copy, read_advancing, read_state
from weight_sync.host.host_copy import HostCopy
from weight_sync.stores import DirectoryStore

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sharers", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_fetched_once_by_all_processes_together(tmp_path: Path, sharers: int) -> None:
    versions = Versions(tmp_path / "store")
    for _ in range(6):
        versions.next()
    place, notes = tmp_path / "copy", tmp_path / "notes"
    told, go = processes().Queue(), processes().Event()
    wanted = versions.publications[3:]
    everyone = [started(place, versions.root, notes, wanted, told, go) for _ in range(sharers)]
    seen = [told.get(timeout=PATIENCE) for _ in range(sharers * len(wanted))]
    by_version = {p.version: p.content_hash for p in versions.publications}
    assert all(content in by_version.values() for _, _, content in seen)
    keys = RemoteStore(versions.root, notes).accesses()
    assert len(keys) == len(set(keys)), "a file was fetched by two processes"
    assert sum(n_bytes > 0 for _, n_bytes, _ in seen) == len(wanted)
    assert place.exists()
    go.set()
    assert [ended(process) for process in everyone] == [0] * sharers
    assert not place.exists(), "the last one removes it"


@pytest.mark.parametrize(("alone", "remote"), combinations([False, True], [True, False]))
def test_killed_at_any_line(tmp_path: Path, alone: bool, remote: bool) -> None:
    """Wherever a process dies, the next advance ends bit-equal. Kills among others while files are changed."""
    versions = Versions(tmp_path / "store", anchor_every=3)
    place, notes = tmp_path / "copy", tmp_path / "notes" if remote else None
    store = DirectoryStore(versions.root) if notes is None else RemoteStore(versions.root, notes)
    keeper = HostCopy(place, store, lock_timeout=PATIENCE)
    keeper.advance(versions.newest, patience=0.0)

    def lines_of(die_at: int) -> tuple[int | None, Any]:
        """Two versions more; how it ended, and for who did not die how many lines it took."""
        versions.next()
        versions.next()
        told = processes().Queue()  # of its own: who dies may hold its lock
        process = started(place, versions.root, notes, versions.publications[-2:], told, die_at=die_at)
        code = ended(process)
        lines = 0
        while code == 0 and not isinstance(lines := told.get(timeout=PATIENCE), int):
            pass
        return code, lines

    code, total = lines_of(0)
    assert (code, total > 1000) == (0, True)
    dice, torn = random.Random(3), 0
    for die_at in sorted(dice.sample(range(1, int(total * 1.05)), 16)):
        if alone:
            vanish(keeper)
        code, _ = lines_of(die_at)
        assert code in {0, -9}
        state = read_state(place)
        torn += state is not None and read_advancing(place, state) is not None
        if alone:
            keeper = HostCopy(place, store, lock_timeout=PATIENCE)
        weights = keeper.advance(versions.newest, patience=0.0)
        assert right(weights, versions)
        assert {path.name for path in place.iterdir() if path.name.startswith((".", "w-"))} == {weights._state.folder}
    assert torn, "no kill while files were changed"
    keeper.close()
    assert not place.exists()


def test_a_copy_torn_under_a_reader_is_mended(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "store")
    place = tmp_path / "copy"
    mine = HostCopy(place, versions.store, lock_timeout=PATIENCE)
    weights = mine.advance(versions.newest, patience=0.0)
    told = processes().Queue()
    for function in ("_write", "_say"):
        process = started(place, versions.root, None, [versions.next()], told, die_at=function)
        assert ended(process) == -9
        with pytest.raises(NotReadableError, match="torn"), open_copy(place):
            pass
        assert right(weights, versions)
    mine.close()
