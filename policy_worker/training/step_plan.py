"""The plan of a step, from its table alone: who computes what, and what is left out.

All ranks come to the same plan, and any thread may ask for it. How rows are cut: `batches.cutting`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from policy_worker.algorithms.advantages import AdvantageConfig
from policy_worker.algorithms.masks import Rejection, SampleMasks
from policy_worker.algorithms.objective import LossConfig
from policy_worker.model.micro_batch import TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import (
    Batching,
    MiniBatch,
    Rows,
    Shares,
    alike_of,
    computed_rows,
    owners_of,
    plan_step,
    rows_of,
    spared_tokens,
)
from policy_worker.training.batches.source import counts
from policy_worker.training.metrics import Metrics
from schema.config import Config
from schema.util.own_code import is_own
from schema.wire.batch import StepTable


@dataclass(frozen=True)
class StepPlan:
    """A step as its table has it.

    learned: whether each row takes part in the loss. masks: rows by what masks them. idle, alike: see `plan_step`.
    shares: those of this rank. rows_needed: rows whose payloads this rank needs."""

    table: StepTable
    learned: list[bool]
    masks: Mapping[str, set[int]]
    idle: set[int]
    alike: Sequence[int] | None
    mini_batches: list[MiniBatch]
    shares: Shares
    rows_needed: Sequence[int] = ()

    @cached_property
    def masked(self) -> set[int]:
        """The rows that some mask leaves out."""
        return set[int]().union(*self.masks.values())

    @cached_property
    def counted(self) -> list[bool]:
        """Whether each row takes part in the loss, and is not masked."""
        return [learned and row not in self.masked for row, learned in enumerate(self.learned)]

    @cached_property
    def owners(self) -> dict[int, int]:
        """For each row the share that counts it: a shuffle may deal it to two."""
        return owners_of(self.mini_batches)

    @cached_property
    def rows(self) -> Rows:
        """The rows of this rank's shares."""
        return sorted({row for share in self.shares.all for row in rows_of(self.mini_batches, share)})

    @cached_property
    def lengths(self) -> dict[int, int]:
        """How many learned tokens each row has that some rank computes."""
        return {row: self.table.response_tokens[row] for row in computed_rows(self.mini_batches)}

    def counts_here(self, row: int) -> bool:
        """Whether this rank counts a row of its shares."""
        return self.shares.has(self.owners[row])

    def lengths_in(self, samples: Mapping[int, TrainSample], part: int) -> dict[int, int]:
        """How many learned tokens each row of this rank's share in a part has."""
        rows = rows_of(self.mini_batches, self.shares.of(part))
        return {row: samples[row].learned_tokens for row in rows}

    def updates(self, tokens: Sequence[int]) -> list[MiniBatch]:
        """The mini-batches that make an optimizer step: none whose tokens are all left out.

        tokens: of each row, those that count."""
        return [mini_batch for mini_batch in self.mini_batches if any(tokens[row] for row in mini_batch.rows)]


Others = Callable[[StepPlan], list[tuple[RankGroup, Sequence[Collection[int]]]]]
"""The ranks of a model with a mesh of its own, and the rows of each of its shares; none without one."""


