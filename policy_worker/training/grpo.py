"""Group-relative policy optimisation: one training step, as the papers write it.

    the table of the step, the payloads of this rank
    log-probs of the reference model, r_i −= β Σ_t KL_t
    advantages, such as A_i = (r_i − mean) / std in each group
    for each mini-batch of the step (mu passes):
        L = Σ over its tokens of w · [ −min(ρA, clip(ρ)A) − c_H H + β KL ] + likelihood of positive samples
        clip the gradient, AdamW

ρ compares the policy with the one that made the tokens (their behaviour log-probs), so it corrects for staleness; or
with π_old, which the trainer recomputes before its first step, and the loss is weighted by π_old over the former.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from policy_worker.algorithms.advantages import AdvantageConfig, Advantages, Options, Shaping, estimator_of
from policy_worker.algorithms.losses import (
    Clip,
    Correction,
    KlType,
    LossConfig,
    Normalizers,
    PolicyTokens,
    kl_penalty,
    policy_loss_of,
    policy_objective,
)
from policy_worker.algorithms.masks import prefixes_of_groups
from policy_worker.model.logprobs import TokenOutputs
from policy_worker.model.micro_batch import Columns, MicroBatch, TrainSample
from policy_worker.ranges import span
from policy_worker.trainer import Trainer
from policy_worker.training.batch_plan import Batching, MiniBatch, plan_pass, plan_step, rows_of
from policy_worker.training.batch_source import Batches, DataEnded, counts
from policy_worker.training.metrics import KeptSamples, Metrics, StepMetrics
from schema.config import Config, GrpoConfig
from schema.wire.batch import StepTable
from schema.wire.messages import TrainedSample

log = logging.getLogger(__name__)

REFERENCE = "reference"
"""The column with the log-probs of the reference model."""
OLD = "old"
"""That with the log-probs of π_old, where it is not the policy that made the tokens."""
LEFT_OUT = "left_out"
"""That with 1 for tokens that the loss leaves out."""


class Grpo:
    """One training step at a time; the loop around it waits for batches, commits and publishes."""

    def __init__(self, config: Config, trainer: Trainer, source: Batches) -> None:
        """Raises `SettingsError` for an estimator or a loss that is not registered."""
        self._trainer, self._source = trainer, source
        self._advantages = advantage_config(config.grpo)
        self._loss = loss_config(config.grpo)
        self._batching = Batching.of_config(config)
        self._reference_batching = self._batching.cut_to(
            config.reference.mini_batch, config.reference.max_token_len_per_mini_batch
        )
        old = config.grpo.old_log_prob
        self._old_batching = self._batching.cut_to(old.mini_batch, old.max_token_len_per_mini_batch)
        self._correction = correction_of(config.grpo)
        self._min_prefix = config.grpo.min_filter_prefix_tokens
        self._kl_in_reward = config.grpo.kl_in_reward
        self._temperature = config.sampling_temperature
        self._groups_per_step, self._wanted = config.groups_per_step, config.logging.sample_groups
        self._names = config.reward_names
        self._max_request_bytes = config.controller.max_request_bytes
        self._said_cut = False
        self.kept: list[TrainedSample] = []

    def poll(self, step: int, wait_s: float) -> StepTable | None:
        """The table of a step; None: it is not assembled after `wait_s` seconds. A collective.

        Raises:
            DataEnded: the last groups were dropped, so no step follows after all.
        """
        table = self._source.poll(step, wait_s)
        if table is not None and table.n_samples == 0:
            raise DataEnded
        return table

    def train_on(self, table: StepTable) -> Metrics | None:
        """One training step: advantages, then one optimizer step per mini-batch. None: its payloads are gone."""
        trainer = self._trainer
        learned = [counts(table, row) for row in range(table.n_samples)]
        plan = plan_step(
            table.total_tokens,
            learned,
            self._batching,
            data_ranks=trainer.data_ranks,
            step=table.step,
            dealt=table.sampled,
        )
        mine = rows_of(plan, trainer.data_rank)
        with span("fetch"):
            samples = self._source.payloads(table, self._with_peers(table, learned, mine))
        if samples is None:
            return None
        prefixes = self._prefixes(table, samples, mine)
        tokens = [n - left_out for n, left_out in zip(table.response_tokens, prefixes, strict=True)]
        samples = {row: samples[row] for row in mine}
        columns = self._passes(table, samples, plan)
        if any(prefixes):
            columns[LEFT_OUT] = {
                row: (torch.arange(sample.learned_tokens) < prefixes[row]).float()
                for row, sample in samples.items()
            }
        advantages = self._advantages.of_step(
            table.score,
            table.group,
            table.response_tokens,
            samples,
            lambda sums: trainer.group.reduce(sums, "sum"),
            self._token_rewards(samples, columns),
            table.baseline,
        )
        metrics = StepMetrics(table, advantages.by_sample, samples, self._source.bound, self._names)
        kept = KeptSamples(table, self._groups_per_step, self._wanted, self._max_request_bytes)
        for mini_batch in plan:
            norm = normalizers(table, tokens, mini_batch.rows)
            if not norm.tokens:  # all are left out
                continue
            for batch in trainer.micro_batches(samples, mini_batch.ranks[trainer.data_rank], columns):
                out = trainer.forward(batch, self._temperature)
                kept.add(batch, out.logprobs)
                with span("loss"):
                    facts = policy_tokens(out, batch, table, tokens, advantages, self._correction)
                    loss, parts = policy_objective(facts, norm, self._loss)
                trainer.backward(loss)
                metrics.add(parts)
            metrics.end_step(trainer.step(table.step), norm)
        if not plan:
            log.warning("step %d has no sample with a score: it is committed without an update", table.step)
        self.kept = kept.gather(trainer.group, advantages.by_sample)
        if kept.cut and trainer.group.leads and not self._said_cut:
            self._said_cut = True
            log.warning(
                "%d samples of step %d are shown without log-probs of the trainer: they are too many or too long "
                "for a commit (logging.sample_groups = %d)",
                kept.cut,
                table.step,
                self._wanted,
            )
        return {**metrics.reduce(trainer.group), "lr": trainer.lr(table.step)}

    def _with_peers(self, table: StepTable, learned: Sequence[bool], rows: Sequence[int]) -> Sequence[int]:
        """These rows and, where prefixes are compared, all others of their groups that count."""
        if self._min_prefix is None:
            return rows
        groups = {table.group[row] for row in rows}
        return [row for row in range(table.n_samples) if learned[row] and table.group[row] in groups]

    def _prefixes(
        self, table: StepTable, samples: Mapping[int, TrainSample], rows: Sequence[int]
    ) -> list[int]:
        """How many first tokens of each row are left out of the loss, [n]. A collective if prefixes are compared."""
        if self._min_prefix is None:
            return [0] * table.n_samples
        responses = {row: sample.learned_ids for row, sample in samples.items()}
        found = prefixes_of_groups(responses, table.group, table.score, self._min_prefix)
        mine = [0.0] * table.n_samples
        for row in rows:
            mine[row] = float(found[row])
        return [int(value) for value in self._trainer.group.reduce(mine, "sum")]

    def _passes(
        self, table: StepTable, samples: Mapping[int, TrainSample], plan: Sequence[MiniBatch]
    ) -> dict[str, dict[int, Tensor]]:
        """What is computed of all samples before any is trained on, by name and row. A collective."""
        trainer = self._trainer
        passes = [(REFERENCE, trainer.reference, self._reference_batching)] if trainer.reference else []
        if self._correction is not None:
            passes.append((OLD, trainer.model, self._old_batching))
        columns = {}
        for name, model, batching in passes:
            with span(name):
                batches = plan_pass(plan, table.total_tokens, batching)
                mine = batches[trainer.data_rank] if batches else []
                columns[name] = trainer.score(model, samples, mine, self._temperature)
        return columns

    def _token_rewards(
        self, samples: Mapping[int, TrainSample], columns: Columns
    ) -> dict[int, Tensor] | None:
        """−β KL of each token of this rank's samples, between π_old and the reference."""
        if not self._kl_in_reward.beta:
            return None
        beta, kind = self._kl_in_reward.beta, cast(KlType, self._kl_in_reward.type)
        old = columns.get(OLD, {})
        return {
            row: -beta * kl_penalty(old.get(row, sample.learned_logprobs), columns[REFERENCE][row], kind)
            for row, sample in samples.items()
        }


