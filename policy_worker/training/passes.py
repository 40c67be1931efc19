"""Forward passes over a step's samples before any is trained on: reference, π_old, the critic, hidden states.

Each part of the batch is computed by one policy replica, and all of them have its columns afterwards. States are too
large to be exchanged: they are computed again where they are missing (`states_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from policy_worker.algorithms.masks import Rejection
from policy_worker.algorithms.mismatch import mismatch_metrics, mismatch_sums
from policy_worker.algorithms.objective import Correction
from policy_worker.errors import SettingsError
from policy_worker.model.logits.head import Head
from policy_worker.model.micro_batch import TrainSample
from policy_worker.model.model import PolicyModel
from policy_worker.model.routing import KEY
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.ranges import span
from policy_worker.replicas.base import Replicas
from policy_worker.trained.frozen import EarlierPolicy
from policy_worker.trained.model_mesh import HIDDEN
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import Batching, Rows, plan_pass
from policy_worker.training.columns import FRESH, OLD, REFERENCE, REWARD_KL, Scores
from policy_worker.training.metrics import Metrics, PartSums
from policy_worker.training.step_plan import StepPlan
from schema.config import Config
from schema.wire.batch import StepTable

log = logging.getLogger(__name__)

UNREPLAYED_EVERY = 10
"""Steps between two measurements without the engine's experts: each is a forward of one micro-batch."""
Samples = Mapping[int, TrainSample]


