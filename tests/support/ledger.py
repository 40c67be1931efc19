"""The stored form of a ledger in a test: what `take_changes` hands out is applied as the store does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import from_json, to_json

from controller.ledger.admission import tightest_prefix
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.values import LedgerParams


class StoredLedger:
    """Rows as they would lie in Redis."""

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.samples: dict[str, Any] = {}
        self.archive: dict[str, Any] = {}
        self.payloads: set[tuple[str, str]] = set()
        self.header: dict[str, Any] = {}

    def write(self, ledger: Ledger) -> None:
        """Everything that changed since the last time."""
        changes = ledger.table.take_changes()
        for name in changes.removed:
            self.groups.pop(name, None)
            self.samples.pop(name, None)
        for group in changes.groups:
            self.groups[group.id] = _travelled(group.to_row())
        for group in changes.samples:
            self.samples[group.id] = _travelled(group.samples_row())
        for name, render in changes.archive.items():
            row = render()
            self.archive.pop(name, None)
            if row is not None:
                self.archive[name] = _travelled(row)
        self.payloads -= set(changes.dropped_payloads)
        self.header = _travelled(changes.header)

    def restore(self, params: LedgerParams, new_lease_id: Callable[[], str] | None = None) -> Ledger:
        """The ledger of a controller that starts again."""
        table = GroupTable.restore(params, self.header, self.groups, self.samples, self.archive)
        return Ledger(table, new_lease_id)


def _travelled(value: Any) -> Any:
    return from_json(to_json(value))


def schedulable(deadlines: Mapping[int, int], first_step: int, slots: int) -> bool:
    """Whether every group can be trained by its deadline (see `controller.ledger.admission`)."""
    return tightest_prefix(deadlines, first_step, slots) is None
