"""From the engine to the pusher: finished samples are decoded to text, scored, and made into what travels."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_worker import ranges
from rollout_worker.engines.base import Engine, Generation
from rollout_worker.groups.leasing import Leasing
from rollout_worker.groups.pushing import NOTHING, Pusher, to_sample
from rollout_worker.groups.tokens import TextKeeper, texts, tokens_at
from rollout_worker.lease_table import HeldGroup, LeaseTable
from rollout_worker.rewards.pool import RewardPool, RewardResult, Task
from rollout_worker.rewards.scoring import OVERLONG, overlong_penalty, parts_of, score_of
from schema.config import Config
from schema.wire.messages import LeasedGroup
from schema.wire.messages.leases import purpose_of
from schema.wire.sample import Ending, FinishReason, Sample

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between looks for samples that are overdue, at most."""
ENDINGS: dict[FinishReason, Ending] = {
    "stop": "finished",
    "length": "truncated",
    "overlong": "truncated",
    "abort": "aborted",
}
"""How a sample ended that was scored, by why its generation did."""


class GenerationPipeline:
    """Collects what the engine finishes and sends it through the rewards."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        tokenizer: Any,
        leases: LeaseTable,
        leasing: Leasing,
        rewards: RewardPool,
        pusher: Pusher,
    ) -> None:
        self._config, self._engine, self._tokenizer, self._leases = config, engine, tokenizer, leases
        self._leasing, self._rewards, self._pusher = leasing, rewards, pusher
        unnamed = config.validation.reward_weights or config.training_reward_weights
        by_label = {"": unnamed, **config.validation_rewards}  # "": data that an earlier version has prepared
        validated = {purpose_of("validation", label): weights for label, weights in by_label.items()}
        self._weights = {"train": config.training_reward_weights, **validated}
        self._names = {purpose: tuple(weights) for purpose, weights in self._weights.items()}
        self._texts = TextKeeper(config, tokenizer, self._weights)

    async def run(self) -> None:
        """For ever. Raises `EngineError`."""
        while True:
            samples = await self._engine.collect()
            for sample in samples:
                self._leasing.generating.piece(sample.request_id)
            self._leasing.look_again()
            self._score(samples)

    async def end_overdue(self) -> None:
        """For ever: what is not generated within `rollout.sample_timeout` ends as an error, never as an answer."""
        timeout = self._config.rollout.sample_timeout
        while timeout is not None:
            await asyncio.sleep(min(LOOK_S, timeout / 4))
            for request, group, indices in self._leases.overdue(time.monotonic() - timeout):
                self._engine.abort([request])
                self._leasing.generating.drop([request])
                error = f"SampleTimeout: not generated within rollout.sample_timeout = {timeout:g} s"
                for index in indices:
                    kept = self._texts.text(group.lease, NOTHING, "", failed=True)
                    self._pusher.fail(group.lease, index, error, "deadline", kept)
                self._leasing.look_again()

    def _score(self, samples: list[Generation]) -> None:
        leases, settings = self._leases, self._leasing.settings
        known = [
            (sample, request)
            for sample in samples
            if (request := leases.request(sample.request_id)) and request[1][sample.index] in request[0].open
        ]
        answers = texts(
            self._tokenizer,
            [sample for sample, _ in known],
            [settings[group.lease.purpose] for _, (group, _) in known],
        )
        for (sample, (group, indices)), text in zip(known, answers, strict=True):
            lease = group.lease
            leases.generated(sample.request_id, indices[sample.index])
            future = self._rewards.submit(Task(text, lease.row, self._names[lease.purpose]))
            future.add_done_callback(ranges.ending("score"))
            index, began = indices[sample.index], time.monotonic()
            future.add_done_callback(partial(self._push, group, index, sample, text, began=began))

    def _push(
        self,
        group: HeldGroup,
        index: int,
        sample: Generation,
        text: str,
        future: Future[RewardResult],
        *,
        began: float,
    ) -> None:
        """The rewards of a sample are there. (When the pool has failed, `RewardPool.watch` raises.)"""
        lease = group.lease
        if future.cancelled() or future.exception() or self._leases.get(lease.lease_id) is not group:
            return
        try:
            seconds = time.monotonic() - began
            self._pusher.add(lease, self._made(lease, index, sample, text, seconds, future.result()))
        except Exception as error:  # a callback's error is lost, and the group would be held for ever
            log.exception("sample %d of group %s cannot be made", index, lease.group_id)
            self._pusher.fail(lease, index, f"{type(error).__name__}: {error}")

    def _made(
        self, lease: LeasedGroup, index: int, sample: Generation, text: str, seconds: float, result: RewardResult
    ) -> Sample:
        config, limit = self._config, self._leasing.settings[lease.purpose].max_tokens
        rewards = dict(result.rewards)
        if lease.kind == "train" and (overlong := config.grpo.overlong_reward).enable_overlong_penalty:
            rewards[OVERLONG] = overlong_penalty(len(sample.token_ids), limit, overlong)
        score, error = score_of(rewards, self._weights[lease.purpose], result.error)
        reason = finish_reason(sample, len(lease.prompt_token_ids), limit, config.policy.model_max_length)
        sent = None if config.is_grpo and config.grpo.rollout_as_token_ids else text
        judged = {
            "rewards": rewards,
            "score": score,
            "outage": result.outage,
            "ending": "reward_error" if error is not None else ENDINGS[reason],
            "seconds": round(seconds, 4),
            "answer": result.answer if lease.kind == "validation" else None,
        }
        kept = self._texts.text(lease, sample, text, failed=error is not None)
        scored_sample = to_sample(lease, index, sample, reason, error=error, text=sent, kept=kept, **judged)
        if result.parts and score is not None and lease.kind == "train":
            scored_sample.part_positions, scored_sample.part_values = self._parts(lease, sample, result)
        return scored_sample

    def _parts(
        self, lease: LeasedGroup, sample: Generation, result: RewardResult
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """At which tokens of a sample, prompt included, parts of its score were earned, and these parts."""
        ids, located = sample.token_ids.tolist(), parts_of(result.parts, self._weights[lease.purpose])
        summed: dict[int, float] = {}
        for token, value in zip(tokens_at(self._tokenizer, ids, located), located.values(), strict=True):
            summed[token] = summed.get(token, 0.0) + value
        positions = len(lease.prompt_token_ids) + np.array(sorted(summed), np.int32)
        return positions.astype(np.int32), np.array([summed[token] for token in sorted(summed)], np.float32)


def finish_reason(sample: Generation, prompt_tokens: int, max_tokens: int, model_max_length: int) -> FinishReason:
    """Why a sample ended. `overlong`: it is longer than training allows, or was ended by the longest sequence
    of model or engine before its own limit: never cut in silence."""
    tokens = len(sample.token_ids)
    ended_early = sample.finish_reason == "length" and tokens < max_tokens
    if ended_early or prompt_tokens + tokens > model_max_length:
        return "overlong"
    return sample.finish_reason
