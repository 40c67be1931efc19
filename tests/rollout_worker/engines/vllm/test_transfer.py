"""What runs inside of vLLM's workers, on a small module in this process: preparing, writing, reading, failing."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_worker.engines.base import Checksum
from rollout_worker.engines.vllm import reading
from rollout_worker.engines.vllm.adapter import VllmAdapter
from tests.rollout_worker.versions import Versions, nudged
from tests.support.waiting import until
from weight_sync.host.host_copy import CopiedWeights

pytestmark = pytest.mark.slow

WIDTH = 512
"""Large enough that a delta is smaller than the tensors."""


class Hub(torch.nn.Module):
    """The trainer's side: plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = torch.nn.Linear(WIDTH, 96, bias=False)
        self.k = torch.nn.Linear(WIDTH, 64, bias=False)
        self.head = torch.nn.Linear(WIDTH, 80, bias=False)


class Served(torch.nn.Module):
    """The engine's side: q and k fused, the head padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.full((160, WIDTH), -1.0), requires_grad=False)
        self.head = torch.nn.Parameter(torch.full((96, WIDTH), -1.0), requires_grad=False)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name == "head.weight":
                self.head.data[:80].copy_(tensor)
                self.head.data[80:].fill_(0)
            else:
                start = 0 if name == "q.weight" else 96
                self.qk.data.narrow(0, start, len(tensor)).copy_(tensor)

    def holds(self, hub: Hub) -> bool:
        fused = torch.cat([hub.q.weight, hub.k.weight])
        return torch.equal(self.qk, fused) and torch.equal(self.head[:80], hub.head.weight)


class Bench:
    def __init__(self, root: Path) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig

        from rollout_worker.engines.vllm.transfer import StoreWeightTransferEngine

        self.versions, self.hub, self.model = Versions(root), Hub(), Served()
        config: Any = SimpleNamespace(parallel_config=None, model_config=None)
        transfer = WeightTransferConfig(backend="cosmos_store")
        self.engine = StoreWeightTransferEngine(transfer, config, torch.device("cpu"), self.model)
        self.content = ""

    def publish(self, version: int, *, full: bool = False) -> CopiedWeights:
        nudged(self.hub, version, share=0.2)
        return self.versions.fetched(self.versions.publish(self.hub, version, full=full))

    def full(self, weights: CopiedWeights) -> list[str]:
        info = {"content_hash": weights.publication.content_hash, "copy": str(weights.copy_directory)}
        return self.update(info, weights)

    def deltas(self, weights: CopiedWeights, **changes: Any) -> dict[str, Any]:
        pieces = weights.changes_since(self.content)
        assert pieces
        rows = [[str(root), piece.model_dump_json()] for root, piece in pieces]
        content = weights.publication.content_hash
        return {"content_hash": content, "base": self.content, "deltas": rows, **changes}

    def update(self, info: dict[str, Any], weights: CopiedWeights) -> list[str]:
        self.engine.start_weight_update()
        self.engine.update_weights(info)
        self.engine.finish_weight_update()
        problems: list[str] = self.engine.last_update()["proof"]["problems"]
        self.content = "" if problems else weights.publication.content_hash
        return problems

    def prepared(self, info: dict[str, Any]) -> str | None:
        """Why an update cannot be prepared; it is abandoned."""
        self.engine.start_weight_update()
        self.engine.update_weights(info)
        until(lambda: self.engine.prepared()["done"], "the preparation")
        problem: str | None = self.engine.prepared()["problem"]
        self.engine.abandon()
        self.engine.finish_weight_update()
        return problem


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    assert bench.full(bench.publish(1)) == []
    assert bench.model.holds(bench.hub)
    yield bench
    bench.engine.shutdown()
    bench.versions.close()


def test_finishing_waits_for_what_is_being_prepared_and_writes_it(bench: Bench) -> None:
    for version in (2, 3):
        weights = bench.publish(version)
        assert bench.update(bench.deltas(weights), weights) == []
        assert bench.model.holds(bench.hub)


def test_preparing_and_abandoning_changes_nothing(bench: Bench) -> None:
    before = [parameter.clone() for parameter in bench.model.parameters()]
    weights = bench.publish(2)
    assert bench.prepared(bench.deltas(weights)) is None
    assert all(torch.equal(a, b) for a, b in zip(before, bench.model.parameters(), strict=True))
    assert bench.update(bench.deltas(weights), weights) == []
    assert bench.model.holds(bench.hub)


def test_what_cannot_be_prepared_says_why(bench: Bench) -> None:
    weights = bench.publish(2)
    assert "not 0123" in (bench.prepared(bench.deltas(weights, base="0123")) or "")
    assert "lead to the weights" in (bench.prepared(bench.deltas(weights, content_hash="0123")) or "")
    (data,) = (bench.versions.store.root / weights.publication.uri).parent.glob("*.safetensors")
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert data.name in (bench.prepared(bench.deltas(weights)) or "")
    data.write_bytes(content)
    bench.model.head.data = bench.model.head.data.clone()
    assert "head has moved in memory" in (bench.prepared(bench.deltas(weights)) or "")


def test_after_a_mismatch_only_a_full_version_is_taken(bench: Bench) -> None:
    weights = bench.publish(2)
    right = bench.deltas(weights)
    load, bench.model.load_weights = bench.model.load_weights, lambda pairs: None  # type: ignore[method-assign]
    assert bench.full(weights)
    bench.model.load_weights = load  # type: ignore[method-assign]
    assert "unproven" in (bench.prepared(right) or "")
    assert bench.full(weights) == []
    assert bench.model.holds(bench.hub)


def test_a_copy_that_has_moved_on_is_refused(bench: Bench) -> None:
    weights = bench.publish(2)
    bench.publish(3)
    (problem,) = bench.full(weights)
    assert "holds" in problem


def test_tensors_are_read_back_as_they_are_kept(bench: Bench, tmp_path: Path) -> None:
    start, size = 96 * WIDTH * 4, 176 * WIDTH * 4
    rows = [("q.weight", 0), ("head.weight", start)]
    layout = bench.engine.layout()
    assert layout is not None
    assert layout["k.weight"] == {
        "dtype": "F32", "shape": (64, WIDTH), "kept": "F32", "parts": [(0, (64, WIDTH), (WIDTH, 1))]
    }  # fmt: skip
    bench.engine.read(str(tmp_path / "0"), size, rows)
    until(lambda: bench.engine.reading()["done"], "the tensors")
    assert bench.engine.reading() == {"done": True, "problem": None, "problems": []}
    found = torch.frombuffer(bytearray((tmp_path / "0").read_bytes()), dtype=torch.float32)
    assert torch.equal(found[: 96 * WIDTH].view(96, WIDTH), bench.hub.q.weight)
    assert torch.equal(found[96 * WIDTH :].view(80, WIDTH), bench.hub.head.weight)
    bench.engine.read(str(tmp_path / "0"), size, rows)
    until(lambda: bench.engine.reading()["done"], "the refusal of a file that is there")
    assert "FileExistsError" in bench.engine.reading()["problem"]


def test_a_file_to_read_into_has_its_room_before_it_is_mapped(bench: Bench, tmp_path: Path) -> None:
    bench.engine.read(str(tmp_path / "0"), 1 << 20, [])
    until(lambda: bench.engine.reading()["done"], "the file")
    assert bench.engine.reading()["problem"] is None
    status = (tmp_path / "0").stat()
    assert (status.st_size, status.st_blocks * 512 >= 1 << 20) == (1 << 20, True)


def test_the_thread_is_on_the_device_of_its_worker_before_it_uses_cuda(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins on the first GPU, and its first call there would open a context on it."""
    called: list[tuple[str, object]] = []

    def record(module: Any, name: str, answer: Any) -> None:
        def call(device: object = None) -> Any:
            if threading.current_thread().name.startswith("weights"):
                called.append((name, device))
            return answer

        monkeypatch.setattr(module, name, call)

    stream = SimpleNamespace(synchronize=lambda: None)
    for name, answer in (("Stream", stream), ("stream", nullcontext()), ("mem_get_info", (1 << 30, 1 << 30))):
        record(torch.cuda, name, answer)
    for name in ("set_device_index", "synchronize"):
        record(torch.accelerator, name, None)
    bench.engine.device = second = torch.device("cuda", 1)
    weights = bench.publish(2)
    assert bench.prepared(bench.deltas(weights)) is None
    bench.engine.read(str(tmp_path / "0"), 96 * WIDTH * 4, [("q.weight", 0)])
    until(lambda: bench.engine.reading()["done"], "the tensors")
    assert called[0] == ("set_device_index", second)
    assert {name for name, _ in called} >= {"Stream", "stream", "mem_get_info"}
    assert all(device == second for name, device in called if name in ("Stream", "mem_get_info"))


