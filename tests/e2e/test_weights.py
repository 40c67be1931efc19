"""Weights of whole jobs: they travel as deltas, and what an engine serves is what the trainer has, bit for bit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from controller import api
from schema.wire.messages import PublicationInfo
from schema.wire.weights import Publication, WeightManifest
from tests.e2e.held import go_on, hold
from tests.e2e.program import LONG, Program, check_ledger, write_config
from weight_sync import DirectoryStore, HubNames
from weight_sync.host_copy import HostCopy
from weight_sync.layout import digest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2 * LONG)]

VERSION = re.compile(r"-v(\d+)-")
HALF = {
    'dtype = "float32"\nn_generation': 'dtype = "bfloat16"\nn_generation',
    "optm_lr = 1e-3": "optm_lr = 1e-6",
}
"""As in real work: bfloat16 travels and is served, and a step changes few of its values."""


def job(
    folder: Path,
    model: Path,
    engine: str,
    *,
    steps: int,
    keys: str,
    held_at: int | None = None,
    bound: int = 0,
) -> Path:
    """A job that publishes bfloat16 of float32 masters, at a learning rate of real work."""
    config = write_config(
        folder, model, engine=engine, bound=bound, steps=steps, rows=4 * steps + 8, validation=False
    )
    text = config.read_text()
    for before, after in HALF.items():
        assert before in text
        text = text.replace(before, after, 1)
    text = text.replace('param_dtype = "float32"', 'param_dtype = "float32"\ntransfer_dtype = "bfloat16"')
    config.write_text(f"{text}\n[weight_sync]\n{keys}\n")
    return config if held_at is None else hold(config, held_at, rows=4 * steps)


def publications(program: Program) -> list[PublicationInfo]:
    with program.client() as client:
        return client.send(api.publications())


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_served_weights_are_the_trained_ones_at_every_version(
    tmp_path: Path, model: Path, engine: str
) -> None:
    """On-policy, so that no version is passed over; the engine's own weights are hashed after every update."""
    held_at = 10
    config = job(tmp_path, model, engine, steps=14, keys="checksum_interval = 1", held_at=held_at)
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
        assert all(info.ratio < 0.5 for info in found if info.publication.kind == "delta" and info.ratio)
        go_on(program)
        summary = program.finish()
    check_ledger(summary, 0, trained=14 * 4)
    newest = newest_in(DirectoryStore(program.run_dir / "weights"))
    assert newest.version == 14
    exported = AutoModelForCausalLM.from_pretrained(program.run_dir / "final", dtype=torch.float32)
    copy = HostCopy(tmp_path / "copy", DirectoryStore(program.run_dir / "weights"))
    try:
        weights = copy.advance(newest)
        with weights.reading():
            published = {name: tensor.clone() for name, tensor in weights.tensors()}
    finally:
        copy.close()
    trained = dict(HubNames(exported).tensors(dtype=torch.bfloat16))
    assert published.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(published[name].view(torch.int16), tensor.view(torch.int16)), name


def newest_in(store: DirectoryStore) -> Publication:
    """What a reader who knows nothing but the store takes for the newest version."""
    uri = f"{max(store.versions(), key=lambda name: int(VERSION.findall(name)[0]))}/manifest.json"
    text = bytes(store.read(uri))
    manifest = WeightManifest.model_validate_json(text)
    return Publication(
        id=1,
        version=manifest.version,
        timeline=manifest.timeline,
        uri=uri,
        manifest_hash=digest(text).hex(),
        content_hash=manifest.content_hash,
        n_bytes=sum(file.n_bytes for file in manifest.files),
        kind=manifest.kind,
    )


def test_a_replica_that_joins_late_comes_by_an_anchor_and_deltas(tmp_path: Path, model: Path) -> None:
    """Its host has nothing: the copy of the one before went with it."""
    held_at = 30
    keys = "checksum_interval = 1\nanchor_interval = 8\nkeep = 1"
    config = job(tmp_path, model, "transformers", steps=34, keys=keys, held_at=held_at)
    with Program(config) as program:
        program.until_step(held_at)
        before = {info.publication.id: info for info in publications(program)}
        newest = before[max(before)].publication
        assert (newest.version, newest.kind) == (held_at, "delta")
        begins = before[newest.begins].publication
        assert begins.version in range(held_at - 8, held_at), "an anchor that is not far away"
        gone = {info.publication.version for info in before.values() if info.files != "kept"}
        assert set(range(begins.version)) - gone <= set(range(begins.version - 9, begins.version))
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
    check_ledger(summary, 0, trained=34 * 4)
