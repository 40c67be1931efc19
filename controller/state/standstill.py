"""How long policy replicas that train together may all wait for each other before they begin anew. Pure.

Time counts only while every one of them has reported itself a moment ago and was answered `wait`: one that computes,
exchanges, loads or saves has another order, and one of which nothing is known, as after a restart of the controller,
counts as busy. The first limit is short against a user's patience and long against a poll; it doubles each time that
it is reached without a step in between, since what it begins anew costs a round.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

FIRST_S, MOST_S = 15.0, 60.0
"""The first limit, and the longest one."""
NOTICED_S = 5.0
"""Seconds for which all policy replicas wait for each other before it is reported: they do so for moments always."""
RECENT_S = 10.0
"""A replica whose last report is older counts as busy: it polls every few seconds while it waits."""


@dataclass(slots=True)
class _Report:
    at: float
    """When its last report ends: that of a long-poll lies ahead."""
    waits_since: float | None


class Standstill:
    """See the module's docstring. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.limit = FIRST_S
        self._reports: dict[str, _Report] = {}
        self._step: int | None = None

    def heard(self, name: str, now: float, *, waits: bool, for_s: float = 0.0) -> None:
        """A replica was answered. waits: by `wait`. for_s: seconds for which its call stays open."""
        before = self._reports.get(name)
        goes_on = before is not None and now - before.at <= RECENT_S
        since = before.waits_since if before is not None and goes_on and before.waits_since is not None else now
        self._reports[name] = _Report(now + for_s, since if waits else None)

    def at(self, step: int) -> None:
        """The step that is next to be committed: with another one the limit is the first again."""
        if self._step not in (None, step):
            self.limit = FIRST_S
            self._reports.clear()
        self._step = step

    def since(self, names: Collection[str], now: float) -> float | None:
        """Since when all of these wait; None: one of them does not, or there is none."""
        reports = [self._reports.get(name) for name in names]
        waiting = [
            report.waits_since
            for report in reports
            if report is not None and report.waits_since is not None and now - report.at <= RECENT_S
        ]
        return max(waiting) if waiting and len(waiting) == len(reports) else None

    def is_over(self, names: Collection[str], now: float) -> bool:
        """Whether all of these have waited for as long as the limit; then the next one is longer."""
        since = self.since(names, now)
        if since is None or now - since < self.limit:
            return False
        self.limit = min(2 * self.limit, MOST_S)
        self._reports.clear()
        return True
