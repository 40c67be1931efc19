"""Group-relative policy optimisation: one training step, as the papers write it.

    for each group:  A_i = (s_i − mean) / std
    for each optimizer step of the batch (mu passes):
        L = Σ over its tokens of w · [ −min(ρA, clip(ρ)A) − c_H H ] + likelihood of positive samples
        clip the gradient, AdamW

ρ compares the policy with the one that made the tokens (their behaviour log-probs), so it corrects for staleness.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from policy_worker.algorithms.advantages import ESTIMATORS, sample_advantages
from policy_worker.algorithms.aggregation import StepTotals
from policy_worker.algorithms.objective import Objective, SampleFacts, mean_metrics, objective
from policy_worker.algorithms.policy_loss import Clip, PolicyTokens
from policy_worker.model.logprobs import TokenOutputs
from policy_worker.model.micro_batch import MicroBatch, TrainSample
from policy_worker.process import ShutdownRequest
from policy_worker.trainer import ShareOfLoss, StepResult, Trainer
from policy_worker.training.batch_plan import MicroBatchRule, OptimizerStep, plan_step
from policy_worker.training.batch_source import POLL, BatchSource, counts, tokens_by_staleness
from policy_worker.training.step_end import End
from policy_worker.weights.publisher import NothingOwed, Owing
from schema.config import Config, GrpoConfig
from schema.wire.batch import StepTable

log = logging.getLogger(__name__)

POLL_OWING = 0.2
"""Seconds that one question for a batch may wait while a version is owed: somebody may be waiting for it."""
MOST_STALENESS = 16
"""The age of tokens is told step by step up to here; where the bound is larger, this one has all older tokens too."""


class Grpo:
    """One training step at a time; the loop around it commits and publishes."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        source: BatchSource,
        shutdown: ShutdownRequest,
        publishing: Owing | None = None,
    ) -> None:
        self._config, self._trainer, self._source = config.grpo, trainer, source
        self._shutdown, self._publishing = shutdown, publishing or NothingOwed()
        self._objective = objective_of(config.grpo)
        self._rule = micro_batch_rule(config)
        self._temperature = config.sampling_temperature
        self._first_batch_at: float | None = None
        self._waited = 0.0

    def train(self, step: int) -> dict[str, float] | End:
        """Wait for the batch of a step and train on it; the step's metrics, or why there was no step."""
        waiting_since, metrics = time.monotonic(), None
        while metrics is None:
            table = self._wait(step)
            if isinstance(table, End):
                return table
            if table.n_samples == 0:  # the last groups were dropped: no step follows after all
                return End.NO_DATA
            began = time.monotonic()
            metrics = self.train_on(table)
        now = time.monotonic()
        if self._first_batch_at is None:
            self._first_batch_at = began
        else:
            self._waited += began - waiting_since
        metrics["wait_seconds"] = began - waiting_since
        metrics["train_seconds"] = now - began
        metrics["idle_fraction"] = self._waited / max(now - self._first_batch_at, 1e-9)
        return metrics

    def _wait(self, step: int) -> StepTable | End:
        publishing = self._publishing
        while True:
            asked = float(bool(self._shutdown)), float(self._shutdown.checkpoint_asked)
            flags = [*asked, *publishing.signals()]
            leaves, saves, failed, publishes, wanted = self._trainer.group.reduce(flags, "max")
            if leaves or saves:
                return End.ASKED if leaves else End.SAVE
            if failed or ((publishing.owed or wanted) and not publishes):
                return End.PUBLISH
            table = self._source.poll(step, POLL_OWING if publishing.owed else POLL)
            if table is not None:
                return table

    def train_on(self, table: StepTable) -> dict[str, float] | None:
        """One training step: advantages, then every optimizer step of the plan. None: its payloads are gone."""
        advantages = sample_advantages(
            table.score, table.group, ESTIMATORS["grpo"], self._config.unbiased_advantage
        )
        plan = plan_step(
            table.total_tokens,
            [counts(table, row) for row in range(table.n_samples)],
            world=self._trainer.group.world,
            rule=self._rule,
            batch_size=self._config.batch_size_per_optimize,
            iterations=self._config.mu_iterations,
            balance=self._config.balance_dp_token,
        )
        samples = self._source.payloads(table, self._rows_of_this_rank(plan))
        if samples is None:
            return None
        bound = self._source.bound
        ages = staleness_sums(tokens_by_staleness(table.step, samples, bound), bound)
        ages = self._trainer.group.reduce(ages, "sum")
        results = [self._optimizer_step(piece, samples, table, advantages) for piece in plan]
        if not results:
            log.warning("step %d has no sample with a score: it is committed without an update", table.step)
        return {
            **_loss_metrics(results, plan, table),
            **_table_metrics(table, advantages),
            **staleness_metrics(ages, bound),
            "lr": self._trainer.lr(table.step),
            "optimizer_steps": float(len(results)),
        }

    def _rows_of_this_rank(self, plan: Sequence[OptimizerStep]) -> list[int]:
        rank = self._trainer.group.rank
        return sorted({row for piece in plan for micro_batch in piece.ranks[rank] for row in micro_batch})

    def _optimizer_step(
        self,
        piece: OptimizerStep,
        samples: Mapping[int, TrainSample],
        table: StepTable,
        advantages: Sequence[float],
    ) -> StepResult:
        group = self._trainer.group
        batches = [self._trainer.micro_batch(samples, rows) for rows in piece.ranks[group.rank]]
        share = share_of_loss(self._objective, table, advantages, step_totals(table, piece.rows))
        return self._trainer.optimizer_step(batches, share, step=table.step, temperature=self._temperature)


