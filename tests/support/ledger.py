"""The stored form of a ledger in a test: what `take_changes` hands out is applied as the store does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

from pydantic_core import from_json, to_json

from controller.ledger.admission import tightest_prefix
from controller.ledger.group_table import GroupTable
from controller.ledger.ledger import Ledger
from controller.ledger.pass_orders import PassOrder
from controller.ledger.values import LedgerParams


class StoredLedger:
    """Rows as they would lie in Redis."""

    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.samples: dict[str, Any] = {}
        self.archive: dict[str, Any] = {}
        self.payloads: set[tuple[str, str]] = set()
        self.header: dict[str, Any] = {}
        self.orders: dict[tuple[int, int], PassOrder] = {}
        """Files of the run directory, which no loss of the store takes."""

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
        return self.with_orders(table, new_lease_id)

    def with_orders(self, table: GroupTable, new_lease_id: Callable[[], str] | None = None) -> Ledger:
        """The ledger of a table that knows the orders of passes, and keeps further ones."""
        table.passes.know(self.orders.values())
        assert table.first_without_order() is None
        table.passes.keep = self._keep
        return Ledger(table, new_lease_id)

    def _keep(self, order: PassOrder) -> PassOrder:
        key = order.source, order.data_pass
        assert key not in self.orders, "an order was decided twice"
        self.orders[key] = order
        return order


def score_of(group: str, index: int) -> float:
    """The score of a sample: 0 or 1, the same whenever it is made again."""
    return float(crc32(f"{group}/{index}".encode()) % 2)


def _travelled(value: Any) -> Any:
    return from_json(to_json(value))


def schedulable(deadlines: Mapping[int, int], first_step: int, slots: int) -> bool:
    """Whether every group can be trained by its deadline (see `controller.ledger.admission`)."""
    return tightest_prefix(deadlines, first_step, slots) is None
