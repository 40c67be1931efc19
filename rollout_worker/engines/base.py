"""The contract between the worker loop and an inference engine.

    worker loop                          engine (its own thread or processes)
    ───────────                          ─────────────────────────────────────
    start()                ───────────▶  boots; no weights are trusted yet (version −1)
    load_weights(w, v)     ───────────▶  prepares while requests run; pauses, applies, proves, resumes; they go on
                                         under v
    checksum()             ───────────▶  reads the served weights back while requests run
    submit([request, …])   ───────────▶  queued at once, never blocks
    collect()              ◀───────────  everything that has finished since the last call
    abort({request_id, …}) ───────────▶  forgotten, running or waiting
    sleep(), wake()        ───────────▶  gives its device's memory back, requests kept; takes it again
    close()                ───────────▶  everything it started is gone

Every engine keeps these promises; `tests/rollout_worker/engines/engine_contract.py` checks them for any engine:

1. A sample's tokens are a function of prompt, settings, seed and weights (up to floating-point differences
   of the engine's kernels), never of its neighbours in the batch, their order or the time of submission.
2. `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution it was drawn from: after
   penalties, temperature, min-p, top-k and top-p, in this order. With greedy decoding that distribution is a
   point, so the number is that of the penalised distribution at temperature 1 without filters. With
   `correction = "raw"` it is that of softmax(logits / T) instead (greedy: T = 1), without anything else; with
   `"unread"` it may be either. An engine that cannot give the one that is asked for refuses the request: vLLM has
   one kind for all requests of an engine, and the raw one at T = 1 alone. With `"exact"` the sample
   says which ids filters left for each token, and which may not have been drawn yet for `min_tokens`. With
   `routing` it says which experts of a mixture each position was sent to as its keys and values were computed (vLLM:
   for the first time, if several).
3. `token_ids` is everything that was sampled, the token that ended the sample (end-of-text, stop token, the
   last token of a stop string) included: it is what the policy did. Nothing is ever cut from it.
4. Each token has the weight version it was computed with (recompute), or the oldest version in the cache it
   was computed from (keep_kv). A version never rises beyond what `load_weights` was given last.
5. Nothing is generated before the first `load_weights` has succeeded, nor after one has failed.

All methods are called from one event loop, in any order after `start`; none of them blocks it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from schema.util.gpus import UnusableGpuError, dealt_gpus, require_dealt_gpus
from schema.wire.weights import Piece, Publication

if TYPE_CHECKING:
    import torch


class EngineError(Exception):
    """Base of everything that an engine raises."""


class EngineConfigError(EngineError):
    """The engine cannot run with these settings, a restart would not help: names key, value and remedy."""


class EngineFailed(EngineError):
    """The engine died or cannot go on; the process should end and be started again."""


class WeightMismatch(EngineError):
    """The weights inside of the engine are not those it was given. Names the first tensors that differ."""


def check_no_gpu_was_dealt() -> None:
    """Return if an engine may run on the CPU. Raises `EngineConfigError`: the launcher dealt GPUs to this process."""
    import torch  # an engine that runs has imported it

    if not (dealt := dealt_gpus()):
        return
    try:
        require_dealt_gpus(torch.cuda.init, torch.version.cuda)
    except UnusableGpuError as error:
        raise EngineConfigError(str(error)) from error
    raise EngineConfigError(
        f"the launcher dealt {dealt} GPU{'s' * (dealt > 1)} to this process, PyTorch can use them, and the installed "
        f"engine computes on the CPU: install the engine's build for GPUs (docs/gpu.md)"
    )


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the tokens of one request are drawn. Same meaning and order of operations in every engine."""

    max_tokens: int
    """Most tokens of one sample; the engine's longest sequence bounds it as well (finish_reason "length")."""
    temperature: float = 1.0
    do_sample: bool = True
    top_p: float = 1.0
    top_k: int = 0
    """0: off (the configuration's −1 becomes 0)."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and response tokens."""
    presence_penalty: float = 0.0
    """Over response tokens, as is the frequency penalty."""
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    """Before this many tokens, end-of-text and stop tokens are impossible and stop strings not looked for."""
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    """Stop strings that are special tokens, by id. They end an answer as its other stop tokens do."""
    include_stop_str_in_output: bool = False
    """Whether the text of the answer (never the token ids) keeps the stop string."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of this engine's own, from `rollout.sampling_config.extra`."""
    correction: Literal["none", "exact", "raw", "unread"] = "none"
    """The part that a trainer needs to compute the same log-probs; see promise 2. unread: nothing reads them."""
    routing: Literal["none", "ids", "weights"] = "none"
    """The part that it needs to choose the same experts: their ids, or the weights of these as well."""

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0.0

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0) and not self.greedy

    @property
    def reshapes(self) -> bool:
        """Whether tokens are drawn from another distribution than the softmax at the temperature."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return self.filters or penalties != (1.0, 0.0, 0.0) or self.min_tokens > 0

    @property
    def wants_kept_sets(self) -> bool:
        return self.filters and self.correction == "exact"

    def ends(self, eos_token_ids: Collection[int]) -> set[int]:
        """The token ids that end a sample."""
        return {*self.stop_token_ids, *self.stop_tokens, *(() if self.ignore_eos else eos_token_ids)}

    def held_ids(self, eos_token_ids: Collection[int]) -> npt.NDArray[np.int32]:
        """Return those of them that the trainer has to know, since `min_tokens` holds them back; rising."""
        wanted = self.correction == "exact" and self.min_tokens > 0
        return np.array(sorted(self.ends(eos_token_ids)) if wanted else [], np.int32)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and the seeds of the samples wanted of it: one sample for each seed.

    Several seeds in one request are the engine's `n`: it may compute the prompt once. With
    `rollout.n_generation_to_batch` the worker sends one request per sample instead.
    """

    request_id: str
    """Unique among the requests of this engine's life."""
    prompt_token_ids: Sequence[int]
    """At least one token, shorter than the engine's longest sequence."""
    seeds: tuple[int, ...]
    """Each in [0, 2**31)."""
    settings: SamplingSettings
    greedy_last: bool = False
    """Whether the last sample is decoded greedily, all else like the others: the baseline of a group."""

    def settings_of(self, index: int) -> SamplingSettings:
        """How the sample of the seed at `index` is drawn."""
        is_greedy = self.greedy_last and index == len(self.seeds) - 1
        return replace(self.settings, temperature=0.0) if is_greedy else self.settings


