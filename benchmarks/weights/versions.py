"""What a version of the weights costs: as a delta, and as a plain safetensors file.

    python -m benchmarks.weights.versions [--rounds 3] [--sizes 100,500] [--seconds 900] [--device cpu]

Models of about so many million parameters, float32 masters under real AdamW steps (lr 1e-6, random gradients), are
published in bfloat16 step after step: by the publisher's functions into a store, from there by the host copy, and
from there into the parameters of a transformers model in place. Beside it, in turns, the same weights are written as
one safetensors file, read again and copied into the model, with no hash anywhere. All bits are compared after each.

    shm      a directory in /dev/shm
    1gbit    the same directory behind a token bucket of 125 MB/s in each direction, for both

`pause` is the time in which a model cannot generate: writing what changed, and reading it back. The codec alone
is compared with memcpy and with the usual alternative, XOR and zstd. Medians over the rounds; the last line is one
JSON object, of the last size. Its `pause_ratio` is the larger one of both stores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

# Copies are bound by memory, and the codec has threads of its own.
from benchmarks import harness  # noqa: F401
from rollout_worker.engines.scatter import Place, WeightMap, region_of, storage_of, whole
from rollout_worker.engines.scatter import Published as PublishedTensor
from schema.wire.weights import Link, Publication, TensorEntry
from weight_sync.delta import codec
from weight_sync.delta.delta import open_delta
from weight_sync.hf_names import hub_tensors
from weight_sync.host.host_copy import HostCopy
from weight_sync.layout import BLOCK, dtype_name, tensor_bytes
from weight_sync.publishing.writer import Published, assemble, finish, write_delta, write_full
from weight_sync.stores import DirectoryStore, Store, version_name
from weight_sync.stores.base import check_size

Tensors = dict[str, torch.Tensor]
LR = 1e-6
WARM_UP = 16
"""Steps before the first round: AdamW's first steps are larger than those of its steady state."""
SHIFT = 1 << 20
"""Gradients are the same noise, shifted by another number of elements each time."""
RATE = 1e9 / 8
CHUNK = 1 << 18
SHAPES: dict[int, dict[str, Any]] = {
    1: {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2},
    100: {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 13, "head_dim": 64,
          "num_attention_heads": 12, "num_key_value_heads": 6},
    500: {"vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
          "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8},
}  # fmt: skip
"""By million parameters: those of Qwen3-0.6B with a smaller vocabulary, and a narrower one."""
CORES = os.cpu_count() or 1


# ---- a slow store ----------------------------------------------------------------------------------------------


class Bucket:
    """Lets so many bytes pass in a second, for all threads together."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def take(self, n_bytes: int) -> None:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + n_bytes / self._rate
            ready = self._free
        time.sleep(max(0.0, ready - time.monotonic()))


class LimitedStream:
    """A file of which every written chunk waits for its turn."""

    def __init__(self, stream: IO[bytes], bucket: Bucket) -> None:
        self._stream, self._bucket = stream, bucket

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            self._bucket.take(len(view[start : start + CHUNK]))
            self._stream.write(view[start : start + CHUNK])
        return len(view)

    def seek(self, place: int) -> int:
        return self._stream.seek(place)


class LimitedStage:
    def __init__(self, stage: Any, bucket: Bucket) -> None:
        self._stage, self._bucket = stage, bucket

    @contextmanager
    def create(self, file: str) -> Iterator[Any]:
        with self._stage.create(file) as stream:
            yield LimitedStream(stream, self._bucket)

    def commit(self) -> None:
        self._stage.commit()


class LimitedStore(DirectoryStore):
    """A directory that is far away: nothing is mapped, everything comes through a bucket, each way its own."""

    def __init__(self, root: Path, rate: float) -> None:
        super().__init__(root)
        self._up, self._down = Bucket(rate), Bucket(rate)

    @property
    def directory(self) -> None:  # type: ignore[override]
        return None

    @contextmanager
    def stage(self, version: str, *, leads: bool = True) -> Iterator[Any]:
        with super().stage(version, leads=leads) as stage:
            yield LimitedStage(stage, self._up)

    def read(self, key: str) -> memoryview:
        data = super().read(key)
        self._down.take(len(data))
        return data

    def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
        check_size(key, (self.root / key).stat().st_size, n_bytes)
        with (self.root / key).open("rb") as source, to.open("xb") as target:
            while chunk := source.read(CHUNK):
                self._down.take(len(chunk))
                target.write(chunk)
            return target.tell()


# ---- both sides ------------------------------------------------------------------------------------------------


def make_model(millions: int, dtype: torch.dtype, place: str) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = SHAPES[millions]
    with torch.device(place):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, tie_word_embeddings=True), dtype=dtype)
    return model.eval()


class Trainer:
    """Float32 masters; one optimizer for each parameter, so that one gradient is in memory at a time."""

    def __init__(self, millions: int, place: str) -> None:
        self.model = make_model(millions, torch.float32, place)
        self._steppers = [(p, torch.optim.AdamW([p], lr=LR, fused=True)) for p in self.model.parameters()]
        largest = max(p.numel() for p, _ in self._steppers)
        self._noise = torch.randn(largest + SHIFT, device=place)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        for parameter, optimizer in self._steppers:
            shift = int(torch.randint(SHIFT, ()))
            parameter.grad = self._noise[shift : shift + parameter.numel()].view_as(parameter)
            optimizer.step()
            parameter.grad = None

    def weights(self) -> Tensors:
        """What is published: a copy in bfloat16 under the names of the hub, on the host."""
        return {name: tensor.to("cpu") for name, tensor in hub_tensors(self.model, dtype=torch.bfloat16)}


class Replica:
    """A transformers model that is given new weights in place."""

    def __init__(self, millions: int, place: str) -> None:
        self.tensors: Tensors = dict(hub_tensors(make_model(millions, torch.bfloat16, place)))
        self._map = WeightMap(
            {name: PublishedTensor(t.dtype, tuple(t.shape)) for name, t in self.tensors.items()},
            {
                name: [Place(name, storage_of(t), whole(t.shape), region_of(t))]
                for name, t in self.tensors.items()
            },
        )

    def prepare(self, pieces: list[tuple[Path, Any]]) -> Any:
        [(root, piece)] = pieces
        return self._map.patch(open_delta(root, piece).changes())

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, target in self.tensors.items():
            target.copy_(tensors[name])
        synchronise(target)

    def check(self, tensors: Tensors) -> None:
        for name, target in self.tensors.items():
            assert torch.equal(target.cpu().view(torch.int16), tensors[name].view(torch.int16)), name


def synchronise(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


class Job:
    """One store with a publisher before it and a host copy and a model behind it."""

    def __init__(self, root: Path, store: Store, fast: Store, first: Tensors, replica: Replica) -> None:
        """fast: the same store without a limit, for the first full version, which is not measured."""
        self._root, self._store, self._replica = root, store, replica
        self._table: dict[str, TensorEntry] = {}
        self._links: list[Link] = []
        self._versions = 0
        self._pool = ThreadPoolExecutor(CORES)
        publication = self._publish(fast, None, first)[0]
        with_copy = HostCopy(root / "copy", fast)
        with_copy.advance(publication)
        self._copy = HostCopy(root / "copy", store)
        with_copy.close()
        self._at = publication.content_hash

    def close(self) -> None:
        self._copy.close()
        self._pool.shutdown()

    def _publish(
        self, store: Store, old: Tensors | None, new: Tensors
    ) -> tuple[Publication, dict[str, float], int]:
        """One version; seconds by stage, and elements that changed."""
        began = time.perf_counter()
        target = version_name(0, self._versions, "")
        with store.stage(target) as stage:
            if old is None:
                part = write_full(stage, new.items())
            else:
                part = write_delta(stage, ((n, old[n], new[n]) for n in new), pool=self._pool)
            manifest = assemble(
                [part],
                version=self._versions,
                timeline=0,
                base=self._table if old is not None else None,
                chain=self._links,
            )
            published = finish(stage, target, manifest)
        seconds = {"encode": part.seconds["encode"]}
        seconds["write"] = time.perf_counter() - began - seconds["encode"]
        self._table |= manifest.tensors
        self._links = [*self._links[-1:], link_of(self._versions, published)]
        self._versions += 1
        publication = Publication(
            id=self._versions,
            version=manifest.version,
            timeline=0,
            uri=published.uri,
            manifest_hash=published.manifest_hash,
            content_hash=published.content_hash,
            n_bytes=published.n_bytes,
            kind=published.kind,
        )
        return publication, seconds, sum(entry.changed or 0 for entry in manifest.tensors.values())

    def delta(self, old: Tensors, new: Tensors) -> dict[str, float]:
        """A version from the trainer's tensors into the model's: seconds by stage."""
        began = time.perf_counter()
        publication, seconds, changed = self._publish(self._store, old, new)
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
        manifest_bytes = (self._root / "store" / publication.uri).stat().st_size
        return seconds | {
            "bytes": (publication.n_bytes + manifest_bytes) / full,
            "changed": changed / elements,
        }

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
        return {
            "write": written - began,
            "fetch": fetched - written,
            "load": load,
            "pause": load,
            "all": end - began,
        }


def link_of(version: int, published: Published) -> Link:
    """A version as the manifests of later ones name it."""
    form = {published.kind: published.piece}
    return Link(version=version, content_hash=published.content_hash, **form)


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


# ---- the codec alone -------------------------------------------------------------------------------------------


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


CODEC_ROWS = ("memcpy", "encode", "decode", "xor+zstd encode", "xor+zstd decode")


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


# ---- rounds ----------------------------------------------------------------------------------------------------

Rows = dict[str, dict[str, float]]


def measure(millions: int, options: argparse.Namespace, give_up: float) -> Rows:
    """Medians by variant: codec, shm delta, shm plain, 1gbit delta, 1gbit plain."""
    trainer, replica = Trainer(millions, options.device), Replica(millions, options.device)
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
        for number in range(options.rounds + 1):  # the first one warms up
            if number > 1 and time.monotonic() > give_up:
                print(f"no time for more than {number - 1} rounds")
                break
            old = new
            trainer.step()
            new = trainer.weights()
            results = {"codec": codecs(old, new)}
            for name, job in jobs.items():
                replica.load(old)
                results[f"{name} delta"] = job.delta(old, new)
                replica.check(new)
                replica.load(old)
                results[f"{name} plain"] = job.plain(new)
                replica.check(new)
            for name, result in results.items():
                print(f"{number} {name:12} { {k: round(v, 4) for k, v in result.items()} }", file=sys.stderr)
                if number:
                    taken.setdefault(name, []).append(result)
    finally:
        for job in jobs.values():
            job.close()
        shutil.rmtree(place, ignore_errors=True)
    return {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in taken.items()
    }


STAGES = ("encode", "write", "fetch", "verify", "advance", "prepare", "load", "pause", "all")


def show(rows: Rows) -> dict[str, float]:
    """Print one size as tables; the figures of the last line."""
    speeds = rows["codec"]
    print("\nGB/s of model size   " + "   ".join(f"{key} {speeds[key]:.2f}" for key in CODEC_ROWS))
    print("GB per CPU second    " + "   ".join(f"{key} {speeds[f'{key} CPU']:.2f}" for key in CODEC_ROWS))
    print(
        f"bytes                delta {rows['shm delta']['bytes']:.4f}   xor+zstd {speeds['xor+zstd bytes']:.4f}"
    )
    print("\nseconds     " + "".join(f"{stage:>9}" for stage in STAGES))
    for name in ("shm delta", "shm plain", "1gbit delta", "1gbit plain"):
        cells = "".join(f"{rows[name][s]:9.3f}" if s in rows[name] else f"{'':9}" for s in STAGES)
        print(f"{name:12}{cells}")
    ratios = {name: rows[f"{name} delta"]["all"] / rows[f"{name} plain"]["all"] for name in ("1gbit", "shm")}
    pauses = {name: rows[f"{name} delta"]["pause"] / rows[f"{name} delta"]["all"] for name in ratios}
    print(
        "pause as share of the whole: " + ", ".join(f"{name} {value:.4f}" for name, value in pauses.items())
    )
    return {
        "bytes_ratio": round(rows["shm delta"]["bytes"], 5),
        "changed": round(rows["shm delta"]["changed"], 5),
        "time_ratio_1gbit": round(ratios["1gbit"], 4),
        "time_ratio_shm": round(ratios["shm"], 4),
        "encode_gb_s": round(speeds["encode"], 2),
        "decode_gb_s": round(speeds["decode"], 2),
        "pause_ratio": round(max(pauses.values()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--sizes", default="100,500", help="million parameters: of " + ", ".join(map(str, SHAPES))
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=900.0,
        help="no round of a size begins after so many; one always does",
    )
    parser.add_argument(
        "--device", default="cpu", help="where trainer and replica hold their weights: cpu, cuda"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # gigabytes in /dev/shm are not left behind
    began, sizes = time.monotonic(), [int(size) for size in options.sizes.split(",")]
    figures: dict[str, float] = {}
    with torch.no_grad():
        for i, size in enumerate(sizes):
            give_up = began + options.seconds * (i + 1) / len(sizes)
            figures = show(measure(size, options, give_up))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
