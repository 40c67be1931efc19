"""A version of the 1.5B model, published as a delta: how long training stands still, and how long encoding takes.

Training waits for what a job's publisher waits for: gather, cast, compare with the copy on the device, and bring the
changes into pinned memory. Completing the snapshot, encoding and writing go on next to the next step. Goals: at most
60 ms, and at most 0.4 s to complete and encode. A whole version crosses by a plain copy into pinned memory:
`copy_ms` is that copy's own time, next to the pause. `cast on the device alone` is what gathering and casting take.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.roofline import Roof, Work
from benchmarks.weights.sides import Tensors, Versions
from policy_worker.weights.release import encoding_threads
from schema.util.host import count_cores
from weight_sync import HubNames
from weight_sync.publishing.device_copy import DeviceCopy
from weight_sync.publishing.gather import TensorGathering
from weight_sync.publishing.pinned_copy import PinnedCopy
from weight_sync.publishing.writer import WrittenPart, write_delta, write_full
from weight_sync.stores import DirectoryStore, Stage

LR, WARM_UP, ROUNDS = 1e-6, 12, 5


def run(bench: Bench) -> None:
    trainer = _Trainer(bench)
    for _ in range(2 if bench.tiny else WARM_UP):  # the first steps of AdamW change more than later ones
        trainer.step()
    _whole(bench, trainer)
    usual = encoding_threads(count_cores(), 1)
    place = bench.in_memory(8)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        publisher = _Publisher(bench, trainer, DirectoryStore(Path(folder)))
        bench.row("first version, full", **publisher.full(), in_memory=bool(place))
        bench.row("first delta", **publisher.delta(usual))
        for threads in {2 * usual, max(1, usual // 2)}:
            bench.row(f"delta, {threads} threads", **publisher.delta(threads))
        found = [publisher.delta(usual) for _ in range(1 if bench.tiny else ROUNDS)]
        median = {key: statistics.median(one[key] for one in found) for key in found[0]}
        bench.row("delta, median", **median, **publisher.compared(median["pause_ms"] / 1e3))
        bench.check("changes found by the device: all bits equal", publisher.is_right())
    cast = Work(moved=6.0 * trainer.parameters)  # float32 is read, bf16 written
    bench.timed("cast on the device alone", bench.seconds(lambda: list(trainer.tensors())), cast)


def _whole(bench: Bench, trainer: _Trainer) -> None:
    """The pause for a version that crosses whole, once its memory is there, and the copy alone."""
    copy = PinnedCopy(keeps=False)
    copy.take(trainer.tensors())
    pause = min(bench.wall(lambda: copy.take(trainer.tensors())) for _ in range(3))
    ready: Tensors = dict(trainer.tensors())

    def plain() -> None:
        for name, tensor in ready.items():
            copy.taken[name].copy_(tensor, non_blocking=True)

    alone, total = bench.seconds(plain), copy.copied_bytes / 1e9
    roof = bench.roof(Work(moved=8.0 * trainer.parameters, bus=float(copy.copied_bytes)), pause)
    bench.row("whole version", pause_ms=pause * 1e3, **roof, copy_ms=alone * 1e3, gb=total, gb_s=total / alone)


class _Trainer:
    """A model whose weights change as in training, with random gradients."""

    def __init__(self, bench: Bench) -> None:
        self._lm = bench.language_model()
        self._optimizer = torch.optim.AdamW(self._lm.parameters(), lr=LR, fused=True)
        self._generator = torch.Generator(bench.device).manual_seed(0)

    @property
    def parameters(self) -> int:
        """How many numbers are published."""
        return sum(parameter.numel() for parameter in self._lm.parameters())

    def step(self) -> None:
        for parameter in self._lm.parameters():
            parameter.grad = torch.randn(parameter.shape, device=parameter.device, generator=self._generator)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors as a publisher gathers them."""
        return TensorGathering(HubNames(self._lm), 0, 1).tensors(torch.bfloat16)


class _Publisher:
    """Publishes as one rank of a job does."""

    def __init__(self, bench: Bench, trainer: _Trainer, store: DirectoryStore) -> None:
        self._bench, self._trainer, self._store = bench, trainer, store
        self._versions, self._full_bytes = Versions(), 0
        # A rehearsal without a GPU compares as one would.
        self._on_device = DeviceCopy() if bench.on_gpu else DeviceCopy(lambda _: 2**30, smallest=0)
        self._copy = PinnedCopy(keeps=True, on_device=self._on_device)

    def full(self) -> dict[str, float]:
        """The first version, for which memory is allocated and pinned."""
        pause = self._take()
        self._full_bytes = self._copy.copied_bytes
        _, _, seconds = self._versions.publish(self._store, lambda stage: write_full(stage, self._copy.taken.items()))
        self._copy.announce()
        kept = self._on_device.n_bytes / 1e9
        return {"pause_ms": pause * 1e3, "write_s": seconds, "gb": self._full_bytes / 1e9, "on_device_gb": kept}

    def compared(self, pause: float) -> Roof:
        """What the card could do: float32 read, bf16 written, read again next to the copy, and changes copied."""
        work = Work(moved=10.0 * self._trainer.parameters, bus=float(self._copy.copied_bytes))
        return self._bench.roof(work, pause)

    def delta(self, threads: int) -> dict[str, float]:
        """The version after one more step."""
        self._trainer.step()
        pause, encode = self._take(), 0.0
        with ThreadPoolExecutor(threads) as pool:

            def write(stage: Stage) -> WrittenPart:
                nonlocal encode
                began = time.monotonic()
                self._copy.complete(pool)
                encode = time.monotonic() - began
                return write_delta(stage, self._copy.pairs(), positions=self._copy.positions, pool=pool)

            _, part, seconds = self._versions.publish(self._store, write)
        self._copy.announce()
        return {
            "pause_ms": pause * 1e3,
            "encode_s": encode + part.seconds["encode"],
            "publication_s": pause + seconds,
            "copied_gb": self._copy.copied_bytes / 1e9,
            "bytes_ratio": part.n_bytes / self._full_bytes,
            "threads": float(threads),
        }

    def is_right(self) -> bool:
        """Whether the newest version on the host has the bits of the weights."""
        announced = self._copy.announced or {}
        return all(
            torch.equal(announced[name].view(torch.int16), tensor.cpu().view(torch.int16))
            for name, tensor in self._trainer.tensors()
        )

    def _take(self) -> float:
        return self._bench.wall(lambda: self._copy.take(self._trainer.tensors()))
