"""Which tokens of a sample count in the loss, beyond those that the policy generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


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
