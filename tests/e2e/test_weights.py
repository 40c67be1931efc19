"""Weights of whole jobs: they travel as deltas, and what an engine serves is what the trainer has, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.client import calls as api
from schema.wire.messages import PublicationInfo
from tests.e2e.program import LONG, Program
from tests.e2e.versions import job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LONG)]


def publications(program: Program) -> list[PublicationInfo]:
    with program.client() as client:
        return client.send(api.publications())


@pytest.mark.parametrize("engine", [pytest.param("transformers", marks=pytest.mark.soak), "vllm"])
def test_served_weights_are_the_trained_ones_at_every_version(
    tmp_path: Path, model: Path, engine: str
) -> None:
    """On-policy, so that no version is passed over; the engine's own weights are hashed after every update. The
    launcher is killed then, and nothing of the engine outlives it."""
    held_at = 6
    config = job(tmp_path, model, engine, steps=7, keys="checksum_interval = 1", held_at=held_at)
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
        program.note_processes()
        program.process.kill()
        program.wait()
        program.wait_no_orphans()
