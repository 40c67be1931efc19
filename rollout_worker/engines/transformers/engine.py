"""The embedded engine as the worker sees it: an asyncio face, and one thread that does all the computing.

    event loop                 engine thread
    submit, abort, load ──▶ inbox ──▶ take ─▶ update? ─▶ admit ─▶ step ─┐
    collect  ◀── call_soon_threadsafe ◀── finished samples ◀────────────┘

Only the thread touches model and decoder. It sleeps when there is nothing to generate, and that is its idle
time. An exception in it is the end of the engine: every `collect` and `load_weights` raises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from rollout_worker.engines.base import (
    Checksum,
    EngineConfigError,
    EngineFailed,
    EngineStats,
    Generation,
    GenerationRequest,
    LoadReport,
    SharedWeights,
    WeightMismatch,
    WeightSource,
    check_no_gpu_was_dealt,
    check_request,
)
from rollout_worker.engines.checksum import Tally, loses_bits
from rollout_worker.engines.scatter import Patch, PublishedTensor, UnmappedError, WeightMap, merge, spare_bytes
from rollout_worker.engines.transformers import model as models
from rollout_worker.engines.transformers import scheduler
from rollout_worker.engines.transformers.decoder import Decoder
from rollout_worker.engines.transformers.routing import Routing
from rollout_worker.engines.transformers.settings import EngineSettings
from schema.wire.weights import Publication
from weight_sync import WeightError
from weight_sync.delta.delta import open_chain
from weight_sync.parking import Parked

log = logging.getLogger(__name__)

CPU_CACHE_SHARE = 0.25
"""Share of the free memory that the cache may take: trainer and other replicas live on the same machine."""
GPU_CACHE_SHARE = 0.8
"""Share of a GPU's memory that model and cache may take together."""
DELIVER_S = 0.01
"""Finished samples are handed over at most this often: small models end some at every step, and waking the
event loop each time would cost it more than the samples do."""
NAMED_PROBLEMS = 5
JOIN_TIMEOUT = 60.0
"""Seconds that `close` waits for the thread: one forward of a large model on a CPU may take that long."""


