"""A version of the 1.5B model, published as a delta: how long training pauses, and how long until it is in the store.

The pause is what training waits for: cast, and copy into pinned memory. Encoding and writing go on next to the next
step. Goals: less than 50 ms and less than half a second. `on_device_ms` is the pause that would remain if the cast
tensors stayed on the device and were copied to the host in parallel with the next step.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.gpukit.bench import Bench
from policy_worker.weights.release import MOST_THREADS
from weight_sync import HubNames
from weight_sync.publishing.gather import Gathering
from weight_sync.publishing.pinned_copy import PinnedCopy
from weight_sync.publishing.writer import write_delta, write_full
from weight_sync.stores import DirectoryStore, version_name

LR, WARM_UP, ROUNDS = 1e-6, 12, 3


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
        copy.take(Gathering(HubNames(lm), 0, 1).tensors(torch.bfloat16))

    threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))
    with tempfile.TemporaryDirectory(dir=bench.in_memory(8)) as folder, ThreadPoolExecutor(threads) as pool:
        store = DirectoryStore(Path(folder))
        first = bench.wall(take)
        full = sum(tensor.nbytes for tensor in copy.taken.values()) / 1e9
        began = time.perf_counter()
        with store.stage(version_name(0, 0, "")) as stage:
            write_full(stage, copy.taken.items())
        bench.row("first version, full", pause_ms=first * 1e3, write_s=time.perf_counter() - began, gb=full)
        copy.announce()
        for number in range(1, ROUNDS + 1):
            train()
            pause = bench.wall(take)
            began = time.perf_counter()
            with store.stage(version_name(0, number, "")) as stage:
                part = write_delta(stage, copy.pairs(), pool=pool)
            seconds = time.perf_counter() - began
            copy.announce()
            bench.row(
                f"version {number}, delta",
                pause_ms=pause * 1e3,
                publication_s=pause + seconds,
                bytes_ratio=part.n_bytes / (full * 1e9),
                gb=full,
                threads=threads,
            )
    remains = bench.seconds(lambda: list(Gathering(HubNames(lm), 0, 1).tensors(torch.bfloat16)))
    bench.row("cast on the device alone", on_device_ms=remains * 1e3)
