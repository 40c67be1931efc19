"""From scored samples to `SourceScores`, for a validation round, an evaluation and a file of answers alike.

A sample without a score (its reward failed, or it was never finished) is an error: it is counted, and no mean has it.
So a number is the mean over those prompts that have enough scored samples for it; `Estimate.prompts` says how many.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schema.scores.statistics import Floats, intervals, majority, means, pass_at_k, powers
from schema.wire.messages.scores import Estimate, SourceScores
from schema.wire.sample import SampleHeader


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The samples of one prompt that have a score. answers: extracted ones, None where there is none."""

    source: str
    """Its data source; empty: it has none."""
    scores: Sequence[float]
    answers: Sequence[str | None]
    errors: int = 0
    part: str = ""
    """The validation set that it is of, which is a source, too; empty: there is one."""
    pass_score: float | None = None
    """The least score with which its samples pass; None: that of all."""


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Scores of all prompts, and of each named data source."""

    whole: SourceScores
    sources: dict[str, SourceScores]


def of_headers(
    headers: Collection[SampleHeader], expected: int, part: str = "", pass_score: float | None = None
) -> ScoredPrompt:
    """Return the prompt of these samples, of which there should be `expected`. The rest: see `ScoredPrompt`."""
    scored = [(header.score, header.answer) for header in headers if header.score is not None]
    source = next((header.source for header in headers if header.source), "")
    scores, answers = [score for score, _ in scored], [answer for _, answer in scored]
    return ScoredPrompt(source, scores, answers, expected - len(scored), part, pass_score)


def summarise(prompts: Iterable[ScoredPrompt], pass_score: float) -> ScoreSummary:
    """Summarise them. pass_score: the least score with which a sample passes, for pass@k.

    A set is a source of its name, whatever its rows are called; a data source is one unless a set has its name.
    """
    every = list(prompts)
    sets = {prompt.part for prompt in every}
    by_source: dict[str, list[ScoredPrompt]] = defaultdict(list)
    for prompt in every:
        for name in {prompt.part, "" if prompt.source in sets else prompt.source} - {""}:
            by_source[name].append(prompt)
    whole = _of_source(every, pass_score)
    sources = {
        name: whole if len(of_source) == len(every) else _of_source(of_source, pass_score)
        for name, of_source in sorted(by_source.items())
        if name in sets or len(of_source) < len(every) or sets == {""}  # else it is `whole` once more
    }
    return ScoreSummary(whole, sources)


def _of_source(prompts: Sequence[ScoredPrompt], pass_score: float) -> SourceScores:
    n = max((len(prompt.scores) + prompt.errors for prompt in prompts), default=0)
    answers = sum(answer is not None for prompt in prompts for answer in prompt.answers)
    samples = sum(len(prompt.scores) for prompt in prompts)
    counts = {
        "prompts": len(prompts), "n": n, "samples": samples,
        "errors": sum(prompt.errors for prompt in prompts), "answers": answers,
    }  # fmt: skip
    if not samples:
        return SourceScores(**counts)
    ks = powers(n)
    values = np.array([_numbers(prompt, ks, pass_score) for prompt in prompts])
    mean, best, vote, *passed = _estimates(values)
    return SourceScores(
        **counts,
        mean=mean,
        best=best if n > 1 else None,
        majority=vote if answers and n > 1 else None,
        passed={k: estimate for k, estimate in zip(ks, passed, strict=True) if estimate is not None},
    )


def _numbers(prompt: ScoredPrompt, ks: Sequence[int], pass_score: float) -> list[float]:
    """Return mean, best, the vote and pass@k of one prompt; NaN: it has too few scored samples."""
    n = len(prompt.scores)
    if not n:
        return [math.nan] * (3 + len(ks))
    vote = majority(prompt.answers, prompt.scores)
    assert vote is not None
    least = pass_score if prompt.pass_score is None else prompt.pass_score
    passing = sum(score >= least for score in prompt.scores)
    of_k = [pass_at_k(n, passing, k) if k <= n else math.nan for k in ks]
    return [sum(prompt.scores) / n, max(prompt.scores), vote, *of_k]


def _estimates(values: Floats) -> list[Estimate | None]:
    value, (low, high) = means(values), intervals(values)
    prompts = (~np.isnan(values)).sum(axis=0)
    return [
        None if math.isnan(mean) else Estimate(value=mean, low=_end(lower), high=_end(upper), prompts=int(count))
        for mean, lower, upper, count in zip(value.tolist(), low.tolist(), high.tolist(), prompts, strict=True)
    ]


def _end(end: float) -> float | None:
    return None if math.isnan(end) else end


def estimates_of(scores: SourceScores) -> dict[str, Estimate]:
    """Return the estimates by the names that people know: mean@8, best@8, pass@4, maj@8."""
    named: Mapping[str, Estimate | None] = {
        f"mean@{scores.n}": scores.mean,
        f"maj@{scores.n}": scores.majority,
        **{f"pass@{k}": estimate for k, estimate in scores.passed.items()},
        f"best@{scores.n}": scores.best,
    }
    return {name: estimate for name, estimate in named.items() if estimate is not None}
