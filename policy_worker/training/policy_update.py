"""The policy's optimizer steps in a step of reinforcement learning: mu passes over its mini-batches.

    for each mini-batch:
        L = Σ over its tokens of w · [ −min(ρA, clip(ρ)A) − c_H H + β KL ] + likelihood of positive samples
        clip the gradient, AdamW

Each part of a mini-batch is computed by one policy replica; its gradients and metrics are known to all afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from policy_worker.algorithms.losses import PolicyTokens
from policy_worker.algorithms.mismatch import mismatch_sums
from policy_worker.algorithms.objective import Correction, LossConfig, Normalizers, policy_objective
from policy_worker.model.logits.logprobs import TokenOutputs
from policy_worker.model.micro_batch import MicroBatch, TrainSample
from policy_worker.replicas.base import Replicas
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import MiniBatch, Rows, computed_rows
from policy_worker.training.columns import FRESH, LEFT_OUT, OLD, REFERENCE
from policy_worker.training.credit import Credit, StepInputs
from policy_worker.training.metrics import Metrics, SampleCollector, StepMetrics, age_sums
from policy_worker.training.passes import Passes
from policy_worker.training.step_plan import Planner
from policy_worker.training.teachers import Teachers
from schema.config import Config
from schema.wire.batch import StepTable
from schema.wire.messages import TrainedSample

log = logging.getLogger(__name__)


@dataclass
class UpdateProgress:
    """The state of the policy's optimizer steps within one training step.

    seen: recorded choices of experts, and those that the model would have made otherwise, of the parts of all
    replicas where there are several."""

    inputs: StepInputs
    samples: Mapping[int, TrainSample]
    metrics: StepMetrics
    kept: SampleCollector
    seen: list[float] = field(default_factory=lambda: [0.0, 0.0])


class PartMetrics:
    """Metrics of a mini-batch's parts, which policy replicas exchange (`Notes`). All ranks call alike."""

    def __init__(self, progress: UpdateProgress, trainer: Trainer, prepare: Callable[[int], None]) -> None:
        """prepare: computes what the loss of a part needs and was not exchanged."""
        self._progress, self._trainer, self._prepare = progress, trainer, prepare

    def begin(self, part: int) -> None:
        """Drop the choices of experts until now: they are not of the part."""
        if self._trainer.model.routing_replay is not None:
            self._trainer.model.routing_replay.take_seen()
        self._prepare(part)

    def take(self, part: int) -> Any:
        """Sums for metrics, and log-probs of samples that are kept."""
        group, replay = self._trainer.group, self._trainer.model.routing_replay
        seen = [0.0, 0.0] if replay is None else group.all_reduce(replay.take_seen(), "total")
        return {"sums": self._progress.metrics.take(group), "kept": self._progress.kept.take(), "seen": seen}

    def put(self, notes: list[Any]) -> None:
        """See `Notes.put`."""
        self._progress.metrics.put([part["sums"] for part in notes])
        for part in notes:
            self._progress.kept.put(part["kept"])
            for number, seen in enumerate(part["seen"]):
                self._progress.seen[number] += seen