def check_request(
    request: GenerationRequest,
    *,
    max_model_len: int,
    vocabulary: int,
    pending: Container[str],
    routing: Collection[str],
) -> None:
    """Raises `ValueError` for what an engine cannot serve.

    pending: ids of the requests that it has already. routing: what it can be asked of the chosen experts.
    """
    name, length, ids = request.request_id, len(request.prompt_token_ids), request.prompt_token_ids
    if not 0 < length < max_model_len:
        raise ValueError(f"request {name}: a prompt of {length} tokens does not fit into {max_model_len}")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise ValueError(f"request {name}: the prompt has tokens outside of the vocabulary of {vocabulary}")
    if not request.seeds or request.settings.max_tokens < 1:
        raise ValueError(f"request {name} needs at least one seed and max_tokens of at least 1")
    if name in pending:
        raise ValueError(f"request {name} is in the engine already")
    if request.settings.routing not in routing:
        raise ValueError(f"request {name} asks for the {request.settings.routing} of experts: not recorded here")


def _no_ids() -> npt.NDArray[np.int32]:
    return np.zeros(0, np.int32)


def _no_experts() -> npt.NDArray[np.uint8]:
    return np.zeros((0, 0, 0), np.uint8)


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished sample."""

    request_id: str
    index: int
    """Which of the request's seeds."""
    token_ids: npt.NDArray[np.int32]
    """[R], R ≥ 1"""
    logprobs: npt.NDArray[np.float32]
    """[R], finite, ≤ 0 up to rounding"""
    version_starts: npt.NDArray[np.int32]
    """[V], run i covers response tokens [version_starts[i], version_starts[i + 1]); starts with 0"""
    version_values: npt.NDArray[np.int32]
    """[V], weight version of each run"""
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    """The end-of-text or stop token, or the stop string, that ended it; None for "length"."""
    kept_counts: npt.NDArray[np.int32] = field(default_factory=_no_ids)
    """[R], where the settings want kept sets: from how many ids each token was drawn; 0: from all"""
    kept_ids: npt.NDArray[np.int32] = field(default_factory=_no_ids)
    """these ids, of one token after the other"""
    held_ids: npt.NDArray[np.int32] = field(default_factory=_no_ids)
    """see `SamplingSettings.held_ids`"""
    expert_ids: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] = field(default_factory=_no_experts)
    """[n, M, k] as narrow as it fits, where the settings want them: for each token of prompt and response but the
    last, in each of the model's M mixtures of experts in order, the k that were chosen; else [0, 0, 0]"""
    expert_weights: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    """[n, M, k], the weights of these, where the settings want them; else [0, 0, 0]"""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """It says what an update did, and the seconds it took by stage."""

    pause_s: float
    """From asking requests to pause until none was running."""
    apply_s: float
    verify_s: float
    """Reading back what was written; 0 where that is a part of writing."""
    prepare_s: float = 0.0
    """Before the pause: decoding changes and finding their elements, or making a full version readable."""
    interrupted_s: float = 0.0
    """How long requests were held up: until they could run again."""
    mode: Literal["in_place", "full"] = "full"
    """Whether only what changed was written, or everything loaded."""
    publication: Publication | None = None
    """The publication that was really loaded, where that is known: a full load takes what the host's copy holds,
    which may be newer than what was asked for."""
    detail: str = ""
    """Why everything was loaded although the changes were at hand."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """It holds what the parameters in use say of the weights being served."""

    content_hash: str | None
    """Content hash of the published tensors as put together from the engine's parameters; the same as the
    publication's where all is right. None: it cannot be computed now (`problems` says what is wrong, if anything)."""
    exact: bool
    """Whether every tensor was hashed from the parameters alone. False: the engine's type has lost bits of the
    published one, so tensors were cast and compared with the host's copy, whose hashes then stand for them."""
    problems: list[str]
    """Tensors that differ from the host's copy, or of which the engine holds copies that disagree."""
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Totals since `start`, and what is in the engine now."""

    idle_s: float
    """Time with nothing to generate (updates of weights are not counted as idle)."""
    samples: int
    """Finished ones."""
    tokens: int
    """Generated ones, those of unfinished samples included."""
    running: int
    waiting: int
    """Samples submitted and not begun."""
    longest: int = 0
    """Tokens generated so far for the longest of the unfinished samples."""


class WeightSource(Protocol):
    """A verified weight version: names and shapes are the hub checkpoint's."""

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]: ...


