"""The process around the controller: settings, socket, server, signals, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import uvicorn
from pydantic import ValidationError
from starlette.types import ASGIApp

from controller.api.app import create_app
from controller.api.auth import CALLERS, JobTokens
from controller.api.connections import PatientProtocol, connection_limit
from controller.api.leadership import FrontDoor
from controller.cancellation import end
from controller.services.controller import Controller
from controller.state.job import JobState
from controller.store import Fenced, Held, LockHolder, StateStore, StateStoreError, StoreUnavailable, UnsuitableServer
from schema.config import Config
from schema.util.atomic_file import write_text
from schema.util.threads import exit_after
from schema.util.tls import TlsFileError, server_context
from schema.wire.invalid import describe
from schema.wire.mixture import OtherSourcesError
from schema.wire.prompts import PromptFileError

log = logging.getLogger(__name__)

FENCED = 3
STORE_FAILED = 1
SHUTDOWN_SECONDS = 5
"""For requests that are under way; long-polls are ended at once."""
LEAVE_SECONDS = 60.0
"""More than calls, Redis and its file may take together: beyond it the process exits by force."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pauses between two calls of a replica, so that connections are used again."""
PARENT_CHECK = 1.0
GC_THRESHOLDS = 50_000, 20, 50
"""Collections are rare: hardly anything here is part of a cycle, and looking through a long queue takes time."""
ALWAYS = [("x-content-type-options", "nosniff")]
"""Headers of every answer: a sample's content is not a web page."""
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]")
"""The characters that a job id, which is part of every key in Redis, may not hold."""
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


class StartError(Exception):
    """The controller cannot start; the message says what to change."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything from outside: config, job id, addresses and secrets."""

    config: Config
    run_dir: Path
    job_id: str
    host: str
    port: int
    redis_url: str
    redis_password: str | None
    tokens: JobTokens
    parent_pid: int | None = None
    replace: bool = False
    """Take the job over from the controller in charge, instead of standing by."""

    @classmethod
    def read(
        cls, run_dir: Path, host: str | None, port: int | None, environ: Mapping[str, str], *, replace: bool = False
    ) -> Self:
        """From the run directory and the environment. Raises `StartError`."""
        config = _read_config(run_dir / "config.json")
        url = environ.get("COSMOS_REDIS_URL") or config.redis.url
        if not url:
            raise StartError("no Redis server is configured: set COSMOS_REDIS_URL (unix://…, redis://…) or redis.url")
        names = {caller: f"COSMOS_TOKEN_{caller.upper()}" for caller in CALLERS}
        missing = [name for name in names.values() if not environ.get(name)]
        if missing:
            raise StartError(f"no token: set {', '.join(missing)}")
        try:
            tokens = JobTokens({caller: environ[name] for caller, name in names.items()})
        except ValueError as error:
            raise StartError(str(error)) from None
        parent = environ.get("COSMOS_PARENT_PID", "")
        return cls(
            config=config,
            run_dir=run_dir,
            job_id=_job_id(run_dir),
            host=host or config.controller.host,
            port=config.controller.port if port is None else port,
            redis_url=config.redis.address(url),
            redis_password=environ.get("COSMOS_REDIS_PASSWORD") or None,
            tokens=tokens,
            parent_pid=int(parent) if parent.isdigit() else None,
            replace=replace,
        )

    def url(self, port: int) -> str:
        """Where clients on this machine reach the controller that listens on `port`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"{self.config.controller.scheme}://{host}:{port}"


def _read_config(path: Path) -> Config:
    try:
        return Config.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise StartError(f"{path}: {describe(error.errors(include_url=False))}") from None


def _job_id(run_dir: Path) -> str:
    """The id of this run: its directory's name and some chance, made once, by whoever comes first."""
    path = run_dir / "job_id"
    candidate = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        known = path.read_text() if path.exists() else _served_before(run_dir)
        if known:
            return _checked_id(known, path)
        name = _NOT_IN_ID.sub("_", run_dir.name)[:100]
        candidate.write_text(f"{name}-{secrets.token_hex(4)}")
        try:
            os.link(candidate, path)
        except FileExistsError:
            pass  # a controller that starts at the same time was quicker
        except OSError:  # a file system without links, as some mounted object stores: the last one wins
            os.replace(candidate, path)
        return _checked_id(path.read_text(), path)
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        candidate.unlink(missing_ok=True)


def _checked_id(known: str, path: Path) -> str:
    if not _JOB_ID.fullmatch(known):
        raise StartError(f"{path} holds {known[:80]!r}, which is not a job id: remove the file to start the run anew")
    return known


