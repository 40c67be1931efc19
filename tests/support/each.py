"""One test for a table of trivial cases: a test of its own for each would cost more than the case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")


def check_each(cases: Iterable[Case], check: Callable[[Case], None]) -> None:
    """Check every case; the failure names each case that failed, and why. There must be at least one case."""
    failures, checked = [], 0
    for case in cases:
        checked += 1
        try:
            check(case)
        except Exception as error:
            failures.append(f"{str(case)[:120]}: {type(error).__name__}: {error}")
    assert checked
    assert not failures, f"{len(failures)} of {checked} cases fail:\n" + "\n".join(failures)
