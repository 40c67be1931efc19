"""Jobs whose weights change as in real work, and what lies in their stores."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from schema.wire.weights import Publication, WeightManifest
from tests.e2e.held import hold
from tests.e2e.program import Program, write_config
from weight_sync import HubNames, Store
from weight_sync.host.host_copy import HostCopy
from weight_sync.layout import digest

VARIED = """
def varied(completion, row):
    return sum(map(ord, completion)) % 7 / 7
"""
"""An untrained model earns nothing otherwise, and no step would change anything."""
CHANGES = {
    'dtype = "float32"\nn_generation': 'dtype = "bfloat16"\nn_generation',
    'param_dtype = "float32"': 'param_dtype = "float32"\ntransfer_dtype = "bfloat16"',
    "optm_lr = 1e-3": "optm_lr = 2e-6\noptm_warmup_steps = 1",
}
"""bfloat16 of float32 masters at a learning rate of real work: few of its values change in a step."""


def job(folder: Path, model: Path, engine: str = "transformers", *, steps: int, held_at: int, keys: str) -> Path:
    """An on-policy job held at a step, so that no version is passed over. keys: of `[weight_sync]`."""
    config = write_config(folder, model, engine=engine, bound=0, steps=steps, rows=4 * steps, validation=False)
    text = config.read_text()
    for before, after in CHANGES.items():
        assert before in text
        text = text.replace(before, after, 1)
    config.write_text(f"{text}\n[weight_sync]\n{keys}\n")
    hold(config, held_at, rows=4 * steps)
    (folder / "varied.py").write_text(VARIED)
    text = config.read_text()
    assert "format = 0.2" in text
    config.write_text(text.replace("format = 0.2", f'"{folder}/varied.py:varied" = 1.0'))
    return config


def newest_of(program: Program, store: Store) -> Publication:
    """The publication that the trainer announced last, as the job's record and the store have it."""
    lines = [json.loads(line) for line in (program.run_dir / "publications.jsonl").read_text().splitlines()]
    last = max(lines, key=lambda line: line["id"])  # the first of its lines: an anchor is noted after it
    text = bytes(store.read(last["uri"]))
    manifest = WeightManifest.model_validate_json(text)
    return Publication(
        id=last["id"],
        version=manifest.version,
        timeline=manifest.timeline,
        uri=last["uri"],
        manifest_hash=digest(text).hex(),
        content_hash=manifest.content_hash,
        n_bytes=sum(file.n_bytes for file in manifest.files),
        kind=manifest.kind,
    )


def weights_of(folder: Path, store: Store, publication: Publication) -> dict[str, torch.Tensor]:
    """What a host that joins now gets out of the store."""
    copy = HostCopy(folder, store)
    try:
        weights = copy.advance(publication)
        assert weights.publication.version == publication.version
        with weights.reading():
            return {name: tensor.clone() for name, tensor in weights.tensors()}
    finally:
        copy.close()


def check_equal(program: Program, published: dict[str, torch.Tensor]) -> None:
    """The published weights are the final model's, bit for bit."""
    exported = AutoModelForCausalLM.from_pretrained(program.run_dir / "final", dtype=torch.float32)
    trained = dict(HubNames(exported).tensors(dtype=torch.bfloat16))
    assert published.keys() == trained.keys()
    for name, tensor in trained.items():
        assert torch.equal(published[name].view(torch.int16), tensor.view(torch.int16)), name
