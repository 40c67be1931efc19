"""The report of a training step: metrics, as sums over micro-batches and data ranks and then means by their public
names; and of samples that are kept as text their advantages and log-probs.

add(parts)     after each micro-batch     sums over its tokens; "max_…" are maxima
end_step(…)    after each optimizer step
reduce(group)  once per training step     two collectives, and the accelerator is waited for once
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from policy_worker.algorithms.mismatch import mismatch_metrics
from policy_worker.model.micro_batch import MicroBatch, TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.training.batches.source import counts
from schema.wire import sample_file
from schema.wire.batch import StepTable
from schema.wire.messages import MOST_PIECES, MOST_TRAINED, TrainedSample

Metrics = dict[str, float]

PER_TOKEN = ("entropy", "clip_fraction", "behaviour_kl", "reference_kl", "correction_weight")
"""Sums over tokens that are reported as means per token."""
CUT = ("length", "overlong")
"""Finish reasons of answers that did not end by themselves, or that are too long for training."""
MOST_STALENESS = 16
"""The age of tokens is reported step by step up to here; a larger bound puts all older tokens into this one."""
MOST_BYTES = 32 * 1024 * 1024
"""Most bytes of a commit that kept samples may take: the controller reads it between two other calls."""
SAMPLE_BYTES, NUMBER_BYTES = 512, 25
"""The most that a kept sample takes as JSON without its log-probs, and a number of 64 bits."""


class PartSums:
    """Sums of this rank, by optimizer step; every step has the same names."""

    def __init__(self) -> None:
        self._open: dict[str, Tensor] = {}
        self._steps: list[dict[str, Tensor]] = []
        self._grad_norms: list[float] = []
        self._whole: list[Metrics] = []
        """Sums of each step, where they were put together from parts."""

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """The sums of one micro-batch."""
        for name, value in parts.items():
            if name not in self._open:
                self._open[name] = value
            elif _is_max(name):
                self._open[name] = torch.maximum(self._open[name], value)
            else:
                self._open[name] = self._open[name] + value

    def end_step(self, grad_norm: float) -> None:
        """An optimizer step was made of the micro-batches that were added since the last one."""
        self._steps.append(self._open)
        self._grad_norms.append(grad_norm)
        self._open = {}

    def take(self, group: RankGroup) -> Metrics:
        """Return what was added since the last step, or the last call, over all ranks. A collective."""
        part = PartSums()
        part._steps, part._grad_norms, self._open = [self._open], [0.0], {}
        (sums,) = part.reduce(group)
        del sums["grad_norm"]
        return sums

    def put(self, parts: Sequence[Metrics]) -> None:
        """Put what was taken for all parts of the batch, in order: that is the whole of the step to be ended."""
        self._whole.append({})
        for name in parts[0]:
            values = [part[name] for part in parts]
            self._whole[-1][name] = max(values) if _is_max(name) else math.fsum(values)

    def reduce(self, group: RankGroup) -> list[Metrics]:
        """Return the sums of each optimizer step, over all ranks; and its `grad_norm`. A collective."""
        if not self._steps:
            return []
        if self._whole:
            pairs = zip(self._whole, self._grad_norms, strict=True)
            return [{**step, "grad_norm": norm} for step, norm in pairs]
        steps = group.from_last_stage(self._summed())
        names = list(steps[0])
        for operation, chosen in (
            ("max", [name for name in names if _is_max(name)]),
            ("sum", [name for name in names if not _is_max(name)]),
        ):
            reduced = iter(group.all_reduce([step[name] for step in steps for name in chosen], operation))
            for step in steps:
                step.update({name: next(reduced) for name in chosen})
        return [{**step, "grad_norm": norm} for step, norm in zip(steps, self._grad_norms, strict=True)]

    def _summed(self) -> list[Metrics]:
        """Return what this rank has added for each optimizer step. The accelerator is waited for."""
        names = list(self._steps[0])
        if not names:  # outputs are on the last stage
            return [{} for _ in self._steps]
        rows = torch.stack([torch.stack([step[name].float() for name in names]) for step in self._steps])
        return [dict(zip(names, values, strict=True)) for values in rows.tolist()]


class SumNotes:
    """Sums of a batch's parts, which policy replicas exchange (`Notes`). All ranks call alike."""

    def __init__(self, sums: PartSums, group: RankGroup) -> None:
        self._sums, self._group = sums, group

    def begin(self, part: int) -> None:
        """Nothing was added since the part before."""

    def take(self, part: int) -> Metrics:
        """Sums for metrics."""
        return self._sums.take(self._group)

    def put(self, notes: list[Metrics]) -> None:
        """See `Notes.put`."""
        self._sums.put(notes)


