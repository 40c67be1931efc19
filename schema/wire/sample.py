"""One sample on the wire: its segments' tokens in a frame, and a small header that the controller reads.

Tensors of the frame (T tokens over all segments, one after the other; V version runs; S segments):

    token_ids       int32   [T]  prompt, response and tool tokens, in order
    loss_mask       uint8   [T]  1 on tokens that the policy generated
    logprobs        float32 [T]  behaviour log-prob of each token under the distribution it was sampled from;
                                 0 where loss_mask is 0
    segment_starts  int32   [S]  index of the first token of each segment; segment_starts[0] == 0
    version_starts  int32   [V]  run i covers tokens [version_starts[i], version_starts[i + 1])
    version_values  int32   [V]  weight version of that run, -1 for tokens that no policy generated
    text            uint8   [*]  UTF-8 text of the response; only with `rollout_as_token_ids = false`
    part_positions  int32   [P]  generated tokens that earned parts of the score, rising; only with such parts
    part_values     float32 [P]  these parts; the rest of the score is earned at the last generated token
    kept_counts     int32   [G]  for each generated token, from how many ids it was drawn, 0: from all; only where
                                 filters (top-p, top-k, min-p) were on and are to be accounted for
    kept_ids        int32   [*]  these ids, of one token after the other
    held_ids        int32   [*]  ids that could not be drawn before an answer had its least number of tokens; only
                                 where there was one
    expert_ids      uint8 or uint16 [(T − S) · M · k]  for each token but the last of its segment, in each of the M
                                 mixtures of experts in order, the k experts that the engine chose; only where they
                                 are to be replayed
    expert_weights  float32 [(T − S) · M · k]  the weights of these, as they multiply what the experts say; only where
                                 these are to be replayed, too
    expert_shape    int32   [2]  M and k

Next to the tensors: `SampleText` as JSON in the metadata under "text", of a sample that is kept for people to read.

The plain case is one segment: prompt, then response. The header travels as JSON in the frame's metadata under
"sample"; `check` proves that it tells the truth about the tensors (the trainer does so, the controller, which
never decodes tensors, does not need to).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schema.scores.answers import LONGEST_ANSWER
from schema.util.text import PLAIN, Prose
from schema.wire.frame import FrameError, decode_frame, encode_frame, read_metadata
from schema.wire.invalid import describe

Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Version = Annotated[int, Field(strict=True, ge=-1, lt=2**31)]
"""Both end up in int32 and int64 arrays; a boolean is not a number."""
LONGEST_SOURCE = 128
Source = Annotated[str, Field(max_length=LONGEST_SOURCE, pattern=PLAIN)]
MOST_REWARDS = 256
"""Reward functions of a sample, and of a batch."""
MOST_EXPERTS = 2**16
"""Mixtures of a model, and experts of each."""
TEXT_KEY = "text"
"""Under which a frame's metadata has the text of a sample that is kept."""
FinishReason = Literal["stop", "length", "overlong", "abort"]
Ending = Literal[
    "finished", "truncated", "deadline", "tool_error", "env_error", "reward_error", "judge_error",
    "engine_error", "aborted", "poison", "stale",
]  # fmt: skip
"""How a sample ended, for people and for programs: what its rewards are worth follows from it."""
_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
    "segment_starts": np.int32,
    "version_starts": np.int32,
    "version_values": np.int32,
}
"""The tensors that every frame has; they are fields of `Sample`, too."""
_OPTIONAL: tuple[dict[str, type[np.generic]], ...] = (
    {"part_positions": np.int32, "part_values": np.float32},
    {"kept_counts": np.int32, "kept_ids": np.int32},
    {"held_ids": np.int32},
    {"expert_shape": np.int32, "expert_ids": np.uint16},
    {"expert_weights": np.float32},
)
"""The same of those that only some have: all of a group, or none."""
_NARROWER: dict[str, type[np.generic]] = {"expert_ids": np.uint8}
"""Types that tensors may have instead, where their values fit."""


def _no_ints() -> npt.NDArray[np.int32]:
    return np.zeros(0, np.int32)


