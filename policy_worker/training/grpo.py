"""Group-relative policy optimisation: one training step, as the papers write it.

    the table of the step, the payloads of this rank
    log-probs of teachers and of the reference model, r_i −= β Σ_t KL_t; values of the critic
    advantages, such as A_i = (r_i − mean) / std in each group
    the critic's own optimizer steps (see `critic`), alone while it warms up
    for each mini-batch of the step (mu passes):
        L = Σ over its tokens of w · [ −min(ρA, clip(ρ)A) − c_H H + β KL ] + likelihood of positive samples
        clip the gradient, AdamW

ρ compares the policy with the one that made the tokens (their behaviour log-probs), so it corrects for staleness; or
with π_old, which the trainer recomputes before its first step, and the loss is weighted by π_old over the former.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

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
    adapted,
    kl_penalty,
    policy_loss_of,
    policy_objective,
)
from policy_worker.algorithms.masks import Rejection, SampleMasks, prefixes_of_groups
from policy_worker.algorithms.mismatch import mismatch_metrics, mismatch_sums
from policy_worker.errors import SettingsError
from policy_worker.model.logprobs import Head, TokenOutputs
from policy_worker.model.micro_batch import Columns, MicroBatch, TrainSample
from policy_worker.model.model import PolicyModel
from policy_worker.model.routing import KEY, Replay
from policy_worker.parallel.group import Group
from policy_worker.ranges import span
from policy_worker.replicas.base import Alone, Replicas
from policy_worker.trained.frozen import EarlierPolicy
from policy_worker.trained.model import LossOf
from policy_worker.trained.place import HIDDEN
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import (
    Batching,
    MiniBatch,
    Rows,
    Shares,
    alike_of,
    computed_rows,
    owners_of,
    plan_pass,
    plan_step,
    rows_of,
    spared_tokens,
)
from policy_worker.training.batches.source import Batches, DataEnded, counts
from policy_worker.training.critic import RETURN, VALUE, CriticTraining, lengths_of
from policy_worker.training.metrics import KeptSamples, Metrics, PartSums, StepMetrics, age_sums
from policy_worker.training.teachers import Teachers
from schema.config import Config, GrpoConfig
from schema.util.own_code import is_own
from schema.wire.batch import StepTable
from schema.wire.messages import HeldOutLoss, TrainedSample

log = logging.getLogger(__name__)

REFERENCE = "reference"
"""The column with the log-probs of the reference model."""
OLD = "old"
"""That with the log-probs of π_old, where it is not the policy that made the tokens."""
LEFT_OUT = "left_out"
"""That with 1 for tokens that the loss leaves out."""
REWARD_KL = "reward_kl"
"""That with the KL in the reward, where it is over the whole vocabulary."""
FRESH = "fresh"
"""That with 1 for tokens of the weights that the step begins with."""
UNREPLAYED_EVERY = 10
"""Steps between two measurements without the engine's experts: each is a forward of one micro-batch."""


class Planned(NamedTuple):
    """What the table alone says of a step. learned, alike: of each row. masks: rows by what masks them."""

    learned: list[bool]
    masks: Mapping[str, set[int]]
    masked: set[int]
    idle: set[int]
    alike: Sequence[int] | None
    plan: list[MiniBatch]

    @property
    def counted(self) -> list[bool]:
        """Whether each row takes part in the loss, and is not masked."""
        return [one and row not in self.masked for row, one in enumerate(self.learned)]


@dataclass(frozen=True)
class Lesson:
    """What the policy learns from in a step, and where what is found of it goes.

    samples: of this rank. columns: what passes found of them. head: the reference model's, where a KL is over the
    whole vocabulary. tokens: of each row of the table, those that count. seen: recorded choices of experts, and those
    that the model would have made otherwise, of the parts of all replicas where there are several.
    """

    table: StepTable
    samples: Mapping[int, TrainSample]
    columns: Columns
    head: Head | None
    advantages: Advantages
    tokens: Sequence[int]
    metrics: StepMetrics
    kept: KeptSamples
    seen: list[float] = field(default_factory=lambda: [0.0, 0.0])