def _is_max(name: str) -> bool:
    return name.startswith("max_")


class StepMetrics:
    """Metrics of a step of reinforcement learning.

    ages: see `age_sums`, of samples that are computed. bound: S, the most steps by which a sample may be older than
    the step.
    names: short ones of the rewards."""

    def __init__(
        self,
        table: StepTable,
        advantages: Sequence[float],
        ages: Sequence[float],
        bound: int,
        names: Mapping[str, str],
    ) -> None:
        self._table, self._advantages, self._bound, self._names = table, advantages, bound, names
        self._ages = ages
        self._sums, self._mismatch = PartSums(), PartSums()
        self._tokens: list[int] = []
        self.facts: Metrics = {}
        """Metrics of the step that need no collective."""

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """See `PartSums.add`."""
        self._sums.add(parts)

    def add_mismatch(self, sums: Mapping[str, Tensor]) -> None:
        """`mismatch_sums` of some tokens. Each rank adds some, if any does."""
        self._mismatch.add(sums)

    def take(self, group: RankGroup) -> list[Metrics]:
        """See `PartSums.take`: of the step, and of its mismatch. A collective."""
        return [self._sums.take(group), self._mismatch.take(group)]

    def put(self, parts: Sequence[list[Metrics]]) -> None:
        """See `PartSums.put`."""
        self._sums.put([part[0] for part in parts])
        if parts[0][1]:
            self._mismatch.put([part[1] for part in parts])

    def end_step(self, grad_norm: float, tokens: int) -> None:
        """See `PartSums.end_step`. tokens: those that all ranks computed and that count."""
        self._sums.end_step(grad_norm)
        self._tokens.append(tokens)

    def reduce(self, group: RankGroup) -> Metrics:
        """All metrics of the step, the same on every rank. A collective."""
        ages = group.all_reduce(list(self._ages), "sum")
        steps = self._sums.reduce(group)
        if self._tokens:
            self._mismatch.end_step(0.0)
        mismatch = self._mismatch.reduce(group)
        return {
            **self.facts,
            **(mismatch_metrics(mismatch[0]) if mismatch else {}),
            **_of_updates(steps, self._tokens),
            **table_metrics(self._table, self._advantages, self._names),
            **age_metrics(ages, self._bound),
            "optimizer_steps": len(self._tokens) - self.facts.get("skipped_steps", 0.0),
        }


def _of_updates(steps: Sequence[Metrics], tokens: Sequence[int]) -> Metrics:
    """Metrics of the optimizer steps of a training step; nothing without one.

    tokens: of each optimizer step, those that were computed and that count. Means per token weigh each of them alike,
    whatever step it was in; without any token there are none."""
    if not steps:
        return {}
    metrics = {"loss": math.fsum(step["loss"] for step in steps) / len(steps), **mean_norm(steps)}
    if total := sum(tokens):
        names = [name for name in PER_TOKEN if name in steps[0]]
        metrics |= {name: math.fsum(step[name] for step in steps) / total for name in names}
        metrics["ratio_max"] = max(step["max_ratio"] for step in steps)
    return metrics