@dataclass(slots=True)
class _Load:
    """An update on its way to the engine thread."""

    version: int
    what: Mapping[str, torch.Tensor] | Patch | None
    """All tensors, or prepared writes of what has changed; None: no update, the engine is to sleep."""
    asked_at: float = 0.0
    future: Future[_Loaded] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Moments of an update that has succeeded."""

    began: float
    applied: float
    verified: float
    done: float


class _NotWrittenError(Exception):
    """Changes are not in the model as they should be after they were written."""


@dataclass(frozen=True, slots=True)
class _Served:
    """It holds what is known of the weights in use, from their last full load on."""

    published: Mapping[str, PublishedTensor]
    map: WeightMap | None
    content_hash: str | None
    weights: SharedWeights | None


@dataclass(slots=True)
class _Queued:
    request: GenerationRequest
    begun: int = 0


class TransformersEngine:
    """See `rollout_worker.engines.base.Engine`."""

    def __init__(self, settings: EngineSettings, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._settings, self._tokenizer, self._eos = settings, tokenizer, eos_token_ids
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # The event loop's side.
        self._expected: dict[str, int] = {}
        self._finished: list[Generation] = []
        self._arrived = asyncio.Event()
        self._failure: EngineFailed | None = None
        self._loading: Future[Any] | None = None
        self._updating = asyncio.Lock()
        self._served: _Served | None = None
        self._booted: Decoder | None = None  # only looked at from here
        # The thread's side.
        self._queue: deque[_Queued] = deque()
        self._pending: _Load | None = None
        self._closing = False
        self._parked: Parked | None = None
        self._idle: tuple[float, float | None] = (0.0, None)  # total, since when; replaced as one
        self._samples = 0
        self._outbox: list[Generation] = []
        self._handed_over = 0.0
        self._step_speed, self._fill_speed = scheduler.SecondsPerUnit(), scheduler.SecondsPerUnit()
        self._capacity = scheduler.CacheCapacity(settings.slots, 1)
        self._decoder: Decoder

    @property
    def name(self) -> str:
        import transformers

        return f"transformers {transformers.__version__}"

    @property
    def capacity(self) -> int:
        return self._settings.capacity

    @property
    def max_model_len(self) -> int:
        return self._settings.max_model_len

    @property
    def version(self) -> int:
        return -1 if self._booted is None else self._booted.version

    # ---- called from the event loop -----------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        booted: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(booted,), name="engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(booted)
        self._booted = self._decoder

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        assert self._booted is not None, "the engine is not started"
        for request in requests:
            check_request(
                request,
                max_model_len=self.max_model_len,
                vocabulary=self._booted.vocabulary,
                pending=self._expected,
                routing=("none",) if self._booted.routing is None else ("none", "ids", "weights"),
            )
        self._expected |= {request.request_id: len(request.seeds) for request in requests}
        self._post(lambda: self._queue.extend(_Queued(request) for request in requests))

    async def collect(self) -> list[Generation]:
        while not self._finished:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        finished, self._finished = self._finished, []
        return finished

    def abort(self, request_ids: Collection[str]) -> None:
        gone = set(request_ids)
        for request_id in gone:
            self._expected.pop(request_id, None)
        self._finished = [sample for sample in self._finished if sample.request_id not in gone]
        self._post(lambda: self._forget(gone))

    async def load_weights(self, weights: WeightSource, version: int) -> LoadReport:
        async with self._updating:
            before, self._served = self._served, None
            try:
                return await self._update_to(weights, version, before)
            except Exception as error:
                self._post(self._distrust)
                if not isinstance(error, WeightError):
                    raise
                raise EngineFailed(f"version {version} cannot be read from the host's copy: {error}") from error

    async def _update_to(self, weights: WeightSource, version: int, before: _Served | None) -> LoadReport:
        began, detail = time.monotonic(), ""
        if before is not None and isinstance(weights, SharedWeights):
            try:
                patch = await asyncio.to_thread(_prepared, self._decoder.model, weights, before)
                if patch is not None:
                    prepare_s, publication = time.monotonic() - began, weights.publication
                    loaded, asked = await self._load(publication.version, patch)
                    self._served = replace(before, content_hash=publication.content_hash, weights=weights)
                    return _report(asked, loaded, prepare_s, "in_place", publication)
            except (WeightError, UnmappedError, ValueError, OSError, _NotWrittenError) as error:
                detail = f"the changes could not be used: {error}"
                log.warning("version %d is loaded whole: %s", version, detail)
        return await self._load_whole(weights, version, began, detail)

    async def _load_whole(self, weights: WeightSource, version: int, began: float, detail: str) -> LoadReport:
        shared = weights if isinstance(weights, SharedWeights) else None
        publication: Publication | None = None
        async with AsyncExitStack() as stack:
            if shared is not None:
                publication = await asyncio.to_thread(stack.enter_context, shared.reading())
                version = publication.version
            tensors = await asyncio.to_thread(lambda: dict(weights.tensors()))
            prepare_s = time.monotonic() - began
            loaded, asked = await self._load(version, tensors)
            self._served = _Served(
                {name: PublishedTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()},
                models.weight_map(self._decoder.model, tensors),
                None if publication is None else publication.content_hash,
                shared,
            )
        return replace(_report(asked, loaded, prepare_s, "full", publication), detail=detail)

    async def _load(self, version: int, what: Mapping[str, torch.Tensor] | Patch | None) -> tuple[_Loaded, float]:
        """Have the thread update the model. Returns its report, and when it was asked."""
        if self._failure is not None:
            raise self._failure
        load = _Load(version, what, time.monotonic())
        load.future.set_running_or_notify_cancel()  # a cancelled caller does not cancel the update
        self._loading = load.future
        self._post(lambda: self._take_load(load))
        return await asyncio.wrap_future(load.future), load.asked_at

    async def sleep(self) -> None:
        await self._updating.acquire()  # until it is awake again
        await self._load(self.version, None)

    async def wake(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._loading = awake = Future[None]()
        awake.set_running_or_notify_cancel()
        self._post(lambda: self._get_up(awake))
        await asyncio.wrap_future(awake)
        self._updating.release()

    async def checksum(self) -> Checksum:
        async with self._updating:
            if self._failure is not None:
                raise self._failure
            began, served = time.monotonic(), self._served
            if served is None:
                return Checksum(None, False, ["no weights are served"], 0.0)
            try:
                tally = await asyncio.to_thread(self._tally, served)
            except WeightError as error:
                raise EngineFailed(f"the weights in use cannot be compared with the host's copy: {error}") from error
            return Checksum(tally.content_hash, tally.exact, tally.problems, time.monotonic() - began)

    def _tally(self, served: _Served) -> Tally:
        """In a thread in parallel with the engine's: the weights are not written meanwhile."""
        model, published = self._decoder.model, served.published
        lossy = any(loses_bits(tensor.dtype, model.dtype) for tensor in published.values())
        if not lossy or served.weights is None:
            tally: Tally = models.served(model, published, None)
            return tally
        with served.weights.reading() as publication:
            same = publication.content_hash == served.content_hash
            tally = models.served(model, published, dict(served.weights.tensors()) if same else None)
            return tally

    def stats(self) -> EngineStats:
        decoder, (idle, since) = self._booted, self._idle
        running = 0 if decoder is None else len(decoder.rows)
        return EngineStats(
            idle_s=idle if since is None else idle + time.monotonic() - since,
            samples=self._samples,
            tokens=0 if decoder is None else decoder.tokens_generated,
            running=running,
            waiting=max(sum(self._expected.values()) - running, 0),
            longest=0 if decoder is None or not running else decoder.most_tokens,
        )

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._post(self._stop)
        await asyncio.to_thread(thread.join, JOIN_TIMEOUT)
        if thread.is_alive():
            log.warning("the engine thread did not end within %.0f s and is left to the process's end", JOIN_TIMEOUT)
        self._fail(EngineFailed("the engine is closed"))

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _deliver(self, finished: list[Generation]) -> None:
        for sample in finished:
            left = self._expected.get(sample.request_id)
            if left is None:
                continue
            if left == 1:
                del self._expected[sample.request_id]
            else:
                self._expected[sample.request_id] = left - 1
            self._finished.append(sample)
        self._arrived.set()

    def _fail(self, failure: EngineFailed) -> None:
        self._failure = self._failure or failure
        if self._loading is not None and not self._loading.done():
            self._loading.set_exception(failure)
        self._arrived.set()

    # ---- the engine thread --------------------------------------------------------------------------------

    def _run(self, booted: Future[None]) -> None:
        try:
            self._boot()
        except BaseException as error:  # handed to the caller of start(), whatever it is
            booted.set_exception(error)
            return
        booted.set_result(None)
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._iterate()
        except BaseException as error:  # the thread's end must reach the event loop
            log.exception("the engine thread died")
            failure = EngineFailed(f"the transformers engine died: {type(error).__name__}: {error}")
            self._call(self._fail, failure)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function on the event loop, unless the loop has ended meanwhile."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _boot(self) -> None:
        settings = self._settings
        if settings.alone:
            # cuBLAS is not deterministic without it, and it is read once.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
        if not (on_gpu := torch.cuda.is_available()):
            check_no_gpu_was_dealt()
        device = torch.device("cuda" if on_gpu else "cpu")
        model = models.load_model(
            settings.model_path,
            settings.revision,
            settings.load_format,
            settings.dtype,
            device,
            trust_remote_code=settings.trust_remote_code,
            override=settings.override,
            adapters=settings.adapters,
        )
        routing = None if settings.routing == "none" else Routing(model, settings.routing)
        self._decoder = Decoder(
            model,
            self._tokenizer,
            self._eos,
            max_model_len=settings.max_model_len,
            fill_tokens=settings.fill_tokens,
            keep_cache=settings.keep_cache,
            routing=routing,
        )
        per_token = models.self_test(model, self._eos, routing)
        free = _cache_memory(device)
        tokens = free // max(per_token, 1)
        rows = settings.rows_alone if settings.alone else 1
        if tokens < rows * settings.max_model_len:
            what = "one sequence" if rows == 1 else f"{rows} sequences at once (train.deterministic)"
            raise EngineConfigError(
                f"the cache of {what} of {settings.max_model_len} tokens needs "
                f"{rows * settings.max_model_len * per_token / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free for "
                "it: lower rollout.max_model_len" + (" or rollout.max_num_seqs" if rows > 1 else "")
            )
        self._capacity = replace(self._capacity, cache_tokens=tokens)
        log.info("engine ready: %s on %s, cache for %d tokens", type(model).__name__, device, tokens)

    def _iterate(self) -> None:
        """One round: commands, an update if it is time, new samples, one token for all."""
        while self._inbox:
            self._inbox.popleft()()
        if self._closing:
            return
        if self._pending is not None and not self._wait_for_running():
            self._update(self._pending) if self._pending.what is not None else self._lie_down(self._pending)
        decoder = self._decoder
        if self._parked is not None:
            self._sleep()
            return
        if decoder.version >= 0 and self._queue and self._pending is None:
            self._admit()
        if decoder.version >= 0 and decoder.rows:
            began = time.monotonic()
            finished = decoder.step()
            self._step_speed.observe(time.monotonic() - began)
            self._samples += len(finished)
            self._outbox += finished
            self._hand_over()
            return
        self._sleep()

    def _hand_over(self) -> None:
        now = time.monotonic()
        if self._outbox and (now - self._handed_over >= DELIVER_S or not self._decoder.rows):
            outbox, self._outbox, self._handed_over = self._outbox, [], now
            self._call(self._deliver, outbox)

    def _sleep(self) -> None:
        """Until a command arrives. Idle, unless samples wait for weights."""
        if not self._queue and not self._decoder.rows:
            self._idle = (self._idle[0], time.monotonic())
        self._wake.wait()
        self._wake.clear()
        idle, since = self._idle
        if since is not None:
            self._idle = (idle + time.monotonic() - since, None)

    def _admit(self) -> None:
        decoder = self._decoder
        waiting = [
            scheduler.QueuedRequest(len(entry.request.seeds) - entry.begun, decoder.longest(entry.request))
            for entry in self._queue
        ]
        running = len(decoder.rows)
        if self._settings.alone:
            granted = scheduler.admit_alone(waiting, running, self._capacity)
        else:
            longest = max((decoder.longest(row.request) for row in decoder.rows), default=0)
            granted = scheduler.admit(waiting, running, longest, self._capacity)
        batch = []
        for count in granted:
            entry = self._queue[0]
            batch.append((entry.request, range(entry.begun, entry.begun + count)))
            entry.begun += count
            if entry.begun == len(entry.request.seeds):
                self._queue.popleft()
        if batch:
            began = time.monotonic()
            if self._settings.alone:
                decoder.clear()
            filled = decoder.admit(batch)
            _wait_for(decoder.window.device)
            self._fill_speed.observe(time.monotonic() - began, filled)

    def _wait_for_running(self) -> bool:
        decoder = self._decoder
        if not decoder.rows or decoder.version < 0:
            return False
        if self._settings.alone or decoder.keep_cache:
            return self._settings.alone
        return scheduler.let_running_end(
            decoder.steps_left(),
            self._step_speed.seconds,
            decoder.tokens_to_recompute(),
            self._fill_speed.seconds,
            self._settings.patience,
        )

    def _take_load(self, load: _Load) -> None:
        if self._pending is not None:
            self._pending.future.set_exception(
                RuntimeError("load_weights was called again before the last call was done")
            )
        self._pending = load

    def _lie_down(self, load: _Load) -> None:
        """Release the device's memory; the parameters come back in place, so views of them (`WeightMap`) hold."""
        decoder, began = self._decoder, time.monotonic()
        decoder.release_cache()
        self._parked = Parked([*decoder.model.parameters(), *decoder.model.buffers()])
        self._pending = None
        self._hand_over()
        now = time.monotonic()
        load.future.set_result(_Loaded(began, now, now, now))

    def _get_up(self, awake: Future[None]) -> None:
        assert self._parked is not None
        self._parked.restore()
        self._parked = None
        decoder = self._decoder
        if decoder.version >= 0:
            decoder.set_version(decoder.version)
        _wait_for(decoder.window.device)
        awake.set_result(None)

    def _update(self, load: _Load) -> None:
        decoder, began = self._decoder, time.monotonic()
        try:
            if isinstance(load.what, Patch):
                problems = load.what.apply()
                applied = time.monotonic()  # read back, too
                if problems:
                    raise _NotWrittenError("; ".join(problems[:NAMED_PROBLEMS]))
            elif load.what is not None:
                models.apply_weights(decoder.model, load.what)
                applied = time.monotonic()
                models.verify_weights(decoder.model, load.what)
            verified = time.monotonic()
            decoder.set_version(load.version)
            _wait_for(decoder.window.device)
        except (WeightMismatch, _NotWrittenError) as error:
            decoder.version = -1
            load.future.set_exception(error)
        else:
            load.future.set_result(_Loaded(began, applied, verified, time.monotonic()))
        self._pending = None

    def _distrust(self) -> None:
        """Nothing is generated until a later update has succeeded."""
        self._decoder.version = -1

    def _forget(self, request_ids: set[str]) -> None:
        self._queue = deque(entry for entry in self._queue if entry.request.request_id not in request_ids)
        self._decoder.drop(request_ids)

    def _stop(self) -> None:
        self._closing = True