def _served_before(run_dir: Path) -> str:
    """The job id of a run that was served before it had a file of its own."""
    try:
        known = json.loads((run_dir / "controller.json").read_bytes())["job_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return known if isinstance(known, str) else ""


def write_address(settings: ServerSettings, address: str) -> None:
    """Say where the controller is, and keep the job id for the next start."""
    content = {"url": address, "pid": os.getpid(), "job_id": settings.job_id}
    path = settings.run_dir / "controller.json"
    write_text(path, json.dumps(content) + "\n")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `StartError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must get its port back at once
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            detail = f"port {port} of {host} is in use: set controller.port to another one, or to 0 for any"
        else:
            detail = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise StartError(detail) from None
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """uvicorn, with signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: ServerSettings) -> int:
    """Take charge of the job, serve it until a signal comes or the store is lost, and return the exit code.

    While another controller is in charge this one stands by. Raises `StartError`, and what a part of it fails with.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    door = FrontDoor(settings.tokens)
    options = _options(door, settings.config)
    listener = bind(settings.host, settings.port)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = _Server(options)
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(_until_stopped(stop, settings.parent_pid))
    address = settings.url(listener.getsockname()[1])
    opening = asyncio.create_task(open_job(settings, address, door.stand_by))
    job: JobState | None = None
    try:
        await asyncio.wait((serving, stopping, opening), return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            try:
                job = opening.result()
            except StoreUnavailable as error:  # Redis is not there yet, or died while it was read
                log.error("%s", error)
                return STORE_FAILED
            await _serve(job, settings, address, door, {serving, stopping})
        if serving.done():
            serving.result()
    finally:
        _exit_in_time(loop)
        await end((opening, stopping))
        if job is None and not opening.cancelled() and opening.exception() is None:
            job = opening.result()  # it came in the very moment
        if job is not None:
            job.close()
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        if job is not None:
            await job.store.close()
    return _exit_code(job.store.fatal.result() if job is not None and job.store.fatal.done() else None)


def _options(app: ASGIApp, config: Config) -> uvicorn.Config:
    """How uvicorn serves `app`. Raises `StartError` if certificate and key cannot be used."""
    options = uvicorn.Config(
        app,
        http=PatientProtocol.limited(connection_limit()),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        server_header=False,
        headers=ALWAYS,
    )
    if config.controller.tls_cert:
        options.load()
        try:
            options.ssl = server_context(config.controller.tls_cert, config.controller.tls_key)
        except TlsFileError as error:
            raise StartError(f"controller.tls_cert: {error}") from None
    return options


async def open_job(
    settings: ServerSettings, address: str = "", stand_by: Callable[[LockHolder], None] | None = None
) -> JobState:
    """Take charge, however long that takes, and read the job. Raises `StartError`, `StoreUnavailable`.

    `stand_by` is called with the controller that is in charge, again and again; without it, that is an error.
    """
    config = settings.config
    try:
        store, saved = await StateStore.open(
            settings.redis_url,
            prefix=config.redis.key_prefix,
            job_id=settings.job_id,
            password=settings.redis_password,
            require_durable=config.controller.require_durable_redis,
            address=address,
            lock_seconds=config.controller.lock_timeout,
            replace=settings.replace,
            stand_by=stand_by,
        )
    except (Held, UnsuitableServer) as error:
        raise StartError(str(error)) from None
    try:
        job = JobState(config, job_id=settings.job_id, run_dir=settings.run_dir, store=store, saved=saved)
        job.forgive_downtime(store.alive_at)
        job.took_charge()
        await job.save()
    except BaseException as error:
        await store.close()
        if isinstance(error, PromptFileError | OtherSourcesError):
            raise StartError(str(error)) from None
        raise
    return job


async def _serve(
    job: JobState, settings: ServerSettings, address: str, door: FrontDoor, ends: set[asyncio.Task[None]]
) -> None:
    """Answer calls until one of `ends` is done, the store is lost, or the reaper has failed (which raises)."""
    controller = Controller.of(job)
    reaping = controller.reaper.start()
    controller.events.start()
    with contextlib.suppress(StoreUnavailable):  # what people would have read is less than a start
        await controller.samples.restore()
    door.open(create_app(controller, settings.tokens))
    write_address(settings, address)
    gc.collect()
    gc.freeze()  # what is alive now stays: the collector need not look at it again
    log.info("job %s is served at %s (%s)", settings.job_id, address, job.store.holder)
    try:
        waiting: list[asyncio.Future[Any]] = [*ends, job.store.fatal, reaping]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if reaping.done():
            reaping.result()
    finally:
        await controller.reaper.stop()
        await controller.events.stop()


async def _until_stopped(stop: asyncio.Event, parent_pid: int | None) -> None:
    """Return at a signal, or when the process that started this one is gone."""
    while not stop.is_set():
        if parent_pid is not None and os.getppid() != parent_pid:
            log.warning("the parent process %d is gone: shutting down", parent_pid)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PARENT_CHECK):
                await stop.wait()


def _exit_in_time(loop: asyncio.AbstractEventLoop) -> None:
    """From now on the process ends, if need be by force, with the stacks of its threads in the log."""
    exit_after(LEAVE_SECONDS, 1, "LEAVE_SECONDS")
    loop.call_later(LEAVE_SECONDS / 2, _log_pending_tasks)


def _log_pending_tasks() -> None:
    for task in asyncio.all_tasks():
        log.warning("shutdown takes long: %r is still running", task)


def _exit_code(fatal: StateStoreError | None) -> int:
    if fatal is None:
        return 0
    log.error("%s", fatal)
    return FENCED if isinstance(fatal, Fenced) else STORE_FAILED
