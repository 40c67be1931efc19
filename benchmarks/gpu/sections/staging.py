"""A checkpoint's way off the device: pieces copied into pinned memory, and into memory that is not.

The first copy has to get the memory, later ones reuse it. Then the pieces are written, read again and compared.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from policy_worker.checkpoints.state import load_model_state, model_state, state_to_save
from policy_worker.checkpoints.storage import Staging, pieces_of, write_pieces
from policy_worker.model.model import PolicyModel
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.trained.lr_schedule import Schedule
from policy_worker.trained.trainer import Trainer
from schema.config import Config

LAYERS = 4
"""Of the large shape: with AdamW's state 6 GB, enough for the speed of the bus."""


def run(bench: Bench) -> None:
    group = RankGroup(RankEnvironment())
    try:
        layers = {} if bench.tiny else {"num_hidden_layers": LAYERS}
        train = {"param_dtype": "float32", "optm_impl": "fused", "compile": False, "train_policy": {"type": "sft"}}
        model = PolicyModel(bench.language_model(**layers))
        trainer = Trainer(model, Config.model_validate({"train": train}), group, Schedule(1000))
        _stage(bench, trainer)
        _write(bench, trainer)
    finally:
        group.close()


def _stage(bench: Bench, trainer: Trainer) -> None:
    state = state_to_save(trainer, ["model", "optimizer"])
    pieces = [piece for of_kind in state.values() for piece in pieces_of(of_kind)]
    total = sum(piece.data.nbytes for piece in pieces) / 1e9
    for name, device in (("pinned", bench.device), ("pageable", torch.device("cpu"))):
        staging = Staging(device)
        first = bench.wall(lambda staging=staging: staging.copy(pieces))
        later = min(bench.wall(lambda staging=staging: staging.copy(pieces)) for _ in range(3))
        bench.row(f"{name} copy", gb=total, first_s=first, later_s=later, gb_s=total / later)
        equal = all(torch.equal(a.data, b.data.cpu()) for a, b in zip(staging.copy(pieces), pieces, strict=True))
        bench.check(f"{name} copy is equal", equal)


def _write(bench: Bench, trainer: Trainer) -> None:
    """The model alone, written from pinned memory and loaded back over spoiled weights."""
    pieces = Staging(bench.device).copy(pieces_of(model_state(trainer.model)))
    expected = {piece.key: piece.data.clone() for piece in pieces}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model-00000.safetensors"
        seconds = bench.wall(lambda: write_pieces(path, pieces))
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()
        loading = bench.wall(lambda: load_model_state(trainer.model, Path(folder)))
    found = model_state(trainer.model)
    right = all(torch.equal(found[key].cpu(), tensor) for key, tensor in expected.items())
    n_bytes = sum(tensor.nbytes for tensor in expected.values()) / 1e9
    bench.check("written, loaded and equal", right, gb=n_bytes, write_s=seconds, load_s=loading)
