"""Steps that a trainer commits, the checkpoints that cover them, and their records."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from schema.util.text import PLAIN
from schema.wire.messages.base import MOST_METRICS, MOST_VALIDATIONS, Count, Message, MetricName, Text, TrainerRequest
from schema.wire.messages.samples import MOST_TRAINED, TrainedSample

Encoded = Annotated[str, Field(max_length=256 * 1024 * 1024, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]
"""An array in Base64."""


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


class MixtureProgress(Message):
    """Counts of what was drawn of each source of a mixture. All lists have one entry for each."""

    names: list[Text] = Field(max_length=65536)
    rows: list[Annotated[int, Field(ge=1, lt=2**53)]] = Field(max_length=65536, description="Prepared rows.")
    drawn: list[Annotated[int, Field(ge=0, lt=2**53)]] = Field(max_length=65536, description="Groups handed out.")
    dropped: list[Annotated[int, Field(ge=0, lt=2**53)]] = Field(max_length=65536,
        description="Of these, those that were given up: the next row of their source took their place.")
    shares: list[Annotated[float, Field(ge=0.0, le=1.0)]] = Field(max_length=65536, description="They add up to 1.")
    base: list[Annotated[int, Field(gt=-(2**53), lt=2**53)]] = Field(max_length=65536,
        description="Drawn less dropped when these shares began.")
    base_drawn: list[Annotated[int, Field(ge=0, lt=2**53)]] = Field(max_length=65536,
        description="Drawn when these shares began.")
    total: Annotated[int, Field(ge=0, lt=2**53)] | None = Field(default=None,
        description="The most groups that are trained, as it was known with these shares.")
    rule: Annotated[str, Field(max_length=64, pattern=PLAIN)] = Field(default="",
        description="Identifies what that follows from: rows, passes, shares and stages of the configuration.")


class StoredPass(Message):
    """The order in which the rows of a source come in one of its later passes."""

    source: Annotated[int, Field(ge=0, lt=65536)]
    data_pass: Annotated[int, Field(ge=1, lt=2**53)]
    places: Encoded = Field(
        description="For each position the row's position in the first pass: little-endian int32 in Base64.")


class PassProgress(Message):
    """Results of rows, and the orders that were decided by them, where the curriculum follows results."""

    orders: list[StoredPass] = Field(max_length=65536, description="Of passes that have groups to come.")
    shares: list[Encoded] = Field(max_length=65536,
        description="Of each source, by position of its stream: share of answers that passed, float32 in Base64.")
    seen: list[Encoded] = Field(max_length=65536,
        description="Steps that were committed when that was known, int64 in Base64; -1: it is not.")


class StoredStride(Message):
    """Since when a step has had this many groups."""

    per_step: int = Field(ge=1, lt=2**31)
    step: int = Field(ge=0, lt=2**53, description="Committed steps then.")
    groups: int = Field(ge=0, lt=2**53, description="Groups that were trained or dropped until then.")


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
    order: str | None = Field(default=None, max_length=128, pattern=PLAIN,
        description="Identifies the order in which the rows are handed out.")
    stride: StoredStride | None = Field(default=None, description="Since when a step has its number of groups.")
    data: str | None = Field(default=None, max_length=128, pattern=PLAIN,
        description="The hash of the prepared rows: what goes on with others says so.")
    mixture: MixtureProgress | None = Field(default=None, description="Where sources have shares of their own.")
    passes: PassProgress | None = Field(default=None, description="Where the curriculum follows results.")