def mean_norm(steps: Sequence[Metrics]) -> Metrics:
    """The mean `grad_norm` of the optimizer steps that were made and not skipped; nothing without one."""
    norms = [step["grad_norm"] for step in steps if not math.isnan(step["grad_norm"])]
    return {"grad_norm": math.fsum(norms) / len(norms)} if norms else {}


def table_metrics(table: StepTable, advantages: Sequence[float], names: Mapping[str, str]) -> Metrics:
    """Return the metrics of the table alone. Each name is defined in docs/metrics.md; one whose denominator is 0 is
    absent."""
    scored = [row for row in table.sampled if counts(table, row)]
    metrics = {
        "sampled": float(len(table.sampled)),
        "samples": float(len(scored)),
        "tokens": float(sum(table.total_tokens[row] for row in scored)),
        **_of_sampled(table, scored),
        **_of_scored(table, scored, advantages),
    }
    if bases := _baselines(table):
        metrics["greedy_score"] = math.fsum(bases.values()) / len(bases)
    for name, column in table.rewards.items():
        values = [value for row in scored if (value := column[row]) is not None]
        if values:
            metrics[f"reward/{names.get(name, name)}"] = math.fsum(values) / len(values)
    return metrics


def _of_sampled(table: StepTable, scored: Sequence[int]) -> Metrics:
    """Shares of all samples of the step, whatever became of them, and the mean length of what was generated."""
    sampled = table.sampled
    if not sampled:
        return {}
    cut = {row for row in sampled if table.finish_reason[row] in CUT}
    overlong = {row for row in cut if table.finish_reason[row] == "overlong"}
    unscored = {row for row in sampled if table.score[row] is None}
    shares = {
        "truncated_fraction": cut,
        "truncated_unscored_fraction": cut & unscored,
        "overlong_fraction": overlong,
        "failed_fraction": set(sampled) - overlong - set(scored),
    }
    metrics = {name: len(rows) / len(sampled) for name, rows in shares.items()}
    lengths = [length for row in sampled if (length := table.response_tokens[row])]
    if lengths:
        metrics["response_tokens_mean"] = sum(lengths) / len(lengths)
    return metrics


def _of_scored(table: StepTable, rows: Sequence[int], advantages: Sequence[float]) -> Metrics:
    """Means over the samples that have a score. rows: of these."""
    if not rows:
        return {}
    n, staleness = len(rows), [table.step - table.oldest_version[row] for row in rows]
    return {
        "reward_mean": math.fsum(table.score[row] or 0.0 for row in rows) / n,
        "advantage_abs_mean": math.fsum(abs(advantages[row]) for row in rows) / n,
        "staleness_mean": sum(staleness) / n,
        "staleness_max": float(max(staleness)),
        "zero_variance_fraction": _without_variance(table, rows),
    }


def _without_variance(table: StepTable, rows: Sequence[int]) -> float:
    """Share of the groups with a sample in `rows` in which all of these, and the greedy one, have the same score."""
    bases = _baselines(table)
    scores = {table.group[row]: {bases[table.group[row]]} for row in rows if table.group[row] in bases}
    for row in rows:
        scores.setdefault(table.group[row], set()).add(table.score[row] or 0.0)
    return sum(len(of_group) == 1 for of_group in scores.values()) / len(scores)


def _baselines(table: StepTable) -> dict[int, float]:
    """Score of the greedy sample of each group that has one."""
    return {
        table.group[row]: score
        for row, score in enumerate(table.score)
        if score is not None and table.is_baseline(row)
    }


def age_sums(step: int, samples: Iterable[TrainSample], bound: int) -> list[float]:
    """Return what ranks add up of the ages of generated tokens in steps: by age, then the sum of all ages.

    Returns [n + 2] numbers for ages 0 to n = min(bound, `MOST_STALENESS`); the last age has all older tokens too."""
    by_version: Counter[int] = Counter()
    for sample in samples:
        by_version.update(sample.tokens_by_version)
    sums = [0.0] * (min(bound, MOST_STALENESS) + 1)
    for version, tokens in by_version.items():
        sums[min(step - version, MOST_STALENESS)] += tokens
    return [*sums, float(sum((step - version) * tokens for version, tokens in by_version.items()))]


