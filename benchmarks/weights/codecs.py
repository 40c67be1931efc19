"""The codec of deltas alone, compared with memcpy and with the usual alternative, XOR and zstd."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import zstandard

from benchmarks.weights.sides import CORES, Tensors
from weight_sync.delta import codec
from weight_sync.layout import BLOCK, tensor_bytes

STEPS = ("memcpy", "encode", "decode", "xor+zstd encode", "xor+zstd decode")


def xor_encode(old: codec.Array, new: codec.Array, pool: ThreadPoolExecutor) -> list[bytes]:
    local = threading.local()

    def one(start: int) -> bytes:
        if not hasattr(local, "tool"):
            local.tool = zstandard.ZstdCompressor(level=1)
        packed: bytes = local.tool.compress((old[start : start + BLOCK] ^ new[start : start + BLOCK]).data)
        return packed

    return list(pool.map(one, range(0, len(new), BLOCK)))


def xor_decode(frames: list[bytes], target: codec.Array, pool: ThreadPoolExecutor) -> None:
    local = threading.local()

    def one(i: int) -> None:
        if not hasattr(local, "tool"):
            local.tool = zstandard.ZstdDecompressor()
        part = target[i * BLOCK : (i + 1) * BLOCK]
        part ^= np.frombuffer(local.tool.decompress(frames[i]), target.dtype)

    list(pool.map(one, range(len(frames))))


def codecs(old: Tensors, new: Tensors) -> dict[str, float]:
    """GB of model size (memcpy: of bytes) in a second of all cores, and of one; and what XOR and zstd make of it."""
    clock, total, xor_bytes = Clock(), 0, 0
    with ThreadPoolExecutor(CORES) as pool:
        for name, tensor in new.items():
            before, now = (codec.bits_of(tensor_bytes(name, t[name]), tensor.itemsize) for t in (old, new))
            target = before.copy()
            total += now.nbytes
            with clock("encode"):
                encoded = codec.encode(before, now, pool=pool)
            assert encoded is not None
            payload = memoryview(b"".join(encoded.parts))
            if encoded.changed:
                with clock("decode"):
                    codec.apply(payload, target, pool)
            assert target.tobytes() == now.tobytes()
            with clock("memcpy"):
                np.copyto(target, now)
            with clock("xor+zstd encode"):
                frames = xor_encode(before, now, pool)
            xor_bytes += sum(map(len, frames))
            np.copyto(target, before)
            with clock("xor+zstd decode"):
                xor_decode(frames, target, pool)
            assert target.tobytes() == now.tobytes()
    speeds = {name: total / 1e9 / seconds for name, seconds in clock.seconds.items()}
    return speeds | {"xor+zstd bytes": xor_bytes / total}


class Clock:
    """Adds up seconds by stage, and as "<stage> CPU" those of all threads on a core."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        began, worked = time.perf_counter(), time.process_time()
        yield
        self._add(stage, time.perf_counter() - began)
        self._add(f"{stage} CPU", time.process_time() - worked)

    def _add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
