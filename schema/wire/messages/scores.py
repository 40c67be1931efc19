"""Scores of answers, by data source: what a validation and an evaluation report."""

from __future__ import annotations

from pydantic import Field

from schema.wire.messages.base import Count, Message


# fmt: off
class Estimate(Message):
    """A mean over prompts, and its 95 % interval by resampling prompts."""

    value: float
    low: float | None = Field(default=None, description="Lower end; null: there are fewer than two prompts.")
    high: float | None = None
    prompts: Count = Field(description="Prompts of which it is the mean.")


class SourceScores(Message):
    """The scores of one data source, or of all together; numbers are means over prompts, never over samples."""

    prompts: Count
    n: Count = Field(description="Samples of a prompt; where prompts differ, the most.")
    samples: Count = Field(description="Samples with a score.")
    errors: Count = Field(description="Samples without one: they are in no mean.")
    answers: Count = Field(default=0, description="Samples of which the scorer has extracted an answer.")
    mean: Estimate | None = Field(default=None, description="mean@n: of the score; null: nothing has one.")
    best: Estimate | None = Field(default=None, description="best@n: of the highest score among the n.")
    passed: dict[int, Estimate] = Field(default_factory=dict, max_length=64,
        description="pass@k by k, unbiased; of prompts with at least k scored samples.")
    majority: Estimate | None = Field(default=None,
        description="maj@n: of the score of the answer that most samples give; null: no answers are extracted.")
