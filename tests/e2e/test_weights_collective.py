"""A whole job whose weights go from the trainer to the rollout host directly, and by the store where they must."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from controller.client import Client
from schema.wire.messages import PublicationInfo
from tests.e2e.held import go_on
from tests.e2e.program import LONG, Program, check_ledger
from tests.e2e.test_weights import publications
from tests.e2e.versions import job
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LONG)]

HELD, INTERVAL = 14, 5
KEYS = f"""
transport = "collective"
collective_timeout = 12.0
checksum_interval = 1
anchor_interval = {INTERVAL}
keep = 1
"""


def test_versions_come_from_the_trainer_and_to_a_late_replica_as_anchor_and_deltas_from_the_store(
    tmp_path: Path, model: Path
) -> None:
    """The late one joins while the trainer stands still; its host has nothing: the copy went with its predecessor."""

    def newest(program: Program, updates: int) -> list[PublicationInfo] | None:
        """All publications, oldest first, once so many replicas serve the newest."""
        found = sorted(publications(program), key=lambda info: info.publication.id)
        last = found[-1]
        return found if last.publication.version == HELD and len(last.updates) >= updates else None

    with Program(job(tmp_path, model, steps=HELD + 2, keys=KEYS, held_at=HELD)) as program:
        program.until_step(HELD)
        found = program.until("the newest version is served", lambda _: newest(program, 1))
        for info in found:
            assert info.publication.offer is None, "its token is nobody's business"
            for update in info.updates:
                assert (update.transport, update.checked) == ("collective", True), update.detail
        by_id = {info.publication.id: info for info in found}
        last = found[-1].publication
        assert last.kind == "delta"
        begins = by_id[last.begins].publication.version
        assert begins in range(HELD - INTERVAL, HELD), "an anchor that is not far away"
        gone = {info.publication.version for info in found if info.files != "kept"}
        assert set(range(begins)) - gone <= set(range(begins - INTERVAL - 1, begins))
        trainer, early = program.pid_of("policy_worker"), program.pid_of("rollout_worker")
        os.kill(early, signal.SIGTERM)
        log = program.run_dir / "logs" / "rollout-0.log"
        until(lambda: "registered as rollout-0.2" in log.read_text(), "its successor, whose engine starts now")

        def with_weights(_: Client) -> list[PublicationInfo] | None:
            os.kill(trainer, signal.SIGSTOP)  # again: its keeper continues it after 30 s
            return newest(program, 2)

        try:
            found = program.until("its successor has weights", with_weights)
        finally:
            os.kill(trainer, signal.SIGCONT)
        before, late = found[-1].updates
        assert (before.mode, late.mode) == ("in_place", "full")
        assert (late.transport, late.checked) == ("store", True)
        assert "did not come within 12 s" in late.detail
        deltas = sum(by_id[number].publication.n_bytes for number in range(last.begins + 1, last.id + 1))
        assert late.n_bytes > deltas, "the deltas, and the anchor"
        go_on(program.config)
        summary = program.finish()
    check_ledger(summary, 0, trained=(HELD + 2) * 4)
