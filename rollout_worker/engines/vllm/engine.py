"""The engine for work: vLLM's AsyncLLM behind the contract of `engines.base`.

    submit ─▶ one task per sample ─▶ gate ─▶ vLLM's own processes ─▶ finished samples ─▶ collect
                                      ▲
    load_weights: gate closed ─ pause ─ update ─ proof ─ resume ─ gate open

Invariant: the gate is open only while the weights inside of vLLM are proven. It is closed from the start
until the first version has been loaded, during every update, and from a failed update until a later one
succeeds (requests that are inside of vLLM then stay paused).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from rollout_worker.engines.base import (
    EngineConfigError,
    EngineError,
    EngineFailed,
    EngineStats,
    Generation,
    GenerationRequest,
    LoadReport,
    WeightMismatch,
    WeightSource,
)
from rollout_worker.engines.vllm.adapter import Boot, Completion, Update, VllmAdapter, installed_version
from rollout_worker.engines.vllm.arguments import sampling_arguments
from rollout_worker.engines.vllm.proof import unread
from schema.config import Config
from schema.wire.weights import Publication
from weight_sync import DirectoryStore, Weights, publish

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""How soon `collect` notices that vLLM died while nothing was running in it."""
CANCEL_SECONDS = 0.2
"""How often a start that is given up is told so: it may be about to start its next process."""
NAMED_PROBLEMS = 5


