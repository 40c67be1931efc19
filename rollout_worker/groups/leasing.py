"""Leasing: asks for groups whenever the engine has room, and puts them into it.

What the controller answers, and what happens then:

    granted            groups go to the engine; those that cannot be generated are pushed as errors
    throttled, paused  asked again (the controller holds the question open while nothing changes)
    update             wait until newer weights are in use
    draining           drain;   finished  leave
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from controller.client import calls as api
from rollout_worker.engines.base import Engine, GenerationRequest, SamplingSettings
from rollout_worker.groups.local_rows import LocalRows
from rollout_worker.groups.pushing import Pusher
from rollout_worker.lease_table import HeldGroup, LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.ranges import OpenRanges
from rollout_worker.session import Session
from rollout_worker.shutdown import ShutdownRequest
from rollout_worker.weights.follower import WeightFollower
from schema.config import Config
from schema.wire.messages import LeasedGroup, LeaseReply, LeaseRequest, LeaseStatus
from schema.wire.messages.leases import purpose_of
from schema.wire.prompts import PromptFileError
from schema.wire.weights import Publication

log = logging.getLogger(__name__)

POLL_S = 20.0
PAUSE_S = 0.05
"""Between two questions: a controller that cannot hold them open (it is closing) is not flooded."""
LOOK_S = 1.0
"""How long to wait for an event that should come before looking again by oneself."""
MAX_GROUPS = 1024
"""Groups per lease request: an answer of a few megabytes at most."""
EMPTY_SHARE = 0.25
"""Share of the capacity that may stand empty for the sake of fewer, larger lease requests."""
BACKLOG = 3
"""Samples held in all (generated, scored and not pushed yet, too) may be this many times the capacity: when
rewards or the controller cannot keep up, leasing more would only let it grow old here."""


class Leasing:
    """The leasing loop, and which engine request belongs to which samples."""

    def __init__(
        self,
        config: Config,
        session: Session,
        engine: Engine,
        leases: LeaseTable,
        weights: WeightFollower,
        pusher: Pusher,
        shutdown: ShutdownRequest,
        metrics: Metrics,
        rows: LocalRows,
        stop_tokens: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """stop_tokens: stop strings that are special tokens, by id."""
        self._rows = rows
        self._opening: asyncio.Task[None] | None = None
        """Opens the rows that a lease has named."""
        self._config, self._session, self._engine, self._leases = config, session, engine, leases
        self._weights, self._pusher, self._shutdown, self._metrics = weights, pusher, shutdown, metrics
        self.settings: dict[str, SamplingSettings] = {
            "train": training_settings(config, stop_tokens),
            **{
                purpose_of("validation", label): validation_settings(config, stop_tokens, label)
                for label in ("", *config.validation.sets)  # "": data that an earlier version has prepared
            },
        }
        self._numbers = itertools.count()
        self.generating = OpenRanges("generate")
        self._look = asyncio.Event()
        self._interrupt = asyncio.Event()
        weights.on_change(self._weights_changed)

    def look_again(self) -> None:
        """The engine or the backlog has become smaller."""
        self._look.set()

    def _weights_changed(self) -> None:
        self._look.set()
        self._interrupt.set()

    async def run(self) -> None:
        """Until the replica is asked to leave."""
        while not self._shutdown.asked:
            publication, wanted = self._weights.current, self._wanted()
            if publication is None or wanted == 0:
                await self._wait()
                continue
            reply = await self._ask(publication, wanted)
            if reply is not None:
                await self._take(reply, publication)

    def _wanted(self) -> int:
        stats, rollout = self._engine.stats(), self._config.rollout
        return groups_to_lease(
            in_engine=stats.running + stats.waiting,
            held=self._leases.samples,
            capacity=self._engine.capacity,
            group_size=self._config.group_size,
            batch_size=rollout.batch_size,
        )

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._look.wait()
        self._look.clear()

    async def _wait_for_weights(self, publication_id: int) -> None:
        """Until newer weights are in use; not for ever, since a validation group may keep them from it."""
        current = self._weights.current
        if current is None or current.id < publication_id:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._interrupt.wait()
        else:  # what is in use is of a history that is gone, and the trainer has published nothing since
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, publication: Publication, wanted: int) -> LeaseReply | None:
        """One lease request, held open by the controller until it has an answer; None when leaving.

        When new weights come into use meanwhile, the open question is withdrawn. What it may have been granted
        at that moment is not lost: the same request id, sent again, gets the same groups.
        """
        self._interrupt.clear()
        request_id = secrets.token_hex(12)

        async def send(wait_s: float) -> LeaseReply:
            return await self._session.call(
                lambda session: api.lease(
                    LeaseRequest(
                        request_id=request_id,
                        replica_id=session.replica_id,
                        incarnation=session.incarnation,
                        version=publication.version,
                        publication_id=publication.id,
                        manifest_hash=publication.manifest_hash,
                        max_groups=wanted,
                        wait_s=wait_s,
                        reads=list(self._rows.digests.values()),
                    )
                )
            )

        asking = asyncio.create_task(send(POLL_S))
        signals = [asyncio.create_task(self._interrupt.wait()), asyncio.create_task(self._shutdown.wait())]
        try:
            await asyncio.wait([asking, *signals], return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return await asking
        finally:
            for task in (asking, *signals):
                task.cancel()
            await asyncio.gather(asking, *signals, return_exceptions=True)
        return None if self._shutdown.asked else await send(0.0)

    async def _take(self, reply: LeaseReply, weights: Publication) -> None:
        if reply.status is LeaseStatus.GRANTED:
            await self._accept(reply.groups, weights)
            if reply.rows_files:  # read whole, which takes its time: leases go on meanwhile
                self._opening = asyncio.create_task(self._open_rows(reply), name="prepared rows")
        elif reply.status is LeaseStatus.UPDATE:
            self._weights.look_again()
            await self._wait_for_weights(reply.update_to or 0)
        elif reply.status is LeaseStatus.DRAINING:
            self._shutdown.ask("drain", reply.reason or "the controller asked for it")
        elif reply.status is LeaseStatus.FINISHED:
            self._shutdown.ask("finished", reply.reason or "the job is finished")
        else:
            log.debug("%s: %s", reply.status.value, reply.reason)
            await asyncio.sleep(PAUSE_S)

    async def _open_rows(self, reply: LeaseReply) -> None:
        rows = await asyncio.to_thread(LocalRows.of, reply, Path(self._session.reply.run_dir))
        self._rows = rows if rows.digests else self._rows

    async def _accept(self, groups: list[LeasedGroup], weights: Publication) -> None:
        for lease in groups:
            if lease.pinned_version is not None and not self._weights.may_pin(lease.pinned_version):
                log.info("group %s is given back: it needs version %d", lease.group_id, lease.pinned_version)
                await self._release(lease.lease_id)
                continue
            try:
                whole = self._rows.fill(lease)
            except PromptFileError:
                await self._release(lease.lease_id)
                continue
            group = self._leases.add(whole, weights)
            if group is None:
                continue
            if whole.kind == "train":
                self._metrics.training_began(time.monotonic(), self._engine.stats())
            self._submit(group)

    def _submit(self, group: HeldGroup) -> None:
        """Put a group into the engine, or push it as errors if nothing can be generated from its prompt."""
        lease = group.lease
        fault = self._fault(lease)
        if fault is None:
            try:
                requests = self._requests(group)
                self._engine.submit(requests)
            except ValueError as error:
                fault = f"PromptInvalid: {error}"
            else:
                for request in requests:
                    self.generating.begin(request.request_id, len(request.seeds))
        if fault is not None:
            for index in sorted(group.open):
                self._pusher.fail(lease, index, fault)

    def _requests(self, group: HeldGroup) -> list[GenerationRequest]:
        """The engine requests of a group: one with all seeds, or one per sample (`n_generation_to_batch`).

        With `train.deterministic` samples that another replica has pushed already are computed along: the bits of
        the others depend on them. The greedy sample has the highest index, so it is the last of its request.
        """
        lease = group.lease
        settings = within(self.settings[lease.purpose], self._longest - len(lease.prompt_token_ids))
        whole = self._config.train.deterministic and not self._config.rollout.n_generation_to_batch
        indices = list(range(len(lease.seeds))) if whole else sorted(group.open)
        parts = [[index] for index in indices] if self._config.rollout.n_generation_to_batch else [indices]
        requests = []
        for part in parts:
            request_id = f"{lease.lease_id}/{next(self._numbers)}"
            self._leases.ask(request_id, group, part, time.monotonic())
            seeds = tuple(lease.seeds[index] for index in part)
            greedy = part[-1] == lease.greedy
            requests.append(GenerationRequest(request_id, lease.prompt_token_ids, seeds, settings, greedy))
        return requests

    def _fault(self, lease: LeasedGroup) -> str | None:
        """Why a prompt cannot be generated from, if so."""
        length, longest = len(lease.prompt_token_ids), self._longest
        if length == 0:
            return "PromptEmpty: the prompt has no tokens"
        if length >= longest:
            return (
                f"PromptTooLong: {length} tokens leave no room for an answer within {longest}: raise "
                "policy.model_max_length (or rollout.max_model_len), or leave such rows out"
            )
        return None

    @property
    def _longest(self) -> int:
        """Prompt and answer together in tokens: what is longer the engine cannot make or training does not take."""
        return min(self._engine.max_model_len, self._config.policy.model_max_length)

    async def _release(self, lease_id: str) -> None:
        await self._session.call(lambda _: api.release(lease_id))

    def forget(self, lease_ids: list[str]) -> None:
        """Stop working on groups whose leases are lost."""
        requests = self._leases.drop(lease_ids)
        self._engine.abort(requests)
        self.generating.drop(requests)
        self._pusher.drop(lease_ids)
        self._weights.look_again()
        self.look_again()


# ---- decisions ------------------------------------------------------------------------------------------------


def groups_to_lease(*, in_engine: int, held: int, capacity: int, group_size: int, batch_size: int) -> int:
    """How many groups to ask for now; 0: none.

    in_engine: samples in the engine, running or waiting. held: samples leased and not pushed. Asks for all that
    fits next to what the engine has, but not for less than `batch_size` groups at a time, unless that would let
    more than EMPTY_SHARE of the engine run dry first. An empty engine always gets at least one group.
    """
    if held >= BACKLOG * max(capacity, group_size):
        return 0
    room = max(capacity - in_engine, 0) // group_size
    if in_engine == 0:
        room = max(room, 1)
    least = min(batch_size, max(int(EMPTY_SHARE * capacity) // group_size, 1))
    return min(room, MAX_GROUPS) if room >= least else 0


def training_settings(config: Config, stop_tokens: Mapping[int, str] = MappingProxyType({})) -> SamplingSettings:
    """How training rollouts are drawn: `[rollout.sampling_config]` and the temperature of `train_policy`.

    stop_tokens: stop strings that are special tokens, by id; they are not looked for as text.
    """
    rollout, sampling = config.rollout, config.rollout.sampling_config
    return SamplingSettings(
        max_tokens=rollout.max_response_length,
        temperature=config.sampling_temperature,
        do_sample=sampling.do_sample,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop=tuple(string for string in sampling.stop if string not in stop_tokens.values()),
        stop_token_ids=tuple(sampling.stop_token_ids),
        stop_tokens=stop_tokens,
        include_stop_str_in_output=rollout.include_stop_str_in_output,
        extra=dict(sampling.extra),
        correction=sampling.sampling_correction if sampling.reshapes else "none",
        routing=config.grpo.routing_replay if config.is_grpo else "none",
    )


def within(settings: SamplingSettings, room: int) -> SamplingSettings:
    """The same settings with answers of `room` tokens at most."""
    return settings if settings.max_tokens <= room else replace(settings, max_tokens=room)


def validation_settings(
    config: Config, stop_tokens: Mapping[int, str] = MappingProxyType({}), label: str = ""
) -> SamplingSettings:
    """How validation answers are drawn: `[validation]` says how tokens are chosen, `[rollout]` when they end.

    A temperature of 0 is greedy decoding, where filters mean nothing. stop_tokens: see `training_settings`. label: of
    one of several sets, which may say otherwise.
    """
    validation = config.validation.of_set(label)
    greedy = validation.temperature == 0.0
    return replace(
        training_settings(config, stop_tokens),
        max_tokens=validation.max_response_length or config.rollout.max_response_length,
        temperature=validation.temperature,
        do_sample=True,
        top_p=1.0 if greedy or validation.top_p is None else validation.top_p,
        top_k=0 if greedy or validation.top_k is None else max(validation.top_k, 0),
        min_p=0.0,
        repetition_penalty=validation.repetition_penalty,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        correction="unread",
        routing="none",
    )
