"""Steps that a trainer commits, the checkpoints that cover them, and their records."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from schema.util.text import PLAIN
from schema.wire.messages.base import MOST_METRICS, MOST_VALIDATIONS, Count, Message, MetricName, Text, TrainerRequest
from schema.wire.messages.samples import MOST_TRAINED, TrainedSample


class HeldOutLoss(Message):
    """One validation of supervised training, by its trainer."""

    version: Count
    at: float = Field(ge=0, lt=2**53, description="Unix time.")
    samples: Count = Field(description="Conversations.")
    loss: float = Field(description="Mean of −log π over the tokens to learn.")
    accuracy: float = Field(ge=0, le=1, description="Share of those tokens that are the likeliest.")
    response_tokens_mean: float = Field(ge=0, description="Tokens to learn of a conversation.")


# fmt: off
class CommitRequest(TrainerRequest):
    metrics: dict[MetricName, float] = Field(default_factory=dict, max_length=MOST_METRICS,
        description="Finite numbers of this step.")
    batch: str = Field(default="", max_length=64, pattern=PLAIN,
        description="`StepTable.digest` of the batch that was trained. A controller that has another one, or none, "
        "has lost history and refuses (`wrong_step`): the trainer declares itself.")
    samples: Annotated[list[TrainedSample], FailFast()] = Field(default_factory=list, max_length=MOST_TRAINED,
        description="Of those that are kept as text.")
    validations: list[HeldOutLoss] = Field(default_factory=list, max_length=MOST_VALIDATIONS,
        description="Supervised training: of the version with this step, and of version 0 with the first.")


class CommitReply(Message):
    committed_steps: int
    total_steps: int
    publish: bool = Field(description="Whether the version with this step is due for publication.")
    finished: bool = Field(description="No step follows: publish, export, deregister.")
    epochs: int = Field(default=0, description="Epochs of which every row was trained or dropped.")
    durable_steps: int = Field(default=0,
        description="Commits that are on disk for certain: the trainer need not remember them.")


class CheckpointRequest(TrainerRequest):
    step: Count = Field(description="Committed steps that the checkpoint covers.")
    path: str = Field(min_length=1, max_length=4096, pattern=PLAIN)


class CheckpointReply(Message):
    durable_steps: int
    scores: dict[int, float] = Field(default_factory=dict,
        description="Mean validation score by weight version (supervised training: the loss, negative): the best "
        "checkpoint stays.")


class StepRecord(Message):
    step: int
    at: float = Field(description="Unix time of the commit.")
    metrics: dict[str, float]


class LedgerSnapshot(Message):
    """The part of the ledger that a checkpoint stores: enough to resume with an empty Redis."""

    committed_steps: int = Field(ge=0, lt=2**53)
    timeline: int = Field(ge=0, lt=2**53)
    frontier: int = Field(ge=0, lt=2**53, description="Stream positions below it were handed out at least once.")
    untrained: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()] = Field(max_length=1_000_000,
        description="Stream positions below the frontier not trained and not dropped.")
    dropped: dict[Text, Annotated[int, Field(ge=0, lt=2**53)]] = Field(default_factory=dict, max_length=64,
        description="Counts by reason.")
    staleness: dict[Annotated[int, Field(ge=0, lt=2**53)], Annotated[int, Field(ge=0, lt=2**53)]] = Field(
        default_factory=dict, max_length=65536, description="Samples trained so far by staleness in steps.")
    n_positions: int | None = Field(default=None, ge=1,
        description="Rows of the prepared data: positions of other data mean other prompts.")
    order: str | None = Field(default=None, max_length=64, pattern=PLAIN,
        description="Identifies the order in which the rows are handed out.")
