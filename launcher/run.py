"""`cosmos-launch --config run.toml`: from a file to a finished job.

    load ─▶ preflight ─▶ run directory, lock, tokens ─▶ Job (launcher.job) ─▶ table, exit code

Everything up to the run directory changes nothing and ends with exit code 2 if something is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import redis_server
from launcher.errors import LaunchError
from launcher.machine import Machine, find_machine
from launcher.placement import place
from launcher.preflight import check_machine, check_redis
from launcher.restarts import EXIT_CONFIG
from launcher.rundir import RunDir, Tokens, choose
from schema.config import Config, ConfigError, Problem, check_warnings
from schema.config.reading.load import load

if TYPE_CHECKING:
    from launcher.screen import Screen

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - where to reach such a listener


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that can run on this machine."""

    config: Config
    machine: Machine
    warnings: list[Problem]


def check(paths: Sequence[Path], overrides: Sequence[str], env: Mapping[str, str]) -> Checked:
    """Load and check everything that can be checked before a process starts. Raises ConfigError."""
    loaded = load(paths, overrides, env)
    config, machine = loaded.config, find_machine(env)
    findings, redis = check_machine(config, machine), check_redis(config, env)
    problems = findings.problems + redis.problems
    if problems:
        raise ConfigError(loaded.placed(problems))
    warnings = check_warnings(config) + findings.warnings + redis.warnings
    return Checked(config, machine, loaded.warnings + loaded.placed(warnings))


def launch(paths: Sequence[Path], overrides: Sequence[str], *, resume: bool, env: Mapping[str, str]) -> int:
    """Run a job to its end and return the exit code. Raises ConfigError, LaunchError before anything starts."""
    from launcher.screen import open_screen

    checked = check(paths, overrides, env)
    if checked.config.is_evaluation and resume:
        raise LaunchError(
            "an evaluation has nothing to resume", "leave --resume out: it is quick to run again"
        )
    wants_resume = not checked.config.is_evaluation and (resume or checked.config.train.resume is True)
    run, continued = choose(checked.config, wants_resume, time.time())
    run.make()
    run.lock()
    screen = open_screen()
    try:
        for warning in checked.warnings:
            screen.event("warning: " + warning.render().replace("\n    ", "; "))
        if wants_resume and not continued:
            screen.event(f"nothing to resume in {checked.config.train.output_dir}: starting afresh")
        if continued:
            run.wait_until_left(checked.config.launcher.shutdown_timeout)
        screen.event(f"{'continuing' if continued else 'run directory'} {run.path}")
        if checked.config.is_evaluation:
            from launcher.evaluation import run_evaluation

            return run_evaluation(checked.config, run, env, screen)
        return _run(checked, run, continued, screen, env)
    finally:
        screen.close()
        run.unlock()


def _run(checked: Checked, run: RunDir, continued: bool, screen: Screen, env: Mapping[str, str]) -> int:
    import asyncio  # a dry run, which loads this module too, need not wait for it

    from launcher.job import Job
    from launcher.plan import Plan
    from launcher.report import Result
    from launcher.supervisor import free_port

    config = checked.config
    before = run.written_config()
    written = run.write_config(config)
    tokens = Tokens.fresh()
    run.write_tokens(tokens)
    host = ANY_ADDRESS.get(config.controller.host, config.controller.host)
    port = config.controller.port or free_port(host)
    plan = Plan(
        config=config,
        run=run,
        tokens=tokens,
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        port=port,
        redis=redis_server.named(config.redis, env) or redis_server.embedded(run.redis),
        workers=place(config, checked.machine),
        reuse_data=continued and _same_data(before, written, run),
        continued=continued,
        env=env,
    )

    async def main() -> Result:
        return await Job(plan, screen).run()

    result = asyncio.run(main())
    screen.table(result.summary())
    if result.outcome != "finished" and result.exit_code != EXIT_CONFIG:
        screen.write("The same command with --resume goes on from here.")
    return result.exit_code


def _same_data(before: Mapping[str, Any] | None, now: Mapping[str, Any], run: RunDir) -> bool:
    """Whether the data that an earlier start prepared can be used again: nothing but the resumption differs."""
    if before is None or not (run.path / "data" / "train.safetensors").exists():
        return False

    def relevant(data: Mapping[str, Any]) -> dict[str, Any]:
        return {**data, "train": {**data["train"], "resume": None}, "controller": None, "launcher": None}

    return relevant(before) == relevant(now)
