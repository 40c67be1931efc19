"""A delta of the weights, from a trainer's tensors on the device into a model's on the device, bit by bit.

After real AdamW steps at a learning rate of 1e-6 the new version is encoded on the host and written; the model's
parameters are overwritten in place, and all bits are compared. Next to it: a plain copy of everything. `publication`
has the changes that the device itself finds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.weights.sides import Replica, Trainer
from benchmarks.weights.versions import Job
from weight_sync.stores import DirectoryStore

ROUNDS = 4


@torch.no_grad()
def run(bench: Bench) -> None:
    millions, device = (1 if bench.tiny else 500), str(bench.device)
    trainer, replica = Trainer(millions, device), Replica(millions, device)
    new = trainer.weights()
    total = sum(tensor.nbytes for tensor in new.values())
    place = bench.in_memory(3 * total / 1e9)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        store = DirectoryStore(Path(folder) / "store")
        job = Job(Path(folder), store, store, new, replica)
        replica.load(new)
        try:
            for number in range(2 if bench.tiny else ROUNDS):
                old = new
                trainer.step()
                new = trainer.weights()
                found = job.delta(old, new)
                replica.check(new)  # raises where one bit differs
                bench.check(
                    f"delta {number} applied on the device: all bits equal",
                    True,
                    gb=total / 1e9,
                    in_memory=bool(place),
                    changed=found["changed"],
                    bytes_ratio=found["bytes"],
                    encode_s=found["encode"],
                    prepare_s=found["prepare"],
                    pause_ms=found["pause"] * 1e3,
                )
        finally:
            job.close()
    bench.row("everything copied in place", pause_ms=bench.wall(lambda: replica.load(new)) * 1e3, gb=total / 1e9)
