"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest

from tests.support.effort import SOAK

# Started in the background of a script, SIGINT is ignored, here and in every process that a test starts. With a
# handler it has its default in those, as in those that the launcher starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A long proof runs in `make soak` alone, whichever path pytest is given."""
    for item in items:
        if not SOAK and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="run by `make soak`"))
