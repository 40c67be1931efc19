"""A real controller served over HTTP by a thread of the test: starts in no time, and its clock can be moved."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from controller.api.app import create_app
from controller.api.connections import PatientProtocol
from controller.api.limits import BodyLimit
from controller.client import Client
from controller.server import ServerSettings, write_address
from controller.services.controller import Controller
from controller.state.job import JobState
from controller.store import StateStore
from controller.store.lock import steady_clock
from tests.support.controller import TOKENS
from tests.support.waiting import PATIENCE

T = TypeVar("T")


class ServedController:
    """One controller in a thread. `skip` moves its clock, `call` runs something in its event loop."""

    def __init__(self, run_dir: Path, redis_url: str, skipped: float = 0.0) -> None:
        self._run_dir, self._redis_url = run_dir, redis_url
        self._skipped = skipped
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.controller: Controller

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    async def _start(self) -> None:
        environ = {f"COSMOS_TOKEN_{role.upper()}": token for role, token in TOKENS.items()}
        environ["COSMOS_REDIS_URL"] = self._redis_url
        settings = ServerSettings.read(self._run_dir, None, 0, environ)
        store, saved = await StateStore.open(
            settings.redis_url,
            prefix=settings.config.redis.key_prefix,
            job_id=settings.job_id,
            lock_seconds=settings.config.controller.lock_timeout,
        )
        steady = steady_clock()
        job = JobState(
            settings.config,
            job_id=settings.job_id,
            run_dir=self._run_dir,
            store=store,
            saved=saved,
            clock=lambda: steady() + self._skipped,
        )
        job.forgive_downtime(store.alive_at)
        job.took_charge()
        await job.save()
        write_address(settings, settings.url(0))
        self.controller = Controller.of(job)
        self.controller.events.start()
        await self.controller.samples.restore()
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._app = create_app(self.controller, settings.tokens)
        options = uvicorn.Config(
            self._app, lifespan="off", log_config=None, access_log=False,
            timeout_graceful_shutdown=2, http=PatientProtocol,
        )  # fmt: skip
        self._server = uvicorn.Server(options)
        self._serving = asyncio.create_task(self._server._serve([self._listener]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)

    def restart(self) -> None:
        """End it and start another one of the same job at the same address."""
        port = self._port
        self.stop()
        self.__init__(self._run_dir, self._redis_url, self._skipped)  # type: ignore[misc]
        self._port = port
        self.start()

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _stop(self) -> None:
        self.controller.job.close()
        self._server.should_exit = True
        await self._serving
        await self.controller.events.stop()
        await self.controller.job.store.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the controller's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def call(self, work: Callable[[], T]) -> T:
        async def inside() -> T:
            return work()

        return self.run(inside())

    def skip(self, seconds: float) -> None:
        """Let time pass: the clock jumps, and what happens by itself happens."""
        self._skipped += seconds
        self.run(self.controller.reaper.tick())

    @property
    def job(self) -> JobState:
        return self.controller.job

    @property
    def body_limit(self) -> BodyLimit:
        """The limit on bodies in front of the routes."""
        return self._app._app._app._app  # type: ignore[no-any-return,attr-defined]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def client(self, role: str = "user", patience: float = 0.0) -> Client:
        return Client(self.url, TOKENS[role], patience=patience)


@contextmanager
def served_controller(run_dir: Path, redis_url: str, skipped: float = 0.0) -> Iterator[ServedController]:
    """A controller for the duration of a block, with its clock `skipped` seconds ahead."""
    served = ServedController(run_dir, redis_url, skipped)
    try:
        served.start()
        yield served
    finally:
        served.stop()
