"""What a trainer knows of the samples that are kept as text: advantages, and its own log-probs before the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from policy_worker.model.micro_batch import MicroBatch
from policy_worker.parallel.group import Group
from schema.wire import sample_file
from schema.wire.batch import StepTable
from schema.wire.messages import MOST_PIECES, TrainedSample


class KeptSamples:
    """Collects them while a step is trained. Nothing happens in steps without a chosen group.

    Samples with a number that is not finite are left out: it could not travel, and nothing shown stops a training.
    """

    def __init__(self, table: StepTable, groups_per_step: int, wanted: int) -> None:
        self._table = table
        names = table.group_ids
        chosen = [sample_file.is_chosen(name, groups_per_step, wanted) for name in names]
        self._rows = {row for row, group in enumerate(table.group) if chosen[group]}
        self._logprobs: dict[int, Tensor] = {}

    def add(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """The log-probs of a micro-batch, [K]; of a sample that is trained several times the first ones count."""
        for number, row in enumerate(batch.rows):
            if row in self._rows and row not in self._logprobs:
                self._logprobs[row] = logprobs.detach()[batch.sample == number][:MOST_PIECES]

    def gather(self, group: Group, advantages: Sequence[float]) -> list[TrainedSample]:
        """Those of all ranks, on the first one; empty on the others. A collective if there are any."""
        if not self._rows:
            return []
        mine = [
            (row, torch.round(values.float(), decimals=4).tolist())
            for row, values in self._logprobs.items()
            if math.isfinite(advantages[row]) and bool(values.isfinite().all())
        ]
        found = dict(pair for part in group.gather(mine) for pair in part)
        if not group.leads:
            return []
        table = self._table
        return [
            TrainedSample(
                group_id=table.group_ids[table.group[row]],
                index=table.index[row],
                advantage=advantages[row],
                logprobs=values,
            )
            for row, values in sorted(found.items())
        ]
