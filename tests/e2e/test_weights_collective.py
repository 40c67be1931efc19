"""A whole job whose weights go from the trainer to the rollout host directly, and by the store where they must."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from schema.wire.messages import PublicationInfo
from tests.e2e.held import go_on
from tests.e2e.program import LONG, Program, check_ledger
from tests.e2e.test_weights import publications
from tests.e2e.versions import job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LONG)]


def test_versions_come_from_the_trainer_and_from_the_store_while_it_stands_still(
    tmp_path: Path, model: Path
) -> None:
    held_at = 4
    keys = 'transport = "collective"\ncollective_timeout = 10.0\nchecksum_interval = 1'
    config = job(tmp_path, model, steps=7, keys=keys, held_at=held_at)

    def served(program: Program, version: int, updates: int) -> PublicationInfo | None:
        for info in publications(program):
            if info.publication.version == version and len(info.updates) >= updates:
                return info
        return None

    with Program(config) as program:
        program.until_step(held_at)
        program.until("the newest version is served", lambda _: served(program, held_at, 1))
        for info in publications(program):
            assert info.publication.offer is None, "its token is nobody's business"
            for update in info.updates:
                assert (update.transport, update.checked) == ("collective", True), update.detail
        trainer = program.pid_of("policy_worker")
        os.kill(trainer, signal.SIGSTOP)
        try:
            os.kill(program.pid_of("rollout_worker"), signal.SIGTERM)
            info = program.until("its successor has weights", lambda _: served(program, held_at, 2))
        finally:
            os.kill(trainer, signal.SIGCONT)
        update = info.updates[-1]
        assert (update.transport, update.checked) == ("store", True)
        assert "did not come within 10 s" in update.detail
        go_on(program)
        summary = program.finish()
    check_ledger(summary, 0, trained=7 * 4)