class VllmEngine:
    """See `engines.base.Engine`; made by `build`."""

    def __init__(self, config: Config, eos_token_ids: frozenset[int]) -> None:
        self._config, self._eos = config, eos_token_ids
        self.name = f"vllm {installed_version()}"
        self.capacity = config.rollout.max_concurrent_samples
        self.version = -1
        self._keep_kv = config.weight_sync.update_mode == "keep_kv"
        self._adapter: VllmAdapter | None = None
        self._boot = Boot(config)
        self._booting: asyncio.Future[VllmAdapter] | None = None
        self._failure: EngineError | None = None
        self._closed = False
        self._gate = asyncio.Event()
        self._updating = asyncio.Lock()
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._finished: list[Generation] = []
        self._news = asyncio.Event()
        self._idle = _IdleClock()
        self._samples = self._tokens = 0

    # ---- life ---------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        return self._config.engine_max_len if self._adapter is None else self._adapter.max_model_len

    async def start(self) -> None:
        """Boot vLLM in processes of its own. Raises `EngineConfigError` or `EngineFailed`."""
        self._booting = asyncio.get_running_loop().run_in_executor(None, self._boot.run)
        # Shielded: a thread cannot be cancelled, and `close` must know what it has started.
        adapter = await asyncio.shield(self._booting)
        layers = await adapter.unsupported_layers()
        if layers:
            more = f" and {len(layers) - NAMED_PROBLEMS} more" if len(layers) > NAMED_PROBLEMS else ""
            raise EngineConfigError(
                f"this build cannot replace the weights of {', '.join(layers[:NAMED_PROBLEMS])}{more} in "
                'vLLM: use a dense model without quantisation, or set rollout.backend = "transformers"'
            )
        self._adapter = adapter
        self._idle.start()

    async def close(self) -> None:
        """End vLLM's processes. Idempotent; also right while `start` is still running."""
        if self._closed:
            return
        self._closed = True
        self._news.set()
        for request_id in list(self._tasks):
            self.abort([request_id])
        if self._booting is None:
            return
        while not self._booting.done():
            await asyncio.to_thread(self._boot.cancel)
            await asyncio.wait([self._booting], timeout=CANCEL_SECONDS)
        if self._booting.exception() is None:  # else it has cleaned up after itself
            await self._booting.result().shutdown()

    # ---- requests -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. Each seed is a request of vLLM's own, which shares the prompt by its prefix cache."""
        for request in requests:
            self._check(request)
        for request in requests:
            tasks = self._tasks.setdefault(request.request_id, set())
            for index in range(len(request.seeds)):
                self._idle.begin()
                task = asyncio.create_task(self._run(request, index))
                tasks.add(task)
                task.add_done_callback(functools.partial(self._forget, request.request_id))

    def _check(self, request: GenerationRequest) -> None:
        length = len(request.prompt_token_ids)
        if not 0 < length < self.max_model_len:
            raise ValueError(
                f"request {request.request_id}: a prompt of {length} tokens does not fit an engine whose longest "
                f"sequence is {self.max_model_len}"
            )
        if not all(0 <= token < self._running().vocabulary for token in request.prompt_token_ids):
            raise ValueError(f"request {request.request_id}: a token of the prompt is not in the vocabulary")
        if request.request_id in self._tasks:
            raise ValueError(f"request {request.request_id} is in the engine already")

    async def _run(self, request: GenerationRequest, index: int) -> None:
        adapter = self._running()
        try:
            arguments = sampling_arguments(
                request.settings,
                seed=request.seeds[index],
                eos_token_ids=self._eos,
                prompt_tokens=len(request.prompt_token_ids),
                max_model_len=adapter.max_model_len,
            )
            await self._gate.wait()
            version = self.version
            name = f"{request.request_id}/{index}"
            completion = await adapter.generate(name, request.prompt_token_ids, arguments, str(version))
            generation = self._generation(request, index, completion, version)
        except EngineError as error:
            self._fail(error)
            return
        self._samples += 1
        self._tokens += len(generation.token_ids)
        self._finished.append(generation)
        self._news.set()

    def _generation(
        self, request: GenerationRequest, index: int, completion: Completion, version: int
    ) -> Generation:
        spans = completion.spans
        if self._keep_kv:
            # Every token was computed from the prompt's cache, which may be as old as the request.
            spans = [(0, version)]
        reason: Literal["stop", "length"] = "length" if completion.finish_reason == "length" else "stop"
        if completion.finish_reason not in ("stop", "length", "repetition"):
            raise EngineFailed(f"vLLM ended a sample with {completion.finish_reason!r}")
        return Generation(
            request_id=request.request_id,
            index=index,
            token_ids=np.asarray(completion.token_ids, np.int32),
            logprobs=completion.logprobs,
            version_starts=np.asarray([start for start, _ in spans], np.int32),
            version_values=np.asarray([value for _, value in spans], np.int32),
            finish_reason=reason,
            stop_reason=completion.stop_reason,
        )

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._idle.end()
        tasks = self._tasks.get(request_id)
        if tasks is not None:
            tasks.discard(task)
            if not tasks:
                del self._tasks[request_id]
        if not task.cancelled() and task.exception() is not None:
            self._fail(EngineFailed(f"a request failed unexpectedly: {task.exception()!r}"))

    async def collect(self) -> list[Generation]:
        """See the contract. Raises `EngineFailed` (or what vLLM refused) once nothing more will come."""
        while not self._finished:
            self._running()
            self._news.clear()
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                continue
        finished, self._finished = self._finished, []
        return finished

    def abort(self, request_ids: Collection[str]) -> None:
        """Forget requests: their tasks are cancelled, which aborts them inside of vLLM."""
        for request_id in request_ids:
            for task in self._tasks.pop(request_id, ()):
                task.cancel()
        gone = set(request_ids)
        self._finished = [sample for sample in self._finished if sample.request_id not in gone]

    # ---- weights ------------------------------------------------------------------------------------------

    async def load_weights(self, weights: WeightSource, version: int) -> LoadReport:
        """See the contract. The proof compares every parameter of vLLM with the files of the version."""
        adapter = self._running()
        async with self._updating, _located(weights, version) as place:
            started = time.monotonic()
            self._gate.clear()
            self._idle.suspend()
            try:
                await adapter.pause(forget_cache=not self._keep_kv)
                paused = time.monotonic()
                update = await self._apply(adapter, weights, version, place)
                self.version = version
                await adapter.resume()
                self._gate.set()
            except BaseException as error:
                self.version = -1
                if isinstance(error, EngineError) or not isinstance(error, Exception):
                    raise
                self._running()  # where vLLM died, that is the news
                raise EngineFailed(f"version {version} could not be loaded into vLLM: {error}") from error
            finally:
                self._idle.go_on()
        return LoadReport(paused - started, update.apply_s, update.verify_s)

    async def _apply(
        self, adapter: VllmAdapter, weights: WeightSource, version: int, place: tuple[str, Publication]
    ) -> Update:
        """Load and prove. Raises `WeightMismatch`."""
        update = await adapter.update(*place, version)
        if update.unreadable and isinstance(weights, Weights):
            log.info("version %d has left the store: loading it from what was fetched", version)
            async with _copied(weights, version) as copy:
                update = await adapter.update(*copy, version)
        problems = [problem for proof in update.proofs for problem in proof.problems]
        problems = problems or [f"vLLM ignored the published {name}" for name in unread(update.proofs)]
        if problems:
            raise _mismatch(version, problems)
        return update

    def stats(self) -> EngineStats:
        inside = sum(map(len, self._tasks.values()))
        running, tokens = (0, 0) if self._adapter is None else self._adapter.progress()
        running = min(running, inside)
        return EngineStats(
            self._idle.seconds(), self._samples, self._tokens + tokens, running, inside - running
        )

    # ---- failure ------------------------------------------------------------------------------------------

    def _fail(self, error: EngineError) -> None:
        if self._failure is None:
            self._failure = error
        self._news.set()

    def _running(self) -> VllmAdapter:
        """The adapter, as long as the engine can go on."""
        if self._closed:
            raise EngineFailed("the engine was closed")
        if self._adapter is None:
            raise EngineFailed("the engine was not started")
        if self._failure is None and self._adapter.dead:
            self._failure = EngineFailed(
                "vLLM's processes have died (their last messages are in the log above)"
            )
        if self._failure is not None:
            raise self._failure
        return self._adapter


