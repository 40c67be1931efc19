"""`python -m controller.dashboard RUN…`: the dashboard of run directories, several of them overlaid.

It reads, and changes nothing. It listens on this machine alone, and prints a link with a token made for this start;
SIGINT or SIGTERM ends it. Exit code 2: a directory that cannot be shown, or a port that is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import ASGIApp

from controller.api.auth import USER, AuthMiddleware, JobTokens, require
from controller.api.routes.base import new_router, reply_list
from controller.api.routes.dashboard import sessions, views
from controller.api.routes.samples import MOST_FOUND
from controller.dashboard.pages import Pages
from controller.dashboard.view import RunView
from controller.server import ALWAYS, StartError, bind
from controller.services.errors import install
from schema.util.text import configure_logging
from schema.wire import messages as m
from schema.wire.messages.dashboard import Fault, ShownRun
from schema.wire.sample_file import Order

HOST = "127.0.0.1"
BAD_START = 2
NOT_KEPT = "how many groups were in each state, the staleness of each sample, idle shares, waits for rewards"
"""Only a controller has these until a summary is written."""


class RunFiles(RunView):
    """A run of which nothing is known but its directory."""

    @property
    def name(self) -> str:
        logging = _object(self._json("config.json").get("logging"))
        return str(logging.get("experiment_name") or self.run_dir.name)

    async def overview(self) -> bytes:
        """`Overview` as the run's summary has it; of a run that was killed before it wrote one, by its events."""
        summary = await self._read(lambda: self._json("summary.json"))
        status = _object(summary.get("status"))
        job = status or await self._read(self._job)
        if reason := summary.get("reason"):
            job = {**job, "sentence": f"the run is {summary.get('outcome', 'over')}: {reason}"}
        replicas = summary.get("replicas") if status else self.history.replicas()
        overview = {
            "event": self.history.newest,
            "job": job,
            "ledger": _object(summary.get("ledger")) or None,
            "replicas": replicas if isinstance(replicas, list) else [],
        }
        return to_json(overview, inf_nan_mode="null")

    def _job(self) -> dict[str, Any]:
        """Return as much of a `JobStatus` as there is."""
        history, last = self.history, self.steps.last
        said = history.health.job.get("text", "")
        scores, losses = list(history.validations.items()), list(history.losses.items())
        ages = self.steps.curve("staleness_max")
        return {
            "name": self.name,
            "phase": history.health.job.get("phase", "unknown"),
            "version": history.version,
            "step": 0 if last is None else last.step + 1,
            "metrics": {} if last is None else last.metrics,
            "reward": self.steps.newest("reward_mean"),
            "validation": {"version": losses[-1][0], "loss": losses[-1][1]}
            if losses
            else {"version": scores[-1][0], "score_mean": scores[-1][1]}
            if scores
            else None,
            "samples_per_s": self.steps.overall().samples_per_s,
            "tokens_per_s": self.steps.overall().tokens_per_s,
            "last_error": history.health.job.get("error"),
            "alarms": [{"name": name, "text": text} for name, text in history.health.alarms.items()],
            "sentence": f"no summary was written: the run is alive, or was killed. Its last word: {said or 'none'}",
            "updated_at": history.ended,
            "faults": dict(map(_counted, history.health.faults.values())),
            "max_staleness": max((age for _, age in ages if age is not None), default=None),
            "unknown": NOT_KEPT,
        }


def _object(value: Any) -> dict[str, Any]:
    """Return the object; {} for what is none, in a file that is damaged, or of another version."""
    return value if isinstance(value, dict) else {}


def _counted(fault: Fault) -> tuple[str, str]:
    if fault.kind.startswith("dropped: "):
        return f"groups {fault.kind}", str(fault.count)
    return f"reward: {fault.kind}", f"at least {fault.count}"


def run_calls(run: RunFiles, prefix: str) -> APIRouter:
    """Answer what else the pages ask of a run, as the routes of a job answer it."""
    api = new_router("dashboard", prefix)

    @api.get("/samples")
    async def samples(
        request: Request,
        kind: m.GroupKind | None = None,
        step: Annotated[int | None, Query(ge=0, lt=2**53)] = None,
        order: Order | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_FOUND)] = 20,
    ) -> Response:
        require(request, USER)
        return reply_list(m.SampleRecord, await run.samples(kind, step, order, limit))

    @api.get("/config")
    async def config(request: Request) -> Response:
        require(request, USER)
        return Response(to_json(await run.config(), inf_nan_mode="null"), media_type="application/json")

    return api


def create_app(runs: Sequence[RunFiles], token: str) -> ASGIApp:
    """The pages, and the calls of each run below `/runs/<number>/v1`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    install(app)
    shown = [ShownRun(name=name, base=f"/runs/{number}/v1", live=False) for number, name in enumerate(names(runs))]
    routers = [sessions(shown)]
    for run, link in zip(runs, shown, strict=True):
        routers += [views(run, link.base), run_calls(run, link.base)]
    for router in routers:
        app.router.routes.extend(router.routes)
    tokens = JobTokens({"user": token, "rollout": secrets.token_hex(32), "policy": secrets.token_hex(32)})
    return Pages(AuthMiddleware(app, tokens))


def names(runs: Sequence[RunFiles]) -> list[str]:
    """Names of experiments; where several runs have the same, with the part of their paths that differs."""
    experiments = [run.name for run in runs]
    alike = Counter(experiments)
    shared = {name: os.path.commonpath([run.run_dir for run in runs if run.name == name]) for name in alike}
    return [
        name if alike[name] == 1 else f"{name} ({run.run_dir.relative_to(shared[name])})"
        for name, run in zip(experiments, runs, strict=True)
    ]


def named(paths: Sequence[Path]) -> list[RunFiles]:
    """The runs of these directories. Raises `StartError`."""
    for path in paths:
        if not (path / "config.json").is_file():
            raise StartError(f"{path} holds no run: name a run directory, <train.output_dir>/<timestamp>")
        if not (os.access(path, os.R_OK | os.X_OK) and os.access(path / "config.json", os.R_OK)):
            raise StartError(f"{path} cannot be read: ask as the user who started the run")
    return [RunFiles(path.absolute()) for path in paths]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, serve until a signal comes, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m controller.dashboard", description="Runs in a browser.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any free one")
    options = parser.parse_args(arguments)
    configure_logging()
    try:
        runs, listener = named(options.runs), bind(HOST, options.port)
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_START
    token = secrets.token_hex(32)
    config = uvicorn.Config(
        create_app(runs, token),
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        headers=ALWAYS,
        timeout_graceful_shutdown=1,
    )
    paths = ", ".join(str(run.run_dir) for run in runs)
    link = f"http://{HOST}:{listener.getsockname()[1]}/#token={token}"
    sys.stdout.write(f"{paths}\n{link}\nCtrl-C ends it\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve([listener]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
