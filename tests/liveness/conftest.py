from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.liveness.probe import Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """What the observers of one module use."""
    with ExitStack() as stack:
        yield Place(tmp_path_factory.mktemp("liveness"), stack)