def advantage_config(config: GrpoConfig) -> AdvantageConfig:
    """How advantages are made as the configuration has it. Raises `SettingsError` for an unknown estimator."""
    return AdvantageConfig(
        estimator_of(config.advantage_estimator),
        Options(config.unbiased_advantage, config.gamma),
        Shaping(config.reward_shaping.center, config.reward_shaping.scale, config.reward_shaping.clip),
        whiten=config.whiten_advantages,
        clip=config.advantage_clip,
    )


def correction_of(config: GrpoConfig) -> Correction | None:
    """The weights between π_old and the policy that made the tokens; None: they are one."""
    if config.use_decoupled_loss:
        return Correction("token", config.behav_imp_weight_cap, drops=True)
    correction = config.rollout_correction
    return None if correction.weights == "none" else Correction(correction.weights, correction.cap)


def loss_config(config: GrpoConfig) -> LossConfig:
    """The coefficients of the loss as the configuration has them. Raises `SettingsError` for an unknown variant."""
    policy_loss_of(config.variant)
    return LossConfig(
        variant=config.variant,
        clip=Clip(config.epsilon_low, config.epsilon_high, config.lower_bound_ratio, config.aipo_rho),
        loss_type=config.loss_type,
        unbiased_loss_max_tokens=config.unbiased_loss_max_tokens,
        entropy_coeff=config.entropy_coeff,
        positive_nll_coef=config.positive_nll_coef,
        kl_beta=config.kl_beta,
        kl_type=cast(KlType, config.kl_type),
        unbiased_kl_estimate=config.unbiased_kl_estimate,
    )