def objective_of(config: GrpoConfig) -> Objective:
    """The coefficients of the loss as the configuration has them."""
    return Objective(
        variant=config.variant,
        clip=Clip(config.epsilon_low, config.epsilon_high, config.lower_bound_ratio),
        loss_type=config.loss_type,
        unbiased_loss_max_tokens=config.unbiased_loss_max_tokens,
        entropy_coeff=config.entropy_coeff,
        positive_nll_coef=config.positive_nll_coef,
    )


def micro_batch_rule(config: Config) -> MicroBatchRule:
    """How large a micro-batch may be, for either algorithm."""
    policy = config.train.train_policy
    return MicroBatchRule(
        policy.mini_batch, policy.max_token_len_per_mini_batch, config.train.sequence_packing
    )


def step_totals(table: StepTable, rows: Sequence[int]) -> StepTotals:
    """The counts that an optimizer step of these rows is normalised by."""
    return StepTotals(
        tokens=sum(table.response_tokens[row] for row in rows),
        samples=len(rows),
        positive_tokens=sum(table.response_tokens[row] for row in rows if (table.score[row] or 0.0) > 0),
    )


def share_of_loss(
    how: Objective, table: StepTable, advantages: Sequence[float], totals: StepTotals
) -> ShareOfLoss:
    """The loss of a micro-batch as its share of the optimizer step's."""

    def share(batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        def spread(values: Sequence[float]) -> Tensor:
            """One value per sample to one per token, [K]."""
            return outputs.logprobs.new_tensor([values[row] for row in batch.rows])[batch.sample]

        tokens = PolicyTokens(
            logprobs=outputs.logprobs,
            old_logprobs=batch.old_logprobs.to(outputs.logprobs.dtype),
            advantages=spread(advantages),
            mask=torch.ones_like(batch.labels, dtype=torch.bool),
            sample=batch.sample,
            n_samples=batch.n_samples,
        )
        facts = SampleFacts(
            tokens=spread(table.response_tokens), positive=spread([score or 0.0 for score in table.score]) > 0
        )
        return objective(tokens, outputs.entropy, facts, totals, how)

    return share


def staleness_sums(tokens: Mapping[int, int], bound: int) -> list[float]:
    """What ranks add up of how many tokens are how many steps old: tokens of each age, then the sum of all ages.

    Returns [n + 2] numbers for ages 0 to n = min(bound, `MOST_STALENESS`); the last age has all older tokens too.
    """
    sums = [0.0] * (min(bound, MOST_STALENESS) + 1)
    for age, count in tokens.items():
        sums[min(age, MOST_STALENESS)] += count
    return [*sums, float(sum(age * count for age, count in tokens.items()))]


def staleness_metrics(sums: Sequence[float], bound: int) -> dict[str, float]:
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


def _loss_metrics(
    results: Sequence[StepResult], plan: Sequence[OptimizerStep], table: StepTable
) -> dict[str, float]:
    """Means over optimizer steps of what each reported."""
    if not results:
        return {}
    per_step = [
        {**mean_metrics(result.sums, step_totals(table, piece.rows).tokens), "grad_norm": result.grad_norm}
        for result, piece in zip(results, plan, strict=True)
    ]
    mean = {name: math.fsum(step[name] for step in per_step) / len(per_step) for name in per_step[0]}
    return {**mean, "ratio_max": max(step["ratio_max"] for step in per_step)}


def _table_metrics(table: StepTable, advantages: Sequence[float]) -> dict[str, float]:
    rows = [row for row in range(table.n_samples) if counts(table, row)]
    staleness = [table.step - table.oldest_version[row] for row in rows]
    n = max(len(rows), 1)
    metrics = {
        "samples": float(len(rows)),
        "tokens": float(sum(table.total_tokens[row] for row in rows)),
        "response_tokens_mean": sum(table.response_tokens[row] for row in rows) / n,
        "advantage_abs_mean": math.fsum(abs(advantages[row]) for row in rows) / n,
        "staleness_mean": sum(staleness) / n,
        "staleness_max": float(max(staleness, default=0)),
    }
    if rows:
        metrics["reward_mean"] = math.fsum(table.score[row] or 0.0 for row in rows) / n
    for name, column in table.rewards.items():
        values = [column[row] for row in rows if column[row] is not None]
        if values:
            metrics[f"reward/{name}"] = math.fsum(value or 0.0 for value in values) / len(values)
    return metrics
