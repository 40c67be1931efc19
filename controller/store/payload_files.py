"""The files of payloads that pass by the controller (see `schema.wire.payload_file`): are they there, may they go?

A file is kept while its sample's payload is, or while its lease lasts (its stub may be on the way). Of all others
none is ever read again, so `sweep` removes them: at once when the group went another way, after GRACE seconds when
this ledger knows nothing of its lease (it may have lost history, and the holder declares itself soon).

The ledger forgets first: files are removed after what was forgotten is in Redis. If Redis then comes back with an
older state, the trainer's batch finds the file missing, and the group is made again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from controller.ledger.group import GroupState
from controller.ledger.group_table import GroupTable
from controller.store import StoreUnavailable
from controller.store.lock import elapsed
from schema.wire.payload_file import FileName, StubEntry, is_there

log = logging.getLogger(__name__)

GRACE = 60.0
LOOK_SECONDS = 10.0
"""For a look at the files of one call: a directory on another machine may hang for ever."""
UNDECIDED = (GroupState.WAITING, GroupState.LEASED)


class PayloadFiles:
    """The directory of one job. Everything that touches it runs in a thread: it may be on another machine."""

    def __init__(self, root: Path, look_seconds: float = LOOK_SECONDS, clock: Callable[[], float] = elapsed) -> None:
        self.root, self._look_seconds, self._clock = root, look_seconds, clock
        self._seen: dict[str, float] = {}
        """When the files that the last look found were found first: their own times are of other hosts' clocks."""

    async def missing(self, entries: Sequence[StubEntry]) -> set[str]:
        """Names of entries whose file is missing or incomplete. Raises `StoreUnavailable`: the directory hangs."""
        if not entries:
            return set()
        try:
            async with asyncio.timeout(self._look_seconds):
                present = await asyncio.to_thread(lambda: [is_there(self.root, entry) for entry in entries])
        except TimeoutError:
            raise StoreUnavailable(f"the directory {self.root} of payloads does not answer") from None
        return {entry.name for entry, exists in zip(entries, present, strict=True) if not exists}

    async def sweep(self, table: GroupTable, saved: Callable[[], Awaitable[None]]) -> int:
        """Remove files that are no longer needed; how many. `saved` waits until the ledger is stored."""
        listed = await asyncio.to_thread(self._list)
        useless = [name for name, age in listed if not needed(table, name, age)]
        if useless:
            await saved()
            await asyncio.to_thread(self._remove, useless)
        return len(useless)

    def _list(self) -> list[tuple[str, float]]:
        """Names, and for how many seconds they have been known here."""
        now = self._clock()
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:  # nothing has been written yet
            return []
        except OSError as error:
            log.warning("payloads in %s cannot be listed: %s", self.root, error)
            return []
        self._seen = {name: self._seen.get(name, now) for name in names}
        return [(name, now - since) for name, since in self._seen.items()]

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                (self.root / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("payload %s cannot be removed: %s", self.root / name, error)


def needed(table: GroupTable, name: str, age: float) -> bool:
    """Whether a file may still be read. Of files that are no payloads, those half written are removed when old."""
    file = FileName.parse(name)
    if file is None:
        return not name.startswith(".") or age <= GRACE
    group = table.find(file.group_id)
    if group is None:
        return age <= GRACE
    meta = group.samples.get(file.index)
    if meta is not None and meta.lease_id == file.lease_id:
        return group.payload_kept
    if group.state is GroupState.LEASED and group.lease_id == file.lease_id:
        return True
    return group.state in UNDECIDED and age <= GRACE
