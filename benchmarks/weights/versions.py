"""What a version of the weights costs: as a delta, and as a plain safetensors file.

    python -m benchmarks.weights.versions [--rounds 3] [--sizes 100,500] [--seconds 900] [--device cpu]

Models of about so many million parameters, float32 masters under real AdamW steps (lr 1e-6, random gradients), are
published in bfloat16 step after step: by the publisher's functions into a store, from there by the host copy, and
from there into the parameters of a transformers model in place. Beside it, in turns, the same weights are written as
one safetensors file, read again and copied into the model, with no hash anywhere. All bits are compared after each.

    shm      a directory in /dev/shm
    1gbit    the same directory behind a token bucket of 125 MB/s in each direction, for both

`pause` is the time in which a model cannot generate: writing what changed, and reading it back. The codec alone
is compared with memcpy and with the usual alternative, XOR and zstd. Medians over the rounds; the last line has the
last size. Its `pause_ratio` is the larger one of both stores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file

from benchmarks.harness import Figures, in_turns, medians, options, report, say, table
from benchmarks.weights.codecs import STEPS, codecs
from benchmarks.weights.sides import CORES, SHAPES, Replica, Tensors, Trainer, Versions
from benchmarks.weights.slow_store import LimitedStore
from weight_sync.host.host_copy import HostCopy
from weight_sync.layout import dtype_name, tensor_bytes
from weight_sync.publishing.writer import write_delta, write_full
from weight_sync.stores import DirectoryStore, Store, version_name

RATE = 1e9 / 8


class Job:
    """One store with a publisher before it and a host copy and a model behind it."""

    def __init__(self, root: Path, store: Store, fast: Store, first: Tensors, replica: Replica) -> None:
        """fast: the same store without a limit, for the first full version, which is not measured."""
        self._root, self._store, self._replica = root, store, replica
        self._versions, self._pool = Versions(), ThreadPoolExecutor(CORES)
        publication, _, _ = self._versions.publish(fast, lambda stage: write_full(stage, first.items()))
        with_copy = HostCopy(root / "copy", fast)
        with_copy.advance(publication)
        self._copy = HostCopy(root / "copy", store)
        with_copy.close()
        self._at = publication.content_hash

    def close(self) -> None:
        self._copy.close()
        self._pool.shutdown()

    def delta(self, old: Tensors, new: Tensors) -> dict[str, float]:
        """A version from the trainer's tensors into the model's: seconds by stage."""
        began = time.perf_counter()
        publication, part, took = self._versions.publish(
            self._store,
            lambda stage: write_delta(stage, ((name, old[name], new[name]) for name in new), pool=self._pool),
        )
        encode = part.seconds["encode"]
        seconds = {"encode": encode, "write": took - encode}
        weights = self._copy.advance(publication)
        seconds |= {"fetch": weights.seconds["fetch"], "verify": weights.seconds["verify"]}
        seconds["advance"] = weights.seconds["advance"]
        prepared = time.perf_counter()
        pieces = weights.changes_since(self._at)
        assert pieces is not None
        patch = self._replica.prepare(pieces)
        paused = time.perf_counter()
        assert not patch.apply()
        resumed = time.perf_counter()
        self._at = publication.content_hash
        seconds |= {"prepare": paused - prepared, "pause": resumed - paused, "all": resumed - began}
        full = sum(tensor.nbytes for tensor in new.values())
        elements = sum(tensor.numel() for tensor in new.values())
        changed = sum(entry.changed or 0 for entry in part.tensors.values())
        manifest_bytes = (self._root / "store" / publication.uri).stat().st_size
        n_bytes = publication.n_bytes + manifest_bytes
        return seconds | {"bytes": n_bytes / full, "changed": changed / elements}

    def plain(self, new: Tensors) -> dict[str, float]:
        """The same by one safetensors file: written, read, copied into the model."""
        began = time.perf_counter()
        target = version_name(0, 0, "plain")
        with self._store.stage(target) as stage:
            with stage.create("model.safetensors") as stream:
                write_plain(stream, new)
            stage.commit()
        written = time.perf_counter()
        there = self._root / "store" / target / "model.safetensors"
        if self._store.directory is None:
            self._store.download(f"{target}/model.safetensors", self._root / "here.safetensors")
            there = self._root / "here.safetensors"
        fetched = time.perf_counter()
        self._replica.load(load_file(there))
        end = time.perf_counter()
        there.unlink()
        self._store.delete(target)
        load = end - fetched
        seconds = {"write": written - began, "fetch": fetched - written, "load": load, "pause": load}
        return {**seconds, "all": end - began}


def write_plain(stream: IO[bytes], tensors: Tensors) -> None:
    """A safetensors file, tensor by tensor."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": dtype_name(tensor.dtype, name),
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    stream.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in tensors.items():
        stream.write(tensor_bytes(name, tensor))


