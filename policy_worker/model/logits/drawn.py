"""The distribution that K tokens were drawn from, where that is not the softmax of the model's logits over T.

    z = (m(x) − f n − p 1[n > 0]) / T,  −∞ outside of what could be drawn       log π = log softmax z

    m(x) = x / r for x > 0 and x r otherwise, of ids that the prompt or the answer so far has; else x
    n: how often the answer so far has the id

r, f, p: penalties of repetition, frequency and presence. What could be drawn: the engine's own kept set after min-p,
top-k and top-p, without the ids that end an answer before `min_tokens`. The order is the engines'
(`rollout_worker.engines.base`). Every pass uses it, so ratios and KL terms compare distributions of the same support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from policy_worker.errors import BadBatchError, SettingsError
from schema.config import Config

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Reshaping:
    """The changes of the distribution, from the configuration. filters: whether samples bring kept sets."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_tokens: int = 0
    filters: bool = False

    @staticmethod
    def of_config(config: Config) -> Reshaping:
        """Nothing in SFT, and where the configuration wants no correction."""
        sampling = config.rollout.sampling_config
        if not config.is_grpo or sampling.sampling_correction == "raw":
            return Reshaping()
        return Reshaping(
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            min_tokens=sampling.min_tokens,
            filters=sampling.filters,
        )

    @property
    def counts_answer(self) -> bool:
        return self.presence != 0.0 or self.frequency != 0.0


class KeptSets(NamedTuple):
    """For each of n tokens how many ids it was drawn from (0: all there are), int32 [n], and these ids."""

    counts: Ints
    ids: Ints


class AnswerSpan(NamedTuple):
    """Tokens `first` to `last` of the K: one uninterrupted answer; its prompt and itself in `Drawn.ids`.

    begin: where among the K it would begin if all of it were there: `first`, or before. held: ids that may not be
    among its first `min_tokens`."""

    first: int
    last: int
    begin: int
    prompt_start: int
    start: int
    held: Tensor | None


@dataclass(frozen=True)
class Drawn:
    """See the module's docstring. K tokens; N entries of kept sets.

    ids: int64, the tokens of prompts and answers. kept_ids, kept_rows: int64 [N], an id and which of the K tokens may
    be it. starts: int64 [K + 1], where the entries of each begin. whole: bool [K], tokens that may be any id.
    first_id: what the first column of the logits is of; see `among`."""

    reshaping: Reshaping
    answers: Sequence[AnswerSpan]
    ids: Tensor
    kept_ids: Tensor
    kept_rows: Tensor
    starts: npt.NDArray[np.int64]
    whole: Tensor
    first_id: int = 0

    def among(self, first: int, count: int) -> Drawn:
        """The same for logits of `count` ids from `first` on."""

        def held_here(answer: AnswerSpan) -> AnswerSpan:
            if answer.held is None:
                return answer
            places, here = places_of(answer.held, first, count)
            return answer._replace(held=places[here])

        kept_ids, here = places_of(self.kept_ids, first, count)
        before = torch.cat([here.new_zeros(1, dtype=torch.int64), here.cumsum(0)]).cpu().numpy()
        return replace(
            self,
            answers=[held_here(answer) for answer in self.answers],
            kept_ids=kept_ids[here],
            kept_rows=self.kept_rows[here],
            starts=before[self.starts],
            first_id=first,
        )

    @property
    def matrices(self) -> int:
        """How many matrices of the shape of the logits `apply` needs next to them."""
        reshaping = self.reshaping
        return (reshaping.repetition != 1.0) + reshaping.counts_answer + reshaping.filters

    def of_tokens(self, tokens: npt.NDArray[np.int64]) -> Drawn:
        """The same of some of the K tokens, in host memory: rising, and of each answer an uninterrupted part."""
        counts = np.diff(self.starts)[tokens]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        entries = np.repeat(self.starts[tokens] - starts[:-1], counts) + np.arange(starts[-1])
        answers = []
        for answer in self.answers:
            first, last = np.searchsorted(tokens, (answer.first, answer.last)).tolist()
            if first < last:
                begin = first - int(tokens[first] - answer.begin)
                answers.append(answer._replace(first=first, last=last, begin=begin))
        return replace(
            self,
            answers=answers,
            kept_ids=self.kept_ids[torch.from_numpy(entries)],
            kept_rows=torch.from_numpy(np.repeat(np.arange(len(tokens)), counts)),
            starts=starts,
            whole=self.whole[torch.from_numpy(tokens)],
        )

    def apply(self, logits: Tensor, first: int, temperature: float, with_slope: bool) -> Tensor | None:
        """Turn logits [c, V] of the tokens from `first` on into z, in place.

        Returns: ∂z/∂x T where it is asked for and is not 1 everywhere, [c, V]."""
        reshaping, rows, slope = self.reshaping, slice(first, first + len(logits)), None
        self._forbid_ends(logits, rows)
        if reshaping.repetition != 1.0:
            seen = self._counts(logits, rows, with_prompt=True) > 0
            ones = torch.ones_like(logits)
            factor = torch.where(
                seen, torch.where(logits > 0, ones / reshaping.repetition, ones * reshaping.repetition), ones
            )
            logits.mul_(factor)
            slope = factor if with_slope else None
        if reshaping.counts_answer:
            counts = self._counts(logits, rows, with_prompt=False).to(logits.dtype)
            logits.sub_(counts * reshaping.frequency).sub_((counts > 0).to(logits.dtype) * reshaping.presence)
        if temperature != 1.0:
            logits.div_(temperature)
        if reshaping.filters:
            begin, end = int(self.starts[rows.start]), int(self.starts[rows.stop])
            outside = ~self.whole[rows, None].expand_as(logits)
            outside[self.kept_rows[begin:end] - first, self.kept_ids[begin:end]] = False
            logits.masked_fill_(outside, -torch.inf)
        return slope

    def _forbid_ends(self, logits: Tensor, rows: slice) -> None:
        for answer in self.answers:
            first = max(answer.first, rows.start)
            last = min(answer.last, answer.begin + self.reshaping.min_tokens, rows.stop)
            if answer.held is not None and first < last:
                logits[first - rows.start : last - rows.start].index_fill_(1, answer.held, -torch.inf)

    def _counts(self, logits: Tensor, rows: slice, *, with_prompt: bool) -> Tensor:
        """How often each id precedes each of these tokens in its answer, and in its prompt too if asked for.

        int32 [c, V]: integers add up to the same in any order, on a GPU too."""
        counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        for answer in self.answers:
            first, last = max(answer.first, rows.start), min(answer.last, rows.stop)
            if first >= last:
                continue
            begin = answer.prompt_start if with_prompt else answer.start
            at = answer.start + first - answer.begin
            ids = self.ids[begin : at + last - first - 1]
            places, here = places_of(ids, self.first_id, logits.shape[1])
            # What precedes the first of the rows counts from there on, each of the rows from the next one on.
            row = torch.arange(begin - at + 1, last - first, device=ids.device).clamp_(min=0)
            part = counts[first - rows.start : last - rows.start]
            part.index_put_((row, places), here.to(torch.int32), accumulate=True)
            part.cumsum_(0)
        return counts


