"""Weights of whole jobs: they travel as deltas, and what an engine serves is what the trainer has, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from controller.client import calls as api
from policy_worker.checkpoints.layout import EXPORT
from rollout_worker.engines.checksum import Tally
from rollout_worker.engines.scatter import PublishedTensor
from schema.wire.messages import PublicationInfo, ReplicaUpdate
from schema.wire.weights import Publication
from tests.e2e.program import LONG, Program
from tests.e2e.versions import job

EXPORTS = """
[train.ckpt]
enable_checkpoint = true
save_freq = 1
max_keep = -1
export_safetensors = true
"""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LONG)]


def publications(program: Program) -> list[PublicationInfo]:
    with program.client() as client:
        return client.send(api.publications())


@pytest.mark.parametrize("engine", [pytest.param("transformers", marks=pytest.mark.soak), "vllm"])
def test_served_weights_are_the_trained_ones_at_every_version(tmp_path: Path, model: Path, engine: str) -> None:
    """On-policy, so that no version is passed over; the engine's own weights are hashed after every update. Then the
    replica is killed, and its successor begins with the newest version; at last the launcher is, and nothing of the
    engine outlives it."""
    held_at = 6
    check_versions(job(tmp_path, model, engine, steps=7, keys="checksum_interval = 1", held_at=held_at), held_at)


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["tp_size = 2", "tp_size = 1\npp_size = 2"], ids=["tp", "pp"])
def test_ranks_that_cut_the_model_publish_to_ranks_that_cut_it(tmp_path: Path, model: Path, mesh: str) -> None:
    """The same with a policy of two ranks, next to a vLLM of two that hold parts of each layer. What was published
    is what checkpoints have exported."""
    held_at = 4
    config = job(tmp_path, model, "vllm", steps=5, keys="checksum_interval = 1", held_at=held_at)
    begin, policy, rollout = config.read_text().split("tp_size = 1", 2)
    config.write_text(f"{begin}{mesh}{policy}tp_size = 2{rollout}\n{EXPORTS}")
    published = check_versions(config, held_at)
    for version in range(1, held_at):  # the last one may still be written when the job is killed
        tally = Tally(None)
        export = tmp_path / "run" / "checkpoints" / f"step-{version:08d}" / EXPORT
        for name, tensor in load_file(export / "model.safetensors").items():
            tally.add(name, PublishedTensor(tensor.dtype, tuple(tensor.shape)), tensor)
        assert tally.content_hash == published[version].content_hash


def check_versions(config: Path, held_at: int) -> dict[int, Publication]:
    """Run a job up to where it is held: each version was served with the bits that it was published with."""
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
        assert all(info.density and 0 < info.density < 0.2 for info in deltas[1:]), "something changed, not much"
        assert all(info.ratio is not None and info.ratio < 0.5 for info in deltas)
        program.kill("rollout_worker")

        def taken_over(_: object) -> ReplicaUpdate | None:
            last = max(publications(program), key=lambda info: info.publication.version)
            return next((update for update in last.updates if update.replica_id == "rollout-0.2"), None)

        update = program.until("its successor serves the newest version", taken_over)
        assert (update.mode, update.checked) == ("full", True), update.detail
        program.process.kill()
        program.wait()
        program.wait_no_orphans()
    return {version: info.publication for version, info in by_version.items()}
