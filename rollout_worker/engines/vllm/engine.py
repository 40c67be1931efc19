"""The engine for work: vLLM's AsyncLLM behind the contract of `engines.base`.

    submit ─▶ one task per sample ─▶ gate ─▶ vLLM's own processes ─▶ finished samples ─▶ collect
                                      ▲
    load_weights: prepare ─ gate closed ─ pause ─ write ─ proof ─ resume ─ gate open

Invariant: the gate is open only while the weights inside of vLLM are proven. It is closed from the start
until the first version has been loaded, during every update, and from a failed update until a later one
succeeds (requests that are inside of vLLM then stay paused).

`_content` is the content hash of what is proven to be inside, and only from there may deltas lead on: it is
forgotten before anything is written and known again when the proof is there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollout_worker.engines.base import (
    Checksum,
    EngineConfigError,
    EngineError,
    EngineFailed,
    EngineStats,
    Generation,
    GenerationRequest,
    LoadReport,
    SharedWeights,
    WeightMismatch,
    WeightSource,
    check_request,
)
from rollout_worker.engines.vllm.adapter import (
    WATCH_SECONDS,
    Boot,
    Completion,
    Update,
    VllmAdapter,
    installed_version,
)
from rollout_worker.engines.vllm.arguments import (
    adapter_settings,
    check_held_back,
    check_logprobs,
    has_raw_logprobs,
    published_adapter,
    sampling_arguments,
)
from rollout_worker.engines.vllm.nodes import nodes_of
from rollout_worker.engines.vllm.proof import unread
from rollout_worker.engines.vllm.reading import served_adapter, served_weights
from schema.config import Config
from schema.wire.weights import Piece, Publication
from weight_sync import DirectoryStore, publish

log = logging.getLogger(__name__)

CANCEL_SECONDS = 0.2
"""How often a start that is given up is cancelled: it may be about to start its next process."""
NAMED_PROBLEMS = 5


class VllmEngine:
    """See `engines.base.Engine`; made by `build`."""

    def __init__(self, config: Config, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._config, self._eos = config, eos_token_ids
        self.name = f"vllm {installed_version()}"
        self.capacity = config.rollout.max_concurrent_samples
        self.version = -1
        adapter = published_adapter(config)
        self._settings = {} if adapter is None else {"adapter": adapter_settings(adapter)}
        """The settings of the adapter that versions consist of, for `transfer.StoreUpdateInfo`; empty: they are the
        model's."""
        self._rebuilt: list[str] = []
        """Layers that are made anew of whole versions."""
        self._returns_experts = config.replays_routing
        self._keep_kv = config.weight_sync.update_mode == "keep_kv"
        self._adapter: VllmAdapter | None = None
        self._nodes = nodes_of(os.environ)
        if self._nodes is not None and self._nodes.index:
            raise EngineConfigError(
                f"COSMOS_ENGINE_NODE = {self._nodes.index}: the replica is on node 0, the others run "
                "python -m rollout_worker.engines.vllm.follower"
            )
        self._boot = Boot(config, tokenizer, self._nodes)
        self._booting: asyncio.Future[VllmAdapter] | None = None
        self._failure: EngineError | None = None
        self._closed = False
        self._content: str | None = None
        self._weights: SharedWeights | None = None
        self._loads = 0
        self._gate = asyncio.Event()
        self._updating = asyncio.Lock()
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._finished: list[Generation] = []
        self._news = asyncio.Event()
        self._idle = _IdleClock()
        self._samples, self._tokens = 0, _TokenTotal()

    # ---- life ---------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path | None:
        """Where files for vLLM's ranks lie; None: anywhere on this machine."""
        return None if self._nodes is None else self._nodes.folder

    @property
    def max_model_len(self) -> int:
        return self._config.engine_max_len if self._adapter is None else self._adapter.max_model_len

    async def start(self) -> None:
        """Boot vLLM in processes of its own. Raises `EngineConfigError` or `EngineFailed`."""
        self._booting = asyncio.get_running_loop().run_in_executor(None, self._boot.run)
        # Shielded: a thread cannot be cancelled, and `close` must know what it has started.
        adapter = await asyncio.shield(self._booting)
        refused, self._rebuilt = await adapter.begin()
        log.info("%s runs the model by its model runner %s", self.name, adapter.runner)
        sampling = self._config.rollout.sampling_config
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos)}
        try:
            check_held_back(len(ends), sampling.min_tokens, adapter.runner)
        except ValueError as error:
            raise EngineConfigError(str(error)) from None
        if refused and not self._settings:
            others = f" and {len(refused) - NAMED_PROBLEMS} more" if len(refused) > NAMED_PROBLEMS else ""
            raise EngineConfigError(
                f"the weights of {', '.join(refused[:NAMED_PROBLEMS])}{others} cannot be replaced in vLLM: name "
                "another model (docs/models.md lists families), another rollout.engine_kwargs.moe_backend, or "
                'set rollout.backend = "transformers"'
            )
        if self._returns_experts:
            await adapter.find_mixtures()
        self._adapter = adapter
        self._idle.end()

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
        await asyncio.to_thread(self._boot.clear)

    # ---- requests -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. Each seed is a request of vLLM's own, which shares the prompt by its prefix cache."""
        adapter = self._running()
        vocabulary = adapter.vocabulary
        for request in requests:
            check_request(
                request,
                max_model_len=self.max_model_len,
                vocabulary=vocabulary,
                pending=self._tasks,
                routing=("none", "ids") if self._returns_experts else ("none",),
            )
            check_logprobs(request.request_id, request.settings, raw=has_raw_logprobs(self._config))
            settings = request.settings
            check_held_back(len(settings.ends(self._eos)), settings.min_tokens, adapter.runner)
        for request in requests:
            tasks = self._tasks.setdefault(request.request_id, set())
            for index in range(len(request.seeds)):
                self._idle.begin()
                task = asyncio.create_task(self._run(request, index))
                tasks.add(task)
                task.add_done_callback(functools.partial(self._forget, request.request_id))

    async def _run(self, request: GenerationRequest, index: int) -> None:
        adapter, name, tokens = self._running(), f"{request.request_id}/{index}", 0
        try:
            arguments = sampling_arguments(
                request.settings_of(index),
                seed=request.seeds[index],
                eos_token_ids=self._eos,
                prompt_tokens=len(request.prompt_token_ids),
                max_model_len=adapter.max_model_len,
                vocabulary=adapter.vocabulary,
            )
            await self._gate.wait()
            version = self.version
            salt = str(self._loads)
            completion = await adapter.generate(
                name, request.prompt_token_ids, arguments, salt, experts=request.settings.routing != "none"
            )
            generation = self._generation(request, index, completion, version)
            tokens = len(generation.token_ids)
        except EngineError as error:
            self._fail(error)
            return
        finally:
            self._tokens.end(name, tokens)
        self._samples += 1
        self._finished.append(generation)
        self._news.set()

    def _generation(self, request: GenerationRequest, index: int, completion: Completion, version: int) -> Generation:
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
            kept_counts=completion.kept_counts,
            kept_ids=completion.kept_ids,
            held_ids=request.settings.held_ids(self._eos),
            expert_ids=completion.expert_ids,
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
        if self._adapter is not None and any(request_id in self._tasks for request_id in request_ids):
            self._tokens.see(self._adapter.progress())
        for request_id in request_ids:
            for task in self._tasks.pop(request_id, ()):
                task.cancel()
        gone = set(request_ids)
        self._finished = [sample for sample in self._finished if sample.request_id not in gone]

    # ---- weights ------------------------------------------------------------------------------------------

    async def load_weights(self, weights: WeightSource, version: int) -> LoadReport:
        """See the contract. The proof compares what was written in vLLM's parameters with its source."""
        adapter = self._running()
        async with self._updating, AsyncExitStack() as stack:
            update = _Updating(self._content, time.monotonic())
            try:
                await self._prepare(adapter, weights, version, update, stack)
                self._gate.clear()
                self._idle.begin()
                stack.callback(self._idle.end)
                update.asked = time.monotonic()
                await adapter.pause(forget_cache=not self._keep_kv)
                update.paused = time.monotonic()
                self._content = None
                applied = await self._apply(adapter, weights, version, update, stack)
                await adapter.resume()
            except BaseException as error:
                await self._distrust(adapter, update)
                if isinstance(error, EngineError) or not isinstance(error, Exception):
                    raise
                self._running()  # where vLLM died, that is the news
                raise EngineFailed(f"version {version} could not be loaded into vLLM: {error}") from error
            resumed = time.monotonic()
            self.version, self._content = update.version, update.content_hash
            self._weights = weights if isinstance(weights, SharedWeights) else None
            self._loads += 1
            self._gate.set()
        return LoadReport(
            pause_s=update.paused - update.asked,
            apply_s=applied.apply_s,
            verify_s=applied.verify_s,
            prepare_s=update.asked - update.began,
            interrupted_s=resumed - update.asked,
            mode="full" if update.place else "in_place",
            publication=update.publication,
            detail=update.detail,
        )

    async def _prepare(
        self, adapter: VllmAdapter, weights: WeightSource, version: int, update: _Updating, stack: AsyncExitStack
    ) -> None:
        """Everything that can be done while requests run."""
        by_changes = not self._settings and not self._rebuilt
        if isinstance(weights, SharedWeights) and update.base is not None and by_changes:
            deltas = await asyncio.to_thread(weights.changes_since, update.base)
            if deltas is not None:
                update.publication, update.version = weights.publication, weights.publication.version
                update.content_hash = weights.publication.content_hash
                problem = await adapter.prepare(update.base, deltas, update.content_hash)
                if problem is None:
                    return
                update.detail = f"the changes could not be prepared: {problem}"
                log.warning("version %d is loaded whole: %s", version, update.detail)
        await self._locate(weights, version, update, stack)
        update.place |= self._settings

    async def _locate(self, weights: WeightSource, version: int, update: _Updating, stack: AsyncExitStack) -> None:
        """Where vLLM's processes can read all of the weights, until the stack is closed."""
        if isinstance(weights, SharedWeights):
            publication = await asyncio.to_thread(stack.enter_context, weights.reading())
            update.place = {"copy": str(weights.copy_directory), "content_hash": publication.content_hash}
            update.publication, update.version = publication, publication.version
            update.content_hash = publication.content_hash
            return
        update.place = await stack.enter_async_context(_copied(weights, version, self._folder))
        update.publication, update.version = None, version
        update.content_hash = update.place["content_hash"]

    async def _apply(
        self, adapter: VllmAdapter, weights: WeightSource, version: int, update: _Updating, stack: AsyncExitStack
    ) -> Update:
        """Write and prove; all of the weights where writing changes has failed. Raises `WeightMismatch`."""
        if not update.place:
            applied = await adapter.apply(update.version)
            problems = _problems(applied)
            if not problems:
                return applied
            update.detail = f"writing the changes failed: {'; '.join(problems[:NAMED_PROBLEMS])}"
            log.error("version %d is loaded whole: %s", version, update.detail)
            await self._locate(weights, version, update, stack)
        applied = await adapter.load(update.place, update.version)
        problems = _problems(applied)
        if problems:
            raise _mismatch(update.version, problems)
        return applied

    async def _distrust(self, adapter: VllmAdapter, update: _Updating) -> None:
        """After a failure: nothing is generated until a later update has succeeded."""
        self.version, self._content = -1, None
        self._gate.clear()
        if update.paused is None and not adapter.death:
            with suppress(Exception):
                await adapter.pause(forget_cache=not self._keep_kv)

    async def sleep(self) -> None:
        """See the contract: vLLM's sleep mode, level 1. To be measured on a GPU."""
        adapter = self._running()
        await self._updating.acquire()  # until it is awake again
        self._gate.clear()
        try:
            await adapter.sleep()
        except Exception as error:
            self._running()
            raise EngineFailed(f"vLLM could not be put to sleep: {error}") from error

    async def wake(self) -> None:
        adapter = self._running()
        try:
            await adapter.wake()
            if self.version < 0:  # nothing may be generated before the next update
                await adapter.pause(forget_cache=not self._keep_kv)
        except Exception as error:
            self._running()
            raise EngineFailed(f"vLLM could not be woken: {error}") from error
        self._loads += 1  # the cache of before is gone
        if self.version >= 0:
            self._gate.set()
        self._updating.release()

    async def checksum(self) -> Checksum:
        """See the contract. See `reading`."""
        adapter = self._running()
        async with self._updating:
            began = time.monotonic()
            if self._content is None:
                return Checksum(None, False, ["no weights are served"], 0.0)
            try:
                if self._settings:
                    checksum = await served_adapter(adapter, self._weights, self._content, self._settings)
                elif self._rebuilt:
                    problems = await adapter.changed()
                    checksum = Checksum(None if problems else self._content, False, problems, 0.0)
                else:
                    checksum = await served_weights(adapter, self._weights, self._content, self._folder)
            except EngineError:
                raise
            except Exception as error:
                self._running()
                raise EngineFailed(f"the weights inside of vLLM cannot be read: {error}") from error
        return replace(checksum, seconds=time.monotonic() - began)

    def stats(self) -> EngineStats:
        inside = sum(map(len, self._tasks.values()))
        progress = {} if self._adapter is None else self._adapter.progress()
        self._tokens.see(progress)
        running = min(sum(tokens > 0 for tokens in progress.values()), inside)
        longest = max(progress.values(), default=0)
        return EngineStats(
            self._idle.seconds(), self._samples, self._tokens.total, running, inside - running, longest
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
        if self._failure is None and (death := self._adapter.death):
            self._failure = EngineFailed(death)
        if self._failure is not None:
            raise self._failure
        return self._adapter


class _TokenTotal:
    """Tokens that were generated, each once, whatever became of its request: the total never falls. Pure."""

    def __init__(self) -> None:
        self.total = 0
        self._seen: dict[str, int] = {}
        """Tokens of requests inside of vLLM that are in the total already."""

    def see(self, progress: Mapping[str, int]) -> None:
        """Tokens of each request so far."""
        for name, tokens in progress.items():
            self.total += max(tokens - self._seen.get(name, 0), 0)
            self._seen[name] = tokens

    def end(self, name: str, tokens: int) -> None:
        """A request has left vLLM with so many tokens; 0: it was aborted, and what was seen of it counts."""
        self.total += max(tokens - self._seen.pop(name, 0), 0)


class _IdleClock:
    """Seconds during which nothing was to be generated; pure but for reading the clock."""

    def __init__(self) -> None:
        self._reasons = 1
        """Not to be idle: samples to generate, updates under way; one until vLLM has booted."""
        self._total = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        self._reasons += 1
        self._settle()

    def end(self) -> None:
        self._reasons -= 1
        self._settle()

    def seconds(self) -> float:
        return self._total + (0.0 if self._since is None else time.monotonic() - self._since)

    def _settle(self) -> None:
        now, idle = time.monotonic(), not self._reasons
        if self._since is not None and not idle:
            self._total += now - self._since
            self._since = None
        elif self._since is None and idle:
            self._since = now


@dataclass(slots=True)
class _Updating:
    """It holds what is known of an update under way."""

    base: str | None
    """Content hash of the weights that are replaced."""
    began: float
    asked: float = 0.0
    paused: float | None = None
    place: dict[str, str] = field(default_factory=dict)
    """Where all of the weights lie; empty while only changes are to be written."""
    publication: Publication | None = None
    version: int = -1
    content_hash: str | None = None
    detail: str = ""


def _problems(update: Update) -> list[str]:
    problems = [problem for proof in update.proofs for problem in proof.problems]
    return problems or [f"vLLM ignored the published {name}" for name in unread(update.proofs)]


def _mismatch(version: int, problems: list[str]) -> WeightMismatch:
    others = f" (and {len(problems) - NAMED_PROBLEMS} more)" if len(problems) > NAMED_PROBLEMS else ""
    return WeightMismatch(f"version {version} in vLLM: {'; '.join(problems[:NAMED_PROBLEMS])}{others}")


@asynccontextmanager
async def _copied(weights: WeightSource, version: int, folder: Path | None) -> AsyncIterator[dict[str, str]]:
    """A store of its own for weights that other processes cannot read; fields of `transfer.StoreUpdateInfo`.

    folder: in which it lies; None: among temporary files.

    Raises `WeightMismatch` where published ones are not as they were.
    """
    root = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="cosmos-weights-", dir=folder))
    try:
        store = DirectoryStore(root)
        done = await asyncio.to_thread(publish, store, version=max(version, 0), timeline=0, tensors=weights.tensors())
        published: Publication | None = getattr(weights, "publication", None)
        if published is not None and done.content_hash != published.content_hash:
            raise _mismatch(version, ["its files have changed since they were fetched and verified"])
        piece = Piece(uri=done.uri, manifest_hash=done.manifest_hash, n_bytes=done.n_bytes)
        yield {"root": str(root), "piece": piece.model_dump_json(), "content_hash": done.content_hash}
    finally:
        await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