def places_of(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Where ids are among `count` from `first` on (0: elsewhere), and which are there."""
    places = ids - first
    here = (places >= 0) & (places < count)
    return places.where(here, 0), here


@dataclass(frozen=True)
class DrawnContext:
    """One segment as `drawn_of` needs it: its sample's row, its tokens, the positions of those that are learned
    (rising), their kept sets, and the ids held back at the beginning of an answer."""

    row: int
    token_ids: Ints
    learned: npt.NDArray[np.int64]
    kept: KeptSets | None
    held: Ints | None


def drawn_of(contexts: Sequence[DrawnContext], reshaping: Reshaping, vocabulary: int) -> Drawn | None:
    """Describe what the learned tokens of these segments were drawn from, in host memory; None: the softmax alone.

    Raises `BadBatchError`: a sample has a token that could not be drawn; `SettingsError`: a sample lacks its kept
    sets, or they have ids that the model does not know."""
    contexts = [context for context in contexts if len(context.learned)]
    if reshaping == Reshaping() or not contexts:
        return None
    answers: list[AnswerSpan] = []
    first = offset = 0
    counts, kept_ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for context in contexts:
        if reshaping.filters and context.kept is None:
            raise SettingsError(
                f"sample {context.row} does not say which ids its tokens were drawn from, as top_p, top_k and min_p "
                f"of rollout.sampling_config need it: it was made with other settings; start anew, or write "
                f"those that the run began with"
            )
        sets = context.kept if reshaping.filters else None
        counts.append(np.zeros(len(context.learned), np.int64) if sets is None else sets.counts.astype(np.int64))
        if sets is not None:
            kept_ids.append(sets.ids.astype(np.int64))
        for run in np.split(context.learned, np.flatnonzero(np.diff(context.learned) > 1) + 1):
            held = _held(context, run, reshaping.min_tokens, vocabulary)
            held_ids = None if held is None else torch.from_numpy(held.astype(np.int64))
            last = first + len(run)
            answers.append(AnswerSpan(first, last, first, offset, offset + int(run[0]), held_ids))
            first = last
        offset += len(context.token_ids)
    all_counts, ids = np.concatenate(counts), np.concatenate(kept_ids)
    if len(ids) and ids.max() >= vocabulary:
        raise SettingsError(
            f"tokens were drawn from sets with the id {ids.max()}, and the model has embeddings for 0 to "
            f"{vocabulary - 1}: policy.model_name_or_path has a tokenizer of another model"
        )
    rows = np.repeat(np.arange(len(all_counts)), all_counts)
    return Drawn(
        reshaping,
        answers,
        ids=torch.from_numpy(np.concatenate([c.token_ids for c in contexts]).astype(np.int64)),
        kept_ids=torch.from_numpy(ids),
        kept_rows=torch.from_numpy(rows),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(all_counts)]),
        whole=torch.from_numpy(all_counts == 0),
    )


def _held(context: DrawnContext, run: npt.NDArray[np.int64], min_tokens: int, vocabulary: int) -> Ints | None:
    """The ids that may not be among an answer's first tokens, and are not. Raises `BadBatchError`."""
    if context.held is None or not min_tokens:
        return None
    early = context.token_ids[run[:min_tokens]]
    wrong = np.flatnonzero(np.isin(early, context.held))
    if len(wrong):
        raise BadBatchError(
            f"sample {context.row} has the token {early[wrong[0]]} at place {wrong[0]} of its answer, where "
            f"rollout.sampling_config.min_tokens = {min_tokens} forbids it"
        )
    return context.held[context.held < vocabulary]
