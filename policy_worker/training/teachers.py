"""Teachers in a training step: what they say of its samples, and what that adds to advantages and losses.

    prepare   before any sample is trained on: a pass of each local teacher, the requests to each server
    teach     for each micro-batch: −w (log π_old − log q) to advantages, divergences to the losses of its tokens

Each teacher has a part in the samples of its sources, and several in one sample add up. A sample without a teacher
has none of it; one with a teacher is computed even where its advantage is 0. All of it is of single tokens, so no
gradient depends on how the step is cut. The formulas: `algorithms.distillation`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from policy_worker.algorithms.distillation import reverse_kl_advantage, reverse_kl_estimate, top_k_jsd
from policy_worker.algorithms.losses import PolicyTokens
from policy_worker.errors import SettingsError, TeacherError
from policy_worker.model.arrival import on_device
from policy_worker.model.logits.head import Head
from policy_worker.model.logits.logprobs import Beside, TokenOutputs, TopTokens, logprobs_at, token_kl, top_tokens
from policy_worker.model.micro_batch import MicroBatch, TrainSample
from policy_worker.model.model import More
from policy_worker.process import ShutdownRequest
from policy_worker.ranges import span
from policy_worker.trained.trainer import Trainer
from policy_worker.training.batches.cutting import Batching, MiniBatch, plan_pass
from policy_worker.training.metrics import Metrics
from policy_worker.training.step_plan import StepPlan
from policy_worker.training.teacher_client import TeacherClient
from schema.config import Config
from schema.config.sections.teacher import TeacherConfig
from schema.wire.batch import StepTable
from tokenization.loading import TokenizerError, policy_tokenizer

log = logging.getLogger(__name__)

SLICE = 1.0
"""Seconds of one round of waiting for a server: so often a request to leave is looked at."""
DIVERGENCES = ("reverse_kl_full", "top_k_jsd")
"""Losses that are computed from the policy's hidden states."""


@dataclass
class Teaching:
    """One teacher in this step: what it said of the samples of this rank, by row.

    logprobs: of the learned tokens, [n]. top: its likeliest tokens, [n, k]. hidden: its states [n, D], of output
    head `head`."""

    teacher: TeacherConfig
    client: TeacherClient | None = None
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    top: dict[int, TopTokens] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    head: Head | None = None