class Planner:
    """Plans steps. All ranks call alike."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        shares: Shares,
        taught: Callable[[StepTable], set[int]],
        others: Sequence[Others],
    ) -> None:
        """taught: the rows that some teacher has a part in. others: of models with meshes of their own."""
        grpo = config.grpo
        self._trainer, self._shares, self._taught, self._others = trainer, shares, taught, others
        self._advantages, self._loss = AdvantageConfig.of_config(grpo), LossConfig.of_config(grpo)
        self._batching, self._masks = Batching.of_config(config), SampleMasks.of_config(grpo)
        self._compares = grpo.min_filter_prefix_tokens is not None
        self._leaves_out = self._compares or Rejection.of_config(grpo) is not None
        self._kl_in_reward = bool(grpo.kl_in_reward.beta)
        self._skips_idle = (
            not config.train.metrics_of_all_samples
            and self._loss.vanishes_with_advantage
            and not is_own(grpo.advantage_estimator)
        )

    def plan(self, table: StepTable) -> StepPlan:
        """Plan the step of a table."""
        learned = [counts(table, row) for row in range(table.n_samples)]
        masks = self._masks.rows(table)
        masked = set[int]().union(*masks.values())
        idle = self._idle(table, masked) - (self._taught(table) - masked)
        alike = self._alike(table, [row for row in table.sampled if learned[row] and row not in idle])
        mini_batches = plan_step(
            table.total_tokens,
            learned,
            self._batching,
            data_ranks=self._shares.total,
            step=table.step,
            idle=idle,
            dealt=table.sampled,
            alike=alike,
        )
        plan = StepPlan(table, learned, masks, idle, alike, mini_batches, self._shares)
        return replace(plan, rows_needed=self._needed(plan))

    def _needed(self, plan: StepPlan) -> Sequence[int]:
        """Add the rows that a rank of this unit computes for a model with a mesh of its own."""
        group, rows = self._trainer.group, self._with_groups(plan)
        others = [share_of_model for find in self._others for share_of_model in find(plan)]
        unit = group.sizes.unit(group.rank)
        further = (share[ranks.sizes.data_rank(rank)] for ranks, share in others for rank in unit)
        return sorted({*rows, *chain(*further)}) if others else rows

    def _with_groups(self, plan: StepPlan) -> Sequence[int]:
        """The rows of this rank and, where prefixes are compared, all others of their groups that count."""
        if not self._compares:
            return plan.rows
        table = plan.table
        groups = {table.group[row] for row in plan.rows}
        return [row for row in range(table.n_samples) if plan.learned[row] and table.group[row] in groups]

    def _alike(self, table: StepTable, rows: list[int]) -> Sequence[int] | None:
        """The group of each sample, if it pays to compute the prompts of groups once."""
        least = self._trainer.least_spared
        if least is None:
            return None
        return alike_of(table.group, table.prompt_tokens, table.total_tokens, rows, least)

    def _idle(self, table: StepTable, masked: set[int]) -> set[int]:
        """Rows whose loss is zero whatever the model says of them, and that change no count."""
        if self._advantages.estimator.over_outcomes is None or self._kl_in_reward:
            return set()
        if not self._skips_idle or self._leaves_out:
            return masked
        advantages = self._advantages.of_step(
            table.score, table.group, table.response_tokens, (), list, greedy=table.baseline
        )
        nll = self._loss.positive_nll_coef
        return masked | {
            row
            for row, advantage in enumerate(advantages.by_sample)
            if advantage == 0.0 and not (nll and (table.score[row] or 0.0) > 0)
        }

    def metrics(self, plan: StepPlan, updates: Sequence[MiniBatch], tokens: Sequence[int]) -> Metrics:
        """Shares of samples that are computed and masked, of tokens that shared prompts spare, and that the loss
        leaves out. updates: the mini-batches that make an optimizer step. tokens: of each row, those that count."""
        table, sampled = plan.table, max(len(plan.table.sampled), 1)
        rows = [row for row in range(table.n_samples) if plan.learned[row]]
        metrics = {"computed_fraction": len(computed_rows(updates)) / sampled}
        batches = [rows for mini_batch in updates for rank in mini_batch.ranks for rows in rank]
        if total := sum(table.total_tokens[row] for rows in batches for row in rows):
            metrics["shared_fraction"] = sum(self._spared(rows, table) for rows in batches) / total
        whole = sum(table.response_tokens[row] for row in rows)
        if whole and (self._leaves_out or self._masks != SampleMasks()):
            metrics["left_out_fraction"] = 1 - sum(tokens[row] for row in rows) / whole
        return metrics | {f"masked_fraction/{name}": len(rows) / sampled for name, rows in plan.masks.items()}

    def _spared(self, rows: Rows, table: StepTable) -> int:
        """Tokens that a micro-batch does not compute, of prompts that it has already, as `collate` decides."""
        least = self._trainer.least_spared
        if least is None:
            return 0
        spared = spared_tokens([rows], table.group, table.prompt_tokens)
        return spared if spared >= least * sum(table.total_tokens[row] - 1 for row in rows) else 0
