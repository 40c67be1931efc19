"""The batch of one training step: a table that every rank knows whole, and the payloads each rank asks for.

`GET /v1/steps/{t}/batch?policy_epoch=E&samples=all|none|0,5,9` answers with a bundle: the table as JSON in the
metadata under "table", then the frames of the requested samples in the order they were asked for. Advantages
and normalisation need only the table, so they need no communication between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from schema.util.text import PLAIN
from schema.wire.frame import FrameError, pack_bundle, unpack_bundle
from schema.wire.invalid import describe
from schema.wire.sample import MOST_REWARDS, Source

Column = Field(max_length=1_000_000)
Flags = Annotated[list[bool], FailFast(), Column]
Names = Annotated[list[Annotated[str, Field(max_length=64, pattern=PLAIN)]], FailFast(), Column]
Sources = Annotated[list[Source], FailFast(), Column]
Integers = Annotated[list[int], FailFast(), Column]
Numbers = Annotated[list[float | None], FailFast(), Column]


class StepTable(BaseModel):
    """Columns of equal length, one entry per sample, ordered by group and then by sample index."""

    model_config = ConfigDict(extra="forbid")

    step: int = Field(ge=0, description="The step that trains this batch; also the newest possible version.")
    timeline: int = Field(ge=0)
    policy_epoch: int = Field(ge=0)
    group_ids: Names = Field(description="Groups of the batch, in order.")
    group: Integers = Field(description="For each sample, which entry of group_ids it belongs to.")
    index: Integers = Field(description="Index of the sample inside its group.")
    score: Numbers = Field(
        description="Null where the sample failed or is overlong: it is in the table, and not trained."
    )
    rewards: dict[Annotated[str, Field(pattern=PLAIN)], Numbers] = Field(max_length=MOST_REWARDS)
    prompt_tokens: Integers
    response_tokens: Integers
    total_tokens: Integers
    oldest_version: Integers
    newest_version: Integers
    finish_reason: Names
    baseline: Flags = Field(
        default_factory=list,
        description="Which samples were drawn greedily: the baselines of their groups, not trained. Empty: none was.",
    )

    source: Sources = Field(
        default_factory=list, description="Where the prompt of each sample comes from. Empty: there is but one."
    )

    @property
    def n_samples(self) -> int:
        return len(self.group)

    def is_baseline(self, row: int) -> bool:
        """Whether a sample is the greedy one of its group, which is only scored."""
        return bool(self.baseline) and self.baseline[row]

    @property
    def sampled(self) -> list[int]:
        """The rows of all other samples: those that a batch is made of."""
        return [row for row in range(self.n_samples) if not self.is_baseline(row)]

    @property
    def digest(self) -> str:
        """See `batch_digest`."""
        return batch_digest(self.timeline, self.step, self.group_ids)

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        n = len(self.group)
        columns: list[Sequence[object]] = [
            self.index, self.score, self.prompt_tokens, self.response_tokens, self.total_tokens,
            self.oldest_version, self.newest_version, self.finish_reason, *self.rewards.values(),
        ]  # fmt: skip
        columns += [column for column in (self.baseline, self.source) if column]
        if any(len(column) != n for column in columns):
            raise ValueError("columns of the step table differ in length")
        if any(not 0 <= group < len(self.group_ids) for group in self.group):
            raise ValueError("a sample names a group that is not in the table")
        return self


def batch_digest(timeline: int, step: int, group_ids: Iterable[str]) -> str:
    """Identifies a batch: which groups train in which step of which timeline."""
    names = "\n".join([str(timeline), str(step), *sorted(group_ids)])
    return hashlib.blake2b(names.encode(), digest_size=12).hexdigest()


def encode_batch(table: StepTable, frames: Sequence[bytes | memoryview], **metadata: str) -> bytes:
    """The bundle of a batch. metadata: what else it says, next to the table."""
    return pack_bundle(frames, {"table": table.model_dump_json(), **metadata})


def decode_batch(data: bytes | memoryview) -> tuple[StepTable, list[memoryview]]:
    """Inverse of `encode_batch`. Raises `FrameError`."""
    frames, metadata = unpack_bundle(data)
    try:
        return StepTable.model_validate_json(metadata["table"]), frames
    except KeyError:
        raise FrameError("batch has no table") from None
    except ValidationError as error:
        raise FrameError(f"batch table is invalid: {describe(error.errors(include_url=False))}") from None
