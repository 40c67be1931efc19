"""Which tokens of a sample count in the loss, beyond those that the policy generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from policy_worker.algorithms.losses import LOG_RATIO_BOUND


def shared_prefixes(
    responses: Sequence[npt.NDArray[np.int32]], scores: Sequence[float], minimum: int
) -> list[int]:
    """How many first tokens of each response count for nothing: good and bad answers of a group begin alike.

    That is the longest prefix shared with a response of another score, or 0 if that is shorter than `minimum`.

    Args:
        responses: generated tokens of the samples of one group, [n_i] each.
        scores: one for each of them.
    """
    found = [0] * len(responses)
    for i, mine in enumerate(responses):
        for j in range(i):
            if scores[i] != scores[j]:
                length = _common(mine, responses[j])
                found[i], found[j] = max(found[i], length), max(found[j], length)
    return [length if length >= minimum else 0 for length in found]


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
    found: dict[int, int] = {}
    for members in rows.values():
        values = [scores[row] or 0.0 for row in members]
        found.update(
            zip(members, shared_prefixes([responses[row] for row in members], values, minimum), strict=True)
        )
    return found


@dataclass(frozen=True)
class Rejection:
    """What is rejected of a sample when ρ = π_old / π_behaviour is out of bounds; both known before training.

    kind: single tokens, or whole samples by the product or the geometric mean of ρ over their tokens. below, above:
    bounds of ρ. off_policy: samples of a negative advantage with a mean log π_behaviour − log π_old above it.
    Sources: rejection sampling of sequences, as verl has it; off-policy sequence mask, DeepSeek-V3.2,
    arXiv 2512.02556, eq. 9.
    """

    kind: Literal["none", "token", "sequence", "geometric"] = "none"
    below: float | None = None
    above: float | None = None
    off_policy: float | None = None

    def of_sample(self, log_ratio: Tensor, advantage: float) -> Tensor:
        """True where a token is rejected, [n]. log_ratio: log ρ of each token, [n]. advantage: of the sample."""
        rejected = torch.zeros_like(log_ratio, dtype=torch.bool)
        if self.kind != "none":
            value = {"token": lambda: log_ratio, "sequence": log_ratio.sum, "geometric": log_ratio.mean}[
                self.kind
            ]()
            ratio = value.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
            if self.below is not None:
                rejected |= ratio < self.below
            if self.above is not None:
                rejected |= ratio > self.above
        if self.off_policy is not None and advantage < 0:
            rejected |= -log_ratio.mean() > self.off_policy
        return rejected
