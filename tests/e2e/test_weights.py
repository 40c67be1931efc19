"""Weights of whole jobs: they travel as deltas, and what an engine serves is what the trainer has, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from controller.client import calls as api
from schema.wire.messages import PublicationInfo
from tests.e2e.held import go_on
from tests.e2e.program import LONG, Program, check_ledger
from tests.e2e.versions import check_equal, job, newest_of, weights_of
from weight_sync import DirectoryStore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LONG)]


def publications(program: Program) -> list[PublicationInfo]:
    with program.client() as client:
        return client.send(api.publications())


@pytest.mark.parametrize("engine", [pytest.param("transformers", marks=pytest.mark.soak), "vllm"])
def test_served_weights_are_the_trained_ones_at_every_version(
    tmp_path: Path, model: Path, engine: str
) -> None:
    """On-policy, so that no version is passed over; the engine's own weights are hashed after every update."""
    held_at = 6
    config = job(tmp_path, model, engine, steps=8, keys="checksum_interval = 1", held_at=held_at)
    with Program(config) as program:
        program.until_step(held_at)

        def all_checked(_: object) -> list[PublicationInfo] | None:
            found = publications(program)
            done = {info.publication.version for info in found if any(u.checked for u in info.updates)}
            return found if done >= set(range(held_at + 1)) else None

        found = program.until("every version is served and checked", all_checked)
        by_version = {info.publication.version: info for info in found}
        kinds = [by_version[version].publication.kind for version in range(held_at + 1)]
        assert kinds == ["full"] + ["delta"] * held_at
        for version, info in by_version.items():
            (update,) = info.updates
            assert update.checked is True, f"version {version}"
            assert update.mode == ("in_place" if version else "full"), f"version {version}: {update.detail}"
        deltas = [info for info in found if info.publication.kind == "delta"]
        assert all(info.density and 0 < info.density < 0.2 for info in deltas[1:]), (
            "something changed, not much"
        )
        assert all(info.ratio is not None and info.ratio < 0.5 for info in deltas)
        go_on(program)
        summary = program.finish()
    check_ledger(summary, 0, trained=8 * 4)
    store = DirectoryStore(program.run_dir / "weights")
    newest = newest_of(program, store)
    assert newest.version == 8
    check_equal(program, weights_of(tmp_path / "late", store, newest))


def test_a_replica_that_joins_late_comes_by_an_anchor_and_deltas(tmp_path: Path, model: Path) -> None:
    """Its host has nothing: the copy of the one before went with it."""
    held_at, interval = 14, 5
    keys = f"checksum_interval = 1\nanchor_interval = {interval}\nkeep = 1"
    config = job(tmp_path, model, steps=16, keys=keys, held_at=held_at)
    with Program(config) as program:
        program.until_step(held_at)

        def served(_: object) -> list[PublicationInfo] | None:
            found = publications(program)
            newest = max(found, key=lambda info: info.publication.id)
            return found if newest.publication.version == held_at and newest.updates else None

        found = program.until("the newest version is served", served)
        before = {info.publication.id: info for info in found}
        newest = before[max(before)].publication
        assert (newest.version, newest.kind) == (held_at, "delta")
        begins = before[newest.begins].publication
        assert begins.version in range(held_at - interval, held_at), "an anchor that is not far away"
        gone = {info.publication.version for info in before.values() if info.files != "kept"}
        assert set(range(begins.version)) - gone <= set(range(begins.version - interval - 1, begins.version))
        os.kill(program.pid_of("rollout_worker"), signal.SIGTERM)

        def back(_: object) -> PublicationInfo | None:
            info = next(i for i in publications(program) if i.publication.id == newest.id)
            return info if len(info.updates) == 2 else None

        updates = program.until("its successor serves the newest version", back).updates
        assert [(update.mode, update.checked) for update in updates] == [("in_place", True), ("full", True)]
        deltas = sum(before[number].publication.n_bytes for number in range(newest.begins + 1, newest.id + 1))
        assert updates[1].n_bytes > deltas, "the deltas, and the anchor"
        go_on(program)
        summary = program.finish()
    check_ledger(summary, 0, trained=16 * 4)
