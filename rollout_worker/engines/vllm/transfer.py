"""Inside of vLLM's worker processes: the weight-transfer engine that applies versions from our store.

    start_weight_update ─▶ update_weights(deltas) ─▶ prepared? ─▶ [pause] ─▶ finish_weight_update ─▶ last_update
                           update_weights(full), while paused ─────────────▶

Deltas are prepared in a thread while requests run: decoded, and turned into writes to the parameters by the map
that the last full load left. Finishing the update writes and reads back what was written, in milliseconds. A full
version is loaded by vLLM's own loader, watched and proven by `proof`.

Weights are written into the parameters where they lie, so graphs and tied layers keep seeing them. `layers` knows
those that compute from something other than their parameters as they are loaded: packed ones are part of the map, and
where layers are made anew of whole tensors every version is loaded whole.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from rollout_worker.engines.scatter import Patch, UnmappedError, WeightMap, merge, spare_bytes
from rollout_worker.engines.vllm import adapters, layers
from rollout_worker.engines.vllm.proof import LoadTrace, ProofReport
from schema.wire.weights import Piece
from weight_sync import DirectoryStore, WeightError
from weight_sync.delta.delta import open_chain
from weight_sync.host.files import open_copy
from weight_sync.layout import as_tensor, dtype_name, torch_dtype
from weight_sync.manifest import open_piece

DRAIN_S = 600.0
"""Seconds that finishing an update waits for what is still being prepared; our adapter asks before."""


@dataclass
class StoreInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every update says where it lies."""


@dataclass
class StoreUpdateInfo(WeightTransferUpdateInfo):
    """One version, in one of three forms; pieces are JSON."""

    content_hash: str
    """The hash of the version."""
    copy: str = ""
    """Directory of the host's copy, which holds it."""
    root: str = ""
    piece: str = ""
    """A full version in a directory store."""
    base: str = ""
    deltas: Sequence[Sequence[str]] | None = None
    """(root, piece) of each delta that leads to it from the content hash `base`, oldest first."""
    adapter: str = ""
    """Settings of the adapter that the version consists of, see `adapters`; empty: it is the model's weights."""