def normalizers(table: StepTable, tokens: Sequence[int], rows: Sequence[int]) -> Normalizers:
    """The counts that an optimizer step of these rows is normalised by. tokens: of each row, those that count."""
    return Normalizers(
        tokens=sum(tokens[row] for row in rows),
        samples=sum(tokens[row] > 0 for row in rows),
        positive_tokens=sum(tokens[row] for row in rows if (table.score[row] or 0.0) > 0),
    )


def policy_tokens(
    out: TokenOutputs,
    batch: MicroBatch,
    table: StepTable,
    tokens: Sequence[int],
    advantages: Advantages,
    correction: Correction | None = None,
) -> PolicyTokens:
    """What the loss needs to know of a micro-batch's tokens: from the model, the payloads and the table.

    tokens: of each row of the table, those that count.
    """

    def spread(values: Sequence[float]) -> Tensor:
        """One value per sample to one per token, [K]."""
        return out.logprobs.new_tensor([values[row] for row in batch.rows])[batch.sample]

    made_by = batch.old_logprobs.to(out.logprobs.dtype)
    left_out = batch.columns.get(LEFT_OUT)
    facts = PolicyTokens(
        logprobs=out.logprobs,
        old_logprobs=batch.columns.get(OLD, made_by),
        entropy=out.entropy,
        advantages=advantages.of_tokens(batch.rows, batch.sample, out.logprobs),
        mask=torch.ones_like(batch.labels, dtype=torch.bool) if left_out is None else left_out == 0,
        sample=batch.sample,
        n_samples=batch.n_samples,
        sample_tokens=spread(tokens),
        positive=spread([score or 0.0 for score in table.score]) > 0,
        ref_logprobs=batch.columns.get(REFERENCE),
        behaviour_logprobs=made_by,
    )
    return facts if correction is None else replace(facts, weights=correction.weights(facts))
