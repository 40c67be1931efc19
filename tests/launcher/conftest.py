"""What several tests of the launcher share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.valkey import ValkeyServer, running_valkey


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    """A Valkey for the controllers of a file."""
    with running_valkey() as server:
        yield server
