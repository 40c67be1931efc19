"""Samples: the bundles that rollout replicas push, and the records in which people read what a model wrote."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from schema.scores.answers import LONGEST_ANSWER
from schema.util.text import PLAIN, Prose
from schema.wire.messages.base import MOST_METRICS, Count, ErrorCode, GroupKind, Message, MetricName, Text
from schema.wire.sample import Ending, Source


class PushItem(Message):
    """One entry of a bundle of samples (metadata key "pushes"), same order as the frames."""

    group_id: Text
    lease_id: Text
    index: Count


class PushList(Message):
    replica_id: Text
    pushes: Annotated[list[PushItem], FailFast()] = Field(min_length=1, max_length=4096)


class PushResult(Message):
    group_id: str
    index: int
    accepted: bool = Field(description="Also true for a repeated push of what is stored already.")
    duplicate: bool = False
    code: ErrorCode | None = None
    detail: str = ""


class PushReply(Message):
    results: list[PushResult]


MOST_PIECES = 16_384
"""Tokens of a record; of longer answers the first."""
MOST_TEXT = 262_144
"""Characters of a prompt or an answer in a record; of longer ones the beginning and the end."""
MOST_TRAINED = 4096
"""Samples of a step of which a trainer says something."""
Pieces = Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=MOST_PIECES)]
LogProbs = Annotated[list[float], Field(max_length=MOST_PIECES)]


# fmt: off
class SampleText(Message):
    """The rollout replica's part of a sample that is kept as text. Lists are over the generated tokens."""

    prompt: str = Field(max_length=MOST_TEXT + 64)
    answer: str = Field(max_length=MOST_TEXT + 64)
    reference: str = Field(default="", max_length=MOST_TEXT + 64, description="The row's answer, if it has one.")
    pieces: Pieces = Field(default_factory=list, description="Text of each token.")
    logprobs: LogProbs = Field(default_factory=list, description="By the engine, of the distribution sampled from.")
    versions: list[tuple[Count, Count]] = Field(default_factory=list, max_length=MOST_PIECES,
        description="Runs: first token, weight version.")
    weights: dict[MetricName, float] = Field(default_factory=dict, max_length=MOST_METRICS)


class TrainedSample(Message):
    """The trainer's part of a sample that is kept as text."""

    group_id: Text
    index: Count
    advantage: float
    logprobs: LogProbs = Field(description="By the trainer, before the step, over the generated tokens.")


class SampleRecord(SampleText):
    """One sample as people read it: a line of `RUN/samples/*.jsonl`."""

    at: float = Field(description="Unix time.")
    kind: GroupKind
    step: int = Field(description="That trained it; of a failed or dropped one, the step under way. Or version.")
    timeline: int
    group: Text
    index: Count
    attempt: Count = 0
    baseline: bool = Field(default=False, description="Whether it was drawn greedily and is not trained.")
    replica: Text = ""
    ending: Ending
    finish_reason: str = Field(max_length=16, pattern=PLAIN)
    prompt_tokens: Count
    response_tokens: Count
    oldest_version: int
    newest_version: int
    rewards: dict[MetricName, float] = Field(default_factory=dict, max_length=MOST_METRICS)
    score: float | None = Field(default=None, description="Weighted sum of the rewards; null after an error.")
    extracted: Annotated[str, Field(max_length=LONGEST_ANSWER, pattern=PLAIN)] | None = Field(default=None,
        description="Of a validation: the answer that its scorer has extracted.")
    source: Source = Field(default="", description="`data_source` of its row.")
    part: Text = Field(default="",
        description="Of a validation: the set that it is of, where there are several.")
    advantage: float | None = Field(default=None, description="Of a trained sample.")
    error: Annotated[Prose, Field(max_length=8192)] | None = None
    seconds: float | None = Field(default=None, ge=0, description="That scoring took.")
    dropped: Text = Field(default="", description="Why its group was not trained; empty: it was, or may yet be.")
    trainer_logprobs: LogProbs = Field(default_factory=list)