class PolicyUpdate:
    """See the module's docstring. All ranks call alike."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        replicas: Replicas,
        planner: Planner,
        passes: Passes,
        teachers: Teachers,
        bound: int,
    ) -> None:
        """bound: S, the most steps by which a sample may be older than the step.

        Raises `SettingsError`: for a loss that is not registered."""
        grpo = config.grpo
        self._trainer, self._replicas, self._planner = trainer, replicas, planner
        self._passes, self._teachers, self._bound = passes, teachers, bound
        self._loss, self._correction = LossConfig.of_config(grpo), Correction.of_config(grpo)
        self._cap, self._temperature = grpo.rollout_correction.cap, config.sampling_temperature
        self._warmup = config.critic.warmup_steps if trainer.critic else 0
        self._groups_per_step, self._wanted = config.groups_per_step, config.logging.sample_groups
        self._names, self._max_request_bytes = config.reward_names, config.controller.max_request_bytes
        self._said_cut = False
        self.kept: list[TrainedSample] = []
        """Facts of samples of the last step that are shown; on rank 0."""

    def learn(self, inputs: StepInputs) -> Metrics:
        """Make the step's optimizer steps: none while the critic alone learns. A collective.

        Raises `BatchChanged`: see there; `NonFiniteGradientError`: see `Optimizer.step`."""
        plan, credit, table, trainer = inputs.plan, inputs.credit, inputs.plan.table, self._trainer
        warms_up = table.step < self._warmup
        updates = [] if warms_up else plan.updates(credit.tokens)
        computed = computed_rows(updates)
        counted = inputs.own
        ages = age_sums(table.step, (counted[row] for row in computed if row in counted), self._bound)
        metrics = StepMetrics(table, credit.advantages.by_sample, ages, self._bound, self._names)
        metrics.facts = self._planner.metrics(plan, updates, credit.tokens)
        kept = SampleCollector(table, self._groups_per_step, self._wanted, self._max_request_bytes)
        progress = UpdateProgress(inputs, inputs.samples, metrics, kept)
        for number, mini_batch in enumerate(updates):
            self._learn(progress, mini_batch, number == 0)
        if not warms_up:
            metrics.facts |= trainer.scale_metrics()
        if not any(n for n, learned in zip(credit.tokens, plan.learned, strict=True) if learned):
            log.warning("step %d has no sample that counts: it is committed without an update", table.step)
        metrics.facts |= self._rerouted(progress)
        self._keep(progress, range(table.n_samples) if warms_up else plan.idle)
        return {**metrics.reduce(trainer.group), "lr": 0.0 if warms_up else trainer.lr(table.step)}

    def _learn(self, progress: UpdateProgress, mini_batch: MiniBatch, first: bool) -> None:
        """One optimizer step. first: of the training step."""
        trainer, plan, tokens = self._trainer, progress.inputs.plan, progress.inputs.credit.tokens
        columns = progress.inputs.scores.columns
        norm = normalizers(plan.table, tokens, mini_batch.rows)
        loss_of = partial(self._loss_of, progress, norm, first)

        def batches(part: int) -> list[Rows]:
            return mini_batch.ranks[plan.shares.of(part)]

        def compute(part: int) -> None:
            trainer.learn(
                progress.samples,
                batches(part),
                loss_of,
                columns,
                temperature=self._temperature,
                head=progress.inputs.scores.head if self._loss.kl_type == "full" else None,
                more_of=self._teachers.more,
            )

        def prepare(part: int) -> None:
            self._passes.states_of(progress.samples, batches(part), columns)

        self._replicas.learn(trainer, compute, PartMetrics(progress, trainer, prepare))
        computed = sum(tokens[row] for row in mini_batch.computed)
        progress.metrics.end_step(trainer.apply(plan.table.step), computed)

    def _loss_of(
        self, progress: UpdateProgress, norm: Normalizers, first: bool, batch: MicroBatch, out: TokenOutputs
    ) -> Tensor:
        """A micro-batch's part of the loss. first: of the step's first optimizer step."""
        facts = policy_tokens(out, batch, progress.inputs.plan.table, progress.inputs.credit, self._correction)
        loss, parts = policy_objective(self._teachers.teach(facts, out, batch), norm, self._loss)
        progress.metrics.add(parts)
        progress.kept.add(batch, out.logprobs)
        if first:  # the policy is what it was before the step
            logprobs, fresh = out.logprobs.detach(), batch.columns[FRESH] > 0
            made_by = batch.old_logprobs.to(logprobs.dtype)
            ages = {"engine": fresh, "stale": ~fresh}
            progress.metrics.add_mismatch(mismatch_sums(logprobs, made_by, ages, self._cap))
        return loss

    def _rerouted(self, progress: UpdateProgress) -> Metrics:
        """The share of recorded choices of experts that this model would have made otherwise; nothing where it
        computed none. A collective."""
        trainer = self._trainer
        if trainer.model.routing_replay is None:
            return {}
        recorded, otherwise = progress.seen
        if self._replicas.parts == 1:
            recorded, otherwise = trainer.group.all_reduce(trainer.model.routing_replay.take_seen(), "total")
        return {"routing/differs": otherwise / recorded} if recorded else {}

    def _keep(self, progress: UpdateProgress, uncomputed: Any) -> None:
        """Gather what is shown of samples. uncomputed: rows that have no log-probs."""
        kept, group, table = progress.kept, self._trainer.group, progress.inputs.plan.table
        self.kept = kept.gather(group, progress.inputs.credit.advantages.by_sample, uncomputed)
        if kept.cut and group.leads and not self._said_cut:
            self._said_cut = True
            log.warning(
                "%d samples of step %d are shown without log-probs of the trainer: they are too many or too long "
                "for a commit (logging.sample_groups = %d)",
                kept.cut,
                table.step,
                self._wanted,
            )


def normalizers(table: StepTable, tokens: Sequence[int], rows: Sequence[int]) -> Normalizers:
    """The counts that an optimizer step of these rows is normalised by. tokens: of each row, those that count."""
    return Normalizers(
        tokens=sum(tokens[row] for row in rows),
        samples=sum(tokens[row] > 0 for row in rows),
        positive_tokens=sum(tokens[row] for row in rows if (table.score[row] or 0.0) > 0),
    )


def policy_tokens(
    out: TokenOutputs, batch: MicroBatch, table: StepTable, credit: Credit, correction: Correction | None
) -> PolicyTokens:
    """Gather what the loss reads of a micro-batch's tokens: from the model, the payloads and the table."""

    def spread(values: Sequence[float]) -> Tensor:
        """One value per sample to one per token, [K]."""
        return out.logprobs.new_tensor([values[row] for row in batch.rows])[batch.sample]

    made_by = batch.old_logprobs.to(out.logprobs.dtype)
    left_out = batch.columns.get(LEFT_OUT)
    facts = PolicyTokens(
        logprobs=out.logprobs,
        old_logprobs=batch.columns.get(OLD, made_by),
        entropy=out.entropy,
        advantages=credit.advantages.of_tokens(batch.rows, batch.sample, out.logprobs),
        mask=torch.ones_like(batch.labels, dtype=torch.bool) if left_out is None else left_out == 0,
        sample=batch.sample,
        n_samples=batch.n_samples,
        sample_tokens=spread(credit.tokens),
        positive=spread([score or 0.0 for score in table.score]) > 0,
        ref_logprobs=batch.columns.get(REFERENCE),
        behaviour_logprobs=made_by,
        full_kl=out.kl,
    )
    return facts if correction is None else replace(facts, weights=correction.weights(facts))