def age_metrics(sums: Sequence[float], bound: int) -> Metrics:
    """Shares of tokens by age, and their mean age in steps, from the sums over all ranks; nothing without tokens."""
    *tokens, ages = sums
    total = sum(tokens)
    if not total:
        return {}
    names = [str(age) for age in range(len(tokens))]
    if bound > MOST_STALENESS:
        names[-1] += "_or_more"
    shares = {f"staleness_tokens/{name}": count / total for name, count in zip(names, tokens, strict=True)}
    return {**shares, "staleness_tokens_mean": ages / total}


class SampleCollector:
    """Collects them while a step is trained. Nothing happens in steps without a chosen group.

    Nothing shown stops a training: samples with a number that is not finite are left out, it could not travel; and so
    that their commit takes at most half of a request of `max_request_bytes`, those that come last may lack log-probs,
    or be left out as well. Every rank comes to the same."""

    def __init__(self, table: StepTable, groups_per_step: int, wanted: int, max_request_bytes: int) -> None:
        self._table = table
        names = table.group_ids
        chosen = [sample_file.is_chosen(name, groups_per_step, wanted) for name in names]
        rows = [row for row in table.sampled if chosen[table.group[row]]]
        room = min(max_request_bytes // 2, MOST_BYTES)
        fitting = rows[: min(MOST_TRAINED, room // SAMPLE_BYTES)]
        room -= len(fitting) * SAMPLE_BYTES
        self._rows: dict[int, int] = {}
        """Rows that are kept, with how many of their log-probs."""
        self.cut = len(rows) - len(fitting)
        """Samples that are not kept whole: there were too many, or too long ones."""
        for row in fitting:
            count = min(table.response_tokens[row], MOST_PIECES)
            fits = count * NUMBER_BYTES <= room
            self._rows[row] = count if fits else 0
            room -= self._rows[row] * NUMBER_BYTES
            self.cut += not fits
        self._logprobs: dict[int, Tensor] = {}
        self._shared: set[int] = set()

    def add(self, batch: MicroBatch, logprobs: Tensor) -> None:
        """The log-probs of a micro-batch, [K]; of a sample that is trained several times the first ones count."""
        for number, row in enumerate(batch.rows):
            if row in self._rows and row not in self._logprobs:
                self._logprobs[row] = logprobs.detach()[batch.sample == number][: self._rows[row]]

    def take(self) -> list[tuple[int, list[float]]]:
        """By row what was added, and is forgotten."""
        rows = [row for row in self._logprobs if row not in self._shared]
        return [(row, self._logprobs.pop(row).tolist()) for row in rows]

    def put(self, logprobs_by_row: Iterable[tuple[int, list[float]]]) -> None:
        """Put what was taken, here or elsewhere; of a row that is here already the first log-probs count."""
        for row, values in logprobs_by_row:
            self._logprobs.setdefault(row, torch.tensor(values, dtype=torch.float64))
            self._shared.add(row)

    def gather(
        self, group: RankGroup, advantages: Sequence[float], idle: Collection[int] = ()
    ) -> list[TrainedSample]:
        """Gather the samples of all ranks, on the first one; empty on the others. A collective if there are any.

        idle: rows that no rank computed (or few of them): they have no log-probs."""
        if not self._rows:
            return []
        logprobs_here = [
            (row, torch.round(values.double(), decimals=4).tolist())
            for row, values in self._logprobs.items()
            if math.isfinite(advantages[row]) and bool(values.isfinite().all())
        ]
        by_row: dict[int, list[float]] = {row: [] for row in self._rows if row in idle}
        by_row.update(pair for part in group.gather(logprobs_here if group.counts else []) for pair in part)
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
            for row, values in sorted(by_row.items())
        ]