class SampleHeader(BaseModel):
    """The facts about a sample that need no decoding of its tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    index: Count = Field(description="Which of the group's samples this is.")
    prompt_tokens: Count = Field(description="Tokens before the first generated one.")
    response_tokens: Count = Field(description="Tokens with loss mask 1.")
    total_tokens: Count = Field(description="All tokens of all segments.")
    segments: Count = Field(default=1, ge=1)
    oldest_version: Version = Field(description="Oldest weight version among generated tokens; -1 if none.")
    newest_version: Version
    finish_reason: FinishReason
    rewards: dict[Annotated[str, Field(max_length=1024, pattern=PLAIN)], float] = Field(
        default_factory=dict, max_length=MOST_REWARDS, description="Reward function name to its value."
    )
    score: float | None = Field(default=None, description="Weighted sum of the rewards; null after an error.")
    error: Annotated[Prose, Field(max_length=8192)] | None = Field(
        default=None,
        description="Why the score is missing: name and last lines of the failure. Never a score of zero.",
    )
    outage: bool = Field(
        default=False, description="Whether the error is a time-out or a connection error: it may pass by itself."
    )
    ending: Ending = Field(default="finished", description="How it ended; see `docs/operations.md`.")
    source: Source = Field(
        default="", description="Where its prompt comes from: `data_source` of its row. Empty: there is but one."
    )
    baseline: bool = Field(
        default=False,
        description="Whether it was drawn greedily: its score is its group's baseline, and it is not trained.",
    )
    turns: Count = Field(default=1, ge=1, description="Answers of the policy in it.")
    seconds: float | None = Field(default=None, ge=0, description="That scoring took.")
    answer: Annotated[str, Field(max_length=LONGEST_ANSWER, pattern=PLAIN)] | None = Field(
        default=None, description="Of a validation sample: the answer that its scorer has extracted."
    )


@dataclass(slots=True)
class Sample:
    """One completion with everything that training needs. Arrays as described in the module's docstring."""

    header: SampleHeader
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    version_starts: npt.NDArray[np.int32]
    version_values: npt.NDArray[np.int32]
    segment_starts: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, np.int32))
    part_positions: npt.NDArray[np.int32] = field(default_factory=_no_ints)
    part_values: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    kept_counts: npt.NDArray[np.int32] = field(default_factory=_no_ints)
    kept_ids: npt.NDArray[np.int32] = field(default_factory=_no_ints)
    held_ids: npt.NDArray[np.int32] = field(default_factory=_no_ints)
    expert_shape: npt.NDArray[np.int32] = field(default_factory=_no_ints)
    expert_ids: npt.NDArray[np.uint8] | npt.NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint8))
    expert_weights: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    text: str | None = None
    kept: str | None = None
    """`SampleText` as JSON, if it is kept for people to read."""

    def token_versions(self) -> npt.NDArray[np.int32]:
        """Weight version of each token, [T], -1 where no policy generated it."""
        lengths = np.diff(np.append(self.version_starts, len(self.token_ids)))
        return np.repeat(self.version_values, lengths).astype(np.int32)


def encode_sample(sample: Sample) -> bytes:
    """Serialise one sample as a frame."""
    kinds = dict(_DTYPES)
    for group in _OPTIONAL:
        if len(getattr(sample, next(iter(group)))):
            kinds |= group
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for name, dtype in kinds.items():
        tensor = getattr(sample, name)
        is_narrow = name in _NARROWER and tensor.dtype == _NARROWER[name]
        tensors[name] = tensor if is_narrow else tensor.astype(dtype, copy=False)
    if sample.text is not None:
        tensors["text"] = np.frombuffer(sample.text.encode(), np.uint8)
    metadata = {"sample": header_text(sample.header)}
    return encode_frame(tensors, metadata if sample.kept is None else {**metadata, TEXT_KEY: sample.kept})


def header_text(header: SampleHeader) -> str:
    """A header as it travels and is stored: without what every reader knows."""
    return header.model_dump_json(exclude_defaults=True)


def read_sample_metadata(data: bytes | memoryview) -> tuple[SampleHeader, dict[str, str]]:
    """The header of a sample frame, without decoding a tensor, and all metadata: under "sample" the header's text.

    Raises:
        FrameError: the bytes are no frame, or it has no valid header.
    """
    metadata = read_metadata(data)
    return _parse_header(metadata), metadata


def _parse_header(metadata: dict[str, str]) -> SampleHeader:
    try:
        return SampleHeader.model_validate_json(metadata["sample"])
    except KeyError:
        raise FrameError("frame has no sample header") from None
    except ValidationError as error:
        raise FrameError(f"sample header is invalid: {describe(error.errors(include_url=False))}") from None


def decode_sample(data: bytes | memoryview) -> Sample:
    """Inverse of `encode_sample`, checked. Raises `FrameError`."""
    tensors, metadata = decode_frame(data)
    header = _parse_header(metadata)
    kinds = dict(_DTYPES)
    for group in _OPTIONAL:
        if group.keys() & tensors.keys():
            kinds |= group
    for name, dtype in kinds.items():
        fitting = sorted({np.dtype(accepted_dtype).name for accepted_dtype in (dtype, _NARROWER.get(name, dtype))})
        if name not in tensors or tensors[name].dtype.name not in fitting or tensors[name].ndim != 1:
            raise FrameError(f"sample tensor {name} must be a vector of {' or '.join(fitting)}")
    text = tensors.get("text")
    if text is not None and text.dtype != np.uint8:
        raise FrameError("sample tensor text must be a vector of uint8")
    fields: dict[str, Any] = {name: tensors[name] for name in kinds}
    sample = Sample(
        header=header,
        text=None if text is None else text.tobytes().decode(errors="replace"),
        kept=metadata.get(TEXT_KEY),
        **fields,
    )
    check_sample(sample)
    return sample


