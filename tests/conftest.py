"""What holds for all tests."""

from __future__ import annotations

import signal

import pytest

from tests.support.effort import SOAK

# Started in the background of a script, SIGINT is ignored, here and in every process that a test starts. With a
# handler it has its default in those, as in those that the launcher starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = (
    "tests/e2e/test_learning",
    "tests/e2e/test_kills",
    "tests/e2e/",
    "tests/weight_sync/test_collective",
    "tests/rollout_worker/test_vllm",
    "tests/liveness/test_vllm",
)
"""Files in the order in which `make e2e` hands them out (`--dist loadfile --no-loadscope-reorder`); then the others.
A long file that came last would leave two of three processes idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A long proof runs in `make soak` alone, whichever path pytest is given; long files come first."""
    for item in items:
        if not SOAK and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="run by `make soak`"))
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    matching = (i for i, prefix in enumerate(LONGEST_FIRST) if item.nodeid.startswith(prefix))
    return next(matching, len(LONGEST_FIRST))