@runtime_checkable
class SharedWeights(WeightSource, Protocol):
    """A published version in the host's copy, which processes share and which moves on to newer versions."""

    @property
    def publication(self) -> Publication: ...

    @property
    def copy_directory(self) -> Path: ...

    def reading(self) -> AbstractContextManager[Publication]:
        """Hold the copy; yields what it holds now. `tensors` are to be read only meanwhile."""

    def changes_since(self, content_hash: str) -> list[tuple[Path, Piece]] | None:
        """Deltas (root of a local store, piece) that lead from these weights to the publication, oldest first.
        None: no such way exists."""


class Engine(Protocol):
    """An inference engine. See the module's docstring for what it promises."""

    @property
    def name(self) -> str:
        """Engine and version, e.g. `vllm 0.32.0`."""

    @property
    def capacity(self) -> int:
        """Samples it wants to have (running and waiting) so that it never runs dry."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and response together, in tokens. Known after `start`."""

    @property
    def version(self) -> int:
        """Weight version in use; −1 before the first one."""

    async def start(self) -> None:
        """Boot. Raises `EngineConfigError` when the settings cannot work, `EngineFailed` otherwise."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, first come first served. Raises `ValueError`, with none of them queued, if one of
        them cannot be served at all (no tokens, unknown tokens, longer than the longest sequence)."""

    async def collect(self) -> list[Generation]:
        """All samples that finished since the last call; waits until there is at least one.

        Samples are handed out one by one as they finish, not by request. May be cancelled without loss. One
        caller at a time. Raises `EngineFailed` when the engine has died, or `close` was called.
        """

    def abort(self, request_ids: Collection[str]) -> None:
        """Forget requests: none of their samples is returned by a `collect` that starts after this call."""

    async def load_weights(self, weights: WeightSource, version: int) -> LoadReport:
        """Replace the weights, and prove that what is in use equals what was given (cast to the engine's dtype)
        before anything is generated with it.

        Of `SharedWeights` that lead here from what is served, only the elements that changed are written, prepared
        while requests run and read back. Everything else, and whatever cannot be prepared, is loaded and proven
        whole; the version is then that of what the host's copy holds.

        Requests in flight are kept: with `weight_sync.update_mode = "recompute"` their cache is computed
        again under the new weights, with `"keep_kv"` it is used as it is.

        Raises `WeightMismatch` (tensors missing, unknown, of another shape, or not equal after loading),
        after which the engine generates nothing until a later `load_weights` succeeds.
        """

    async def checksum(self) -> Checksum:
        """Put the published tensors together from the parameters in use, and hash them. Requests go on; an update
        waits until it is done. Raises `EngineFailed` when the engine has died."""

    async def sleep(self) -> None:
        """Release the memory of the devices: the cache is dropped, the weights wait in host memory.

        Requests are kept, as in an update, and their cache is computed again afterwards. Updates and checksums wait
        for `wake`. Not twice in a row. Raises `EngineFailed`.
        """

    async def wake(self) -> None:
        """Take the memory again and go on with the same weights, bit by bit. Raises `EngineFailed`."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End threads and processes; idempotent. Unfinished requests are forgotten."""
