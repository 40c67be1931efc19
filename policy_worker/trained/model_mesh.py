"""Where a model is computed: its ranks, the layout of its micro-batches, and its pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policy_worker.errors import SettingsError
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import Beside
from policy_worker.model.micro_batch import BatchLayout, Columns, MicroBatch, TrainSample, collate
from policy_worker.model.model import DTYPES, Backbone
from policy_worker.model.stages import Stages
from policy_worker.parallel.experts import expert_layers
from policy_worker.parallel.mesh import ParallelDims
from policy_worker.parallel.pipeline import Pipeline
from policy_worker.parallel.rank_group import RankGroup
from schema.config import Config
from schema.config.layout import mesh_of
from schema.config.sections.optimizer import PrecisionKeys

HIDDEN = "hidden"
"""The column with the reference model's hidden states, [n_i, D] of each sample."""
NUMBERS = ("logprobs", "entropy", "correct", "kl")
"""Fields of `TokenOutputs` that have one number for each token."""


def reference_distributions(batch: MicroBatch, head: Head | None) -> Beside | None:
    """The reference model's distributions at this rank's tokens of a batch, if its output head is given."""
    return None if head is None else Beside(batch.of_piece(batch.columns[HIDDEN]), head)


class ModelMesh(NamedTuple):
    """Where a model is computed. All its ranks call alike.

    group: the ranks, with the coordinates that they have for it. layout: of its micro-batches on this rank. pipeline:
    of its stages; None: all ranks have all of it. numbers: the type of what it says of a token."""

    group: RankGroup
    layout: BatchLayout
    numbers: torch.dtype
    pipeline: Pipeline | None = None

    @property
    def has_outputs(self) -> bool:
        """Whether this rank has the last stage of the model, or all of it."""
        return self.pipeline is None or self.pipeline.is_last

    def laid_out(
        self, samples: Mapping[int, TrainSample], batches: Sequence[Sequence[int]], columns: Columns
    ) -> Iterator[MicroBatch]:
        """Micro-batches; columns are where outputs are."""
        for rows in batches:
            yield collate([samples[row] for row in rows], rows, self.layout, columns if self.has_outputs else {})

    def score(
        self,
        stages: Stages | None,
        batches: Iterable[MicroBatch],
        compute: Callable[..., Any],
        keep: Callable[[MicroBatch, Any], None],
    ) -> None:
        """Forwards alone: hand what `compute` finds of each micro-batch to `keep`, where outputs are."""
        if self.pipeline is not None:
            self.pipeline.score(stages, batches, compute, keep)
        else:
            for batch in batches:
                keep(batch, compute(batch))

    def in_unit(
        self, by_row: Mapping[int, Tensor], samples: Mapping[int, TrainSample], batches: Sequence[Sequence[int]]
    ) -> dict[int, Tensor]:
        """By row a number for each learned token, where the last stage is, on all ranks of its unit."""
        rows = list(dict.fromkeys(row for rows in batches for row in rows))
        if self.pipeline is None or not rows:
            return dict(by_row)
        numbers_here = [torch.cat([by_row[row] for row in rows])] if self.group.counts else []
        (numbers,) = self.group.tensors_from_last_stage(numbers_here)
        return dict(zip(rows, numbers.split([samples[row].learned_tokens for row in rows]), strict=True))


def arranged(config: Config, role: str, group: RankGroup) -> RankGroup:
    """The ranks as they stand for the reference model or the critic. A collective.

    Raises `SettingsError`: its sizes are of another number of ranks."""
    if mesh_of(config, role) is config.policy.parallelism:
        return group
    section = f"{role}.parallelism"
    return group.arranged(ParallelDims.of_config(mesh_of(config, role), group.world, section))


def check_experts(model: Backbone, group: RankGroup, section: str) -> None:
    """Raises `SettingsError`: ranks are to share experts, and the model has none."""
    if group.sizes.ep > 1 and not expert_layers(model.lm):
        raise SettingsError(
            f"{section}.ep_size = {group.sizes.ep}: {type(model.lm).__name__} names no layers of experts that ranks "
            f"could share: write {section}.ep_size = 1"
        )


def numbers_of(keys: PrecisionKeys) -> torch.dtype:
    """The type of log-probs and values of a model that computes as these keys say."""
    return torch.promote_types(DTYPES[keys.param_dtype], DTYPES["float32"])
