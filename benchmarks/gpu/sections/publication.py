"""A version of the 1.5B model, published as a delta: how long training pauses, and how long until it is in the store.

The pause is what training waits for: cast, and copy into pinned memory. Encoding and writing go on next to the next
step. Goals: less than 50 ms and less than half a second. `on_device_ms` is the pause that would remain if the cast
tensors stayed on the device and were copied to the host in parallel with the next step.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.weights.sides import Versions
from policy_worker.weights.release import MOST_THREADS
from weight_sync import HubNames
from weight_sync.publishing.gather import TensorGathering
from weight_sync.publishing.pinned_copy import PinnedCopy
from weight_sync.publishing.writer import write_delta, write_full
from weight_sync.stores import DirectoryStore

LR, WARM_UP, ROUNDS = 1e-6, 12, 5


def run(bench: Bench) -> None:
    lm = bench.language_model()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LR, fused=True)
    generator = torch.Generator(bench.device).manual_seed(0)

    def train() -> None:
        for parameter in lm.parameters():
            parameter.grad = torch.randn(parameter.shape, device=bench.device, generator=generator)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2 if bench.tiny else WARM_UP):  # the first steps of AdamW change more than later ones
        train()
    copy = PinnedCopy(keeps=True)

    def take() -> None:
        copy.take(TensorGathering(HubNames(lm), 0, 1).tensors(torch.bfloat16))

    usual = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))
    place = bench.in_memory(8)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        store, versions = DirectoryStore(Path(folder)), Versions()
        pause = bench.wall(take)
        full = sum(tensor.nbytes for tensor in copy.taken.values()) / 1e9
        _, _, seconds = versions.publish(store, lambda stage: write_full(stage, copy.taken.items()))
        copy.announce()
        bench.row("first version, full", pause_ms=pause * 1e3, write_s=seconds, gb=full, in_memory=bool(place))

        def delta(threads: int) -> dict[str, float]:
            train()
            pause = bench.wall(take)
            with ThreadPoolExecutor(threads) as pool:
                _, part, seconds = versions.publish(store, lambda stage: write_delta(stage, copy.pairs(), pool=pool))
            copy.announce()
            return {
                "pause_ms": pause * 1e3,
                "publication_s": pause + seconds,
                "bytes_ratio": part.n_bytes / (full * 1e9),
                "threads": float(threads),
            }

        bench.row("first delta, which gets its memory", **delta(usual))
        for threads in {2 * usual, max(1, usual // 2)}:
            bench.row(f"delta, {threads} threads", **delta(threads))
        found = [delta(usual) for _ in range(1 if bench.tiny else ROUNDS)]
        bench.row("delta, median", **{key: statistics.median(one[key] for one in found) for key in found[0]})
    remains = bench.seconds(lambda: list(TensorGathering(HubNames(lm), 0, 1).tensors(torch.bfloat16)))
    bench.row("cast on the device alone", on_device_ms=remains * 1e3)