class Passes:
    """See the module's docstring. All ranks call alike."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        replicas: Replicas,
        values: Callable[[StepPlan, Samples], dict[int, Tensor] | None],
    ) -> None:
        """values: the critic's, of the samples of a step; None without one."""
        grpo, reference = config.grpo, config.reference
        self._trainer, self._replicas, self._values = trainer, replicas, values
        self._temperature = config.sampling_temperature
        self._batching = Batching.of_config(config).cut_to(
            grpo.old_log_prob.mini_batch, grpo.old_log_prob.max_token_len_per_mini_batch
        )
        self._reference_batching = Batching.of_config(config, reference.parallelism).cut_to(
            reference.mini_batch, reference.max_token_len_per_mini_batch
        )
        self._cap = grpo.rollout_correction.cap
        self._needs_old = bool(Correction.of_config(grpo) or Rejection.of_config(grpo))
        self._full_kl_in_reward = bool(grpo.kl_in_reward.beta) and grpo.kl_in_reward.type == "full"
        self._full_kl = self._full_kl_in_reward or (bool(grpo.kl_beta) and grpo.kl_type == "full")
        self._resets_optimizer = grpo.reset_optimizer_with_reference

    def run(self, plan: StepPlan, samples: Samples) -> Scores:
        """Score the samples of a step. samples: also those of other models' shares. A collective.

        Raises `SettingsError`: the choice of experts is to be replayed, and a sample does not have it."""
        trainer, table = self._trainer, plan.table
        if trainer.reset_interval and table.step and table.step % trainer.reset_interval == 0:
            trainer.reset_reference(self._resets_optimizer)
            log.info("the reference model is now the policy of step %d", table.step)
        self._check_routing(table, samples)
        metrics = self._unreplayed(plan, samples)
        head = trainer.head_of(trainer.reference) if self._full_kl and trainer.reference else None
        columns = self._columns(plan, samples, head)
        columns[FRESH] = {row: torch.from_numpy(samples[row].versions == table.step).float() for row in plan.rows}
        return Scores(columns, self._values(plan, samples), head, metrics)

    def others(self, plan: StepPlan) -> list[tuple[RankGroup, Sequence[Collection[int]]]]:
        """See `step_plan.Others`: of a reference model with a mesh of its own."""
        group = self._trainer.reference_mesh.group
        if group is self._trainer.group:
            return []
        return [(group, [set(chain(*batches)) for batches in self._reference_pass(plan)])]

    def states_of(self, samples: Samples, batches: Sequence[Rows], columns: dict[str, dict[int, Tensor]]) -> None:
        """Compute the reference model's states of these rows, where a column of them is wanted and lacks some. A
        collective."""
        if HIDDEN not in columns:
            return
        trainer, hidden = self._trainer, columns[HIDDEN]
        assert trainer.reference is not None
        missing = trainer.mesh.has_outputs and any(row not in hidden for rows in batches for row in rows)
        if trainer.group.any(missing):
            (states,) = trainer.score(trainer.reference, samples, batches, self._temperature, ["hidden"])
            hidden.update(states)

    def _check_routing(self, table: StepTable, samples: Samples) -> None:
        replay = self._trainer.model.routing_replay
        if replay is None:
            return
        for row, sample in samples.items():
            if not sample.has_routing(weights=replay.wanted == "weights"):
                raise SettingsError(
                    f"sample {row} of step {table.step} does not say which experts the engine chose, and "
                    f'{KEY} = "{replay.wanted}": it was made with another setting; start anew, or write the one that '
                    f"the run began with"
                )

    def _unreplayed(self, plan: StepPlan, samples: Samples) -> Metrics:
        """Now and then the mismatch of one micro-batch of each rank as it is without the engine's experts.

        A collective."""
        trainer, step = self._trainer, plan.table.step
        if trainer.model.routing_replay is None or step % UNREPLAYED_EVERY or not plan.mini_batches:
            return {}
        batches = plan.mini_batches[0].ranks[plan.shares.of(0)][:1]
        with trainer.model.routing_replay.off(), span("unreplayed"):
            (logprobs,) = trainer.score(trainer.model, samples, batches, self._temperature)
        rows = [row for row in logprobs if len(logprobs[row])]
        columns = [torch.zeros(0), torch.zeros(0), torch.zeros(0)]
        if rows:
            made_by = [samples[row].learned_logprobs for row in rows]
            fresh = [torch.from_numpy(samples[row].versions == step) for row in rows]
            columns = [torch.cat(parts) for parts in ([logprobs[row] for row in rows], made_by, fresh)]
        sums = PartSums()
        sums.add(mismatch_sums(columns[0], columns[1], {"unreplayed": columns[2] > 0}, self._cap))
        sums.end_step(0.0)
        return mismatch_metrics(sums.reduce(trainer.group)[0])

    def _columns(self, plan: StepPlan, samples: Samples, head: Head | None) -> dict[str, dict[int, Tensor]]:
        """Score all parts, by name and row. A collective."""
        trainer = self._trainer
        names = [REFERENCE] if trainer.reference else []
        names += [REWARD_KL] if self._full_kl_in_reward else []
        names += [OLD] if self._needs_old else []
        if not names:
            return {}
        hidden: dict[int, Tensor] = {}

        def find(part: int) -> dict[str, dict[int, Tensor]]:
            columns = self._columns_of(plan, samples, part, head)
            hidden.update(columns.get(HIDDEN, {}))
            return columns

        types = dict.fromkeys(names, trainer.mesh.numbers)
        columns = self._replicas.columns(find, types, partial(plan.lengths_in, samples))
        return columns | ({HIDDEN: hidden} if self._full_kl else {})

    def _columns_of(
        self, plan: StepPlan, samples: Samples, part: int, head: Head | None
    ) -> dict[str, dict[int, Tensor]]:
        """Score this rank's share of one part. Collective: all ranks must call it."""
        trainer = self._trainer
        columns: dict[str, dict[int, Tensor]] = {}

        def score(
            model: PolicyModel | EarlierPolicy, batches: list[list[Rows]], names: Mapping[str, str], **arguments: Any
        ) -> None:
            """names: columns and what of `TokenOutputs` they are."""
            mesh = trainer.mesh_of(model)
            with span(next(iter(names))):
                apart = mesh.group is not trainer.group
                share = mesh.group.data_rank if apart else plan.shares.of(part)
                batches_here = batches[share] if batches else []
                scored = trainer.score(
                    model, samples, batches_here, self._temperature, list(names.values()), **arguments
                )
                if apart:
                    scored = [mesh.group.to_all_ranks(column, plan.lengths, mesh.numbers) for column in scored]
                columns.update(zip(names, scored, strict=True))

        if trainer.reference:
            hidden = {HIDDEN: "hidden"} if self._full_kl else {}
            score(trainer.reference, self._reference_pass(plan), {REFERENCE: "logprobs"} | hidden)
        names, arguments = {OLD: "logprobs"} if self._needs_old else {}, dict[str, Any]()
        if self._full_kl_in_reward:
            names = {REWARD_KL: "kl"} | names
            arguments = {"columns": {HIDDEN: columns[HIDDEN]}, "head": head}
        if names:
            batches = plan_pass(plan.mini_batches, plan.table.total_tokens, self._batching, plan.alike)
            score(trainer.model, batches, names, **arguments)
        return columns

    def _reference_pass(self, plan: StepPlan) -> list[list[Rows]]:
        """Micro-batches of the reference model's shares, which are the policy's but with a mesh of its own."""
        group = self._trainer.reference_mesh.group
        ranks = None if group is self._trainer.group else group.data_ranks
        tokens = plan.table.total_tokens
        return plan_pass(plan.mini_batches, tokens, self._reference_batching, plan.alike, ranks)