class Teachers:
    """See the module's docstring. All ranks call alike."""

    def __init__(self, config: Config, trainer: Trainer) -> None:
        """Raises `TeacherError` for an API key that is not there."""
        self._trainer, self._config = trainer, config
        self._temperature = config.sampling_temperature if config.is_grpo else 1.0
        self._batching = Batching.of_config(config)
        self._all = [
            Teaching(each, None if each.is_local else TeacherClient(each, trainer.vocabulary, _key(each)))
            for each in config.teacher
        ]
        self.shutdown = ShutdownRequest()
        self.say: Callable[[str], None] = lambda _: None
        """Shows what this rank waits for; "": it goes on."""

    @property
    def trouble(self) -> str:
        """Which servers do not answer; "": none."""
        return "; ".join(filter(None, (teaching.client.trouble for teaching in self._all if teaching.client)))

    def rows(self, table: StepTable) -> set[int]:
        """The rows that some teacher has a part in. Of the table alone."""
        return {
            row
            for row in range(table.n_samples)
            if any(t.teacher.weight and t.teacher.teaches(_source(table, row)) for t in self._all)
        }

    def meet(self, tokenize: Callable[[str], list[int]]) -> bool:
        """Look whether the servers are the ones that are meant; False: this replica was asked to leave meanwhile.

        Raises `TeacherError`: one is not."""
        for teaching in self._all:
            if teaching.client is not None:
                teaching.client.meet(tokenize, self._config.longest_sequence)
                if not self._wait(teaching.client):
                    return False
        return True

    def prepare(self, plan: StepPlan, samples: Mapping[int, TrainSample]) -> bool:
        """Have all teachers judge the samples of a plan; False: asked to leave while a server did not answer.

        A collective. Raises:
            TeacherError: a server refuses, or answers of something else.
        """
        table = plan.table
        for teaching in self._all:
            teacher = teaching.teacher
            teaches = [teacher.teaches(_source(table, row)) for row in range(table.n_samples)]
            part = taught(plan.mini_batches, teaches)
            with span(f"teacher {teacher.name}"):
                if teaching.client is None:
                    self._pass(teaching, table, samples, part, plan.alike)
                elif not self._ask(teaching, teaching.client, samples, part):
                    return False
        return True

    def _pass(
        self,
        teaching: Teaching,
        table: StepTable,
        samples: Mapping[int, TrainSample],
        plan: Sequence[MiniBatch],
        alike: Sequence[int] | None,
    ) -> None:
        teacher, trainer = teaching.teacher, self._trainer
        model = trainer.teachers[teacher.name]
        batching = self._batching.cut_to(teacher.mini_batch, teacher.max_token_len_per_mini_batch)
        batches = plan_pass(plan, table.total_tokens, batching, alike)
        batches_here = batches[trainer.group.data_rank] if batches else []
        more: More | None = None
        fields = ["logprobs"]
        if teacher.loss == "top_k_jsd":
            fields += ["more.logprobs", "more.ids"]

            def more(hidden: Tensor, head: Head) -> TopTokens:
                return top_tokens(hidden, head, teacher.top_k, self._temperature)

        elif teacher.loss == "reverse_kl_full":
            fields.append("hidden")
            teaching.head = trainer.head_of(model) if batches else None
        scored = trainer.score(model, samples, batches_here, self._temperature, fields, more=more)
        teaching.logprobs = scored[0]
        if teacher.loss == "top_k_jsd":
            teaching.top = {row: TopTokens(values, scored[2][row]) for row, values in scored[1].items()}
        elif teacher.loss == "reverse_kl_full":
            teaching.hidden = scored[1]

    def _ask(
        self, teaching: Teaching, client: TeacherClient, samples: Mapping[int, TrainSample], plan: Sequence[MiniBatch]
    ) -> bool:
        rank = self._trainer.group.data_rank
        rows = sorted({row for part in plan for batch in part.ranks[rank] for row in batch})
        client.ask({row: samples[row] for row in rows})
        if not self._wait(client):
            return False
        teaching.logprobs = {row: judged.logprobs for row, judged in client.found.items()}
        teaching.top = {row: judged.top for row, judged in client.found.items() if judged.top is not None}
        return True

    def _wait(self, client: TeacherClient) -> bool:
        """Until a server has answered all ranks; False: one of them was asked to leave. A collective."""
        said = False
        while True:
            error = None
            try:
                client.advance(SLICE)
            except TeacherError as caught:
                error = caught
            state = [not client.is_done, "" if error is None else str(error), bool(self.shutdown), client.trouble]
            ranks = self._trainer.group.gather(state)
            if error is not None:
                raise error
            pending, errors, leaves, troubles = zip(*ranks, strict=True)
            if any(errors):
                client.give_up()
                raise TeacherError(next(filter(None, errors)))
            if not any(pending):
                break
            if any(leaves):
                client.give_up()
                return False
            if trouble := next(filter(None, troubles), ""):
                said = True
                self.say(trouble)
        if said:
            self.say("")
        return True

    # ---- in the loss --------------------------------------------------------------------------------------

    def more(self, batch: MicroBatch) -> More | None:
        """Return what the policy's forward computes for `teach`, of tokens of taught samples alone; None: nothing."""
        wanted = [
            (teaching, rows, _places(batch, rows))
            for teaching in self._all
            if teaching.teacher.loss in DIVERGENCES and (rows := _rows(batch, teaching.logprobs))
        ]
        if not wanted:
            return None
        positions = batch.of_piece(torch.arange(len(batch.labels), device=batch.labels.device))

        def compute(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
            losses = []
            for teaching, rows, places in wanted:
                here = torch.isin(places, positions)
                at = torch.searchsorted(positions, places[here])
                loss = self._divergence(teaching, rows, here, hidden.index_select(0, at), head)
                losses.append(loss.new_zeros(len(hidden)).index_add(0, at, loss))
            return tuple(losses)

        return compute

    def _divergence(
        self, teaching: Teaching, rows: Sequence[int], here: Tensor, hidden: Tensor, head: Head
    ) -> Tensor:
        """Compute the losses of the tokens of these rows that are `here`, whose states are `hidden`."""

        def known(values: Mapping[int, Tensor]) -> Tensor:
            return on_device(torch.cat([values[row] for row in rows]), hidden.device)[here]

        if teaching.teacher.loss == "reverse_kl_full":
            assert teaching.head is not None
            return token_kl(hidden, head, Beside(known(teaching.hidden), teaching.head), self._temperature)
        ids = known({row: teaching.top[row].ids for row in rows})
        teacher_logprobs = known({row: teaching.top[row].logprobs for row in rows})
        policy_logprobs = logprobs_at(hidden, head, ids, self._temperature)
        return top_k_jsd(policy_logprobs, teacher_logprobs.to(policy_logprobs.dtype), teaching.teacher.beta)

    def teach(self, tokens: PolicyTokens, out: TokenOutputs, batch: MicroBatch) -> PolicyTokens:
        """The same tokens, with what the teachers add."""
        advantages, loss = tokens.advantages, torch.zeros_like(out.logprobs)
        computed = iter(out.more)
        for teaching in self._all:
            rows = _rows(batch, teaching.logprobs)
            if not rows:
                continue
            places, weight, kind = _places(batch, rows), teaching.teacher.weight, teaching.teacher.loss
            if kind in DIVERGENCES:
                loss = loss + weight * next(computed).to(loss.dtype)
                continue
            teacher_logprobs = torch.cat([teaching.logprobs[row] for row in rows]).to(out.logprobs)
            if kind == "reverse_kl_advantage":
                old_logprobs = tokens.old_logprobs[places].to(teacher_logprobs.dtype)
                added = reverse_kl_advantage(old_logprobs, teacher_logprobs)
                advantages = advantages.index_add(0, places, weight * added.to(advantages.dtype))
            else:
                added = reverse_kl_estimate(out.logprobs[places], teacher_logprobs, kind)
                loss = loss.index_add(0, places, weight * added)
        return replace(tokens, advantages=advantages, taught=loss) if self._all else tokens

    def metrics(self, samples: Mapping[int, TrainSample]) -> Metrics:
        """Return each teacher's means over tokens of log π − log q, π the policy that made them, and of log q; how
        many tokens. samples: those that this rank counts. A collective if there are teachers."""
        if not self._all:
            return {}
        sums: list[float] = []
        for teaching in self._all:
            judged = {row: values.double() for row, values in teaching.logprobs.items() if row in samples}
            teacher_logprobs = [*judged.values()]
            gaps = [samples[row].learned_logprobs.double() - values for row, values in judged.items()]
            sums += [math.fsum(float(v.sum()) for v in values) for values in (gaps, teacher_logprobs)]
            sums.append(float(sum(len(v) for v in teacher_logprobs)))
        total = iter(self._trainer.group.all_reduce(sums, "sum"))
        metrics: Metrics = {}
        for teaching in self._all:
            gap, logprob, n = (next(total) for _ in range(3))
            name = f"teacher/{teaching.teacher.name}"
            metrics |= {f"{name}/kl": gap / n, f"{name}/logprob": logprob / n} if n else {}
            metrics[f"{name}/tokens"] = n
        return metrics


def tokenizer_of(config: Config) -> Callable[[str], list[int]]:
    """How the policy's tokenizer cuts a text. Raises `SettingsError`: it cannot be loaded."""
    try:
        tokenizer = policy_tokenizer(config.policy)
    except TokenizerError as error:
        raise SettingsError(str(error)) from error
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def taught(plan: Sequence[MiniBatch], teaches: Sequence[bool]) -> list[MiniBatch]:
    """A plan without the rows that are not taught."""
    return [
        replace(part, ranks=[[[row for row in rows if teaches[row]] for rows in rank] for rank in part.ranks])
        for part in plan
        if any(teaches[row] for rank in part.ranks for rows in rank for row in rows)
    ]


def _source(table: StepTable, row: int) -> str:
    return table.source[row] if table.source else ""


def _rows(batch: MicroBatch, known: Mapping[int, Any]) -> list[int]:
    """Return the rows of a batch of which something is known, in its order."""
    return [row for row in batch.rows if row in known]


def _places(batch: MicroBatch, rows: Sequence[int]) -> Tensor:
    """Which of the batch's K tokens are of these rows, in order."""
    chosen = set(rows)
    of_samples = torch.tensor([row in chosen for row in batch.rows], device=batch.sample.device)
    return of_samples[batch.sample].nonzero()[:, 0]


def _key(teacher: TeacherConfig) -> str | None:
    if teacher.key_variable is None:
        return None
    value = os.environ.get(teacher.key_variable)
    if not value:
        raise TeacherError(f"teacher {teacher.name}: the variable {teacher.key_variable} (key_variable) is not set")
    return value
