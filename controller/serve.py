"""The process around the controller: settings, socket, server, signals, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import uvicorn
from pydantic import ValidationError

from controller.app import create_app
from controller.auth import Tokens
from controller.job import Job
from controller.problems import describe_validation
from controller.service import Controller
from controller.store import Fenced, StateStore, StoreError, StoreUnavailable, UnsuitableServer
from schema.config import Config
from schema.wire.prompts import PromptFileError

log = logging.getLogger(__name__)

FENCED = 3
STORE_FAILED = 1
SHUTDOWN_SECONDS = 5
"""For requests that are under way; long-polls are ended at once."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pauses between two calls of a replica, so that connections are used again."""
PARENT_CHECK = 1.0


class StartError(Exception):
    """The controller cannot start; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything from outside: config, job id, addresses and secrets."""

    config: Config
    run_dir: Path
    job_id: str
    host: str
    port: int
    redis_url: str
    redis_password: str | None
    tokens: Tokens
    parent_pid: int | None = None

    @classmethod
    def read(cls, run_dir: Path, host: str | None, port: int | None, environ: Mapping[str, str]) -> Self:
        """From the run directory and the environment. Raises `StartError`."""
        config = _read_config(run_dir / "config.json")
        url = environ.get("COSMOS_REDIS_URL") or config.redis.url
        if not url:
            raise StartError("no Redis is named: set COSMOS_REDIS_URL (unix://…, redis://…) or redis.url")
        names = {
            "user": "COSMOS_TOKEN_USER",
            "rollout": "COSMOS_TOKEN_ROLLOUT",
            "policy": "COSMOS_TOKEN_POLICY",
        }
        missing = [name for name in names.values() if not environ.get(name)]
        if missing:
            raise StartError(f"no token: set {', '.join(missing)}")
        try:
            tokens = Tokens(
                {
                    "user": environ[names["user"]],
                    "rollout": environ[names["rollout"]],
                    "policy": environ[names["policy"]],
                }
            )
        except ValueError as error:
            raise StartError(str(error)) from None
        parent = environ.get("COSMOS_PARENT_PID", "")
        return cls(
            config=config,
            run_dir=run_dir,
            job_id=_job_id(run_dir),
            host=host or config.controller.host,
            port=config.controller.port if port is None else port,
            redis_url=url,
            redis_password=environ.get("COSMOS_REDIS_PASSWORD") or None,
            tokens=tokens,
            parent_pid=int(parent) if parent.isdigit() else None,
        )


def _read_config(path: Path) -> Config:
    try:
        return Config.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise StartError(f"{path}: {describe_validation(error.errors(include_url=False))}") from None


def _job_id(run_dir: Path) -> str:
    """The id under which this run was served before, else a new one: the directory's name and some chance."""
    try:
        known = json.loads((run_dir / "controller.json").read_bytes())["job_id"]
        if isinstance(known, str) and known:
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass  # first start, or the file was damaged: a new id
    return f"{run_dir.name}-{secrets.token_hex(4)}"


def write_address(settings: Settings, port: int) -> None:
    """Say where the controller is, and keep the job id for the next start."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    content = {"url": f"http://{host}:{port}", "pid": os.getpid(), "job_id": settings.job_id}
    path = settings.run_dir / "controller.json"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content) + "\n")
    os.replace(temporary, path)


def _bind(host: str, port: int) -> socket.socket:
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
    """uvicorn, with signals left to us and a call when it takes connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


async def serve(settings: Settings) -> int:
    """Take the job over, serve it until a signal comes or the store is lost, and return the exit code.

    Raises `StartError`.
    """
    listener = _bind(settings.host, settings.port)
    try:
        job = await _open_job(settings)
    except BaseException:
        listener.close()
        raise
    controller = Controller.of(job, settings.tokens)
    port = listener.getsockname()[1]

    def started() -> None:
        write_address(settings, port)
        gc.collect()
        gc.freeze()  # what is alive now stays: the collector need not look at it again
        log.info("job %s is served on %s:%d (epoch of the store taken)", settings.job_id, settings.host, port)

    options = uvicorn.Config(
        create_app(controller),
        http="httptools",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    return await _run(controller, _Server(options, started), listener, settings)


async def _open_job(settings: Settings) -> Job:
    config = settings.config
    try:
        store, saved = await StateStore.open(
            settings.redis_url,
            prefix=config.redis.key_prefix,
            job_id=settings.job_id,
            password=settings.redis_password,
            require_durable=config.controller.require_durable_redis,
        )
    except (StoreUnavailable, UnsuitableServer) as error:
        raise StartError(str(error)) from None
    try:
        job = Job(config, job_id=settings.job_id, run_dir=settings.run_dir, store=store, saved=saved)
        job.forgive_downtime(await store.alive_at())
        await job.save()
    except PromptFileError as error:
        await store.close()
        raise StartError(str(error)) from None
    return job


async def _run(controller: Controller, server: _Server, listener: socket.socket, settings: Settings) -> int:
    job, loop = controller.job, asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    controller.upkeep.start()
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(_until_stopped(stop, settings.parent_pid))
    try:
        ends: list[asyncio.Future[Any]] = [serving, stopping, job.store.fatal]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        job.close()
        server.should_exit = True
        await asyncio.gather(serving, stopping, return_exceptions=True)
        await controller.upkeep.stop()
        await job.store.close()
    return _exit_code(job.store.fatal.result() if job.store.fatal.done() else None)


async def _until_stopped(stop: asyncio.Event, parent_pid: int | None) -> None:
    """Return at a signal, or when the process that started this one is gone."""
    while not stop.is_set():
        if parent_pid is not None and os.getppid() != parent_pid:
            log.warning("the parent process %d is gone: ending", parent_pid)
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), PARENT_CHECK)


def _exit_code(fatal: StoreError | None) -> int:
    if fatal is None:
        return 0
    log.error("%s", fatal)
    return FENCED if isinstance(fatal, Fenced) else STORE_FAILED
