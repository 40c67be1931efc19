"""Reinforcement learning: one training step, as the papers write it.

    the table of the step ─▶ plan                                who computes what (`step_plan`)
    the payloads of this rank, and what teachers say of them     (`batches`, `teachers`)
    log-probs of the reference model and π_old, values           (`passes`)
    r_i −= β Σ_t KL_t; advantages, such as (r_i − mean) / std in each group; tokens that count     (`credit`)
    the critic's own optimizer steps, alone while it warms up    (`critic`)
    the policy's: mu passes over the mini-batches of the step    (`policy_update`)

ρ compares the policy with the one that made the tokens (their behaviour log-probs), so it corrects for staleness; or
with π_old, which the trainer recomputes before its first step, and the loss is weighted by π_old over the former.
"""

from __future__ import annotations

from collections.abc import Sequence

from policy_worker.ranges import span
from policy_worker.replicas.base import Alone, Replicas
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import Shares
from policy_worker.training.batches.source import Batches, DataEnded
from policy_worker.training.credit import CreditAssignment
from policy_worker.training.critic import CriticTraining, NoCritic
from policy_worker.training.metrics import Metrics
from policy_worker.training.passes import Passes
from policy_worker.training.policy_update import PolicyUpdate
from policy_worker.training.step_plan import Planner
from policy_worker.training.teachers import Teachers
from schema.config import Config
from schema.wire.batch import StepTable
from schema.wire.messages import HeldOutLoss, TrainedSample


class Grpo:
    """One training step at a time; the loop around it waits for batches, commits and publishes."""

    def __init__(self, config: Config, trainer: Trainer, source: Batches, replicas: Replicas | None = None) -> None:
        """replicas: this one and others, each with all samples, of which models compute those of the parts that are
        its own; None: it trains alone.

        Raises `SettingsError`: for an estimator or a loss that is not registered."""
        self._trainer, self._source, self._replicas = trainer, source, replicas or Alone()
        shares = Shares(self._replicas.parts, trainer.group.data_ranks, trainer.group.data_rank)
        self.teachers = Teachers(config, trainer)
        has_critic = trainer.critic is not None
        self._critic = CriticTraining(config, trainer, self._replicas) if has_critic else NoCritic()
        self._passes = Passes(config, trainer, self._replicas, self._critic.values)
        others = (self._passes.others, self._critic.others)
        self._planner = Planner(config, trainer, shares, self.teachers.rows, others)
        self._credit = CreditAssignment(config, trainer)
        self._update = PolicyUpdate(
            config, trainer, self._replicas, self._planner, self._passes, self.teachers, source.bound
        )
        self.validations: list[HeldOutLoss] = []

    @property
    def kept(self) -> list[TrainedSample]:
        return self._update.kept

    def poll(self, step: int, wait_s: float) -> StepTable | None:
        """The table of a step; None: it is not assembled after `wait_s` seconds. A collective.

        Raises `DataEnded`: the last groups were dropped, so no step follows after all."""
        table = self._source.poll(step, wait_s)
        if table is not None and table.n_samples == 0:
            raise DataEnded
        return table

    def rows_needed(self, table: StepTable) -> Sequence[int]:
        """The rows of a table whose payloads this rank needs. Of the table alone, so any thread may ask."""
        return self._planner.plan(table).rows_needed

    def train_on(self, table: StepTable) -> Metrics | None:
        """One training step: advantages, then one optimizer step per mini-batch. None: its payloads are gone, or this
        replica was asked to leave while a teacher did not answer."""
        plan = self._planner.plan(table)
        self._replicas.batch(table.digest)
        with span("fetch"):
            samples = self._source.payloads(table, plan.rows_needed)
        if samples is None or not self.teachers.prepare(plan, samples):
            return None
        scores = self._passes.run(plan, samples)
        inputs = self._credit.of_step(plan, samples, scores)
        metrics = scores.metrics | self._critic.learn(inputs)
        metrics |= self._update.learn(inputs)
        metrics |= self._credit.adapt(inputs) | self.teachers.metrics(inputs.own)
        prefetched = self._source.prefetched_fraction
        return metrics | ({} if prefetched is None else {"ahead_fraction": prefetched})