class _IdleClock:
    """Seconds during which nothing was to be generated; pure but for reading the clock."""

    def __init__(self) -> None:
        self._busy, self._suspended = 0, 0
        self._total = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._settle()

    def begin(self) -> None:
        self._busy += 1
        self._settle()

    def end(self) -> None:
        self._busy -= 1
        self._settle()

    def suspend(self) -> None:
        self._suspended += 1
        self._settle()

    def go_on(self) -> None:
        self._suspended -= 1
        self._settle()

    def seconds(self) -> float:
        return self._total + (0.0 if self._since is None else time.monotonic() - self._since)

    def _settle(self) -> None:
        now, idle = time.monotonic(), not self._busy and not self._suspended
        if self._since is not None and not idle:
            self._total += now - self._since
            self._since = None
        elif self._since is None and idle:
            self._since = now


def _mismatch(version: int, problems: list[str]) -> WeightMismatch:
    more = f" (and {len(problems) - NAMED_PROBLEMS} more)" if len(problems) > NAMED_PROBLEMS else ""
    return WeightMismatch(f"version {version} in vLLM: {'; '.join(problems[:NAMED_PROBLEMS])}{more}")


@asynccontextmanager
async def _located(weights: WeightSource, version: int) -> AsyncIterator[tuple[str, Publication]]:
    """Where vLLM's processes can read these weights: in their store, or in a copy made for this update."""
    if isinstance(weights, Weights) and isinstance(weights.store, DirectoryStore):
        yield str(weights.store.root.absolute()), weights.publication
        return
    async with _copied(weights, version) as place:
        yield place


@asynccontextmanager
async def _copied(weights: WeightSource, version: int) -> AsyncIterator[tuple[str, Publication]]:
    """A store of its own for these weights. Raises `WeightMismatch` where fetched ones are not as they were."""
    root = await asyncio.to_thread(_temporary_directory)
    try:
        store = DirectoryStore(root)
        done = await asyncio.to_thread(
            publish, store, version=max(version, 0), timeline=0, tensors=weights.tensors()
        )
        if isinstance(weights, Weights) and done.content_hash != weights.publication.content_hash:
            raise _mismatch(version, ["its files have changed since they were fetched and verified"])
        yield str(root), Publication(
            id=1, version=max(version, 0), timeline=0, uri=done.uri,
            manifest_hash=done.manifest_hash, content_hash=done.content_hash, n_bytes=done.n_bytes,
        )  # fmt: skip
    finally:
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)


def _temporary_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="cosmos-weights-"))
