"""Answers as tables of trackers: a row for each chosen sample, a column for each reward.

Of a validation the chosen ones are spread evenly over its prompts, and are answers to the same prompts each time: the
first answer of each, and further ones only where more are asked for than there are prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from schema.wire import sample_file
from schema.wire.messages import SampleRecord

Cell = str | int | float | None
EVERY_SAMPLE = 1 << 40


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """The answers of one step or validation. rows: of as many cells as there are columns."""

    name: str
    columns: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True, slots=True)
class AnswerTables:
    """Makes tables of the samples that a run has kept. training, validation: answers of each; 0: no tables."""

    directory: Path
    training: int = 0
    validation: int = 0

    def of_step(self, step: int) -> AnswerTable | None:
        """The table of a trained step; None: there is nothing to show. Raises OSError."""
        if not self.training:
            return None
        folder = sample_file.folder_of(self.directory)
        records = sample_file.find(folder, kind="train", step=step, limit=EVERY_SAMPLE)
        trained = [record for record in records if record.error is None and not record.dropped]
        return table("train/samples", step, spread(trained, self.training))

    def of_validation(self, version: int) -> AnswerTable | None:
        """The table of the validation of a version; None: there is nothing to show. Raises OSError."""
        if not self.validation:
            return None
        folder = sample_file.folder_of(self.directory)
        records = sample_file.find(folder, kind="validation", step=version, limit=EVERY_SAMPLE)
        newest = max((_round(record) for record in records), default=0)
        of_newest = [record for record in records if _round(record) == newest]
        return table("validation/samples", version, spread(of_newest, self.validation))


def spread(records: Sequence[SampleRecord], most: int) -> list[SampleRecord]:
    """Return at most `most` of these records of groups in their order, evenly spread; see the module's docstring."""
    firsts = [record for record in records if record.index == 0]
    chosen = firsts if most <= len(firsts) else records
    most = min(most, len(chosen))
    return [chosen[i * len(chosen) // most] for i in range(most)]


def _round(record: SampleRecord) -> int:
    """Number of the round of a validation sample: one that was broken off and begun again has several."""
    number = record.group.partition("-")[0].removeprefix("v")
    return int(number) if number.isdecimal() else 0


def table(name: str, step: int, records: Sequence[SampleRecord]) -> AnswerTable | None:
    """Return the table of these records; None: there are none."""
    if not records:
        return None
    rewards = sorted({reward for record in records for reward in record.rewards})
    extra = [column for column in ("extracted", "error") if any(getattr(record, column) for record in records)]
    columns = ["step", "source", "group", "prompt", "answer", "reference", "score"]
    rows: list[list[Cell]] = [
        [
            step, record.part or record.source, record.group, record.prompt, record.answer, record.reference,
            record.score,
            *(record.rewards.get(reward) for reward in rewards), *(getattr(record, column) for column in extra),
        ]
        for record in records
    ]  # fmt: skip
    return AnswerTable(name, [*columns, *(f"reward/{reward}" for reward in rewards), *extra], rows)
