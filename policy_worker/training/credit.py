"""The worth of each token of a step's samples: r_i − β Σ_t KL_t, advantages, returns, and which tokens count."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from policy_worker.algorithms.advantages import AdvantageConfig, Advantages
from policy_worker.algorithms.masks import Rejection, prefixes_of_groups
from policy_worker.algorithms.objective import adapted, kl_penalty
from policy_worker.model.micro_batch import TrainSample
from policy_worker.trained.trainer import Trainer
from policy_worker.training.columns import LEFT_OUT, OLD, REFERENCE, REWARD_KL, Scores
from policy_worker.training.metrics import Metrics
from policy_worker.training.step_plan import StepPlan
from schema.config import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Credit:
    """The worth of a step's samples.

    tokens: of each row of the table, those that count. kl: in the reward, of each token by row; None: it has none."""

    advantages: Advantages
    tokens: list[int]
    kl: Mapping[int, Tensor] | None


@dataclass(frozen=True)
class StepInputs:
    """Everything that critic and policy learn from in a step.

    fetched: the samples of this rank's shares, and those that other models of its unit or comparisons need."""

    plan: StepPlan
    fetched: Mapping[int, TrainSample]
    scores: Scores
    credit: Credit

    @property
    def samples(self) -> dict[int, TrainSample]:
        """The samples of this rank's shares."""
        return {row: self.fetched[row] for row in self.plan.rows}

    @property
    def own(self) -> dict[int, TrainSample]:
        """The samples that this rank counts."""
        return {row: sample for row, sample in self.samples.items() if self.plan.counts_here(row)}


class CreditAssignment:
    """See the module's docstring. All ranks call alike."""

    def __init__(self, config: Config, trainer: Trainer) -> None:
        """Raises `SettingsError` for an estimator that is not registered."""
        grpo = config.grpo
        self._trainer, self._kl_in_reward = trainer, grpo.kl_in_reward
        self._advantages, self._rejection = AdvantageConfig.of_config(grpo), Rejection.of_config(grpo)
        self._min_prefix = grpo.min_filter_prefix_tokens
        self._said_parts = False

    def of_step(self, plan: StepPlan, fetched: Mapping[int, TrainSample], scores: Scores) -> StepInputs:
        """Assign credit to the samples of a step; tokens that do not count get a column. A collective."""
        table, columns = plan.table, scores.columns
        samples = {row: fetched[row] for row in plan.rows}
        counted = {row for row in plan.rows if plan.counts_here(row)}
        kl = self._kl(samples, columns)
        advantages = self._advantages.of_step(
            table.score,
            table.group,
            table.response_tokens,
            samples,
            lambda sums: self._trainer.group.all_reduce(sums, "sum"),
            self._token_rewards(samples, kl),
            table.baseline,
            table.source,
            scores.values,
            counted,
        )
        tokens = self._leave_out(plan, fetched, advantages, columns)
        return StepInputs(plan, fetched, scores, Credit(advantages, tokens, kl))

    def adapt(self, inputs: StepInputs) -> Metrics:
        """Report β of this step and its KL, and adapt β. A collective if there is a KL in the reward.

        Called once the step is learnt: one whose batch has changed is begun anew with the same β."""
        trainer, term, kl_of_rows = self._trainer, self._kl_in_reward, inputs.credit.kl
        if kl_of_rows is None:
            return {}
        beta = trainer.kl_coefficient
        means = [float(values.mean()) for row, values in kl_of_rows.items() if inputs.plan.counts_here(row)]
        total, samples = trainer.group.all_reduce([math.fsum(means), float(len(means))], "sum")
        kl = total / max(samples, 1)
        if trainer.adapts_kl:
            trainer.kl_coefficient = adapted(beta, kl, term.target, int(samples), term.horizon)
        return {"kl_coefficient": beta} | ({"reward_kl": kl} if samples else {})

    def _kl(
        self, samples: Mapping[int, TrainSample], columns: Mapping[str, Mapping[int, Tensor]]
    ) -> Mapping[int, Tensor] | None:
        """The KL of each token of this rank's samples, between π_old and the reference; None: no reward has one."""
        if not self._kl_in_reward.beta:
            return None
        if REWARD_KL in columns:
            return columns[REWARD_KL]
        old, kind = columns.get(OLD, {}), self._kl_in_reward.type
        return {
            row: kl_penalty(old.get(row, sample.learned_logprobs), columns[REFERENCE][row], kind)
            for row, sample in samples.items()
        }

    def _token_rewards(
        self, samples: Mapping[int, TrainSample], kl: Mapping[int, Tensor] | None
    ) -> dict[int, Tensor] | None:
        """Rewards of this rank's tokens next to the scores, which the last ones earn: −β KL, and parts."""
        beta = self._trainer.kl_coefficient
        penalty = None if kl is None else {row: -beta * values for row, values in kl.items()}
        parts = {row: sample.earned for row, sample in samples.items() if sample.earned is not None}
        earned = {row: torch.from_numpy(values) for row, values in parts.items()}
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

    def _prefixes(self, plan: StepPlan, fetched: Mapping[int, TrainSample]) -> dict[int, int]:
        """How many first tokens of each row are alike in good and bad answers."""
        if self._min_prefix is None:
            return {}
        responses = {row: sample.learned_ids for row, sample in fetched.items()}
        return prefixes_of_groups(responses, plan.table.group, plan.table.score, self._min_prefix)

    def _leave_out(
        self,
        plan: StepPlan,
        fetched: Mapping[int, TrainSample],
        advantages: Advantages,
        columns: dict[str, dict[int, Tensor]],
    ) -> list[int]:
        """How many tokens of each row count, [n]; the others get a column. A collective if there may be any."""
        table, masked = plan.table, plan.masked
        unmasked = [0 if row in masked else n for row, n in enumerate(table.response_tokens)]
        by_tokens = self._min_prefix is not None or self._rejection is not None
        if not (by_tokens or masked):
            return unmasked
        prefixes, marks, left = self._prefixes(plan, fetched), {}, [0.0] * table.n_samples
        for row in plan.rows:
            sample = fetched[row]
            first = sample.learned_tokens if row in masked else prefixes.get(row, 0)
            mark = torch.arange(sample.learned_tokens) < first
            if self._rejection is not None:
                log_ratio = columns[OLD][row] - sample.learned_logprobs
                mark |= self._rejection.of_sample(log_ratio, advantages.by_sample[row])
            marks[row], left[row] = mark.float(), float((~mark).sum()) if plan.counts_here(row) else 0.0
        columns[LEFT_OUT] = marks
        if not by_tokens:
            return unmasked
        return [int(value) for value in self._trainer.group.all_reduce(left, "sum")]
