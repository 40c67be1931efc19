"""What a replica reports of weights that it brought here and put to use."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_worker.engines.base import Checksum, LoadReport, WeightMismatch
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.weights.follower import WeightFollower
from rollout_worker.weights.host_weights import Arrival
from schema.config.sections.weight_sync import WeightSyncConfig
from schema.wire.messages import UpdateReport
from schema.wire.weights import Publication


def publication(number: int) -> Publication:
    return Publication(
        id=number, version=number, timeline=0, uri="v", manifest_hash="m", content_hash="c", n_bytes=1
    )  # fmt: skip


class Here:
    """A host to which each version brings as many bytes as its number, a controller, and an engine."""

    def __init__(self, checksum: Checksum | None = None) -> None:
        self.checksum_found, self.reports = checksum, list[UpdateReport]()
        session: Any = SimpleNamespace(newest_publication=0, replica_id="r", incarnation=1, call=self.call)
        config = WeightSyncConfig(checksum_interval=0)
        here: Any = self
        self.follower = WeightFollower(config, session, here, here, LeaseTable(), Metrics())

    async def call(self, of: Any) -> None:
        made = of(SimpleNamespace(replica_id="r", incarnation=1))
        self.reports.append(UpdateReport.model_validate_json(made.body))

    async def advance(self, newest: Publication) -> Arrival:
        weights: Any = SimpleNamespace(publication=newest, seconds={"fetch": 1.0}, n_bytes=newest.id, density=None)
        return Arrival(weights, "store", "")

    async def load_weights(self, weights: Any, version: int) -> LoadReport:
        return LoadReport(0.0, 0.0, 0.0)

    async def checksum(self) -> Checksum | None:
        return self.checksum_found

    async def use(self) -> None:
        """Put what is ready to use, and report it."""
        work = asyncio.create_task(self.follower.update())
        for _ in range(5):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([work])
        await self.follower.reports.flush()
        if not work.cancelled():
            work.result()


def test_bytes_of_weights_that_were_overtaken_are_reported_with_the_next() -> None:
    async def work() -> list[int]:
        here = Here(Checksum("c", True, [], 0.0))
        for numbers in ([1], [2, 3, 5], [], [4], [6]):
            for number in numbers:
                await here.follower._fetch(publication(number))
            await here.use()
        return [report.n_bytes for report in here.reports]

    assert asyncio.run(work()) == [1, 2 + 3 + 5, 4 + 6]


@pytest.mark.parametrize(
    ("checksum", "said"),
    [
        (Checksum("c", True, [], 0.0), ("c", False)),
        (Checksum(None, False, [], 0.0), ("", False)),
        (Checksum("d", True, [], 0.0), ("d", True)),
        (Checksum(None, False, ["w differs"], 0.0), ("", True)),
    ],
    ids=["equal", "not known", "another hash", "no hash"],
)
def test_a_comparison_that_fails_is_reported(checksum: Checksum, said: tuple[str, bool]) -> None:
    here = Here(checksum)

    async def work() -> None:
        await here.follower._fetch(publication(1))
        await here.use()

    if said[1]:
        with pytest.raises(WeightMismatch):
            asyncio.run(work())
    else:
        asyncio.run(work())
    (report,) = here.reports
    assert (report.served_hash, report.differs) == said
