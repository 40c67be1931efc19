"""The rollout replica as a whole: one asyncio program of a few loops around an engine.

    controller ◀── Heartbeat ─── leases held, numbers                     everything below ends
    controller ──▶ WeightFollower ─▶ engine.load_weights                  when one loop fails
    controller ──▶ Leasing ─▶ engine.submit                               or ShutdownRequest is asked
    engine.collect ─▶ GenerationPipeline ─▶ RewardPool ─▶ Pusher ─▶ controller

The state between the loops is `LeaseTable`: the groups under lease. Leaving: no more leases; running samples may end
if there is time (drain); what is finished is pushed; the controller is informed, and takes back all that is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from controller.client import AsyncClient, ControllerError
from rollout_worker.engines import create_engine
from rollout_worker.engines.base import Engine
from rollout_worker.engines.vllm.nodes import nodes_of
from rollout_worker.groups.leasing import Leasing
from rollout_worker.groups.local_rows import LocalRows
from rollout_worker.groups.pipeline import GenerationPipeline
from rollout_worker.groups.pushing import Pusher, shared_payloads
from rollout_worker.groups.time_share import TimeShare
from rollout_worker.groups.tokens import eos_token_ids, import_modules, load_tokenizer, refuse_models, stop_tokens
from rollout_worker.heartbeat import Heartbeat
from rollout_worker.lease_table import LeaseTable
from rollout_worker.metrics import Metrics
from rollout_worker.rewards.pool import RewardPool
from rollout_worker.session import Session
from rollout_worker.shutdown import UNTIL_REGISTERED, LeavingTimes, ShutdownRequest, leaving_times
from rollout_worker.weights.follower import WeightFollower
from rollout_worker.weights.host_weights import HostWeights
from schema.config import Config
from schema.wire.messages import RegisterReply

log = logging.getLogger(__name__)

REGISTER_PATIENCE = 60.0
"""Seconds to wait for a controller that does not answer before its configuration says how long."""
REGISTER_SILENCE = 3.0
"""Seconds without an answer after which that is said."""
_FIRST = asyncio.FIRST_COMPLETED
LOOK_S = 0.02
"""How often a draining replica looks whether everything is pushed."""


class Worker:
    """One life of a replica, from registration to leaving. `shutdown` is how to ask it to leave.

    secret: of an earlier life under the same name, whose place is taken at once; "": a new one.
    """

    def __init__(self, url: str, token: str, name: str, parent: int | None, secret: str = "") -> None:
        secret = secret or secrets.token_urlsafe(32)
        self._client = AsyncClient(url, token, patience=REGISTER_PATIENCE, secret=secret)
        self._parent = parent
        self._leases, self._metrics = LeaseTable(), Metrics()
        self.shutdown = ShutdownRequest()
        self._session = Session(self._client, name, self._leases, parent)
        self._heartbeat = Heartbeat(self._session, self._leases, self._metrics, self.shutdown, parent)
        self._tasks: list[asyncio.Task[None]] = []
        self._anything_ended = asyncio.Event()
        """A loop may begin, and fail, while others are waited for."""
        self._booted = False
        self.times: LeavingTimes = leaving_times(UNTIL_REGISTERED)
        self.on_config: Callable[[Config], None] = lambda config: None
        """Called when the configuration has come with the registration."""

    async def run(self) -> None:
        """Work until asked to leave. Raises what `__main__` gives exit codes to."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._client.close)
            reply = await self._register()
            if reply is None:
                return
            try:
                config = Config.model_validate(reply.config)
                self._client.patience = config.controller.controller_lost_timeout
                self.times = leaving_times(config.launcher.shutdown_timeout)
                self.on_config(config)
                self._spawn(self._heartbeat.run(), "heartbeat")
                await self._until_shutdown(self._work(config, stack))
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._leave()

    async def _register(self) -> RegisterReply | None:
        """Register; None when asked to leave while the controller does not answer yet."""
        registering = asyncio.create_task(self._session.register())
        asked = asyncio.create_task(self.shutdown.wait())
        try:
            pause = REGISTER_SILENCE
            while not (await asyncio.wait((registering, asked), timeout=pause, return_when=_FIRST))[0]:
                if trouble := self._client.trouble:
                    log.warning(
                        "no answer from a controller at %s (%s): is COSMOS_CONTROLLER_URL right, and does this "
                        "machine reach it? Trying for %.0f s in all",
                        ", ".join(self._client.urls),
                        trouble,
                        REGISTER_PATIENCE,
                    )
                pause = 3 * REGISTER_SILENCE
            return await registering if registering.done() else None
        finally:
            for task in (registering, asked):
                task.cancel()
            await asyncio.gather(registering, asked, return_exceptions=True)

    async def _work(self, config: Config, stack: contextlib.AsyncExitStack) -> None:
        """Boot, then run all loops until asked to leave."""
        # Before the engine, which takes minutes: a reward function that cannot be had is known in a second.
        rewards = reward_pool(config)
        stack.push_async_callback(rewards.close)
        await rewards.start()
        nodes = nodes_of(os.environ)
        if nodes is not None:
            stack.enter_context(nodes.own_folder())
        host = HostWeights(config, self._session.reply, "" if nodes is None else str(nodes.folder))
        stack.push_async_callback(host.close)
        await host.prove()
        time_share = TimeShare(self._session, self._leases, self._metrics, self._heartbeat)
        if config.shares_time:
            await time_share.begin()
        engine, tokenizer, stops = await self._boot(config, stack)
        pusher = Pusher(
            self._session,
            self._leases,
            config.controller.max_request_bytes,
            shared_payloads(config, self._session.reply.job_id),
        )
        reply = self._session.reply
        rows = await asyncio.to_thread(LocalRows.of, reply, Path(reply.run_dir))
        weights = WeightFollower(config.weight_sync, self._session, engine, host, self._leases, self._metrics)
        leasing = Leasing(
            config, self._session, engine, self._leases, weights, pusher, self.shutdown, self._metrics, rows, stops
        )
        generating = GenerationPipeline(config, engine, tokenizer, self._leases, leasing, rewards, pusher)
        self._metrics.rewards = rewards.stats
        self._connect(engine, weights, leasing, pusher)
        for loop, name in (
            (weights.follow(), "publications"),
            (weights.update(), "weights"),
            (weights.reports.run(), "reports of weights"),
            (generating.run(), "generating"),
            *([(generating.end_overdue(), "deadlines")] if config.rollout.sample_timeout else []),
            (pusher.run(), "pushing"),
            (rewards.watch(), "rewards"),
            *([(time_share.run(engine), "turns")] if config.shares_time else []),
        ):
            self._spawn(loop, name)
        self._heartbeat.status, self._booted = "waiting for weights", True
        await leasing.run()
        await self._finish(config, engine, pusher)

    async def _boot(self, config: Config, stack: contextlib.AsyncExitStack) -> tuple[Engine, Any, dict[int, str]]:
        """The engine, the tokenizer, and the stop strings that are special tokens."""
        began, model = time.monotonic(), config.policy
        await asyncio.to_thread(import_modules, model)
        await asyncio.to_thread(refuse_models, config)
        tokenizer = await asyncio.to_thread(load_tokenizer, model)
        stops = stop_tokens(config, tokenizer)
        ends = await asyncio.to_thread(eos_token_ids, model, tokenizer)
        engine = await asyncio.to_thread(create_engine, config, tokenizer, ends)
        stack.push_async_callback(engine.close)
        await engine.start()
        self._heartbeat.engine = engine
        log.info("%s is ready after %.1f s", engine.name, time.monotonic() - began)
        return engine, tokenizer, stops

    def _connect(self, engine: Engine, weights: WeightFollower, leasing: Leasing, pusher: Pusher) -> None:
        """Connect the parts: who is called of what."""

        def pushed() -> None:
            weights.look_again()
            leasing.look_again()

        def changed() -> None:
            if weights.current is not None:
                self._heartbeat.status = engine.name

        self._heartbeat.weights = weights
        pusher.on_pushed = pushed
        pusher.on_lost = self._heartbeat.on_lost = leasing.forget
        weights.on_change(changed)

    # ---- the end ------------------------------------------------------------------------------------------

    async def _until_shutdown(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work. The first loop that fails ends it; who is asked to leave while booting just leaves."""
        main = self._spawn(work, "work")
        asked = asyncio.create_task(self.shutdown.wait())
        asked.add_done_callback(self._note_end)
        try:
            while not main.done():
                await self._anything_ended.wait()
                self._anything_ended.clear()
                if asked.done() and not self._booted:
                    return
                for task in self._tasks:
                    if task.done() and task is not main:
                        task.result()
                        raise RuntimeError(f"the loop {task.get_name()!r} ended by itself")
        finally:
            asked.cancel()
        main.result()

    async def _finish(self, config: Config, engine: Engine, pusher: Pusher) -> None:
        """After the last lease: let samples end while there is time, then push what is finished."""
        self._heartbeat.status = "draining"
        if self.shutdown.kind == "drain":
            log.info(
                "draining: %d samples of %d groups may end within %.0f s (launcher.shutdown_timeout = %g)",
                self._leases.samples,
                len(self._leases),
                self.times.finish,
                config.launcher.shutdown_timeout,
            )
            urgent = asyncio.create_task(self.shutdown.wait_urgent())
            give_up = time.monotonic() + self.times.finish
            while len(self._leases) and time.monotonic() < give_up and not urgent.done():
                await asyncio.wait([urgent], timeout=LOOK_S)
            urgent.cancel()
        if len(self._leases):
            log.info(
                "%d samples of %d groups are given back unfinished: others make them from the same seeds",
                self._leases.samples,
                len(self._leases),
            )
        engine.abort(self._leases.requests)
        if self.shutdown.kind != "finished":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.times.push):
                    await pusher.flush()

    async def _leave(self) -> None:
        """Say good-bye, whatever happened; a controller that does not answer will notice by itself."""
        reason = self.shutdown.reason or "error"
        try:
            async with asyncio.timeout(self.times.goodbye):
                await self._session.leave(reason)
        except (ControllerError, TimeoutError) as error:
            log.warning("the controller could not be informed that this replica leaves: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._note_end)
        self._tasks.append(task)
        return task

    def _note_end(self, _: asyncio.Task[None]) -> None:
        self._anything_ended.set()


def reward_pool(config: Config) -> RewardPool:
    """The processes that run the reward functions of training and validation, not started yet."""
    functions = {*config.training_reward_weights, *config.validation.reward_weights, *config.validation_reward_names}
    return RewardPool(functions, config.custom, config.reward)
