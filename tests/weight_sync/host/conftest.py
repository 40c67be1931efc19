"""Versions in a store, and a copy of them on this host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE
from tests.weight_sync.versions import Versions
from weight_sync.host.host_copy import HostCopy


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "copy"


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "store")


@pytest.fixture
def copy(place: Path, versions: Versions) -> Iterator[HostCopy]:
    """This process's share in the copy, straight from the store's directory; given back in the end."""
    copy = HostCopy(place, versions.store, lock_timeout=PATIENCE)
    yield copy
    copy.close()