class StoreWeightTransferEngine(WeightTransferEngine[StoreInitInfo, StoreUpdateInfo]):
    """Applies verified versions to a vLLM model, and proves that they arrived."""

    init_info_cls = StoreInitInfo
    update_info_cls = StoreUpdateInfo
    supports_draft_weight_update = False
    defers_processing = True

    _proof = ProofReport(["no version was loaded yet"], {}, {})
    _apply_s = _verify_s = 0.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._pool = ThreadPoolExecutor(1, "weights", initializer=self._take_device)
        self._job: Future[Patch] | None = None
        self._reading: Future[list[str]] | None = None
        self._wanted = ""
        # What a full load leaves for the deltas after it; None while the weights are not proven.
        self._map: WeightMap | None = None
        self._content = ""
        self._digests: dict[str, str] = {}
        """The digests of each parameter of a model with layers that are made anew, as they were proven; else
        empty."""
        self.active = False

    def _take_device(self) -> None:
        """In the thread, before anything else there: a thread begins on the first GPU that its process sees, and
        would open a context of half a gigabyte on it where the worker has another one."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)

    def init_transfer_engine(self, init_info: StoreInitInfo) -> None:
        """Nothing to set up."""

    # ---- updates ------------------------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        self.active = True
        self._job = None
        self._proof = ProofReport(["the update was not finished"], {}, {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load a full version, or begin to prepare deltas; what went wrong stands in `last_update` or `prepared`,
        so that the update always ends in order.

        Replaces the base class's method, which waits for an accelerator that a CPU does not have.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: StoreUpdateInfo) -> None:
        if update_info.deltas is not None:
            self._wanted = update_info.content_hash
            self._job = self._pool.submit(self._prepare, update_info)
        else:
            self._job = None
            self._load(update_info)

    def _prepare(self, info: StoreUpdateInfo) -> Patch:
        """In the thread. Changes nothing. Raises `UnmappedError`, `WeightError`, `ValueError`."""
        assert info.deltas is not None
        if self._map is None or self._content != info.base:
            raise UnmappedError(f"the weights here are {self._content or 'unproven'}, not {info.base}")
        self._map.check(self.model)
        pieces = [(Path(root), Piece.model_validate_json(piece)) for root, piece in info.deltas]
        deltas = open_chain(pieces, info.base, info.content_hash)
        with self._beside():
            changes = merge([delta.changes() for delta in deltas])
            return self._map.patch(changes, device_bytes=spare_bytes(self.device))

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Work of the thread runs in parallel with that of the model, and is over at the end."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def prepared(self) -> dict[str, Any]:
        """Whether the deltas are ready to be written, and why they never will be."""
        if self._job is None:
            return {"done": True, "problem": "nothing is being prepared"}
        return _state(self._job)

    def _load(self, info: StoreUpdateInfo) -> None:
        self._map, self._content, self._digests = None, "", {}
        packed, rebuilt = layers.packed(self.model), layers.rebuilt(self.model)
        derived = layers.derived(self.model)
        for weights in packed:
            weights.open()
        made = {
            f"{name}.{own}" for name, layer in rebuilt.items() for own, _ in layer.named_parameters(recurse=False)
        }
        made |= {name for halves in derived for name in halves.parameters}
        trace = LoadTrace(self.model, {weights.name for weights in packed}, made)
        started = time.monotonic()
        try:
            with _opened(info) as tensors, disable_mtp_completeness_check(), torch.no_grad():
                with layers.rebuilding(rebuilt, self.vllm_config.model_config, trace) as compared, trace:
                    self.model.load_weights(trace.given(tensors))
                self._wait()
                loaded = time.monotonic()
                self._proof = trace.report()
                self._proof.problems.extend(fault for weights in packed for fault in weights.close())
                self._proof.problems.extend(fault for halves in derived for fault in halves.renew())
                self._proof.problems.extend(compared())
                if not self._proof.problems:
                    self._remember(trace, packed, is_rebuilt=bool(rebuilt), content=info.content_hash)
        except (WeightError, ValidationError) as error:
            self._proof = ProofReport([str(error)], {}, {})
        except Exception as error:  # vLLM's loaders raise anything, for unknown names and wrong shapes
            cause = f"{type(error).__name__}: {error}".rstrip(": ")[:300]
            self._proof = ProofReport([f"{trace.current} cannot be loaded ({cause})"], {}, {})
        else:
            self._apply_s, self._verify_s = loaded - started, time.monotonic() - loaded

    def load_adapter(self, update_info: dict[str, Any]) -> dict[str, Any]:
        """Load a version that is an adapter alone; see `last_update`.

        Not as an update of weights: at the end of one vLLM forgets all adapters, as they may be of other weights.
        """
        info, started = self.parse_update_info(update_info), time.monotonic()
        try:
            with _opened(info) as tensors, torch.no_grad():
                adapters.load(self.model, info.adapter, given := dict(tensors))
                self._wait()
                loaded = time.monotonic()
                self._proof = ProofReport(adapters.problems(self.model, info.adapter, given), {}, {})
        except (WeightError, ValidationError) as error:
            self._proof = ProofReport([str(error)], {}, {})
        except Exception as error:  # vLLM's loaders raise anything, for unknown names and wrong shapes
            cause = f"{type(error).__name__}: {error}".rstrip(": ")[:300]
            self._proof = ProofReport([f"the adapter cannot be loaded ({cause})"], {}, {})
        else:
            self._apply_s, self._verify_s = loaded - started, time.monotonic() - loaded
        return self.last_update()

    def compare(self, update_info: dict[str, Any]) -> list[str]:
        """Where the adapter in use is not the one of a version. Raises `WeightError`."""
        info = self.parse_update_info(update_info)
        with _opened(info) as tensors, torch.no_grad():
            return adapters.problems(self.model, info.adapter, dict(tensors))

    def _remember(self, trace: LoadTrace, packed: Sequence[layers.Packed], *, is_rebuilt: bool, content: str) -> None:
        if is_rebuilt:
            self._digests = layers.digests(self.model)
            return
        with contextlib.suppress(UnmappedError):  # then every version is loaded whole
            orders = {weights.name: weights.order for weights in packed}
            self._map, self._content = trace.weight_map(orders), content

    def finish_weight_update(self) -> None:
        """Write what was prepared, if anything, and read it back."""
        self.active = False
        job, self._job = self._job, None
        if job is None:
            return
        try:
            patch = job.result(DRAIN_S)
            self._content, started = "", time.monotonic()
            problems = patch.apply()
            problems += [fault for halves in layers.derived(self.model) for fault in halves.renew()]
            self._wait()
        except Exception as error:  # the update ends in order, and reports it
            problems = [f"changes cannot be written ({type(error).__name__}: {error})"[:300]]
        else:
            self._apply_s, self._verify_s = time.monotonic() - started, 0.0
        self._proof = ProofReport(problems, {}, {})
        if problems:
            self._map, self._content = None, ""
        else:
            self._content = self._wanted

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def abandon(self) -> None:
        """Forget what was being prepared."""
        self._job = None

    def last_update(self) -> dict[str, Any]:
        """Return what the last update found, and its seconds (reading and hashing files is part of applying)."""
        return {"proof": self._proof.to_dict(), "apply_s": self._apply_s, "verify_s": self._verify_s}

    # ---- reading back -------------------------------------------------------------------------------------

    def layout(self) -> dict[str, Any] | None:
        """Return of each published tensor: its type and shape, the type in which it is kept, and the parts kept here.

        None where it is not known where the tensors lie.
        """
        if self._map is None:
            return None
        try:
            kept = {name: self._map.served_dtype(name) for name in self._map.published}
        except UnmappedError:
            return None
        return {
            name: {
                "dtype": dtype_name(published.dtype, name),
                "shape": published.shape,
                "kept": None if dtype is None else dtype_name(dtype, name),
                "parts": [place.source for place in self._map.places[name]],
            }
            for (name, published), dtype in zip(self._map.published.items(), kept.values(), strict=True)
        }

    def read(self, path: str, n_bytes: int, rows: Sequence[tuple[str, int]]) -> None:
        """Begin to write published tensors, as they are kept here, to a new file of that many bytes.

        Args:
            rows: names and where each begins, in bytes. Parts that are not kept here stay 0.
        """
        self._reading = self._pool.submit(self._read, path, n_bytes, rows)

    def _read(self, path: str, n_bytes: int, rows: Sequence[tuple[str, int]]) -> list[str]:
        assert self._map is not None
        with open(path, "xb") as file:
            if n_bytes:  # a full disk shows here: a hole that cannot be filled would kill who writes to it
                os.posix_fallocate(file.fileno(), 0, n_bytes)
        data = torch.from_file(path, shared=True, size=n_bytes, dtype=torch.uint8)
        problems = []
        with self._beside(), torch.no_grad():
            for name, start in rows:
                kept, elements = self._map.served_dtype(name), self._map.published[name].elements
                if kept is None or not elements:
                    continue
                out = data[start : start + elements * kept.itemsize].view(kept)
                if not self._map.read(name, out):
                    problems.append(f"copies of {name} in one rank disagree")
        return problems

    def reading(self) -> dict[str, Any]:
        """Whether the file is complete, and what is wrong with what was read."""
        assert self._reading is not None
        state = _state(self._reading)
        problems = self._reading.result() if state["done"] and state["problem"] is None else []
        return {**state, "problems": problems}

    # ---- life ---------------------------------------------------------------------------------------------

    def kinds(self) -> dict[str, list[str]]:
        """Layers of the kinds that not every update can reach, by name; see `layers`."""
        return {"refused": layers.refused(self.model), "rebuilt": list(layers.rebuilt(self.model))}

    def mixtures(self) -> list[int]:
        """Layers that have experts; see `layers`."""
        return layers.mixtures(self.model)

    def changed(self) -> list[str]:
        """In a model with layers that are made anew: parameters that are not as they were proven."""
        now = layers.digests(self.model)
        return [f"{name} has changed since" for name, value in self._digests.items() if now[name] != value]

    def shutdown(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _state(job: Future[Any]) -> dict[str, Any]:
    error = job.exception() if job.done() else None
    problem = None if error is None else f"{type(error).__name__}: {error}"[:300]
    return {"done": job.done(), "problem": problem}


@contextlib.contextmanager
def _opened(info: StoreUpdateInfo) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """The tensors of a full version. Raises `WeightError`, `ValidationError`."""
    if info.copy:
        with open_copy(Path(info.copy)) as view:
            if view.content_hash != info.content_hash:
                raise WeightError(f"{info.copy} holds {view.content_hash}, not {info.content_hash}")
            yield view.tensors()
        return
    opened = open_piece(DirectoryStore(info.root), Piece.model_validate_json(info.piece), "full")
    yield (
        (name, as_tensor(opened.data[name], torch_dtype(entry.dtype, name), entry.shape))
        for name, entry in opened.manifest.tensors.items()
    )


class WorkerExtension:
    """Methods that vLLM adds to its worker class, to be called by `collective_rpc`."""

    weight_transfer_engine: StoreWeightTransferEngine
    parallel_config: ParallelConfig
    model_runner: Any
    use_v2_model_runner: bool
    rank: int
    if TYPE_CHECKING:  # vLLM's own: what it finds here besides, it takes for a clash of names

        def start_weight_update(self) -> None: ...
        def update_weights(self, update_info: dict[str, Any]) -> None: ...
        def finish_weight_update(self) -> None: ...

    def cosmos_make_ready(self) -> str:
        """Give a later pipeline stage the memory that it receives hidden states in, and name the model runner.

        The first runner makes it when it runs a model to measure its memory, which it does not do on a CPU; the
        second one as it loads the model.
        """
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return "V2" if self.use_v2_model_runner else "V1"

    def cosmos_update(self, info: dict[str, Any]) -> None:
        """Start an update and hand it over: one way to the processes, which may be between any two steps."""
        if self.weight_transfer_engine.active:  # left by a caller that went away
            self.weight_transfer_engine.abandon()
            self.finish_weight_update()
        self.start_weight_update()
        self.update_weights(info)

    def cosmos_prepared(self) -> dict[str, Any]:
        return self.weight_transfer_engine.prepared()

    def cosmos_finish(self) -> dict[str, Any]:
        """Finish the update; what it found, for one way to the processes and back."""
        self.finish_weight_update()
        return self.weight_transfer_engine.last_update()

    def cosmos_layout(self) -> dict[str, Any] | None:
        return self.weight_transfer_engine.layout()

    def cosmos_read(self, directory: str, n_bytes: int, rows: list[tuple[str, int]]) -> None:
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + self.rank
        self.weight_transfer_engine.read(f"{directory}/{number}", n_bytes, rows)

    def cosmos_reading(self) -> dict[str, Any]:
        return self.weight_transfer_engine.reading()

    def cosmos_adapter(self, info: dict[str, Any]) -> dict[str, Any]:
        return self.weight_transfer_engine.load_adapter(info)

    def cosmos_compare(self, info: dict[str, Any]) -> list[str]:
        return self.weight_transfer_engine.compare(info)

    def cosmos_kinds(self) -> dict[str, list[str]]:
        return self.weight_transfer_engine.kinds()

    def cosmos_mixtures(self) -> list[int]:
        return self.weight_transfer_engine.mixtures()

    def cosmos_changed(self) -> list[str]:
        return self.weight_transfer_engine.changed()