class LessonNotes:
    """What policy replicas tell each other of a lesson's parts, next to gradients. All ranks call alike."""

    def __init__(
        self, lesson: Lesson, group: Group, replay: Replay | None, see_again: Callable[[int], None]
    ) -> None:
        """see_again: computes what the loss of a part needs and was not exchanged."""
        self._lesson, self._group, self._replay, self._see_again = lesson, group, replay, see_again

    def begin(self, part: int) -> None:
        """What forwards have seen until now is not of the part."""
        if self._replay is not None:
            self._replay.take_seen()
        self._see_again(part)

    def take(self, part: int) -> Any:
        """Sums for metrics, and log-probs of samples that are kept."""
        seen = [0.0, 0.0] if self._replay is None else self._group.reduce(self._replay.take_seen(), "total")
        return {
            "sums": self._lesson.metrics.take(self._group),
            "kept": self._lesson.kept.take(),
            "seen": seen,
        }

    def put(self, found: list[Any]) -> None:
        """As they were taken, of all parts."""
        self._lesson.metrics.put([one["sums"] for one in found])
        for one in found:
            self._lesson.kept.put(one["kept"])
            for number, more in enumerate(one["seen"]):
                self._lesson.seen[number] += more


class Grpo:
    """One training step at a time; the loop around it waits for batches, commits and publishes."""

    def __init__(
        self, config: Config, trainer: Trainer, source: Batches, replicas: Replicas | None = None
    ) -> None:
        """replicas: this one and others, each with all samples, of which models compute those of the parts that are
        its own; None: it trains alone.

        Raises:
            SettingsError: for an estimator or a loss that is not registered.
        """
        self._trainer, self._source, self._replicas = trainer, source, replicas or Alone()
        self._shares = Shares(self._replicas.parts, trainer.data_ranks, trainer.data_rank)
        self._advantages = advantage_config(config.grpo)
        self._loss = loss_config(config.grpo)
        self._batching = Batching.of_config(config)
        self._reference_batching = Batching.of_config(config, config.reference.parallelism).cut_to(
            config.reference.mini_batch, config.reference.max_token_len_per_mini_batch
        )
        old = config.grpo.old_log_prob
        self._old_batching = self._batching.cut_to(old.mini_batch, old.max_token_len_per_mini_batch)
        self._correction = correction_of(config.grpo)
        self._rejection = rejection_of(config.grpo)
        self._masks = SampleMasks(**config.grpo.sample_masks.model_dump())
        self._cap = config.grpo.rollout_correction.cap
        self._min_prefix = config.grpo.min_filter_prefix_tokens
        self._critic = (
            CriticTraining(config, trainer.critic, self._batching, trainer.group, self._replicas)
            if trainer.critic
            else None
        )
        self._warmup = config.critic.warmup_steps if self._critic else 0
        self._skips_idle = (
            not config.train.metrics_of_all_samples
            and self._loss.vanishes_with_advantage
            and not is_own(config.grpo.advantage_estimator)
        )
        self._resets_optimizer = config.grpo.reset_optimizer_with_reference
        self._kl_in_reward = config.grpo.kl_in_reward
        self._temperature = config.sampling_temperature
        self._groups_per_step, self._wanted = config.groups_per_step, config.logging.sample_groups
        self._names = config.reward_names
        self.teachers = Teachers(config, trainer)
        self._max_request_bytes = config.controller.max_request_bytes
        self._said_cut = self._said_parts = False
        self.kept: list[TrainedSample] = []
        self.validations: list[HeldOutLoss] = []

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
        """One training step: advantages, then one optimizer step per mini-batch. None: its payloads are gone, or this
        replica was asked to leave while a teacher did not answer."""
        trainer = self._trainer
        planned = self._planned(table)
        learned, masks, masked, idle, alike, plan = planned
        mine = self._rows_of(plan)
        self._replicas.batch(table.digest)
        with span("fetch"):
            fetched = self._source.payloads(table, self._needed(table, planned))
        if fetched is None or not self.teachers.prepare(table, fetched, plan, alike):
            return None
        if trainer.reset_interval and table.step and table.step % trainer.reset_interval == 0:
            trainer.reset_reference(self._resets_optimizer)
            log.info("the reference model is now the policy of step %d", table.step)
        self._check_routing(table, fetched)
        prefixes = self._prefixes(table, fetched)
        samples = {row: fetched[row] for row in mine}
        owners = owners_of(plan)  # a shuffle may deal a row to two ranks, and one of them counts it
        own = {row: sample for row, sample in samples.items() if self._shares.has(owners[row])}
        unreplayed = self._unreplayed(table, samples, plan)
        columns, head = self._passes(table, fetched, plan, alike)
        columns[FRESH] = {
            row: torch.from_numpy(sample.versions == table.step).float() for row, sample in samples.items()
        }
        advantages = self._advantages.of_step(
            table.score,
            table.group,
            table.response_tokens,
            samples,
            lambda sums: trainer.group.reduce(sums, "sum"),
            self._token_rewards(samples, kl := self._kl(samples, columns)),
            table.baseline,
            table.source,
            values := self._critic.values(table, fetched, plan, alike) if self._critic else None,
            own,
        )
        tokens = self._leave_out(table, samples, own, masked, prefixes, advantages, columns)
        updates = self._updates(table, tokens, plan)
        trained = own.keys() & computed_rows(updates)
        ages = age_sums(table.step, (own[row] for row in trained), self._source.bound)
        metrics = StepMetrics(table, advantages.by_sample, ages, self._source.bound, self._names)
        metrics.facts = self._facts(updates, learned, table, tokens)
        if (ahead := self._source.ahead_fraction) is not None:
            metrics.facts["ahead_fraction"] = ahead
        metrics.facts |= unreplayed | {
            f"masked_fraction/{name}": len(rows) / max(len(table.sampled), 1) for name, rows in masks.items()
        }
        if self._critic and values is not None:
            by_row = {VALUE: values, RETURN: advantages.returns}
            metrics.facts |= self._critic.train_on(table, fetched, plan, planned.counted, by_row, alike)
        kept = KeptSamples(table, self._groups_per_step, self._wanted, self._max_request_bytes)
        warms_up = table.step < self._warmup
        lesson = Lesson(table, samples, columns, head, advantages, tokens, metrics, kept)
        if not warms_up:
            self._learn(lesson, updates)
            metrics.facts |= trainer.scale_metrics()
        if not any(n for n, counted in zip(tokens, learned, strict=True) if counted):
            log.warning("step %d has no sample that counts: it is committed without an update", table.step)
        metrics.facts |= self._reward_kl(kl, own) | self.teachers.metrics(own) | self._rerouted(lesson)
        uncomputed = range(table.n_samples) if warms_up else idle
        self.kept = kept.gather(trainer.group, advantages.by_sample, uncomputed)
        if kept.cut and trainer.group.leads and not self._said_cut:
            self._said_cut = True
            log.warning(
                "%d samples of step %d are shown without log-probs of the trainer: they are too many or too long "
                "for a commit (logging.sample_groups = %d)",
                kept.cut,
                table.step,
                self._wanted,
            )
        return {**metrics.reduce(trainer.group), "lr": 0.0 if warms_up else trainer.lr(table.step)}

    def _updates(self, table: StepTable, tokens: Sequence[int], plan: Sequence[MiniBatch]) -> list[MiniBatch]:
        """The mini-batches that make an optimizer step: none while only the critic learns, and none whose tokens are
        all left out. tokens: of each row, those that count."""
        if table.step < self._warmup:
            return []
        return [mini_batch for mini_batch in plan if any(tokens[row] for row in mini_batch.rows)]

    def _learn(self, lesson: Lesson, updates: Sequence[MiniBatch]) -> None:
        """One optimizer step per mini-batch."""
        trainer, table, tokens = self._trainer, lesson.table, lesson.tokens
        for number, mini_batch in enumerate(updates):
            norm = normalizers(table, tokens, mini_batch.rows)
            compute = partial(
                self._learn_part, lesson, mini_batch, partial(self._loss_of, lesson, norm, number == 0)
            )
            see_again = partial(self._see_again, lesson, mini_batch)
            notes = LessonNotes(lesson, trainer.group, trainer.replay, see_again)
            self._replicas.learn(trainer, compute, notes)
            computed = sum(tokens[row] for row in mini_batch.computed)
            lesson.metrics.end_step(trainer.apply(table.step), computed)

    def _learn_part(self, lesson: Lesson, mini_batch: MiniBatch, loss_of: LossOf, part: int) -> None:
        """Forward and backward of this rank's share of a part."""
        trainer, batches = self._trainer, mini_batch.ranks[self._shares.of(part)]
        trainer.learn(
            lesson.samples,
            batches,
            loss_of,
            lesson.columns,
            temperature=self._temperature,
            head=lesson.head if self._loss.kl_type == "full" else None,
            more_of=self.teachers.more,
        )

    def _see_again(self, lesson: Lesson, mini_batch: MiniBatch, part: int) -> None:
        """The reference model's states of a part that was another replica's: they are too large to be exchanged."""
        if HIDDEN not in lesson.columns:
            return
        trainer, hidden = self._trainer, lesson.columns[HIDDEN]
        batches = mini_batch.ranks[self._shares.of(part)]
        assert trainer.reference is not None
        missing = trainer.place.has_outputs and any(row not in hidden for rows in batches for row in rows)
        if trainer.group.any(missing):
            (found,) = trainer.score(
                trainer.reference, lesson.samples, batches, self._temperature, ["hidden"]
            )
            cast(dict[int, Tensor], hidden).update(found)

    def _rows_of(self, plan: Sequence[MiniBatch]) -> Rows:
        """The rows of this rank's shares."""
        return sorted({row for share in self._shares.all for row in rows_of(plan, share)})

    def _loss_of(
        self, lesson: Lesson, norm: Normalizers, first: bool, batch: MicroBatch, out: TokenOutputs
    ) -> Tensor:
        """A micro-batch's part of the loss. first: of the step's first optimizer step."""
        facts = policy_tokens(out, batch, lesson.table, lesson.tokens, lesson.advantages, self._correction)
        loss, parts = policy_objective(self.teachers.teach(facts, out, batch), norm, self._loss)
        lesson.metrics.add(parts)
        lesson.kept.add(batch, out.logprobs)
        if first:
            lesson.metrics.add_mismatch(self._mismatch(batch, out.logprobs.detach()))
        return loss

    def _check_routing(self, table: StepTable, samples: Mapping[int, TrainSample]) -> None:
        """Raises `SettingsError`: the choice of experts is to be replayed, and a sample does not have it."""
        replay = self._trainer.replay
        for row, sample in samples.items() if replay is not None else ():
            if not sample.has_routing(weights=replay.wanted == "weights"):
                raise SettingsError(
                    f"sample {row} of step {table.step} does not say which experts the engine chose, and "
                    f'{KEY} = "{replay.wanted}": it was made with another setting; start anew, or write the one that '
                    f"the run began with"
                )

    def rows_needed(self, table: StepTable) -> Sequence[int]:
        """The rows of a table whose payloads this rank needs. Of the table alone, so any thread may ask."""
        return self._needed(table, self._planned(table))

    def _needed(self, table: StepTable, planned: Planned) -> Sequence[int]:
        """With those that a rank of this unit computes for a model with a mesh of its own."""
        trainer = self._trainer
        rows = self._with_groups(table, planned.learned, self._rows_of(planned.plan))
        others: list[tuple[Group, Sequence[Collection[int]]]] = []
        if (place := trainer.reference_place).group is not trainer.group:
            passed = self._reference_pass(table, planned.plan, planned.alike)
            others.append((place.group, [set(chain(*batches)) for batches in passed]))
        if self._critic and trainer.critic:
            shares = self._critic.rows(table, planned.plan, planned.counted, planned.alike)
            others += [(trainer.critic.group, shares)] if shares else []
        unit = trainer.group.sizes.unit(trainer.group.rank)
        more = (share[group.sizes.data_rank(rank)] for group, share in others for rank in unit)
        return sorted({*rows, *chain(*more)}) if others else rows

    def _reference_pass(
        self, table: StepTable, plan: Sequence[MiniBatch], alike: Sequence[int] | None
    ) -> list[list[Rows]]:
        """Micro-batches of the reference model's shares, which are the policy's but with a mesh of its own."""
        group = self._trainer.reference_place.group
        ranks = None if group is self._trainer.group else group.data_ranks
        return plan_pass(plan, table.total_tokens, self._reference_batching, alike, ranks)

    def _planned(self, table: StepTable) -> Planned:
        learned = [counts(table, row) for row in range(table.n_samples)]
        masks = self._masks.rows(table)
        masked = set[int]().union(*masks.values())
        idle = self._idle(table, masked) - (self.teachers.rows(table) - masked)
        alike = self._alike(table, [row for row in table.sampled if learned[row] and row not in idle])
        plan = plan_step(
            table.total_tokens,
            learned,
            self._batching,
            data_ranks=self._shares.total,
            step=table.step,
            idle=idle,
            dealt=table.sampled,
            alike=alike,
        )
        return Planned(learned, masks, masked, idle, alike, plan)

    def _with_groups(self, table: StepTable, learned: Sequence[bool], rows: Sequence[int]) -> Sequence[int]:
        """These rows and, where prefixes are compared, all others of their groups that count."""
        if self._min_prefix is None:
            return rows
        groups = {table.group[row] for row in rows}
        return [row for row in range(table.n_samples) if learned[row] and table.group[row] in groups]

    def _alike(self, table: StepTable, rows: list[int]) -> Sequence[int] | None:
        """The group of each sample, if it pays to compute the prompts of groups once."""
        least = self._trainer.least_spared
        if least is None:
            return None
        return alike_of(table.group, table.prompt_tokens, table.total_tokens, rows, least)

    def _idle(self, table: StepTable, masked: set[int]) -> set[int]:
        """Rows whose loss is zero whatever the model says of them, and that change no count: from the table alone."""
        if self._advantages.estimator.over_outcomes is None or self._kl_in_reward.beta:
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

    @property
    def _leaves_out(self) -> bool:
        """Whether the loss may leave out tokens that the table does not know of."""
        return self._min_prefix is not None or self._rejection is not None

    def _prefixes(self, table: StepTable, samples: Mapping[int, TrainSample]) -> dict[int, int]:
        """How many first tokens of each row are alike in good and bad answers."""
        if self._min_prefix is None:
            return {}
        responses = {row: sample.learned_ids for row, sample in samples.items()}
        return prefixes_of_groups(responses, table.group, table.score, self._min_prefix)

    def _leave_out(
        self,
        table: StepTable,
        samples: Mapping[int, TrainSample],
        counted: Collection[int],
        masked: set[int],
        prefixes: Mapping[int, int],
        advantages: Advantages,
        columns: dict[str, dict[int, Tensor]],
    ) -> list[int]:
        """How many tokens of each row count, [n]; the others get a column. A collective if there may be any."""
        unmasked = [0 if row in masked else n for row, n in enumerate(table.response_tokens)]
        if not (self._leaves_out or masked):
            return unmasked
        marks, left = {}, [0.0] * table.n_samples
        for row, sample in samples.items():
            first = sample.learned_tokens if row in masked else prefixes.get(row, 0)
            mark = torch.arange(sample.learned_tokens) < first
            if self._rejection is not None:
                log_ratio = columns[OLD][row] - sample.learned_logprobs
                mark |= self._rejection.of_sample(log_ratio, advantages.by_sample[row])
            marks[row], left[row] = mark.float(), float((~mark).sum()) if row in counted else 0.0
        columns[LEFT_OUT] = marks
        if not self._leaves_out:
            return unmasked
        return [int(value) for value in self._trainer.group.reduce(left, "sum")]

    def _facts(
        self, updates: Sequence[MiniBatch], learned: Sequence[bool], table: StepTable, tokens: Sequence[int]
    ) -> Metrics:
        """Shares of samples that are computed, of tokens that shared prompts spare, and that the loss leaves out."""
        rows = [row for row in range(table.n_samples) if learned[row]]
        facts = {"computed_fraction": len(computed_rows(updates)) / max(len(table.sampled), 1)}
        batches = [rows for mini_batch in updates for rank in mini_batch.ranks for rows in rank]
        if total := sum(table.total_tokens[row] for rows in batches for row in rows):
            facts["shared_fraction"] = sum(self._spared(rows, table) for rows in batches) / total
        whole = sum(table.response_tokens[row] for row in rows)
        if whole and (self._leaves_out or self._masks != SampleMasks()):
            facts["left_out_fraction"] = 1 - sum(tokens[row] for row in rows) / whole
        return facts

    def _spared(self, rows: Rows, table: StepTable) -> int:
        """Tokens that a micro-batch does not compute, of prompts that it has already, as `collate` decides: a packed
        one shares all, one with a row per sample only where that spares enough."""
        least = self._trainer.least_spared
        if least is None:
            return 0
        spared = spared_tokens([rows], table.group, table.prompt_tokens)
        whole = sum(table.total_tokens[row] - 1 for row in rows)
        return spared if self._batching.packed or spared >= least * whole else 0

    def _mismatch(self, batch: MicroBatch, logprobs: Tensor) -> dict[str, Tensor]:
        """Of the tokens of the first optimizer step, for which the policy is what it was before the step."""
        made_by, fresh = batch.old_logprobs.to(logprobs.dtype), batch.columns[FRESH] > 0
        return mismatch_sums(logprobs, made_by, {"engine": fresh, "stale": ~fresh}, self._cap)

    def _rerouted(self, lesson: Lesson) -> Metrics:
        """The share of recorded choices of experts that this model would have made otherwise; nothing where it
        computed none. A collective."""
        if self._trainer.replay is None:
            return {}
        recorded, otherwise = lesson.seen
        if self._shares.parts == 1:
            recorded, otherwise = self._trainer.group.reduce(self._trainer.replay.take_seen(), "total")
        return {"routing/differs": otherwise / recorded} if recorded else {}

    def _unreplayed(
        self, table: StepTable, samples: Mapping[int, TrainSample], plan: Sequence[MiniBatch]
    ) -> Metrics:
        """Now and then the mismatch of one micro-batch of each rank as it is without the engine's experts.

        A collective.
        """
        trainer = self._trainer
        if trainer.replay is None or table.step % UNREPLAYED_EVERY or not plan:
            return {}
        batches = plan[0].ranks[self._shares.of(0)][:1]
        with trainer.replay.off(), span("unreplayed"):
            (found,) = trainer.score(trainer.model, samples, batches, self._temperature)
        rows = [row for row in found if len(found[row])]
        columns = [torch.zeros(0), torch.zeros(0), torch.zeros(0)]
        if rows:
            made_by = [samples[row].learned_logprobs for row in rows]
            fresh = [torch.from_numpy(samples[row].versions == table.step) for row in rows]
            columns = [torch.cat(one) for one in ([found[row] for row in rows], made_by, fresh)]
        sums = PartSums()
        sums.add(mismatch_sums(columns[0], columns[1], {"unreplayed": columns[2] > 0}, self._cap))
        sums.end_step(0.0)
        return mismatch_metrics(sums.reduce(trainer.group)[0])

    def _passes(
        self,
        table: StepTable,
        samples: Mapping[int, TrainSample],
        plan: Sequence[MiniBatch],
        alike: Sequence[int] | None,
    ) -> tuple[dict[str, dict[int, Tensor]], Head | None]:
        """What is computed of all samples before any is trained on, by name and row; and the reference's head.

        The head only where a KL is over the whole vocabulary. samples: also those of other models' shares. A
        collective.
        """
        trainer, full = self._trainer, self._full_kl
        head = trainer.head_of(trainer.reference) if full and trainer.reference else None
        names = [REFERENCE] if trainer.reference else []
        names += [REWARD_KL] if self._full_kl_in_reward else []
        names += [OLD] if self._correction or self._rejection else []
        if not names:
            return {}, head
        hidden: dict[int, Tensor] = {}

        def find(part: int) -> dict[str, dict[int, Tensor]]:
            found = self._passes_of(table, samples, plan, alike, part, head)
            hidden.update(found.get(HIDDEN, {}))
            return found

        def lengths(part: int) -> dict[int, int]:
            rows = rows_of(plan, self._shares.of(part))
            return {row: samples[row].learned_tokens for row in rows}

        columns = self._replicas.columns(find, dict.fromkeys(names, trainer.place.numbers), lengths)
        return columns | ({HIDDEN: hidden} if full else {}), head

    @property
    def _full_kl(self) -> bool:
        """Whether a KL is over the whole vocabulary."""
        return self._full_kl_in_reward or (bool(self._loss.kl_beta) and self._loss.kl_type == "full")

    @property
    def _full_kl_in_reward(self) -> bool:
        return bool(self._kl_in_reward.beta) and self._kl_in_reward.type == "full"

    def _passes_of(
        self,
        table: StepTable,
        samples: Mapping[int, TrainSample],
        plan: Sequence[MiniBatch],
        alike: Sequence[int] | None,
        part: int,
        head: Head | None,
    ) -> dict[str, dict[int, Tensor]]:
        """Of this rank's share of a part. A collective."""
        trainer = self._trainer
        columns: dict[str, dict[int, Tensor]] = {}

        def score(
            model: PolicyModel | EarlierPolicy,
            batches: list[list[Rows]],
            names: Mapping[str, str],
            **more: Any,
        ) -> None:
            """names: columns and what of `TokenOutputs` they are."""
            place = trainer.place_of(model)
            with span(next(iter(names))):
                apart = place.group is not trainer.group
                share = place.group.data_rank if apart else self._shares.of(part)
                mine = batches[share] if batches else []
                found = trainer.score(model, samples, mine, self._temperature, list(names.values()), **more)
                if apart:
                    found = [place.to_all_ranks(one, lengths_of(table, plan)) for one in found]
                columns.update(zip(names, found, strict=True))

        if trainer.reference:
            hidden = {HIDDEN: "hidden"} if self._full_kl else {}
            batches = self._reference_pass(table, plan, alike)
            score(trainer.reference, batches, {REFERENCE: "logprobs"} | hidden)
        wanted = {OLD: "logprobs"} if self._correction or self._rejection else {}
        names, more = wanted, dict[str, Any]()
        if self._full_kl_in_reward:
            names, more = {REWARD_KL: "kl"} | wanted, {"columns": {HIDDEN: columns[HIDDEN]}, "head": head}
        if names:
            batches = plan_pass(plan, table.total_tokens, self._old_batching, alike)
            score(trainer.model, batches, names, **more)
        return columns

    def _token_rewards(
        self, samples: Mapping[int, TrainSample], kl: Mapping[int, Tensor] | None
    ) -> dict[int, Tensor] | None:
        """What tokens of this rank's samples earn next to the scores, which the last ones earn: −β KL, and parts."""
        beta = self._trainer.kl_coefficient
        penalty = None if kl is None else {row: -beta * values for row, values in kl.items()}
        earned = {row: torch.from_numpy(one.earned) for row, one in samples.items() if one.earned is not None}
        if not earned:
            return penalty
        if self._advantages.estimator.over_tokens is None:
            if not self._said_parts:
                self._said_parts = True
                log.warning(
                    "reward functions say where in the answers rewards were earned, which an estimator of one "
                    "advantage per sample cannot use: train.train_policy.advantage_estimator"
                )
            return penalty
        return earned | {row: earned.get(row, 0.0) + rewards for row, rewards in (penalty or {}).items()}

    def _kl(self, samples: Mapping[int, TrainSample], columns: Columns) -> Mapping[int, Tensor] | None:
        """The KL of each token of this rank's samples, between π_old and the reference; None: no reward has one."""
        if not self._kl_in_reward.beta:
            return None
        if REWARD_KL in columns:
            return columns[REWARD_KL]
        old, kind = columns.get(OLD, {}), cast(KlType, self._kl_in_reward.type)
        return {
            row: kl_penalty(old.get(row, sample.learned_logprobs), columns[REFERENCE][row], kind)
            for row, sample in samples.items()
        }

    def _reward_kl(self, kl_of_rows: Mapping[int, Tensor] | None, counted: Collection[int]) -> Metrics:
        """β of this step and the KL that it was for; β adapts to it. A collective if there is a KL in the reward."""
        trainer, term = self._trainer, self._kl_in_reward
        if kl_of_rows is None:
            return {}
        beta = trainer.kl_coefficient
        means = [float(values.mean()) for row, values in kl_of_rows.items() if row in counted]
        total, samples = trainer.group.reduce([math.fsum(means), float(len(means))], "sum")
        kl = total / max(samples, 1)
        if trainer.adapts_kl:
            trainer.kl_coefficient = adapted(beta, kl, term.target, int(samples), term.horizon)
        return {"kl_coefficient": beta} | ({"reward_kl": kl} if samples else {})


def advantage_config(config: GrpoConfig) -> AdvantageConfig:
    """How advantages are made as the configuration has it. Raises `SettingsError` for an unknown estimator."""
    return AdvantageConfig(
        estimator_of(config.advantage_estimator),
        Options(config.unbiased_advantage, config.gamma, config.gae_lambda),
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


def rejection_of(config: GrpoConfig) -> Rejection | None:
    """What leaves the loss by the ratio of π_old to the policy that made the tokens; None: nothing does."""
    wanted = config.rollout_correction
    found = Rejection(wanted.reject, wanted.reject_below, wanted.reject_above, wanted.off_policy_mask)
    return None if found == Rejection() else found


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
        full_kl=out.kl,
    )
    return facts if correction is None else replace(facts, weights=correction.weights(facts))
