"""How the samples of a training step are cut: pure functions over row numbers and token counts.

    rows of the table ── mini-batches ────── data ranks ── micro-batches
                         (batch_size_per_optimize,   (equal share, or   (samples, or a hard cap on tokens)
                          mu_iterations)              balanced tokens)

Every rank computes the whole plan from the table, so no communication is needed and all ranks agree on how many
micro-batches each optimizer step has: a rank short of them gets empty ones, since its collectives must match.

Invariants (property tests): each sample that counts is in exactly one micro-batch of exactly one optimizer step per
iteration; no micro-batch exceeds the cap; the optimizer step of a sample does not depend on the number of ranks;
equal inputs give equal plans.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from policy_worker.errors import SampleTooLongError
from schema.config import Config
from schema.config.sections.policy import ParallelismConfig

Rows = list[int]
LEAST_UNITS = 4
"""Groups for each rank, for whole groups to be dealt to the ranks evenly enough."""


@dataclass(frozen=True)
class Batching:
    """How a training step is cut.

    samples: most samples of a micro-batch, used where no cap on tokens is set. max_tokens: hard cap on the tokens of
    a micro-batch, padding included. packed: samples lie next to each other in one row; else each has a row, padded
    to the longest. balance: equal tokens for each rank, not equal rows. mini_batch: rows per optimizer step; None:
    all. passes: over the batch. shuffle_seed: rows are dealt to mini-batches in a random order, another one in each
    pass of each step; None: in the order of the table."""

    samples: int
    max_tokens: int | None
    packed: bool
    balance: bool = False
    mini_batch: int | None = None
    passes: int = 1
    shuffle_seed: int | None = None

    def cut_to(self, samples: int | None, max_tokens: int | None) -> Batching:
        """The same with micro-batches of another size, where one is given."""
        if max_tokens is not None:
            return replace(self, max_tokens=max_tokens)
        return self if samples is None else replace(self, samples=samples, max_tokens=None)

    @staticmethod
    def of_config(config: Config, mesh: ParallelismConfig | None = None) -> Batching:
        """Read how the policy's training is cut; mesh: of another model, if it is not the policy's."""
        policy, mesh = config.train.train_policy, mesh or config.policy.parallelism
        batching = Batching(
            samples=policy.mini_batch if mesh.pp_size == 1 else mesh.pp_micro_batch_size,
            max_tokens=policy.max_token_len_per_mini_batch,
            packed=config.train.sequence_packing,
            balance=policy.balance_dp_token,
        )
        if not config.is_grpo:
            return batching
        seed = config.grpo.mini_batch_shuffle_seed
        return replace(
            batching,
            mini_batch=config.grpo.batch_size_per_optimize,
            passes=config.grpo.mu_iterations,
            shuffle_seed=(config.effective_seed if seed is None else seed)
            if config.grpo.mini_batch_shuffle
            else None,
        )

    def order(self, n: int, step: int, number: int) -> list[int]:
        """In which order n rows are dealt to the mini-batches of a pass: the same on all ranks, and when resumed."""
        if self.shuffle_seed is None:
            return list(range(n))
        return [int(row) for row in np.random.default_rng([self.shuffle_seed, step, number]).permutation(n)]


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: its rows in table order, and for each data rank its micro-batches (all equally many)."""

    rows: Rows
    ranks: list[list[Rows]]

    @property
    def computed(self) -> Rows:
        """The rows of it that some rank computes."""
        return sorted(row for rank in self.ranks for rows in rank for row in rows)