def _prepared(model: Any, weights: SharedWeights, before: _Served) -> Patch | None:
    """Writes that lead from the weights in use to these; None: no such way exists.

    Raises `WeightError`, `UnmappedError`, `ValueError`; nothing was changed.
    """
    if before.map is None or before.content_hash is None:
        return None
    pieces = weights.changes_since(before.content_hash)
    if pieces is None:
        return None
    before.map.check(model)
    deltas = open_chain(pieces, before.content_hash, weights.publication.content_hash)
    changes = merge([delta.changes() for delta in deltas])
    return before.map.patch(changes, device_bytes=spare_bytes(model.device))


def _report(
    asked: float,
    loaded: _Loaded,
    prepare_s: float,
    mode: Literal["in_place", "full"],
    publication: Publication | None,
) -> LoadReport:
    return LoadReport(
        pause_s=loaded.began - asked,
        # Computing the cache again is part of applying: the weights are in use when it is done.
        apply_s=loaded.applied - loaded.began + loaded.done - loaded.verified,
        verify_s=loaded.verified - loaded.applied,
        prepare_s=prepare_s,
        interrupted_s=loaded.done - loaded.began,
        mode=mode,
        publication=publication,
    )


def _wait_for(device: torch.device) -> None:
    """Synchronise with the device: kernels are launched in microseconds, and their run time is what is measured."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _cache_memory(device: torch.device) -> int:
    """Bytes that the cache may take."""
    if device.type == "cuda":
        free, total = map(int, torch.cuda.mem_get_info(device))
        return max(int(total * GPU_CACHE_SHARE) - (total - free), 0)
    import psutil

    available: int = psutil.virtual_memory().available
    return int(available * CPU_CACHE_SHARE)
