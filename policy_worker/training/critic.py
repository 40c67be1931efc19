"""The critic in a step of reinforcement learning: values before it, and then its own optimizer steps.

    values of all samples ─▶ advantages and returns ─▶ for each of the critic's mini-batches:
        L = Σ over its tokens of w · ½ max((v − R)², (v_old + clip(v − v_old) − R)²)
        clip the gradient, AdamW

The critic learns before the policy does, from the samples that are on a rank anyway: its mini-batches are cut by its
own keys, and each row is trained where the policy's plan has it first. With a mesh of its own they are dealt to the
shares of that instead, and values and returns travel between the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from policy_worker.algorithms.objective import Normalizers, token_weights, value_loss
from policy_worker.model.micro_batch import MicroBatch, TrainSample
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from policy_worker.replicas.base import Replicas
from policy_worker.trained.model import LossOf
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import (
    Batching,
    MiniBatch,
    Rows,
    Shares,
    owners_of,
    plan_pass,
    plan_step,
    rows_of,
)
from policy_worker.training.columns import RETURN, VALUE
from policy_worker.training.credit import StepInputs
from policy_worker.training.metrics import Metrics, PartSums, SumNotes, mean_norm
from policy_worker.training.step_plan import StepPlan
from schema.config import Config
from schema.wire.batch import StepTable

ROUNDED = 1e-10
"""Variance as a share of the mean square, up to which it may be what rounding leaves of a constant."""
Samples = Mapping[int, TrainSample]


def batching_of(config: Config, batching: Batching) -> Batching:
    """How the critic's optimizer steps are cut. batching: the policy's."""
    keys, mesh = config.critic, config.critic.parallelism
    return replace(
        batching,
        samples=keys.mini_batch if mesh is None or mesh.pp_size == 1 else mesh.pp_micro_batch_size,
        max_tokens=keys.max_token_len_per_mini_batch,
        mini_batch=keys.batch_size_per_optimize,
        passes=keys.mu_iterations,
        shuffle_seed=config.effective_seed if keys.mini_batch_shuffle else None,
    )


class NoCritic:
    """The critic of a step that has none."""

    def others(self, plan: StepPlan) -> list[tuple[RankGroup, Sequence[Collection[int]]]]:
        return []

    def values(self, plan: StepPlan, samples: Samples) -> None:
        return None

    def learn(self, inputs: StepInputs) -> Metrics:
        return {}


class CriticTraining:
    """See the module's docstring. All ranks call alike."""

    def __init__(self, config: Config, trainer: Trainer, replicas: Replicas) -> None:
        assert trainer.critic is not None
        self._critic, self._keys, self._policy = trainer.critic, config.critic, trainer.group
        self._replicas = replicas
        self._shares = Shares(replicas.parts, trainer.critic.group.data_ranks, trainer.critic.group.data_rank)
        self._batching = batching_of(config, Batching.of_config(config))
        self._pass = self._batching.cut_to(config.critic.forward_mini_batch, None)

    @property
    def _is_own(self) -> bool:
        """Whether the critic's shares of a batch are others than the policy's."""
        return self._critic.group is not self._policy

    def others(self, plan: StepPlan) -> list[tuple[RankGroup, Sequence[Collection[int]]]]:
        """See `step_plan.Others`: where its shares are others than the policy's."""
        if not self._is_own:
            return []
        pass_batches, mini_batches = self._planned_pass(plan), self._planned(plan)
        shares = [set(itertools.chain(*batches)) for batches in pass_batches]
        trained = [rows.union(rows_of(mini_batches, rank)) for rank, rows in enumerate(shares)]
        return [(self._critic.group, trained)]

    def _planned_pass(self, plan: StepPlan) -> list[list[Rows]]:
        ranks = self._critic.group.data_ranks if self._is_own else None
        return plan_pass(plan.mini_batches, plan.table.total_tokens, self._pass, plan.alike, ranks)

    def _planned(self, plan: StepPlan) -> list[MiniBatch]:
        return plan_step(
            plan.table.total_tokens,
            plan.counted,
            self._batching,
            data_ranks=self._shares.total,
            step=plan.table.step,
            dealt=plan.table.sampled,
            alike=plan.alike,
            owners=None if self._is_own else plan.owners,
        )

    def values(self, plan: StepPlan, samples: Samples) -> dict[int, Tensor]:
        """By row, what is expected of each token of this rank's samples. A collective."""
        with span(VALUE):
            batches = self._planned_pass(plan)

            def find(part: int) -> dict[str, dict[int, Tensor]]:
                batches_here = batches[self._shares.of(part)] if batches else []
                return {VALUE: self._critic.values(samples, batches_here)}

            numbers = self._critic.mesh.numbers
            lengths = partial(plan.lengths_in, samples)
            values = self._replicas.columns(find, {VALUE: numbers}, lengths)[VALUE]
            return self._critic.group.to_all_ranks(values, plan.lengths, numbers) if self._is_own else values

    def learn(self, inputs: StepInputs) -> Metrics:
        """The critic's optimizer steps of a training step, and its metrics. A collective.

        Raises `NonFiniteGradientError`: see `Optimizer.step`."""
        critic, sums, plan, table = self._critic, PartSums(), inputs.plan, inputs.plan.table
        mini_batches, values = self._planned(plan), inputs.scores.values
        assert values is not None
        columns = {VALUE: values, RETURN: inputs.credit.advantages.returns}
        if self._is_own:
            data_rank = self._policy.data_rank
            returns = {row: r for row, r in columns[RETURN].items() if plan.owners[row] == data_rank}
            columns[RETURN] = self._policy.to_all_ranks(returns, plan.lengths, torch.float64)
        tokens = []
        for mini_batch in mini_batches:
            rows = mini_batch.rows
            norm = Normalizers(sum(table.response_tokens[row] for row in rows), len(rows))
            loss_of = partial(self._loss_of, table, norm, sums)
            compute = partial(self._learn_part, inputs.fetched, mini_batch, loss_of, columns)
            self._replicas.learn(critic, compute, SumNotes(sums, critic.group))
            sums.end_step(critic.apply(table.step))
            tokens.append(norm.tokens)
        updates = sums.reduce(critic.group)
        rows_here = sorted(row for row, rank in owners_of(mini_batches).items() if self._shares.has(rank))
        learned = {
            "critic/loss": sum(update["loss"] for update in updates) / len(updates),
            "critic/clip_fraction": sum(update["clipped"] for update in updates) / sum(tokens),
        } if updates else {}  # fmt: skip
        return {
            "critic/lr": critic.lr(table.step),
            **learned,
            **{f"critic/{k}": value for k, value in (mean_norm(updates) | critic.scale_metrics()).items()},
            **self._fit(*([columns[name][row] for row in rows_here] for name in (VALUE, RETURN))),
        }

    def _learn_part(
        self,
        samples: Mapping[int, TrainSample],
        mini_batch: MiniBatch,
        loss_of: LossOf,
        columns: Mapping[str, Mapping[int, Tensor]],
        part: int,
    ) -> None:
        self._critic.learn(samples, mini_batch.ranks[self._shares.of(part)], loss_of, columns)

    def _loss_of(
        self, table: StepTable, norm: Normalizers, sums: PartSums, batch: MicroBatch, values: Tensor
    ) -> Tensor:
        old, returns = (batch.columns[name].to(values) for name in (VALUE, RETURN))
        lengths = values.new_tensor([table.response_tokens[row] for row in batch.rows])
        weights = token_weights(self._keys.loss_type, lengths[batch.sample], norm)
        loss = (weights * value_loss(values, old, returns, self._keys.value_clip)).sum()
        clipped = (values.detach() - old).abs() > self._keys.value_clip
        sums.add({"loss": loss.detach(), "clipped": clipped.sum()})
        return loss

    def _fit(self, values: Sequence[Tensor], returns: Sequence[Tensor]) -> Metrics:
        """Means of values and returns before the step, and the share of the returns' variance that values explain: 1
        where they are the returns, 0 where a constant would do as well. A collective."""
        value, gain = (torch.cat([torch.zeros(0), *parts]).double() for parts in (values, returns))
        error = gain - value
        parts = (value, gain, gain.square(), error, error.square())
        return fit(self._critic.group.all_reduce([float(len(value)), *(float(x.sum()) for x in parts)], "sum"))


def fit(sums: Sequence[float]) -> Metrics:
    """See `CriticTraining._fit`. sums: how many tokens, and over them the value, the return and its square, the error
    and its square."""
    n, *totals = sums
    if not n:
        return {}
    v, g, g2, e, e2 = (total / n for total in totals)
    spread = g2 - g**2
    means = {"critic/value_mean": v, "critic/return_mean": g}
    return means | ({"critic/explained_variance": 1 - (e2 - e**2) / spread} if spread > ROUNDED * g2 else {})