def plan_step(
    tokens: Sequence[int],
    counts: Sequence[bool],
    batching: Batching,
    *,
    data_ranks: int,
    step: int = 0,
    idle: Collection[int] = (),
    dealt: Sequence[int] | None = None,
    alike: Sequence[int] | None = None,
    owners: Mapping[int, int] | None = None,
) -> list[MiniBatch]:
    """Cut a step.

    Args:
        tokens: length of each row in tokens, [n].
        step: of training, which a shuffle depends on.
        counts: whether each row takes part in the loss, [n]; others are left out (their piece only gets smaller).
        idle: rows that take part with a contribution of zero: not computed, unless a mini-batch has no others.
        dealt: the rows that mini-batches are made of, each counting or not; None: all.
        alike: a number of each row, [n]; rows with the same one are computed together as far as it goes. None: by
            length alone.
        owners: the data rank of each row, where that is settled (see `owners_of`).

    Raises `SampleTooLongError`: a row that counts is longer than `batching.max_tokens`."""
    dealt = range(len(tokens)) if dealt is None else dealt
    size = batching.mini_batch or max(len(dealt), 1)
    plan = []
    for number in range(batching.passes):
        order = [dealt[place] for place in batching.order(len(dealt), step, number)]
        for start in range(0, len(order), size):
            rows = sorted(row for row in order[start : start + size] if counts[row])
            if rows:
                computed = [row for row in rows if row not in idle] or rows[:1]
                shares = _shares(computed, tokens, data_ranks, batching.balance, alike)
                if owners is not None:
                    shares = [[row for row in computed if owners[row] == rank] for rank in range(data_ranks)]
                plan.append(MiniBatch(rows, _equally_many(shares, tokens, batching, alike)))
    return plan


class Shares(NamedTuple):
    """Which shares of a plan are a data rank's: one of each part that the batch is cut into for policy replicas."""

    parts: int
    data_ranks: int
    data_rank: int

    @property
    def total(self) -> int:
        return self.parts * self.data_ranks

    def of(self, part: int) -> int:
        """Return the number of its share in a part."""
        return part * self.data_ranks + self.data_rank

    @property
    def all(self) -> list[int]:
        return [self.of(part) for part in range(self.parts)]

    def has(self, share: int) -> bool:
        return share % self.data_ranks == self.data_rank


def owners_of(plan: Sequence[MiniBatch]) -> dict[int, int]:
    """For each row that is computed the first data rank that trains on it."""
    owners: dict[int, int] = {}
    for rank in range(len(plan[0].ranks) if plan else 0):
        for row in rows_of(plan, rank):
            owners.setdefault(row, rank)
    return owners


def rows_of(plan: Sequence[MiniBatch], data_rank: int) -> Rows:
    """The rows that a data rank trains on, each once, in table order."""
    return sorted({row for mini_batch in plan for rows in mini_batch.ranks[data_rank] for row in rows})


def plan_pass(
    plan: Sequence[MiniBatch],
    tokens: Sequence[int],
    batching: Batching,
    alike: Sequence[int] | None = None,
    data_ranks: int | None = None,
) -> list[list[Rows]]:
    """Micro-batches of a forward-only pass over the samples of a plan, for each data rank (all equally many).

    Each rank's are of the samples that it trains on; or, with data_ranks, that is how many they are dealt to anew.
    Raises `SampleTooLongError`, see `plan_step`."""
    if data_ranks is None:
        shares = [rows_of(plan, rank) for rank in range(len(plan[0].ranks) if plan else 0)]
    else:
        shares = _shares(computed_rows(plan), tokens, data_ranks, batching.balance, alike)
    return _equally_many(shares, tokens, batching, alike)


def computed_rows(plan: Sequence[MiniBatch]) -> Rows:
    """The rows that some data rank trains on, each once, in table order."""
    return sorted({row for mini_batch in plan for row in mini_batch.computed})


def _shares(
    rows: Rows, tokens: Sequence[int], data_ranks: int, balance: bool, alike: Sequence[int] | None
) -> list[Rows]:
    """The rows of each data rank."""
    if not balance:
        return equal_shares(rows, data_ranks)
    units = _units(rows, alike)
    few = len(units) < LEAST_UNITS * data_ranks
    return _longest_first([[row] for row in rows] if few else units, tokens, data_ranks)


def _units(rows: Rows, alike: Sequence[int] | None) -> list[Rows]:
    """Rows that are alike together, the others one by one."""
    units: dict[int, Rows] = {}
    for row in rows:
        units.setdefault(row if alike is None else alike[row], []).append(row)
    return list(units.values())


def alike_of(
    groups: Sequence[int], prompts: Sequence[int], tokens: Sequence[int], rows: Rows, least: float
) -> Sequence[int] | None:
    """The groups, if computing prompts once spares these rows at least this part of their tokens; else None."""
    spared = spared_tokens([rows], groups, prompts)
    return groups if spared >= least * sum(tokens[row] for row in rows) > 0 else None


def spared_tokens(batches: Iterable[Rows], groups: Sequence[int], prompts: Sequence[int]) -> int:
    """Tokens of prompts that micro-batches need not compute, since another row of theirs has the same."""
    return sum(prompts[same[0]] * (len(same) - 1) for rows in batches for same in _units(rows, groups))


