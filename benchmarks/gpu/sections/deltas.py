"""A delta of the weights, from a trainer's tensors on the device into a model's on the device, bit by bit.

After real AdamW steps at a learning rate of 1e-6 the new version is encoded on the host and written; the model's
parameters are overwritten in place, and all bits are compared. Next to it: a plain copy of everything, and how long
the device itself takes to find what has changed, which needs the version before to stay in its memory.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.weights.sides import Replica, Tensors, Trainer
from benchmarks.weights.versions import Job
from weight_sync.hf_names import hub_tensors
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
    _find_on_device(bench, trainer, old, new)


def _find_on_device(bench: Bench, trainer: Trainer, old: Tensors, new: Tensors) -> None:
    """Positions and values of what has changed, found by the device and brought to the host."""
    before = {name: tensor.to(bench.device) for name, tensor in old.items()}

    def find() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        found = {}
        for name, tensor in hub_tensors(trainer.model, dtype=torch.bfloat16):
            bits = tensor.reshape(-1).view(torch.int16)
            positions = (bits != before[name].reshape(-1).view(torch.int16)).nonzero().flatten()
            found[name] = positions.cpu(), bits[positions].cpu()
        return found

    right = True
    for name, (positions, values) in find().items():
        rebuilt = old[name].reshape(-1).view(torch.int16).clone()
        rebuilt[positions] = values
        right &= torch.equal(rebuilt, new[name].reshape(-1).view(torch.int16))
    bench.check("changes found by the device", right, ms=bench.seconds(find) * 1e3)