def measure(millions: int, given: argparse.Namespace, give_up: float) -> dict[str, Figures]:
    """Medians by variant: codec, shm delta, shm plain, 1gbit delta, 1gbit plain."""
    trainer, replica = Trainer(millions, given.device), Replica(millions, given.device)
    new = trainer.weights()
    elements = sum(tensor.numel() for tensor in new.values())
    print(f"\n{elements / 1e6:.0f}M parameters, {elements * 2 / 1e9:.2f} GB in bfloat16", flush=True)
    taken: dict[str, list[dict[str, float]]] = {}
    place = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="weights-"))
    jobs: dict[str, Job] = {}
    try:
        for name, rate in (("shm", None), ("1gbit", RATE)):
            fast = DirectoryStore(place / name / "store")
            store = fast if rate is None else LimitedStore(fast.root, rate)
            jobs[name] = Job(place / name, store, fast, new, replica)
            for version in fast.versions():  # the first full version is on the host now
                shutil.rmtree(fast.root / version)
        for number in range(given.rounds + 1):  # the first one warms up
            if number > 1 and time.monotonic() > give_up:
                say(f"no time for more than {number - 1} rounds")
                break
            old = new
            trainer.step()
            new = trainer.weights()

            def brought(
                way: Callable[[], dict[str, float]], old: Tensors = old, new: Tensors = new
            ) -> dict[str, float]:
                replica.load(old)
                result = way()
                replica.check(new)
                return result

            ways: dict[str, Callable[[], dict[str, float]]] = {"codec": partial(codecs, old, new)}
            for name, job in jobs.items():
                ways[f"{name} delta"] = partial(brought, partial(job.delta, old, new))
                ways[f"{name} plain"] = partial(brought, partial(job.plain, new))
            for name, results in in_turns(ways, 1, warm_up=0).items():
                taken[name] = [*taken.get(name, []), *results] if number else []
    finally:
        for job in jobs.values():
            job.close()
        shutil.rmtree(place, ignore_errors=True)
    return {name: medians(rows) for name, rows in taken.items()}


STAGES = ("encode", "write", "fetch", "verify", "advance", "prepare", "load", "pause", "all")


def show(rows: dict[str, Figures]) -> Figures:
    """Print one size as tables; the figures of the last line."""
    speeds, delta = rows["codec"], rows["shm delta"]
    by = {"GB/s of model size": "", "GB per CPU second": " CPU"}
    codec = {title: {step: speeds[f"{step}{suffix}"] for step in STEPS} for title, suffix in by.items()}
    codec["bytes"] = {"encode": delta["bytes"], "xor+zstd encode": speeds["xor+zstd bytes"]}
    ways = {name: row for name, row in rows.items() if name != "codec"}
    print(table(codec), table({name: {s: row.get(s) for s in STAGES} for name, row in ways.items()}), sep="\n\n")
    pauses = {name: rows[f"{name} delta"]["pause"] / rows[f"{name} delta"]["all"] for name in ("1gbit", "shm")}
    ratios = {f"time_ratio_{name}": rows[f"{name} delta"]["all"] / rows[f"{name} plain"]["all"] for name in pauses}
    print(f"\npause as share of the whole: {pauses}")
    return {
        "bytes_ratio": delta["bytes"], "changed": delta["changed"], **ratios, "encode_gb_s": speeds["encode"],
        "decode_gb_s": speeds["decode"], "pause_ratio": max(pauses.values()),
    }  # fmt: skip


def main() -> None:
    given = options(
        __doc__, rounds=3, sizes=([100, 500], "million parameters: of " + ", ".join(map(str, SHAPES))),
        seconds=(900.0, "no round of a size begins after so many; one always does"),
        device=("cpu", "where trainer and replica hold their weights: cpu, cuda"),
    )  # fmt: skip
    began, figures = time.monotonic(), {}
    with torch.no_grad():
        for i, size in enumerate(given.sizes):
            figures = show(measure(size, given, began + given.seconds * (i + 1) / len(given.sizes)))
    report(given, figures)


if __name__ == "__main__":
    main()