def _equally_many(
    shares: Sequence[Rows], tokens: Sequence[int], batching: Batching, alike: Sequence[int] | None
) -> list[list[Rows]]:
    """The micro-batches of each rank's share, of all as many as of the one that needs most.

    All ranks wait for each other at each micro-batch, so one that needs fewer fills as many evenly; where it cannot,
    the last ones are empty."""
    cut = [micro_batches(share, tokens, batching, alike) for share in shares]
    most = max(map(len, cut), default=0)
    filled = (
        micro if len(micro) == most else micro_batches(share, tokens, batching, alike, least=most)
        for share, micro in zip(shares, cut, strict=True)
    )
    return [micro + [[] for _ in range(most - len(micro))] for micro in filled]


def equal_shares(rows: Rows, n: int) -> list[Rows]:
    """Runs of consecutive rows, as equal in number as possible."""
    bounds = [len(rows) * share // n for share in range(n + 1)]
    return [rows[start:end] for start, end in itertools.pairwise(bounds)]


def micro_batches(
    rows: Rows, tokens: Sequence[int], batching: Batching, alike: Sequence[int] | None = None, least: int = 0
) -> list[Rows]:
    """Cut one rank's rows of an optimizer step into micro-batches; into at least so many, if they are packed."""
    ordered = sorted(rows, key=lambda row: (-tokens[row], row))  # alike lengths together: little padding
    if alike is not None:
        ordered = [row for unit in _units(ordered, alike) for row in unit]
    if batching.max_tokens is None:
        return [ordered[i : i + batching.samples] for i in range(0, len(ordered), batching.samples)]
    _check_fits(ordered, tokens, batching.max_tokens)
    if batching.packed and alike is None:
        return _packed(ordered, tokens, batching.max_tokens, least)
    return _runs(ordered, tokens, batching.max_tokens, batching.packed)


def _check_fits(ordered: Rows, tokens: Sequence[int], cap: int) -> None:
    if ordered and tokens[ordered[0]] > cap:
        raise SampleTooLongError(
            f"train.train_policy.max_token_len_per_mini_batch = {cap}: a sample has {tokens[ordered[0]]} tokens, and "
            f"the cap is hard; raise it to at least policy.model_max_length, or lower that"
        )


def _packed(ordered: Rows, tokens: Sequence[int], cap: int, least: int) -> list[Rows]:
    """Few bins, then even ones: first-fit decreasing says how many are enough, longest-first fills them evenly, or
    `least` if that is more.

    Where the even filling breaks the cap, first-fit's own bins are taken."""
    bins: list[Rows] = []
    space: list[int] = []
    for row in ordered:
        slot = next((i for i, free in enumerate(space) if tokens[row] <= free), None)
        if slot is None:
            bins.append([])
            space.append(cap)
            slot = len(bins) - 1
        bins[slot].append(row)
        space[slot] -= tokens[row]
    even = _longest_first([[row] for row in ordered], tokens, max(len(bins), least)) if bins else []
    fits = all(sum(tokens[row] for row in share) <= cap for share in even)
    return even if fits else bins


def _runs(ordered: Rows, tokens: Sequence[int], cap: int, packed: bool) -> list[Rows]:
    """Runs of rows that cost their tokens, or with padding len(run) · the longest."""
    runs: list[Rows] = []
    total = longest = 0
    for row in ordered:
        total, longest = total + tokens[row], max(longest, tokens[row])
        if runs and (total if packed else (len(runs[-1]) + 1) * longest) <= cap:
            runs[-1].append(row)
        else:
            runs.append([row])
            total = longest = tokens[row]
    return runs


def _longest_first(units: Sequence[Rows], tokens: Sequence[int], n: int) -> list[Rows]:
    """Largest unit first, each to the share that has the fewest tokens so far (at most 4/3 of the best maximum).

    Greedy number partitioning (Graham 1969); ties go to the lower index, so it is deterministic."""
    shares: list[Rows] = [[] for _ in range(n)]
    heap = [(0, index) for index in range(n)]
    sizes = [(-sum(tokens[row] for row in unit), unit) for unit in units]
    for size, unit in sorted(sizes):
        total, index = heapq.heappop(heap)
        shares[index] += unit
        heapq.heappush(heap, (total - size, index))
    return shares
