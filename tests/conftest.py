"""What holds for all tests."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from itertools import chain, combinations
from pathlib import Path

import hypothesis
import pytest
from _pytest.mark.expression import Expression

from convert import hints
from tests.support.cpu import spent
from tests.support.effort import SOAK

# Started in the background of a script, SIGINT is ignored, here and in every process that a test starts. With a
# handler it has its default in those, as in those that the launcher starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


hints.install()  # as launcher and controller do when they start

hypothesis.settings.register_profile("untimed", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("untimed")

LONGEST_FIRST = (
    "tests/e2e/test_learning",
    "tests/e2e/test_kills",
    "tests/e2e/",
    "tests/rollout_worker/engines/vllm",
    "tests/liveness/test_vllm",
)
"""Files in the order in which `make e2e` hands them out (`--dist loadfile --no-loadscope-reorder`); then the others.
A long file that came last would leave two of three processes idle."""
MARK = re.compile(r"\bmark\.(slow|e2e|soak|scaled)\b")
OF_ALL = re.compile(r"^pytestmark = .*$", re.MULTILINE)
BY_HELPERS = {"soak"}
"""Marks that parameters get without naming them (`tests.support.effort.combinations`)."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file of which `-m` can select nothing: torch and vLLM take seconds, in each process.

    So a file's marks are written in it: one that it only inherits from another file's class is not seen here.
    """
    if not config.option.markexpr or collection_path.suffix != ".py":
        return None
    wanted = Expression.compile(config.option.markexpr)
    text = collection_path.read_text()
    certain = {mark for line in OF_ALL.findall(text) for mark in MARK.findall(line)}
    possible = sorted((set(MARK.findall(text)) | BY_HELPERS) - certain)
    worlds = chain.from_iterable(combinations(possible, n) for n in range(len(possible) + 1))

    def selects(marks: set[str]) -> bool:
        return wanted.evaluate(lambda name, /, **_: name in marks)

    return None if any(selects({*certain, *some}) for some in worlds) else True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with spent(item.nodeid):
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A long proof runs in `make soak` alone, whichever path pytest is given; long files come first."""
    for item in items:
        if not SOAK and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="run by `make soak`"))
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    matching = (i for i, prefix in enumerate(LONGEST_FIRST) if item.nodeid.startswith(prefix))
    return next(matching, len(LONGEST_FIRST))
