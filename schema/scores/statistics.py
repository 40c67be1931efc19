"""Statistics of several scored answers to each of many prompts: pass@k, the majority vote, bootstrap intervals.

    pass@k      probability that at least one of k answers passes, drawn from the n that there are without putting any
                back: 1 − C(n − c, k) / C(n, k) with c of n that pass. Unbiased for every k ≤ n (arXiv 2107.03374).
    majority    score of the answer that most samples give, expected over a fair draw among answers that tie
    intervals   percentiles of the mean over prompts that are drawn anew. Prompts, not samples: the answers to one
                prompt depend on each other, and more of them say nothing about prompts that were not asked.

Pure, and the same numbers for the same input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from schema.scores.answers import vote

Floats = npt.NDArray[np.float64]
RESAMPLES = 1000
SEED = 20240607
LEVEL = 0.95
_CHUNK = 1 << 21
"""Numbers that are drawn at once: 16 MiB."""


@lru_cache(maxsize=1 << 16)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 − C(n − c, k) / C(n, k) for c of n answers that pass, 1 ≤ k ≤ n.

    As a product of k or c factors in [0, 1], so that nothing overflows: C(n − c, k) / C(n, k) is the product of
    1 − k / i over i from n − c + 1 to n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} answers that pass among {n} is not defined")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def powers(n: int) -> list[int]:
    """The k of which pass@k is reported for n answers: powers of two below n, and n itself."""
    return [*(1 << i for i in range(n.bit_length()) if 1 << i < n), *([n] if n else [])]


def majority(answers: Sequence[str | None], scores: Sequence[float]) -> float | None:
    """Return the score of a majority vote over the samples of one prompt.

    answers: what was extracted of each, equal as `vote` says; None does not vote. scores: of the same samples. The
    winner counts with the mean score of the samples that gave it, several that tie with the mean over them: what a
    fair draw among them gives on average. Where nobody votes it is the mean of all scores, since any of the samples
    might be given.
    None: there are no samples.
    """
    if not scores:
        return None
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            votes[vote(answer)].append(score)
    if not votes:
        return sum(scores) / len(scores)
    most = max(map(len, votes.values()))
    winners = [sum(given) / most for given in votes.values() if len(given) == most]
    return sum(winners) / len(winners)


def means(values: Floats) -> Floats:
    """Return the mean over the prompts of which each number is defined. values: [prompts, numbers], else NaN."""
    defined = ~np.isnan(values)
    counts = defined.sum(axis=0)
    sums = np.where(defined, values, 0.0).sum(axis=0)
    mean: Floats = np.divide(sums, counts, out=np.full(values.shape[1], np.nan), where=counts > 0)
    return mean


def intervals(values: Floats, *, resamples: int = RESAMPLES, seed: int = SEED) -> tuple[Floats, Floats]:
    """Return lower and upper ends of 95 % intervals of `means`, by the percentile bootstrap over prompts.

    values: [prompts, numbers], NaN where a prompt has no such number. All numbers are taken of the same resamples.
    Returns two arrays, [numbers]: NaN where fewer than two prompts have the number, of which nothing can be said.
    """
    prompts, numbers = values.shape
    defined = ~np.isnan(values)
    ends = np.full((2, numbers), np.nan)
    chosen = np.flatnonzero(defined.sum(axis=0) > 1)
    if not len(chosen):
        return ends[0], ends[1]
    weighed = np.hstack([np.where(defined, values, 0.0)[:, chosen], defined[:, chosen].astype(np.float64)])
    kinds, sizes = np.unique(weighed, axis=0, return_counts=True)  # prompts that are alike are drawn together
    generator, sums = np.random.default_rng(seed), []
    step = max(1, _CHUNK // len(kinds))
    for first in range(0, resamples, step):
        counts = generator.multinomial(prompts, sizes / prompts, size=min(step, resamples - first))
        sums.append(counts.astype(np.float64) @ kinds)
    totals = np.vstack(sums)
    whole, count = totals[:, : len(chosen)], totals[:, len(chosen) :]
    resampled = np.divide(whole, count, out=np.full(whole.shape, np.nan), where=count > 0)
    tail = 100.0 * (1.0 - LEVEL) / 2.0
    ends[:, chosen] = np.nanpercentile(resampled, [tail, 100.0 - tail], axis=0)
    return ends[0], ends[1]