class Calls:
    """vLLM's way to its only worker, whose methods are called here."""

    def __init__(self, bench: Bench) -> None:
        from rollout_worker.engines.vllm.transfer import WorkerExtension

        self.worker: Any = type("Worker", (WorkerExtension,), {})()
        self.worker.weight_transfer_engine, self.worker.rank = bench.engine, 0
        self.worker.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1)
        resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[]))
        self.engine_core = SimpleNamespace(resources=resources, call_utility_all_async=self.call)
        model_config = SimpleNamespace(max_model_len=1, get_vocab_size=lambda: 1)
        self.vllm_config = SimpleNamespace(model_config=model_config)
        self.directories: list[Path] = []

    async def call(self, rpc: str, method: str, timeout: None, args: Sequence[Any], named: None) -> list[Any]:
        assert rpc == "collective_rpc"
        if method == "cosmos_read":
            self.directories.append(Path(args[0]).parent)
        return [[getattr(self.worker, method)(*args)]]


def test_what_is_read_goes_where_there_is_room(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small, large = tmp_path / "shm", tmp_path / "tmp"
    free = {small: 1 << 16, large: 1 << 30}
    for place in free:
        place.mkdir()
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free[path]))
    monkeypatch.setattr(reading, "SHARED", small)
    monkeypatch.setattr("tempfile.tempdir", str(large))
    calls = Calls(bench)

    def served() -> Checksum:
        return asyncio.run(reading.served_weights(VllmAdapter(calls, low_rank=False), None, bench.content))

    assert (served().content_hash, set(calls.directories)) == (bench.content, {large})
    free[small] = 1 << 30
    calls.directories.clear()
    assert (served().content_hash, set(calls.directories)) == (bench.content, {small})
    free |= {small: 1 << 16, large: 1 << 16}
    calls.directories.clear()
    found = served()
    assert (found.content_hash, found.problems, calls.directories) == (None, [], [])
    assert "not compared" in caplog.text
    assert [*small.iterdir(), *large.iterdir()] == []
