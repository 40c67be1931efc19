"""Which samples count in the loss, and which tokens of a sample, beyond those that the policy generated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from policy_worker.algorithms.estimators import mean_of
from policy_worker.algorithms.losses import LOG_RATIO_BOUND
from schema.config import GrpoConfig
from schema.wire.batch import StepTable


def shared_prefixes(responses: Sequence[npt.NDArray[np.int32]], scores: Sequence[float], minimum: int) -> list[int]:
    """How many first tokens of each response count for nothing: good and bad answers of a group begin alike.

    That is the longest prefix shared with a response of another score, or 0 if that is shorter than `minimum`.

    responses: generated tokens of the samples of one group, [n_i] each. scores: one for each of them."""
    lengths = [0] * len(responses)
    for i, response in enumerate(responses):
        for j in range(i):
            if scores[i] != scores[j]:
                length = _common(response, responses[j])
                lengths[i], lengths[j] = max(lengths[i], length), max(lengths[j], length)
    return [length if length >= minimum else 0 for length in lengths]


def _common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def prefixes_of_groups(
    responses: Mapping[int, npt.NDArray[np.int32]],
    groups: Sequence[int],
    scores: Sequence[float | None],
    minimum: int,
) -> dict[int, int]:
    """The same by row, for the rows in `responses`; groups, scores: of all rows of the step."""
    rows: dict[int, list[int]] = {}
    for row in sorted(responses):
        rows.setdefault(groups[row], []).append(row)
    prefixes: dict[int, int] = {}
    for members in rows.values():
        values = [scores[row] or 0.0 for row in members]
        prefixes.update(
            zip(members, shared_prefixes([responses[row] for row in members], values, minimum), strict=True)
        )
    return prefixes


@dataclass(frozen=True)
class Rejection:
    """Rejection of tokens or a sample when ρ = π_old / π_behaviour is out of bounds; both known before training.

    kind: single tokens, or whole samples by the product or the geometric mean of ρ over their tokens. below, above:
    bounds of ρ. off_policy: samples of a negative advantage with a mean log π_behaviour − log π_old above it.
    Sources: rejection sampling of sequences, as verl has it; off-policy sequence mask, DeepSeek-V3.2,
    arXiv 2512.02556, eq. 9."""

    kind: Literal["none", "token", "sequence", "geometric"] = "none"
    below: float | None = None
    above: float | None = None
    off_policy: float | None = None

    @staticmethod
    def of_config(grpo: GrpoConfig) -> Rejection | None:
        """Read `[train.train_policy]`; None: nothing is rejected."""
        keys = grpo.rollout_correction
        rejection = Rejection(
            kind=keys.reject, below=keys.reject_below, above=keys.reject_above, off_policy=keys.off_policy_mask
        )
        return None if rejection == Rejection() else rejection

    def of_sample(self, log_ratio: Tensor, advantage: float) -> Tensor:
        """True where a token is rejected, [n]. log_ratio: log ρ of each token, [n]. advantage: of the sample."""
        rejected = torch.zeros_like(log_ratio, dtype=torch.bool)
        if self.kind != "none":
            value = {"token": lambda: log_ratio, "sequence": log_ratio.sum, "geometric": log_ratio.mean}[self.kind]()
            ratio = value.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
            if self.below is not None:
                rejected |= ratio < self.below
            if self.above is not None:
                rejected |= ratio > self.above
        if self.off_policy is not None and advantage < 0:
            rejected |= -log_ratio.mean() > self.off_policy
        return rejected


@dataclass(frozen=True)
class SampleMasks:
    """Samples that get no loss, known from the table of a step; they count in the statistics of their group.

    truncated: answers that end at their longest. mean_score_above, mean_score_below: groups whose mean score is not
    between these, both excluded. failed_from_tokens: answers of a score of 0 or less that are at least so long.
    Source: the masks of ROLL (max_len_mask, difficulty_mask, error_max_len_clip)."""

    truncated: bool = False
    mean_score_above: float | None = None
    mean_score_below: float | None = None
    failed_from_tokens: int | None = None

    @staticmethod
    def of_config(grpo: GrpoConfig) -> SampleMasks:
        """Read `[train.train_policy]`."""
        return SampleMasks(**grpo.sample_masks.model_dump())

    def rows(self, table: StepTable) -> dict[str, set[int]]:
        """The rows that each mask leaves out, by its name, of those that have a score; only masks that are on."""
        scores = {row: score for row in table.sampled if (score := table.score[row]) is not None}
        masked: dict[str, set[int]] = {}
        if self.truncated:
            masked["truncated"] = {row for row in scores if table.finish_reason[row] == "length"}
        if self.mean_score_above is not None or self.mean_score_below is not None:
            masked["mean_score"] = self._of_difficulty(table, scores)
        if self.failed_from_tokens is not None:
            least = self.failed_from_tokens
            long = {row for row in scores if table.response_tokens[row] >= least}
            masked["failed"] = {row for row in long if scores[row] <= 0}
        return masked

    def _of_difficulty(self, table: StepTable, scores: Mapping[int, float]) -> set[int]:
        groups: dict[int, list[int]] = {}
        for row in scores:
            groups.setdefault(table.group[row], []).append(row)
        low = -math.inf if self.mean_score_above is None else self.mean_score_above
        high = math.inf if self.mean_score_below is None else self.mean_score_below
        means = {group: mean_of([scores[row] for row in rows]) for group, rows in groups.items()}
        return {row for group, rows in groups.items() if not low < means[group] < high for row in rows}