def check_sample(sample: Sample) -> None:
    """Prove that the arrays are consistent with each other and with the header. Raises `FrameError`."""
    header, total = sample.header, len(sample.token_ids)
    if len(sample.loss_mask) != total or len(sample.logprobs) != total:
        raise FrameError("token_ids, loss_mask and logprobs differ in length")
    _check_runs("segment_starts", sample.segment_starts, total)
    _check_runs("version_starts", sample.version_starts, total)
    if len(sample.version_starts) != len(sample.version_values):
        raise FrameError("version_starts and version_values differ in length")
    if (sample.loss_mask > 1).any():  # unsigned, so there is nothing below 0
        raise FrameError("loss_mask holds values other than 0 and 1")
    mask = sample.loss_mask == 1
    if not np.isfinite(sample.logprobs).all() or (sample.logprobs[mask] > 1e-3).any():
        raise FrameError("behaviour log-probs must be finite and not above 0")
    versions = sample.token_versions()
    generated = versions[mask]
    if (generated < 0).any():
        raise FrameError("a generated token has no weight version")
    oldest, newest = (int(generated.min()), int(generated.max())) if len(generated) else (-1, -1)
    facts = (total, int(mask.sum()), len(sample.segment_starts), oldest, newest)
    claims = (
        header.total_tokens,
        header.response_tokens,
        header.segments,
        header.oldest_version,
        header.newest_version,
    )
    if facts != claims:
        raise FrameError(f"sample header claims {claims} (tokens, response, segments, versions), found {facts}")
    _check_parts(sample.part_positions, sample.part_values, mask)
    _check_kept(sample.kept_counts, sample.kept_ids, sample.token_ids[mask])
    if len(sample.held_ids) and sample.held_ids.min() < 0:
        raise FrameError("held_ids holds negative ids")
    _check_experts(sample)
    if header.score is None and header.error is None:
        raise FrameError("sample has neither a score nor an error")
    if header.score is not None and not math.isfinite(header.score):
        raise FrameError("sample score is not finite")


def _check_runs(name: str, starts: npt.NDArray[np.int32], total: int) -> None:
    if total == 0:
        raise FrameError("sample has no tokens")
    # Compared, not subtracted: differences of hostile int32 wrap around.
    if len(starts) == 0 or starts[0] != 0 or (starts[1:] <= starts[:-1]).any() or starts[-1] >= total:
        raise FrameError(f"{name} must rise from 0 and stay below the number of tokens")


def _check_parts(
    positions: npt.NDArray[np.int32], values: npt.NDArray[np.float32], generated: npt.NDArray[np.bool_]
) -> None:
    if len(positions) != len(values) or not np.isfinite(values).all():
        raise FrameError("parts of the score must be finite, each with its position")
    outside = len(positions) and (positions[0] < 0 or positions[-1] >= len(generated))
    if (positions[1:] <= positions[:-1]).any() or outside or not generated[positions].all():
        raise FrameError("positions of parts of the score must rise, and be those of generated tokens")


def _check_kept(counts: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], generated: npt.NDArray[np.int32]) -> None:
    if not len(counts) and not len(ids):
        return
    if len(counts) != len(generated) or counts.min(initial=0) < 0 or counts.sum(dtype=np.int64) != len(ids):
        raise FrameError("kept_counts must say of each generated token how many of kept_ids are its own")
    if ids.min(initial=0) < 0:
        raise FrameError("kept_ids holds negative ids")
    owners = np.repeat(np.arange(len(counts)), counts)
    is_kept = np.zeros(len(counts), np.bool_)
    is_kept[owners[ids == generated[owners]]] = True
    lost = np.flatnonzero((counts > 0) & ~is_kept)
    if len(lost):
        place = lost[0]
        raise FrameError(
            f"generated token {place} is {generated[place]}, which is not among the {counts[place]} ids that it was "
            f"drawn from"
        )


def _check_experts(sample: Sample) -> None:
    shape, ids, weights = sample.expert_shape, sample.expert_ids, sample.expert_weights
    if not len(shape) and not len(ids) and not len(weights):
        return
    if len(shape) != 2 or shape.min() < 1 or shape.max() > MOST_EXPERTS:
        raise FrameError("expert_shape must be the number of mixtures and of experts for a token")
    expected = (len(sample.token_ids) - len(sample.segment_starts)) * int(shape[0]) * int(shape[1])
    if len(ids) != expected or len(weights) not in (0, expected):
        raise FrameError(
            f"expert_ids and expert_weights must have {expected} entries, for each token but the last of its segment"
        )
    if not np.isfinite(weights).all():
        raise FrameError("expert_weights must be finite")


def sample_seed(job_seed: int, kind: str, data_pass: int, position: int, index: int) -> int:
    """Seed in [0, 2**31) for sample `index` of the prompt at `position` of `data_pass`.

    31 bits, because every engine (numpy, torch, vLLM) accepts them. A re-queued group, or another replica that
    takes over its lease, samples with the same seeds.
    """
    text = f"{job_seed}/{kind}/{data_pass}/{position}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
